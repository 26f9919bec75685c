"""A world of one encode server and its ranks in one process: the very sender and receiver, a model around them.

The world is the gate of all its processes, and so the scheduler: when its loop is quiet, the steps that wait at the
gate are the moves that can come next, and `take` lets one of them go. Time advances only when no move is left. A
write and a post have two moves, a begin and an end, and other moves may come between them. Half of a write's bytes
land at its begin and half at its end; those of a late write land by a move of their own, `transfer.land`.

A world takes no decision of its own: the explorer, a schedule or a test drives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from ..encode_server import MMEncoder, Prepared
from ..errors import EpdLabError, StateError
from ..landing import Landing, LandingPool, PerRequestLanding
from ..modality import Modality
from ..ports import Buffer
from ..receiver import Item, MMReceiver, ReceiverConfig
from ..regions import RegionTable
from ..rules import Rule, profile
from ..steps import GO, Decision, Event, Point, Steps
from .footprints import Touched, observe
from .loop import VirtualClock, VirtualLoop, VirtualTimer, next_due
from .model_engine import Fabric, Mode, ModelBuffer, ModelEngine, ModelMemory, Write
from .network import ModelLink, Network
from .scenario import ENCODER, Fault, Move, Scenario
from .strikes import striker_of

TOKENS, DIM, ELEMENT_SIZE = 1, 4, 4
PART_BYTES = TOKENS * DIM * ELEMENT_SIZE
POOL_BYTES = 256
MEMORY_BYTES = 1024


Held = tuple[Point, asyncio.Future[Decision], asyncio.Task[Any] | None]


class ModelTower:
    """A vision tower whose embeddings are a pattern of their item's number."""

    def __init__(self, memory: ModelMemory) -> None:
        self._memory = memory

    async def prepare(self, items: Sequence[str], modality: Modality) -> Prepared:
        return Prepared(modality, [TOKENS], DIM, "float32", ELEMENT_SIZE, [(1, TOKENS, 1)], int(items[0]))

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        return [self._embedding(prepared.payload) for prepared in batch]

    def _embedding(self, number: int) -> Buffer:
        buffer = self._memory.take(PART_BYTES)
        assert isinstance(buffer, ModelBuffer)
        buffer.fill(bytes((17 * number + 7 * i + 1) % 251 for i in range(PART_BYTES)))
        return buffer

    def subset(self, prepared: Prepared, indices: Sequence[int]) -> Prepared:
        return prepared

    def fingerprint(self) -> str:
        return "model"


class World:
    """One run of a scenario.

    Attributes:
        waiting: the steps that wait at the gate, in the order they came.
        writes: the writes in flight, by the move that ends them. late: those that have answered and will land.
        events: the trace so far.
        causes: per waiting step, a bit mask of the moves its own task and the messages it got stem from.
        touched: what was touched since somebody set it to {}; None while nobody wants to know.
    """

    def __init__(self, scenario: Scenario, fault: Fault | None = None) -> None:
        self.scenario, self.profile = scenario, profile(scenario.profile)
        self.loop = VirtualLoop()
        self.events: list[Event] = []
        self.touched: Touched | None = None
        self.waiting: dict[Move, Held] = {}
        self.writes: dict[Move, Write] = {}
        self.late: dict[Move, tuple[Point, Write]] = {}
        self.causes: dict[Move, int] = {}
        self.timers: list[VirtualTimer] = []
        self.requests: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.dead: set[str] = set()
        self.pass_once: str | None = None
        self._ended: set[tuple[str | None, int | None, int | None]] = set()
        self._seen: dict[tuple[object, ...], int] = {}
        self._moved: Point | None = None
        self._ticks = 0
        self._passed = self.loop.create_future()
        self._passed.set_result(GO)
        self.network, self.fabric = Network(self.loop, self.touch), Fabric()
        self.encoder = self._encoder()
        self.ranks = [self._rank(rank) for rank in range(scenario.tp)]
        self.striker = striker_of(self, fault)

    # ---- wiring --------------------------------------------------------------------------------------------------

    def _engine(self, process: str) -> ModelEngine:
        memory = ModelMemory(MEMORY_BYTES, owner=process, touch=self.touch)
        return ModelEngine(self.fabric, process, memory, self._hold_write, self.touch)

    def _steps(self, process: str) -> Steps:
        return Steps(process, self.record, self, self._clock_ns)

    def _encoder(self) -> MMEncoder:
        engine, link = self._engine(ENCODER), ModelLink(self.network, ENCODER, 0)
        clock = VirtualClock(self.loop, ENCODER, self.timers)
        encoder = MMEncoder(ModelTower(engine.memory), engine, link, clock, self._steps(ENCODER), self.profile)
        self._drive(encoder.start())
        return encoder

    def _rank(self, rank: int) -> MMReceiver:
        process = f"rank{rank}"
        engine, steps = self._engine(process), self._steps(process)
        clock, link = VirtualClock(self.loop, process, self.timers), ModelLink(self.network, process, rank + 1)
        config = ReceiverConfig(rank, self.scenario.tp, (self.encoder.url,))
        return MMReceiver(config, engine, self._landing(engine, steps), link, clock, steps, self.profile)

    def _landing(self, engine: ModelEngine, steps: Steps) -> Landing:
        regions, checked = RegionTable(engine, steps), self.profile.has(Rule.CHECK_REGISTER_STATUS)
        if not self.scenario.pool:
            return PerRequestLanding(engine, regions, steps, checked)
        pool = LandingPool(engine, regions, steps, checked, POOL_BYTES)
        self.pass_once = "mr.register"
        self._drive(pool.open())
        return pool

    def _drive(self, work: Any) -> None:
        self.loop.create_task(work)
        self.loop.run_ready()

    # ---- the ranks' requests -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Every rank takes up its first request."""
        for rank in range(self.scenario.tp):
            self._begin(rank, 0)
        self.loop.run_ready()

    def _begin(self, rank: int, number: int) -> None:
        self.requests[rank, number] = self.loop.create_task(self._request(rank, number))

    async def _request(self, rank: int, number: int) -> None:
        """Receive, let the next request begin, read, release."""
        modalities = self.scenario.modalities
        items = [Item(modality, str(2 * number + part)) for part, modality in enumerate(modalities)]
        try:
            received = await self.ranks[rank].receive(f"q{number + 1}", items)
        finally:
            if number + 1 < self.scenario.requests:
                self._begin(rank, number + 1)
        async with received:
            await received.read()

    # ---- the gate ------------------------------------------------------------------------------------------------

    def enter(self, point: Point) -> Awaitable[Decision]:
        """Hold a step until it is taken (see `steps.Gate`). The end of a write is held by its engine already."""
        if point.step == self.pass_once:
            self.pass_once = None
            return self._passed
        about = (point.req, point.part, point.rank)
        if point.phase == "end" and point.step == "transfer.write" and about in self._ended:
            self._ended.remove(about)
            return self._passed
        return self._hold(point)[1]

    def _hold(self, point: Point) -> tuple[Move, asyncio.Future[Decision]]:
        labels = (point.process, point.step, point.phase, point.req, point.part, point.rank)
        nth = self._seen.get(labels, 0)
        self._seen[labels] = nth + 1
        future: asyncio.Future[Decision] = asyncio.Future(loop=self.loop)
        move = Move(*labels, nth)
        task = asyncio.current_task(self.loop)
        self.causes[move] = self.loop.causes[task]
        self.waiting[move] = (point, future, task)
        return move, future

    async def _hold_write(self, write: Write) -> None:
        """Between the begin and the end of a write: the end is a move of its own."""
        began = self._moved
        assert began is not None
        end = Point(began.process, began.step, "end", began.req, began.part, began.rank, began.region)
        move, future = self._hold(end)
        self.writes[move] = write
        await future
        del self.writes[move]
        self._ended.add((end.req, end.part, end.rank))
        if write.late:
            land = Move(end.process, "transfer.land", "note", end.req, end.part, end.rank, 0)
            self.late[land] = (end, write)

    # ---- moves ---------------------------------------------------------------------------------------------------

    def enabled(self) -> list[Move]:
        """The moves that can come next, in the order they came up; a fault's own move is last."""
        return [*self.waiting, *self.late, *self.striker.moves()]

    def take(self, move: Move) -> None:
        """Let a move happen, and run until the world is quiet again."""
        self.loop.moves += 1
        if move in self.waiting:
            point, future, task = self.waiting.pop(move)
            self.loop.causes[task] = 1 << self.loop.moves >> 1
            self._moved = point
            future.set_result(self.striker.decide(point))
        elif move in self.late:
            self._land(*self.late.pop(move))
        else:
            self.striker.strike()
        self._settle()

    def quiet(self) -> bool:
        """While no move is left, fire the timer that is due next; whether time advanced."""
        waited = False
        while not self.enabled() and (timer := next_due(self.timers)) is not None:
            self.loop.now = timer.due
            timer.run()
            self._settle()
            waited = True
        return waited

    def _settle(self) -> None:
        self.loop.run_ready()
        self.striker.settled()
        for move, (_, future, _) in list(self.waiting.items()):
            if future.cancelled() or move.process in self.dead:
                del self.waiting[move]

    def _land(self, point: Point, write: Write) -> None:
        """Late bytes arrive; a peer that has withdrawn their destination refuses them, and nothing happens."""
        if write.engine.land_late(write):
            self.note(
                point.process,
                "transfer.land",
                req=point.req,
                part=point.part,
                rank=point.rank,
                region=point.region,
                address=write.source,
                bytes=write.nbytes,
                target=write.target,
            )

    # ---- the trace -----------------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        self.events.append(event)
        if self.touched is not None:
            observe(event, self.touch)

    def note(self, process: str, step: str, **labels: Any) -> None:
        """Record what no process of the world records itself."""
        self.record(Event(self._clock_ns(), process, step, "note", **labels))

    def touch(self, thing: tuple[object, ...], mode: Mode) -> None:
        touched = self.touched
        if touched is not None and touched.setdefault(thing, mode) != mode:
            touched[thing] = "w"

    def finish(self) -> None:
        """The last request is over: every process counts what it still holds."""
        self.striker.finish()
        if ENCODER not in self.dead:
            self.note(ENCODER, "process.census", data=self.encoder.census())
        for receiver in self.ranks:
            assert isinstance(receiver.link, ModelLink)
            regions = len(self.fabric.engines[receiver.steps.process].regions) - self.scenario.pool
            census = receiver.census() | {"regions": regions, "sockets": receiver.link.open_sockets()}
            self.note(receiver.steps.process, "process.census", data=census)

    def defects(self) -> list[BaseException]:
        """Errors of the code itself: of its lifecycles, or of no type of ours. There must be none."""
        ended = [task for task in self.loop.tasks if task.done() and not task.cancelled()]
        errors = [error for task in ended if (error := task.exception()) is not None]
        return [e for e in errors if isinstance(e, StateError) or not isinstance(e, EpdLabError)]

    def close(self) -> None:
        """Let go of everything that still waits, without running it."""
        self.touched = None
        self.loop.abandon()
        self.waiting.clear()

    def _clock_ns(self) -> int:
        self._ticks += 1
        return int(self.loop.now * 1e9) + self._ticks * 1000
