"""The store's other job, in small: pages of a KV cache kept by the hash of the prefix that leads to them.

So does SGLang's HiCache use Mooncake as its third tier, behind GPU and host memory. A page holds the keys and values of
every layer for `page_tokens` tokens; its key is a hash over its tokens and the key before it, so equal keys mean equal
prefixes, and the longest known prefix is found with one lookup. Pool, pins, checksums and the store itself are those of
the embedding cache: to it a page is some rows of bytes. The model's forward never passes through here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .hold import Hold
from .store import EmbeddingCache
from .store_object import Item

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one page: [layers, 2 (keys, values), heads, page_tokens, head_dim] of `dtype`."""

    layers: int
    heads: int
    head_dim: int
    page_tokens: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.layers, 2, self.heads, self.page_tokens, self.head_dim

    @property
    def nbytes(self) -> int:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.layers * 2 * self.heads * self.page_tokens * self.head_dim * dtype.itemsize

    @classmethod
    def of(cls, kv: Any, page_tokens: int) -> KVLayout:
        """The layout of a `transformers` cache of one sequence.

        Raises:
            UsageError: it is empty, or holds more than one sequence.
        """
        if not kv.layers or kv.layers[0].keys is None or kv.layers[0].keys.shape[0] != 1:
            raise UsageError("the KV cache must hold exactly one sequence; run a prefill of batch size 1 first")
        _, heads, _, head_dim = kv.layers[0].keys.shape
        dtype = str(kv.layers[0].keys.dtype).removeprefix("torch.")
        return cls(len(kv.layers), heads, head_dim, page_tokens, dtype)


class KVTier:
    """Prefixes of one model's KV cache in an embedding cache's pool and store.

    Args:
        cache: pool and store; open.
        model: fingerprint of the model, so that two models never mix.
    """

    def __init__(self, cache: EmbeddingCache, layout: KVLayout, model: str) -> None:
        self.cache, self.layout, self._model = cache, layout, model

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """One key per whole page: each hashes its tokens and the key before it.

        The pad tokens of an image are the same for every image: give numbers made from the pixels' digest instead.
        """
        chain = hashlib.sha256(f"{self._model} {self.layout}".encode()).digest()
        keys, step = [], self.layout.page_tokens
        for start in range(0, len(tokens) - step + 1, step):
            page = b"".join(int(token).to_bytes(8, "little", signed=True) for token in tokens[start : start + step])
            chain = hashlib.sha256(chain + page).digest()
            keys.append(f"kv-{chain.hex()}")
        return keys

    async def save(self, tokens: Sequence[int], kv: Any) -> int:
        """Keep every whole page of a `transformers` cache for these tokens; how many tokens that is.

        Pages go to the store behind the caller's back, as embeddings do; those that are there already are left alone.
        """
        items = self._items(tokens)
        pages = [(item, self._page(kv, index * self.layout.page_tokens)) for index, item in enumerate(items)]
        await self.cache.insert(pages)
        return len(items) * self.layout.page_tokens

    async def match(self, tokens: Sequence[int]) -> int:
        """How many leading tokens are known, here or in the store. One lookup, no transfer."""
        hold = await self.cache.lookup(self._items(tokens))
        hold.release()
        return _leading(hold.expected) * self.layout.page_tokens

    async def load(self, tokens: Sequence[int], device: str = "cpu") -> tuple[Any, int]:
        """A `DynamicCache` of the longest known prefix, and how many tokens it covers (0: nothing was known).

        A page that cannot be had cuts the prefix there; the caller runs the prefill for the rest.
        """
        hold = await self.cache.lookup(self._items(tokens))
        try:
            wanted = _leading(hold.expected)
            await self.cache.fetch(hold, [index < wanted for index in range(len(hold.items))])
            pages = await self._read(hold)
        finally:
            hold.release()
        return self._restored(pages, device), len(pages) * self.layout.page_tokens

    async def _read(self, hold: Hold) -> list[torch.Tensor]:
        import torch

        pages: list[torch.Tensor] = []
        for index in range(len(hold.items)):
            page = torch.empty(self.layout.shape, dtype=getattr(torch, self.layout.dtype))
            if not await self.cache.read(hold, index, page):
                break
            pages.append(page)
        return pages

    def _restored(self, pages: Sequence[torch.Tensor], device: str) -> Any:
        import torch
        from transformers import DynamicCache

        restored = DynamicCache()
        if pages:
            for layer, (keys, values) in enumerate(torch.cat(list(pages), dim=3).to(device)):
                restored.update(keys[None], values[None], layer)
        return restored

    def _page(self, kv: Any, start: int) -> torch.Tensor:
        """One page gathered from all layers: in the cache it is scattered, head by head."""
        import torch

        span = slice(start, start + self.layout.page_tokens)
        return torch.stack([torch.stack((layer.keys[0, :, span], layer.values[0, :, span])) for layer in kv.layers])

    def _items(self, tokens: Sequence[int]) -> list[Item]:
        nbytes, layout = self.layout.nbytes, self.layout
        row = nbytes // layout.page_tokens
        return [Item(key, layout.page_tokens, row, layout.dtype, nbytes) for key in self.keys(tokens)]


def _leading(found: Sequence[bool]) -> int:
    return next((index for index, is_there in enumerate(found) if not is_there), len(found))
