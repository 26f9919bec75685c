"""The bytes of every embedding in these runs: a seeded pattern, so that both ends can say what is right.

An item is the string `syn:ROWS:SEED`; no image and no model passes through here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 1024
"""Embedding width in elements."""
ELEMENT_BYTES = 4
"""float32."""
ROW_BYTES = WIDTH * ELEMENT_BYTES


def item(nbytes: int, seed: int) -> str:
    """The item whose embedding has `nbytes` bytes (a multiple of ROW_BYTES)."""
    rows, rest = divmod(nbytes, ROW_BYTES)
    if rest or rows < 1:
        raise ValueError(f"{nbytes} bytes is no whole number of {ROW_BYTES}-byte rows")
    return f"syn:{rows}:{seed}"


def parse(text: str) -> tuple[int, int]:
    """`syn:ROWS:SEED` as (rows, seed)."""
    kind, rows, seed = text.split(":")
    if kind != "syn":
        raise ValueError(f"not an item of these runs: {text!r}")
    return int(rows), int(seed)


def pattern(rows: int, seed: int) -> NDArray[np.uint32]:
    """The embedding of one item as uint32[rows * WIDTH]; other seeds differ in every word."""
    words = np.arange(rows * WIDTH, dtype=np.uint32)
    words *= np.uint32(2654435761)
    words += np.uint32((seed * 40503 + 1) & 0xFFFFFFFF)
    return words
