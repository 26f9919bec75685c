"""A small SVG canvas: boxes, wires and text at given places, in one look that all drawn figures share.

Owns colours, fonts, arrow heads and text widths. What never passes through here: what a figure means, and a layout
engine: the same calls give the same bytes on every machine. Coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH = 880
"""Of every figure: what GitHub's page shows without scaling."""

INK, MUTED, RULE, PAPER = "#1b1f24", "#57606a", "#d0d7de", "#ffffff"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
"""Okabe and Ito's palette, told apart by colour-blind readers; black is INK."""

SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
MONO_ADVANCE = 0.602

# Widths of the characters 32 to 126 of Helvetica, in thousandths of the size (Adobe's public font metrics).
_REGULAR = (
    "278 278 355 556 556 889 667 222 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 "
    "278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 "
    "667 944 667 667 611 278 278 278 469 556 222 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 "
    "556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_BOLD = (
    "278 333 474 556 556 889 722 278 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 333 "
    "333 584 584 584 611 975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 722 667 611 722 "
    "667 944 667 667 611 333 278 333 584 556 278 556 611 556 611 556 333 611 611 278 278 556 278 889 611 611 611 "
    "611 389 556 333 611 556 778 556 556 500 389 280 389 584"
)
_WIDTHS = {bold: tuple(map(int, table.split())) for bold, table in ((False, _REGULAR), (True, _BOLD))}
_OTHER = 556

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind of box is drawn: the border's colour and the filling."""

    line: str
    fill: str


@dataclass(frozen=True, slots=True)
class Stroke:
    """How a kind of wire is drawn."""

    colour: str
    width: float = 1.5
    dash: str = ""


PLAIN = Look("#8c959f", "#f6f8fa")
ENCODER = Look("#b87f00", "#fdf3dc")
PREFILL = Look(BLUE, "#e3eff7")
DECODE = Look(MUTED, "#eef0f2")
STORE = Look("#a5557f", "#f9eaf2")
MEMORY = Look("#3b8fbf", PAPER)
WARNING = Look(VERMILLION, "#fbe9dd")
DONE = Look(GREEN, "#e0f3ed")
WRITE_LOOK = Look("#b87f00", "#f7d68a")

HTTP = Stroke(BLUE, 1.6)
ACK = Stroke(GREEN, 1.8, "6 3")
WRITE = Stroke(ORANGE, 4)
OBJECT = Stroke(PURPLE, 4)
RPC = Stroke("#a5557f", 1.6)
LOCAL = Stroke(MUTED, 1.2, "2 3")
FAULT = Stroke(VERMILLION, 1.8)
INHERITS = Stroke(MUTED, 1.3)
"""Links have the colours that the drawings of traces use; the store, which these do not show, has one of its own."""


def text_width(text: str, size: float, *, bold: bool = False, mono: bool = False) -> float:
    """Pixels that a text takes in Helvetica, or in a fixed-width font."""
    if mono:
        return len(text) * MONO_ADVANCE * size
    table = _WIDTHS[bold]
    return sum(table[ord(c) - 32] if 32 <= ord(c) < 127 else _OTHER for c in text) * size / 1000


def wrap(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """The text in lines of at most `width` pixels, broken at spaces; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size, bold=bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


class Canvas:
    """One figure under construction.

    Args:
        title, description: what a screen reader says.
    """

    def __init__(self, height: float, title: str, description: str, width: float = WIDTH) -> None:
        self.width, self.height = width, height
        self._title, self._description = title, description
        self._parts: list[str] = []

    def svg(self) -> str:
        """The finished figure, on white paper with rounded corners, readable on a dark page and in print."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" font-family={quoteattr(SANS)}>'
        )
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" rx="8" fill="{PAPER}"/>'
        about = f"<title>{escape(self._title)}</title>\n<desc>{escape(self._description)}</desc>"
        return "\n".join([head, about, paper, *self._parts, "</svg>"]) + "\n"

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        look: Look,
        *,
        dash: str = "",
        radius: float = 5,
        width: float = 1.3,
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="{_n(radius)}" '
            f'fill="{look.fill}" stroke="{look.line}" stroke-width="{width:g}"{dashed}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12.5,
        bold: bool = False,
        mono: bool = False,
        italic: bool = False,
        anchor: str = "start",
        colour: str = INK,
        halo: bool = False,
    ) -> float:
        """Text with its baseline at `y`; its width. `halo` keeps it readable where a wire passes behind."""
        width = text_width(text, size, bold=bold, mono=mono)
        style = "".join(
            part
            for part, wanted in (
                (' font-weight="bold"', bold),
                (f" font-family={quoteattr(MONO)}", mono),
                (' font-style="italic"', italic),
                (f' text-anchor="{anchor}"', anchor != "start"),
                (f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"', halo),
            )
            if wanted
        )
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size:g}" fill="{colour}" '
            f'textLength="{_n(width)}" lengthAdjust="spacingAndGlyphs"{style}>{escape(text)}</text>'
        )
        return width

    def lines(self, x: float, y: float, lines: Sequence[str], *, step: float = 16, **style: object) -> float:
        """Lines of text below each other; the baseline after the last."""
        for line in lines:
            self.text(x, y, line, **style)  # type: ignore[arg-type]
            y += step
        return y

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        look: Look,
        title: str = "",
        lines: Sequence[str] = (),
        *,
        dash: str = "",
        mono: bool = False,
        size: float = 12.5,
        centre: bool = False,
    ) -> None:
        """A box with a bold title and lines below it, from its upper left corner, or in its middle."""
        self.rect(x, y, w, h, look, dash=dash)
        anchor, at = ("middle", x + w / 2) if centre else ("start", x + 10)
        step = size * 1.25
        top = y + (h - step * (len(lines) + bool(title))) / 2 + size * 0.98 if centre else y + size * 1.45
        if title:
            self.text(at, top, title, size=size, bold=True, mono=mono, anchor=anchor)
            top += step
        for line in lines:
            self.text(at, top, line, size=size - 1, anchor=anchor, colour=INK)
            top += step

    def group(self, x: float, y: float, w: float, h: float, look: Look, title: str) -> None:
        """A frame around boxes, with its name on the upper border."""
        self.rect(x, y, w, h, Look(look.line, PAPER), radius=8, width=1.2)
        self.text(x + 12, y + 18, title, size=13, bold=True, colour=look.line)

    def wire(self, points: Sequence[Point], stroke: Stroke, *, head: bool = True, tail: bool = False) -> None:
        """A line through the points, with an arrow head at its end (and its start)."""
        path = list(points)
        size = 6 + stroke.width * 1.5
        if head:
            path[-1] = _towards(path[-1], path[-2], size * 0.8)
        if tail:
            path[0] = _towards(path[0], path[1], size * 0.8)
        dash = f' stroke-dasharray="{stroke.dash}"' if stroke.dash else ""
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in path)
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke.colour}" stroke-width="{stroke.width:g}" '
            f'stroke-linejoin="round"{dash}/>'
        )
        if head:
            self._head(points[-1], points[-2], stroke.colour, size)
        if tail:
            self._head(points[0], points[1], stroke.colour, size)

    def inherits(self, points: Sequence[Point]) -> None:
        """A line with the hollow triangle of inheritance at its end."""
        end, before = points[-1], points[-2]
        self.wire([*points[:-1], _towards(end, before, 10)], INHERITS, head=False)
        self._head(end, before, INHERITS.colour, 11, fill=PAPER)

    def circle(self, x: float, y: float, label: str, look: Look, radius: float = 10, size: float = 12) -> None:
        """A numbered mark."""
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{radius:g}" fill="{look.fill}" stroke="{look.line}" '
            f'stroke-width="1.3"/>'
        )
        self.text(x, y + size * 0.36, label, size=size, bold=True, anchor="middle", colour=INK)

    def mark(self, x: float, y: float, shape: str, colour: str, size: float = 4) -> None:
        """A data point: `circle`, `square` or `triangle`."""
        if shape == "circle":
            self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{size:g}" fill="{colour}"/>')
            return
        half = size * 0.95
        corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
        if shape == "triangle":
            corners = [(0, -size * 1.2), (size * 1.1, half), (-size * 1.1, half)]
        places = " ".join(f"{_n(x + dx)},{_n(y + dy)}" for dx, dy in corners)
        self._parts.append(f'<polygon points="{places}" fill="{colour}"/>')

    def line(self, a: Point, b: Point, colour: str = RULE, width: float = 1, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{_n(a[0])}" y1="{_n(a[1])}" x2="{_n(b[0])}" y2="{_n(b[1])}" '
            f'stroke="{colour}" stroke-width="{width:g}"{dashed}/>'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[Stroke | Look, str]], gap: float = 22) -> None:
        """Samples of strokes and boxes with their meaning, in one row."""
        for sample, meaning in entries:
            if isinstance(sample, Stroke):
                self.wire([(x, y - 4), (x + 30, y - 4)], sample)
            else:
                self.rect(x + 4, y - 11, 22, 14, sample, radius=3)
            x += 36 + self.text(x + 36, y, meaning, size=11.5, colour=MUTED) + gap

    def _head(self, tip: Point, before: Point, colour: str, size: float, fill: str = "") -> None:
        angle = math.atan2(tip[1] - before[1], tip[0] - before[0])
        corners = [tip]
        for side in (-1, 1):
            spread = angle + math.pi + side * 0.42
            corners.append((tip[0] + size * math.cos(spread), tip[1] + size * math.sin(spread)))
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self._parts.append(f'<polygon points="{places}" fill="{fill or colour}" stroke="{colour}" stroke-width="1"/>')


def _towards(point: Point, other: Point, distance: float) -> Point:
    angle = math.atan2(other[1] - point[1], other[0] - point[0])
    return point[0] + distance * math.cos(angle), point[1] + distance * math.sin(angle)


def _n(value: float) -> str:
    """A coordinate, rounded so that it is the same on every machine."""
    return f"{round(value, 1):g}"
