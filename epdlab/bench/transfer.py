"""The whole /send path against the bare write of the same bytes.

The path: POST /send, registration if due, the one-sided write, the ack over ZMQ, its check - from one rank's /send to
its last ack, between two real processes, read off the run's trace. The limit: `transfer_sync_write` of as many bytes
between two other processes of the same run, taken in turn with it. Landing memory is registered once and warm on both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..errors import LabError
from ..lab import Lab
from ..steps import Event
from . import Say
from .bare import BarePair

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK = (64 * KIB, 4 * MIB, 16 * MIB)
BUDGET_BYTES = 8_192 * MIB


def bench_transfer(quick: bool, say: Say) -> dict[str, Any]:
    """Per size: medians and quartiles of path and bare write in ms, goodput in GB/s, and the ratio of the medians."""
    sizes = QUICK if quick else SIZES
    pool = max(sizes) + 4 * KIB
    rows = []
    with BarePair(max(sizes)) as bare, Lab(tp=1, model="synthetic", pool_bytes=pool, digest=False) as lab:
        _turn(lab, bare, max(sizes), 0)
        for size in sizes:
            rows.append(_row(lab, bare, size, _repeats(size, quick)))
            say(_line(rows[-1]))
    return {"ok": True, "sizes": rows, **_claims(rows)}


def _repeats(size: int, quick: bool) -> int:
    return 15 if quick else min(101, BUDGET_BYTES // size)


def _row(lab: Lab, bare: BarePair, size: int, repeats: int) -> dict[str, Any]:
    turns = [_turn(lab, bare, size, seed) for seed in range(1, repeats + 1)]
    paths, writes = zip(*turns, strict=True)
    path, write = statistics.median(paths), statistics.median(writes)
    return {
        "bytes": size,
        "repeats": repeats,
        "path_ms": path,
        "bare_ms": write,
        "path_quartiles_ms": _quartiles(paths),
        "bare_quartiles_ms": _quartiles(writes),
        "path_gbps": size / path / 1e6,
        "bare_gbps": size / write / 1e6,
        "ratio": write / path,
        "extra_ms": path - write,
    }


def _quartiles(times: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(times, n=4)
    return [low, high]


def _turn(lab: Lab, bare: BarePair, size: int, seed: int) -> tuple[float, float]:
    """Milliseconds of one request's /send path, and of one bare write."""
    req_id = f"{size}-{seed}"
    lab.request(f"bytes:{size}:{seed}", req_id=req_id)
    answer = lab.result(req_id)["rank0"]
    if isinstance(answer, BaseException):
        raise LabError(f"the request of {size} bytes failed: {answer}")
    return _path_ms(lab.events_of(req_id)), bare.write_ms(size)


def _path_ms(events: list[Event]) -> float:
    began = next(e.t for e in events if e.step == "send.post" and e.phase == "begin")
    ended = next(e.t for e in reversed(events) if e.step == "ack.pull" and e.phase == "end")
    return (ended - began) / 1e6


def _claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The two figures promised: worst ratio from 16 MiB up, and what 64 KiB costs more."""
    large = [row["ratio"] for row in rows if row["bytes"] >= 16 * MIB]
    small = [row["extra_ms"] for row in rows if row["bytes"] == 64 * KIB]
    return {"worst_ratio_from_16MiB": min(large), "extra_ms_at_64KiB": small[0]}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['bytes'] / KIB:>9,.0f} KiB  path {row['path_ms']:8.2f} ms {row['path_gbps']:5.2f} GB/s   "
        f"bare {row['bare_ms']:8.2f} ms {row['bare_gbps']:5.2f} GB/s   ratio {row['ratio']:.2f}"
    )
