"""The bytes behind the pages: one region of host memory, registered once, with a header slot for every page.

Owns the memory and every copy into and out of it. Which entry has which page is `pages`' business; no store call is
made here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from .engine import TensorBuffer
from .pages import Entry, PagePool
from .store_object import HEADER, Bytes, Item, checksum

Extents = list[tuple[int, int]]


class PageMemory:
    """Memory for a pool's pages: the pages, then one 64-byte header slot per page.

    An entry's header lies in the slot of its first page. Pinned where there is a GPU.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._headers_at = pool.pages * pool.page_bytes
        nbytes = self._headers_at + pool.pages * HEADER.size
        self.buffer = TensorBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        self._bytes: Bytes = self.buffer.tensor.numpy()

    def touch(self) -> None:
        """Write every byte once, so that no later transfer pays for a first touch."""
        self._bytes.fill(0)

    def extents(self, entry: Entry) -> Extents:
        """The entry as an object of the store: its header, then each run. (address, bytes)"""
        base = self.buffer.address
        pages = [(base + offset, nbytes) for offset, nbytes in self._pool.extents(entry)]
        return [(base + self._header_at(entry), HEADER.size), *pages]

    def write(self, entry: Entry, item: Item, rows: torch.Tensor) -> None:
        """Copy an embedding, any contiguous tensor of the entry's size, into its pages, and make its header."""
        for page, piece in self._pairs(entry, rows):
            _copy(page, piece)
        self._header(entry)[:] = np.frombuffer(item.header(self.checksum(entry)), np.uint8)

    def read(self, entry: Entry, rows: torch.Tensor) -> None:
        """Copy the entry's bytes out into a contiguous tensor of its size."""
        for page, piece in self._pairs(entry, rows):
            _copy(piece, page)

    def intact(self, entry: Entry, item: Item) -> bool:
        """Whether the pages hold just this item: header and checksum."""
        return self._header(entry).tobytes() == item.header(self.checksum(entry))

    def checksum(self, entry: Entry) -> bytes:
        """Checksum of the entry's bytes without its header."""
        return checksum(self._bytes[offset : offset + nbytes] for offset, nbytes in self._pool.extents(entry))

    def _pairs(self, entry: Entry, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each run of the entry with the bytes of `rows` that belong there."""
        flat, at = rows.detach().view(-1).view(torch.uint8), 0
        for offset, nbytes in self._pool.extents(entry):
            yield self.buffer.tensor[offset : offset + nbytes], flat[at : at + nbytes]
            at += nbytes

    def _header_at(self, entry: Entry) -> int:
        return self._headers_at + entry.runs[0].start * HEADER.size

    def _header(self, entry: Entry) -> Bytes:
        start = self._header_at(entry)
        return self._bytes[start : start + HEADER.size]

    def __repr__(self) -> str:
        return f"PageMemory({self.buffer!r})"


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    if to.device.type == source.device.type == "cpu":
        np.copyto(to.numpy(), source.numpy())
    else:
        to.copy_(source)
