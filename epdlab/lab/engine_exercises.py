"""The exercises of notebook 01: each runs an answer on real engines, draws what it did, and judges it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..engine import MooncakeEngine, TensorBuffer
from ..errors import one_line
from ..landing import LandingSlot, PerRequestLanding
from ..regions import RegionTable
from ..steps import Event, Phase, Recorder, Steps
from ..trace import canvas as c
from ..trace.canvas import Canvas
from ..trace.invariants import check
from ..trace.render import Drawing
from ..trace.spans import size
from ..trace.timeline import timeline
from .exercise import Answer, Tried, attempt, judge

REQUEST = "req1"
RANKS = 2
ROWS, COLUMNS = 256, 64
PAGE_BYTES = 4096


@cache
def _engines() -> tuple[MooncakeEngine, ...]:
    """One engine per process of the exercise, for the life of this one: closing an engine takes Mooncake a second."""
    return tuple(MooncakeEngine() for _ in range(1 + RANKS))


# ---- deliver ---------------------------------------------------------------------------------------------------------


class TracedEngine:
    """The encoder's real engine. Every call is recorded as a step, so that it can be drawn and judged.

    Args:
        sessions: the ranks' sessions, in the order of the ranks.
    """

    def __init__(self, engine: MooncakeEngine, record: Recorder, sessions: Sequence[str]) -> None:
        self._engine, self._record, self._sessions = engine, record, sessions
        self._count = 0
        self._names: dict[int, str] = {}
        self.live: set[int] = set()

    def register(self, address: int, nbytes: int) -> int:
        self._count += 1
        name = f"enc0.mr#{self._count}"
        code = self._do("mr.register", lambda: self._engine.register(address, nbytes), name, address, nbytes)
        if code == 0:
            self._names[address] = name
            self.live.add(address)
        return code

    def deregister(self, address: int) -> int:
        code = self._do("mr.deregister", lambda: self._engine.deregister(address), self._name(address), address, None)
        self.live -= {address} if code == 0 else set()
        return code

    def write_blocking(self, session_id: str, source: int, target: int, nbytes: int) -> int:
        rank = self._sessions.index(session_id) if session_id in self._sessions else None
        write = lambda: self._engine.write_blocking(session_id, source, target, nbytes)  # noqa: E731
        return self._do("transfer.write", write, self._name(source), source, nbytes, rank=rank, target=target)

    def _name(self, address: int) -> str:
        return self._names.get(address, "none at this address")

    def _do(
        self, step: str, call: Callable[[], int], region: str, address: int, nbytes: int | None, **labels: Any
    ) -> int:
        about: dict[str, Any] = {"req": REQUEST, "part": 0, "region": region, "address": address, "bytes": nbytes}
        self._note(step, "begin", about | labels)
        try:
            code = call()
        except Exception as error:
            self._note(step, "end", about | labels | {"result": one_line(error)})
            raise
        self._note(step, "end", about | labels | {"result": code})
        return code

    def _note(self, step: str, phase: Phase, labels: dict[str, Any]) -> None:
        self._record(Event(time.monotonic_ns(), "enc0", step, phase, **labels))


async def try_deliver(answer: Answer) -> Tried:
    """`deliver(engine, embedding, ranks)`: one registration, a write to each rank, and nothing left registered."""
    encoder, *ranks = _engines()
    events: list[Event] = []
    record: Recorder = lambda event: events.append(event)  # noqa: E731
    embedding = TensorBuffer(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)))
    landings = [_landing(engine, Steps(f"rank{rank}", record)) for rank, engine in enumerate(ranks)]
    slots = [await _slot(landing, embedding.nbytes, rank) for rank, landing in enumerate(landings)]
    sessions = [engine.session_id for engine in ranks]
    traced = TracedEngine(encoder, record, sessions)
    pairs = [(session, slot.address) for session, slot in zip(sessions, slots, strict=True)]
    _, error = attempt(answer, traced, embedding, pairs)
    held = [slot.buffer.digest() == embedding.digest() for slot in slots]
    left = [traced._name(address) for address in traced.live]
    for address in set(traced.live):
        encoder.deregister(address)
    for rank, (landing, slot) in enumerate(zip(landings, slots, strict=True)):
        await landing.free(slot, req=REQUEST, rank=rank)
    verdict = judge(answer, 5, lambda: error or _badly_delivered(events, held, left), _DELIVERED)
    return Tried(timeline(events, check(events, complete=False), title="what deliver did"), verdict)


_DELIVERED = f"{RANKS} ranks hold the embedding, by one registration that covered every write"


def _landing(engine: MooncakeEngine, steps: Steps) -> PerRequestLanding:
    return PerRequestLanding(engine, RegionTable(engine, steps), steps, must_succeed=True)


async def _slot(landing: PerRequestLanding, nbytes: int, rank: int) -> LandingSlot:
    slot = await landing.allocate(nbytes, REQUEST, req=REQUEST, rank=rank)
    assert isinstance(slot.buffer, TensorBuffer)
    slot.buffer.tensor.zero_()
    return slot


def _badly_delivered(events: Sequence[Event], held: Sequence[bool], left: Sequence[str]) -> str | None:
    """What is wrong with a delivery, the first thing first."""
    ours = [event for event in events if event.process == "enc0" and event.phase == "end"]
    refused = [f"{event.step} answered {event.result}" for event in ours if event.result != 0]
    breaches = check(events, complete=False)
    registered = sum(event.step == "mr.register" for event in ours)
    if refused:
        return refused[0]
    if breaches:
        return f"invariant {breaches[0].number} [{breaches[0].invariant}] broke: {breaches[0].message}"
    if not all(held):
        return f"rank {held.index(False)} does not hold the embedding"
    if registered != 1:
        return f"the embedding was registered {registered} times; once is enough for every write"
    return f"{left[0]} is still registered" if left else None


# ---- admits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """One write into landing memory, and what came of it. Offsets and lengths in bytes.

    Attributes:
        code: what the engine answered. said: what the reader's function did.
    """

    offset: int
    nbytes: int
    what: str
    code: int = 0
    said: object = None

    @property
    def agreed(self) -> bool:
        return self.said is (self.code == 0)


REGIONS = ((0, 4 * PAGE_BYTES), (4 * PAGE_BYTES, 4 * PAGE_BYTES), (10 * PAGE_BYTES, 4 * PAGE_BYTES))
LANDING_BYTES = 16 * PAGE_BYTES
_WRITES = (
    _Asked(0, 4 * PAGE_BYTES, "the first region, whole"),
    _Asked(PAGE_BYTES, 2 * PAGE_BYTES, "inside the first"),
    _Asked(8 * PAGE_BYTES - 1, 1, "the second's last byte"),
    _Asked(10 * PAGE_BYTES, 4 * PAGE_BYTES, "the third, whole"),
    _Asked(8 * PAGE_BYTES - 1, 2, "one byte further"),
    _Asked(2 * PAGE_BYTES, 4 * PAGE_BYTES, "over the seam of two"),
    _Asked(0, 8 * PAGE_BYTES, "both, whole"),
    _Asked(8 * PAGE_BYTES, PAGE_BYTES, "the gap"),
    _Asked(10 * PAGE_BYTES - 1, PAGE_BYTES, "one byte before the third"),
    _Asked(10 * PAGE_BYTES, 4 * PAGE_BYTES + 1, "the third and one byte"),
)


def try_admits(answer: Answer) -> Tried:
    """`admits(regions, address, nbytes)`: whether the receiver's engine lets a write in. Held against that engine.

    A refused write may take the connection of the next one along: the writes that are let in come first, and from an
    encoder of their own.
    """
    encoder, rank = MooncakeEngine(), _engines()[1]
    source, landing = TensorBuffer(torch.ones(LANDING_BYTES, dtype=torch.uint8)), rank.allocate(LANDING_BYTES)
    for offset, nbytes in REGIONS:
        rank.register(landing.address + offset, nbytes)
    asked, errors = [], []
    for write in _WRITES:
        target = landing.address + write.offset
        code = encoder.write_blocking(rank.session_id, source.address, target, write.nbytes)
        said, error = attempt(answer, list(REGIONS), write.offset, write.nbytes)
        asked.append(_Asked(write.offset, write.nbytes, write.what, code, said))
        errors += [error] if error else []
    encoder.close()
    for offset, _ in REGIONS:
        rank.deregister(landing.address + offset)

    def wrong() -> str | None:
        bad = next((write for write in asked if not write.agreed), None)
        if errors or bad is None:
            return errors[0] if errors else None
        return f"{bad.what}: the engine answered {bad.code}, {answer.__name__} said {bad.said!r}"

    said = f"{len(asked)} writes, and the engine agrees with every answer"
    return Tried(_admissions(asked), judge(answer, 2, wrong, said))


_LEFT, _RIGHT, _PAGE, _ROW = 196.0, 150.0, 780.0, 17.0


def _admissions(asked: Sequence[_Asked]) -> Drawing:
    """Regions on top, the writes below at their place: green where the engine let them in, hatched where it did not."""
    title = "which writes the receiver's engine lets in"
    page = Canvas(title, _PAGE)
    scale = (_PAGE - _LEFT - _RIGHT) / LANDING_BYTES
    page.text(14, 14, title, size=11, bold=True)
    page.box(_LEFT, 32, LANDING_BYTES * scale, 22, fill=c.PALE, line=c.MUTED)
    page.text(_LEFT - 8, 43, f"landing memory, {size(LANDING_BYTES)}", "r")
    for number, (offset, nbytes) in enumerate(REGIONS, start=1):
        page.box(_LEFT + offset * scale, 32, nbytes * scale, 22, fill=c.REGION, text=f"region {number}")
    y = 74.0
    page.text(_PAGE - _RIGHT + 12, y - 10, "the engine", size=8, colour=c.MUTED)
    page.text(_PAGE - 72, y - 10, "you", size=8, colour=c.MUTED)
    for write in asked:
        _admission(page, write, y, scale)
        y += _ROW
    page.height = y + 4
    return Drawing(page.dot(), "fixed", title)


def _admission(page: Canvas, write: _Asked, y: float, scale: float) -> None:
    let_in = write.code == 0
    x, width = _LEFT + write.offset * scale, max(write.nbytes * scale, 3.0)
    page.text(_LEFT - 8, y + 5, write.what, "r", size=8.5)
    page.box(x, y, width, 11, fill=c.ACK if let_in else c.BREACH, striped=not let_in and width > 9, pen=0.5)
    page.text(_PAGE - _RIGHT + 12, y + 5, "0, let in" if let_in else f"{write.code}, refused", size=8.5)
    if isinstance(write.said, bool):
        word, colour = "let in" if write.said else "refused", c.INK if write.agreed else c.ALERT
        page.text(_PAGE - 72, y + 5, word, size=8.5, colour=colour, bold=not write.agreed)
