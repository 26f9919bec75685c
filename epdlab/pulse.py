"""Whether a process is at rest: messages it has sent and taken in, and threads that work for it.

A lab that adds these up over its processes knows that nothing moves any more (lab/rest.py): each message sent has
been taken in, and no thread works. Nothing here touches a message's content or decides anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from .ports import AckPusher, AckSocket, Handler, LinkPort

P = ParamSpec("P")
T = TypeVar("T")
LOOP_TURNS = 40


class CountedLink:
    """A link that counts messages: requests, replies and acks.

    Attributes:
        sent, taken: messages that left this process, and that arrived; one that cannot arrive counts as taken here.
    """

    def __init__(self, link: LinkPort) -> None:
        self.link = link
        self.sent = self.taken = 0

    async def post(self, url: str, body: bytes) -> bytes:
        self.sent += 1
        try:
            return await self.link.post(url, body)
        finally:
            self.taken += 1

    async def serve(self, handlers: dict[str, Handler]) -> str:
        return await self.link.serve({path: self._counted(handler) for path, handler in handlers.items()})

    def _counted(self, handler: Handler) -> Handler:
        async def answer(body: bytes) -> bytes:
            self.taken += 1
            try:
                return await handler(body)
            finally:
                self.sent += 1

        return answer

    def pusher(self, endpoint: str) -> AckPusher:
        return _CountedPusher(self, self.link.pusher(endpoint))

    def acks(self) -> AckSocket:
        return _CountedAcks(self, self.link.acks())

    async def close(self) -> None:
        await self.link.close()


class _CountedAcks:
    def __init__(self, counts: CountedLink, acks: AckSocket) -> None:
        self._counts, self._acks, self.port = counts, acks, acks.port

    async def pull(self) -> bytes:
        frame = await self._acks.pull()
        self._counts.taken += 1
        return frame

    def close(self) -> None:
        self._acks.close()


class _CountedPusher:
    def __init__(self, counts: CountedLink, pusher: AckPusher) -> None:
        self._counts, self._pusher = counts, pusher

    async def push(self, frame: bytes) -> None:
        self._counts.sent += 1
        try:
            await self._pusher.push(frame)
        except BaseException:
            self._counts.taken += 1
            raise

    def close(self) -> None:
        self._pusher.close()


class CountedThreads(ThreadPoolExecutor):
    """A loop's default threads. `busy`: how many calls they have not finished."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="epdlab")
        self._open: set[Future[Any]] = set()

    @property
    def busy(self) -> int:
        return len(self._open)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(work, *args, **kwargs)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future


async def pulse(link: CountedLink, threads: CountedThreads) -> dict[str, int]:
    """The counts, after the loop has turned often enough for whatever was ready to have run."""
    for _ in range(LOOP_TURNS):
        await asyncio.sleep(0)
    return {"sent": link.sent, "taken": link.taken, "busy": threads.busy}
