"""What a move touches: the things it reads ("r"), changes ("w"), or changes in a way that commutes ("c").

Two moves are independent, and their order does not matter, if nothing is touched by both, or only in one same mode
that is "r" or "c". The ports of a world say what they touch (memory, regions, sockets, replies). This module adds what
happens inside the sender and the receiver, where one process shares state between its tasks, and what the judge of the
trace compares across processes. Over-stating a footprint costs time; under-stating one loses orders: a test holds the
reduced search against the full one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
        if also is not None and (also != mode or mode == "w"):
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

_ENCODER_READS: dict[str, tuple[str, ...]] = {
    "encode.serve": ("entry",),
    "encode.forward": ("entry",),
    "send.lookup": ("entry", "region"),
    "mr.register": ("region",),
    "ack.push": ("entry",),
    "part.release": ("entry", "sends"),
    "timer.fire": ("entry", "sends"),
}
_QUIET_RANK_STEPS = {
    ("encode.post", "begin"): ("rank",),
    ("encode.post", "end"): ("rank",),
    ("send.post", "begin"): ("posts",),
    ("send.post", "end"): ("posts",),
}
_RANK_STEPS = frozenset({"landing.alloc", "mr.register", "ack.pull", "landing.read"})


class Footprints:
    """Takes the footprint of one move after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._early = world.profile.early_release
        self._keeps = world.profile.has(Rule.KEEP_EMBEDDING)
        self._parts = self._encoder_state()
        self._pools = self._pool_state()

    def take(self, move: Move) -> Footprint:
        """Take a move; what it touched."""
        world = self._world
        world.touched = {}
        events = len(world.events)
        world.take(move)
        if move.process == ENCODER:
            self._encoder_move(move, self._noisy(events))
        else:
            self._rank_move(move, self._noisy(events))
        footprint = tuple(world.touched.items())
        world.touched = None
        return footprint

    def _noisy(self, since: int) -> bool:
        """Whether the move met an error or ended a request."""
        return any(
            event.step == "request.finish" or (event.result.__class__ is str and event.result != "ok")
            for event in self._world.events[since:]
        )

    # ---- one encoder ---------------------------------------------------------------------------------------------

    def _encoder_state(self) -> dict[str, tuple[Any, ...]]:
        encoder = self._world.encoder
        parts = {id(part): part for part in (*encoder.parts.values(), *encoder.releasing)}
        return {part.key: _part_state(part, part.key in encoder.parts) for part in parts.values()}

    def _encoder_move(self, move: Move, noisy: bool) -> None:
        touch, key = self._world.touch, f"{move.req}/part{move.part}"
        if move.step == "process.kill":
            touch(("process",), "w")
        else:
            touch(("process",), "r")
        for group in _ENCODER_READS.get(move.step, ()):
            touch((group, key), "r")
        if move.step in ("timer.fire", "part.release"):
            touch(("entry", key), "w")
            touch(("sends", key), "w")
        if move.step in ("mr.deregister", "embedding.drop") and move.rank is None:
            touch(("region", key), "w")
            touch(("entry", key), "w")
        if noisy or not self._keeps:
            touch(("entry", key), "r")
        self._changes(self._encoder_state())
        if move.step == "encode.forward" and move.phase == "end":
            touch(("queue",), "w")

    def _changes(self, now: dict[str, tuple[Any, ...]]) -> None:
        before, self._parts = self._parts, now
        touch = self._world.touch
        for key in {**before, **now}:
            old, new = before.get(key, _NO_PART), now.get(key, _NO_PART)
            if old == new:
                continue
            if old is _NO_PART:
                touch(("queue",), "w")
            for group, mode, at in (("entry", "w", 0), ("region", "w", 1), ("sends", "c", 2), ("served", "w", 3)):
                if old[at] != new[at] and (self._early or group != "served"):
                    touch((group, key), mode)  # type: ignore[arg-type]

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def _pool_state(self) -> dict[str, object]:
        landings = {rank.steps.process: rank.landing for rank in self._world.ranks}
        return {
            process: (tuple(landing._holes), len(landing._waiting))
            for process, landing in landings.items()
            if isinstance(landing, LandingPool)
        }

    def _rank_move(self, move: Move, noisy: bool) -> None:
        touch = self._world.touch
        quiet = None if noisy else _QUIET_RANK_STEPS.get((move.step, move.phase))
        if move.step in POSTS:
            touch(("process",), "r")
        if quiet is not None:
            for group in quiet:
                touch((group, move.process, move.req), "c")
        else:
            touch(("rank", move.process, move.req), "w")
            if noisy or move.step not in _RANK_STEPS:
                touch(("posts", move.process, move.req), "w")
        before, self._pools = self._pools, self._pool_state()
        for process, state in self._pools.items():
            if before.get(process) != state:
                touch(("pool", process), "w")


POSTS = frozenset({"encode.post", "send.post"})


def _part_state(part: EmbeddingData, known: bool) -> tuple[Any, ...]:
    """Four groups of a part's state that different steps read and change: entry, region, sends, served."""
    region = part.shared_region
    return (
        (known, part.state, part.buffer is None, part.error is None, part.described.is_set(), part.ready.is_set()),
        (None if region is None else (region.name, region.state), part.registering.locked(), len(part.kept_regions)),
        part.sends,
        (part.served_calls, len(part.served_ranks), part.suspect),
    )


_NO_PART: tuple[Any, ...] = ((False,), None, 0, (0, 0, False))
