"""What notebook 05 asks of a store: one request at a time to encoders that share it, and towers of this process.

    asked = await ask(lab, "bytes:1048576:1")     # a request, its digests, and what the caches found
    cache = await open_cache(master.address)      # an embedding cache in this process

Owns no process: master, donors and lab are the caller's.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..cached_tower import CachedTower
from ..encode_server import Tower
from ..errors import LabError
from ..media import MediaPolicy
from ..modality import Modality
from ..steps import Event, Steps
from ..store import CacheConfig, EmbeddingCache
from ..store_client import StoreClient, StoreConfig
from ..tower import SyntheticTower, VlmTower
from ..vlm import load_vlm
from .lab import Lab

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.02
CACHE_STEPS = ("cache.lookup", "cache.get", "cache.put", "cache.evict", "cache.copy")


@dataclass(frozen=True)
class Asked:
    """One request that is over, its write-behind included. Prints what the caches found.

    Attributes:
        digests: of each part, as the rank read it; wanted: as a tower without a cache makes it.
        found: what each encoder's counters grew by.
        events: from the request's start to its last write into the store.
    """

    req_id: str
    digests: list[str]
    wanted: list[str]
    found: dict[str, dict[str, int]]
    events: list[Event]

    @property
    def right(self) -> bool:
        """Whether every part has the bytes that the vision tower makes."""
        return self.digests == self.wanted

    def __repr__(self) -> str:
        grew = {name: ", ".join(f"{n} {what}" for what, n in new.items()) for name, new in self.found.items() if new}
        said = "; ".join(f"{name}: {what}" for name, what in grew.items())
        return f"{self.req_id}  {said}; bytes {'right' if self.right else 'WRONG'}"


async def ask(lab: Lab, *items: str) -> Asked:
    """Send one request of synthetic items to a lab of one rank, and wait until nothing is left to write."""
    before, start = counters(lab), len(lab.events)
    req_id = lab.request(*items)
    answer = (await asyncio.to_thread(lab.result, req_id))["rank0"]
    if isinstance(answer, Exception):
        raise answer
    await until(lambda: written(lab.events), "the embeddings to be written")
    grew = {name: _grown(before[name], now) for name, now in counters(lab).items()}
    wanted = await _wanted(items, [rows for _, rows, _ in answer["parts"]])
    return Asked(req_id, list(answer["digests"]), wanted, grew, lab.events[start:])


def counters(lab: Lab) -> dict[str, dict[str, int]]:
    """Every encoder's counters."""
    return {name: lab.call(name, "counters") for name in sorted(lab.processes) if name.startswith("enc")}


def written(events: Sequence[Event]) -> bool:
    """Whether every embedding that was copied into a pool was also offered to the store."""
    copied: set[tuple[str, str]] = set()
    offered: set[tuple[str, str]] = set()
    for event in events:
        data = event.data or {}
        if event.step == "cache.copy" and event.phase == "end" and data.get("to") == "pool":
            copied.add((event.process, data["key"]))
        if event.step == "cache.put" and event.phase == "end":
            offered |= {(event.process, key) for key in data["keys"]}
    return copied <= offered


async def until(holds: Callable[[], bool], what: str) -> None:
    """Look again until it holds.

    Raises:
        LabError: it does not within PATIENCE_S.
    """
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > give_up:
            raise LabError(f"waited {PATIENCE_S:g} s in vain for {what}; look at the logs of master and donor")
        await asyncio.sleep(LOOK_EVERY_S)


def cache_rows(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """(process, step, what it did) of every cache step that has ended, in its process's order, writes behind last."""
    ended = [event for event in events if event.step in CACHE_STEPS and event.phase != "begin"]
    ended.sort(key=lambda event: (event.process, event.step == "cache.put"))
    return [(event.process, event.step, _told(event)) for event in ended]


def _told(event: Event) -> str:
    data = event.data or {}
    if event.step == "cache.lookup":
        return ", ".join(f"{data[where]} {where}" for where in ("local", "global", "missing"))
    return f"{data['from']} to {data['to']}, {event.bytes:,} bytes" if "from" in data else f"{event.bytes:,} bytes"


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {what: count - before[what] for what, count in after.items() if count != before[what]}


async def _wanted(items: Sequence[str], rows: Sequence[int]) -> list[str]:
    """Digests of the parts, without a cache: a part has the next items that make up its rows."""
    tower, left = SyntheticTower(), list(items)
    digests = []
    for count in rows:
        part: list[str] = []
        while sum(int(item.split(":")[1]) for item in part) < count:
            part.append(left.pop(0))
        digests.append(await digest_of(tower, *part))
    return digests


async def digest_of(tower: Tower, *items: str) -> str:
    """The digest of one part's embedding."""
    [made] = await tower.forward([await tower.prepare(items, Modality.IMAGE)])
    return made.digest()


# ---- in this process ---------------------------------------------------------------------------------------------


async def open_cache(
    master: str, name: str = "here", pool_bytes: int = 64 * MIB, events: list[Event] | None = None
) -> EmbeddingCache:
    """An embedding cache in this process; its steps go to `events`. The caller closes it."""
    seen: list[Event] = [] if events is None else events
    client = StoreClient(StoreConfig(master, wait_s=PATIENCE_S))
    await client.open()
    cache = EmbeddingCache(
        Steps(name, lambda event: seen.append(event)), client, CacheConfig(pool_bytes, fetch_wait_s=PATIENCE_S)
    )
    await cache.open()
    return cache


class Saving(NamedTuple):
    """Medians of one image size, in milliseconds; bytes of the embedding; vision forwards during the hits."""

    side: int
    nbytes: int
    forward_ms: float
    local_ms: float
    global_ms: float
    forwards: int
    equal: bool


class _Counted(VlmTower):
    """The real tower, with its forwards counted."""

    forwards = 0

    async def forward(self, batch: Sequence[Any]) -> list[Any]:
        self.forwards += 1
        return await super().forward(batch)


async def savings(master: str, sides: Sequence[int], repeats: int = 3) -> list[Saving]:
    """The vision forward of the tiny model, and a local and a global hit in its place, per image size."""
    with tempfile.TemporaryDirectory(prefix="epdlab-images-") as folder:
        vlm = await asyncio.to_thread(load_vlm, "tiny", "cpu", "encoder")
        tower = _Counted(vlm, MediaPolicy(allowed_root=Path(folder)))
        cache = await open_cache(master)
        try:
            return [await _saving(tower, cache, Path(folder), side, repeats) for side in sides]
        finally:
            await cache.close()


async def _saving(tower: _Counted, cache: EmbeddingCache, folder: Path, side: int, repeats: int) -> Saving:
    path, cached = folder / f"{side}.png", CachedTower(tower, cache)
    pixels = np.random.default_rng(side).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((side, side)).save(path)
    prepared = [await tower.prepare([str(path)], Modality.IMAGE)]
    await cached.forward(prepared)
    await cache.settled()
    turns: list[tuple[float, float, float, int]] = []
    made: set[str] = set()
    for _ in range(repeats):
        forward = await _timed(lambda: tower.forward(prepared))
        before = tower.forwards
        local = await _timed(lambda: cached.forward(prepared))
        for entry in cache.pool.entries:
            cache.pool.evict(entry)
        remote = await _timed(lambda: cached.forward(prepared))
        turns.append((forward[0], local[0], remote[0], tower.forwards - before))
        made |= {forward[1], local[1], remote[1]}
    forward_ms, local_ms, global_ms, forwards = zip(*turns, strict=True)
    medians = [statistics.median(ms) for ms in (forward_ms, local_ms, global_ms)]
    return Saving(side, prepared[0].nbytes, medians[0], medians[1], medians[2], sum(forwards), len(made) == 1)


async def _timed(act: Callable[[], Awaitable[list[Any]]]) -> tuple[float, str]:
    """Milliseconds, and the digest of what was made."""
    began = time.perf_counter()
    [made] = await act()
    return (time.perf_counter() - began) * 1e3, made.digest()


def small_language_model() -> Any:
    """A Llama of three layers with seeded weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def copy_table(copies: Sequence[Mapping[str, Any]]) -> str:
    """A table of copies (see `store_demo.copies`) as lines."""
    head = f"{'who':<6}{'step':<12}{'from':<11}{'to':<11}{'times':>5}{'bytes':>12}"
    rows = [
        f"{row['process']:<6}{row['step']:<12}{row['from']:<11}{row['to']:<11}{row['times']:>5}{row['bytes']:>12,}"
        for row in copies
    ]
    return "\n".join([head, *rows])
