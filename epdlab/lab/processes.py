"""Role processes: started, signalled and ended by their id, never left behind.

Owns `Process` (its log, its end) and the one nursery of this Python process that forks them. What a process does is
its role's business.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from ..errors import LabError

END_GRACE_S = 5.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CALM = {"GOMP_SPINCOUNT": "10000"}
"""An OpenMP thread spins for 8 ms after its last work, and keeps a core from the hand-off that follows a forward; with
this, for a third of a millisecond."""
GONE = "the lab's nursery ended; see its error above, and run `python -m epdlab doctor`"


class Nursery:
    """The parent's end of `nursery.py`: forks roles and hears of their ends."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "epdlab.lab.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=CALM | os.environ | {"PYTHONPATH": _package_root(), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._starts: list[Future[int]] = []
        self._ends: dict[int, Future[int]] = {}
        self._gone = False
        self._listener = threading.Thread(target=self._listen, name="epdlab-nursery", daemon=True)
        self._listener.start()

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def start(self, argv: list[str], log: Path) -> tuple[int, Future[int]]:
        """Fork a role; its pid, and a future of its exit code (negative: the signal)."""
        started: Future[int] = Future()
        with self._lock:
            if self._gone:
                raise LabError(GONE)
            self._starts.append(started)
            self._write({"argv": argv, "log": str(log)})
        pid = started.result()
        return pid, self._ends[pid]

    def close(self) -> None:
        """Close its stdin: it ends, or is killed after a while, and every child still there with it."""
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._child.stdin).close()
        try:
            self._child.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._listener.join()
        _pipe(self._child.stdout).close()

    def _write(self, order: dict[str, object]) -> None:
        pipe = _pipe(self._child.stdin)
        try:
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise LabError(GONE) from None

    def _listen(self) -> None:
        """Hear of starts and ends; when the nursery ends, the kernel has killed every child of it."""
        for line in _pipe(self._child.stdout):
            message = json.loads(line)
            if "code" in message:
                self._ends.pop(message["pid"]).set_result(message["code"])
            else:
                self._ends[message["pid"]] = Future()
                self._starts.pop(0).set_result(message["pid"])
        with self._lock:
            self._gone = True
        for started in self._starts:
            started.set_exception(LabError(GONE))
        for ended in self._ends.values():
            ended.set_result(-signal.SIGKILL)


def ignore_interrupts() -> None:
    """At Python's exit: from now on no signal keeps it from ending the processes."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


def _close_at_exit(nursery: Nursery) -> None:
    ignore_interrupts()
    nursery.close()


_nursery: Nursery | None = None
_nursery_lock = threading.Lock()


def nursery() -> Nursery:
    """This process's nursery, started on first use."""
    global _nursery
    with _nursery_lock:
        if _nursery is None or not _nursery.running:
            _nursery = Nursery()
            atexit.register(_close_at_exit, _nursery)
        return _nursery


class Process:
    """One role process with its log file.

    Args:
        name: `enc0`, `rank1`; also the log's name.
        argv: what follows `python -m epdlab`.
    """

    def __init__(self, name: str, argv: list[str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.pid, self._end = nursery().start(argv, self.log)

    @property
    def running(self) -> bool:
        return not self._end.done()

    def ended(self, timeout_s: float | None = None) -> int:
        """Wait for the end; the exit code (negative: the signal). TimeoutError if it runs on."""
        return self._end.result(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP, SIGCONT or SIGKILL. Nothing if it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def over(self) -> int:
        """`ended` without a thread: one that waits there would keep Python from its exit."""
        return await asyncio.shield(asyncio.wrap_future(self._end))

    async def end(self) -> None:
        """Wait a little for an orderly end, then kill."""
        try:
            await asyncio.wait_for(self.over(), END_GRACE_S)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.over()

    def why(self) -> str:
        """How it ended, with its last error line, for an error message."""
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("epdlab: ")] or lines[-1:]
        last = f": {errors[-1].removeprefix('epdlab: ')}" if errors else ""
        how = _ending(self._end.result(0)) if self._end.done() else "has not ended"
        return f"{how}{last} (log: {self.log})"


def _ending(code: int) -> str:
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _package_root() -> str:
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return f"{root}{os.pathsep}{inherited}" if inherited else root
