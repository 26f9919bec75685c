"""The ablation table as the report shows it: every rule of `hardened`, what breaks without it, and the schedule."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..check import api
from ..check.schedule import load
from ..errors import LabError
from ..report.results import RESULTS
from . import Say

SECONDS = 240.0
FOLDER = RESULTS / "schedules"


def bench_ablation(quick: bool, say: Say) -> dict[str, Any]:
    """Explore, and keep one schedule file per rule in results/schedules (not if `quick`)."""
    with tempfile.TemporaryDirectory(prefix="epdlab-ablation-") as folder:
        answer = api.ablate(SECONDS / 4 if quick else SECONDS, out=Path(folder) if quick else FOLDER, say=say)
        rules = {row["rule"]: _shown(row) for row in answer["rules"]}
    kept = ("ok", "schedules", "exhaustive", "hardened")
    return {key: answer[key] for key in kept} | {"rules": rules}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    if row["file"] is None:
        raise LabError(f"nothing breaks without {row['rule']}; a rule must break something, see check/ablation.py")
    path = Path(row["file"])
    moves = [str(move) for move in load(path).moves]
    fault = None if row["fault"] == "none" else row["fault"]
    command = f"python -m epdlab replay results/schedules/{path.name}"
    return {key: value for key, value in row.items() if key != "file"} | {
        "fault": fault,
        "schedule": moves,
        "command": command,
    }
