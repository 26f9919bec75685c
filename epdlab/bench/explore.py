"""How fast the explorer is: complete schedules per second of one core's time, for TP 2 in the model.

Each profile's bound (two ranks, one request, no fault and every kind of fault) is explored to its end twice: `cold`,
where the machines must run sender and receiver for every history they have not seen, and `warm`, where they remember.
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

from ..check.explorer import ALL, Exploration, explore, kinds_of
from ..check.scenario import Scenario
from ..check.world import machines
from . import Say

PROFILES = ("hardened", "sglang-0.5.17", "sglang-0.5.16")
KIB_PER_MIB = 1024


def bench_explore(quick: bool, say: Say) -> dict[str, Any]:
    """Schedules, states, CPU seconds and schedules a second, per profile, cold and warm; peak memory of the process."""
    rows = [row for name in PROFILES[: 1 if quick else None] for row in _measured(name, 1 if quick else 3)]
    answer: dict[str, Any] = {
        "ok": all(row["exhaustive"] for row in rows),
        "tp": 2,
        "rows": rows,
        "schedules_per_s": max(row["schedules_per_s"] for row in rows),
        "peak_rss_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB,
    }
    for row in rows:
        say(
            f"{row['profile']:16} {row['memory']}: {row['schedules']:6,} schedules, {row['states']:7,} states, "
            f"{row['cpu_s']:6.2f} s of CPU, {row['schedules_per_s']:6,.0f} schedules/s"
        )
    say(f"peak memory of the process {answer['peak_rss_MiB']:.0f} MiB")
    return answer


def _measured(name: str, repeats: int) -> list[dict[str, Any]]:
    scenario = Scenario(name)
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(repeats):
        processes = machines(scenario)
        for seconds in (cold, warm):
            began = time.process_time()
            found = explore(scenario, kinds_of(ALL), processes=processes)
            seconds.append(time.process_time() - began)
    return [_row(found, "cold", cold), _row(found, "warm", warm)]


def _row(found: Exploration, memory: str, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "profile": found.scenario.profile,
        "memory": memory,
        "schedules": found.schedules,
        "states": sum(tally.states for tally in found.tallies.values()),
        "exhaustive": found.exhaustive,
        "violations": sorted(found.findings),
        "cpu_s": median,
        "schedules_per_s": found.schedules / median,
        "best_schedules_per_s": found.schedules / min(seconds),
    }
