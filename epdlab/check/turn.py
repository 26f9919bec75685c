"""One move being taken: what follows from it in all processes, in memory and on the wire.

A `State` is a quiet moment, and is never changed: a `Turn` starts from a copy of one and ends in another. Messages
between processes, the bytes of a write and the timers pass through here; decisions do not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ..steps import Event, Phase, Point
from .footprints import Thing, Touched, add
from .model_engine import BASE, FAILED, OK, Mode, Regions, cells, covered
from .outcome import Gate, Input, Message, Outcome, Writing
from .remembered import History
from .scenario import GONE, Move

if TYPE_CHECKING:
    from .world import World

About = tuple[str | None, int | None, int | None]


class Held(NamedTuple):
    """A step at the gate of a process; `birth` is a bit mask of the moves it stems from."""

    process: int
    gate: Gate
    birth: int


class Timer(NamedTuple):
    """A timer that is set."""

    due: float
    process: int
    number: int
    name: str
    seconds: float
    labels: tuple[tuple[str, Any], ...]


class Flying(NamedTuple):
    """A write in flight: who writes to whom, and whether it can still succeed."""

    writing: Writing
    process: int
    peer: int
    failed: bool
    late: bool = False


@dataclass(slots=True)
class State:
    """A quiet moment. Its parts are replaced, never changed.

    Attributes:
        histories, causes, memory, regions: one per process; causes tells the moves that each input stems from.
        waiting: the steps that wait at a gate, in the order they came.
        sockets: whose each open port is. posts: those not answered yet. ended: requests that are over.
        writes: in flight. late: writes that have answered and will land. moves: how many there were.
    """

    histories: tuple[History, ...]
    causes: tuple[tuple[int, ...], ...]
    memory: tuple[bytes, ...]
    regions: tuple[Regions, ...]
    waiting: dict[Move, Held] = field(default_factory=dict)
    timers: tuple[Timer, ...] = ()
    sockets: dict[int, int] = field(default_factory=dict)
    posts: frozenset[tuple[int, int]] = frozenset()
    writes: dict[About, Flying] = field(default_factory=dict)
    late: dict[Move, Flying] = field(default_factory=dict)
    ended: frozenset[tuple[int, int]] = frozenset()
    dead: frozenset[int] = frozenset()
    now: float = 0.0
    moves: int = 0
    struck: bool = False
    claim: dict[str, Any] | None = None

    def copy(self) -> State:
        return State(
            self.histories,
            self.causes,
            self.memory,
            self.regions,
            self.waiting,
            self.timers,
            self.sockets,
            self.posts,
            self.writes,
            self.late,
            self.ended,
            self.dead,
            self.now,
            self.moves,
            self.struck,
            self.claim,
        )


def afresh(state: State) -> State:
    """The same moment as the first of a search: no move lies before it."""
    fresh = state.copy()
    fresh.moves = 0
    fresh.causes = tuple((0,) * len(causes) for causes in state.causes)
    fresh.waiting = {move: held._replace(birth=0) for move, held in state.waiting.items()}
    return fresh


T = TypeVar("T")


def _replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


class Turn:
    """One move being taken: the state it leads to, the events, and what it touched."""

    __slots__ = ("_inputs", "cause", "defects", "events", "state", "touched", "world")

    def __init__(self, world: World, state: State, cause: int) -> None:
        self.world, self.state, self.cause = world, state.copy(), cause
        self.events: list[Event] = []
        self.touched: Touched = {}
        self.defects: list[str] = []
        self._inputs: deque[tuple[int, Input, int]] = deque()

    def touch(self, thing: Thing, mode: Mode) -> None:
        add(self.touched, thing, mode)

    def note(self, process: int, step: str, phase: Phase, **labels: Any) -> None:
        """Record what no process records itself."""
        self.events.append(Event(0, self.world.names[process], step, phase, **labels))

    # ---- processes -----------------------------------------------------------------------------------------------

    def feed(self, process: int, happens: Input) -> None:
        """Something happens to a process, and whatever follows from it, in all processes."""
        inputs = self._inputs
        inputs.append((process, happens, self.cause))
        while inputs:
            process, happens, cause = inputs.popleft()
            if process not in self.state.dead:
                self._feed(process, happens, cause)

    def _feed(self, process: int, happens: Input, cause: int) -> None:
        state = self.state
        history = self.world.processes[process].feed(state.histories[process], happens)
        state.histories = _replaced(state.histories, process, history)
        state.causes = _replaced(state.causes, process, (*state.causes[process], cause))
        out = history.outcome
        self.events += out.events
        if out.touched:
            self._touch_all(out.touched)
        if out.gone:
            gone = {(process, number) for number in out.gone}
            state.waiting = {m: h for m, h in state.waiting.items() if (h.process, h.gate.number) not in gone}
        if out.gates:
            self._gates(process, out.gates)
        if out.timers or out.cancelled:
            self._timers(process, out)
        for address, data in out.pokes:
            self.poke(process, address, data)
        for address, nbytes in out.regions:
            self._region(process, address, nbytes)
        if out.writing is not None:
            self._begin_write(process, out.writing)
        if out.ended:
            state.ended |= {(process, number) for number in out.ended}
        self.defects += out.defects
        for message in out.messages:
            self._MESSAGES[message.kind](self, process, message)

    def _touch_all(self, touched: Touched) -> None:
        if self.touched:
            for thing, mode in touched.items():
                add(self.touched, thing, mode)
        else:
            self.touched = dict(touched)

    def _gates(self, process: int, gates: list[Gate]) -> None:
        waiting = dict(self.state.waiting)
        for gate in gates:
            waiting[gate.move] = Held(process, gate, self._stems_from(process, gate.cause))
        self.state.waiting = waiting

    def _stems_from(self, process: int, cause: int) -> int:
        """The moves that inputs of a process (a bit mask) stem from (a bit mask)."""
        causes, moves = self.state.causes[process], 0
        while cause:
            moves |= causes[cause.bit_length() - 1]
            cause ^= 1 << cause.bit_length() - 1
        return moves

    def _timers(self, process: int, out: Outcome) -> None:
        state, cancelled = self.state, out.cancelled
        kept = [t for t in state.timers if t.process != process or t.number not in cancelled]
        new = [Timer(state.now + s.seconds, process, *s) for s in out.timers if s.number not in cancelled]
        state.timers = (*kept, *new)

    def _region(self, process: int, address: int, nbytes: int) -> None:
        regions = {start: size for start, size in self.state.regions[process].items() if start != address}
        if nbytes:
            regions[address] = nbytes
        self.state.regions = _replaced(self.state.regions, process, regions)

    def poke(self, process: int, address: int, data: bytes) -> None:
        """Bytes of a process's memory change."""
        at, memory = address - BASE, self.state.memory[process]
        changed = memory[:at] + data + memory[at + len(data) :]
        self.state.memory = _replaced(self.state.memory, process, changed)

    def fire(self, timer: Timer, at_once: bool) -> None:
        """A timer fires; `at_once`: the step it leads to is not held."""
        self.state.timers = tuple(other for other in self.state.timers if other is not timer)
        self.feed(timer.process, ("timer", timer.number, at_once))

    # ---- messages ------------------------------------------------------------------------------------------------

    def _post(self, process: int, message: Message) -> None:
        cause = self._stems_from(process, message.cause)
        if self.world.mortal:
            self.touch(("process",), "r")
        if 0 in self.state.dead:
            self._inputs.append((process, ("answer", message.number, GONE), cause))
            return
        self.state.posts |= {(process, message.number)}
        path = "/" + message.where.rpartition("/")[2]
        self._inputs.append((0, ("request", path, message.payload, (process, message.number)), cause))

    def _answer(self, process: int, message: Message) -> None:
        if message.number in self.state.posts:
            client, number = message.number
            self.state.posts -= {message.number}
            self.touch(("inbox", self.world.names[client]), "c")
            self._inputs.append((client, ("answer", number, message.payload), self._stems_from(process, message.cause)))

    def _push(self, process: int, message: Message) -> None:
        cause, port = self._stems_from(process, message.cause), int(message.where.rpartition(":")[2])
        self.touch(("port", port), "w")
        open_ = port in self.state.sockets
        if open_:
            self._inputs.append((self.state.sockets[port], ("frame", port, message.payload), cause))
        self._inputs.append((process, ("pushed", message.number, open_), cause))

    def _open(self, process: int, message: Message) -> None:
        self.state.sockets = {**self.state.sockets, message.number: process}

    def _close(self, process: int, message: Message) -> None:
        self.state.sockets = {port: owner for port, owner in self.state.sockets.items() if port != message.number}

    _MESSAGES: ClassVar = {"post": _post, "answer": _answer, "push": _push, "open": _open, "close": _close}

    # ---- writes --------------------------------------------------------------------------------------------------

    def _begin_write(self, process: int, writing: Writing) -> None:
        peer = self.world.names.index(writing.session)
        flying = Flying(writing, process, peer, False)
        flying = flying._replace(failed=not self._possible(flying))
        self._touch_write(flying)
        if not flying.failed:
            self._land(flying, 0, writing.nbytes // 2)
        self.state.writes = {**self.state.writes, about(writing.point): flying}

    def end_write(self, point: Point, late: bool) -> int:
        """The write's code: RDMA's rule once more. A late one answers -1, and lands by a move of its own."""
        flying = self.state.writes[about(point)]
        self.state.writes = {key: other for key, other in self.state.writes.items() if key != about(point)}
        self._touch_write(flying)
        if flying.failed or not self._possible(flying):
            return FAILED
        if late:
            self.lands_late(flying)
            return FAILED
        self._land(flying, flying.writing.nbytes // 2, flying.writing.nbytes)
        return OK

    def lands_late(self, flying: Flying) -> None:
        """From now on the rest of a write's bytes land by a move of their own."""
        point = flying.writing.point
        move = Move(point.process, "transfer.land", "note", point.req, point.part, point.rank, 0)
        self.state.late = {**self.state.late, move: flying}

    def land(self, move: Move) -> None:
        """The rest of a late write lands, unless its peer has withdrawn the destination. Nobody checks its source."""
        flying, self.state.late = self.state.late[move], {m: f for m, f in self.state.late.items() if m != move}
        self._touch_write(flying)
        writing, point = flying.writing, flying.writing.point
        if not flying.failed and covered(self.state.regions[flying.peer], writing.target, writing.nbytes):
            self._land(flying, writing.nbytes // 2, writing.nbytes)
            labels = {"req": point.req, "part": point.part, "rank": point.rank, "region": point.region}
            span = {"address": writing.source, "bytes": writing.nbytes, "target": writing.target}
            self.note(flying.process, "transfer.land", "note", **labels, **span)

    def _possible(self, flying: Flying) -> bool:
        """RDMA's rule: one live region over each side."""
        writing = flying.writing
        source = covered(self.state.regions[flying.process], writing.source, writing.nbytes)
        return source and covered(self.state.regions[flying.peer], writing.target, writing.nbytes)

    def _land(self, flying: Flying, start: int, stop: int) -> None:
        """Bytes [start, stop) arrive, as the source holds them now."""
        at = flying.writing.source - BASE
        self.poke(flying.peer, flying.writing.target + start, self.state.memory[flying.process][at + start : at + stop])

    def _touch_write(self, flying: Flying) -> None:
        writing, names = flying.writing, self.world.names
        for cell in cells(writing.source, writing.nbytes):
            self.touch(("regions", names[flying.process], cell), "r")
        for cell in cells(writing.target, writing.nbytes):
            self.touch(("regions", names[flying.peer], cell), "r")
            self.touch(("memory", names[flying.peer], cell), "w")


def about(point: Point) -> About:
    """Which request, part and rank a step is about."""
    return point.req, point.part, point.rank
