"""What a move touches: the things it reads ("r"), changes ("w"), or changes in a way that commutes ("c").

Two moves are independent, and their order does not matter, if nothing is touched by both, or only in one same mode
that is "r" or "c". A join ("j") is a change that waited for everybody who touched the thing with "c". The ports of a world say what they touch (memory, regions, sockets, replies). This module adds what
happens inside the sender and the receiver, where one process shares state between its tasks, and what the judge of the
trace compares across processes. Over-stating a footprint costs time; under-stating one loses orders: a test holds the
reduced search against the full one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..encode_server import EmbeddingData
from ..landing import LandingPool
from ..rules import Rule
from ..steps import Event
from .model_engine import CELL, Mode, Touch
from .scenario import ENCODER, Move

if TYPE_CHECKING:
    from .world import World

Thing = tuple[object, ...]
Touched = dict[Thing, Mode]
Footprint = tuple[tuple[Thing, Mode], ...]


def independent(one: Footprint, other: Touched) -> bool:
    """Whether the order of two moves does not matter; `other` is a footprint as a dict."""
    for thing, mode in one:
        also = other.get(thing)
        if also is not None and (also != mode or mode in "wj"):
            return False
    return True


# ---- what the judge of the trace compares ----------------------------------------------------------------------------


def _slot_changes(event: Event, touch: Touch) -> None:
    if event.phase == "end" and event.address is not None and event.bytes is not None:
        for cell in range(event.address // CELL, (event.address + event.bytes - 1) // CELL + 1):
            touch(("memory", event.process, cell), "w")


def _request_ends(event: Event, touch: Touch) -> None:
    touch(("finish", event.req, event.rank), "w")


def _embedding_known(event: Event, touch: Touch) -> None:
    touch(("embedding", event.req, event.part), "w")


def _embedding_compared(event: Event, touch: Touch) -> None:
    touch(("embedding", event.req, event.part), "r")


def _timer_fires(event: Event, touch: Touch) -> None:
    if event.process != ENCODER:
        touch(("errors", event.req), "w")


_OBSERVED: dict[str, Callable[[Event, Touch], None]] = {
    "landing.alloc": _slot_changes,
    "landing.free": _slot_changes,
    "request.finish": _request_ends,
    "embedding.ready": _embedding_known,
    "landing.read": _embedding_compared,
    "timer.fire": _timer_fires,
}


def observe(event: Event, touch: Touch) -> None:
    """Touch what the judge compares: it sees one order of all processes' events."""
    observed = _OBSERVED.get(event.step)
    if observed is not None:
        observed(event, touch)
    if event.result.__class__ is str and event.result not in ("ok", "dropped"):
        touch(("errors", event.req), "c")
        touch(("finish", event.req, event.rank), "r")


# ---- what happens inside the sender and the receiver -----------------------------------------------------------------


class Footprints:
    """Takes the footprint of one move after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        rules = world.profile
        self._early, self._shared = rules.early_release, rules.has(Rule.SHARED_REGISTRATION)
        self._drains = rules.has(Rule.DRAIN_BEFORE_RELEASE)
        self._mortal = world.striker.fault is not None and world.striker.fault.kind == "encoder_dies"
        self._ranks = range(world.scenario.tp)
        self._parts = self._encoder_state()
        self._pools = self._pool_state()

    def take(self, move: Move) -> Footprint:
        """Take a move; what it touched."""
        world = self._world
        world.touched = {}
        events = len(world.events)
        world.take(move)
        noisy = any(map(_is_trouble, world.events[events:]))
        if move.process == ENCODER:
            self._encoder_move(move, noisy)
        else:
            self._rank_move(move, noisy)
        footprint = tuple(world.touched.items())
        world.touched = None
        return footprint

    # ---- the encoder: what a step reads goes by its name, what it changes is found by comparing ----------------------

    def _encoder_move(self, move: Move, noisy: bool) -> None:
        touch, key, step, before = self._world.touch, f"{move.req}/part{move.part}", move.step, self._parts
        self._parts = now = self._encoder_state()
        if self._mortal:
            touch(("process",), "w" if step == "process.kill" else "r")
        if step == "encode.serve":
            touch(("known", key), "r")
        elif step == "send.lookup":
            self._lookup(key, before.get(key, _NO_PART))
        elif step == "encode.forward" and move.phase == "end":
            touch(("queue",), "w")
        elif move.rank is None:
            self._cleans_up(step, key)
        if noisy:
            touch(("known", key), "r")
            touch(("state", key), "r")
        if before != now:
            self._changes(before, now)

    def _lookup(self, key: str, part: PartState) -> None:
        touch = self._world.touch
        touch(("known", key), "r")
        if part.known:
            touch(("buffer", key), "r")
            if not part.buffer:
                touch(("state", key), "r")
            if self._shared:
                touch(("registrar", key), "r" if part.registrar else "w")

    def _cleans_up(self, step: str, key: str) -> None:
        touch = self._world.touch
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

    def _changes(self, before: dict[str, PartState], now: dict[str, PartState]) -> None:
        touch = self._world.touch
        for key in {**before, **now}:
            old, new = before.get(key, _NO_PART), now.get(key, _NO_PART)
            if old is _NO_PART:
                touch(("queue",), "w")
            for group, mode, was, is_ in zip(PartState._fields, _MODES, old, new, strict=True):
                if was != is_:
                    touch((group, key), mode)
            if self._early and new.served >= len(self._ranks):
                touch(("state", key), "r")

    def _encoder_state(self) -> dict[str, PartState]:
        encoder = self._world.encoder
        parts = {part.key: self._part_state(part, False) for part in encoder.releasing}
        for key, part in encoder.parts.items():
            parts[key] = self._part_state(part, True)
        return parts

    def _part_state(self, part: EmbeddingData, known: bool) -> PartState:
        served = max(part.served_calls, len(part.served_ranks)) if self._early else 0
        return PartState(
            known,
            (part.state, part.error is None),
            part.buffer is not None,
            len(part.kept_regions),
            part.sends if self._drains else 0,
            served,
            part.suspect,
            part.shared_region is not None or part.registering.locked(),
        )

    # ---- ranks: one thing each, but for steps that wait for each other in any order ----------------------------------

    def _rank_move(self, move: Move, noisy: bool) -> None:
        touch, step = self._world.touch, move.step
        rank, posts = ("rank", move.process, move.req), ("posts", move.process, move.req)
        if self._mortal and step in ("encode.post", "send.post"):
            touch(("process",), "r")
        if step == "encode.post" and not noisy:
            touch(rank, "c")
        elif step == "send.post" and not noisy:
            touch(posts, "c")
        elif step == "landing.alloc":
            touch(rank, "j")
        else:
            touch(rank, "w")
            if noisy or step in ("request.cancel", "timer.fire"):
                touch(posts, "w")
            elif step in ("mr.deregister", "landing.free", "landing.quarantine") and self._drains:
                touch(posts, "j")
    def _pool_changes(self) -> None:
        before, self._pools = self._pools, self._pool_state()
        for process, state in self._pools.items():
            if before[process] != state:
                self._world.touch(("pool", process), "w")

    def _pool_state(self) -> dict[str, object]:
        landings = {rank.steps.process: rank.landing for rank in self._world.ranks}
        return {
            process: (tuple(landing._holes), len(landing._waiting))
            for process, landing in landings.items()
            if isinstance(landing, LandingPool)
        }


class PartState(NamedTuple):
    """What different steps read and change of a part on the encoder."""

    known: bool
    state: tuple[object, bool]
    buffer: bool
    kept: int
    sends: int
    served: int
    suspect: bool
    registrar: bool


_NO_PART = PartState(False, (None, True), False, 0, 0, 0, False, False)
_MODES: tuple[Mode, ...] = ("w", "w", "w", "w", "c", "w", "w", "w")


def _is_trouble(event: Event) -> bool:
    """An error, or a request that did not end well."""
    return event.result.__class__ is str and event.result not in ("ok", "dropped")
