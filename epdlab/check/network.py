"""In-memory links: posts, replies and acks between the processes of a world, without sockets.

Each process has a port range of its own and takes the lowest free port, so that a late ack can reach another request
of the same rank, as it can on a machine whose ports are reused. No embedding passes through this module.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ..errors import EpdLabError, PeerLost, one_line
from ..ports import Handler
from .loop import VirtualLoop
from .model_engine import Touch

PORTS_PER_PROCESS = 1000

Answer = tuple[int, bytes | Exception]


class Network:
    """Everything that is connected: HTTP servers by URL, ack sockets by port."""

    def __init__(self, loop: VirtualLoop, touch: Touch) -> None:
        self.loop, self.touch = loop, touch
        self.servers: dict[str, tuple[str, dict[str, Handler]]] = {}
        self.sockets: dict[int, ModelAcks] = {}
        self._replies: dict[asyncio.Future[Answer], tuple[str, str]] = {}

    def kill(self, process: str) -> None:
        """A process is gone: who waits for its replies learns it."""
        self.servers = {url: server for url, server in self.servers.items() if server[0] != process}
        for reply, (client, server) in list(self._replies.items()):
            if server == process:
                self._settle(reply, client, PeerLost(f"{process} is gone; is the encoder running?"))

    async def post(self, client: str, url: str, body: bytes) -> bytes:
        base, slash, path = url.rpartition("/")
        server = self.servers.get(base)
        if server is None:
            raise PeerLost(f"{url} does not answer; is the encoder running?")
        reply = self.loop.create_future()
        self._replies[reply] = (client, server[0])
        self.loop.create_task(self._answer(reply, client, server[1][slash + path], body))
        try:
            cause, answer = await reply
        except asyncio.CancelledError:
            self.touch(("inbox", client), "w")
            raise
        self.loop.heard(cause)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _answer(self, reply: asyncio.Future[Answer], client: str, handler: Handler, body: bytes) -> None:
        try:
            answer: bytes | Exception = await handler(body)
        except EpdLabError as error:
            answer = type(error)(str(error))
        except Exception as error:
            answer = EpdLabError(one_line(error))
        self._settle(reply, client, answer)

    def _settle(self, reply: asyncio.Future[Answer], client: str, answer: bytes | Exception) -> None:
        self.touch(("inbox", client), "c")
        del self._replies[reply]
        if not reply.done():
            reply.set_result((self.loop.cause(), answer))


class ModelAcks:
    """A PULL socket in memory."""

    def __init__(self, network: Network, port: int) -> None:
        self._network, self.port = network, port
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        network.sockets[port] = self
        network.touch(("port", port), "w")

    def deliver(self, frame: bytes) -> None:
        self._frames.append((self._network.loop.cause(), frame))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pull(self) -> bytes:
        while not self._frames:
            self._waiter = self._network.loop.create_future()
            await self._waiter
        cause, frame = self._frames.popleft()
        self._network.loop.heard(cause)
        return frame

    def close(self) -> None:
        self._network.touch(("port", self.port), "w")
        self._network.sockets.pop(self.port, None)


class ModelLink:
    """The link port of one process.

    Args:
        number: which port range is its own.
    """

    def __init__(self, network: Network, process: str, number: int) -> None:
        self._network, self.process = network, process
        self._base = PORTS_PER_PROCESS * (number + 1)

    async def post(self, url: str, body: bytes) -> bytes:
        return await self._network.post(self.process, url, body)

    async def serve(self, handlers: dict[str, Handler]) -> str:
        url = f"http://{self.process}"
        self._network.servers[url] = (self.process, handlers)
        return url

    async def push(self, endpoint: str, frame: bytes) -> None:
        port = int(endpoint.rpartition(":")[2])
        self._network.touch(("port", port), "w")
        socket = self._network.sockets.get(port)
        if socket is None:
            raise PeerLost(f"no rank pulls acks at {endpoint}; did it close its request?")
        socket.deliver(frame)

    def acks(self) -> ModelAcks:
        taken = self._network.sockets
        return ModelAcks(self._network, next(p for p in range(self._base, self._base + 1000) if p not in taken))

    def open_sockets(self) -> int:
        return sum(self._base <= port < self._base + PORTS_PER_PROCESS for port in self._network.sockets)

    async def close(self) -> None:
        """Nothing is open here that a request does not close itself."""


