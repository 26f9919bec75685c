"""Benchmarks: ratios within one run, medians, and the limit measured beside each figure. Tests assert none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Say = Callable[[str], None]
RESULT_NAMES = {"race": "race", "ablation": "ablation", "hazards": "explore"}


def run(name: str, quick: bool, write: bool, say: Say) -> dict[str, Any]:
    """Run one benchmark; its figures, kept in results/bench_NAME.json (counts under RESULT_NAMES) if `write`."""
    module = import_module(f".{name}", __name__)
    answer: dict[str, Any] = getattr(module, f"bench_{name}")(quick, say)
    if write:
        from ..report.results import write_result

        kept = write_result(RESULT_NAMES.get(name, f"bench_{name}"), answer, f"python -m epdlab bench {name} --write")
        say(f"kept in {kept.name}")
    return answer
