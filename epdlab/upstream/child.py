"""Child processes inside the upstream environment: started, asked, ended; never left behind.

A child ends when its standard input closes, so it also ends when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from ..errors import LabError

START_S = 600.0
ANSWER_S = 90.0
END_S = 10.0
INSIDE = Path(__file__).with_name("inside.py")

Json = dict[str, Any]


class Child:
    """One module of this folder, running inside the upstream environment and speaking JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, name: str) -> None:
        self._process = process
        self._log = log
        self.name = name
        self.ready: Json = {}

    @classmethod
    async def start(cls, interpreter: Path, module: str, argument: Json) -> Child:
        """Starts `module` and waits for its first line, which `ready` keeps.

        Raises:
            LabError: it ended or said nothing in time; the message names its last line and its log.
        """
        with tempfile.NamedTemporaryFile(prefix=f"epdlab-{module}-", suffix=".log", delete=False) as log:
            process = await asyncio.create_subprocess_exec(
                *(str(interpreter), "-P", "-W", "ignore", str(INSIDE), module, json.dumps(argument)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 24,
            )
        child = cls(process, Path(log.name), module)
        try:
            child.ready = await child._line(START_S)
        except BaseException:
            await child.end()
            raise
        return child

    async def ask(self, **words: Any) -> Json:
        """Sends one JSON line and waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._line(ANSWER_S)

    async def _line(self, seconds: float) -> Json:
        assert self._process.stdout is not None
        while True:
            try:
                line = await asyncio.wait_for(self._process.stdout.readline(), seconds)
            except TimeoutError:
                raise self._failure(f"said nothing for {seconds:g} s") from None
            if not line:
                raise self._failure("ended")
            if line.startswith(b"{"):
                answer: Json = json.loads(line)
                return answer

    def _failure(self, what: str) -> LabError:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        kept = self._log.with_suffix(".failed.log")
        kept.write_text("\n".join(lines))
        return LabError(f"the upstream {self.name} {what}: {lines[-1] if lines else 'no output'}; see {kept}")

    async def end(self) -> None:
        """Closes its standard input, kills it if it does not end, removes its log."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        with contextlib.suppress(FileNotFoundError):
            self._log.unlink()
