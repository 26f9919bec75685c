"""One rank's landing memory on a real engine in this process, without a request around it. What notebook 04 measures.

    async with LandingBench(pool_bytes=16 << 20) as bench:
        slot = await bench.pool.allocate(4 << 20, "req1")
        bench.draw()

Owns two engines: one whose memory is written to, and one that writes. No encoder and no message passes through here.
"""

from __future__ import annotations

import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ..engine import MooncakeEngine, TensorBuffer, check, keep_native_log
from ..landing import Landing, LandingPool, LandingSlot, PerRequestLanding
from ..regions import RegionTable
from ..steps import Event, Steps
from ..trace.layout import layout, of_pool
from ..trace.render import Drawing

KIB, MIB = 1 << 10, 1 << 20
RANK = "rank0"


class Touch(NamedTuple):
    """One write: page faults it caused in this process, and milliseconds."""

    faults: int
    ms: float


class Waits(NamedTuple):
    """Of so many requests: how many found no room, and how many of these although enough bytes were free."""

    requests: int
    no_room: int
    blocked_by_holes: int


class LandingBench:
    """The two strategies of landing memory side by side. An async context manager.

    Attributes:
        pool: registered once, of `pool_bytes`. fresh: allocates and registers for each request.
        events: the steps of both.
    """

    def __init__(self, pool_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epdlab-landing-")
        keep_native_log(Path(self._folder.name) / "engine.log")
        self.events: list[Event] = []
        self.engine, self._writer = MooncakeEngine(), MooncakeEngine()
        steps = Steps(RANK, lambda event: self.events.append(event))
        self.regions = RegionTable(self.engine, steps)
        self.pool = LandingPool(self.engine, self.regions, steps, True, pool_bytes)
        self.fresh = PerRequestLanding(self.engine, self.regions, steps, True)

    async def open(self) -> LandingBench:
        """Register the pool; `close` gives everything back. The same as `async with`."""
        await self.pool.open()
        return self

    async def __aenter__(self) -> LandingBench:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give everything back."""
        await self.fresh.close()
        await self.pool.close()
        self.engine.close()
        self._writer.close()
        self._folder.cleanup()

    def draw(self, title: str = "") -> Drawing:
        """The pool as it is now."""
        return layout(of_pool(self.pool, RANK), title)

    def registrations(self) -> int:
        """Registrations so far, the pool's own included."""
        return sum(event.step == "mr.register" and event.phase == "end" for event in self.events)

    async def rounds(self, landing: Landing, nbytes: int, count: int = 15) -> float:
        """Median microseconds to allocate and free once."""
        return statistics.median([await self._round_us(landing, nbytes) for _ in range(count)])

    async def _round_us(self, landing: Landing, nbytes: int) -> float:
        began = time.perf_counter()
        await landing.free(await landing.allocate(nbytes, "bench"))
        return (time.perf_counter() - began) * 1e6

    async def touches(self, nbytes: int) -> tuple[Touch, Touch]:
        """The first write into memory of its own, and the second one into the same."""
        slot = await self.fresh.allocate(nbytes, "bench")
        source = self._source(nbytes)
        first, second = self._write(source, slot), self._write(source, slot)
        check("deregister", self._writer.deregister(source.address), "of the bench")
        await self.fresh.free(slot)
        return first, second

    def _source(self, nbytes: int) -> TensorBuffer:
        import torch

        source = TensorBuffer(torch.ones(nbytes, dtype=torch.uint8))
        check("register", self._writer.register(source.address, nbytes), "of the bench")
        return source

    def _write(self, source: TensorBuffer, slot: LandingSlot) -> Touch:
        faults, began = _faults(), time.perf_counter()
        code = self._writer.write_blocking(self.engine.session_id, source.address, slot.address, slot.nbytes)
        touch = Touch(_faults() - faults, (time.perf_counter() - began) * 1e3)
        check("transfer", code, "of the bench")
        return touch


def _faults() -> int:
    """Page faults of this process so far, without those that read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


async def churn(pool: LandingPool, sizes: range, requests: int, seed: int = 7) -> Waits:
    """Requests of random sizes that end in random order, with a quarter of the pool free: who found no room."""
    chance = random.Random(seed)
    held: list[LandingSlot] = []
    no_room = blocked = 0
    for _ in range(requests):
        nbytes = chance.choice(sizes)
        if nbytes > pool.largest_hole:
            no_room += 1
            blocked += nbytes <= pool.free_bytes
        while nbytes > pool.largest_hole or pool.free_bytes < pool.nbytes // 4:
            await pool.free(held.pop(chance.randrange(len(held))))
        held.append(await pool.allocate(nbytes, "bench"))
    for slot in held:
        await pool.free(slot)
    return Waits(requests, no_room, blocked)
