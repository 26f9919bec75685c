"""The exercises of notebook 05: each runs an answer on a real store, draws what it did, and judges it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import NamedTuple

from ..cached_tower import CachedTower
from ..encode_server import Prepared
from ..engine import TensorBuffer
from ..master import MooncakeMaster
from ..modality import Modality
from ..steps import Event
from ..store import EmbeddingCache
from ..store_object import Item
from ..tower import SyntheticTower
from ..trace.sequence import sequence
from .exercise import Answer, Tried, attempt, judge
from .lab import Lab
from .store_bench import Asked, ask, counters, digest_of, open_cache, until, written

PICTURE = "bytes:65536:5"
SEEDED = ("bytes:1048576:71", "bytes:1048576:72")
SWAPPED = SEEDED[::-1]
Key = Callable[[str, Modality, tuple[int, int, int], bytes], str]
UpstreamKey = Callable[[bytes], str]


class Model(SyntheticTower):
    """A vision model of a name: the same picture has other bytes than another model makes of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _bytes(self, prepared: Prepared) -> TensorBuffer:
        made = super()._bytes(prepared)
        return TensorBuffer(made.tensor ^ hashlib.sha256(self.name.encode()).digest()[0])

    def fingerprint(self) -> str:
        return self.name


class KeyedTower(CachedTower):
    """A cached tower whose keys somebody else makes."""

    def __init__(self, inner: SyntheticTower, cache: EmbeddingCache, key: Key) -> None:
        super().__init__(inner, cache)
        self._key = key

    def _items(self, prepared: Prepared) -> list[Item]:
        found = zip(super()._items(prepared), prepared.grid, prepared.keys, strict=True)
        return [
            Item(self._key(self.inner.fingerprint(), prepared.modality, grid, pixels), *_shape(item))
            for item, grid, pixels in found
        ]


def _shape(item: Item) -> tuple[int, int, str, int]:
    return item.tokens, item.dim, item.dtype, item.nbytes


class Shared(NamedTuple):
    """One picture at two models that share a store.

    Attributes:
        own: what each model makes of it. got: what each encoder answered with.
        events: the caches' steps.
    """

    own: tuple[str, str]
    got: tuple[str, str]
    events: list[Event]


async def share(key: Key, master: MooncakeMaster, picture: str = PICTURE) -> Shared:
    """Encoder `enc0` has model-a, `enc1` has model-b of the same width; both are asked for one picture."""
    events: list[Event] = []
    models = Model("model-a"), Model("model-b")
    caches = [await open_cache(master.address, f"enc{n}", events=events) for n in range(2)]
    got = []
    for model, cache in zip(models, caches, strict=True):
        got.append(await digest_of(KeyedTower(model, cache, key), picture))
        await cache.settled()
    await asyncio.gather(*(cache.close() for cache in caches))
    own = [await digest_of(model, picture) for model in models]
    return Shared((own[0], own[1]), (got[0], got[1]), events)


async def try_upstream_key(answer: UpstreamKey, master: MooncakeMaster) -> Tried:
    """`upstream_key(pixels)`: as SGLang 0.5.17 makes it. Two models then share one entry."""
    safe = _guarded(lambda fingerprint, modality, grid, pixels: answer(pixels))
    shared = await share(safe, master)

    def wrong() -> str | None:
        said, error = attempt(answer, b"pixels")
        if error or said != _upstream(b"pixels"):
            return error or f"of b'pixels' it makes {said!r}, upstream makes {_upstream(b'pixels')!r}"
        return None if shared.got[1] == shared.own[0] else "model-b was not answered with model-a's bytes"

    right = f"model-b makes {shared.own[1]} of the picture, and is answered with {shared.got[1]}, which is model-a's"
    return Tried(sequence(shared.events, title="one picture, two models, your key"), judge(answer, 2, wrong, right))


async def try_own_key(answer: Key, master: MooncakeMaster) -> Tried:
    """`own_key(fingerprint, modality, grid, pixels)`: no two different embeddings share a key."""
    shared = await share(_guarded(answer), master)

    def wrong() -> str | None:
        if shared.got != shared.own:
            return f"model-b makes {shared.own[1]} of the picture, and was answered with {shared.got[1]}"
        return _collision(answer)

    right = f"model-a is answered with {shared.got[0]}, model-b with {shared.got[1]}, each with its own"
    return Tried(sequence(shared.events, title="one picture, two models, your key"), judge(answer, 4, wrong, right))


def _collision(answer: Key) -> str | None:
    """Two items that differ in one thing and have one key, or a key that does not repeat."""
    first = ("model-a", Modality.IMAGE, (1, 2, 34), b"pixels")
    others = {
        "the model": ("model-b", *first[1:]),
        "the modality": (first[0], Modality.VIDEO, *first[2:]),
        "the grid": (*first[:2], (1, 34, 2), first[3]),
        "the digits of the grid": (*first[:2], (1, 23, 4), first[3]),
        "the pixels": (*first[:3], b"other pixels"),
    }
    key, error = attempt(answer, *first)
    if error or attempt(answer, *first)[0] != key or not isinstance(key, str):
        return error or f"asked twice about one item, it must give one text, not {key!r}"
    same = [what for what, item in others.items() if attempt(answer, *item)[0] == key]
    return f"two items that differ in {same[0]} have one key" if same else None


def _guarded(answer: Key) -> Key:
    """Its text, or a key of its own where there is none, so that a stub can run."""

    def key(fingerprint: str, modality: Modality, grid: tuple[int, int, int], pixels: bytes) -> str:
        said, _ = attempt(answer, fingerprint, modality, grid, pixels)
        return said if isinstance(said, str) and said else f"none-{fingerprint}-{pixels.hex()}"

    return key


def _upstream(pixels: bytes) -> str:
    """SGLang 0.5.17, mm_utils.py (data_hash) and mooncake_embedding_store.py."""
    return f"emb_{int.from_bytes(hashlib.sha256(pixels).digest()[:8], 'big')}"


async def try_fall_back(answer: Answer, master: MooncakeMaster) -> Tried:
    """`fall_back(lab)`: an encoder is promised a hit and does not get it, and the request is right all the same."""
    async with Lab(model="synthetic", tp=1, encoders=2, master=master.address) as lab:
        await ask(lab, *SEEDED)
        start = len(lab.events)
        _, error = await asyncio.to_thread(attempt, answer, lab)
        lab.run()
        for req_id in lab.pending:
            await asyncio.to_thread(lab.result, req_id)
        await until(lambda: written(lab.events), "the embeddings to be written")
        events, fallbacks = lab.events[start:], sum(found["fallback"] for found in counters(lab).values())
        lab.unhold()
        again: Asked = await ask(lab, *SWAPPED)

    def wrong() -> str | None:
        ends = [event.result for event in events if event.step == "request.finish"]
        if error or not ends:
            return error or "no request was sent"
        if not fallbacks:
            return "no encoder counts a fallback; make a get fail that a lookup has promised"
        return None if ends == ["ok"] * len(ends) and again.right else f"a request ended with {ends}"

    drawing = sequence(events, everyone=["enc0", "enc1", "rank0"], title="what fall_back did")
    right = f"{fallbacks} promised, not had, and computed after all; the request has the right bytes"
    return Tried(drawing, judge(answer, 4, wrong, right))
