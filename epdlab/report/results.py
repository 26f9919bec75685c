"""Result files: what a command measured, with the machine, the versions and the date it was measured on.

Owns `results/NAME.json`: writing, reading, and which command makes each. What never passes through here:
formatting, and the name of the machine. A file is the measured data at top level, plus one key, `meta`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UsageError
from ..steps import Event, read_trace

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
META = "meta"
_VERSIONED = {
    "torch": ("torch",),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
}
_COMMANDS = {
    "race": "python -m epdlab bench race --write",
    "explore": "python -m epdlab bench hazards --write",
    "ablation": "python -m epdlab bench ablation --write",
    "store": "python -m epdlab store --facts --write",
    "conformance": "python -m epdlab.upstream.conformance",
    "upstream": "make upstream",
    "trace": "python -m epdlab report --traces",
}

Json = dict[str, Any]


@dataclass(frozen=True)
class Sources(Mapping[str, Json]):
    """Result files by name, each read once, and recorded traces.

    Attributes:
        folder: where they lie.
    """

    folder: Path = RESULTS
    _read: dict[str, Json] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Json:
        """`results/NAME.json`; UsageError names the command that makes it."""
        if name not in self._read:
            self._read[name] = read_result(name, self.folder)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in self.folder.glob("*.json")))

    def __len__(self) -> int:
        return len(list(self))

    def trace(self, name: str) -> list[Event]:
        """`results/trace_NAME.jsonl`; UsageError names the command that makes it."""
        path = self.folder / f"trace_{name}.jsonl"
        if not path.exists():
            raise UsageError(f"no results/{path.name}; record it with `{command_for(path.stem)}`")
        return read_trace(path)


def write_result(name: str, data: Mapping[str, Any], command: str, folder: Path = RESULTS) -> Path:
    """Keep what a command measured in `results/NAME.json`.

    Args:
        data: plain JSON values, without the key `meta`.
        command: the command line that measures it again.
    """
    if META in data:
        raise UsageError(f"result {name}: the key {META!r} is taken; rename it")
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({META: meta(command), **data}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_result(name: str, folder: Path = RESULTS) -> Json:
    """A result file.

    Raises:
        UsageError: it is not there or cannot be read; names the command that makes it.
    """
    path = folder / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no results/{name}.json; make it with `{command_for(name)}`") from None
    except ValueError as error:
        raise UsageError(f"results/{name}.json is no JSON ({error}); make it anew with `{command_for(name)}`") from None
    if not isinstance(found, dict):
        raise UsageError(f"results/{name}.json is no JSON object; make it anew with `{command_for(name)}`")
    return found


def command_for(name: str) -> str:
    """The command that makes `results/NAME.json` (or `.jsonl`)."""
    kind, _, rest = name.partition("_")
    if kind == "bench":
        return f"python -m epdlab bench {rest} --write"
    return _COMMANDS.get(kind, f"python -m epdlab {kind}")


def meta(command: str) -> Json:
    """Command, date (UTC), machine and versions of a measurement made now, on this machine."""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> Json:
    """Processor, cores this process may use, and memory in GiB; nothing that names the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1)}


def versions() -> dict[str, str]:
    """Python, torch, mooncake (whichever variant) and epdlab."""
    found = {"python": platform.python_version()}
    for name, packages in _VERSIONED.items():
        found[name] = next((v for v in map(_version, packages) if v), "not installed")
    return found | {"epdlab": __version__}


def _version(package: str) -> str | None:
    try:
        found = importlib.metadata.version(package)
        return f"{found} ({package})" if "mooncake" in package else found
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
