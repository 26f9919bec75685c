"""Control messages between real processes: HTTP for /encode and /send, ZMQ PUSH/PULL for acks.

aiohttp and pyzmq are imported here and nowhere else in the hand-off. No embedding passes through this module.
"""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

from .errors import EpdLabError, HandoffError, LabError, MetadataMismatch, PeerLost, error_of, one_line
from .messages import MAX_BODY_BYTES, MAX_FRAME_BYTES, ErrorReply, from_json, to_json
from .ports import Handler

log = logging.getLogger(__name__)

PUSH_TIMEOUT_MS = 5_000
HTTP_TIMEOUT_S = 1_800.0
SHUTDOWN_S = 0.1
CUT_OFF_BYTES = 16 * MAX_FRAME_BYTES


class ZmqAcks:
    """A PULL socket on a port of its own. A frame over the limit is refused; far over it, its sender is cut off."""

    def __init__(self, context: zmq.asyncio.Context, host: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, CUT_OFF_BYTES)
        try:
            self.port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise LabError(f"cannot take acks at {host} ({error}); choose an address of this machine: --host") from None

    async def pull(self) -> bytes:
        """One frame; a multipart message is no ack and is read as its parts joined."""
        return b"".join(await self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(linger=0)


class ZmqPusher:
    """A PUSH socket that connects from the moment it is made. It takes a frame only once somebody pulls."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, PUSH_TIMEOUT_MS)
        try:
            self._socket.connect(f"tcp://{endpoint}")
        except zmq.ZMQError as error:
            self.close()
            raise self._lost(error) from None

    async def push(self, frame: bytes) -> None:
        """Push one frame.

        Raises:
            PeerLost: nobody pulls there within 5 s.
        """
        try:
            await self._socket.send(frame)
        except zmq.ZMQError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        self._socket.close(linger=PUSH_TIMEOUT_MS)

    def _lost(self, error: zmq.ZMQError) -> PeerLost:
        return PeerLost(f"no rank pulls acks at {self.endpoint} ({error}); did it close its request?")


class HttpZmqLink:
    """The link port for production.

    Args:
        host: the address this process binds and is reached by.
        port: HTTP port, 0 for a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.port = host, port
        self._zmq = zmq.asyncio.Context()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def post(self, url: str, body: bytes) -> bytes:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.post(url, data=body) as reply:
                answer = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerLost(f"{url} does not answer ({type(error).__name__}); is the encoder running?") from None
        if reply.status != 200:
            raise _error_of(answer, reply.status)
        return answer

    async def serve(self, handlers: dict[str, Handler]) -> str:
        """Answer POSTs (and GET for /health).

        Raises:
            LabError: the port is taken.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for path, handler in handlers.items():
            app.router.add_route("*" if path == "/health" else "POST", path, _endpoint(handler))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self.host}:{self.port}"
            raise LabError(f"cannot listen on {where} ({error.strerror}); choose another --port or --host") from None
        self.port = int(self._runner.addresses[0][1])
        return f"http://{self.host}:{self.port}"

    def pusher(self, endpoint: str) -> ZmqPusher:
        return ZmqPusher(self._zmq, endpoint)

    def acks(self) -> ZmqAcks:
        return ZmqAcks(self._zmq, self.host)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._zmq.destroy(linger=0)


def _endpoint(handler: Handler) -> Any:
    async def answer(request: web.Request) -> web.Response:
        try:
            body = await handler(await request.read())
            return web.Response(body=body, content_type="application/json")
        except EpdLabError as error:
            return _failure(error.kind, str(error), error.http_status)
        except web.HTTPRequestEntityTooLarge:
            text = f"a body of over {MAX_BODY_BYTES} bytes; send items by reference"
            return _failure(MetadataMismatch.kind, text, web.HTTPRequestEntityTooLarge.status_code)
        except Exception as error:
            log.exception("handler of %s failed", request.path)
            return _failure("error", one_line(error), 500)

    return answer


def _failure(kind: str, message: str, status: int) -> web.Response:
    return web.Response(body=to_json(ErrorReply(kind=kind, message=message)), status=status)


def _error_of(body: bytes, status: int) -> EpdLabError:
    """The peer's error, as the same type it was raised with there."""
    try:
        reply = from_json(body, ErrorReply)
    except EpdLabError:
        return HandoffError(f"the peer answered HTTP {status}; is it an epdlab encoder?")
    return error_of(reply.kind, reply.message)
