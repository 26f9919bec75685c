"""The race, counted over profiles, ranks and sizes: the table of the report. Counts, no times."""

from __future__ import annotations

from typing import Any

from ..lab.race import RaceOptions, run_race, summary
from . import Say

KIB, MIB = 1 << 10, 1 << 20
PROFILES = ("sglang-0.5.16", "sglang-0.5.17", "hardened")
STAGGER_MS = 400.0


def bench_race(quick: bool, say: Say) -> dict[str, Any]:
    """The answers of `epdlab race`, one a run, by a key that says what was run."""
    repeat = 5 if quick else 50
    runs: dict[str, Any] = {}
    for options in _matrix(repeat):
        answer = runs[_key(options)] = run_race(options)
        say(summary(answer))
    return {"ok": True, "runs": runs}


def _matrix(repeat: int) -> list[RaceOptions]:
    together = [RaceOptions(p, tp, size, repeat) for p in PROFILES for tp in (2, 4) for size in (64 * KIB, 4 * MIB)]
    large = [RaceOptions(p, 8, 64 * MIB, max(2, repeat // 10)) for p in PROFILES]
    nic = [RaceOptions(p, 2, 4 * MIB, repeat, nic=True) for p in PROFILES]
    apart = [RaceOptions(p, 2, 64 * KIB, max(2, repeat // 5), stagger_ms=STAGGER_MS) for p in PROFILES]
    return [*together, *large, *nic, *apart]


def _key(options: RaceOptions) -> str:
    how = "_nic" * options.nic + "_stagger" * bool(options.stagger_ms)
    return f"{options.profile}_tp{options.tp}_{options.bytes}{how}"
