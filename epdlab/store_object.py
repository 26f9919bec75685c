"""What one embedding is in the store: its key, its header and its checksum.

An object is a 64-byte header and then the embedding's bytes, row by row. Upstream stores the bare bytes under a 64-bit
hash of the pixels (SGLang 0.5.17 mooncake_embedding_store.py); here the key names the model too, and a reader can tell
a whole object of the right embedding from anything else. No page, store or tensor is known here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .modality import Modality

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAGIC, VERSION = b"EPDC", 1
HEADER = struct.Struct("<4sI16sIIQ8s16s")


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

    def header(self, checksum: bytes) -> bytes:
        """The header this item has if its bytes have this checksum. Equal headers mean: the same item, intact."""
        name = hashlib.sha256(self.key.encode()).digest()[:16]
        return HEADER.pack(
            MAGIC, VERSION, self.dtype.encode()[:16], self.tokens, self.dim, self.nbytes, checksum, name
        )


def checksum(pieces: Iterable[Bytes]) -> bytes:
    """XXH3 (64 bits) of the pieces' bytes in order; how they are split does not matter. As fast as memory is read."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    return digest.digest()
