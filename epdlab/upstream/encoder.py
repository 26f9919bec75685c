"""Our handle on one real encode server: its HTTP routes and the control words of `encoder_proc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from ..errors import LabError
from .child import Child, Json

HTTP_S = 90.0
WAIT_S = 30.0


class Encoder:
    """One encode server of a release in a process of its own."""

    def __init__(self, child: Child, http: aiohttp.ClientSession) -> None:
        self._child = child
        self._http = http
        self.url = f"http://127.0.0.1:{child.ready['port']}"
        self.versions: dict[str, str] = child.ready["versions"]

    @classmethod
    async def start(cls, interpreter: Path, version: str, folder: Path) -> Encoder:
        """Starts the release's encoder and waits until it serves."""
        child = await Child.start(interpreter, "encoder_proc", {"version": version, "folder": str(folder)})
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_S), connector=aiohttp.TCPConnector(limit=0))
        return cls(child, http)

    async def post(self, path: str, body: Json) -> tuple[int, Any]:
        """POSTs JSON; gives the status and the JSON of the reply, None if it has none."""
        async with self._http.post(self.url + path, json=body) as reply:
            try:
                return reply.status, await reply.json(content_type=None)
            except ValueError:
                return reply.status, None

    async def control(self, do: str, **words: Any) -> Json:
        """One control word of `encoder_proc.Control`.

        Raises:
            LabError: the encoder refused it, or what it waits for did not come.
        """
        status, answer = await self.post("/_epdlab", {"do": do, **words})
        if status != 200:
            raise LabError(f"the upstream encoder refused {do!r} with status {status}; play the scenario for another release")
        if answer.get("came") is False:
            raise LabError(f"the upstream encoder did not come to {do!r} in {WAIT_S:g} s; run it alone on a quiet machine")
        return dict(answer)

    async def wait(self, do: str, **words: Any) -> None:
        """One of the `await_*` control words; at most WAIT_S seconds."""
        await self.control(do, seconds=WAIT_S, **words)

    async def end(self) -> None:
        """Ends the server."""
        await self._http.close()
        await self._child.end()
