"""Two processes and nothing but `transfer_sync_write` between them: the limit that benchmarks measure against.

Each write reads memory that was allocated and written just before, outside of its time, as an embedding is. A source
kept warm in the caches, or one of zeros that was never written, would make a limit that no embedding can reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import torch

from ..engine import MooncakeEngine, TensorBuffer, check, keep_native_log
from ..lab.processes import CALM


class BarePair:
    """A source in one child, registered landing memory in another.

    Args:
        nbytes: the largest write.
    """

    def __init__(self, nbytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epdlab-bare-")
        self._sink = self._child("sink", str(nbytes))
        session, self._warm = read(self._sink).split()
        self._source = self._child("source", session)
        read(self._source)

    def write_ms(self, nbytes: int) -> float:
        """Milliseconds of one write of `nbytes` into warm landing memory."""
        return float(ask(self._source, f"{nbytes} {self._warm}"))

    def first_write_ms(self, nbytes: int) -> tuple[float, float]:
        """Milliseconds to allocate and register fresh landing memory, and of the first write into it."""
        address, setup_ms = ask(self._sink, f"fresh {nbytes}").split()
        write_ms = float(ask(self._source, f"{nbytes} {address}"))
        ask(self._sink, f"free {address}")
        return float(setup_ms), write_ms

    def _child(self, *arguments: str) -> subprocess.Popen[str]:
        """A process as the lab's roles are: calm, and in a session of its own, which the scheduler shares cores by."""
        command = [sys.executable, "-m", "epdlab.bench.bare", self._folder.name, *arguments]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=CALM | os.environ,
            start_new_session=True,
        )

    def __enter__(self) -> BarePair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in (self._source, self._sink):
            assert child.stdin is not None
            child.stdin.close()
            child.wait()
        self._folder.cleanup()


def ask(child: subprocess.Popen[str], line: str) -> str:
    """Tell a child one line; the line it answers."""
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    return read(child)


def read(child: subprocess.Popen[str]) -> str:
    """The next line of a child."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def registered(engine: MooncakeEngine, tensor: torch.Tensor) -> TensorBuffer:
    """A tensor's memory, registered with an engine."""
    buffer = TensorBuffer(tensor)
    check("register", engine.register(buffer.address, buffer.nbytes), "of a bench buffer")
    return buffer


def _sink(nbytes: int) -> None:
    engine = MooncakeEngine()
    warm = registered(engine, torch.zeros(nbytes, dtype=torch.uint8))
    fresh: dict[int, TensorBuffer] = {}
    print(engine.session_id, warm.address, flush=True)
    for line in sys.stdin:
        what, number = line.split()
        if what == "fresh":
            began = time.perf_counter()
            buffer = registered(engine, torch.empty(int(number), dtype=torch.uint8))
            fresh[buffer.address] = buffer
            print(buffer.address, (time.perf_counter() - began) * 1e3, flush=True)
        else:
            check("deregister", engine.deregister(int(number)), "of a bench buffer")
            fresh.pop(int(number)).free()
            print("freed", flush=True)
    engine.close()


def _source(session: str) -> None:
    engine = MooncakeEngine()
    print("ready", flush=True)
    for line in sys.stdin:
        size, target = map(int, line.split())
        buffer = registered(engine, torch.full((size,), size % 251, dtype=torch.uint8))
        began = time.perf_counter()
        code = engine.write_blocking(session, buffer.address, target, size)
        print((time.perf_counter() - began) * 1e3, flush=True)
        check("transfer", code, "of the bench")
        check("deregister", engine.deregister(buffer.address), "of the bench")
    engine.close()


if __name__ == "__main__":
    folder, what, *rest = sys.argv[1:]
    keep_native_log(Path(folder) / f"{what}.engine.log")
    if what == "sink":
        _sink(int(rest[0]))
    else:
        _source(rest[0])
