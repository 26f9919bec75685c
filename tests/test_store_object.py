"""An object's key, header and checksum: equal for the same embedding only."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdlab.modality import Modality
from epdlab.store_object import HEADER, ROW_BYTES, Bytes, Item, cache_key, checksum

ITEM = Item("emb-1", tokens=4, dim=8, dtype="float32", nbytes=128)


def data(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_the_key_covers_everything_that_decides_the_bytes() -> None:
    keys = [
        cache_key(fingerprint, modality, grid, pixels)
        for fingerprint, modality, grid, pixels in itertools.product(
            ("model float32 256", "model bfloat16 256", "model float32 25"),
            (Modality.IMAGE, Modality.VIDEO),
            ((1, 2, 3), (1, 3, 2), (1, 23, 1)),
            (b"pixels", b"pixel", b"spixels"),
        )
    ]
    assert len(set(keys)) == len(keys) == 54
    assert all(key.replace("-", "").isalnum() for key in keys)


def test_headers_differ_with_every_field() -> None:
    items = [
        ITEM,
        Item("emb-2", 4, 8, "float32", 128),
        Item("emb-1", 8, 4, "float32", 128),
        Item("emb-1", 4, 16, "float16", 128),
        Item("emb-1", 4, 8, "float32", 127),
    ]
    headers = {item.header(value) for item in items for value in (0, 1)}
    assert len(headers) == 10
    assert {len(header) for header in headers} == {HEADER.size} == {64}


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 5 * ROW_BYTES), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 3))
def test_the_split_does_not_matter(nbytes: int, cuts: list[int], seed: int) -> None:
    whole = data(nbytes, seed)
    at = [0, *sorted(cut * ROW_BYTES for cut in cuts if cut * ROW_BYTES <= nbytes), nbytes]
    assert checksum(whole[a:b] for a, b in itertools.pairwise(at)) == checksum([whole])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 3 * ROW_BYTES), st.data())
def test_any_changed_byte_shows(nbytes: int, draw: st.DataObject) -> None:
    whole = data(nbytes)
    other = whole.copy()
    other[draw.draw(st.integers(0, nbytes - 1))] ^= draw.draw(st.integers(1, 255))
    assert checksum([whole]) != checksum([other])


@pytest.mark.parametrize("width", [8, 64, 1024, ROW_BYTES, 2 * ROW_BYTES])
def test_pieces_that_changed_places_show(width: int) -> None:
    whole = data(8 * ROW_BYTES)
    other = whole.copy()
    other[:width], other[width : 2 * width] = whole[width : 2 * width], whole[:width].copy()
    assert checksum([whole]) != checksum([other])


def test_sizes_around_a_block_are_told_apart() -> None:
    sums = {checksum([np.zeros(nbytes, np.uint8)]) for nbytes in (1, 7, 8, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1)}
    assert len(sums) == 6
