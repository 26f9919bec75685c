"""One process of a world as a machine: something happens to it, and it answers with all that follows.

A machine runs the very sender or receiver, on a virtual loop and over ports that do nothing but report. It is the
gate of its process: every step waits until it is told to go on. What a machine does depends only on what happened to
it, in which order; `remembered` makes use of that. Machines know nothing of each other: a world passes their messages
on, holds their memory and takes the decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeGuard

from ..encode_server import MMEncoder
from ..errors import EpdLabError, StateError, one_line
from ..landing import Landing, LandingPool, PerRequestLanding
from ..receiver import Item, MMReceiver, ReceiverConfig
from ..regions import RegionTable
from ..rules import Rule
from ..steps import GO, Decision, Point, Steps
from .footprints import EncoderFootprints, Ledger, RankFootprints
from .loop import VirtualLoop
from .machine_ports import MEMORY_BYTES, MachineClock, MachineEngine, MachineLink, ModelTower, at_once
from .model_engine import ModelMemory
from .outcome import Gate, Input, Outcome, Writing
from .scenario import ENCODER, Move, Scenario

POOL_BYTES = 256
PORTS_PER_PROCESS = 1000


class Machine:
    """What sender and receiver have in common: the gate and the ports."""

    prints: EncoderFootprints | RankFootprints

    def __init__(self, process: str, number: int, scenario: Scenario) -> None:
        self.process, self.scenario, self.profile = process, scenario, scenario.rules
        self.loop, self.ledger = VirtualLoop(), Ledger()  # type: ignore[abstract]
        self._report_to(Outcome())
        self.steps = Steps(process, self.ledger.record, self, _no_time)
        self.engine = MachineEngine(self, ModelMemory(MEMORY_BYTES, process, self.ledger.touch, self.ledger.poke))
        self.link, self.clock = MachineLink(self, PORTS_PER_PROCESS * (number + 1)), MachineClock(self)
        self._held: dict[int, tuple[Point, asyncio.Future[Any], asyncio.Task[Any] | None]] = {}
        self._gates = 0
        self._seen: dict[tuple[object, ...], int] = {}
        self._pass_once: str | None = None
        self._write_ended = False

    # ---- input and outcome ---------------------------------------------------------------------------------------

    def feed(self, happens: Input) -> Outcome:
        """Let something happen, and run until every task waits again."""
        if self.loop.inputs:  # the first outcome tells of the set-up too
            self._report_to(Outcome())
        out = self.out
        about = self._run(happens)
        self.prints.take(about)
        self._reap()
        return out

    def lead(self, inputs: Sequence[Input]) -> None:
        """Let all this happen once more, without an outcome."""
        if not inputs:
            return
        record, self.steps.record = self.steps.record, None
        for happens in inputs:
            self._run(happens)
            self.prints.see()
        self.steps.record = record
        self._report_to(Outcome())
        self.prints.take(None)

    def _run(self, happens: Input) -> Point | None:
        loop = self.loop
        loop.inputs += 1
        outer = loop.enter()
        try:
            about = self._HANDLERS[happens[0]](self, *happens[1:])
            loop.run_ready()
        finally:
            loop.leave(outer)
        gone = [number for number, held in self._held.items() if held[1].done()]
        for number in gone:
            del self._held[number]
            self.out.gone.append(number)
        return about

    def _report_to(self, out: Outcome) -> None:
        self.out, self.ledger.events, self.ledger.touched, self.ledger.pokes = out, out.events, out.touched, out.pokes

    def _take(self, number: int, how: object) -> Point:
        point, future, task = self._held.pop(number)
        self.loop.causes[task] = self.loop.now_bit
        if isinstance(how, bytes):
            self.engine.memory.bytes[:] = how
            how = GO
        self.taken = point
        future.set_result(GO if how is None else how)
        return point

    def _timer(self, number: int, at_once: bool) -> Point | None:
        fire = self.clock.pending.pop(number)
        self._pass_once = "timer.fire" if at_once else None
        self.loop.call_soon(fire)
        return Point(self.process, "timer.fire", req=self.clock.reqs[number]) if at_once else None

    def _request(self, path: str, body: bytes, post: object) -> None:
        self.loop.create_task(self.link.answer(path, body, post))

    def _answer(self, number: int, payload: object) -> None:
        if number in self.link.waiting:  # else its client gave up
            self.link.waiting[number].set_result(payload)

    def _frame(self, port: int, frame: bytes) -> None:
        self.link.sockets[port].deliver(frame)

    def _pushed(self, number: int, ok: bool) -> None:
        self.link.waiting[number].set_result(ok)

    def _claim(self, address: int, nbytes: int) -> None:
        if nbytes:
            self.engine.register(address, nbytes)
        else:
            self.engine.deregister(address)

    def _start(self) -> None:
        raise StateError(f"{self.process} takes up no requests")

    def _cancel(self, number: int) -> Point:
        raise StateError(f"{self.process} has no requests to cancel")

    def _census(self) -> None:
        raise NotImplementedError

    _HANDLERS: ClassVar[dict[str, Callable[..., Point | None]]] = {
        "take": _take,
        "timer": _timer,
        "request": _request,
        "answer": _answer,
        "frame": _frame,
        "pushed": _pushed,
        "claim": _claim,
        "start": lambda self: self._start(),
        "cancel": lambda self, number: self._cancel(number),
        "census": lambda self: self._census(),
    }

    def _reap(self) -> None:
        """Errors of the code itself: of its lifecycles, or of no type of ours."""
        live = []
        for task in self.loop.tasks:
            if not task.done():
                live.append(task)
            elif not task.cancelled() and _is_defect(error := task.exception()):
                self.out.defects.append(f"{self.process}: {one_line(error)}")
        self.loop.tasks = live

    # ---- the gate ------------------------------------------------------------------------------------------------

    def enter(self, point: Point) -> Awaitable[Decision]:
        """Hold a step until it is taken (see `steps.Gate`). The end of a write is held by its engine already."""
        if self._pass_once == point.step:
            self._pass_once = None
            return self.passed()
        if self._write_ended and point.step == "transfer.write":
            self._write_ended = False
            return self.passed()
        return self.hold(point)

    def hold(self, point: Point) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.Future(loop=self.loop)
        number, self._gates = self._gates, self._gates + 1
        task = self.loop.running()
        self._held[number] = (point, future, task)
        labels = (point.process, point.step, point.phase, point.req, point.part, point.rank)
        nth = self._seen[labels] = self._seen.get(labels, -1) + 1
        self.out.gates.append(Gate(number, Move(*labels, nth), point, self.loop.causes[task] | self.loop.now_bit))
        return future

    def passed(self) -> asyncio.Future[Decision]:
        future: asyncio.Future[Decision] = asyncio.Future(loop=self.loop)
        future.set_result(GO)
        return future

    async def hold_write(self, session: str, source: int, target: int, nbytes: int) -> int:
        """Between the begin and the end of a write: the end is a step of its own, taken with the write's code."""
        began = self.taken
        self.out.writing = Writing(began, session, source, target, nbytes)
        end = Point(self.process, "transfer.write", "end", began.req, began.part, began.rank, began.region)
        code: int = await self.hold(end)
        self._write_ended = True
        return code

    def pass_at_once(self, step: str, work: Coroutine[Any, Any, object]) -> None:
        """Run work of the set-up that passes one step and waits for nothing."""
        self._pass_once = step
        outer = self.loop.enter()
        at_once(work)
        self.loop.leave(outer)

    def close(self) -> None:
        """Let go of everything that still waits. A machine refers to itself everywhere: this ends it."""
        self._report_to(Outcome())
        self.loop.abandon()
        self.steps.gate = self.steps.record = None
        self.__dict__.clear()


class EncoderMachine(Machine):
    """The encode server."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(ENCODER, 0, scenario)
        tower = ModelTower(self.engine.memory)
        self.core = MMEncoder(tower, self.engine, self.link, self.clock, self.steps, self.profile)
        at_once(self.core.start())
        self.prints = EncoderFootprints(self.core, self.ledger, scenario)

    def _census(self) -> None:
        self.steps.note("process.census", data=self.core.census())


class RankMachine(Machine):
    """One rank: it takes up its requests one after the other."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        super().__init__(f"rank{rank}", rank + 1, scenario)
        config = ReceiverConfig(rank, scenario.tp, (f"http://{ENCODER}",))
        landing = self._landing()
        self.core = MMReceiver(config, self.engine, landing, self.link, self.clock, self.steps, self.profile)
        self.prints = RankFootprints(self.core, self.ledger)
        self._requests: dict[int, asyncio.Task[None]] = {}

    def _landing(self) -> Landing:
        regions, checked = RegionTable(self.engine, self.steps), self.profile.has(Rule.CHECK_REGISTER_STATUS)
        if not self.scenario.pool:
            return PerRequestLanding(self.engine, regions, self.steps, checked)
        pool = LandingPool(self.engine, regions, self.steps, checked, POOL_BYTES)
        self.pass_at_once("mr.register", pool.open())
        return pool

    def _start(self) -> None:
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._requests[number] = self.loop.create_task(self._serve(number))
        self._requests[number].add_done_callback(lambda _: self.out.ended.append(number))

    async def _serve(self, number: int) -> None:
        """Receive, let the next request begin, read, release."""
        items = [Item(modality, str(2 * number + part)) for part, modality in enumerate(self.scenario.modalities)]
        try:
            received = await self.core.receive(f"q{number + 1}", items)
        finally:
            if number + 1 < self.scenario.requests:
                self._begin(number + 1)
        async with received:
            await received.read()

    def _cancel(self, number: int) -> Point:
        self.steps.note("request.cancel", req=f"q{number + 1}", rank=self.core.config.rank)
        self._requests[number].cancel()
        return Point(self.process, "request.cancel", "note", f"q{number + 1}", None, self.core.config.rank)

    def _census(self) -> None:
        regions = len(self.engine.regions) - self.scenario.pool
        census = self.core.census() | {"regions": regions, "sockets": len(self.link.sockets)}
        self.steps.note("process.census", data=census)


def _is_defect(error: BaseException | None) -> TypeGuard[BaseException]:
    return error is not None and (isinstance(error, StateError) or not isinstance(error, EpdLabError))


def _no_time() -> int:
    """Events get their time from the world."""
    return 0
