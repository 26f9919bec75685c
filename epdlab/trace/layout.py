"""Landing memory drawn to scale: the pool, its slots with their offsets, the parts inside, and the holes between.

The picture comes from a trace at any of its points, or from a live `LandingPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epdlab.landing import ALIGNMENT, LandingPool, SlotState
from epdlab.steps import Event

from . import canvas as c
from .canvas import Canvas
from .render import Drawing, TraceTooLarge
from .spans import short, size

PAGE = 780.0
LEFT = 20.0
HEIGHT = 44.0
MAX_SLOTS = 64
COLUMNS: tuple[tuple[float, c.Side], ...] = ((LEFT, "l"), (150.0, "r"), (250.0, "r"), (270.0, "l"), (370.0, "l"))
HEADINGS = ("slot", "offset", "bytes", "request", "parts, by their offset in the slot")


@dataclass(slots=True)
class Slot:
    """One landing slot.

    Attributes:
        offset: bytes from the start of the memory drawn.
        parts: (part, offset in the slot, bytes) of each part that was written there.
    """

    name: str
    offset: int
    nbytes: int
    owner: str
    quarantined: bool = False
    parts: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Memory:
    """The landing memory of one rank: its size, its slots in order, and what a pool aligns to."""

    process: str
    nbytes: int
    slots: list[Slot]
    alignment: int = ALIGNMENT
    pool: bool = True

    def taken(self, slot: Slot) -> int:
        """Bytes a slot takes from a pool."""
        return -(-slot.nbytes // self.alignment) * self.alignment


def of_pool(pool: LandingPool, process: str) -> Memory:
    """What a live pool holds now."""
    base = pool._base
    slots = [
        Slot(slot.name, slot.address - base, slot.nbytes, slot.owner, slot.state is SlotState.QUARANTINED)
        for slot in sorted(pool.slots, key=lambda slot: slot.address)
    ]
    return Memory(process, pool.nbytes, slots, pool.alignment)


def of_trace(events: Sequence[Event], process: str, index: int | None = None) -> Memory:
    """What a rank's landing memory held after the event at `index` (the last one for None).

    The pool is the region registered for no request; without one, each slot is memory of its own.
    """
    seen = events if index is None else events[: index + 1]
    base, nbytes, slots = _pool_of(seen, process), 0, dict[str | None, tuple[int, Slot]]()
    for event in seen:
        if event.phase != "end":
            _note_write(event, process, slots)
        elif event.process == process:
            _apply(event, slots)
    placed = sorted(slots.values(), key=lambda pair: pair[0])
    if base is not None:
        for address, slot in placed:
            slot.offset = address - base[0]
        return Memory(process, base[1], [slot for _, slot in placed])
    for _, slot in placed:
        slot.offset, nbytes = nbytes, nbytes + slot.nbytes
    return Memory(process, nbytes, [slot for _, slot in placed], pool=False)


def _pool_of(events: Sequence[Event], process: str) -> tuple[int, int] | None:
    for event in events:
        whole = event.step == "mr.register" and event.process == process and event.req is None and event.result == 0
        if whole and event.address is not None and event.bytes is not None:
            return event.address, event.bytes
    return None


def _apply(event: Event, slots: dict[str | None, tuple[int, Slot]]) -> None:
    if event.step == "landing.alloc" and event.result == "ok":
        slots[event.region] = (
            event.address or 0,
            Slot(event.region or "slot", 0, event.bytes or 0, event.req or "?"),
        )
    elif event.step == "landing.free":
        slots.pop(event.region, None)
    elif event.step == "landing.quarantine" and event.region in slots:
        slots[event.region][1].quarantined = True


def _note_write(event: Event, process: str, slots: dict[str | None, tuple[int, Slot]]) -> None:
    if event.step != "transfer.write" or f"rank{event.rank}" != process or event.target is None:
        return
    for address, slot in slots.values():
        if address <= event.target < address + slot.nbytes:
            part = (event.part or 0, event.target - address, event.bytes or 0)
            if part not in slot.parts:
                slot.parts.append(part)


def layout(memory: Memory, title: str = "") -> Drawing:
    """Draw landing memory.

    Raises:
        TraceTooLarge: more slots than a page takes.
    """
    if len(memory.slots) > MAX_SLOTS:
        raise TraceTooLarge(f"{len(memory.slots)} slots, a page takes {MAX_SLOTS}; draw another point of the trace")
    kind = "landing pool" if memory.pool else "landing buffers, one per request"
    return _Page(memory, title or f"{kind} of {memory.process}, {size(memory.nbytes)}").drawing()


class _Page:
    """The geometry: one bar to scale, a table below it."""

    def __init__(self, memory: Memory, title: str) -> None:
        self.memory, self.title, self.page = memory, title, Canvas(title, PAGE)
        self.scale = (PAGE - 2 * LEFT) / max(memory.nbytes, 1)

    def x(self, offset: int) -> float:
        return LEFT + offset * self.scale

    def drawing(self) -> Drawing:
        y = 50.0
        self.page.text(14, 14, self.title, size=11, bold=True)
        if self.memory.nbytes:
            self.page.box(LEFT, y, PAGE - 2 * LEFT, HEIGHT, fill="white", line=c.MUTED)
        self._offset(0, y - 8, "l")
        self._offset(self.memory.nbytes, y - 8, "r")
        for number, slot in enumerate(self.memory.slots, start=1):
            self._slot(number, slot, y)
        self._table(y + HEIGHT + 20)
        return Drawing(self.page.dot(), "fixed", self.title)

    def _offset(self, offset: int, y: float, side: c.Side) -> None:
        self.page.text(self.x(offset), y, f"+{offset}", side, size=8, colour=c.MUTED)

    def _slot(self, number: int, slot: Slot, y: float) -> None:
        x, width = self.x(slot.offset), max(slot.nbytes * self.scale, 2.0)
        tip = f"{slot.name}, +{slot.offset}, {size(slot.nbytes)}"
        self.page.box(x, y, width, HEIGHT, fill=c.SLOT, line=c.INK, striped=slot.quarantined, tip=tip)
        for part, offset, nbytes in sorted(slot.parts):
            part_x, part_width = self.x(slot.offset + offset), max(nbytes * self.scale, 1.5)
            text = f"part {part}" if part_width > 36 else ""
            self.page.box(
                part_x,
                y + HEIGHT - 16,
                part_width,
                16,
                fill=c.WRITE,
                line=c.INK,
                text=text,
                size=8,
                pen=0.5,
                tip=f"part {part}, +{offset} in the slot, {size(nbytes)}",
            )
        label = short(slot.name, self.memory.process)
        label = label if c.text_width(label) < width - 4 else str(number)
        if c.text_width(label) < width + 6:
            ground = "white" if slot.quarantined else None
            self.page.text(x + width / 2, y + 14, label, "c", bold=True, ground=ground)

    def _table(self, y: float) -> None:
        self._line(y, HEADINGS, size=8, colour=c.MUTED)
        for number, slot in enumerate(self.memory.slots, start=1):
            y += 14
            owner = slot.owner + (" (quarantined)" if slot.quarantined else "")
            parts = (f"part {part} at +{offset} ({size(nbytes)})" for part, offset, nbytes in sorted(slot.parts))
            name = f"{number}  {short(slot.name, self.memory.process)}"
            self._line(y, (name, f"+{slot.offset}", str(slot.nbytes), owner, ", ".join(parts)), size=8.5, colour=c.INK)
        self._holes(y + 20)

    def _line(self, y: float, cells: Sequence[str], *, size: float, colour: str) -> None:
        for (x, side), cell in zip(COLUMNS, cells, strict=True):
            self.page.text(x, y, cell, side, size=size, colour=colour)

    def _holes(self, y: float) -> None:
        if self.memory.pool:
            held = sum(map(self.memory.taken, self.memory.slots))
            free = f"{size(self.memory.nbytes - held)} free, largest hole {size(self._largest_hole())}"
            self.page.text(LEFT, y, free, size=8.5, colour=c.MUTED)
            y += 14
        self.page.height = y

    def _largest_hole(self) -> int:
        largest = at = 0
        for slot in self.memory.slots:
            largest, at = max(largest, slot.offset - at), slot.offset + self.memory.taken(slot)
        return max(largest, self.memory.nbytes - at)
