"""Memory regions: their lifecycle, the table of live ones, and the guard that an RDMA NIC would be."""

from __future__ import annotations

import asyncio

import pytest
import torch
from handoff_world import EnginePool, Hand

from epdlab.engine import TensorBuffer
from epdlab.errors import DeregistrationRefused, RegistrationRefused, SourceUncovered, StateError
from epdlab.regions import TRANSITIONS, MemoryRegion, RegionState, RegionTable
from epdlab.steps import Event, Steps

PENDING, LIVE, REFUSED, RELEASED = RegionState


class Book:
    """A table over a real engine, its events, and a hand on its steps."""

    def __init__(self, engines: EnginePool, strict: bool = False) -> None:
        self.events: list[Event] = []
        self.hand = Hand()
        (self.engine,) = engines.take(1)
        self.table = RegionTable(self.engine, Steps("enc0", self.events.append, self.hand), strict)

    def codes(self, step: str) -> list[object]:
        return [event.result for event in self.events if event.step == step and event.phase == "end"]


@pytest.fixture
async def book(engines: EnginePool) -> Book:
    return Book(engines)


def buffer(nbytes: int = 4096) -> TensorBuffer:
    return TensorBuffer(torch.zeros(nbytes, dtype=torch.uint8))


# ---- lifecycle -------------------------------------------------------------------------------------------------------


async def test_a_region_is_named_admitted_and_released(book: Book) -> None:
    memory = buffer()
    region = book.table.name(memory, "q/part0")
    assert (region.state, book.table.live) == (PENDING, [])
    await book.table.admit(region)
    assert (region.state, book.table.live) == (LIVE, [region])
    assert repr(region) == "MemoryRegion(enc0.mr#1, 4096 bytes, live, writes=0)"
    await book.table.release(region)
    assert (region.state, book.table.live) == (RELEASED, [])
    assert (book.codes("mr.register"), book.codes("mr.deregister")) == ([0], [0])


async def test_release_is_idempotent(book: Book) -> None:
    region = await book.table.register(buffer(), "q")
    for _ in range(3):
        await book.table.release(region)
    assert book.codes("mr.deregister") == [0]


async def test_two_releases_at_once_call_the_engine_once(book: Book) -> None:
    region = await book.table.register(buffer(), "q")
    book.hand.hold("mr.deregister")
    both = [asyncio.ensure_future(book.table.release(region)) for _ in range(2)]
    await book.hand.appears("mr.deregister")
    book.hand.run()
    await asyncio.gather(*both)
    assert (book.codes("mr.deregister"), book.table.live) == ([0], [])


async def test_a_region_that_was_never_admitted_is_none_of_the_engines_business(book: Book) -> None:
    region = book.table.name(buffer(), "q")
    await book.table.release(region)
    assert (region.state, book.codes("mr.deregister")) == (RELEASED, [])


async def test_a_refused_registration_is_an_error(book: Book) -> None:
    memory = buffer()
    first = await book.table.register(memory, "q")
    with pytest.raises(RegistrationRefused, match=r"mr#2 answered -7"):
        await book.table.register(memory, "q")
    assert book.table.live == [first]
    await book.table.release(first)


async def test_a_refused_registration_may_be_hidden_as_upstream_hides_it(book: Book) -> None:
    memory = buffer()
    first = await book.table.register(memory, "q")
    second = await book.table.register(memory, "q", must_succeed=False)
    assert (second.state, book.table.live) == (REFUSED, [first])
    await book.table.release(second, must_succeed=False)
    assert (book.codes("mr.deregister"), book.table.live) == ([0], []), "it took the first one's region away"
    await book.table.release(first, must_succeed=False)
    assert book.codes("mr.deregister") == [0, -3]


async def test_a_refused_region_is_left_alone_where_refusals_are_errors(book: Book) -> None:
    memory = buffer()
    first = await book.table.register(memory, "q")
    second = await book.table.register(memory, "q", must_succeed=False)
    await book.table.release(second)
    assert (book.table.live, book.codes("mr.deregister")) == ([first], [])
    await book.table.release(first)


async def test_a_refused_deregistration_is_an_error_unless_hidden(book: Book) -> None:
    regions = [await book.table.register(buffer(), "q") for _ in range(2)]
    for region in regions:
        assert book.engine.deregister(region.address) == 0
    with pytest.raises(DeregistrationRefused, match="-3"):
        await book.table.release(regions[0])
    await book.table.release(regions[1], must_succeed=False)
    assert book.codes("mr.deregister") == [-3, -3]


@pytest.mark.parametrize("state", RegionState)
@pytest.mark.parametrize("to", RegionState)
def test_only_the_tables_transitions_exist(state: RegionState, to: RegionState) -> None:
    region = MemoryRegion("enc0.mr#1", buffer(), "q")
    region.state = state
    if to in TRANSITIONS[state]:
        region._transition(to)
        assert region.state is to
    else:
        with pytest.raises(StateError, match=f"from {state.value} to {to.value}"):
            region._transition(to)


async def test_a_region_keeps_its_buffer_alive(book: Book) -> None:
    region = await book.table.register(buffer(1 << 20), "q")
    assert book.engine.register(region.address, 1) == -7
    assert region.buffer.address == region.address
    await book.table.release(region)


async def test_drained_waits_for_every_write(book: Book) -> None:
    region = book.table.name(buffer(), "q")
    await region.drained()
    region.begin_write()
    region.begin_write()
    waiting = asyncio.ensure_future(region.drained())
    region.end_write()
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done()
    region.end_write()
    await waiting


# ---- the guard -------------------------------------------------------------------------------------------------------


async def test_the_guard_wants_the_whole_range_in_one_live_region(book: Book) -> None:
    memory = buffer(8192)
    lower, upper = (memory.slice(at, 4096) for at in (0, 4096))
    at = memory.address
    assert not book.table.guard(at, 1)
    first = await book.table.register(lower, "a")
    second = await book.table.register(upper, "b")
    assert book.table.live == [first, second]
    assert all(book.table.guard(at + offset, n) for offset, n in ((0, 4096), (1, 1), (4095, 1), (4096, 4096)))
    assert not any(book.table.guard(at + offset, n) for offset, n in ((-1, 2), (4095, 2), (0, 8192), (8191, 2)))
    assert book.table.covering(at + 5000, 10) is second
    await book.table.release(first)
    assert not book.table.guard(at, 1)
    assert book.table.guard(at + 4096, 4096)
    await book.table.release(second)
    assert not book.table.guard(at + 4096, 1)


async def test_live_regions_stand_by_address_whatever_their_order(book: Book) -> None:
    memory = buffer(3 * 1024)
    regions = [await book.table.register(memory.slice(at * 1024, 1024), "q") for at in (2, 0, 1)]
    assert [region.name for region in book.table.live] == ["enc0.mr#2", "enc0.mr#3", "enc0.mr#1"]
    for region in regions:
        await book.table.release(region)


@pytest.mark.parametrize("covered", [[False, True], [True, False], [False, False], [False]])
def test_an_uncovered_moment_is_an_error_when_asked_for(engines: EnginePool, covered: list[bool]) -> None:
    with pytest.raises(SourceUncovered, match="the write of q/part0"):
        Book(engines, strict=True).table.require(covered, "the write of q/part0")
    Book(engines, strict=False).table.require(covered, "the write of q/part0")


def test_a_covered_write_passes(engines: EnginePool) -> None:
    Book(engines, strict=True).table.require([True, True], "the write")
