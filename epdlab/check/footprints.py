"""What a move touches: the things it reads ("r"), changes ("w"), or changes in a way that commutes ("c").

Two moves are independent, and their order does not matter, if nothing is touched by both, or only in one same mode
that is "r" or "c". A join ("j") is a change that waited for everybody who touched the thing with "c". The ports of a
machine say what they touch (memory, regions, sockets, replies). This module adds what happens inside sender and
receiver, where the tasks of one process share state, and what the judge of a trace compares across processes.
Over-stating a footprint costs time; under-stating one loses orders: a test holds the reduced search against the full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..encode_server import EmbeddingData, MMEncoder
from ..landing import LandingPool
from ..receiver import MMReceiver
from ..rules import Rule
from ..steps import Event, Point
from .model_engine import Mode, Touch, cells
from .scenario import ENCODER, Scenario

Thing = tuple[object, ...]
Touched = dict[Thing, Mode]


def independent(one: Mapping[Thing, Mode], other: Mapping[Thing, Mode]) -> bool:
    """Whether the order of two moves does not matter."""
    for thing, mode in one.items():
        also = other.get(thing)
        if also is not None and (also != mode or mode in "wj"):
            return False
    return True


def add(touched: Touched, thing: Thing, mode: Mode) -> None:
    """Touch a thing once more: two different modes make a change."""
    if touched.setdefault(thing, mode) != mode:
        touched[thing] = "w"


class Ledger:
    """What a machine keeps of one input: the events, what was touched, and what was written into its memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.touched: Touched = {}
        self.pokes: list[tuple[int, bytes]] = []

    def poke(self, address: int, data: bytes) -> None:
        self.pokes.append((address, data))

    def record(self, event: Event) -> None:
        self.events.append(event)
        _observe(event, self.touch)

    def touch(self, thing: Thing, mode: Mode) -> None:
        add(self.touched, thing, mode)


# ---- what the judge of a trace compares: it sees one order of all processes' events ----------------------------------


def _slot_changes(event: Event, touch: Touch) -> None:
    if event.phase == "end" and event.address is not None and event.bytes is not None:
        for cell in cells(event.address, event.bytes):
            touch(("memory", event.process, cell), "w")


def _request_ends(event: Event, touch: Touch) -> None:
    touch(("finish", event.req, event.rank), "w")


def _embedding_known(event: Event, touch: Touch) -> None:
    touch(("embedding", event.req, event.part), "w")


def _embedding_compared(event: Event, touch: Touch) -> None:
    touch(("embedding", event.req, event.part), "r")


def _deadline_fires(event: Event, touch: Touch) -> None:
    if event.process != ENCODER:
        touch(("errors", event.req), "w")


_OBSERVED: dict[str, Callable[[Event, Touch], None]] = {
    "landing.alloc": _slot_changes,
    "landing.free": _slot_changes,
    "request.finish": _request_ends,
    "embedding.ready": _embedding_known,
    "landing.read": _embedding_compared,
    "timer.fire": _deadline_fires,
}


def _observe(event: Event, touch: Touch) -> None:
    observed = _OBSERVED.get(event.step)
    if observed is not None:
        observed(event, touch)
    if _is_trouble(event):
        touch(("errors", event.req), "c")
        touch(("finish", event.req, event.rank), "r")


def _is_trouble(event: Event) -> bool:
    """An error, or a request that did not end well."""
    return event.result.__class__ is str and event.result not in ("ok", "dropped")


# ---- what happens inside the sender ----------------------------------------------------------------------------------


class PartState(NamedTuple):
    """What different steps read and change of a part on the encoder."""

    key: str
    known: bool
    state: tuple[object, bool]
    buffer: bool
    kept: int
    sends: int
    served: int
    suspect: bool
    registrar: bool
    registered: bool


_NO_PART = PartState("", False, (None, True), False, 0, 0, 0, False, False, False)
_MODES: tuple[Mode, ...] = ("r", "w", "w", "w", "w", "c", "w", "w", "w", "c")


class EncoderFootprints:
    """What a step reads goes by its name; what it changes is found by comparing parts before and after."""

    def __init__(self, encoder: MMEncoder, ledger: Ledger, scenario: Scenario) -> None:
        rules = encoder.profile
        self._encoder, self._ledger, self._tp = encoder, ledger, scenario.tp
        self._early, self._shared = rules.early_release, rules.has(Rule.SHARED_REGISTRATION)
        self._drains = rules.has(Rule.DRAIN_BEFORE_RELEASE)
        self._numbers: dict[EmbeddingData, int] = {}
        self._parts: dict[int, PartState] = {}

    def take(self, point: Point | None) -> None:
        """Touch what the input just taken touched; `point`: the step it took, if it took one."""
        before, self._parts = self._parts, self._states()
        if point is not None:
            self._reads(point, before)
        if before != self._parts:
            self._changes(before, self._parts)

    def see(self) -> None:
        """Number the parts, in the order in which they were made: call it after every input."""
        for part in self._encoder.parts.values():
            self._numbers.setdefault(part, len(self._numbers))

    def _reads(self, point: Point, before: dict[int, PartState]) -> None:
        touch, key, step = self._ledger.touch, f"{point.req}/part{point.part}", point.step
        if step == "encode.serve":
            touch(("known", key), "r")
        elif step == "send.lookup":
            self._looks_up(key, next((p for p in before.values() if p.key == key and p.known), _NO_PART))
        elif step == "encode.forward" and point.phase == "end":
            touch(("queue",), "w")
        elif point.rank is None:
            self._cleans_up(step, key)
        if any(map(_is_trouble, self._ledger.events)):
            touch(("known", key), "r")
            touch(("state", key), "r")

    def _looks_up(self, key: str, part: PartState) -> None:
        touch = self._ledger.touch
        touch(("known", key), "r")
        if part.known:
            touch(("buffer", key), "r")
            if not part.buffer:
                touch(("state", key), "r")
            if self._shared:
                touch(("registrar", key), "r" if part.registrar else "w")
            if self._shared and part.registered:  # to find the region, or to wait for it, comes to the same
                touch(("registered", key), "j")

    def _cleans_up(self, step: str, key: str) -> None:
        touch = self._ledger.touch
        if step == "timer.fire":
            touch(("state", key), "w")
        elif step == "part.release":
            if self._drains:
                touch(("sends", key), "c")
            touch(("suspect", key), "r")
            touch(("kept", key), "r")
        elif step in ("mr.deregister", "embedding.drop"):
            if self._drains:
                touch(("sends", key), "j")
            touch(("kept", key), "r")

    def _changes(self, before: dict[int, PartState], now: dict[int, PartState]) -> None:
        touch = self._ledger.touch
        for number in {**before, **now}:
            old, new = before.get(number, _NO_PART), now.get(number, _NO_PART)
            if old is _NO_PART:
                touch(("queue",), "w")
            for group, mode, was, is_ in zip(PartState._fields, _MODES, old, new, strict=True):
                if was != is_ and group != "key":
                    touch((group, new.key or old.key), mode)
            if self._early and new.served >= self._tp:
                touch(("state", new.key), "r")

    def _states(self) -> dict[int, PartState]:
        """The parts there are, by number: two can have one key, if one of them is on its way out."""
        self.see()
        encoder, numbers = self._encoder, self._numbers
        states = {numbers[part]: self._state(part, False) for part in encoder.releasing}
        for part in encoder.parts.values():
            states[numbers[part]] = self._state(part, True)
        return states

    def _state(self, part: EmbeddingData, known: bool) -> PartState:
        return PartState(
            part.key,
            known,
            (part.state, part.error is None),
            part.buffer is not None,
            len(part.kept_regions),
            part.sends if self._drains else 0,
            max(part.served_calls, len(part.served_ranks)) if self._early else 0,
            part.suspect,
            part.shared_region is not None or part.registering.locked(),
            part.shared_region is not None,
        )


# ---- what happens inside the receiver --------------------------------------------------------------------------------


class RankFootprints:
    """A rank's request is one thing, but for steps that wait for each other in any order; so is its landing pool."""

    def __init__(self, receiver: MMReceiver, ledger: Ledger) -> None:
        self._process, self._ledger = receiver.steps.process, ledger
        self._drains = receiver.profile.has(Rule.DRAIN_BEFORE_RELEASE)
        self._pool = receiver.landing if isinstance(receiver.landing, LandingPool) else None
        self._room = self._measured()

    def take(self, point: Point | None) -> None:
        """Touch what the input just taken touched; `point`: the step it took, if it took one."""
        if point is not None:
            self._reads(point, any(map(_is_trouble, self._ledger.events)))
        if self._pool is not None:
            before, self._room = self._room, self._measured()
            if before != self._room:
                self._ledger.touch(("pool", self._process), "w")

    def see(self) -> None:
        """Nothing to number here."""

    def _reads(self, point: Point, trouble: bool) -> None:
        touch, step = self._ledger.touch, point.step
        request, posts = ("request", self._process, point.req), ("posts", self._process, point.req)
        if step == "encode.post" and not trouble:
            touch(request, "c")
        elif step == "send.post" and not trouble:
            touch(posts, "c")
        elif step == "landing.alloc":
            touch(request, "j")
        else:
            touch(request, "w")
            if trouble or step in ("request.cancel", "timer.fire"):
                touch(posts, "w")
            elif step in ("mr.deregister", "landing.free", "landing.quarantine") and self._drains:
                touch(posts, "j")

    def _measured(self) -> object:
        return None if self._pool is None else (tuple(self._pool._holes), len(self._pool._waiting))
