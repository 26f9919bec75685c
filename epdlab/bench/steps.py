"""What the seam costs: one held step, and recording alone.

A held step: from letting one go until the next one waits, so with the step's own work, over requests of one rank that
are held at every step. Recording: what it takes to write all of a request's events again, against the time its 4 MiB
took from /send to the ack, in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..lab import Lab
from ..lab.stepper import Stepper
from ..steps import Event, TraceFile
from . import Say

SMALL, LARGE = 4 << 10, 4 << 20
RECORDINGS = 50


def bench_steps(quick: bool, say: Say) -> dict[str, Any]:
    """Medians in ms: a held step, a step of the stepper; and recording's share of a 4 MiB transfer."""
    repeats = 3 if quick else 15
    with Lab(tp=1, model="synthetic", digest=False) as lab:
        count = _count(lab)
        steps = [ms for number in range(repeats) for ms in _held(lab, f"held{number}", count)]
    with Stepper(f"bytes:{SMALL}:1") as stepper:
        stops = _stops(stepper, quick)
    with Lab(tp=1, model="synthetic", digest=False) as lab:
        shares = [_recorded(lab, f"free{number}") for number in range(4 * repeats)]
    recording, transfer, share = (statistics.median(values) for values in zip(*shares, strict=True))
    answer: dict[str, Any] = {
        "ok": True,
        "step_ms": statistics.median(steps),
        "steps": len(steps),
        "stepper_step_ms": statistics.median(stops),
        "stepper_steps": len(stops),
        "recording_ms": recording,
        "transfer_4MiB_ms": transfer,
        "recording_share": share,
        "transfers": len(shares),
    }
    for line in _lines(answer):
        say(line)
    return answer


def _count(lab: Lab) -> int:
    """How many steps one request is held at."""
    lab.hold("*", phase=None)
    lab.request(f"bytes:{SMALL}:1")
    count = 0
    while lab.settle():
        lab.step()
        count += 1
    return count


def _held(lab: Lab, req_id: str, count: int) -> list[float]:
    """Milliseconds from each step of a request to the next one that waits."""
    lab.request(f"bytes:{SMALL}:1", req_id=req_id)
    lab.step()
    taken = []
    for _ in range(count - 1):
        began = time.perf_counter()
        lab.step()
        taken.append((time.perf_counter() - began) * 1e3)
    lab.result(req_id)
    return taken


def _stops(stepper: Stepper, quick: bool) -> list[float]:
    """Milliseconds of each step of a stepper, which waits for the whole lab to be at rest."""
    taken = []
    for _ in range(1 if quick else 4):
        while stepper.waiting:
            began = time.perf_counter()
            stepper.step()
            taken.append((time.perf_counter() - began) * 1e3)
        stepper.reset()
    return taken


def _recorded(lab: Lab, req_id: str) -> tuple[float, float, float]:
    """Milliseconds to record one request's events, milliseconds its /send took, and their ratio."""
    lab.request(f"bytes:{LARGE}:1", req_id=req_id)
    answer = lab.result(req_id)["rank0"]
    if isinstance(answer, BaseException):
        raise LabError(f"the request of {LARGE} bytes failed: {answer}")
    events = lab.events_of(req_id)
    began = next(event.t for event in events if event.step == "send.post")
    ended = next(event.t for event in reversed(events) if event.step == "ack.pull")
    recording, transfer = _recording_ms(events), (ended - began) / 1e6
    return recording, transfer, recording / transfer


def _recording_ms(events: list[Event]) -> float:
    with tempfile.TemporaryDirectory(prefix="epdlab-bench-") as folder:
        trace = TraceFile(Path(folder) / "trace.jsonl")
        taken = []
        for _ in range(RECORDINGS):
            began = time.perf_counter()
            for event in events:
                trace(event)
            taken.append((time.perf_counter() - began) * 1e3)
        trace.close()
    return statistics.median(taken)


def _lines(answer: dict[str, Any]) -> list[str]:
    return [
        f"a held step           {answer['step_ms']:8.2f} ms at the median of {answer['steps']}",
        f"a step of the stepper {answer['stepper_step_ms']:8.2f} ms at the median of {answer['stepper_steps']}",
        f"recording a request   {answer['recording_ms']:8.3f} ms, {answer['recording_share']:.1%} of the "
        f"{answer['transfer_4MiB_ms']:.2f} ms its 4 MiB took",
    ]
