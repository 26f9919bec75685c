"""The ports of a machine: an engine, a link and a clock that report, and a vision tower with known embeddings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ..encode_server import Prepared
from ..errors import EpdLabError, PeerLost, StateError, error_of, one_line
from ..modality import Modality
from ..ports import Buffer, Handler
from .model_engine import ModelBuffer, ModelEngine, ModelMemory
from .outcome import Message, Setting

if TYPE_CHECKING:
    from .machine import Machine

TOKENS, DIM, ELEMENT_SIZE = 1, 4, 4
PART_BYTES = TOKENS * DIM * ELEMENT_SIZE
MEMORY_BYTES = 512


class ModelTower:
    """A vision tower whose embeddings are a pattern of their item's number."""

    def __init__(self, memory: ModelMemory) -> None:
        self._memory = memory

    async def prepare(self, items: Sequence[str], modality: Modality) -> Prepared:
        return Prepared(modality, [TOKENS], DIM, "float32", ELEMENT_SIZE, [(1, TOKENS, 1)], int(items[0]))

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        return [self._embedding(prepared.payload) for prepared in batch]

    def _embedding(self, number: int) -> Buffer:
        buffer = self._memory.take(PART_BYTES)
        assert isinstance(buffer, ModelBuffer)
        buffer.fill(bytes((17 * number + 7 * i + 1) % 251 for i in range(PART_BYTES)))
        return buffer

    def subset(self, prepared: Prepared, indices: Sequence[int]) -> Prepared:
        return prepared

    def fingerprint(self) -> str:
        return "model"


class MachineEngine(ModelEngine):
    """A model engine that reports its regions, and whose writes end when the world says so."""

    def __init__(self, machine: Machine, memory: ModelMemory) -> None:
        super().__init__(machine.process, memory, touch=machine.ledger.touch)
        self._machine = machine

    def register(self, address: int, nbytes: int) -> int:
        code = super().register(address, nbytes)
        if code == 0:
            self._machine.out.regions.append((address, nbytes))
        return code

    def deregister(self, address: int) -> int:
        code = super().deregister(address)
        if code == 0:
            self._machine.out.regions.append((address, 0))
        return code

    async def write(
        self, session_id: str, source: int, target: int, nbytes: int, answered: Callable[[], None] | None = None
    ) -> int:
        return await self._machine.hold_write(session_id, source, target, nbytes)


class MachineClock:
    """Reports timers. `pending`: what each does when it fires. `reqs`: which request each is about."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._count = 0
        self.pending: dict[int, Callable[[], Any]] = {}
        self.reqs: dict[int, str | None] = {}

    def now(self) -> float:
        return 0.0

    def timer(self, name: str, seconds: float, fire: Callable[[], Any], **labels: Any) -> MachineTimer:
        number, self._count = self._count, self._count + 1
        self.pending[number], self.reqs[number] = fire, labels.get("req")
        self._machine.out.timers.append(Setting(number, name, seconds, tuple(labels.items())))
        return MachineTimer(self, number)

    def cancel(self, number: int) -> None:
        if self.pending.pop(number, None) is not None:
            self._machine.out.cancelled.append(number)


class MachineTimer:
    """A pending call (see `ports.Timer`)."""

    def __init__(self, clock: MachineClock, number: int) -> None:
        self._clock, self._number = clock, number

    def cancel(self) -> None:
        self._clock.cancel(self._number)


class MachineLink:
    """Reports posts, answers, pushes and sockets; the lowest free port of its range is taken first.

    So a late ack can reach another request of the same rank, as on a machine whose ports are reused.
    """

    def __init__(self, machine: Machine, first_port: int) -> None:
        self._machine, self._first_port = machine, first_port
        self.loop = machine.loop
        self._count = 0
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.handlers: dict[str, Handler] = {}
        self.sockets: dict[int, MachineAcks] = {}

    async def post(self, url: str, body: bytes) -> bytes:
        try:
            payload = await self._sent("post", url, body)
        except asyncio.CancelledError:
            self._machine.ledger.touch(("inbox", self._machine.process), "w")
            raise
        self.loop.heard(self.loop.now_bit)
        if isinstance(payload, bytes):
            return payload
        raise error_of(*payload)

    async def answer(self, path: str, body: bytes, post: object) -> None:
        """Serve one request and report the answer."""
        payload: bytes | tuple[str, str]
        try:
            payload = await self.handlers[path](body)
        except EpdLabError as error:
            payload = (error.kind, str(error))
        except Exception as error:
            payload = ("error", one_line(error))
        self._report("answer", post, "", payload)

    def pusher(self, endpoint: str) -> MachinePusher:
        return MachinePusher(self, endpoint)

    async def push(self, endpoint: str, frame: bytes) -> None:
        if not await self._sent("push", endpoint, frame):
            raise PeerLost(f"no rank pulls acks at {endpoint}; did it close its request?")

    async def _sent(self, kind: str, where: str, payload: bytes) -> Any:
        number, self._count = self._count, self._count + 1
        self.waiting[number] = self.loop.create_future()
        self._report(kind, number, where, payload)
        try:
            return await self.waiting[number]
        finally:
            del self.waiting[number]

    def _report(self, kind: str, number: Any, where: str, payload: Any) -> None:
        self._machine.out.messages.append(Message(kind, self.loop.cause(), number, where, payload))

    async def serve(self, handlers: dict[str, Handler]) -> str:
        self.handlers = handlers
        return f"http://{self._machine.process}"

    def acks(self) -> MachineAcks:
        port = self._first_port
        while port in self.sockets:
            port += 1
        self.sockets[port] = MachineAcks(self, port)
        self._opened("open", port)
        return self.sockets[port]

    def closed(self, port: int) -> None:
        del self.sockets[port]
        self._opened("close", port)

    def _opened(self, kind: str, port: int) -> None:
        self._machine.ledger.touch(("port", port), "w")
        self._report(kind, port, "", None)

    async def close(self) -> None:
        """Nothing is open here that a request does not close itself."""


class MachinePusher:
    """A connection to where one rank pulls acks (see `ports.AckPusher`)."""

    def __init__(self, link: MachineLink, endpoint: str) -> None:
        self._link, self._endpoint = link, endpoint

    async def push(self, frame: bytes) -> None:
        await self._link.push(self._endpoint, frame)

    def close(self) -> None:
        """Nothing is open here."""


class MachineAcks:
    """A PULL socket in memory."""

    def __init__(self, link: MachineLink, port: int) -> None:
        self._link, self._loop, self.port = link, link.loop, port
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, frame: bytes) -> None:
        self._frames.append((self._loop.now_bit, frame))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pull(self) -> bytes:
        while not self._frames:
            self._waiter = self._loop.create_future()
            await self._waiter
        cause, frame = self._frames.popleft()
        self._loop.heard(cause)
        return frame

    def close(self) -> None:
        if self._link.sockets.get(self.port) is self:
            self._link.closed(self.port)


def at_once(work: Coroutine[Any, Any, object]) -> None:
    """Run work that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise StateError("a machine's set-up must not wait")
