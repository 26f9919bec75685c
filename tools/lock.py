"""Writes requirements.lock: the exact version of every package that `.[cpu,dev]` brings in, as pip resolves it.

Resolved for the oldest Python that pyproject.toml accepts, since newer packages leave its first patch releases behind.
Left out are the Mooncake wheels (each extra pins its own) and what a CUDA build of torch brings (that build pins it).
Run it with the interpreter of the virtual environment: `make lock`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = re.compile(r"mooncake-|nvidia-|cuda-|triton$")
HEADER = "# Made by `make lock`. Versions that a fresh install is held to; installs nothing by itself.\n"


def resolve(project: dict[str, Any]) -> dict[str, Any]:
    """Ask pip what a fresh install of the project's requirements would take.

    Returns:
        pip's installation report.

    Raises:
        subprocess.CalledProcessError: pip found no set of versions; its own message is on stderr.
    """
    extras = project["optional-dependencies"]
    oldest = re.search(r">=([\d.]+)", project["requires-python"]).group(1) + ".0"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    with tempfile.TemporaryDirectory() as nowhere:
        pip += ["--only-binary", ":all:", "--python-version", oldest, "--target", nowhere]
        pip += [*project["dependencies"], *extras["cpu"], *extras["dev"]]
        output = subprocess.run(pip, check=True, stdout=subprocess.PIPE, text=True).stdout
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
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins(resolve(declared))
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(locked) + "\n")
    print(f"requirements.lock: {len(locked)} packages")
