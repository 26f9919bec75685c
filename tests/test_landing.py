"""Landing memory: no byte is owned twice, none is lost, and whoever came first is served first."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from handoff_world import EnginePool, Hand, turns, within
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epdlab.engine import MooncakeEngine
from epdlab.errors import BadBuffer, LandingFull, RegistrationRefused, StateError, StepFault
from epdlab.landing import ALIGNMENT, TRANSITIONS, LandingPool, LandingSlot, PerRequestLanding, SlotState
from epdlab.regions import RegionTable
from epdlab.steps import Event, Steps

UNIT = ALIGNMENT
UNITS = 8


class Ground:
    """Both strategies over a real engine, their events, and a hand on their steps."""

    def __init__(self, engine: MooncakeEngine, nbytes: int = UNITS * UNIT, **options: int) -> None:
        self.events: list[Event] = []
        self.hand = Hand()
        steps = Steps("rank0", self.events.append, self.hand)
        self.regions = RegionTable(engine, steps)
        self.per_request = PerRequestLanding(engine, self.regions, steps, True)
        self.pool = LandingPool(engine, self.regions, steps, True, nbytes, **options)

    def count(self, step: str) -> int:
        return sum(event.step == step and event.phase == "end" and event.result in (0, "ok") for event in self.events)

    def offset(self, slot: LandingSlot) -> int:
        """Of a slot in the pool, in units."""
        at, rest = divmod(slot.address - self.pool._base, UNIT)
        assert rest == 0
        return at


@pytest.fixture
async def ground(engines: EnginePool) -> AsyncIterator[Ground]:
    """Ends with nothing registered."""
    ground = Ground(engines.take(1)[0])
    await ground.pool.open()
    yield ground
    await ground.per_request.close()
    await ground.pool.close()
    assert ground.regions.live == []


def begin(work: Awaitable[LandingSlot]) -> asyncio.Task[LandingSlot]:
    return asyncio.ensure_future(work)  # type: ignore[return-value]


# ---- per request -----------------------------------------------------------------------------------------------------


async def test_per_request_a_slot_is_registered_and_given_back(ground: Ground) -> None:
    landing = ground.per_request
    slot = await landing.allocate(1000, "q")
    assert (slot.nbytes, slot.state, landing.slots) == (1000, SlotState.HELD, [slot])
    assert ground.regions.guard(slot.address, 1000)
    assert repr(slot) == "LandingSlot(rank0.slot#1, 1000 bytes, held, q)"
    await landing.free(slot)
    assert (slot.state, landing.slots) == (SlotState.FREE, [])
    with pytest.raises(BadBuffer, match="freed"):
        _ = slot.buffer.address


async def test_per_request_a_double_free_is_one_free(ground: Ground) -> None:
    slot = await ground.per_request.allocate(8, "q")
    await asyncio.gather(*(ground.per_request.free(slot) for _ in range(3)))
    assert (ground.count("landing.free"), ground.count("mr.deregister")) == (1, 1)


async def test_per_request_quarantine_keeps_the_region(ground: Ground) -> None:
    slot = await ground.per_request.allocate(8, "q")
    await ground.per_request.quarantine(slot)
    assert (slot.state, ground.regions.guard(slot.address, 8)) == (SlotState.QUARANTINED, True)
    await ground.per_request.free(slot)
    with pytest.raises(StateError, match="from free to quarantined"):
        await ground.per_request.quarantine(slot)


async def test_per_request_a_refused_registration_leaves_no_slot(ground: Ground) -> None:
    ground.hand.fault("fail", "mr.register")
    with pytest.raises(RegistrationRefused):
        await ground.per_request.allocate(8, "q")
    assert (ground.per_request.slots, len(ground.regions.live)) == ([], 1)


@pytest.mark.parametrize("step", ["landing.alloc", "mr.register"])
async def test_per_request_cancelled_while_allocating(ground: Ground, step: str) -> None:
    ground.hand.hold(step)
    task = begin(ground.per_request.allocate(8, "q"))
    await ground.hand.appears(step)
    task.cancel()
    await asyncio.wait([task])
    assert (ground.per_request.slots, len(ground.regions.live)) == ([], 1)


async def test_slots_have_names_of_their_own(ground: Ground) -> None:
    slots = [await ground.per_request.allocate(8, "q") for _ in range(3)]
    assert [slot.name for slot in slots] == ["rank0.slot#1", "rank0.slot#2", "rank0.slot#3"]
    told = [event.region for event in ground.events if event.step == "landing.alloc" and event.phase == "end"]
    assert told == [slot.name for slot in slots]


# ---- the pool --------------------------------------------------------------------------------------------------------


async def test_the_pool_registers_once(ground: Ground) -> None:
    for _ in range(3):
        slot = await ground.pool.allocate(100, "q")
        assert ground.regions.guard(slot.address, 100)
        await ground.pool.free(slot)
    assert ground.count("mr.register") == 1


async def test_the_pool_is_cut_by_aligned_first_fit(ground: Ground) -> None:
    pool = ground.pool
    slots = [await pool.allocate(nbytes, "q") for nbytes in (1, UNIT, UNIT + 1, 2 * UNIT)]
    assert [ground.offset(slot) for slot in slots] == [0, 1, 2, 4]
    assert (pool.free_bytes, pool.largest_hole) == (2 * UNIT, 2 * UNIT)
    await pool.free(slots[0])
    await pool.free(slots[2])
    assert (pool.free_bytes, pool.largest_hole) == (5 * UNIT, 2 * UNIT)
    assert ground.offset(await pool.allocate(2 * UNIT, "q")) == 2, "the first hole is too small, the second fits"
    assert ground.offset(await pool.allocate(1, "q")) == 0
    assert ground.offset(await pool.allocate(1, "q")) == 6


async def test_neighbouring_holes_become_one(ground: Ground) -> None:
    slots = [await ground.pool.allocate(UNIT, "q") for _ in range(UNITS)]
    assert (ground.pool.free_bytes, ground.pool.largest_hole) == (0, 0)
    for index in (1, 3, 2):
        await ground.pool.free(slots[index])
    assert ground.pool.largest_hole == 3 * UNIT
    whole = await ground.pool.allocate(3 * UNIT, "q")
    assert ground.offset(whole) == 1


async def test_a_slot_is_as_long_as_was_asked(ground: Ground) -> None:
    slot = await ground.pool.allocate(UNIT + 1, "q")
    assert (slot.nbytes, slot.buffer.nbytes, ground.pool.free_bytes) == (UNIT + 1, UNIT + 1, (UNITS - 2) * UNIT)


@pytest.mark.parametrize("nbytes", [0, -1, -300, -(1 << 40)])
async def test_no_slot_without_bytes(ground: Ground, nbytes: int) -> None:
    for landing in (ground.pool, ground.per_request):
        with pytest.raises(BadBuffer, match="at least 1"):
            await landing.allocate(nbytes, "q")
    assert (ground.pool.free_bytes, ground.pool.largest_hole) == (UNITS * UNIT, UNITS * UNIT)


async def test_more_than_the_whole_pool_fails_at_once(ground: Ground) -> None:
    with pytest.raises(LandingFull, match="--pool-bytes"):
        await ground.pool.allocate(UNITS * UNIT + 1, "q")
    whole = await ground.pool.allocate(UNITS * UNIT, "q")
    with pytest.raises(LandingFull):
        await ground.pool.allocate(UNITS * UNIT + 1, "q")
    await ground.pool.free(whole)


async def test_a_small_one_never_overtakes_a_large_one(ground: Ground) -> None:
    pool = ground.pool
    held = await pool.allocate(7 * UNIT, "first")
    large = begin(pool.allocate(2 * UNIT, "large"))
    await turns()
    small = begin(pool.allocate(1, "small"))
    await turns()
    assert pool.free_bytes == UNIT, "there is room for the small one"
    assert (large.done(), small.done()) == (False, False)
    await pool.free(held)
    assert [ground.offset(await within(task)) for task in (large, small)] == [0, 2]


async def test_one_free_serves_as_many_as_fit_in_order(ground: Ground) -> None:
    pool = ground.pool
    whole = await pool.allocate(UNITS * UNIT, "first")
    tasks = [begin(pool.allocate(units * UNIT, str(units))) for units in (3, 2, 4, 1)]
    await turns()
    await pool.free(whole)
    await turns()
    assert [task.done() for task in tasks] == [True, True, False, False]
    await pool.free(tasks[1].result())
    assert [ground.offset(await within(task)) for task in tasks] == [0, 3, 3, 7]


async def test_waiting_is_bounded(engines: EnginePool) -> None:
    ground = Ground(engines.take(1)[0], max_waiters=2)
    await ground.pool.open()
    whole = await ground.pool.allocate(UNITS * UNIT, "first")
    waiting = [begin(ground.pool.allocate(1, "q")) for _ in range(2)]
    await turns()
    with pytest.raises(LandingFull, match="2 requests wait"):
        await ground.pool.allocate(1, "one too many")
    await ground.pool.free(whole)
    assert [ground.offset(await within(task)) for task in waiting] == [0, 1]
    await ground.pool.close()


@pytest.mark.parametrize("who", [0, 1])
async def test_cancelled_while_waiting(ground: Ground, who: int) -> None:
    pool = ground.pool
    whole = await pool.allocate(UNITS * UNIT, "first")
    waiting = [begin(pool.allocate(UNITS * UNIT, "q")) for _ in range(2)]
    await turns()
    waiting[who].cancel()
    await turns()
    await pool.free(whole)
    slot = await within(waiting[1 - who])
    await pool.free(slot)
    assert (waiting[who].cancelled(), pool.free_bytes) == (True, UNITS * UNIT)


async def test_a_large_one_that_gives_up_lets_the_small_one_go(ground: Ground) -> None:
    held = await ground.pool.allocate(7 * UNIT, "first")
    large, small = begin(ground.pool.allocate(2 * UNIT, "large")), begin(ground.pool.allocate(1, "small"))
    await turns()
    large.cancel()
    assert ground.offset(await within(small)) == 7
    await ground.pool.free(held)


async def test_freed_in_the_moment_a_waiter_gives_up(ground: Ground) -> None:
    """The waiter is cancelled and has not run since: its turn must not be lost, nor break whoever frees."""
    pool = ground.pool
    whole = await pool.allocate(UNITS * UNIT, "first")
    first, second = begin(pool.allocate(UNIT, "first waiter")), begin(pool.allocate(UNIT, "second waiter"))
    await turns()
    first.cancel()
    await pool.free(whole)
    assert ground.offset(await within(second)) == 0
    await asyncio.wait([first])
    assert (first.cancelled(), pool.free_bytes) == (True, (UNITS - 1) * UNIT)


async def test_cancelled_in_the_moment_it_is_served(ground: Ground) -> None:
    pool = ground.pool
    whole = await pool.allocate(UNITS * UNIT, "first")
    waiter = begin(pool.allocate(UNIT, "waiter"))
    await turns()
    await pool.free(whole)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert (waiter.cancelled(), pool.free_bytes, pool.largest_hole) == (True, UNITS * UNIT, UNITS * UNIT)


async def test_cancelled_while_it_is_cut(ground: Ground) -> None:
    ground.hand.hold("landing.alloc")
    task = begin(ground.pool.allocate(UNIT, "q"))
    await ground.hand.appears("landing.alloc")
    assert ground.pool.free_bytes == (UNITS - 1) * UNIT
    task.cancel()
    await asyncio.wait([task])
    assert (ground.pool.slots, ground.pool.free_bytes) == ([], UNITS * UNIT)


async def test_a_fault_while_it_is_cut(ground: Ground) -> None:
    ground.hand.fault("fail", "landing.alloc")
    with pytest.raises(StepFault):
        await ground.pool.allocate(UNIT, "q")
    assert (ground.pool.slots, ground.pool.free_bytes) == ([], UNITS * UNIT)


async def test_a_double_free_gives_the_range_back_once(ground: Ground) -> None:
    first, second = [await ground.pool.allocate(UNIT, "q") for _ in range(2)]
    await asyncio.gather(*(ground.pool.free(first) for _ in range(3)))
    assert ground.pool.free_bytes == (UNITS - 1) * UNIT
    again = await ground.pool.allocate(UNIT, "q")
    await ground.pool.free(first)
    assert (ground.offset(again), again.state, second.state) == (0, SlotState.HELD, SlotState.HELD)


async def test_quarantined_memory_is_not_reused(ground: Ground) -> None:
    slot = await ground.pool.allocate(6 * UNIT, "q")
    await ground.pool.quarantine(slot)
    other = await ground.pool.allocate(2 * UNIT, "q")
    waiter = begin(ground.pool.allocate(UNIT, "waiter"))
    await turns()
    assert (ground.offset(other), waiter.done()) == (6, False)
    await ground.pool.free(slot)
    assert ground.offset(await within(waiter)) == 0


async def test_a_pool_that_is_not_open(engines: EnginePool) -> None:
    pool = Ground(engines.take(1)[0]).pool
    with pytest.raises(StateError, match=r"await pool\.open"):
        await pool.allocate(1, "q")


async def test_closing_the_pool_withdraws_it(engines: EnginePool) -> None:
    (engine,) = engines.take(1)
    ground = Ground(engine)
    await ground.pool.open()
    slot = await ground.pool.allocate(1, "q")
    base = ground.pool._base
    await ground.pool.close()
    await ground.pool.close()
    assert (slot.state, ground.regions.live) == (SlotState.FREE, [])
    assert engine.deregister(base) == -3


async def test_closing_goes_on_after_a_refusal(engines: EnginePool) -> None:
    (engine,) = engines.take(1)
    ground = Ground(engine)
    slots = [await ground.per_request.allocate(8, "q") for _ in range(3)]
    assert engine.deregister(slots[0].address) == 0
    await ground.per_request.close()
    assert [slot.state for slot in slots] == [SlotState.FREE] * 3
    assert [event.result for event in ground.events if event.step == "mr.deregister" and event.phase == "end"] == [
        -3,
        0,
        0,
    ]


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("to", SlotState)
async def test_only_the_tables_transitions_exist(ground: Ground, state: SlotState, to: SlotState) -> None:
    slot = await ground.per_request.allocate(1, "q")
    slot.state = state
    if to in TRANSITIONS[state]:
        slot._transition(to)
    else:
        with pytest.raises(StateError, match=f"from {state.value} to {to.value}"):
            slot._transition(to)
    slot.state = SlotState.HELD


# ---- any order of anything -------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Allocate, free, free again, quarantine, cancel, in any order, with or without the tasks running in between."""

    engine: MooncakeEngine

    @initialize()
    def open(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ground = Ground(self.engine, max_waiters=3)
        self.loop.run_until_complete(self.ground.pool.open())
        self.asked: list[asyncio.Task[LandingSlot]] = []
        self.served: list[int] = []
        self.frees: list[asyncio.Task[None]] = []
        self.freed: list[LandingSlot] = []

    def run(self) -> None:
        self.loop.run_until_complete(turns())

    @property
    def held(self) -> list[LandingSlot]:
        return [slot for slot in self.ground.pool.slots if slot not in self.freed]

    @rule(nbytes=st.integers(1, UNITS * UNIT), runs=st.booleans())
    def allocate(self, nbytes: int, runs: bool) -> None:
        number = len(self.asked)
        task = self.loop.create_task(self.ground.pool.allocate(nbytes, str(number)))
        task.add_done_callback(lambda done: self._note(number, done))
        self.asked.append(task)
        if runs:
            self.run()

    def _note(self, number: int, done: asyncio.Task[LandingSlot]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.served.append(number)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), times=st.integers(1, 2))
    def free(self, data: Any, times: int) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.freed.append(slot)
        self.frees += [self.loop.create_task(self.ground.pool.free(slot)) for _ in range(times)]
        self.run()

    @precondition(lambda self: any(slot.state is SlotState.HELD for slot in self.held))
    @rule(data=st.data())
    def quarantine(self, data: Any) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.held if slot.state is SlotState.HELD]))
        self.loop.run_until_complete(self.ground.pool.quarantine(slot))

    @precondition(lambda self: any(not task.done() for task in self.asked))
    @rule(data=st.data(), runs=st.booleans())
    def cancel(self, data: Any, runs: bool) -> None:
        data.draw(st.sampled_from([task for task in self.asked if not task.done()])).cancel()
        if runs:
            self.run()

    @invariant()
    def no_byte_is_owned_twice(self) -> None:
        pool = self.ground.pool
        spans = sorted((slot.address, slot.address + slot.nbytes) for slot in pool.slots)
        spans += [(pool._base + offset, pool._base + offset + length) for offset, length in pool._holes]
        spans.sort()
        assert all(start % UNIT == pool._base % UNIT for start, _ in spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    @invariant()
    def served_in_the_order_asked(self) -> None:
        assert self.served == sorted(self.served)

    @rule()
    def none_is_lost(self) -> None:
        self.run()
        pool = self.ground.pool
        owned = sum(pool._aligned(slot.nbytes) for slot in pool.slots)
        assert owned + pool.free_bytes == pool.nbytes
        assert not pool._waiting or pool._waiting[0][0] > pool.largest_hole, "the first in line would fit"
        assert all(task.done() and task.exception() is None for task in self.frees)
        for task in self.asked:
            assert not task.done() or task.cancelled() or isinstance(task.exception(), LandingFull | None)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.none_is_lost()
        while self.held:
            self.freed.append(self.held[0])
            self.loop.run_until_complete(self.ground.pool.free(self.freed[-1]))
            self.run()
        assert all(task.done() for task in self.asked)
        assert self.ground.pool.largest_hole == self.ground.pool.nbytes
        self.loop.run_until_complete(self.ground.pool.close())
        assert self.ground.regions.live == []
        self.loop.close()


def test_any_order_of_anything(engines: EnginePool) -> None:
    machine = type("AnyOrderHere", (AnyOrder,), {"engine": engines.take(1)[0]})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
    machine.TestCase("runTest").debug()
