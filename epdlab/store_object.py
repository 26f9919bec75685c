"""What one embedding is in the store: its key, its header and its checksum.

An object is a 64-byte header and then the embedding's bytes, row by row. Upstream stores the bare bytes under a 64-bit
hash of the pixels (SGLang 0.5.17 mooncake_embedding_store.py); here the key names the model too, and a reader can tell
a whole object of the right embedding from anything else. No page, store or tensor is known here.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .modality import Modality

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAGIC, VERSION = b"EPDC", 1
HEADER = struct.Struct("<4sI16sIIQI20s")
ROW_BYTES = 2048
BLOCK_BYTES = 128 * ROW_BYTES


def cache_key(fingerprint: str, modality: Modality, grid: tuple[int, int, int], pixels: bytes) -> str:
    """The key of one item's embedding: SHA-256 over everything that decides its bytes, as hex.

    Args:
        fingerprint: model, weights revision, dtype, width and processor settings.
        grid: (t, h, w) patches; the same patches in another grid are another picture.
        pixels: digest of what the vision tower sees.
    """
    digest = hashlib.sha256()
    for field in (fingerprint.encode(), modality.value.encode(), repr(tuple(grid)).encode(), pixels):
        digest.update(len(field).to_bytes(8, "little") + field)
    return f"emb-{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Item:
    """One embedding [tokens, dim] to look for. `nbytes` without the header."""

    key: str
    tokens: int
    dim: int
    dtype: str
    nbytes: int

    @property
    def object_bytes(self) -> int:
        return HEADER.size + self.nbytes

    def header(self, checksum: int) -> bytes:
        """The header this item has if its bytes have this checksum. Equal headers mean: the same item, intact."""
        name = hashlib.sha256(self.key.encode()).digest()[:20]
        return HEADER.pack(
            MAGIC, VERSION, self.dtype.encode()[:16], self.tokens, self.dim, self.nbytes, checksum, name
        )


def checksum(pieces: Iterable[Bytes]) -> int:
    """A 32-bit checksum of the pieces' bytes in order, several times faster than CRC-32 over all of them.

    A CRC-32 over the length and the sums (modulo 2^64) of each 2 KiB row and of each 8-byte column: the sums catch a changed word and
    words that changed places, the CRC catches rows that did. All pieces but the last must be whole rows; how the bytes
    are split does not matter.
    """
    crc, nbytes, columns = 0, 0, np.zeros(ROW_BYTES // 8, np.uint64)
    for piece in pieces:
        nbytes += len(piece)
        whole = len(piece) - len(piece) % ROW_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            rows = piece[start : min(start + BLOCK_BYTES, whole)].view(np.uint64).reshape(-1, len(columns))
            crc = zlib.crc32(np.add.reduce(rows, axis=1).data, crc)
            columns += np.add.reduce(rows, axis=0)
        crc = zlib.crc32(piece[whole:].data, crc)
    return zlib.crc32(nbytes.to_bytes(8, "little"), zlib.crc32(columns.data, crc))
