"""An encoder's side of the store, as a process: a vision tower behind an embedding cache, told what to do over stdin.

Each line in is one JSON object with `op`; each line out is its answer. Two of these share one store in `epdlab store`.
No hand-off to prefill happens here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from ..cached_tower import CachedTower, open_cached_tower
from ..child import Child, started_line
from ..engine import keep_native_log
from ..errors import EpdLabError, LabError, one_line
from ..labels import REQUEST_LABELS
from ..media import MediaPolicy
from ..modality import Modality
from ..steps import Steps, TraceFile
from ..store import CacheConfig
from ..store_client import StoreConfig
from ..tower import VlmTower
from ..vlm import load_vlm

START_S = 120.0


class StoreWorker:
    """The handle of one such process.

    Args:
        name: its name in the trace; out: folder of trace and logs; media: folder its items come from.
        pool_bytes: its cache's pool.
    """

    def __init__(self, name: str, master: str, out: Path, media: Path, pool_bytes: int) -> None:
        options = ["--name", name, "--master", master, "--out", str(out), "--media", str(media)]
        command = [sys.executable, "-m", __spec__.name, *options, "--pool-bytes", str(pool_bytes)]
        self.name = name
        self.child = Child(command, out / f"{name}.log", talks=True)

    async def ready(self) -> None:
        """Wait until it can take orders.

        Raises:
            LabError: it did not start; says why.
        """
        answer = json.loads(await started_line(self.child, START_S))
        if "error" in answer:
            await self.child.end()
            raise LabError(f"{self.name} did not start: {answer['error']}")

    async def embed(self, req: str, *items: str) -> dict[str, Any]:
        """One request; `digest` of its embedding, `wanted` by the tower without a cache, `ms`, and the counters."""
        return await self._ask(op="embed", req=req, items=items)

    async def settled(self) -> dict[str, Any]:
        """Wait for the write-behind; the counters, and the reasons of what did not go well."""
        return await self._ask(op="settled")

    async def _ask(self, **order: Any) -> dict[str, Any]:
        self.child.stdin.write(json.dumps(order).encode() + b"\n")
        self.child.stdin.flush()
        line = await asyncio.to_thread(self.child.stdout.readline)
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended; its log is {self.child.log}"}
        if "error" in answer:
            raise LabError(f"{self.name}: {answer['error']}")
        return answer

    def __repr__(self) -> str:
        return f"StoreWorker({self.name}, {self.child!r})"


class _Worker:
    def __init__(self, tower: CachedTower, steps: Steps) -> None:
        self._tower, self._steps = tower, steps

    async def embed(self, req: str, items: list[str]) -> dict[str, Any]:
        REQUEST_LABELS.set({"req": req})
        prepared = await self._tower.prepare(items, Modality.IMAGE)
        began = time.perf_counter()
        [made] = await self._tower.forward([prepared])
        ms = (time.perf_counter() - began) * 1e3
        [wanted] = await self._tower.inner.forward([prepared])
        return {"digest": made.digest(), "wanted": wanted.digest(), "bytes": made.nbytes, "ms": ms}

    async def settled(self) -> dict[str, Any]:
        await self._tower.cache.settled()
        return {"counters": dict(self._tower.counters), "reasons": dict(self._tower.cache.counters.reasons)}


async def _serve(options: argparse.Namespace) -> int:
    keep_native_log(options.out / f"{options.name}.engine.log")
    trace = TraceFile(options.out / "trace.jsonl")
    steps = Steps(options.name, trace)
    vlm = await asyncio.to_thread(load_vlm, options.model, options.device, "encoder")
    inner = VlmTower(vlm, MediaPolicy(allowed_root=options.media))
    config = CacheConfig(pool_bytes=options.pool_bytes)
    try:
        tower = await open_cached_tower(inner, steps, StoreConfig(options.master), config)
    except EpdLabError as error:
        _say({"error": one_line(error)})
        return 1
    steps.note("process.start", data={"role": "encoder", "store": options.master})
    _say({"ready": options.name})
    worker = _Worker(tower, steps)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        order = json.loads(line)
        try:
            _say(await getattr(worker, order.pop("op"))(**order))
        except EpdLabError as error:
            _say({"error": one_line(error)})
    await tower.close()
    trace.close()
    return 0


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m epdlab.lab.store_worker")
    parser.add_argument("--name", required=True)
    parser.add_argument("--master", required=True, help="HOST:PORT")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--media", type=Path, required=True)
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    return asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(_main())
