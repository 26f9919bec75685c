"""The control channel between a role process and the lab that runs it: calls, replies, held steps.

A role's side is `ControlClient`, which is also its `Gate`. The lab's side is `lab/controller.py`. No protocol action
of the hand-off passes through here; without a lab a role has no control channel and no gate.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .errors import EpdLabError, UsageError, one_line
from .steps import GO, Decision, Phase, Point


class Pattern(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which points are meant. None matches anything.

    Attributes:
        step: a step's name, or `*`.
        decision: None holds the point; else the point goes on with this decision.
        times: how many points this pattern serves before it is used up; None for ever.
    """

    step: str
    phase: Phase | None = "begin"
    process: str | None = None
    rank: int | None = None
    req: str | None = None
    part: int | None = None
    decision: Decision | None = None
    times: int | None = None

    def matches(self, point: Point) -> bool:
        return (
            self.step in ("*", point.step)
            and self.phase in (None, point.phase)
            and self.process in (None, point.process)
            and self.rank in (None, point.rank)
            and self.req in (None, point.req)
            and self.part in (None, point.part)
        )


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A role is ready. `data`: role, pid, url, session."""

    process: str
    data: dict[str, Any]


class Held(msgspec.Struct, frozen=True, tag="held"):
    """A step waits at the gate."""

    ticket: int
    point: Point


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """A held step is not waiting any more: let go, or its task was cancelled."""

    ticket: int


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a call: a value, or an error as (kind, message)."""

    call: int
    value: Any = None
    error: tuple[str, str] | None = None


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Ask a role to do something."""

    call: int
    op: str
    args: dict[str, Any] = {}


class SetPatterns(msgspec.Struct, frozen=True, tag="patterns"):
    """Replace the role's patterns."""

    patterns: list[Pattern]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Let one held step go."""

    ticket: int
    decision: Decision = GO


FromRole = Hello | Held | Passed | Reply
ToRole = Call | SetPatterns | Release
Operation = Callable[..., Awaitable[Any]]

_encode = msgspec.msgpack.Encoder().encode
_decode_to_role: msgspec.msgpack.Decoder[ToRole] = msgspec.msgpack.Decoder(ToRole)
_decode_from_role: msgspec.msgpack.Decoder[FromRole] = msgspec.msgpack.Decoder(FromRole)


def pack(message: msgspec.Struct) -> bytes:
    """One frame."""
    return _encode(message)


def unpack_from_role(frame: bytes) -> FromRole:
    """What a role said. Raises msgspec.DecodeError for anything else."""
    return _decode_from_role.decode(frame)


class ControlClient:
    """A role's end of the channel, and its gate.

    Args:
        address: the lab's endpoint, `tcp://host:port`.
        process: this process's name, `enc0`.
    """

    def __init__(self, address: str, process: str) -> None:
        self.process = process
        self.operations: dict[str, Operation] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, process.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._patterns: list[Pattern] = []
        self._left: list[int | None] = []
        self._held: dict[int, asyncio.Future[Decision]] = {}
        self._tickets = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def enter(self, point: Point) -> Decision:
        """The gate: go on at once unless a pattern matches; then as it says, or when the lab lets go."""
        for index, pattern in enumerate(self._patterns):
            if self._left[index] != 0 and pattern.matches(point):
                left = self._left[index]
                self._left[index] = None if left is None else left - 1
                return await self._hold(point) if pattern.decision is None else pattern.decision
        return GO

    async def _hold(self, point: Point) -> Decision:
        self._tickets += 1
        ticket = self._tickets
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._held[ticket] = future
        try:
            await self._socket.send(pack(Held(ticket, point)))
            return await future
        finally:
            del self._held[ticket]
            self._socket.send(pack(Passed(ticket)))

    async def serve(self, hello: dict[str, Any]) -> None:
        """Say hello, then answer the lab until it says `shutdown`."""
        await self._socket.send(pack(Hello(self.process, hello)))
        while True:
            message = _decode_to_role.decode(await self._socket.recv())
            if isinstance(message, Call):
                if message.op == "shutdown":
                    return
                self._spawn(self._answer(message))
            elif isinstance(message, SetPatterns):
                self._replace(message.patterns)
            elif message.ticket in self._held and not self._held[message.ticket].done():
                self._held[message.ticket].set_result(message.decision)

    def _replace(self, patterns: list[Pattern]) -> None:
        """Take new patterns; one that was there before and is partly used up stays so."""
        before = list(zip(self._patterns, self._left, strict=True))
        self._patterns, self._left = patterns, []
        for pattern in patterns:
            used = next((old for old in before if old[0] == pattern), (pattern, pattern.times))
            self._left.append(used[1])
            before = [old for old in before if old is not used]

    async def _answer(self, call: Call) -> None:
        try:
            reply = Reply(call.call, await self._operation(call.op)(**call.args))
        except asyncio.CancelledError:
            reply = Reply(call.call, error=("cancelled", "the call was cancelled"))
        except Exception as error:
            kind = error.kind if isinstance(error, EpdLabError) else type(error).__name__
            reply = Reply(call.call, error=(kind, str(error) if isinstance(error, EpdLabError) else one_line(error)))
        await self._socket.send(pack(reply))

    def _operation(self, name: str) -> Operation:
        if name not in self.operations:
            raise UsageError(f"{self.process} has no operation {name!r}; it has {', '.join(sorted(self.operations))}")
        return self.operations[name]

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def let_go(self) -> None:
        """The role ends: hold nothing any more, and cancel what is held."""
        self._patterns, self._left = [], []
        for future in self._held.values():
            if not future.done():
                future.cancel()

    def close(self) -> None:
        self.let_go()
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._context.term()


def end_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that comes about (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
