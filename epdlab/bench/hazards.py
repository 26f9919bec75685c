"""What still breaks, release by release: every profile under every fault, in the model."""

from __future__ import annotations

from typing import Any

from ..check import api
from ..check.scenario import FAULTS
from ..rules import PROFILES
from . import Say

SECONDS = 5.0
SHAPES = ((2, 1), (1, 2))


def bench_hazards(quick: bool, say: Say) -> dict[str, Any]:
    """Two ranks with one request, and one rank with two requests on one pool slot; broken invariants of both."""
    runs: dict[str, Any] = {}
    for profile in PROFILES:
        for fault in (None, *FAULTS):
            run = runs[f"{profile}_{fault or 'none'}"] = _run(profile, fault, SHAPES[:1] if quick else SHAPES)
            say(f"{profile}, {fault or 'no fault'}: {', '.join(v['invariant'] for v in run['violations']) or 'clean'}")
    return {"ok": True, "schedules": sum(run["schedules"] for run in runs.values()), "runs": runs}


def _run(profile: str, fault: str | None, shapes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    answers = [api.explore(profile, tp, requests, fault=fault, seconds=SECONDS) for tp, requests in shapes]
    violations: dict[str, Any] = {}
    for violation in (v for answer in answers for v in answer["violations"]):
        kept = {key: violation[key] for key in ("invariant", "message", "moves")}
        violations.setdefault(violation["invariant"], kept)
    return {
        "profile": profile,
        "fault": fault,
        "exhaustive": all(answer["exhaustive"] for answer in answers),
        "schedules": sum(answer["schedules"] for answer in answers),
        "states": sum(answer["states"] for answer in answers),
        "violations": list(violations.values()),
    }
