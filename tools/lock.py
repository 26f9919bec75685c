"""Writes requirements.lock: the exact version of every package that `.[cpu,dev]` brings in, as pip resolves it.

Left out are the Mooncake wheels (each extra pins its own) and what a CUDA build of torch brings (that build pins it).
Run it with the interpreter of the virtual environment: `make lock`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = re.compile(r"epdlab|mooncake-|nvidia-|cuda-|triton$")
HEADER = "# Made by `make lock`. Versions that a fresh install is held to; installs nothing by itself.\n"


def resolve() -> dict[str, Any]:
    """Ask pip what a fresh install would take.

    Returns:
        pip's installation report.

    Raises:
        subprocess.CalledProcessError: pip found no set of versions; its own message is on stderr.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    output = subprocess.run([*command, ".[cpu,dev]"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    report: dict[str, Any] = json.loads(output)
    return report


def pins(report: dict[str, Any]) -> list[str]:
    """`name==version` for every package of a report, normalised, sorted, without build tags such as `+cpu`."""
    lines = []
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if not LEFT_OUT.match(name):
            lines.append(f"{name}=={item['metadata']['version'].partition('+')[0]}")
    return sorted(lines)


if __name__ == "__main__":
    locked = pins(resolve())
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(locked) + "\n")
    print(f"requirements.lock: {len(locked)} packages")
