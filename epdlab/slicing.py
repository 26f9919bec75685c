"""An emulated NIC: a write is cut into slices, and each slice needs a live source region, as RDMA verbs demand.

Over TCP Mooncake never looks at the source, so a race that would break on RDMA stays invisible. This engine port
wraps the real one and refuses a slice whose source is not registered at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .engine import MooncakeEngine
from .ports import Buffer
from .regions import RegionTable
from .steps import Steps

REFUSED = -1


class SlicedEngine:
    """The engine port with sliced, source-checked writes. `regions` is set once the encoder has its table."""

    def __init__(self, engine: MooncakeEngine, steps: Steps, slices: int) -> None:
        self._engine, self._steps, self._slices = engine, steps, slices
        self.regions: RegionTable | None = None
        self.register, self.deregister = engine.register, engine.deregister
        self.register_batch, self.deregister_batch = engine.register_batch, engine.deregister_batch

    @property
    def session_id(self) -> str:
        return self._engine.session_id

    async def write(
        self, session_id: str, source: int, target: int, nbytes: int, answered: Callable[[], None] | None = None
    ) -> int:
        code, size = 0, -(-nbytes // self._slices)
        for offset in range(0, nbytes, size):
            length = min(size, nbytes - offset)
            code = await self._slice(session_id, source + offset, target + offset, length)
            if code != 0:
                break
        if answered is not None:
            answered()
        return code

    async def _slice(self, session_id: str, source: int, target: int, nbytes: int) -> int:
        async def write() -> int:
            if self.regions is None or not self.regions.guard(source, nbytes):
                return REFUSED
            return await self._engine.write(session_id, source, target, nbytes)

        labels: dict[str, Any] = {"address": source, "bytes": nbytes, "peer": session_id, "target": target}
        return await self._steps.wait("transfer.slice", write, **labels)

    async def write_batch(
        self, session_id: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        for source, target, nbytes in zip(sources, targets, lengths, strict=True):
            code = await self.write(session_id, source, target, nbytes)
            if code != 0:
                return code
        return 0

    def allocate(self, nbytes: int) -> Buffer:
        return self._engine.allocate(nbytes)

    def close(self) -> None:
        self._engine.close()
