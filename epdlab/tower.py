"""Towers: what turns items into embeddings inside an encode server.

`VlmTower` is the real one: media policy, image processor, vision tower of a Qwen2.5-VL. `SyntheticTower` makes seeded
bytes of a given size, for the race and the benchmarks, where the embedding's content does not matter but its bytes do.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .encode_server import Prepared
from .engine import TensorBuffer
from .errors import UsageError
from .media import MediaPolicy, load_item
from .modality import Modality
from .ports import Buffer

if TYPE_CHECKING:
    import torch

    from .vlm import VLM, Pixels

MAX_SYNTHETIC_BYTES = 1 << 30


class SyntheticTower:
    """Items are `bytes:N:SEED`: N seeded bytes, as an embedding of shape [N, 1] and dtype uint8."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    async def prepare(self, items: Sequence[str], modality: Modality) -> Prepared:
        sizes = [_synthetic(item) for item in items]
        return Prepared(
            modality=modality,
            tokens=[nbytes for nbytes, _ in sizes],
            dim=1,
            dtype="uint8",
            element_size=1,
            grid=[(1, nbytes, 1) for nbytes, _ in sizes],
            payload=sizes,
            keys=[hashlib.sha256(item.encode()).digest() for item in items],
        )

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        return [await asyncio.to_thread(self._bytes, prepared) for prepared in batch]

    def _bytes(self, prepared: Prepared) -> TensorBuffer:
        import torch

        pieces = []
        for nbytes, seed in prepared.payload:
            generator = torch.Generator().manual_seed(seed)
            pieces.append(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))
        return TensorBuffer(torch.cat(pieces).to(self._device))

    def subset(self, prepared: Prepared, indices: Sequence[int]) -> Prepared:
        sizes = [prepared.payload[i] for i in indices]
        keys = [prepared.keys[i] for i in indices]
        grid = [prepared.grid[i] for i in indices]
        return Prepared(prepared.modality, [n for n, _ in sizes], 1, "uint8", 1, grid, sizes, keys)

    def fingerprint(self) -> str:
        return "synthetic"


def _synthetic(item: str) -> tuple[int, int]:
    """(bytes, seed) of `bytes:N:SEED`."""
    word, _, rest = item.partition(":")
    count, _, seed = rest.partition(":")
    if word != "bytes" or not count.isdigit() or not (seed or "0").isdigit():
        raise UsageError(f"no synthetic item {item!r}; write bytes:N or bytes:N:SEED")
    if not 1 <= int(count) <= MAX_SYNTHETIC_BYTES:
        raise UsageError(f"{count} bytes are not possible; a synthetic item has 1 to {MAX_SYNTHETIC_BYTES} bytes")
    return int(count), int(seed or 0)


class VlmTower:
    """The vision side of a Qwen2.5-VL.

    Args:
        vlm: loaded in role `encoder` or `full`.
        policy: which items may be loaded.
        reaches_gpu: the transport can read GPU memory; else the embedding is copied to pinned host memory.
    """

    def __init__(self, vlm: VLM, policy: MediaPolicy, reaches_gpu: bool = False) -> None:
        self._vlm, self._policy, self._reaches_gpu = vlm, policy, reaches_gpu
        self._forward_lock = asyncio.Lock()

    async def prepare(self, items: Sequence[str], modality: Modality) -> Prepared:
        pixels = [await self._pixels(item, modality) for item in items]
        return self._prepared(modality, pixels)

    async def _pixels(self, item: str, modality: Modality) -> Pixels:
        media = await load_item(item, modality, self._policy)
        return await asyncio.to_thread(self._vlm.preprocess, media, modality)

    def _prepared(self, modality: Modality, pixels: list[Pixels]) -> Prepared:
        return Prepared(
            modality=modality,
            tokens=[self._vlm.embedding_shape([item.grid_thw])[0] for item in pixels],
            dim=self._vlm.dim,
            dtype=str(self._vlm.dtype).removeprefix("torch."),
            element_size=self._vlm.dtype.itemsize,
            grid=[item.grid_thw for item in pixels],
            payload=pixels,
            keys=[item.digest() for item in pixels],
        )

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        async with self._forward_lock:
            return await asyncio.to_thread(self._encode, batch)

    def _encode(self, batch: Sequence[Prepared]) -> list[Buffer]:
        import torch

        items: list[Pixels] = [item for prepared in batch for item in prepared.payload]
        values = torch.cat([item.values for item in items])
        rows = self._vlm.encode(values, [item.grid_thw for item in items], batch[0].modality)
        if rows.is_cuda and not self._reaches_gpu:
            rows = rows.to("cpu", non_blocking=False).pin_memory()
        counts = [prepared.shape[0] for prepared in batch]
        pieces = [rows] if len(batch) == 1 else [piece.clone() for piece in torch.split(rows, counts)]
        return [TensorBuffer(piece) for piece in pieces]

    def subset(self, prepared: Prepared, indices: Sequence[int]) -> Prepared:
        return self._prepared(prepared.modality, [prepared.payload[index] for index in indices])

    def fingerprint(self) -> str:
        vlm = self._vlm
        return f"{vlm.weights_revision()} {vlm.dtype} {vlm.dim} {vlm.processor_fingerprint()}"


def as_tensor(view: Buffer, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """A landing view as the tensor it holds: no copy. Shape [tokens, dim]."""
    import torch

    assert isinstance(view, TensorBuffer)
    return view.tensor.view(getattr(torch, dtype)).view(shape)
