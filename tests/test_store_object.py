"""An object's key, header and checksum: equal for the same embedding only."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdlab.modality import Modality
from epdlab.store_object import HEADER, Bytes, Item, cache_key, checksum

ITEM = Item("emb-1", tokens=4, dim=8, dtype="float32", nbytes=128)


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
    headers = {item.header(value) for item in items for value in (bytes(8), b"\x01" * 8)}
    assert len(headers) == 10
    assert {len(header) for header in headers} == {HEADER.size} == {64}


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.binary(max_size=5000), st.lists(st.integers(0, 5000), max_size=4))
def test_the_split_does_not_matter(content: bytes, cuts: list[int]) -> None:
    whole = np.frombuffer(content, np.uint8)
    at = [0, *sorted(cut for cut in cuts if cut <= len(whole)), len(whole)]
    assert checksum(whole[a:b] for a, b in itertools.pairwise(at)) == checksum([whole])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.binary(min_size=1, max_size=5000), st.data())
def test_any_changed_byte_shows(content: bytes, draw: st.DataObject) -> None:
    other = bytearray(content)
    other[draw.draw(st.integers(0, len(content) - 1))] ^= draw.draw(st.integers(1, 255))
    assert checksum([np.frombuffer(content, np.uint8)]) != checksum([np.frombuffer(other, np.uint8)])


@pytest.mark.parametrize("width", [1, 8, 64, 1024, 4096])
def test_pieces_that_changed_places_show(width: int) -> None:
    whole: Bytes = np.random.default_rng(0).integers(0, 256, 8 * 4096, dtype=np.uint8)
    other = whole.copy()
    other[:width], other[width : 2 * width] = whole[width : 2 * width], whole[:width].copy()
    assert checksum([whole]) != checksum([other])
