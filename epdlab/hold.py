"""Who holds an entry of the cache: requests that will read it, and a filling that others may wait for.

Pins are counted in `pages`; here is who has them. No bytes and no store pass through here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .pages import Entry, PagePool
from .store_object import Item


class Hold:
    """What one request found: its entries, pinned until `release`, so that none is evicted before it is read.

    Attributes:
        expected: which items are here, on their way, or in the store.
        entries: the pinned entry of each item that is here.
    """

    def __init__(self, pool: PagePool, items: Sequence[Item]) -> None:
        self.items = list(items)
        self.expected = [False] * len(self.items)
        self.entries: list[Entry | None] = [None] * len(self.items)
        self.released = False
        self._pool = pool

    def take(self, index: int, entry: Entry) -> None:
        """Pin a READY entry for this request. Too late, it does nothing."""
        if not self.released and self.entries[index] is None:
            self._pool.pin(entry)
            self.entries[index], self.expected[index] = entry, True

    def release(self) -> None:
        """Let every entry go. Idempotent."""
        self.released = True
        for index, entry in enumerate(self.entries):
            if entry is not None:
                self.entries[index] = None
                self._pool.unpin(entry)

    def __repr__(self) -> str:
        held = sum(entry is not None for entry in self.entries)
        return f"Hold({held} of {len(self.items)} items, {'released' if self.released else 'held'})"


class Fill:
    """An entry being filled, and who waits for it. Once somebody waited in vain it is `late`: nobody else waits."""

    def __init__(self, item: Item, entry: Entry) -> None:
        self.item, self.entry = item, entry
        self.waiting: list[tuple[Hold, int]] = []
        self.late = False
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
