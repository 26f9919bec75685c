"""The embedding cache: embeddings made once, kept in a pool of pages here and in the Mooncake Store for everybody.

Follow one item: `lookup` finds it here or in the store, `fetch` brings it into the pool, `read` copies it out;
`insert` copies a fresh one in and writes it to the store behind the request's back. Whatever fails costs a vision
forward, never a request and never a wrong embedding: no method here raises for the store's sake. Who owns which page
is `pages`' business, where their bytes are `page_memory`'s, what the store answers `store_client`'s.
After SGLang 0.5.17 embedding_cache_controller.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import UsageError, one_line
from .hold import Fill, Hold
from .labels import REQUEST_LABELS
from .page_memory import PageMemory
from .pages import Entry, PagePool
from .steps import Steps
from .store_client import Outcome, StoreClient
from .store_object import Item

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PAGE_UNIT = 4096
INLINE_BYTES = 1 << 20  # a copy up to this size is done before a thread would have woken up


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The cache's sizes and patience.

    Attributes:
        pool_bytes: host memory for embeddings; page_bytes: one page of it.
        fetch_wait_s: how long a request waits for the store before it runs the vision forward instead.
        retry_s: pause before the one retry of a put the store had no room for (it evicts in the background).
    """

    pool_bytes: int = 256 << 20
    page_bytes: int = 256 << 10
    fetch_wait_s: float = 2.0
    retry_s: float = 0.1

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.page_bytes % PAGE_UNIT or self.pool_bytes < self.page_bytes:
            raise UsageError(
                f"a pool of {self.pool_bytes} bytes in pages of {self.page_bytes} cannot be; "
                f"pages are a multiple of {PAGE_UNIT} bytes, and the pool holds at least one"
            )


@dataclass(slots=True)
class Counters:
    """What became of the items that were looked up, in items.

    Attributes:
        local_hit: read from the pool; global_hit: fetched from the store.
        miss: in neither; fallback: seen in the store, or promised by another request, and then not had.
        evicted: entries that left the pool for others.
        refused: embeddings that found no room, in the pool or in the store.
        reasons: everything that did not go well, by `call:outcome`.
    """

    local_hit: int = 0
    global_hit: int = 0
    miss: int = 0
    fallback: int = 0
    evicted: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> dict[str, int]:
        """The counts without the reasons."""
        return {name: value for name, value in asdict(self).items() if name != "reasons"}


class EmbeddingCache:
    """A pool of pages in this process, in front of a store that others share.

    Args:
        steps: where its actions are recorded, held and faulted.
        store: None keeps embeddings in this process only.
    """

    def __init__(self, steps: Steps, store: StoreClient | None, config: CacheConfig | None = None) -> None:
        self.steps, self.store, self.config = steps, store, config or CacheConfig()
        self.counters = Counters()
        self.pool = PagePool(self.config.pool_bytes // self.config.page_bytes, self.config.page_bytes)
        self.memory = PageMemory(self.pool)
        self._fills: dict[str, Fill] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Touch the pool's memory and register it with the store, once.

        Raises:
            StoreUnavailable: the store refused it.
        """
        await asyncio.to_thread(self.memory.touch)
        if self.store is not None:
            self.store.register(self.memory.buffer)

    async def close(self) -> None:
        """Give what is under way a moment, then leave the store. Idempotent."""
        await self.settled(self.config.fetch_wait_s)
        if self.store is not None:
            await self.store.close()
        await self.settled(self.config.fetch_wait_s)

    async def settled(self, timeout_s: float | None = None) -> bool:
        """Wait until no fetch and no write-behind is under way; False if the time is over first."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while self._tasks:
            left = None if give_up is None else max(give_up - time.monotonic(), 0)
            await asyncio.wait(set(self._tasks), timeout=left)
            if left == 0:
                return not self._tasks
        return True

    # ---- finding -------------------------------------------------------------------------------------------------

    async def lookup(self, items: Sequence[Item]) -> Hold:
        """Look in the pool, then ask the store for all the rest at once. What is here is pinned at once.

        The caller releases the hold.
        """
        hold = Hold(self.pool, items)
        try:
            ends = functools.partial(_found, hold)
            await self.steps.wait("cache.lookup", lambda: self._lookup(hold), ends, **_labels())
        except Exception as error:
            self._went_wrong("lookup", error)
        except BaseException:
            hold.release()
            raise
        self.counters.local_hit += sum(entry is not None for entry in hold.entries)
        self.counters.miss += hold.expected.count(False)
        return hold

    async def _lookup(self, hold: Hold) -> None:
        asked = []
        for index, item in enumerate(hold.items):
            entry, fill = self.pool.find(item.key), self._fills.get(item.key)
            if fill is not None:
                hold.expected[index] = not fill.late
            elif entry is not None:
                hold.take(index, entry)
            else:
                asked.append(index)
        if asked and self.store is not None:
            outcomes = await self.store.exist([hold.items[index].key for index in asked])
            self._count("exist", [outcome for outcome in outcomes if outcome is not Outcome.MISSING])
            for index, outcome in zip(asked, outcomes, strict=True):
                hold.expected[index] = outcome is Outcome.OK

    async def fetch(self, hold: Hold, wanted: Sequence[bool]) -> None:
        """Bring the wanted items that are not here yet into the pool, with one get for all of them.

        Returns once each is here, or cannot be had, or `fetch_wait_s` is over; `hold.entries` says which are here.
        A get that takes longer keeps its pages until it ends.
        """
        indices = [index for index, want in enumerate(wanted) if want and hold.entries[index] is None]
        try:
            own, others = await self._begin_fetch(hold, indices)
            await self._wait([*own, *others])
        except Exception as error:
            self._went_wrong("fetch", error)
            return
        fetched = {fill.item.key for fill in own}
        for index in indices:
            if hold.entries[index] is not None and hold.items[index].key in fetched:
                self.counters.global_hit += 1
            elif hold.entries[index] is not None:
                self.counters.local_hit += 1

    async def _wait(self, fills: list[Fill]) -> None:
        if fills:
            await asyncio.wait([fill.done for fill in fills], timeout=self.config.fetch_wait_s)
        for fill in fills:
            fill.late = not fill.done.done()
        self._count("get", [Outcome.TIMEOUT for fill in fills if fill.late])

    async def _begin_fetch(self, hold: Hold, indices: list[int]) -> tuple[list[Fill], list[Fill]]:
        """Fills of our own, under way, and those of others to wait for."""
        own: list[Fill] = []
        others: list[Fill] = []
        try:
            for index in indices:
                item = hold.items[index]
                mine = await self._claim(item)
                fill = mine or self._fills.get(item.key)
                entry = self.pool.find(item.key)
                if fill is not None:
                    fill.waiting.append((hold, index))
                    (others if mine is None else own).append(fill)
                elif entry is not None:
                    hold.take(index, entry)
        finally:
            if own:
                self._spawn(self._fill(own))
        return own, others

    async def _fill(self, fills: list[Fill]) -> None:
        """One get for fresh entries; each becomes ready only if it is whole and is what it should be."""
        good = [False] * len(fills)
        try:
            outcomes = await self._transfer("cache.get", fills)
            await self._mend(fills, outcomes)
            good = [outcome is Outcome.OK for outcome in outcomes]
        except Exception as error:
            self._went_wrong("get", error)
        for fill, whole in zip(fills, good, strict=True):
            self._settle(fill, whole)
            if whole:
                self.pool.unpin(fill.entry)

    async def _mend(self, fills: Sequence[Fill], outcomes: Sequence[Outcome]) -> None:
        """Remove objects that are no good for anybody, or the next insert would leave them as they are."""
        assert self.store is not None
        for fill, outcome in zip(fills, outcomes, strict=True):
            corrupt = outcome is Outcome.CORRUPT
            if outcome in (Outcome.INVALID, Outcome.TRANSFER_FAILED):
                corrupt = await self.store.size(fill.item.key) not in (None, fill.item.object_bytes)
            if corrupt:
                self.counters.reasons["object:removed"] += 1
                await self.store.remove(fill.item.key, force=True)

    async def read(self, hold: Hold, index: int, into: torch.Tensor) -> bool:
        """Copy a held entry's bytes into a contiguous tensor of its size; False if that failed."""
        entry = hold.entries[index]
        if entry is None:
            return False
        try:
            return await self._copy(entry, ("pool", "embedding"), lambda: self.memory.read(entry, into))
        except Exception as error:
            self._went_wrong("read", error)
            return False

    # ---- adding --------------------------------------------------------------------------------------------------

    async def insert(self, fresh: Sequence[tuple[Item, torch.Tensor]]) -> None:
        """Copy fresh embeddings (contiguous tensors) into the pool; they go to the store after this returns."""
        await asyncio.shield(self._spawn(self._insert(fresh)))

    async def _insert(self, fresh: Sequence[tuple[Item, torch.Tensor]]) -> None:
        filled = [fill for item, rows in fresh if (fill := await self._insert_one(item, rows)) is not None]
        if filled and self.store is not None:
            self._spawn(self._put(filled))
        else:
            self._unpin(filled)

    async def _insert_one(self, item: Item, rows: torch.Tensor) -> Fill | None:
        try:
            fill = await self._claim(item)
        except Exception as error:
            self._went_wrong("insert", error)
            return None
        return fill if fill is not None and await self._write(fill, rows) else None

    async def _write(self, fill: Fill, rows: torch.Tensor) -> bool:
        good = False
        try:
            write = functools.partial(self.memory.write, fill.entry, fill.item, rows)
            good = await self._copy(fill.entry, ("embedding", "pool"), write)
        except Exception as error:
            self._went_wrong("insert", error)
        self._settle(fill, good)
        return good

    async def _put(self, fills: list[Fill]) -> None:
        """Write behind: one put, and one more for what found no room at first."""
        try:
            full = await self._put_once(fills)
            if full:
                await asyncio.sleep(self.config.retry_s)
                self.counters.refused += len(await self._put_once(full))
        except Exception as error:
            self._went_wrong("put", error)
        self._unpin(fills)

    async def _put_once(self, fills: list[Fill]) -> list[Fill]:
        """Those the store had no room for."""
        outcomes = await self._transfer("cache.put", fills)
        return [fill for fill, outcome in zip(fills, outcomes, strict=True) if outcome is Outcome.NO_ROOM]

    async def _transfer(self, step: str, fills: Sequence[Fill]) -> list[Outcome]:
        """One call for all of them, between the pool and the segments of the store."""
        assert self.store is not None
        store, keys = self.store, [fill.item.key for fill in fills]
        buffers = [self.memory.extents(fill.entry) for fill in fills]

        def call() -> Coroutine[Any, Any, list[Outcome]]:
            if step == "cache.put":
                return store.put(keys, buffers)
            return store.get(keys, buffers, lambda index: self.memory.intact(fills[index].entry, fills[index].item))

        ends = ("pool", "segment") if step == "cache.put" else ("segment", "pool")
        data = {"keys": [_short(key) for key in keys], "from": ends[0], "to": ends[1]}
        outcomes = await self.steps.wait(
            step,
            call,
            lambda outcomes: {"data": data | {"outcomes": [outcome.value for outcome in outcomes]}},
            bytes=sum(fill.item.object_bytes for fill in fills),
            peer="store",
            data=data,
            **_labels(),
        )
        self._count(step.removeprefix("cache."), outcomes)
        return outcomes

    # ---- entries ------------------------------------------------------------------------------------------------

    async def _claim(self, item: Item) -> Fill | None:
        """A fill over fresh pages, evicting if need be; None if the key has an entry by now, or nothing fits."""
        for _ in range(self.pool.pages + 1):
            if self.pool.find(item.key) is not None:
                return None
            entry = self.pool.reserve(item.key, item.nbytes)
            if entry is not None:
                fill = self._fills[item.key] = Fill(item, entry)
                return fill
            victim = self.pool.victim(item.nbytes)
            if victim is None:
                break
            await self._evict(victim)
        self.counters.refused += 1
        return None

    async def _evict(self, victim: Entry) -> None:
        def evict() -> None:
            self.counters.evicted += self.pool.evict(victim)

        data = {"key": _short(victim.key)}
        await self.steps.do("cache.evict", evict, bytes=victim.nbytes, data=data, **_labels())

    def _settle(self, fill: Fill, good: bool) -> None:
        """The filling has ended. A good entry is pinned for all who wait before the filler lets go of it."""
        del self._fills[fill.item.key]
        if good:
            self.pool.ready(fill.entry)
            for hold, index in fill.waiting:
                hold.take(index, fill.entry)
        else:
            self.pool.discard(fill.entry)
        fill.done.set_result(good)

    def _unpin(self, fills: Sequence[Fill]) -> None:
        for fill in fills:
            self.pool.unpin(fill.entry)

    async def _copy(self, entry: Entry, ends: tuple[str, str], copy: Callable[[], None]) -> bool:
        """Whether the bytes were copied: a dropped step copies nothing."""

        async def copied() -> bool:
            await asyncio.to_thread(copy) if entry.nbytes > INLINE_BYTES else copy()
            return True

        done = await self.steps.wait(
            "cache.copy",
            copied,
            bytes=entry.nbytes,
            data={"key": _short(entry.key), "from": ends[0], "to": ends[1], "runs": len(entry.runs)},
            **_labels(),
        )
        return done is True

    # ---- housekeeping --------------------------------------------------------------------------------------------

    def census(self) -> dict[str, int]:
        """What is under way or held, by kind."""
        pinned = sum(entry.pins > 0 for entry in self.pool.entries)
        return {"fills": len(self._fills), "cache_tasks": len(self._tasks), "pinned": pinned}

    def _count(self, call: str, outcomes: Sequence[Outcome]) -> None:
        self.counters.reasons.update(f"{call}:{o.value}" for o in outcomes if o is not Outcome.OK)

    def _went_wrong(self, call: str, error: Exception) -> None:
        self.counters.reasons[f"{call}:error"] += 1
        log.warning("embedding cache: %s failed, the vision forward goes on: %s", call, one_line(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __repr__(self) -> str:
        return f"EmbeddingCache({self.pool!r}, {self.store or 'no store'})"


def _found(hold: Hold, _: object) -> dict[str, Any]:
    here = sum(entry is not None for entry in hold.entries)
    expected = sum(hold.expected)
    keys = [_short(item.key) for item in hold.items]
    return {"data": {"keys": keys, "local": here, "global": expected - here, "missing": len(keys) - expected}}


def _labels() -> dict[str, Any]:
    return dict(REQUEST_LABELS.get())


def _short(key: str) -> str:
    """Enough of a key to tell it from others in a trace."""
    return key[:16]
