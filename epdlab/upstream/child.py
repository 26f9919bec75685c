"""Processes inside the upstream environment: a nursery for each release and the children it forks; none stays behind.

All of them end when their connection closes, so they also end when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from ..errors import LabError

START_S = 600.0
ANSWER_S = 90.0
END_S = 10.0
LINE_BYTES = 1 << 24
INSIDE = Path(__file__).with_name("inside.py")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Json = dict[str, Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _line(reader: asyncio.StreamReader, seconds: float, name: str, log: Path) -> Json:
    """The next JSON line; anything else that is printed is passed over."""
    while True:
        try:
            line = await asyncio.wait_for(reader.readline(), seconds)
        except TimeoutError:
            raise _failure(name, f"said nothing for {seconds:g} s", log) from None
        if not line:
            raise _failure(name, "ended", log)
        if line.startswith(b"{"):
            answer: Json = json.loads(line)
            return answer


def _failure(name: str, what: str, log: Path) -> LabError:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1] if lines else "no output"
    return LabError(f"the upstream {name} {what} ({last}); run it again on a quiet machine")


class Child:
    """One forked process that speaks JSON lines; `ready` is its first one."""

    def __init__(self, name: str, pid: int, streams: Streams, log: Path) -> None:
        self.ready: Json = {}
        self._name, self._pid, self._log = name, pid, log
        self._reader, self._writer = streams

    async def ask(self, **words: Any) -> Json:
        """Sends one JSON line and waits for the answer.

        Raises:
            LabError: the process ended or did not answer; the message has the last line of its log.
        """
        self._writer.write(json.dumps(words).encode() + b"\n")
        await self._writer.drain()
        return await self.hear(ANSWER_S)

    async def hear(self, seconds: float) -> Json:
        """The next JSON line of the process."""
        return await _line(self._reader, seconds, self._name, self._log)

    async def end(self) -> None:
        """Closes the connection, at which the process ends; kills it if it does not."""
        with contextlib.suppress(ConnectionError):
            self._writer.write_eof()
        try:
            await asyncio.wait_for(self._reader.read(), END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        except ConnectionError:
            pass
        self._writer.close()


class Nursery:
    """The process that has imported one release and forks children."""

    def __init__(self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._folder = folder
        self._born = 0
        self._ordering = asyncio.Lock()
        self.versions: dict[str, str] = {}

    @classmethod
    async def start(cls, interpreter: Path, version: str, release: Path) -> Nursery:
        """Starts it and waits until the release is imported.

        Raises:
            LabError: the release did not import; the message has the last line of its log.
        """
        folder = tempfile.TemporaryDirectory(prefix="epdlab-upstream-")
        log = Path(folder.name) / "nursery.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(str(interpreter), "-P", "-W", "ignore", str(INSIDE), "nursery"),
                json.dumps({"version": version, "folder": str(release)}),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=os.environ | ONE_THREAD,
            )
        nursery = cls(process, folder)
        try:
            nursery.versions = await nursery._hear()
        except BaseException:
            await nursery.end()
            raise
        return nursery

    async def _hear(self) -> Json:
        assert self._process.stdout is not None
        return await _line(self._process.stdout, START_S, "nursery", Path(self._folder.name) / "nursery.log")

    async def _order(self, order: Json) -> int:
        """Asks for a fork; gives its process id."""
        assert self._process.stdin is not None
        async with self._ordering:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            return int((await self._hear())["pid"])

    async def spawn(self, module: str, argument: Json) -> Child:
        """Forks `module` of this folder and waits for its first line.

        Raises:
            LabError: it did not come up; the message has the last line of its log.
        """
        self._born += 1
        path = Path(self._folder.name) / f"{self._born}.socket"
        log = path.with_suffix(".log")
        connected: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(accept, path, limit=LINE_BYTES)
        order = {"module": module, "argument": argument, "socket": str(path), "log": str(log)}
        pid = await self._order(order)
        child = Child(module, pid, await asyncio.wait_for(connected, START_S), log)
        server.close()
        try:
            child.ready = await child.hear(START_S)
        except BaseException:
            await child.end()
            raise
        return child

    async def end(self) -> None:
        """Closes its standard input, kills it if it does not end, removes its sockets and logs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._folder.cleanup()
