"""What every process holds at any point of a trace: requests, sockets, embeddings, regions, slots, writes in flight.

`WorldState` follows events one by one; `WorldState.at` jumps to a point. Its text shows names instead of addresses,
and marks what changed since another point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epdlab.steps import Event

from .spans import kind_of, lanes, short, size, times

Line = tuple[str, str, str]

KINDS = ("requests", "sockets", "embeddings", "regions", "slots")
WRITES = "writes"
ENDED = ("consumed", "failed")


@dataclass(slots=True)
class Held:
    """One thing a process holds.

    Attributes:
        name: stable, such as `enc0.mr#1` or `q1 part 0`.
        state: a word of its lifecycle.
        owner: the request (and part) it belongs to.
    """

    name: str
    state: str
    nbytes: int | None = None
    address: int | None = None
    owner: str = ""


@dataclass(slots=True)
class ProcessState:
    """One process: what it said of itself, and what it holds, by kind and name."""

    facts: dict[str, object] = field(default_factory=dict)
    requests: dict[str, Held] = field(default_factory=dict)
    sockets: dict[str, Held] = field(default_factory=dict)
    embeddings: dict[str, Held] = field(default_factory=dict)
    regions: dict[str, Held] = field(default_factory=dict)
    slots: dict[str, Held] = field(default_factory=dict)
    alive: bool = True

    def all(self, kind: str) -> list[Held]:
        """Everything of one of `KINDS`."""
        held: dict[str, Held] = getattr(self, kind)
        return list(held.values())


class WorldState:
    """The state of all processes after some events of a trace."""

    def __init__(self) -> None:
        self.processes: dict[str, ProcessState] = {}
        self.flying: list[Event] = []
        self._parts: dict[tuple[str, str], int] = {}
        self._acked: dict[tuple[str, str], set[int | None]] = {}

    @classmethod
    def at(cls, events: Sequence[Event], index: int | None = None) -> WorldState:
        """The state after the event at `index`; after the last one for None."""
        world = cls()
        for event in events if index is None else events[: index + 1]:
            world.feed(event)
        return world

    def feed(self, event: Event) -> None:
        """Follow one event."""
        process = self.processes.setdefault(event.process, ProcessState())
        if event.phase == "begin" and event.fault == "kill":
            self.processes[event.process] = ProcessState(process.facts, alive=False)
            self.flying = [began for began in self.flying if began.process != event.process]
            return
        handler = _HANDLERS.get((event.step, event.phase))
        if handler is not None:
            handler(self, process, event)

    # ---- memory --------------------------------------------------------------------------------------------------

    def _registered(self, process: ProcessState, event: Event) -> None:
        self._put(process.regions, event, "live" if event.result == 0 else f"refused {kind_of(event.result)}")

    def _deregistered(self, process: ProcessState, event: Event) -> None:
        """The engine goes by address: whichever live region starts there is gone; a refused one is done with."""
        live = [held for held in process.regions.values() if held.state == "live" and held.address == event.address]
        for held in live if event.result == 0 else ():
            del process.regions[held.name]
        own = process.regions.get(event.region or "")
        if own is not None and own.state != "live":
            del process.regions[own.name]

    def _allocates(self, process: ProcessState, event: Event) -> None:
        self._request(process, event, "allocating")

    def _allocated(self, process: ProcessState, event: Event) -> None:
        if event.result == "ok":
            self._put(process.slots, event, "held")
            self._request(process, event, "sending")

    def _quarantined(self, process: ProcessState, event: Event) -> None:
        if event.region in process.slots:
            process.slots[event.region].state = "quarantined"

    def _freed(self, process: ProcessState, event: Event) -> None:
        process.slots.pop(event.region or "", None)

    def _ready(self, process: ProcessState, event: Event) -> None:
        name = _part_of(event)
        process.embeddings[name] = Held(name, "held", event.bytes, event.address)

    def _dropped(self, process: ProcessState, event: Event) -> None:
        process.embeddings.pop(_part_of(event), None)

    def _put(self, where: dict[str, Held], event: Event, state: str) -> None:
        name, owner = event.region or "?", "" if event.req is None else _part_of(event)
        where[name] = Held(name, state, event.bytes, event.address, owner)

    # ---- writes --------------------------------------------------------------------------------------------------

    def _write_begins(self, process: ProcessState, event: Event) -> None:
        self.flying.append(event)

    def _write_ends(self, process: ProcessState, event: Event) -> None:
        about = (event.process, event.req, event.part, event.rank, event.region)
        for at, began in enumerate(self.flying):
            if (began.process, began.req, began.part, began.rank, began.region) == about:
                del self.flying[at]
                return

    def writes_of(self, name: str) -> list[Held]:
        """Writes in flight from a process."""
        found: dict[str, Held] = {}
        for event in (event for event in self.flying if event.process == name):
            what = f"{_part_of(event)} to rank{event.rank}"
            while what in found:
                what += "'"
            found[what] = Held(what, f"in flight from {short(event.region, name)}", event.bytes, event.address)
        return list(found.values())

    def needing(self, name: str, held: Held) -> int:
        """How many writes in flight read from a live region of a process, or land in its region or slot."""
        if held.address is None or held.nbytes is None or held.state.startswith("refused"):
            return 0
        ends = [event.address for event in self.flying if event.process == name]
        ends += [event.target for event in self.flying if f"rank{event.rank}" == name]
        return sum(end is not None and 0 <= end - held.address < held.nbytes for end in ends)

    # ---- requests ------------------------------------------------------------------------------------------------

    def _started(self, process: ProcessState, event: Event) -> None:
        """A new request; those that ended before are forgotten."""
        for name in [name for name, held in process.requests.items() if held.state.startswith(ENDED)]:
            del process.requests[name]
        key = (event.process, event.req or "?")
        self._parts[key], self._acked[key] = int((event.data or {}).get("parts", 0)), set()
        process.requests[key[1]] = Held(key[1], "encoding")
        process.sockets[_acks(event)] = Held(_acks(event), "open")

    def _pulled(self, process: ProcessState, event: Event) -> None:
        key = (event.process, event.req or "?")
        if event.result != "ok" or key not in self._acked:
            return
        self._acked[key].add(event.part)
        done, parts = len(self._acked[key]), self._parts[key]
        self._request(process, event, "landed" if done >= parts else f"sending, {done} of {parts} acked")
        if done >= parts:
            process.sockets.pop(_acks(event), None)

    def _finished(self, process: ProcessState, event: Event) -> None:
        self._request(process, event, "consumed" if event.result == "ok" else f"failed: {kind_of(event.result)}")
        process.sockets.pop(_acks(event), None)

    def _request(self, process: ProcessState, event: Event, state: str) -> None:
        if event.req in process.requests:
            process.requests[event.req].state = state

    def _introduced(self, process: ProcessState, event: Event) -> None:
        process.facts = dict(event.data or {})

    # ---- text ----------------------------------------------------------------------------------------------------

    def lines(self, addresses: bool = False) -> dict[Line, str]:
        """(process, kind, name) -> what stands there, in the order it is shown."""
        found: dict[Line, str] = {}
        for name in self.names():
            for kind in KINDS:
                for held in self.processes[name].all(kind):
                    writes = self.needing(name, held) if kind in ("regions", "slots") else 0
                    found[(name, kind, short(held.name, name))] = _describe(held, writes, addresses)
            for held in self.writes_of(name):
                found[(name, WRITES, held.name)] = _describe(held, 0, addresses)
        return found

    def diff(self, before: WorldState) -> dict[Line, str]:
        """What changed since `before`: `+` new, `~` other, `-` gone, by (process, kind, name)."""
        old, new = before.lines(), self.lines()
        marks = {key: "+" if key not in old else "~" for key, text in new.items() if old.get(key) != text}
        return marks | {key: "-" for key in old if key not in new}

    def text(self, before: WorldState | None = None, addresses: bool = False) -> str:
        """All of it, one line per thing; with `before`, what changed is marked `+`, `~` or `-`."""
        lines = self.lines(addresses)
        marks: dict[Line, str] = {} if before is None else self.diff(before)
        if before is not None:
            lines |= {key: text for key, text in before.lines(addresses).items() if marks.get(key) == "-"}
        out: list[str] = []
        for name in self.names():
            process = self.processes[name]
            out.append(f"{name} {process.facts.get('role', '')}".rstrip() + ("" if process.alive else " (killed)"))
            mine = [key for kind in (*KINDS, WRITES) for key in lines if key[:2] == (name, kind)]
            out += [f"{marks.get(key, ' ')} {key[1]:<10} {key[2]:<20} {lines[key]}" for key in mine]
            out += ["  holds nothing"] if not mine else []
        return "\n".join(out)

    def names(self) -> list[str]:
        """The processes, in the order the drawings have them."""
        return lanes(Event(0, name, "process.start", "note") for name in self.processes)

    def __repr__(self) -> str:
        held = {kind: sum(len(p.all(kind)) for p in self.processes.values()) for kind in KINDS}
        held[WRITES] = len(self.flying)
        return f"WorldState({', '.join(times(n, kind) for kind, n in held.items() if n)})"

    def __str__(self) -> str:
        return self.text()


def _part_of(event: Event) -> str:
    return f"{event.req}" if event.part is None else f"{event.req} part {event.part}"


def _acks(event: Event) -> str:
    return f"acks of {event.req}"


def _describe(held: Held, writes: int, addresses: bool) -> str:
    words = [held.state]
    if held.nbytes is not None:
        words.append(size(held.nbytes))
    if held.owner:
        words.append(f"for {held.owner}")
    if writes:
        words.append(f"{times(writes, 'writes')} in flight")
    if addresses and held.address is not None:
        words.append(f"at {held.address:#x}")
    return "  ".join(words)


_HANDLERS = {
    ("process.start", "note"): WorldState._introduced,
    ("mr.register", "end"): WorldState._registered,
    ("mr.deregister", "end"): WorldState._deregistered,
    ("landing.alloc", "begin"): WorldState._allocates,
    ("landing.alloc", "end"): WorldState._allocated,
    ("landing.quarantine", "end"): WorldState._quarantined,
    ("landing.free", "end"): WorldState._freed,
    ("embedding.ready", "note"): WorldState._ready,
    ("embedding.drop", "end"): WorldState._dropped,
    ("transfer.write", "begin"): WorldState._write_begins,
    ("transfer.write", "end"): WorldState._write_ends,
    ("request.start", "note"): WorldState._started,
    ("ack.pull", "end"): WorldState._pulled,
    ("request.finish", "note"): WorldState._finished,
}
