"""`epdlab store`: two encoder sides, one store, and what happens to them.

A master, a plain donor of memory and two encoder processes with their own pools. The scenario: a miss, a local hit, a
hit from the other encoder, one request with a hit and a miss, eviction under pressure, the donor's death, a new donor.
Owns the scenario and its answer; nothing is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..child import Child
from ..doctor import installed_wheels
from ..donor import Donor
from ..master import MooncakeMaster
from ..steps import Event, Steps, TraceFile, read_trace
from .store_worker import StoreWorker

KIB, MIB = 1 << 10, 1 << 20
SEGMENT_BYTES = 16 * MIB
POOL_BYTES = 1 * MIB
PRESSURE_IMAGES = 6
FLAGS = {"default_kv_lease_ttl": 500, "client_ttl": 2}
Say = Callable[[str], None]


def run_store(out: Path | None = None, say: Say = lambda line: None) -> dict[str, Any]:
    """Run the scenario; its JSON answer.

    Args:
        out: folder for the trace and the logs; a temporary one that goes away if not given.

    Returns:
        `ok`; `checks` by name; `counters` and `reasons` per encoder; `ms` of a forward, a local and a global hit of
        the same image, and of everything; `copies` between which kinds of memory, from the trace; `store` as the
        master's pages give it; `versions`.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return asyncio.run(scenario(out, say))
    with tempfile.TemporaryDirectory(prefix="epdlab-store-") as folder:
        return asyncio.run(scenario(Path(folder), say))


async def scenario(out: Path, say: Say = lambda line: None) -> dict[str, Any]:
    """The same on a running loop, for a notebook's `await`."""
    began = time.perf_counter()
    (out / "trace.jsonl").unlink(missing_ok=True)
    async with cluster(out) as story:
        say(f"master {story.master.address}, donor {story.donors[0].segment}, two encoder sides are up")
        await story.hits(say)
        await story.pressure(say)
        await story.donor_dies(say)
        answer = await story.answer()
        children = story.children
    answer["checks"]["nothing_left_running"] = all(child.returncode is not None for child in children)
    answer["ok"] = all(answer["checks"].values())
    answer["ms"]["all"] = round((time.perf_counter() - began) * 1e3, 1)
    say(f"{'all' if answer['ok'] else 'NOT all'} of {len(answer['checks'])} checks hold")
    return answer


@contextlib.asynccontextmanager
async def cluster(out: Path, pool_bytes: int = POOL_BYTES, donor_bytes: int = SEGMENT_BYTES) -> AsyncIterator[Story]:
    """Master, donor and two encoder sides, up and down again."""
    async with contextlib.AsyncExitStack() as stack:
        master = await stack.enter_async_context(MooncakeMaster(out / "master.log", flags=FLAGS))
        donors = [Donor(master.address, donor_bytes, out / "donor.log")]
        stack.push_async_callback(lambda: asyncio.gather(*(donor.stop() for donor in donors)))
        workers = []
        for name in ("enc0", "enc1"):
            workers.append(StoreWorker(name, master.address, out, out / "media", pool_bytes))
            stack.push_async_callback(workers[-1].child.end, term=False)
        (out / "media").mkdir(exist_ok=True)
        trace = TraceFile(out / "trace.jsonl")
        stack.callback(trace.close)
        await asyncio.gather(donors[0].start(), *(worker.ready() for worker in workers))
        yield Story(out, master, donors, workers, Steps("lab", trace))


class Story:
    """The cluster, and the scenario's acts on it.

    Attributes:
        checks: what held so far, by name; ms: milliseconds by what took them.
    """

    def __init__(
        self, out: Path, master: MooncakeMaster, donors: list[Donor], workers: Sequence[StoreWorker], steps: Steps
    ) -> None:
        self.out, self.master, self.donors, self.workers = out, master, donors, list(workers)
        self.checks: dict[str, bool] = {}
        self.ms: dict[str, float] = {}
        self._steps, self._requests = steps, 0

    @property
    def children(self) -> list[Child]:
        """Every process of the cluster, those that have ended included."""
        master = [self.master.child] if self.master.child is not None else []
        return [*master, *(donor.child for donor in self.donors), *(worker.child for worker in self.workers)]

    def image(self, number: int, side: int = 224) -> str:
        """An image of its own for each number; its path."""
        path = self.out / "media" / f"{number}-{side}.png"
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((side, side)).save(path)
        return str(path)

    async def embed(self, who: int, *items: str) -> dict[str, Any]:
        """One request at encoder `who`. Every answer's bytes are held against the tower without a cache."""
        self._requests += 1
        answer = await self.workers[who].embed(f"req{self._requests}", *items)
        right = answer["digest"] == answer["wanted"]
        self.checks["bytes_equal"] = self.checks.get("bytes_equal", True) and right
        return answer

    async def counters(self, who: int) -> dict[str, int]:
        """One encoder's counters, after its writes have ended."""
        counters: dict[str, int] = (await self.workers[who].settled())["counters"]
        return counters

    async def hits(self, say: Say) -> None:
        """A miss, a local hit, a global hit, and one request with one of each."""
        await self.embed(0, self.image(90))
        seen, new = self.image(1, 448), self.image(2)
        for what, who, items in (
            ("forward", 0, [seen]),
            ("local_hit", 0, [seen]),
            ("global_hit", 1, [seen]),
            ("hit_and_miss", 1, [seen, new]),
        ):
            self.ms[what] = round((await self.embed(who, *items))["ms"], 2)
            await self.counters(who)
            say(f"{what.replace('_', ' ')}: {self.ms[what]} ms at enc{who}")
        first, second = await self.counters(0), await self.counters(1)
        self.checks["second_request_hits_locally"] = (first["miss"], first["local_hit"]) == (2, 1)
        self.checks["other_encoder_hits_globally"] = second["global_hit"] == 1
        self.checks["only_the_miss_is_computed"] = (second["miss"], second["local_hit"]) == (1, 1)

    async def pressure(self, say: Say) -> None:
        """More images than the pool holds, and then the first one again."""
        early = self.image(100, 448)
        await self.embed(0, early)
        for number in range(101, 101 + PRESSURE_IMAGES):
            await self.embed(0, self.image(number, 448))
        before = await self.counters(0)
        await self.embed(0, early)
        after = await self.counters(0)
        say(f"{after['evicted']} entries evicted from enc0's pool of {POOL_BYTES // MIB} MiB; the store has them still")
        self.checks["the_pool_evicts"] = before["evicted"] > 0
        self.checks["evicted_entries_come_back"] = after["global_hit"] == before["global_hit"] + 1

    async def donor_dies(self, say: Say) -> None:
        """The only segment is lost; requests go on, and a new donor makes the store whole again."""
        keys = len(self.master.pages.keys())
        self._steps.note("process.kill", data={"process": "donor"})
        await self.donors[-1].child.kill()
        before = await self.counters(1)
        await self.embed(1, self.image(100, 448))
        after = await self.counters(1)
        say(f"the donor was killed with {keys} objects; enc1 computed the embedding anew")
        recomputed = [after[word] - before[word] for word in ("miss", "fallback")]
        self.checks["a_dead_donor_costs_a_forward"] = sum(recomputed) == 1
        self.donors.append(Donor(self.master.address, SEGMENT_BYTES, self.out / f"donor{len(self.donors)}.log"))
        await self.donors[-1].start()
        await self._shared_again()

    async def _shared_again(self) -> None:
        """Images until one reaches the other encoder: the dead segment stays listed for a while."""
        for number in range(200, 240):
            await self.embed(0, self.image(number))
            before = (await self.counters(0), await self.counters(1))[1]
            await self.embed(1, self.image(number))
            if (await self.counters(1))["global_hit"] > before["global_hit"]:
                self.checks["a_new_donor_is_used"] = True
                return
        self.checks["a_new_donor_is_used"] = False

    async def answer(self) -> dict[str, Any]:
        """Everything that was counted."""
        settled = {worker.name: await worker.settled() for worker in self.workers}
        metrics, segments = self.master.pages.metrics(), self.master.pages.segments()
        wheels = installed_wheels()
        return {
            "ok": False,
            "checks": self.checks,
            "counters": {name: answer["counters"] for name, answer in settled.items()},
            "reasons": {name: answer["reasons"] for name, answer in settled.items()},
            "ms": self.ms,
            "copies": copies(read_trace(self.out / "trace.jsonl")),
            "store": {
                "keys": int(metrics["master_key_count"]),
                "segments": [{"name": s.name, "used": s.used, "capacity": s.capacity} for s in segments],
            },
            "versions": wheels | {name: version(name) for name in ("torch", "transformers")},
        }


def copies(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Who copied what: bytes and times between each two kinds of memory, per process, from a trace."""
    nbytes: Counter[tuple[str, str, str, str]] = Counter()
    times: Counter[tuple[str, str, str, str]] = Counter()
    for event in events:
        data = event.data or {}
        if event.step in ("cache.copy", "cache.get", "cache.put") and event.phase != "begin" and "from" in data:
            way = (event.process, event.step, str(data["from"]), str(data["to"]))
            nbytes[way] += event.bytes or 0
            times[way] += 1
    return [
        {"process": way[0], "step": way[1], "from": way[2], "to": way[3], "times": times[way], "bytes": nbytes[way]}
        for way in sorted(times)
    ]
