"""What tests with real processes share: whether one runs, and waiting for what it cannot tell us."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def light(folder: Path) -> dict[str, str]:
    """An environment whose torch and transformers are empty: a nursery starts at once, for roles that need neither."""
    for name in ("torch", "transformers/models/qwen2_5_vl"):
        for package in [Path(name), *Path(name).parents][:-1]:
            (folder / package).mkdir(parents=True, exist_ok=True)
            (folder / package / "__init__.py").touch()
    (folder / "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py").touch()
    return os.environ | {"PYTHONPATH": str(folder)}


def wait_until(fact: Callable[[], bool], seconds: float = 30.0) -> None:
    """Look until a fact about other processes holds, and fail if it never does."""
    give_up = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < give_up, "it never came true"
        threading.Event().wait(0.01)
