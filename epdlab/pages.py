"""Pages: who owns which page of the embedding cache's pool, and which entry goes next.

`PageAllocator` hands out runs of pages; `PagePool` keeps entries over them: filling, ready, pinned, least recently
used first out. Pure bookkeeping: no bytes, no store and no clock pass through here, and nothing waits.
After SGLang 0.5.17 embedding_cache_controller.py (RangePageAllocator, EmbeddingCacheEntry).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .errors import StateError


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Neighbouring pages [start, start + length)."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class PageAllocator:
    """Pages 0..pages-1, handed out as runs: one run where one fits, several where the pool is cut up."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free: list[Run] = [Run(0, pages)] if pages else []

    @property
    def free_pages(self) -> int:
        return sum(run.length for run in self._free)

    @property
    def free_runs(self) -> list[Run]:
        """The free pages, sorted, no two runs touching."""
        return list(self._free)

    def allocate(self, pages: int) -> list[Run] | None:
        """`pages` pages, or None if fewer are free. The first run that holds them all, else runs from the front."""
        if pages > self.free_pages:
            return None
        fit = next((run for run in self._free if run.length >= pages), None)
        return self._take([fit] if fit is not None else self._free, pages)

    def free(self, runs: Sequence[Run]) -> None:
        """Give runs back.

        Raises:
            StateError: a page is free already, given back twice, or outside of the pool; then nothing is freed.
        """
        merged: list[Run] = []
        for run in sorted([*self._free, *runs]):
            if run.start < 0 or run.length <= 0 or run.end > self.pages or (merged and run.start < merged[-1].end):
                raise StateError(f"pages [{run.start}, {run.end}) are not out; free each run once, as allocated")
            if merged and merged[-1].end == run.start:
                merged[-1] = Run(merged[-1].start, merged[-1].length + run.length)
            else:
                merged.append(run)
        self._free = merged

    def _take(self, candidates: Sequence[Run], pages: int) -> list[Run]:
        taken: list[Run] = []
        for run in list(candidates):
            if pages == 0:
                break
            part = Run(run.start, min(run.length, pages))
            pages -= part.length
            taken.append(part)
            at = self._free.index(run)
            self._free[at : at + 1] = [Run(part.end, run.length - part.length)] if part.end < run.end else []
        return taken


class EntryState(Enum):
    """Lifecycle of an entry of the pool."""

    FILLING = "filling"
    READY = "ready"
    GONE = "gone"


TRANSITIONS: dict[EntryState, frozenset[EntryState]] = {
    EntryState.FILLING: frozenset({EntryState.READY, EntryState.GONE}),
    EntryState.READY: frozenset({EntryState.GONE}),
    EntryState.GONE: frozenset(),
}


class Entry:
    """One embedding in the pool: its pages, its state, and how many hold it.

    Whoever holds a pin may read the pages (READY) or fill them (FILLING). No pinned entry is ever evicted.
    """

    __slots__ = ("key", "nbytes", "pins", "runs", "state")

    def __init__(self, key: str, nbytes: int, runs: list[Run]) -> None:
        self.key, self.nbytes, self.runs = key, nbytes, runs
        self.state, self.pins = EntryState.FILLING, 1

    @property
    def pages(self) -> int:
        return sum(run.length for run in self.runs)

    def _transition(self, to: EntryState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"entry {self.key} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def __repr__(self) -> str:
        runs = "+".join(f"{run.start}..{run.end - 1}" for run in self.runs)
        return f"Entry({self.key[:12]}, {self.nbytes} bytes in pages {runs}, {self.state.value}, pins={self.pins})"


class PagePool:
    """Entries over a pool of pages, by key.

    Args:
        pages: how many pages there are.
        page_bytes: bytes of one page.
    """

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._allocator = PageAllocator(pages)
        self._entries: dict[str, Entry] = {}
        self._idle: OrderedDict[str, Entry] = OrderedDict()
        self._idle_pages = 0

    @property
    def pages(self) -> int:
        return self._allocator.pages

    @property
    def free_pages(self) -> int:
        return self._allocator.free_pages

    @property
    def entries(self) -> list[Entry]:
        """All entries, filling and ready, oldest first."""
        return list(self._entries.values())

    def find(self, key: str) -> Entry | None:
        """The entry of a key in whatever state, without a pin: for looking, not for reading its pages."""
        return self._entries.get(key)

    def pin_ready(self, key: str) -> Entry | None:
        """The READY entry of a key, pinned for the caller; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.state is not EntryState.READY:
            return None
        self.pin(entry)
        return entry

    def reserve(self, key: str, nbytes: int) -> Entry | None:
        """A FILLING entry over fresh pages, pinned once for whoever fills it; None if too few pages are free.

        Raises:
            StateError: the key has an entry already, or `nbytes` is not positive.
        """
        if key in self._entries or nbytes <= 0:
            raise StateError(f"no entry {key} of {nbytes} bytes can be reserved; look the key up first")
        runs = self._allocator.allocate(self.pages_for(nbytes))
        if runs is None:
            return None
        entry = self._entries[key] = Entry(key, nbytes, runs)
        return entry

    def ready(self, entry: Entry) -> None:
        """The pages hold the embedding. The filler's pin stays until it unpins."""
        entry._transition(EntryState.READY)

    def discard(self, entry: Entry) -> None:
        """The filling failed: forget the entry and free its pages. The filler's pin goes with it."""
        if entry.state is not EntryState.FILLING:
            raise StateError(f"{entry!r} is not filling; unpin a ready entry and let it be evicted")
        self._remove(entry)

    def pin(self, entry: Entry) -> None:
        """Hold a READY entry a second time.

        Raises:
            StateError: the entry is not READY: its bytes are not there, or not there any more.
        """
        if entry.state is not EntryState.READY:
            raise StateError(f"{entry!r} cannot be pinned; look the key up again")
        entry.pins += 1
        self._not_idle(entry)

    def unpin(self, entry: Entry) -> None:
        """Let go. The last one to let go makes the entry evictable, as the most recently used."""
        if entry.pins == 0 or entry.state is not EntryState.READY:
            raise StateError(f"{entry!r} has no pin to give back; unpin once per pin")
        entry.pins -= 1
        if entry.pins == 0:
            self._idle[entry.key] = entry
            self._idle_pages += entry.pages

    def victim(self, nbytes: int) -> Entry | None:
        """Whom to evict next to make room for `nbytes`; None if that would not help, or is not needed."""
        need = self.pages_for(nbytes)
        free = self.free_pages
        if free >= need or free + self._idle_pages < need:
            return None
        return next(iter(self._idle.values()))

    def evict(self, entry: Entry) -> bool:
        """Drop a READY entry that nobody holds; False if it is held or gone by now."""
        if entry.state is not EntryState.READY or entry.pins:
            return False
        self._remove(entry)
        return True

    def pages_for(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def extents(self, entry: Entry) -> list[tuple[int, int]]:
        """The entry's bytes as (offset in the pool, length), one per run, in order; the last is cut to size."""
        left, extents = entry.nbytes, []
        for run in entry.runs:
            length = min(left, run.length * self.page_bytes)
            extents.append((run.start * self.page_bytes, length))
            left -= length
        return extents

    def _remove(self, entry: Entry) -> None:
        entry._transition(EntryState.GONE)
        entry.pins = 0
        self._not_idle(entry)
        del self._entries[entry.key]
        self._allocator.free(entry.runs)

    def _not_idle(self, entry: Entry) -> None:
        if self._idle.pop(entry.key, None) is not None:
            self._idle_pages -= entry.pages

    def __repr__(self) -> str:
        return f"PagePool({len(self._entries)} entries, {self.free_pages} of {self.pages} pages free)"
