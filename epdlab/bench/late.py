"""Late bytes, on the real engine: a write into a process that stands still answers -1, and lands when it goes on.

The landing memory is a file that the receiving process and this one map. While its owner is frozen, this process fills
it with other bytes, as a next request would have it, and counts afterwards how many of them were overwritten.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..engine import MooncakeEngine, keep_native_log
from . import Say
from .bare import ask, read, registered

MIB = 1 << 20
SIZES = (MIB, 64 * MIB)
TIMEOUT_S = 5
"""MC_TRANSFER_TIMEOUT; the engine takes no less (mooncake 0.3.13.post1)."""
FIRST, REFILLED, NEXT = 1, 2, 3
FAILED = -1
QUIET_S, PATIENCE_S = 1.0, 20.0


class FrozenPair:
    """A source in one child; in another, landing memory that this process sees too.

    Args:
        nbytes: of the write.

    Attributes:
        landing: uint8, shape (nbytes,): the memory of the receiving process.
    """

    def __init__(self, nbytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epdlab-late-")
        shared = Path(self._folder.name) / "landing"
        self.landing = _mapped(shared, nbytes)
        self._sink = self._child("sink", str(shared), str(nbytes))
        self._source = self._child("source", *read(self._sink).split(), str(nbytes))
        read(self._source)

    def freeze(self) -> None:
        self._sink.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._sink.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._sink.send_signal(signal.SIGCONT)

    def write(self) -> tuple[int, float]:
        """The code of the write, and its seconds."""
        code, seconds = ask(self._source, "write").split()
        return int(code), float(seconds)

    def refill(self) -> None:
        """Give the source other bytes, as an encoder does that takes its memory back."""
        ask(self._source, "refill")

    def _child(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "epdlab.bench.late", self._folder.name, *arguments]
        environment = os.environ | {"MC_TRANSFER_TIMEOUT": str(TIMEOUT_S)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> FrozenPair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.thaw()
        for child in (self._source, self._sink):
            with child:
                child.terminate()
        self._folder.cleanup()


def bench_late(quick: bool, say: Say) -> dict[str, Any]:
    """Per size: the write's code, the seconds until it came, and how many bytes landed after it."""
    rows = [_row(size) for size in SIZES[: 1 if quick else None]]
    for row in rows:
        say(
            f"{row['bytes'] // MIB:>3} MiB into a frozen process: {row['code']} after {row['answered_s']:.1f} s; "
            f"it goes on: {row['late_bytes']:,} bytes land, {row['share']:.0%} of the memory"
        )
    ok = all(row["code"] == FAILED and row["late_bytes"] > 0 for row in rows)
    return {"ok": ok, "timeout_s": TIMEOUT_S, "rows": rows}


def _row(size: int) -> dict[str, Any]:
    with FrozenPair(size) as pair:
        pair.write()  # makes the connection; one that is not there yet would take a minute to fail
        pair.landing.fill_(0)
        pair.freeze()
        code, seconds = pair.write()
        pair.refill()
        pair.landing.fill_(NEXT)
        pair.thaw()
        late = settled(pair.landing)
        first = int((pair.landing == FIRST).sum())
    return {
        "bytes": size,
        "code": code,
        "answered_s": seconds,
        "late_bytes": late,
        "of_the_write": first,
        "of_the_refill": late - first,
        "share": late / size,
    }


def settled(landing: torch.Tensor) -> int:
    """How many bytes are not NEXT any more, once their number has not changed for a second."""
    give_up, seen, since = time.monotonic() + PATIENCE_S, 0, time.monotonic()
    while time.monotonic() < min(give_up, since + QUIET_S):
        now = int((landing != NEXT).sum())
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)
    return seen


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _sink(path: str, nbytes: str) -> None:
    engine = MooncakeEngine()
    buffer = registered(engine, _mapped(Path(path), int(nbytes)))
    print(engine.session_id, buffer.address, flush=True)
    signal.pause()


def _source(session: str, target: str, nbytes: str) -> None:
    engine = MooncakeEngine()
    embedding = torch.full((int(nbytes),), FIRST, dtype=torch.uint8)
    buffer = registered(engine, embedding)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "refill":
            embedding.fill_(REFILLED)
            print("refilled", flush=True)
            continue
        began = time.perf_counter()
        code = engine.write_blocking(session, buffer.address, int(target), buffer.nbytes)
        print(code, time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    folder, what, *rest = sys.argv[1:]
    keep_native_log(Path(folder) / f"{what}.engine.log")
    if what == "sink":
        _sink(*rest)
    else:
        _source(*rest)
