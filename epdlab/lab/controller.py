"""The lab's end of the control channel: which steps are held, who waits where, calls to roles.

Runs on the lab's own loop thread; `Lab` is its front for people.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ..control import (
    Call,
    Held,
    Hello,
    Passed,
    Pattern,
    Release,
    Reply,
    SetPatterns,
    pack,
    unpack_from_role,
)
from ..errors import LabError, error_of, one_line
from ..steps import GO, Decision, Point

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One held step: a process waits at a point until it is let go."""

    ticket: int
    point: Point

    def __str__(self) -> str:
        point = self.point
        where = [f"{name} {value}" for name, value in (("part", point.part), ("rank", point.rank)) if value is not None]
        end = " (end)" if point.phase == "end" else ""
        return " ".join([f"{point.process} waits at {point.step}{end}", *([f"[{', '.join(where)}]"] if where else [])])

    __repr__ = __str__


class Controller:
    """ROUTER socket, held steps and pending calls."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.hellos: dict[str, dict[str, Any]] = {}
        self.waiting: list[Waiting] = []
        self.patterns: list[Pattern] = []
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._gone: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Condition()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                process, message = frames[0].decode(), unpack_from_role(b"".join(frames[1:]))
            except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
                log.warning("the lab dropped a control frame that is none: %s", one_line(error))
                continue
            if process not in self._gone:
                await self._take(process, message)

    async def _take(self, process: str, message: Hello | Held | Passed | Reply) -> None:
        if isinstance(message, Reply):
            self._settle(message)
            return
        if isinstance(message, Hello):
            self.hellos[process] = message.data
            await self._send(process, SetPatterns(self.patterns), quietly=True)
        elif isinstance(message, Held):
            await self._held(Waiting(message.ticket, message.point))
        else:
            self.waiting = [w for w in self.waiting if (w.point.process, w.ticket) != (process, message.ticket)]
        await self.notify()

    async def _held(self, waiting: Waiting) -> None:
        """A step waits; one that was held by a pattern forgotten meanwhile goes on at once."""
        if any(pattern.decision is None and pattern.matches(waiting.point) for pattern in self.patterns):
            self.waiting.append(waiting)
        else:
            await self.release(waiting)

    async def notify(self) -> None:
        """Wake whoever waits for a change."""
        async with self._changed:
            self._changed.notify_all()

    def _settle(self, reply: Reply) -> None:
        _, future = self._calls.pop(reply.call, ("", None))
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(error_of(*reply.error, otherwise=LabError))

    async def until(self, ready: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
        """Wait for a condition that changes with messages.

        Raises:
            LabError: not within `timeout_s`; says `otherwise()`.
        """
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(ready), timeout_s)
        except TimeoutError:
            raise LabError(otherwise()) from None

    async def call(self, process: str, op: str, **args: Any) -> Any:
        """Ask a role; its answer, or its error as the same type.

        Raises:
            LabError: the process is gone.
        """
        if process in self._gone:
            raise LabError(f"{process} {self._gone[process]}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = (process, future)
        await self._send(process, Call(number, op, args))
        return await future

    async def shut_down(self, process: str) -> None:
        """Ask a role to end; it does not answer."""
        await self._send(process, Call(0, "shutdown"), quietly=True)

    def lost(self, process: str, why: str) -> None:
        """A role's process ended: its calls fail, its steps wait no more, and what it sent before is too late."""
        self._gone.setdefault(process, why)
        self.waiting = [w for w in self.waiting if w.point.process != process]
        for number, (owner, future) in list(self._calls.items()):
            if owner == process and not future.done():
                del self._calls[number]
                future.set_exception(LabError(f"{process} {why}"))

    async def set_patterns(self, patterns: list[Pattern]) -> None:
        """Hold (or fault) what matches, in every process, from now on."""
        self.patterns = patterns
        for process in self.hellos:
            await self._send(process, SetPatterns(patterns), quietly=True)

    async def release(self, waiting: Waiting, decision: Decision = GO) -> None:
        """Let one held step go."""
        self.waiting = [w for w in self.waiting if w is not waiting]
        await self._send(waiting.point.process, Release(waiting.ticket, decision), quietly=True)

    async def _send(self, process: str, message: msgspec.Struct, quietly: bool = False) -> None:
        try:
            await self._socket.send_multipart([process.encode(), pack(message)])
        except zmq.ZMQError:
            if not quietly:
                raise LabError(f"{process} is not connected; has it ended?") from None

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        self._context.term()

