"""Landing memory: where a rank lets encoders write.

Two strategies behind one interface: a buffer allocated and registered per request (what SGLang did first), or a
pool registered once (after SGLang 0.5.17 encode_receiver.py, `MooncakeEmbeddingPool`), here with FIFO fairness.
No message and no deadline passes through this module; a waiter is cancelled by its owner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum
from typing import Any, Protocol

from .errors import BadBuffer, LandingFull, StateError
from .ports import Buffer, EnginePort
from .regions import MemoryRegion, RegionTable
from .steps import Steps

ALIGNMENT = 256
MAX_WAITERS = 64
POOL = "pool"


class SlotState(Enum):
    """Lifecycle of a landing slot."""

    HELD = "held"
    QUARANTINED = "quarantined"
    FREE = "free"


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.HELD: frozenset({SlotState.QUARANTINED, SlotState.FREE}),
    SlotState.QUARANTINED: frozenset({SlotState.FREE}),
    SlotState.FREE: frozenset(),
}


class LandingSlot:
    """Landing memory of one request: HELD, maybe QUARANTINED, then FREE."""

    def __init__(self, name: str, owner: str, buffer: Buffer, region: MemoryRegion) -> None:
        self.name, self.owner, self.buffer, self.region = name, owner, buffer, region
        self.address, self.nbytes = buffer.address, buffer.nbytes
        self.state = SlotState.HELD

    def labels(self) -> dict[str, Any]:
        return {"region": self.name, "address": self.address, "bytes": self.nbytes}

    def _transition(self, to: SlotState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"{self.name} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def __repr__(self) -> str:
        return f"LandingSlot({self.name}, {self.nbytes} bytes, {self.state.value}, {self.owner})"


class Landing(Protocol):
    """Where slots come from."""

    @property
    def regions(self) -> RegionTable: ...

    @property
    def slots(self) -> list[LandingSlot]:
        """Slots that are not FREE."""

    async def allocate(self, nbytes: int, owner: str, **labels: Any) -> LandingSlot: ...

    async def free(self, slot: LandingSlot, **labels: Any) -> None: ...

    async def quarantine(self, slot: LandingSlot, **labels: Any) -> None: ...

    async def close(self) -> None: ...


class _Slots:
    """The book of slots that both strategies keep."""

    def __init__(self, engine: EnginePort, regions: RegionTable, steps: Steps, must_succeed: bool) -> None:
        self._engine, self.regions, self._steps, self._must_succeed = engine, regions, steps, must_succeed
        self._open: dict[str, LandingSlot] = {}
        self._count = 0

    @property
    def slots(self) -> list[LandingSlot]:
        return list(self._open.values())

    def _name(self) -> str:
        self._count += 1
        return f"{self._steps.process}.slot#{self._count}"

    def _new(self, name: str, owner: str, buffer: Buffer, region: MemoryRegion) -> LandingSlot:
        slot = LandingSlot(name, owner, buffer, region)
        self._open[slot.name] = slot
        return slot

    def _close(self, slot: LandingSlot) -> None:
        slot._transition(SlotState.FREE)
        del self._open[slot.name]

    async def quarantine(self, slot: LandingSlot, **labels: Any) -> None:
        """Set a slot aside: HELD to QUARANTINED. The memory stays registered and is not reused."""
        await self._steps.do(
            "landing.quarantine", lambda: slot._transition(SlotState.QUARANTINED), **slot.labels(), **labels
        )


class PerRequestLanding(_Slots):
    """One buffer and one registration per request."""

    async def allocate(self, nbytes: int, owner: str, **labels: Any) -> LandingSlot:
        name, buffer = await self._steps.do(
            "landing.alloc",
            lambda: (self._name(), self._engine.allocate(nbytes)),
            lambda made: {"address": made[1].address, "region": made[0]},
            bytes=nbytes,
            **labels,
        )
        memory: dict[str, Any] = {"region": name, "address": buffer.address, "bytes": nbytes}
        try:
            region = await self.regions.register(buffer, owner, must_succeed=self._must_succeed, **labels)
        except BaseException:
            await self._steps.do("landing.free", buffer.free, **memory, **labels)
            raise
        return self._new(name, owner, buffer, region)

    async def free(self, slot: LandingSlot, **labels: Any) -> None:
        """Deregister and let go of the buffer. Idempotent."""
        if slot.state is SlotState.FREE:
            return
        self._close(slot)
        await self.regions.release(slot.region, must_succeed=self._must_succeed, **labels)
        await self._steps.do("landing.free", slot.buffer.free, **slot.labels(), **labels)

    async def close(self) -> None:
        """Give everything back; what the engine refuses now is recorded, and no error."""
        self._must_succeed = False
        for slot in self.slots:
            await self.free(slot)


class LandingPool(_Slots):
    """One buffer registered once; slots are cut from it by aligned first-fit.

    Waiters are served first come, first served: a small request never overtakes a large one.
    """

    def __init__(
        self,
        engine: EnginePort,
        regions: RegionTable,
        steps: Steps,
        must_succeed: bool,
        nbytes: int,
        alignment: int = ALIGNMENT,
        max_waiters: int = MAX_WAITERS,
    ) -> None:
        super().__init__(engine, regions, steps, must_succeed)
        self.nbytes, self.alignment, self.max_waiters = nbytes, alignment, max_waiters
        self._holes: list[tuple[int, int]] = [(0, nbytes)]
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._buffer: Buffer | None = None
        self._region: MemoryRegion | None = None

    async def open(self) -> None:
        """Allocate and register the pool, once."""
        self._buffer = self._engine.allocate(self.nbytes)
        self._region = await self.regions.register(self._buffer, POOL, must_succeed=self._must_succeed)

    async def allocate(self, nbytes: int, owner: str, **labels: Any) -> LandingSlot:
        """Cut a slot, waiting in line for room.

        Raises:
            BadBuffer: not even one byte. StateError: the pool is not open.
            LandingFull: larger than the pool, or too many waiters already.
        """
        base = self._base
        offset = await self._offset(nbytes)
        try:
            return await self._steps.do(
                "landing.alloc",
                lambda: self._cut(offset, nbytes, owner),
                lambda slot: {"address": slot.address, "region": slot.name},
                bytes=nbytes,
                **labels,
            )
        except BaseException:
            if all(slot.address != base + offset for slot in self._open.values()):
                self._give_back(offset, self._aligned(nbytes))
            raise

    async def free(self, slot: LandingSlot, **labels: Any) -> None:
        """Give the slot's range back and serve whoever waits. Idempotent."""
        if slot.state is SlotState.FREE:
            return
        self._close(slot)
        await self._steps.do("landing.free", lambda: self._return(slot), **slot.labels(), **labels)

    async def close(self) -> None:
        """Withdraw the whole pool; no write can touch it afterwards. A refusal is recorded, and no error."""
        self._must_succeed = False
        for slot in self.slots:
            await self.free(slot)
        if self._region is not None and self._buffer is not None:
            await self.regions.release(self._region, must_succeed=self._must_succeed)
            self._buffer.free()

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._holes)

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest slot that fits now."""
        return max((length for _, length in self._holes), default=0)

    @property
    def _base(self) -> int:
        if self._buffer is None:
            raise StateError("the landing pool is not open; await pool.open() first")
        return self._buffer.address

    async def _offset(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise BadBuffer(f"cannot allocate {nbytes} bytes; ask for at least 1")
        need = self._aligned(nbytes)
        if need > self.nbytes:
            raise LandingFull(f"{nbytes} bytes are more than the whole pool of {self.nbytes}; raise --pool-bytes")
        if not self._waiting and (offset := self._first_fit(need)) is not None:
            return offset
        if len(self._waiting) >= self.max_waiters:
            raise LandingFull(f"{self.max_waiters} requests wait for landing memory already; raise --pool-bytes")
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((need, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            self._abandon(need, turn)
            raise

    def _abandon(self, need: int, turn: asyncio.Future[int]) -> None:
        """A waiter was cancelled: before its turn came, or after."""
        if turn.cancelled():
            self._serve()
        else:
            self._give_back(turn.result(), need)

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _first_fit(self, need: int) -> int | None:
        for at, (offset, length) in enumerate(self._holes):
            if length >= need:
                self._holes[at : at + 1] = [(offset + need, length - need)] if length > need else []
                return offset
        return None

    def _cut(self, offset: int, nbytes: int, owner: str) -> LandingSlot:
        assert self._buffer is not None and self._region is not None
        buffer = self._buffer.slice(offset, nbytes)
        return self._new(self._name(), owner, buffer, self._region)

    def _return(self, slot: LandingSlot) -> None:
        slot.buffer.free()
        self._give_back(slot.address - self._base, self._aligned(slot.nbytes))

    def _give_back(self, offset: int, length: int) -> None:
        self._holes = _coalesced([*self._holes, (offset, length)])
        self._serve()

    def _serve(self) -> None:
        """Give room to whoever waits, in order. One that was cancelled leaves the line here, whoever comes by."""
        self._waiting = deque(waiter for waiter in self._waiting if not waiter[1].cancelled())
        while self._waiting and (offset := self._first_fit(self._waiting[0][0])) is not None:
            self._waiting.popleft()[1].set_result(offset)


def _coalesced(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(holes):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((offset, length))
    return merged
