"""Landing memory per request against a pool registered once: set-up, first touch, fragmentation.

Set-up is `allocate` and `free` of the two strategies over the real engine in one process. First touch is the bare
write into fresh memory against one into warm memory, between two processes. Fragmentation is a seeded sequence of
requests against a pool of a given size: no time in it, only offsets.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ..engine import MooncakeEngine, keep_native_log
from ..landing import Landing, LandingPool, LandingSlot, PerRequestLanding
from ..regions import RegionTable
from ..steps import Steps
from . import Say
from .bare import BarePair

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
POOL = 128 * MIB
SEED = 7


def bench_landing(quick: bool, say: Say) -> dict[str, Any]:
    """Medians in microseconds (set-up) and milliseconds (first touch), and the pool's fragmentation."""
    repeats = 15 if quick else 51
    setup, fragments = asyncio.run(_on_engine(repeats))
    for row in setup:
        kib = row["bytes"] // KIB
        say(f"{kib:>8,} KiB  per request {row['per_request_us']:8.0f} us   pool {row['pool_us']:6.0f} us")
    touch = _first_touch(repeats)
    for row in touch:
        say(f"{row['bytes'] // KIB:>8,} KiB  first write {row['fresh_ms']:8.2f} ms   warm {row['warm_ms']:8.2f} ms")
    waits, blocked = fragments["waits"], fragments["blocked_by_holes"]
    say(f"fragmentation: {waits} of {fragments['requests']} requests waited, {blocked} with enough bytes free")
    return {"ok": True, "setup": setup, "first_touch": touch, "fragmentation": fragments}


async def _on_engine(repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="epdlab-landing-") as folder:
        keep_native_log(Path(folder) / "engine.log")
        engine, steps = MooncakeEngine(), Steps("rank0")
        regions = RegionTable(engine, steps)
        pool = LandingPool(engine, regions, steps, True, POOL)
        await pool.open()
        fresh = PerRequestLanding(engine, regions, steps, True)
        rows = [await _setup_row(fresh, pool, size, repeats) for size in SIZES]
        fragments = await _fragmentation(pool)
        await pool.close()
        engine.close()
    return rows, fragments


async def _setup_row(fresh: Landing, pool: Landing, size: int, repeats: int) -> dict[str, Any]:
    turns = [(await _round_us(fresh, size), await _round_us(pool, size)) for _ in range(repeats)]
    per_request, pooled = (statistics.median(times) for times in zip(*turns, strict=True))
    return {"bytes": size, "per_request_us": per_request, "pool_us": pooled, "ratio": per_request / pooled}


async def _round_us(landing: Landing, size: int) -> float:
    began = time.perf_counter()
    await landing.free(await landing.allocate(size, "bench"))
    return (time.perf_counter() - began) * 1e6


def _first_touch(repeats: int) -> list[dict[str, Any]]:
    rows = []
    with BarePair(max(SIZES)) as bare:
        bare.write_ms(max(SIZES))
        for size in SIZES:
            turns = [(bare.first_write_ms(size)[1], bare.write_ms(size)) for _ in range(max(7, repeats // 2))]
            fresh, warm = (statistics.median(times) for times in zip(*turns, strict=True))
            rows.append({"bytes": size, "fresh_ms": fresh, "warm_ms": warm, "ratio": fresh / warm})
    return rows


async def _fragmentation(pool: LandingPool, requests: int = 2_000) -> dict[str, Any]:
    """Requests of 0.25 to 16 MiB, up to three quarters of the pool in use, freed at random: who waits, and why."""
    chance = random.Random(SEED)
    held: list[LandingSlot] = []
    waits = blocked = 0
    for _ in range(requests):
        size = chance.randrange(256 * KIB, 16 * MIB)
        if size > pool.largest_hole:
            waits += 1
            blocked += size <= pool.free_bytes
        while size > pool.largest_hole or pool.free_bytes < pool.nbytes // 4:
            await pool.free(held.pop(chance.randrange(len(held))))
        held.append(await pool.allocate(size, "bench"))
    for slot in held:
        await pool.free(slot)
    return {"requests": requests, "pool_bytes": pool.nbytes, "waits": waits, "blocked_by_holes": blocked, "seed": SEED}

