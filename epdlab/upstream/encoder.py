"""Our handle on one real encode server: its HTTP routes and the control words of `encoder_proc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from ..errors import LabError
from .child import Child, Json, Nursery

HTTP_S = 90.0
WAIT_S = 30.0


class Encoder:
    """One encode server of a release in a process of its own."""

    def __init__(self, child: Child, http: aiohttp.ClientSession) -> None:
        self._child = child
        self._http = http
        self.url = f"http://127.0.0.1:{child.ready['port']}"

    @classmethod
    async def start(cls, nursery: Nursery, version: str, folder: Path) -> Encoder:
        """Starts the release's encoder and waits until it serves."""
        child = await nursery.spawn("encoder_proc", {"version": version, "folder": str(folder)})
        timeout = aiohttp.ClientTimeout(total=HTTP_S)
        return cls(child, aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)))

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
            raise LabError(f"the upstream encoder refused {do!r} with status {status}; play another release")
        if answer.get("came") is False:
            raise LabError(f"{do!r} did not come in {WAIT_S:g} s; run it again on a quiet machine")
        return dict(answer)

    async def wait(self, do: str, **words: Any) -> None:
        """One of the `await_*` control words; at most WAIT_S seconds."""
        await self.control(do, seconds=WAIT_S, **words)

    async def end(self) -> None:
        """Ends the server."""
        await self._http.close()
        await self._child.end()
