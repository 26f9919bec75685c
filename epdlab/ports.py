"""The three ports sender and receiver know: an engine, a link, a clock.

Production adapters: `engine.MooncakeEngine`, `link.HttpZmqLink`, `clock.LoopClock`. The explorer brings its own
(epdlab/check). Nothing that touches a socket, a GPU or a wall clock is imported here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Buffer(Protocol):
    """A contiguous range of memory: what is registered, written from and written to."""

    @property
    def address(self) -> int:
        """First byte's address in the owner's memory. Raises BadBuffer once the buffer is freed."""

    @property
    def nbytes(self) -> int: ...

    def synchronize(self) -> None:
        """Wait until the device has finished writing this buffer (a no-op on a CPU)."""

    def digest(self) -> str:
        """A checksum of the bytes as hex, for the trace's byte-equality check."""

    def slice(self, offset: int, nbytes: int) -> Buffer:
        """The bytes [offset, offset+nbytes) as a buffer of their own, without a copy."""

    def free(self) -> None:
        """Let go of the memory. Idempotent."""


class EnginePort(Protocol):
    """Mooncake's Transfer Engine as the hand-off uses it. Every method answers Mooncake's raw code."""

    @property
    def session_id(self) -> str:
        """`host:port` by which a peer reaches this engine."""

    def register(self, address: int, nbytes: int) -> int: ...

    def deregister(self, address: int) -> int: ...

    def register_batch(self, addresses: Sequence[int], lengths: Sequence[int]) -> int: ...

    def deregister_batch(self, addresses: Sequence[int]) -> int: ...

    async def write(
        self, session_id: str, source: int, target: int, nbytes: int, answered: Callable[[], None] | None = None
    ) -> int:
        """One-sided write of [source, source+nbytes) to `target` at `session_id`; 0, or a negative status.

        Args:
            answered: called as soon as the engine has answered, in whichever thread that is.
        """

    async def write_batch(
        self, session_id: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int: ...

    def allocate(self, nbytes: int) -> Buffer:
        """Landing memory where this engine's transport can write (not yet registered)."""

    def close(self) -> None: ...


Handler = Callable[[bytes], Awaitable[bytes]]


class AckSocket(Protocol):
    """Where a rank pulls acks. One frame is one ack."""

    @property
    def port(self) -> int: ...

    async def pull(self) -> bytes: ...

    def close(self) -> None: ...


class AckPusher(Protocol):
    """A connection to where one rank pulls acks."""

    async def push(self, frame: bytes) -> None:
        """Push one frame.

        Raises:
            PeerLost: nobody pulls there.
        """

    def close(self) -> None:
        """Let go; what was pushed still arrives. Idempotent."""


class LinkPort(Protocol):
    """Control messages between the processes. It carries no embedding."""

    async def post(self, url: str, body: bytes) -> bytes:
        """POST `body`; the reply's body.

        Raises:
            HandoffError: the peer answered an error (typed by its kind); PeerLost if it cannot be reached.
        """

    async def serve(self, handlers: dict[str, Handler]) -> str:
        """Answer POSTs by path; returns the base URL."""

    def pusher(self, endpoint: str) -> AckPusher:
        """A connection to `host:port` (ZMQ PUSH); returns at once, and is made while the caller does other work."""

    def acks(self) -> AckSocket:
        """A fresh socket to pull acks from (ZMQ PULL on a port of its own)."""

    async def close(self) -> None: ...


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Deadlines and timers; virtual under the explorer."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def timer(self, name: str, seconds: float, fire: Callable[[], Any], **labels: Any) -> Timer:
        """Call `fire` after `seconds`. The name and labels let a schedule fire it early."""
