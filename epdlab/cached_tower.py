"""A tower with a memory: it asks the embedding cache first and runs the vision forward for the rest.

It has a tower's interface, so the encode server does not know whether there is a cache. TP ranks agree here on what
counts as a hit, because all of them must run the vision forward on the same items. No store call is made here.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from .encode_server import Prepared, Tower
from .engine import TensorBuffer
from .hold import Hold
from .labels import REQUEST_LABELS
from .modality import Modality
from .ports import Buffer
from .steps import Steps
from .store import CacheConfig, EmbeddingCache
from .store_client import StoreClient, StoreConfig
from .store_object import Item, cache_key

if TYPE_CHECKING:
    import torch

class Agreement(Protocol):
    """How the TP ranks of one encoder agree on a mask."""

    async def agree(self, tag: str, mask: list[bool]) -> list[bool]:
        """The AND of every rank's mask for this tag.

        The tag names request and question, so that two requests under way never take each other's answer: in SGLang
        0.5.17 one rank sends in the order its lookups end, the others receive in the order their requests began.
        """


class Alone:
    """An encoder of one rank."""

    async def agree(self, tag: str, mask: list[bool]) -> list[bool]:
        return mask


class CachedTower:
    """A tower in front of which an embedding cache stands.

    Args:
        device: where an assembled embedding goes: where the inner tower's would be.
    """

    def __init__(
        self, inner: Tower, cache: EmbeddingCache, device: str = "cpu", agreement: Agreement | None = None
    ) -> None:
        self.inner, self.cache, self._device = inner, cache, device
        self._agreement = agreement or Alone()
        self._fingerprint = ""

    @property
    def counters(self) -> Mapping[str, int]:
        """local_hit, global_hit, miss, fallback, evicted, refused."""
        return self.cache.counters.numbers()

    async def prepare(self, items: Sequence[str], modality: Modality) -> Prepared:
        return await self.inner.prepare(items, modality)

    def subset(self, prepared: Prepared, indices: Sequence[int]) -> Prepared:
        return self.inner.subset(prepared, indices)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        """One embedding per part: cached items are copied in, the rest computed in one forward, and cached.

        While the forward runs, the items the store has are fetched. What cannot be had is computed after all.
        """
        self._fingerprint = self._fingerprint or await asyncio.to_thread(self.inner.fingerprint)
        work = _Work(batch, [item for prepared in batch for item in self._items(prepared)])
        hold = await self.cache.lookup(work.items)
        try:
            expected = await self._agreement.agree(f"lookup {work.tag}", list(hold.expected))
            await self._fetch_and_compute(work, hold, expected)
            had = await self._agreement.agree(f"fetch {work.tag}", await self._read(work, hold, expected))
            lost = [want and not got for want, got in zip(expected, had, strict=True)]
            self.cache.counters.fallback += sum(lost)
            await self._compute(work, lost)
        finally:
            hold.release()
        await self.cache.insert([(work.items[index], rows) for index, rows in sorted(work.fresh.items())])
        return [await self._assembled(work, part) for part in range(len(batch))]

    async def _fetch_and_compute(self, work: _Work, hold: Hold, expected: Sequence[bool]) -> None:
        fetching = asyncio.create_task(self.cache.fetch(hold, expected))
        try:
            await self._compute(work, [not hit for hit in expected])
        finally:
            await fetching

    async def _read(self, work: _Work, hold: Hold, expected: Sequence[bool]) -> list[bool]:
        """Copy what is here to its place; for which items that worked."""
        done = [False] * len(expected)
        for index in (index for index, hit in enumerate(expected) if hit):
            done[index] = await self.cache.read(hold, index, work.place(index, self._device))
        return done

    async def _compute(self, work: _Work, wanted: Sequence[bool]) -> None:
        """One vision forward over just these items."""
        picked = [(part, indices) for part in range(len(work.batch)) if (indices := work.wanted(part, wanted))]
        if not picked:
            return
        subsets = []
        for part, indices in picked:
            prepared, first = work.batch[part], work.first[part]
            whole = len(indices) == len(prepared.tokens)
            subsets.append(prepared if whole else self.inner.subset(prepared, [index - first for index in indices]))
        for (part, indices), buffer in zip(picked, await self.inner.forward(subsets), strict=True):
            work.computed(part, indices, buffer)

    async def _assembled(self, work: _Work, part: int) -> Buffer:
        """The part's embedding: the forward's own buffer if nothing was cached, else put together."""
        if part in work.whole:
            return work.whole[part]
        for index in work.indices(part):
            if (rows := work.fresh.get(index)) is not None:
                await asyncio.to_thread(work.place(index, self._device).copy_, rows)
                data = {"key": work.items[index].key[:16], "from": "forward", "to": "embedding"}
                labels = dict(REQUEST_LABELS.get())
                self.cache.steps.note("cache.copy", bytes=work.items[index].nbytes, data=data, **labels)
        return TensorBuffer(work.outputs[part])

    def _items(self, prepared: Prepared) -> list[Item]:
        dim, row_bytes = prepared.dim, prepared.dim * prepared.element_size
        items = []
        for pixels, grid, tokens in zip(prepared.keys, prepared.grid, prepared.tokens, strict=True):
            key = cache_key(self._fingerprint, prepared.modality, grid, pixels)
            items.append(Item(key, tokens, dim, prepared.dtype, tokens * row_bytes))
        return items

    async def close(self) -> None:
        """Leave the store."""
        await self.cache.close()

    def __repr__(self) -> str:
        return f"CachedTower({self.inner!r}, {self.cache!r})"


class _Work:
    """One batch on its way: where each item belongs, what the forward made, what is being put together.

    Attributes:
        items: every item of every part, in order; first: the index of each part's first item.
        fresh: computed items' bytes, views into the forward's buffers.
        whole: parts that were computed as a whole; outputs: parts [tokens, dim] that are put together.
    """

    def __init__(self, batch: Sequence[Prepared], items: list[Item]) -> None:
        self.batch, self.items = batch, items
        self.first = [0, *itertools.accumulate(len(prepared.tokens) for prepared in batch)]
        self.fresh: dict[int, torch.Tensor] = {}
        self.whole: dict[int, Buffer] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.tag = hashlib.sha256("".join(item.key for item in items).encode()).hexdigest()

    def indices(self, part: int) -> range:
        return range(self.first[part], self.first[part + 1])

    def wanted(self, part: int, mask: Sequence[bool]) -> list[int]:
        return [index for index in self.indices(part) if mask[index]]

    def computed(self, part: int, indices: list[int], buffer: Buffer) -> None:
        """Take the forward's buffer apart into its items, without a copy."""
        at = 0
        for index in indices:
            nbytes = self.items[index].nbytes
            piece = buffer.slice(at, nbytes)
            assert isinstance(piece, TensorBuffer)
            self.fresh[index], at = piece.tensor, at + nbytes
        if len(indices) == len(self.batch[part].tokens):
            self.whole[part] = buffer

    def place(self, index: int, device: str) -> torch.Tensor:
        """The item's bytes in its part's output, which is made when first asked for."""
        import torch

        part = bisect.bisect_right(self.first, index) - 1
        if part not in self.outputs:
            prepared, pin = self.batch[part], device == "cpu" and torch.cuda.is_available()
            dtype = getattr(torch, prepared.dtype)
            self.outputs[part] = torch.empty(prepared.shape, dtype=dtype, device=device, pin_memory=pin)
        start = sum(self.items[before].nbytes for before in range(self.first[part], index))
        return self.outputs[part].view(-1).view(torch.uint8)[start : start + self.items[index].nbytes]


async def open_cached_tower(
    inner: Tower,
    steps: Steps,
    store: StoreConfig,
    config: CacheConfig | None = None,
    device: str = "cpu",
    agreement: Agreement | None = None,
) -> CachedTower:
    """Join a store and stand a cache in front of a tower.

    Raises:
        StoreUnavailable: no master, or the pool was refused.
    """
    client = StoreClient(store)
    await client.open()
    cache = EmbeddingCache(steps, client, config)
    try:
        await cache.open()
    except BaseException:
        await cache.close()
        raise
    return CachedTower(inner, cache, device, agreement)
