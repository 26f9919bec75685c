"""The region timeline: what was registered when, and which writes it covered.

Per process one row for each region and landing slot, and one for each write that reads or lands there. Where a
write goes on without what it needs, its bar is hatched in red.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from epdlab.steps import Event

from . import canvas as c
from . import legend
from .bars import Bar, bars_of
from .breach import Breach
from .canvas import Canvas
from .render import Drawing, TraceTooLarge
from .spans import millis, only, origin

Scale = Literal["order", "time"]

ROW = 17.0
LEFT = 196.0
PAGE = 780.0
MARGIN = 16.0
TICKS = 7
MAX_BARS = 160


def timeline(
    events: Sequence[Event],
    breaches: Sequence[Breach] = (),
    *,
    req: str | None = None,
    scale: Scale = "order",
    max_bars: int = MAX_BARS,
    title: str = "",
) -> Drawing:
    """Draw a trace's regions.

    Args:
        breaches: of source and destination mark the writes they are about, with their number.
        req: only what belongs to this request (and to none).
        scale: `order` gives each event the same width, `time` each millisecond.

    Raises:
        TraceTooLarge: more than `max_bars` bars; the message says what to select.
    """
    keep = only(events, req)
    bars = bars_of(events, keep, breaches)
    if len(bars) > max_bars:
        raise TraceTooLarge(
            f"{len(events)} events make {len(bars)} bars, a page takes {max_bars}; select a request "
            "(req=...), more bars (max_bars=...), or open the Perfetto trace"
        )
    return _Page(events, bars, scale, title or f"regions of {req or 'the run'}").drawing(origin(events, keep))


class _Page:
    """The geometry of one timeline."""

    def __init__(self, events: Sequence[Event], bars: list[Bar], scale: Scale, title: str) -> None:
        self.events, self.bars, self.scale, self.title = events, bars, scale, title
        self.page = Canvas(title, PAGE)
        at = [i for bar in bars for i in (bar.begin, bar.aside, bar.end) if i is not None] or [0]
        self.first, self.last = min(at), max(at)
        self.times = sorted(set(at))
        self.place = {index: k for k, index in enumerate(self.times)}

    def x(self, index: int) -> float:
        """Where an event stands: by its rank among the events that matter here, or by its time."""
        if self.scale == "order":
            share = self.place[index] / max(len(self.times) - 1, 1) if index in self.place else self._between(index)
        else:
            t0, t1 = self.events[self.first].t, self.events[self.last].t
            share = (self.events[index].t - t0) / max(t1 - t0, 1)
        return self._at(share)

    def _at(self, share: float) -> float:
        return LEFT + share * (PAGE - LEFT - MARGIN - 60)

    def _between(self, index: int) -> float:
        return sum(i < index for i in self.times) / max(len(self.times) - 1, 1)

    def drawing(self, origin: int | None) -> Drawing:
        """Draw; `origin` is when the clock starts, None for no clock."""
        self.page.text(14, 14, self.title, size=11, bold=True)
        y, top, process = 46.0, 42.0, ""
        for bar in self.bars:
            if bar.process != process:
                process, y = bar.process, y + 6
                self.page.line(14, y, PAGE - MARGIN, y, colour=c.GRID, width=0.6)
                self.page.text(14, y + ROW / 2, process, bold=True)
            self._bar(bar, y + ROW / 2)
            y += ROW
        self._axis(top, y + 4, origin)
        self._legend(y + 22)
        return Drawing(self.page.dot(), "fixed", self.title)

    def _bar(self, bar: Bar, y: float) -> None:
        x0, x1 = self.x(bar.begin), self.x(bar.end)
        self.page.text(LEFT - 10, y, bar.name, "r", size=8.5)
        if bar.kind in ("refused", "late"):
            self._moment(bar, x0, y)
            return
        fill, height = _FILLS[bar.kind]
        red = min((self.x(b.events[-1]) for b in bar.broke), default=x1)
        self._piece(x0, min(red, x1), y, height, fill, tip=f"{bar.name}, {bar.note}")
        if bar.broke:
            self.page.box(red, y - height / 2, max(x1 - red, 3), height, fill=c.BREACH, line=c.BREACH, striped=True)
            self.page.badge(red, y, bar.broke[0].number, bar.broke[0].message)
        if bar.aside is not None:
            aside = self.x(bar.aside)
            width = max(x1 - aside, 3)
            self.page.box(aside, y - height / 2, width, height, fill=fill, line=fill, striped=True, tip="quarantined")
        note = bar.note + (", still there" if bar.open and bar.kind in ("region", "slot") else "")
        self._note(bar, note, x0, x1, y)

    def _moment(self, bar: Bar, x: float, y: float) -> None:
        self.page.mark(x, y, "square", c.ALERT, line=c.ALERT, size=6)
        self.page.text(x + 7, y, bar.note, size=8, colour=c.ALERT)
        for breach in bar.broke[:1]:
            self.page.badge(x + 18 + c.text_width(bar.note, 8), y, breach.number, breach.message)

    def _piece(self, x0: float, x1: float, y: float, height: float, fill: str, tip: str) -> None:
        if x1 > x0:
            self.page.box(x0, y - height / 2, x1 - x0, height, fill=fill, line=c.INK, pen=0.5, tip=tip)

    def _note(self, bar: Bar, note: str, x0: float, x1: float, y: float) -> None:
        """Inside the bar if it fits there, else behind it."""
        inside = bar.kind in ("region", "slot") and c.text_width(note, 8) < x1 - x0 - 6
        failed = bar.kind in ("write", "landing") and note not in ("= 0", "runs")
        x = x0 + 4 if inside else x1 + (10 if bar.broke else 4)
        self.page.text(x, y, note, size=8, colour=c.ALERT if failed else c.INK)

    def _axis(self, top: float, bottom: float, origin: int | None) -> None:
        """Vertical hairlines at a few moments, with their milliseconds."""
        for x, ms in self._round_ticks(origin) if self.scale == "time" and origin is not None else self._ticks(origin):
            self.page.line(x, top, x, bottom, colour=c.GRID, width=0.5, style="dotted")
            self.page.text(x, top - 7, ms, "c", size=8, colour=c.MUTED)
        words = ["ms"] * (origin is not None) + ["each event one step"] * (self.scale == "order")
        self.page.text(LEFT - 26, top - 7, ", ".join(words), "r", size=8, colour=c.MUTED)

    def _ticks(self, origin: int | None) -> list[tuple[float, str]]:
        if not self.bars:
            return []
        picked = self.times[:: max(1, -(-(len(self.times) - 1) // TICKS))]
        return [(self.x(i), millis(self.events[i], origin)) for i in picked]

    def _round_ticks(self, origin: int) -> list[tuple[float, str]]:
        if not self.bars:
            return []
        t0, t1 = (self.events[i].t for i in (self.first, self.last))
        step = _round_step((t1 - t0) / TICKS)
        marks = range(-(-(t0 - origin) // step) * step, t1 - origin + 1, step)
        return [(self._at((origin + mark - t0) / max(t1 - t0, 1)), f"{mark / 1e6:g}") for mark in marks]

    def _legend(self, y: float) -> None:
        x = 20.0
        for kind, label in (("region", "registered"), ("slot", "landing slot"), ("write", "write in flight")):
            self.page.box(x, y - 5, 22, 10, fill=_FILLS[kind][0], pen=0.5)
            self.page.text(x + 27, y, label, size=8.5)
            x += 44 + c.text_width(label, 8.5)
        self.page.box(x, y - 5, 22, 10, fill=c.BREACH, line=c.BREACH, striped=True)
        self.page.text(x + 27, y, "write without it", size=8.5)
        shown = [breach for bar in self.bars for breach in bar.broke]
        self.page.height = legend.breaches(self.page, y + 18, shown, messages=False)


def _round_step(nanoseconds: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 ... microseconds."""
    step = 1_000
    while True:
        for factor in (1, 2, 5):
            if step * factor >= nanoseconds:
                return step * factor
        step *= 10


_FILLS: dict[str, tuple[str, float]] = {
    "region": (c.REGION, 11.0),
    "slot": (c.SLOT, 11.0),
    "write": (c.WRITE, 7.0),
    "landing": (c.WRITE, 7.0),
}
