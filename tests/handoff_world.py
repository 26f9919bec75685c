"""What tests of the hand-off share: a sender and receivers in this process, over the real engine and the real link.

A `World` is held at steps like a lab, by a `Hand` in place of a control channel. `World.check` says whether anything
is left behind. The towers are synthetic: items are `bytes:N:SEED`, and `expected` makes the same bytes anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from epdlab.clock import LoopClock
from epdlab.control import Pattern
from epdlab.encode_server import EncoderConfig, MMEncoder
from epdlab.engine import MooncakeEngine, TensorBuffer
from epdlab.landing import Landing, LandingPool, PerRequestLanding
from epdlab.link import HttpZmqLink
from epdlab.messages import EncodeRequest, SendRequest
from epdlab.modality import Modality
from epdlab.receiver import Item, MMReceiver, Received, ReceiverConfig
from epdlab.regions import RegionTable
from epdlab.rules import Rule, profile
from epdlab.steps import GO, Decision, Event, FaultKind, Point, Steps
from epdlab.tower import SyntheticTower
from epdlab.trace.invariants import check

PATIENCE_S = 10.0
"""How long a test waits for what must happen. Nothing passes by waiting: it only bounds a failure."""


class EnginePool:
    """The test process's engines. A test takes as many as it needs; none is ever closed."""

    def __init__(self) -> None:
        self._engines: list[MooncakeEngine] = []

    def take(self, count: int) -> list[MooncakeEngine]:
        while len(self._engines) < count:
            self._engines.append(MooncakeEngine())
        return self._engines[:count]


def expected(*items: str) -> bytes:
    """The embedding of synthetic items, made without any transfer."""
    pieces = []
    for item in items:
        _, count, seed = item.split(":")
        generator = torch.Generator().manual_seed(int(seed))
        pieces.append(torch.randint(0, 256, (int(count),), dtype=torch.uint8, generator=generator))
    return bytes(torch.cat(pieces).numpy())


def content(view: Any) -> bytes:
    """The bytes of a landing view."""
    assert isinstance(view, TensorBuffer)
    return bytes(view.tensor.numpy())


async def turns() -> None:
    """Let every task run until it waits for something outside."""
    for _ in range(10):
        await asyncio.sleep(0)


async def within(work: Any) -> Any:
    """Await what must end, and fail instead of hanging."""
    return await asyncio.wait_for(work, PATIENCE_S)


class Held:
    """One step that waits in this process."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()


class Hand:
    """A gate in this process: holds what matches a pattern until it is let go, and injects faults."""

    def __init__(self) -> None:
        self.patterns: list[Pattern] = []
        self.waiting: list[Held] = []
        self._left: list[int | None] = []
        self._changed = asyncio.Condition()

    async def enter(self, point: Point) -> Decision:
        for index, pattern in enumerate(self.patterns):
            if self._left[index] != 0 and pattern.matches(point):
                left = self._left[index]
                self._left[index] = None if left is None else left - 1
                return await self._hold(point) if pattern.decision is None else pattern.decision
        return GO

    async def _hold(self, point: Point) -> Decision:
        held = Held(point)
        self.waiting.append(held)
        try:
            async with self._changed:
                self._changed.notify_all()
            return await held.decided
        finally:
            self.waiting = [other for other in self.waiting if other is not held]

    def hold(self, step: str, *, times: int | None = None, **where: Any) -> None:
        self._add(Pattern(step, where.pop("phase", "begin"), times=times, **where))

    def fault(self, kind: FaultKind, step: str, *, value: float | None = None, times: int = 1, **where: Any) -> None:
        self._add(Pattern(step, "begin", decision=Decision(kind, value), times=times, **where))

    def _add(self, pattern: Pattern) -> None:
        self.patterns.append(pattern)
        self._left.append(pattern.times)

    async def appears(self, step: str, count: int = 1, **where: Any) -> list[Held]:
        """Wait until `count` such steps are held; the longest held first."""
        pattern = Pattern(step, None, **where)

        def found() -> list[Held]:
            return [held for held in self.waiting if pattern.matches(held.point)]

        async with self._changed:
            await within(self._changed.wait_for(lambda: len(found()) >= count))
        return found()

    def go(self, held: Held, decision: Decision = GO) -> None:
        if not held.decided.done():
            held.decided.set_result(decision)

    def run(self) -> None:
        """Forget all patterns and let everything go."""
        self.patterns, self._left = [], []
        self.run_held_only()

    def run_held_only(self) -> None:
        """Let what waits go; patterns stay."""
        for held in list(self.waiting):
            self.go(held)


class World:
    """Encoders and ranks in this process. Use as an async context manager; it ends with nothing left, or fails."""

    def __init__(
        self,
        engines: EnginePool,
        *,
        rules: str = "hardened",
        tp: int = 1,
        encoders: int = 1,
        pool_bytes: int = 0,
        strict: bool = False,
        deadline_s: float = 60.0,
        encoder_config: EncoderConfig | None = None,
        expect_clean: bool = True,
    ) -> None:
        self.profile, self.expect_clean = profile(rules), expect_clean
        self.events: list[Event] = []
        self.clock, self.hand = LoopClock(), Hand()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._links: list[HttpZmqLink] = []
        taken = engines.take(encoders + tp)
        self.encoders = [
            self._encoder(index, engine, encoder_config, strict) for index, engine in enumerate(taken[:encoders])
        ]
        self._ranks = [(rank, engine, pool_bytes, deadline_s) for rank, engine in enumerate(taken[encoders:])]
        self.ranks: list[MMReceiver] = []

    def _link(self) -> HttpZmqLink:
        link = HttpZmqLink()
        self._links.append(link)
        return link

    def _steps(self, process: str) -> Steps:
        return Steps(process, self._record, self.hand)

    def _encoder(self, index: int, engine: MooncakeEngine, config: EncoderConfig | None, strict: bool) -> MMEncoder:
        steps = self._steps(f"enc{index}")
        return MMEncoder(SyntheticTower(), engine, self._link(), self.clock, steps, self.profile, config, strict)

    async def _rank(self, rank: int, engine: MooncakeEngine, pool_bytes: int, deadline_s: float) -> MMReceiver:
        steps = self._steps(f"rank{rank}")
        regions, checked = RegionTable(engine, steps), self.profile.has(Rule.CHECK_REGISTER_STATUS)
        landing: Landing = PerRequestLanding(engine, regions, steps, checked)
        if pool_bytes:
            landing = pool = LandingPool(engine, regions, steps, checked, pool_bytes)
            await pool.open()
        urls = tuple(encoder.url for encoder in self.encoders)
        config = ReceiverConfig(rank, len(self._ranks), urls, deadline_s=deadline_s)
        return MMReceiver(config, engine, landing, self._link(), self.clock, steps, self.profile)

    async def __aenter__(self) -> World:
        try:
            for encoder in self.encoders:
                await encoder.start()
            self.ranks = [await self._rank(*rank) for rank in self._ranks]
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.hand.run()
        try:
            if error is None and self.expect_clean:
                await self.settled()
                self.check()
        finally:
            await self.close()

    async def close(self) -> None:
        for rank in self.ranks:
            await rank.close()
        for link in self._links:
            await link.close()
        for encoder in self.encoders:
            await encoder.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    async def receive(
        self, rank: int, req_id: str, images: Sequence[str] = (), videos: Sequence[str] = ()
    ) -> list[bytes]:
        """One request on one rank: received, read, released. The bytes per part."""
        items = [Item(Modality.IMAGE, ref) for ref in images] + [Item(Modality.VIDEO, ref) for ref in videos]
        async with await self.ranks[rank].receive(req_id, items) as received:
            await received.read()
            return [content(received.part(index)) for index in range(len(received.parts))]

    async def landed(self, rank: int, req_id: str, *images: str) -> Received:
        """One request on one rank, landed and not released."""
        return await self.ranks[rank].receive(req_id, [Item(Modality.IMAGE, ref) for ref in images])

    def start(self, rank: int, req_id: str, *images: str, videos: Sequence[str] = ()) -> asyncio.Task[list[bytes]]:
        return asyncio.ensure_future(self.receive(rank, req_id, images, videos))

    async def all_ranks(self, req_id: str, *images: str, videos: Sequence[str] = ()) -> list[Any]:
        """One request on every rank; bytes or the error."""
        tasks = [self.start(rank, req_id, *images, videos=videos) for rank in range(len(self.ranks))]
        return await within(asyncio.gather(*tasks, return_exceptions=True))

    # ---- what happened, what is left -----------------------------------------------------------------------------

    def seen(self, step: str, phase: str | None = "begin", **where: Any) -> list[Event]:
        return [
            event
            for event in self.events
            if event.step == step
            and phase in (None, event.phase)
            and all(getattr(event, name) == value for name, value in where.items())
        ]

    def order(self, *steps: str, phase: str = "begin") -> list[tuple[str, int | None]]:
        """(step, rank) of these steps in the order they happened."""
        return [(event.step, event.rank) for event in self.events if event.step in steps and event.phase == phase]

    def census(self) -> dict[str, int]:
        """What all of them hold, summed by kind; kinds that are zero are left out."""
        totals: dict[str, int] = {}
        for holder in [*self.encoders, *self.ranks]:
            for kind, count in holder.census().items():
                totals[kind] = totals.get(kind, 0) + count
        return {kind: count for kind, count in totals.items() if count}

    def _record(self, event: Event) -> None:
        self.events.append(event)
        for ready, waiter in self._waiters:
            if not waiter.done() and ready():
                waiter.set_result(None)

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until a fact holds, looking at every event."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((ready, waiter))
        if not ready():
            await within(waiter)

    async def settled(self, *holders: MMEncoder | MMReceiver) -> None:
        """Wait until nothing runs any more (in these, if given); what waits for a timer of its own may wait on."""
        while tasks := {task for holder in holders or [*self.encoders, *self.ranks] for task in holder._tasks}:
            await within(asyncio.wait(tasks))

    def check(self) -> None:
        """Nothing left but what a timer holds; no invariant broken."""
        assert {kind for kind in self.census() if kind != "timed"} == set()
        assert [breach for breach in check(self.events) if breach.invariant != "leak"] == []
        for rank in self.ranks:
            pools = 1 if isinstance(rank.landing, LandingPool) else 0
            assert len(rank.landing.regions.live) == pools + self._quarantined(rank)
            if isinstance(rank.landing, LandingPool) and not rank.landing.slots:
                assert (rank.landing.free_bytes, rank.landing.largest_hole) == (rank.landing.nbytes,) * 2

    def withdraw_by_hand(self) -> None:
        """Take away what a refused deregistration left in the engines, which other tests use too."""
        for encoder in self.encoders:
            for region in encoder.regions.live:
                assert encoder.engine.deregister(region.address) == 0
        for rank in self.ranks:
            owned = [slot.region for slot in rank.landing.slots]
            for region in rank.landing.regions.live:
                assert region in owned or rank.engine.deregister(region.address) == 0

    @staticmethod
    def _quarantined(rank: MMReceiver) -> int:
        return 0 if isinstance(rank.landing, LandingPool) else len(rank.landing.slots)


def encode_request(req_id: str = "q", item: str = "bytes:64:1", **fields: Any) -> EncodeRequest:
    """A well-formed /encode body, with any field replaced."""
    given: dict[str, Any] = {
        "req_id": req_id,
        "encoder_idx": 0,
        "mm_items": [item],
        "num_parts": 1,
        "part_idx": 0,
        "modality": Modality.IMAGE,
        "prefill_host": "127.0.0.1",
        "embedding_port": 1,
    }
    return EncodeRequest(**(given | fields))


def send_request(req_id: str = "q", **fields: Any) -> SendRequest:
    """A well-formed /send body, with any field replaced."""
    given: dict[str, Any] = {
        "req_id": req_id,
        "part_idx": 0,
        "num_parts": 1,
        "modality": Modality.IMAGE,
        "prefill_host": "127.0.0.1",
        "embedding_port": 1,
        "session_id": "127.0.0.1:1",
        "buffer_address": 4096,
        "embedding_size": 64,
    }
    return SendRequest(**(given | fields))
