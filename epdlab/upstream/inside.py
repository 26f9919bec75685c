"""Starts one module of this folder inside the upstream environment: `python inside.py MODULE ARGUMENT`.

It owns one trick: `epdlab` becomes a bare package, so that its modules import while `epdlab/__init__.py`, whose
dependencies that environment lacks, does not run.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Runs `epdlab.upstream.MODULE` as the main module."""
    here = Path(__file__).resolve().parent
    package = ModuleType("epdlab")
    package.__path__ = [str(here.parent)]
    sys.modules["epdlab"] = package
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    sys.argv.pop(0)
    runpy.run_module(f"epdlab.upstream.{sys.argv[0]}", run_name="__main__")


if __name__ == "__main__":
    main()
