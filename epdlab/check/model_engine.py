"""An executable model of Mooncake's contract: memory, regions, return codes and one-sided writes.

It answers what `engine.MooncakeEngine` answers (0.3.13.post1), except where RDMA verbs are stricter than TCP: those
rules are listed in `STRICTER`, and a differential test holds both engines together. What the model does not
reproduce is listed in `NOT_MODELLED`. No sockets, threads or torch pass through this module.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import BadBuffer, EngineNotReady
from ..ports import Buffer, EnginePort

OK, OVERLAP, UNKNOWN, FAILED = 0, -7, -3, -1
BASE = 0x10000
POISON = 0xDD
CELL = 16

Mode = Literal["r", "c", "w", "j"]
Touch = Callable[[tuple[object, ...], Mode], None]
Poke = Callable[[int, bytes], None]
Regions = Mapping[int, int]
"""Live regions of one engine: start to length."""


@dataclass(frozen=True, slots=True)
class Strictness:
    """One rule in which the model follows RDMA and Mooncake's TCP transport is laxer.

    Attributes:
        tcp, model: the code of the write on either.
    """

    name: str
    sentence: str
    tcp: int = OK
    model: int = FAILED


STRICTER: dict[str, Strictness] = {
    rule.name: rule
    for rule in (
        Strictness("source_unregistered", "a write whose source is in no live region"),
        Strictness("source_spans_regions", "a write whose source lies in two adjacent regions, and in none whole"),
        Strictness("source_withdrawn", "a write whose source region is deregistered before it ends"),
        Strictness("destination_withdrawn", "a write whose destination region is deregistered before it ends"),
    )
}

NOT_MODELLED: dict[str, str] = {
    "pooled_connection": "with MC_TCP_ENABLE_CONNECTION_POOL=1 the write after a rejected one may answer -1 too, "
    "because the peer is closing the pooled connection; the one after that can take a second",
    "failed_batch_deregister": "after a batch deregistration that answers -3 its ranges are gone, and every later "
    "registration of them is refused with -7 as long as the engine lives; the model takes them again",
    "atomic_batch_write": "a batch write that fails may have written some of its ranges; the model writes those before "
    "the first bad one",
    "bandwidth": "a write takes as long as the schedule says, whatever its size",
}


def _untouched(_: tuple[object, ...], __: Mode) -> None:
    """Nobody wants to know what is touched."""


def _unpoked(_: int, __: bytes) -> None:
    """Nobody wants to know what is written."""


def overlapping(regions: Regions, address: int, nbytes: int) -> bool:
    """Whether a live region shares a byte with the range."""
    return any(address < start + length and start < address + nbytes for start, length in regions.items())


def covered(regions: Regions, address: int, nbytes: int) -> bool:
    """Whether one live region holds the whole range."""
    return any(start <= address and address + nbytes <= start + length for start, length in regions.items())


def cells(address: int, nbytes: int) -> range:
    """The cells of memory that a range lies in: what is touched is told by cell."""
    return range(address // CELL, (address + nbytes - 1) // CELL + 1)


class ModelMemory:
    """One process's memory: a small byte array. Freed ranges are poisoned and reused, lowest address first.

    Args:
        touch: told which cells are read ("r") or changed ("w"). poke: told what is written where.
    """

    def __init__(self, nbytes: int = 4096, owner: str = "", touch: Touch = _untouched, poke: Poke = _unpoked) -> None:
        self.base, self.owner, self.touch, self._poke = BASE, owner, touch, poke
        self.bytes = bytearray([POISON]) * nbytes
        self._holes: list[tuple[int, int]] = [(BASE, nbytes)]

    def take(self, nbytes: int) -> Buffer:
        """A fresh buffer, at the lowest address where it fits.

        Raises:
            BadBuffer: no room, or a length that is not positive.
        """
        if nbytes <= 0:
            raise BadBuffer(f"cannot allocate {nbytes} bytes; ask for at least 1")
        need = -(-nbytes // CELL) * CELL
        for at, (start, length) in enumerate(self._holes):
            if length >= need:
                self._holes[at : at + 1] = [(start + need, length - need)] if length > need else []
                self.touch_range("w", start, nbytes)
                return ModelBuffer(_Storage(self, start, need), start, nbytes)
        raise BadBuffer(f"the model's memory has no room for {nbytes} bytes; make it larger")

    def give(self, start: int, length: int) -> None:
        """A range comes back (its last reference went)."""
        self.touch_range("w", start, length)
        self.write(start, bytes([POISON]) * length)
        holes = sorted([*self._holes, (start, length)])
        self._holes = holes[:1]
        for start, length in holes[1:]:
            last, size = self._holes[-1]
            if last + size == start:
                self._holes[-1] = (last, size + length)
            else:
                self._holes.append((start, length))

    def read(self, address: int, nbytes: int) -> bytes:
        at = address - self.base
        return bytes(self.bytes[at : at + nbytes])

    def write(self, address: int, data: bytes) -> None:
        at = address - self.base
        self.bytes[at : at + len(data)] = data
        self._poke(address, data)

    def touch_range(self, mode: Mode, address: int, nbytes: int) -> None:
        for cell in cells(address, nbytes):
            self.touch(("memory", self.owner, cell), mode)


class _Storage:
    """A range of memory, held by every buffer cut from it; it goes back when the last of them lets go."""

    __slots__ = ("length", "memory", "start")

    def __init__(self, memory: ModelMemory, start: int, length: int) -> None:
        self.memory, self.start, self.length = memory, start, length

    def __del__(self) -> None:
        self.memory.give(self.start, self.length)


class ModelBuffer:
    """A buffer in model memory (see `ports.Buffer`)."""

    __slots__ = ("_address", "_storage", "nbytes")

    def __init__(self, storage: _Storage, address: int, nbytes: int) -> None:
        self._storage: _Storage | None = storage
        self._address, self.nbytes = address, nbytes

    @property
    def _held(self) -> _Storage:
        if self._storage is None:
            raise BadBuffer("buffer was freed; allocate a new one")
        return self._storage

    @property
    def address(self) -> int:
        if self._storage is None:
            raise BadBuffer("buffer was freed; allocate a new one")
        return self._address

    def synchronize(self) -> None:
        """Nothing runs behind our back here."""

    def fill(self, data: bytes) -> None:
        self._held.memory.touch_range("w", self._address, self.nbytes)
        self._held.memory.write(self._address, data)

    def digest(self) -> str:
        memory = self._held.memory
        memory.touch_range("r", self._address, self.nbytes)
        return f"{zlib.crc32(memory.read(self._address, self.nbytes)):08x}"

    def slice(self, offset: int, nbytes: int) -> ModelBuffer:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise BadBuffer(f"[{offset}, {offset + nbytes}) is outside of {self.nbytes} bytes; slice inside the buffer")
        return ModelBuffer(self._held, self._address + offset, nbytes)

    def free(self) -> None:
        self._storage = None

    def __repr__(self) -> str:
        return f"ModelBuffer({self.nbytes} bytes{', freed' if self._storage is None else ''})"


class Fabric:
    """Which engine answers under which session."""

    def __init__(self) -> None:
        self.engines: dict[str, ModelEngine] = {}


class ModelEngine:
    """One engine of a fabric. A write is over at once here; the explorer's worlds hold it between begin and end.

    Args:
        touch: told which regions every call reads ("r") or changes ("w").
    """

    def __init__(
        self, session_id: str, memory: ModelMemory, fabric: Fabric | None = None, touch: Touch = _untouched
    ) -> None:
        self.session_id, self.memory, self.fabric = session_id, memory, fabric or Fabric()
        self.regions: dict[int, int] = {}
        self.alive = True
        self._touch = touch
        self.fabric.engines[session_id] = self

    # ---- regions -------------------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> int:
        self._live()
        self._touch_regions(address, nbytes)
        if overlapping(self.regions, address, nbytes):
            return OVERLAP
        self.regions[address] = nbytes
        return OK

    def deregister(self, address: int) -> int:
        self._live()
        nbytes = self.regions.pop(address, None)
        self._touch_regions(address, nbytes or 1)
        return UNKNOWN if nbytes is None else OK

    def register_batch(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        """All or nothing: a refused range takes back those before it."""
        done: list[int] = []
        for address, nbytes in zip(addresses, lengths, strict=True):
            code = self.register(address, nbytes)
            if code != OK:
                for earlier in done:
                    self.deregister(earlier)
                return code
            done.append(address)
        return OK

    def deregister_batch(self, addresses: Sequence[int]) -> int:
        """Every address is tried; the code of a failure, if there was one."""
        codes = [self.deregister(address) for address in addresses]
        return next((code for code in codes if code != OK), OK)

    def _touch_regions(self, address: int, nbytes: int) -> None:
        for cell in cells(address, nbytes):
            self._touch(("regions", self.session_id, cell), "w")

    # ---- writes --------------------------------------------------------------------------------------------------

    async def write(
        self, session_id: str, source: int, target: int, nbytes: int, answered: Callable[[], None] | None = None
    ) -> int:
        """One-sided write under RDMA's rule: a live peer, and one live region over each side."""
        self._live()
        peer = self.fabric.engines.get(session_id)
        if peer is None or not peer.alive:
            return FAILED
        if not (covered(self.regions, source, nbytes) and covered(peer.regions, target, nbytes)):
            return FAILED
        peer.memory.write(target, self.memory.read(source, nbytes))
        return OK

    async def write_batch(
        self, session_id: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        for source, target, nbytes in zip(sources, targets, lengths, strict=True):
            code = await self.write(session_id, source, target, nbytes)
            if code != OK:
                return code
        return OK

    # ---- the rest ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Buffer:
        return self.memory.take(nbytes)

    def close(self) -> None:
        """Dead to its peers from now on. Idempotent."""
        self.alive = False
        self.regions.clear()

    def _live(self) -> None:
        if not self.alive:
            raise EngineNotReady("the engine is closed; create a new one")

    def __repr__(self) -> str:
        return f"ModelEngine({self.session_id}, {len(self.regions)} regions{'' if self.alive else ', closed'})"


_: type[Buffer] = ModelBuffer
__: type[EnginePort] = ModelEngine
