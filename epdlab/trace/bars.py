"""A trace as the bars of a timeline: regions, landing slots and the writes that need them. No geometry here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from epdlab.steps import Event

from .breach import Breach
from .spans import Span, kind_of, lanes, short, size, spans

Kind = Literal["region", "refused", "slot", "write", "landing", "late"]

_BREAKS: dict[str, str] = {
    "write": "source_uncovered",
    "landing": "destination_unsafe",
    "late": "destination_unsafe",
    "refused": "overlap",
}


@dataclass(slots=True)
class Bar:
    """One row: something that was there from `begin` to `end` (indices into the trace).

    Attributes:
        aside: where a slot was quarantined.
        broke: the breaches it is about; a write is drawn red from where the first one happened.
    """

    process: str
    kind: Kind
    name: str
    note: str
    begin: int
    end: int
    open: bool = False
    order: tuple[int, int] = (0, 0)
    aside: int | None = None
    broke: list[Breach] = field(default_factory=list)


def bars_of(events: Sequence[Event], keep: Sequence[int], breaches: Sequence[Breach]) -> list[Bar]:
    """All bars, grouped by process; a region is followed by the writes that start from its range."""
    kept = [events[i] for i in keep]
    found = _Lives(len(kept) - 1)
    for span in sorted(spans(kept), key=lambda span: span.begin if span.end is None else span.end):
        found.take(span)
    at = {name: k for k, name in enumerate(lanes(kept))}
    bars = sorted(found.bars, key=lambda bar: (at[bar.process], bar.order, bar.begin))
    for bar in bars:
        bar.begin, bar.end = keep[bar.begin], keep[bar.end]
        bar.aside = None if bar.aside is None else keep[bar.aside]
        bar.broke = [b for b in breaches if b.invariant == _BREAKS.get(bar.kind) and bar.begin in _starts(b)]
    return bars


def _starts(breach: Breach) -> tuple[int, ...]:
    """The event a breach is drawn at: the write's begin, or the registration."""
    return breach.events[-1:] if breach.invariant == "overlap" else breach.events[:1]


class _Lives:
    """Follows regions and slots from their begin to their end."""

    def __init__(self, last: int) -> None:
        self.bars: list[Bar] = []
        self._last = last
        self._regions: dict[tuple[str, int | None], Bar] = {}
        self._slots: dict[str | None, Bar] = {}
        self._ranges: dict[tuple[str, int | None], int] = {}

    def take(self, span: Span) -> None:
        handler = {
            "mr.register": self._register,
            "mr.deregister": self._deregister,
            "landing.alloc": self._allocate,
            "landing.free": self._free,
            "landing.quarantine": self._quarantine,
            "transfer.write": self._write,
            "transfer.land": self._late,
            "process.kill": self._kill,
        }.get(span.step)
        if handler is not None and (span.end is not None or span.step in ("transfer.write", "process.kill")):
            handler(span, span.begin if span.end is None else span.end)

    def _register(self, span: Span, at: int) -> None:
        event, code = span.last, span.last.result
        name, about = short(event.region, event.process), f"{size(event.bytes)}{_of(event)}"
        bar = Bar(event.process, "region", name, about, at, self._last, True, self._order(event.process, event.address))
        if code == 0:
            self._regions[(event.process, event.address)] = bar
        else:
            bar.kind, bar.end, bar.open, bar.note = "refused", at, False, f"refused: {kind_of(code)}"
        self.bars.append(bar)

    def _deregister(self, span: Span, at: int) -> None:
        bar = self._regions.pop((span.last.process, span.last.address), None) if span.last.result == 0 else None
        if bar is not None:
            bar.end, bar.open = at, False

    def _allocate(self, span: Span, at: int) -> None:
        event = span.last
        if event.result == "ok":
            order = self._order(event.process, event.address)
            bar = Bar(
                event.process,
                "slot",
                short(event.region, event.process),
                f"{size(event.bytes)}{_of(event)}",
                at,
                self._last,
                True,
                order,
            )
            self._slots[event.region] = bar
            self.bars.append(bar)

    def _free(self, span: Span, at: int) -> None:
        bar = self._slots.pop(span.last.region, None)
        if bar is not None:
            bar.end, bar.open = at, False

    def _quarantine(self, span: Span, at: int) -> None:
        if span.last.region in self._slots:
            self._slots[span.last.region].aside = at

    def _late(self, span: Span, at: int) -> None:
        event = span.last
        name, note = f"part {event.part} lands late", f"bytes for {event.req}"
        self.bars.append(Bar(f"rank{event.rank}", "late", name, note, at, at, order=_LANDINGS))

    def _kill(self, span: Span, at: int) -> None:
        for bar in self.bars:
            if bar.process == span.first.process and bar.open:
                bar.end, bar.open = at, False

    def _write(self, span: Span, at: int) -> None:
        event, end, open_ = span.first, span.end or self._last, span.end is None
        note = "runs" if open_ else f"= {kind_of(span.last.result)}"
        name = f"write part {event.part} to rank{event.rank}"
        order = (self._order(event.process, event.address)[0], 1)
        self.bars.append(Bar(event.process, "write", name, note, span.begin, end, open_, order))
        there = f"part {event.part} lands"
        self.bars.append(Bar(f"rank{event.rank}", "landing", there, note, span.begin, end, open_, _LANDINGS))

    def _order(self, process: str, address: int | None) -> tuple[int, int]:
        """Regions of one range stand together, in the order the ranges were first seen."""
        return self._ranges.setdefault((process, address), len(self._ranges)), 0


_LANDINGS = (1 << 30, 1)  # below all regions of their process


def _of(event: Event) -> str:
    part = "" if event.part is None else f" part {event.part}"
    return f" for {event.req}{part}" if event.req else ""
