"""Invariants about memory: overlap, source_uncovered, destination_unsafe.

Keeps the live regions and the landing slots of every process, and the writes in flight. A write is checked when it
begins and whenever a region or a slot goes away under it, which is every moment that matters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from epdlab.steps import Event

from .breach import Breach, breach

Live = tuple[int, str, int]


class _Memory:
    """One process's live regions (start -> end, name, event index) and open slots (name -> alloc event, index)."""

    __slots__ = ("live", "slots", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.live: dict[int, Live] = {}
        self.slots: dict[str | None, tuple[Event, int]] = {}

    def covers(self, address: int, end: int) -> bool:
        at = bisect_right(self.starts, address)
        return at > 0 and self.live[self.starts[at - 1]][0] >= end

    def overlapping(self, address: int, end: int) -> Live | None:
        """A live region that shares a byte with the range: live regions are disjoint, so one neighbour decides."""
        at = bisect_left(self.starts, end)
        if at == 0:
            return None
        last = self.live[self.starts[at - 1]]
        return last if last[0] > address else None

    def slot_of(self, req: str | None, address: int, end: int) -> bool:
        for event, _ in self.slots.values():
            start, size = event.address, event.bytes
            if event.req == req and start is not None and size is not None and start <= address <= end <= start + size:
                return True
        return False


class _Write:
    """A write in flight: its begin event, and whether each side has been reported already."""

    __slots__ = ("destination", "event", "index", "rank_process", "source")

    def __init__(self, event: Event, index: int) -> None:
        self.event, self.index = event, index
        self.rank_process = f"rank{event.rank}"
        self.source = self.destination = True


class MemoryChecks:
    """Feeds on mr.*, landing.* and transfer.* events of all processes."""

    def __init__(self, report: Callable[[Breach], None]) -> None:
        self._report = report
        self.memory: dict[str, _Memory] = {}
        self._writes: list[_Write] = []

    def of(self, process: str) -> _Memory:
        memory = self.memory.get(process)
        if memory is None:
            memory = self.memory[process] = _Memory()
        return memory

    # ---- regions and slots ---------------------------------------------------------------------------------------

    def registered(self, event: Event, index: int) -> None:
        code, start = event.result, event.address
        if start is None or event.bytes is None or code.__class__ is str:
            return
        memory, end = self.of(event.process), start + event.bytes
        other = memory.overlapping(start, end)
        if other is not None:
            text = f"{event.region} overlaps {other[1]}, which is live (the engine answered {code})"
            self._report(breach("overlap", text, (other[2], index), event.req, event.part, event.rank))
        elif code == 0:
            memory.starts.insert(bisect_left(memory.starts, start), start)
            memory.live[start] = (end, event.region or "a region", index)

    def deregistered(self, event: Event, index: int) -> None:
        memory = self.of(event.process)
        if event.result != 0 or event.address not in memory.live:
            return
        del memory.live[event.address]
        memory.starts.remove(event.address)
        self._recheck(event, index)

    def allocated(self, event: Event, index: int) -> None:
        if event.result == "ok":
            self.of(event.process).slots[event.region] = (event, index)

    def freed(self, event: Event, index: int) -> None:
        if event.result == "ok" and self.of(event.process).slots.pop(event.region, None) is not None:
            self._recheck(event, index)

    def died(self, process: str) -> None:
        """A killed process takes its memory along; its writes end with it, writes to it are nobody's fault."""
        self.memory.pop(process, None)
        self._writes = [w for w in self._writes if process not in (w.event.process, w.rank_process)]

    # ---- writes --------------------------------------------------------------------------------------------------

    def write_begins(self, event: Event, index: int) -> None:
        write = _Write(event, index)
        self._writes.append(write)
        if not self._covered(write):
            self._uncovered(write, f"began without a live source region ({event.region})", (index,))
        lack = self._lacks(write)
        if lack is not None:
            self._unsafe(write, f"began into memory of {write.rank_process} that is {lack}", (index,))

    def write_ends(self, event: Event, index: int) -> None:
        for at, write in enumerate(self._writes):
            began = write.event
            if (
                began.region == event.region
                and began.target == event.target
                and began.rank == event.rank
                and began.part == event.part
                and began.req == event.req
                and began.process == event.process
            ):
                del self._writes[at]
                return

    def lands_late(self, event: Event, index: int) -> None:
        """Bytes of a write that had ended with a negative code arrive after all."""
        write = _Write(event, index)
        lack = self._lacks(write)
        if lack is not None:
            self._unsafe(write, f"landed late in memory of {write.rank_process} that is {lack}", (index,))

    def _recheck(self, event: Event, index: int) -> None:
        """Memory of a process went away: which writes in flight needed it?"""
        how = f"still ran when {event.region} was {'freed' if event.step == 'landing.free' else 'deregistered'}"
        for write in self._writes:
            if write.source and write.event.process == event.process and not self._covered(write):
                self._uncovered(write, how, (write.index, index))
            if write.destination and write.rank_process == event.process and self._lacks(write) is not None:
                self._unsafe(write, how, (write.index, index))

    def _covered(self, write: _Write) -> bool:
        start, size = write.event.address, write.event.bytes
        return start is None or size is None or self.of(write.event.process).covers(start, start + size)

    def _lacks(self, write: _Write) -> str | None:
        """What a write's destination lacks now; None if nothing, or if the trace does not tell of that memory."""
        event, memory = write.event, self.memory.get(write.rank_process)
        start, size = event.target, event.bytes
        if start is None or size is None or memory is None:
            return None
        if not memory.covers(start, start + size):
            return "unregistered"
        return None if memory.slot_of(event.req, start, start + size) else f"no slot of {event.req}"

    def _uncovered(self, write: _Write, how: str, events: tuple[int, ...]) -> None:
        write.source = False
        self._report(_breach("source_uncovered", write.event, how, events))

    def _unsafe(self, write: _Write, how: str, events: tuple[int, ...]) -> None:
        write.destination = False
        self._report(_breach("destination_unsafe", write.event, how, events))


def _breach(key: str, event: Event, how: str, events: tuple[int, ...]) -> Breach:
    text = f"the write of {event.req} part {event.part} to rank {event.rank} {how}"
    return breach(key, text, events, event.req, event.part, event.rank)
