"""Memory regions: a handle with a lifecycle, the table of live ones, and the guard an RDMA NIC would be.

Every registration and deregistration of a process passes through its `RegionTable`. Over TCP Mooncake does not
check a write's *source*; the guard here does, at the begin and at the end of every write.
"""

from __future__ import annotations

import asyncio
import bisect
from enum import Enum
from typing import Any

from .engine import check, error_for
from .errors import SourceUncovered, StateError
from .ports import Buffer, EnginePort
from .steps import Steps


class RegionState(Enum):
    """Lifecycle of a memory region."""

    PENDING = "pending"
    LIVE = "live"
    REFUSED = "refused"
    RELEASED = "released"


TRANSITIONS: dict[RegionState, frozenset[RegionState]] = {
    RegionState.PENDING: frozenset({RegionState.LIVE, RegionState.REFUSED, RegionState.RELEASED}),
    RegionState.LIVE: frozenset({RegionState.RELEASED}),
    RegionState.REFUSED: frozenset({RegionState.RELEASED}),
    RegionState.RELEASED: frozenset(),
}


class MemoryRegion:
    """A registration of one buffer: PENDING, then LIVE (or REFUSED), then RELEASED (from any of them).

    It keeps its buffer alive. `writes` counts writes in flight from it.
    """

    def __init__(self, name: str, buffer: Buffer, owner: str) -> None:
        self.name, self.buffer, self.owner = name, buffer, owner
        self.address, self.nbytes = buffer.address, buffer.nbytes
        self.state = RegionState.PENDING
        self.writes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def covers(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def begin_write(self) -> None:
        self.writes += 1
        self._idle.clear()

    def end_write(self) -> None:
        self.writes -= 1
        if self.writes == 0:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no write is in flight."""
        while self.writes:
            await self._idle.wait()

    def _transition(self, to: RegionState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"{self.name} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def __repr__(self) -> str:
        return f"MemoryRegion({self.name}, {self.nbytes} bytes, {self.state.value}, writes={self.writes})"


class RegionTable:
    """All regions of one engine.

    Args:
        strict: raise SourceUncovered where the guard finds an uncovered write, instead of only recording it.
    """

    def __init__(self, engine: EnginePort, steps: Steps, strict: bool = False) -> None:
        self._engine, self._steps, self._strict = engine, steps, strict
        self._live: dict[int, MemoryRegion] = {}
        self._starts: list[int] = []
        self._count = 0

    @property
    def live(self) -> list[MemoryRegion]:
        """Live regions, by address."""
        return [self._live[start] for start in self._starts]

    async def register(self, buffer: Buffer, owner: str, *, must_succeed: bool = True, **labels: Any) -> MemoryRegion:
        """Register a buffer.

        Args:
            must_succeed: rule check_register_status. Without it a refusal is hidden, as SGLang's engine wrapper
                hides it, and the region comes back REFUSED.

        Raises:
            RegistrationRefused: the engine's code was not 0 and `must_succeed`.
        """
        region = self.name(buffer, owner)
        await self.admit(region, must_succeed=must_succeed, **labels)
        return region

    def name(self, buffer: Buffer, owner: str) -> MemoryRegion:
        """A PENDING region: claimed at once, so that siblings find it, and admitted later."""
        self._count += 1
        return MemoryRegion(f"{self._steps.process}.mr#{self._count}", buffer, owner)

    async def admit(self, region: MemoryRegion, *, must_succeed: bool = True, **labels: Any) -> None:
        """Bring a PENDING region to the engine: LIVE, or REFUSED."""
        code = await self._steps.do(
            "mr.register",
            lambda: self._engine.register(region.address, region.nbytes),
            region=region.name,
            address=region.address,
            bytes=region.nbytes,
            **labels,
        )
        region._transition(RegionState.LIVE if code == 0 else RegionState.REFUSED)
        if code == 0:
            self._live[region.address] = region
            bisect.insort(self._starts, region.address)
        elif must_succeed:
            raise error_for("register", code, region.name)

    async def release(self, region: MemoryRegion, *, must_succeed: bool = True, **labels: Any) -> None:
        """Deregister. Idempotent: a RELEASED region stays so, and a REFUSED one is none of the engine's business
        unless refusals are hidden (`must_succeed=False`): then the engine is called, as upstream does.

        Raises:
            DeregistrationRefused: the engine's code was not 0 and `must_succeed`.
        """
        if region.state is RegionState.RELEASED:
            return
        never_live = region.state is RegionState.PENDING or (region.state is RegionState.REFUSED and must_succeed)
        region._transition(RegionState.RELEASED)
        if never_live:
            return
        code = await self._steps.do(
            "mr.deregister",
            lambda: self._withdraw(region.address),
            region=region.name,
            address=region.address,
            bytes=region.nbytes,
            **labels,
        )
        if must_succeed:
            check("deregister", code, region.name)

    def _withdraw(self, address: int) -> int:
        """Deregister by address, as the engine does: whoever owns the region that starts there loses it."""
        code = self._engine.deregister(address)
        if code == 0 and self._live.pop(address, None) is not None:
            self._starts.remove(address)
        return code

    def covering(self, address: int, nbytes: int) -> MemoryRegion | None:
        """The live region that holds the whole range, or None."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        region = self._live[self._starts[at]]
        return region if region.covers(address, nbytes) else None

    def guard(self, address: int, nbytes: int) -> bool:
        """Whether a write from this range is covered by one live region at this moment."""
        return self.covering(address, nbytes) is not None

    def require(self, covered: list[bool], what: str) -> None:
        """In strict mode, an uncovered moment of a write is an error.

        Raises:
            SourceUncovered: `covered` (at begin, at end) has a False and the table is strict.
        """
        if self._strict and not all(covered):
            raise SourceUncovered(f"{what} had no live source region; keep it registered until the write ends")
