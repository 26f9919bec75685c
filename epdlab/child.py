"""A child process: started, waited for, frozen, killed and ended by its pid; it ends when its parent ends.

Owns the process and its log file. What the child does, and how one sees that it is ready, is its owner's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from .errors import LabError

POLL_S = 0.01
_EXEC = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "parent, argv = int(sys.argv[1]), sys.argv[2:]\n"
    "sys.exit(1) if os.getppid() != parent else os.execv(argv[0], argv)\n"
)


class Child:
    """A running child. Its stdin is a pipe; stderr, and stdout unless `talks`, go to `log`.

    The kernel sends it SIGTERM when the thread that started it ends, so start it from a thread that lives on.

    Args:
        argv: the program by its full path, and its arguments.
        log: where its output is appended.
        talks: its stdout is a pipe too (`stdout`).
    """

    def __init__(self, argv: Sequence[str], log: Path, talks: bool = False) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _EXEC, str(os.getpid()), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if talks else output,
                stderr=output,
            )
        self._frozen = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    async def until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Poll `ready`; False if the child exits or the time is over first."""
        give_up = time.monotonic() + timeout_s
        while not ready():
            if self.returncode is not None or time.monotonic() > give_up:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def freeze(self) -> None:
        """SIGSTOP: it holds its sockets and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._frozen = False

    async def kill(self) -> None:
        """SIGKILL, and wait for the end. Idempotent."""
        self._process.kill()
        await asyncio.to_thread(self._reap)

    async def end(self, timeout_s: float = 5.0, term: bool = True) -> None:
        """End it: SIGTERM, or without `term` by closing its stdin; SIGKILL after the time. Idempotent."""
        if self._frozen:
            self.thaw()
        if term and self.returncode is None:
            self._process.terminate()
        self._close_stdin()
        try:
            await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        await asyncio.to_thread(self._reap)

    def last_words(self, lines: int = 200) -> list[str]:
        """The last lines of its log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    def _close_stdin(self) -> None:
        try:
            self.stdin.close()
        except BrokenPipeError:
            return

    def _reap(self) -> None:
        self._process.wait()
        self._close_stdin()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"exit {self.returncode}"
        return f"Child({self.pid}, {'frozen' if self._frozen else state})"


async def started_line(child: Child, timeout_s: float) -> bytes:
    """The first line a child prints.

    Raises:
        LabError: it ended, or said nothing in time.
    """
    try:
        line = await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), timeout_s)
    except TimeoutError:
        line = b""
    if line:
        return line
    await child.kill()
    raise LabError(f"a child did not start ({child!r}); its log is {child.log}")
