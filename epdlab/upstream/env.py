"""Keeps the releases and the virtual environment that runs them, in $EPDLAB_CACHE or ~/.cache/epdlab.

It fetches wheels with pip and unpacks them; a release itself is never installed, only put on a child's path.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..errors import LabError

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch keeps its CPU builds; PyPI has only the CUDA one for Linux."""

ONLY_WHEEL = ("--no-deps", "--only-binary", ":all:")

Say = Callable[[str], None]


def cache_folder() -> Path:
    """The folder that everything fetched for the upstream runs is kept in (about 4 GB)."""
    root = os.environ.get("EPDLAB_CACHE") or Path.home() / ".cache" / "epdlab"
    return Path(root).expanduser() / "upstream"


def python(say: Say) -> Path:
    """The interpreter of the upstream environment, made first if it is not there or its pins have changed.

    Raises:
        LabError: a package could not be installed; the message names pip's last line.
    """
    folder = cache_folder() / "venv"
    interpreter, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return interpreter
    say(f"making the upstream environment in {folder} (2.7 GB, some minutes, once)")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], say)
    _install_torch(interpreter, say)
    _run([*_pip(interpreter), "install", "--no-deps", "-r", str(REQUIREMENTS)], say)
    stamp.write_text(digest)
    return interpreter


def wheel(version: str, say: Say) -> Path:
    """The wheel of one SGLang release, as pip fetched it."""
    folder = cache_folder() / "wheels"
    found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not found:
        say(f"fetching sglang {version}")
        folder.mkdir(parents=True, exist_ok=True)
        _run([*_pip(Path(sys.executable)), "download", *ONLY_WHEEL, f"sglang=={version}", "-d", str(folder)], say)
        found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not found:
        raise LabError(f"pip fetched no wheel of sglang {version}: it has none for this Python, use Python 3.11")
    return found[0]


def release_folder(version: str, say: Say) -> Path:
    """The unpacked release; it holds the folder `sglang`."""
    archive = wheel(version, say)
    folder = cache_folder() / archive.stem
    done = folder / "unpacked"
    if not done.exists():
        say(f"unpacking {archive.name}")
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
        done.touch()
    return folder


def wheel_digest(version: str, say: Say) -> str:
    """SHA-256 of the release's wheel, so that a result says exactly what ran."""
    with wheel(version, say).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _install_torch(interpreter: Path, say: Say) -> None:
    """Tries the configured sources first; PyPI itself has no CPU build of torch."""
    pin = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    command = [*_pip(interpreter), "install", "--no-deps", pin]
    try:
        _run(command, say)
    except LabError:
        _run([*command, "--extra-index-url", TORCH_INDEX], say)


def _pip(interpreter: Path) -> list[str]:
    return [str(interpreter), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _run(command: list[str], say: Say) -> None:
    """Runs a command and says which package pip is at."""
    last, done = "", 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        for line in child.stdout or ():
            last = line.strip() or last
            if line.startswith("Collecting "):
                done += 1
                if done % 10 == 1:
                    say(f"  pip: {done} packages, now {line.split()[1]}")
    if child.returncode:
        raise LabError(
            f"{' '.join(command[1:5])} ... failed: {last}; check the network and the space in {cache_folder()}"
        )
