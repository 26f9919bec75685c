"""The pool's bookkeeping under random operations: no page has two owners, none is lost, nothing held is evicted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from epdlab.errors import StateError
from epdlab.pages import Entry, EntryState, PageAllocator, PagePool, Run

PAGE = 4096


def pages_of(runs: list[Run]) -> list[int]:
    return [page for run in runs for page in range(run.start, run.end)]


def test_one_run_where_one_fits() -> None:
    allocator = PageAllocator(10)
    first, second, third = (allocator.allocate(2), allocator.allocate(3), allocator.allocate(2))
    assert (first, second, third) == ([Run(0, 2)], [Run(2, 3)], [Run(5, 2)])
    allocator.free([Run(0, 2)])
    assert allocator.allocate(3) == [Run(7, 3)]


def test_several_runs_where_none_fits() -> None:
    allocator = PageAllocator(6)
    for _ in range(6):
        allocator.allocate(1)
    allocator.free([Run(0, 1), Run(2, 1), Run(4, 2)])
    assert allocator.allocate(4) == [Run(0, 1), Run(2, 1), Run(4, 2)]
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []


@pytest.mark.parametrize("runs", [[Run(0, 1)], [Run(3, 2)], [Run(4, 1), Run(4, 1)], [Run(-1, 1)], [Run(5, 9)]])
def test_a_page_is_freed_once_and_only_if_it_was_out(runs: list[Run]) -> None:
    allocator = PageAllocator(6)
    allocator.allocate(6)
    allocator.free([Run(0, 4)])
    with pytest.raises(StateError, match="free each run once"):
        allocator.free(runs)
    assert allocator.free_runs == [Run(0, 4)]


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations and frees, against a plain set of owned pages."""

    taken = Bundle("taken")

    @initialize(pages=st.integers(0, 40))
    def start(self, pages: int) -> None:
        self.allocator, self.owned = PageAllocator(pages), set[int]()

    @rule(target=taken, pages=st.integers(0, 12))
    def allocate(self, pages: int) -> list[Run]:
        free = self.allocator.pages - len(self.owned)
        fits = any(run.length >= pages for run in self.allocator.free_runs)
        runs = self.allocator.allocate(pages)
        assert (runs is None) == (pages > free)
        got = pages_of(runs or [])
        assert len(got) == len(set(got)) == (0 if runs is None else pages)
        assert self.owned.isdisjoint(got)
        assert not (fits and runs and len(runs) > 1)
        self.owned.update(got)
        return runs or []

    @rule(runs=consumes(taken))
    def free(self, runs: list[Run]) -> None:
        self.allocator.free(runs)
        self.owned.difference_update(pages_of(runs))

    @invariant()
    def no_page_is_lost(self) -> None:
        free = self.allocator.free_runs
        assert sorted([*pages_of(free), *self.owned]) == list(range(self.allocator.pages))
        assert self.allocator.free_pages == sum(run.length for run in free)
        assert all(left.end < right.start for left, right in itertools.pairwise(free))


class PoolMachine(RuleBasedStateMachine):
    """Random lives of entries. A model of the bytes, page by page, shows what a reader would read."""

    @initialize(pages=st.integers(1, 16))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages, PAGE)
        self.filling: list[Entry] = []
        self.held: list[Entry] = []
        self.bytes: dict[int, str] = {}

    def key(self, number: int) -> str:
        return f"key{number}"

    @rule(number=st.integers(0, 9), nbytes=st.integers(1, 8 * PAGE), evict=st.booleans())
    def reserve(self, number: int, nbytes: int, evict: bool) -> None:
        if self.pool.find(self.key(number)) is not None:
            with pytest.raises(StateError):
                self.pool.reserve(self.key(number), nbytes)
            return
        need = self.pool.pages_for(nbytes)
        reachable = self.pool.free_pages + sum(entry.pages for entry in self.pool.entries if self.evictable(entry))
        while evict and (victim := self.pool.victim(nbytes)) is not None:
            assert self.evictable(victim)
            assert self.pool.evict(victim)
        entry = self.pool.reserve(self.key(number), nbytes)
        if evict:
            assert (entry is not None) == (need <= reachable)
        if entry is not None:
            assert entry.pages == need
            self.filling.append(entry)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        entry = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        for page in pages_of(entry.runs):
            self.bytes[page] = entry.key
        self.pool.ready(entry)
        self.held.append(entry)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def give_up_filling(self, data: st.DataObject) -> None:
        entry = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        self.pool.discard(entry)
        with pytest.raises(StateError):
            self.pool.ready(entry)

    @rule(number=st.integers(0, 9))
    def pin(self, number: int) -> None:
        entry = self.pool.pin_ready(self.key(number))
        known = self.pool.find(self.key(number))
        assert (entry is None) == (known is None or known.state is not EntryState.READY)
        if entry is not None:
            self.held.append(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pool.unpin(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(number=st.integers(0, 9))
    def evict(self, number: int) -> None:
        entry = self.pool.find(self.key(number))
        if entry is not None:
            evictable = self.evictable(entry)
            assert self.pool.evict(entry) == evictable
            assert (entry.state is EntryState.GONE) == evictable

    def evictable(self, entry: Entry) -> bool:
        return entry.state is EntryState.READY and entry not in self.held

    @invariant()
    def no_page_is_owned_twice_and_none_is_lost(self) -> None:
        owned = [page for entry in self.pool.entries for page in pages_of(entry.runs)]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.pool.free_pages == self.pool.pages

    @invariant()
    def no_evicted_entry_is_read(self) -> None:
        for entry in self.held:
            assert entry.state is EntryState.READY
            assert {self.bytes[page] for page in pages_of(entry.runs)} == {entry.key}

    @invariant()
    def pins_are_those_of_the_holders(self) -> None:
        for entry in self.pool.entries:
            filler = entry.state is EntryState.FILLING
            assert entry.pins == self.held.count(entry) + filler

    @invariant()
    def extents_are_the_bytes(self) -> None:
        for entry in self.pool.entries:
            extents = self.pool.extents(entry)
            assert sum(length for _, length in extents) == entry.nbytes
            assert len(extents) == len(entry.runs)
            assert all(0 < length <= run.length * PAGE for (_, length), run in zip(extents, entry.runs, strict=True))


AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True)
TestAllocator = AllocatorMachine.TestCase
TestPool = PoolMachine.TestCase


@settings(derandomize=True)
@given(order=st.permutations(list(range(4))))
def test_the_least_recently_let_go_is_evicted_first(order: list[int]) -> None:
    pool = PagePool(4, PAGE)
    entries = [pool.reserve(f"key{number}", PAGE) for number in range(4)]
    for entry in entries:
        assert entry is not None
        pool.ready(entry)
    for number in order:
        pool.unpin(entries[number])  # type: ignore[arg-type]
    gone = []
    for need in range(1, 5):
        victim = pool.victim(need * PAGE)
        assert victim is not None
        gone.append(victim.key)
        pool.evict(victim)
    assert gone == [f"key{number}" for number in order]


def test_nothing_is_evicted_in_vain() -> None:
    pool = PagePool(4, PAGE)
    small, held = pool.reserve("small", PAGE), pool.reserve("held", 2 * PAGE)
    assert small is not None
    assert held is not None
    pool.ready(small)
    pool.unpin(small)
    assert pool.victim(3 * PAGE) is None
    assert pool.victim(PAGE) is None
    assert pool.victim(2 * PAGE) is small


def test_pins_are_given_back_once() -> None:
    pool = PagePool(1, PAGE)
    entry = pool.reserve("key", 1)
    assert entry is not None
    with pytest.raises(StateError, match="look the key up again"):
        pool.pin(entry)
    pool.ready(entry)
    with pytest.raises(StateError, match="not filling"):
        pool.discard(entry)
    pool.unpin(entry)
    with pytest.raises(StateError, match="once per pin"):
        pool.unpin(entry)
