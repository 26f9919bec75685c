"""The sequence diagram: one lane per process, time downwards, one row per message or step.

HTTP, acks and one-sided writes differ in line style, colour and label; breaches carry their invariant's number. What
becomes a row is decided in `rows`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from epdlab.steps import Event, Point

from . import canvas as c
from . import legend
from .breach import Breach
from .canvas import Canvas
from .render import Drawing, TraceTooLarge
from .rows import HELD_MS, Row, flights, rows
from .spans import lanes, millis, only, origin

ROW = 16.0
TOP = 64.0
FIRST_LANE = 118.0
RIGHT = 160.0
PAGE = 780.0
NARROW, WIDE = 61.0, 380.0
MAX_ROWS = 240
EVENTS_PER_ROW = 50  # more than any row stands for

_ROLES = {"enc": "encode server", "rank": "prefill rank", "master": "Mooncake master", "lab": "the lab"}


def sequence(
    events: Sequence[Event],
    breaches: Sequence[Breach] = (),
    *,
    req: str | None = None,
    collapse: bool = True,
    max_rows: int = MAX_ROWS,
    last: int | None = None,
    waiting: Sequence[Point] = (),
    everyone: Sequence[str] = (),
    width: float = PAGE,
    title: str = "",
) -> Drawing:
    """Draw a trace.

    Args:
        breaches: marked in red where they broke.
        req: only this request (and what belongs to none).
        collapse: leave out what says little when it goes well.
        max_rows: refuse more rows than this; `last`: draw only the last so many.
        waiting: who is held at the gate now, drawn below.
        everyone: processes that have a lane even before they do anything.
        width: points the page should have; many lanes take more.

    Raises:
        TraceTooLarge: more than `max_rows` rows; the message says what to select.
    """
    keep = only(events, req)
    if last is None and len(keep) > EVENTS_PER_ROW * max_rows:
        raise _too_large(len(keep), "far too many", max_rows)
    found = rows(events, keep, collapse)
    if last is not None:
        found = found[-last:]
    if len(found) > max_rows:
        raise _too_large(len(keep), str(len(found)), max_rows)
    idle = ("process.start", "process.census")
    stubs = [_stub(p.process) for p in waiting] + [_stub(name) for name in everyone]
    names = lanes([e for e in (events[i] for i in keep) if e.step not in idle] + stubs)
    page = _Page(events, found, names, breaches, waiting, title or f"sequence of {req or 'the run'}", width)
    return page.drawing(origin(events, keep))


def _too_large(events: int, found: str, max_rows: int) -> TraceTooLarge:
    return TraceTooLarge(
        f"{events} events make {found} rows, a page takes {max_rows}; select a request (req=...), the last rows "
        "(last=100), more rows (max_rows=...), or open the Perfetto trace"
    )


def _stub(process: str) -> Event:
    return Event(0, process, "process.start", "note")


class _Page:
    """The geometry of one diagram."""

    def __init__(
        self,
        events: Sequence[Event],
        found: list[Row],
        names: list[str],
        breaches: Sequence[Breach],
        waiting: Sequence[Point],
        title: str,
        wanted: float = PAGE,
    ) -> None:
        self.events, self.rows, self.names, self.waiting, self.title = events, found, names, waiting, title
        gaps = max(len(names) - 1, 1)
        self.spacing = max(NARROW, min(WIDE, (wanted - FIRST_LANE - RIGHT) / gaps))
        self.x = {name: FIRST_LANE + self.spacing * k for k, name in enumerate(names)}
        self.y = {row.at: TOP + ROW * (k + 0.5) for k, row in enumerate(found)}
        self.row_of = {index: row for row in found for index in row.events}
        self.broken: defaultdict[int, list[Breach]] = defaultdict(list)
        for breach in breaches:
            row = self.row_of.get(breach.events[-1]) if breach.events else None
            if row is not None:
                self.broken[row.at].append(breach)
        self.bottom = TOP + ROW * (len(found) + len(waiting)) + 6
        width = max(self.x.values(), default=FIRST_LANE) + RIGHT
        self.page = Canvas(title, max(width, wanted if len(names) < 4 else width))

    def drawing(self, origin: int | None) -> Drawing:
        """Draw; `origin` is when the clock starts, None for no clock."""
        for at in self.broken:
            self.page.line(70, self.y[at], self.page.width - 8, self.y[at], colour=c.TINT, width=ROW)
        self._lanes()
        self._write_bars()
        for number, row in enumerate(self.rows, start=1):
            self.page.text(24, self.y[row.at], str(number), "r", size=7, colour=c.MUTED)
            self.page.text(64, self.y[row.at], millis(self.events[row.at], origin), "r", size=8, colour=c.MUTED)
            self._row(row)
        if origin is not None:
            self.page.text(64, TOP - 6, "ms", "r", size=8, colour=c.MUTED)
        self._waiting()
        self._legend()
        return Drawing(self.page.dot(), "fixed", self.title)

    # ---- the frame -----------------------------------------------------------------------------------------------

    def _lanes(self) -> None:
        width = min(self.spacing - 8, 104.0)
        if self.title:
            self.page.text(14, 14, self.title, size=11, bold=True)
        for name in self.names:
            x = self.x[name]
            self.page.line(x, TOP - 8, x, self.bottom, colour=c.GRID, width=1.2)
            roomy = width >= 90
            height = 29 if roomy else 19
            self.page.box(x - width / 2, 27, width, height, fill=c.PALE, line=c.MUTED, round_=True, name=name)
            self.page.text(x, 36, name, "c", bold=True)
            if roomy:
                self.page.text(x, 47, self._role(name), "c", size=8, colour=c.MUTED)

    def _role(self, name: str) -> str:
        return next((role for stem, role in _ROLES.items() if name.startswith(stem)), "")

    def _write_bars(self) -> None:
        """A bar beside the lane for as long as a write is in flight; red from where it lost what it needs."""
        bars = flights(self.rows, len(self.events))
        most = max((column for _, _, column in bars), default=0) + 1
        step = min(5.5, self.spacing * 0.8 / most)
        for row, end, column in bars:
            x = self.x[row.lane] - step * (column + 1)
            bottom = self.y[end.at] if end else self.bottom
            red = min((self._y_of(b.events[-1]) for b in self._breaches_of(row.at)), default=bottom)
            self._bar(x, self.y[row.at], min(red, bottom), c.WRITE, step * 0.65)
            self._bar(x, max(red, self.y[row.at]), bottom, c.BREACH, step * 0.65)

    def _breaches_of(self, write: int) -> list[Breach]:
        keys = ("source_uncovered", "destination_unsafe")
        return [b for found in self.broken.values() for b in found if b.invariant in keys and b.events[0] == write]

    def _bar(self, x: float, top: float, bottom: float, colour: str, width: float) -> None:
        if bottom > top:
            self.page.line(x, top, x, bottom, colour=colour, width=width)

    def _y_of(self, index: int) -> float:
        row = self.row_of.get(index)
        return self.y[row.at] if row else self.bottom

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _row(self, row: Row) -> None:
        y, broken = self.y[row.at], self.broken.get(row.at, [])
        ground = c.TINT if broken else "white"
        inside = row.to is None or row.to not in self.x
        right = self._step(row, y, ground) if inside else self._message(row, y, ground)
        for k, breach in enumerate(broken):
            self.page.badge(right + 9 + 14 * k, y, breach.number, f"[{breach.invariant}] {breach.message}")

    def _step(self, row: Row, y: float, ground: str) -> float:
        """A step inside a lane; where its text ends."""
        x, words = self.x[row.lane], self._words(row)
        self.page.text(x + 8, y, words, ground=ground, colour=c.ALERT if row.failed else c.INK, tip=self._tip(row))
        self._mark(row, x, y)
        return x + 8 + c.text_width(words)

    def _message(self, row: Row, y: float, ground: str) -> float:
        """An arrow between two lanes; where its text ends."""
        assert row.to is not None
        colour, width, style, head = legend.WIRES[row.wire or "http"]
        x0, x1 = self.x[row.lane], self.x[row.to]
        side = 1 if x1 > x0 else -1
        stop = x0 + (x1 - x0) * 0.9 if row.lost else x1 - side * 1.5
        start = x0 + side * 2.5
        self.page.line(
            start,
            y,
            stop,
            y,
            colour=c.ALERT if row.failed else colour,
            width=width,
            style=style,
            head="odot" if row.lost else head,
            tip=self._tip(row),
            ends=(row.lane, row.to),
        )
        missing = " ..." if self.waiting else " (not arrived)"
        text = self._words(row) + (missing if row.lost and not row.fault else "")
        middle = self._place(row.lane, row.to, text)
        self.page.text(
            middle,
            y,
            text,
            "c",
            ground=ground,
            size=9,
            colour=c.ALERT if row.failed else c.INK,
            bold=row.wire in ("write", "late"),
            tip=self._tip(row),
        )
        self._mark(row, x0, y)
        return middle + c.text_width(text, 9) / 2

    def _place(self, lane: str, to: str, text: str) -> float:
        """The middle of an arrow's text: halfway, off the lanes if it fits; outside of an arrow too short for it."""
        a, b = sorted((self.x[lane], self.x[to]))
        width = c.text_width(text, 9)
        if b - a < width + 24:
            right = a + b > self.x[self.names[0]] + self.x[self.names[-1]]
            return b + 6 + width / 2 if right else a - 6 - width / 2
        on_lane = abs(self.names.index(to) - self.names.index(lane)) % 2 == 0
        shift = self.spacing / 2 if on_lane and width < self.spacing - 12 else 0.0
        return (a + b) / 2 + (shift if self.x[lane] > self.x[to] else -shift)

    def _words(self, row: Row) -> str:
        return row.text + (f" [fault: {row.fault}]" if row.fault else "")

    def _mark(self, row: Row, x: float, y: float) -> None:
        tip = self._tip(row)
        if row.fault:
            self.page.mark(x, y, "triangle", c.SLOT, size=9, tip=tip)
        elif row.failed:
            self.page.mark(x, y, "square", c.ALERT, line=c.ALERT, size=5.5, tip=tip)
        elif row.held_ms >= HELD_MS:
            self.page.mark(x, y, "diamond", c.HELD, size=9, tip=tip)
        else:
            self.page.mark(x, y, "circle", c.INK if row.to is None else "white", size=4.6, tip=tip)

    def _tip(self, row: Row) -> str:
        event = self.events[row.at]
        held = f", held {row.held_ms:.0f} ms" if row.held_ms >= HELD_MS else ""
        return f"{event.process} {event.step}{held}"

    def _waiting(self) -> None:
        for k, point in enumerate(self.waiting):
            x, y = self.x[point.process], TOP + ROW * (len(self.rows) + k + 0.5)
            what = f" part {point.part}" if point.part is not None else ""
            to = f" for rank{point.rank}" if point.rank is not None and not point.process.startswith("rank") else ""
            end = " (its end)" if point.phase == "end" else ""
            self.page.text(x + 8, y, f"waits at {point.step}{what}{to}{end}", ground="white", colour=c.MUTED)
            self.page.mark(x, y, "diamond", c.HELD, size=9)

    def _legend(self) -> None:
        words = (("http", "HTTP"), ("ack", "ZMQ ack"), ("write", "one-sided write, and while it runs"))
        y = self.bottom + 16
        legend.marks(self.page, legend.wires(self.page, y, words), y)
        shown = [breach for row in self.rows for breach in self.broken.get(row.at, ())]
        self.page.height = legend.breaches(self.page, y + 20, shown)
