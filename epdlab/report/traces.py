"""The recorded runs that the report's figures show: `results/trace_NAME.jsonl`.

Owns which run is recorded under which name, and the order in which its steps are let go. A recording is the trace of a
live lab, as it was written; the figures are drawn from the file and not from the run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..lab import Lab
from ..lab.demo import DemoOptions, run_demo
from .results import RESULTS

MIB = 1 << 20
NO_POOL = "+hold_landing_until_consumed"
"""What a buffer per request does by itself: it stays as long as somebody has a view of it."""
Recording = Callable[[Path], None]
"""Runs a lab and leaves its trace at the path."""


def record_traces(folder: Path = RESULTS) -> list[Path]:
    """Run every recording and keep its trace in `folder`; the files written. Takes some seconds for each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"trace_{name}.jsonl" for name in RECORDINGS}
    for name, path in paths.items():
        RECORDINGS[name](path)
    return list(paths.values())


def _demo(path: Path) -> None:
    """One image to two ranks, with the real model."""
    with tempfile.TemporaryDirectory(prefix="epdlab-demo-") as out:
        run_demo(DemoOptions(out=Path(out)))
        shutil.copy(Path(out) / "trace.jsonl", path)


def _two_phase(path: Path) -> None:
    """One request of two ranks; no step is held."""
    with Lab(tp=2, profile=f"sglang-0.5.17{NO_POOL}", model="synthetic") as lab:
        lab.request(f"bytes:{4 * MIB}:1")
        lab.result()
        lab.census()
        shutil.copy(lab.trace_path, path)


def _race(profile: str) -> Recording:
    """Rank 0's /send comes first. Both writes begin; rank 0's ends and is acked before rank 1's may end."""

    def record(path: Path) -> None:
        with Lab(tp=2, profile=profile + NO_POOL, model="synthetic") as lab:
            lab.hold("send.lookup")
            lab.hold("transfer.write", phase=None)
            lab.hold("ack.pull", process="rank0")
            lab.request(f"bytes:{4 * MIB}:1", req_id="req1")
            for rank in (0, 1):
                lab.wait_for_ranks("req1")
                lab.step(step="send.lookup", rank=rank)
            lab.wait_for_ranks("req1")
            for rank in (0, 1, 0):
                lab.step(step="transfer.write", rank=rank)
            lab.step(step="ack.pull", process="rank0")
            lab.run()
            lab.result("req1")
            lab.census()
            shutil.copy(lab.trace_path, path)

    return record


def _landing_pool(path: Path) -> None:
    """Requests of two parts land in one pool; the second gives its slot back, and the fourth goes into the hole."""
    with Lab(tp=1, encoders=2, profile="hardened", model="synthetic", pool_bytes=8 * MIB) as lab:
        lab.hold("landing.free")
        for number, nbytes in enumerate((MIB, 2 * MIB, MIB // 2, MIB // 4), start=1):
            if number == 4:
                lab.step(step="landing.free", req="req2")
                lab.result("req2")
            lab.request(f"bytes:{nbytes}:{number}", f"bytes:{nbytes // 2}:{number + 4}", req_id=f"req{number}")
            lab.wait_for_ranks(f"req{number}")
        lab.run()
        for number in (1, 3, 4):
            lab.result(f"req{number}")
        lab.census()
        shutil.copy(lab.trace_path, path)


RECORDINGS: dict[str, Recording] = {
    "demo": _demo,
    "two_phase": _two_phase,
    "race_0516": _race("sglang-0.5.16"),
    "race_0517": _race("sglang-0.5.17"),
    "landing_pool": _landing_pool,
}
