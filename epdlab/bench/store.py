"""The embedding cache against the bare store calls and a plain memcpy; what a hit saves; what stays in memory.

Bare: `batch_put_from` and `batch_get_into` of one registered buffer, by a client of its own in this process, in a
thread as in any server whose loop must not block. The donor is another process, so bytes cross a socket in both cases.
Ours, between pool and store: `put` writes an entry's header and pages, `get` fetches them and checks them. Beside them
the copies between pool and tensor, and the whole paths: `insert` is copy in and put, `hit` is lookup, get and copy out.
Memory is warm, torch has one thread (its idle ones would spin on the cores under test); taken in turn, medians.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..cached_tower import CachedTower
from ..donor import Donor
from ..engine import TensorBuffer, keep_native_log
from ..errors import LabError
from ..master import MooncakeMaster
from ..media import MediaPolicy
from ..modality import Modality
from ..steps import Steps
from ..store import CacheConfig, EmbeddingCache
from ..store_client import StoreClient, StoreConfig
from ..store_object import Item
from ..tower import VlmTower
from ..vlm import load_vlm
from . import Say

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK = (64 * KIB, 4 * MIB, 16 * MIB)
BATCHES = (1, 16, 256)
SIDES = (112, 224, 448)
BUDGET_BYTES = 512 * MIB
DONOR_BYTES = 512 * MIB
SMALL_POOL, SMALL_ENTRY = 16 * MIB, 16 * KIB


def bench_store(quick: bool, say: Say) -> dict[str, Any]:
    """Goodput per size (GB/s and ratios), lookup cost per batch (us), milliseconds saved per hit, memory held."""
    with tempfile.TemporaryDirectory(prefix="epdlab-bench-store-") as folder:
        out = Path(folder)
        keep_native_log(out / "native.log")
        torch.set_num_threads(1)
        return asyncio.run(_bench(out, quick, say))


async def _bench(out: Path, quick: bool, say: Say) -> dict[str, Any]:
    async with MooncakeMaster(out / "master.log") as master:
        async with Donor(master.address, DONOR_BYTES, out / "donor.log"):
            goodput, lookups = await _transfers(master.address, quick, say)
            saved = await _saved(master.address, out, 3 if quick else 9, say)
        async with Donor(master.address, 4 * SMALL_POOL, out / "small.log"):
            memory = await _memory(master, 2_000 if quick else 10_000, say)
    large = [row for row in goodput if row["bytes"] >= 4 * MIB]
    return {
        "ok": memory["within_pool"],
        "goodput": goodput,
        "worst_get_ratio_from_4MiB": min(row["get_ratio"] for row in large),
        "worst_put_ratio_from_4MiB": min(row["put_ratio"] for row in large),
        "lookup": lookups,
        "saved_per_hit": saved,
        "memory": memory,
    }


async def _transfers(master: str, quick: bool, say: Say) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    sizes = QUICK if quick else SIZES
    bare = _Bare(master, max(sizes))
    cache = await _cache(master, CacheConfig(pool_bytes=2 * max(sizes)))
    rows = []
    for size in sizes:
        turns, repeats = _Turns(bare, cache, size), max(7, min(15 if quick else 41, BUDGET_BYTES // size))
        await turns.turn(0)
        rows.append(_row(size, [await turns.turn(number) for number in range(1, repeats + 1)]))
        say(_line(rows[-1]))
    lookups = [await _lookup_row(bare, cache, batch, 15 if quick else 101) for batch in BATCHES]
    for row in lookups:
        say(f"lookup of {row['keys']:>3} keys  {row['cache_us']:7.0f} us   bare {row['bare_us']:7.0f} us")
    await cache.close()
    bare.close()
    return rows, lookups


class _Bare:
    """A client and one registered buffer, without anything of ours between."""

    def __init__(self, master: str, nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        if self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) != 0:
            raise LabError(f"the bare client cannot join the store at {master}; see the master's log")
        self.memory = TensorBuffer(torch.zeros(nbytes, dtype=torch.uint8))
        self.store.register_buffer(self.memory.address, nbytes)

    def put(self, key: str, nbytes: int) -> None:
        _check("put", self.store.batch_put_from([key], [self.memory.address], [nbytes]), [0])

    def get(self, key: str, nbytes: int) -> None:
        _check("get", self.store.batch_get_into([key], [self.memory.address], [nbytes]), [nbytes])

    def close(self) -> None:
        self.store.unregister_buffer(self.memory.address)
        self.store.close()


def _check(call: str, codes: list[int], wanted: list[int]) -> None:
    if codes != wanted:
        raise LabError(f"the bare {call} answered {codes}, not {wanted}; is the donor full?")


async def _cache(master: str, config: CacheConfig) -> EmbeddingCache:
    client = StoreClient(StoreConfig(master, wait_s=30.0))
    await client.open()
    cache = EmbeddingCache(Steps("bench"), client, config)
    await cache.open()
    return cache


class _Turns:
    """Every operation once per turn, on warm memory, with nothing left behind."""

    def __init__(self, bare: _Bare, cache: EmbeddingCache, size: int) -> None:
        self._bare, self._cache, self._size = bare, cache, size
        generator = torch.Generator().manual_seed(size)
        self._rows = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        self._into, self._copy = torch.ones(size, dtype=torch.uint8), np.ones(size, np.uint8)

    async def turn(self, number: int) -> dict[str, float]:
        """Milliseconds of each operation. Who goes first changes with every turn."""
        size, cache = self._size, self._cache
        item, key = Item(f"ours-{size}-{number}", size // 1024, 1024, "uint8", size), f"bare-{size}-{number}"
        ms = {"memcpy": _timed(lambda: np.copyto(self._copy, self._rows.numpy()))}

        async def bare_put() -> None:
            ms["bare_put"] = await _timed_async(lambda: asyncio.to_thread(self._bare.put, key, size))

        async def put() -> None:
            ms["copy_in"] = await _timed_async(lambda: cache.insert([(item, self._rows)]))
            ms["put"] = await _timed_async(cache.settled)

        async def bare_get() -> None:
            ms["bare_get"] = await _timed_async(lambda: asyncio.to_thread(self._bare.get, key, size))

        async def get() -> None:
            ms.update(await self._hit(item))

        for pair in ((bare_put, put), (bare_get, get)):
            for operation in pair if number % 2 else reversed(pair):
                await operation()
            _evict_all(cache)
        assert cache.store is not None
        await cache.store.remove(item.key, force=True)
        self._bare.store.remove(key, True)
        return ms | {"insert": ms["copy_in"] + ms["put"], "hit": ms["lookup"] + ms["get"] + ms["copy_out"]}

    async def _hit(self, item: Item) -> dict[str, float]:
        cache = self._cache
        self._into.zero_()
        began = time.perf_counter()
        hold = await cache.lookup([item])
        lookup = (time.perf_counter() - began) * 1e3
        get = await _timed_async(lambda: cache.fetch(hold, hold.expected))
        copy_out = await _timed_async(lambda: cache.read(hold, 0, self._into))
        hold.release()
        if not torch.equal(self._into, self._rows):
            raise LabError(f"{item.key}: the cache gave other bytes than it took; {dict(cache.counters.reasons)}")
        return {"lookup": lookup, "get": get, "copy_out": copy_out}


def _evict_all(cache: EmbeddingCache) -> None:
    for entry in cache.pool.entries:
        cache.pool.evict(entry)


def _row(size: int, turns: list[dict[str, float]]) -> dict[str, Any]:
    ms = {what: statistics.median(turn[what] for turn in turns) for what in turns[0]}
    gbps = {f"{what}_gbps": size / value / 1e6 for what, value in ms.items()}
    ratios = {
        "get_ratio": ms["bare_get"] / ms["get"],
        "put_ratio": ms["bare_put"] / ms["put"],
        "hit_ratio": ms["bare_get"] / ms["hit"],
        "insert_ratio": ms["bare_put"] / ms["insert"],
    }
    return {"bytes": size, "repeats": len(turns)} | {f"{what}_ms": value for what, value in ms.items()} | gbps | ratios


async def _lookup_row(bare: _Bare, cache: EmbeddingCache, batch: int, repeats: int) -> dict[str, Any]:
    """Microseconds of one lookup of so many keys, none of them known."""
    items = [Item(f"lookup-{number}", 1, 1024, "uint8", 1024) for number in range(batch)]
    keys = [item.key for item in items]

    async def look() -> None:
        (await cache.lookup(items)).release()

    async def bare_look() -> None:
        await asyncio.to_thread(bare.store.batch_is_exist, keys)

    turns = [(await _timed_async(bare_look), await _timed_async(look)) for _ in range(repeats)]
    bare_us, cache_us = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
    return {"keys": batch, "repeats": repeats, "cache_us": cache_us, "bare_us": bare_us}


async def _saved(master: str, out: Path, repeats: int, say: Say) -> list[dict[str, Any]]:
    """Milliseconds of the vision forward, and of a local and a global hit in its place, for three image sizes."""
    tower = VlmTower(await asyncio.to_thread(load_vlm, "tiny", "cpu", "encoder"), MediaPolicy(allowed_root=out))
    cache = await _cache(master, CacheConfig())
    cached, rows = CachedTower(tower, cache), []
    for side in SIDES:
        path = out / f"{side}.png"
        pixels = np.random.default_rng(side).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((side, side)).save(path)
        prepared = await tower.prepare([str(path)], Modality.IMAGE)
        await cached.forward([prepared])
        await cache.settled()
        turns = []
        for _ in range(repeats):
            forward = await _timed_async(lambda: tower.forward([prepared]))  # noqa: B023
            local = await _timed_async(lambda: cached.forward([prepared]))  # noqa: B023
            _evict_all(cache)
            turns.append((forward, local, await _timed_async(lambda: cached.forward([prepared]))))  # noqa: B023
        forward, local, remote = (statistics.median(times) for times in zip(*turns, strict=True))
        row = {"image": [side, side], "tokens": prepared.shape[0], "bytes": prepared.nbytes, "forward_ms": forward}
        row |= {"local_hit_ms": local, "global_hit_ms": remote, "saved_ms": forward - remote}
        rows.append(row)
        say(f"image {side:>3} px  forward {forward:7.1f} ms   local hit {local:5.1f} ms   global hit {remote:5.1f} ms")
    if cache.counters.fallback:
        raise LabError(f"hits were computed after all: {dict(cache.counters.reasons)}; measure again")
    await cache.close()
    return rows


async def _memory(master: MooncakeMaster, entries: int, say: Say) -> dict[str, Any]:
    """Many more embeddings than fit: what pool, process and store hold afterwards."""
    cache = await _cache(master.address, CacheConfig(SMALL_POOL, SMALL_ENTRY))
    rows = torch.ones(SMALL_ENTRY, dtype=torch.uint8)
    before, peak = _resident(), 0
    for first in range(0, entries, 16):
        numbers = range(first, min(first + 16, entries))
        fresh = [(Item(f"entry-{number}", 16, 1024, "uint8", SMALL_ENTRY), rows) for number in numbers]
        await cache.insert(fresh)
        peak = max(peak, cache.pool.pages - cache.pool.free_pages)
    await cache.settled()
    segments = master.pages.segments()
    held = {
        "entries": entries,
        "evicted": cache.counters.evicted,
        "refused": cache.counters.refused,
        "pool_bytes": SMALL_POOL,
        "peak_pool_bytes": peak * SMALL_ENTRY,
        "process_growth_bytes": _resident() - before,
        "store_bytes": sum(segment.used for segment in segments),
        "store_capacity": sum(segment.capacity for segment in segments),
    }
    held["within_pool"] = held["peak_pool_bytes"] <= SMALL_POOL and held["store_bytes"] <= held["store_capacity"]
    say(f"{entries} entries: pool {held['peak_pool_bytes'] // MIB} of {SMALL_POOL // MIB} MiB, "
        f"{held['evicted']} evicted, process grew by {held['process_growth_bytes'] / MIB:.1f} MiB")  # fmt: skip
    await cache.close()
    return held


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


async def _timed_async(act: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await act()
    return (time.perf_counter() - began) * 1e3


def _line(row: dict[str, Any]) -> str:
    ways = [
        f"{way} {row[f'{way}_gbps']:5.2f} (bare {row[f'bare_{way}_gbps']:5.2f}, ratio {row[f'{way}_ratio']:.2f})"
        for way in ("get", "put")
    ]
    whole = f"hit {row['hit_gbps']:5.2f}  insert {row['insert_gbps']:5.2f}  memcpy {row['memcpy_gbps']:4.1f}"
    return f"{row['bytes'] // KIB:>6,} KiB, GB/s:  {'  '.join(ways)}  {whole}"
