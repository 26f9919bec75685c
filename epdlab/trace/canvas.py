"""A page of fixed positions, written as Graphviz DOT for `neato -n2`: the same calls give the same bytes.

Owns the palette and the fonts of every figure. Coordinates are points, from the top left, downwards. Which events
become which marks is the drawings' business; turning DOT into SVG or PNG is `render`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

# Okabe and Ito's colours, which readers with any common colour blindness can tell apart.
HTTP = "#0072B2"
ACK = "#009E73"
WRITE = "#E69F00"
REGION = "#56B4E9"
SLOT = "#CC79A7"
BREACH = "#D55E00"
HELD = "#F0E442"
PALETTE = {"http": HTTP, "ack": ACK, "write": WRITE, "region": REGION, "slot": SLOT, "breach": BREACH, "held": HELD}

INK = "#1B1B1B"
ALERT = "#B34700"  # BREACH, dark enough for text on white
MUTED = "#5F6368"
GRID = "#C9CCD1"
PALE = "#F3F4F6"
TINT = "#FBE7DC"

SIZE = 9.5
CHAR = 0.59  # width of a character, in font sizes; wide enough for every common sans-serif

Side = Literal["l", "c", "r"]
Head = Literal["normal", "vee", "none", "dot", "odot", "tee"]


def text_width(text: str, size: float = SIZE) -> float:
    """An upper bound of a text's width, in points."""
    return (len(text) + 0.8) * size * CHAR


@dataclass
class Canvas:
    """A page of `width` x `height` points.

    Attributes:
        title: what a screen reader says of the figure.
    """

    title: str
    width: float
    height: float = 0.0
    _lines: list[str] = field(default_factory=list)
    _count: int = 0

    def text(
        self,
        x: float,
        y: float,
        text: str,
        side: Side = "l",
        *,
        size: float = SIZE,
        colour: str = INK,
        bold: bool = False,
        ground: str | None = None,
        tip: str = "",
    ) -> None:
        """One line of text whose left end, centre or right end is at x, and whose middle is at y."""
        if not text:
            return
        width = text_width(text, size) * (1.06 if bold else 1.0)
        centre = {"l": x + width / 2, "c": x, "r": x - width / 2}[side]
        more = {"fontname": "Helvetica-Bold"} if bold else {}
        if ground is not None:
            more |= {"style": "filled", "fillcolor": ground, "shape": "box", "penwidth": "0"}
        label = _escaped(text) + {"l": "\\l", "c": "", "r": "\\r"}[side]
        self._node(centre, y, width, size * 1.5, label, fontsize=size, fontcolor=colour, tip=tip, **more)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "white",
        line: str = INK,
        text: str = "",
        colour: str = INK,
        bold: bool = False,
        size: float = SIZE,
        round_: bool = False,
        dashed: bool = False,
        striped: bool = False,
        pen: float = 0.8,
        tip: str = "",
        name: str = "",
    ) -> None:
        """A rectangle, its top left corner at x, y. `striped` hatches it in `fill` on white; `name` is for `ends`."""
        styles = ["striped" if striped else "filled"] + ["rounded"] * round_ + ["dashed"] * dashed
        paint = ":".join([fill, "white"] * max(2, round(width / 7))) if striped else fill
        more = {"fontname": "Helvetica-Bold"} if bold else {}
        self._node(
            x + width / 2,
            y + height / 2,
            width,
            height,
            text,
            shape="box",
            style=",".join(styles),
            fillcolor=paint,
            color=line,
            fontcolor=colour,
            fontsize=size,
            penwidth=pen,
            tip=tip,
            name=name,
            **more,
        )

    def mark(
        self,
        x: float,
        y: float,
        shape: str,
        fill: str,
        *,
        line: str = INK,
        size: float = 6.0,
        text: str = "",
        colour: str = "white",
        tip: str = "",
    ) -> None:
        """A small symbol (`circle`, `diamond`, `triangle`, `square`, `octagon`) centred at x, y."""
        self._node(
            x,
            y,
            size,
            size,
            text,
            shape=shape,
            style="filled",
            fillcolor=fill,
            color=line,
            penwidth=0.9,
            fontsize=size * 0.72,
            fontcolor=colour,
            fontname="Helvetica-Bold",
            tip=tip,
        )

    def badge(self, x: float, y: float, number: int, tip: str = "") -> None:
        """An invariant's number in a red disc."""
        self.mark(x, y, "circle", ALERT, line="white", size=12.5, text=str(number), tip=tip)

    def line(
        self,
        x0: float,
        y0: float,
        x1: float,
        y1: float,
        *,
        colour: str = INK,
        width: float = 1.0,
        style: str = "solid",
        head: Head = "none",
        tip: str = "",
        ends: tuple[str, str] | None = None,
    ) -> None:
        """A straight line, with an arrow head at its end. `ends` names the boxes it joins, for readers of the DOT."""
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-6)
        if head == "normal":  # the pen widens the head beyond its point
            x1, y1 = x1 - (x1 - x0) * width / length, y1 - (y1 - y0) * width / length
        reach = 0.0 if head == "none" else {"dot": 4.0, "odot": 4.0, "tee": 1.0}.get(head, 5.5 + 0.8 * width)
        bx, by = x1 - (x1 - x0) * reach / length, y1 - (y1 - y0) * reach / length
        thirds = [(x0 + (bx - x0) * k / 3, y0 + (by - y0) * k / 3) for k in range(4)]
        pos = " ".join(self._at(x, y) for x, y in thirds)
        if head != "none":
            pos = f"e,{self._at(x1, y1)} {pos}"
        tail, tip_node = ends or ("_page", "_page")
        attributes = _attributes(
            pos=pos,
            color=colour,
            penwidth=width,
            style=style,
            arrowhead=head,
            arrowsize=0.55 + 0.08 * width,
            dir="none" if head == "none" else "forward",
            tooltip=_escaped(tip) or " ",
        )
        self._lines.append(f"{_quoted(tail)} -> {_quoted(tip_node)} {attributes}")

    def dot(self) -> str:
        """The page as DOT. Lines lie under nodes; nodes lie in the order they were drawn."""
        corners = [("_page", 0.0, 0.0), ("_corner", self.width, self.height)]
        frame = [f'{name} [style=invis, shape=point, width=0, pos="{self._at(x, y)}"]' for name, x, y in corners]
        body = "\n  ".join([*frame, *self._lines])
        head = (
            f'graph [label="", bgcolor=white, pad=0.06, outputorder=edgesfirst, comment={_quoted(self.title)}]\n'
            f'  node [shape=none, fixedsize=true, margin=0, fontname=Helvetica, fontsize={SIZE:g}, label=""]\n'
            "  edge [arrowsize=0.6]"
        )
        return f"digraph trace {{\n  {head}\n  {body}\n}}\n"

    def _node(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        label: str,
        *,
        tip: str = "",
        name: str = "",
        **more: object,
    ) -> None:
        self._count += 1
        attributes = _attributes(
            pos=self._at(x, y), width=width / 72, height=height / 72, label=label, tooltip=_escaped(tip) or " ", **more
        )
        self._lines.append(f"{_quoted(name or f'_{self._count}')} {attributes}")

    def _at(self, x: float, y: float) -> str:
        return f"{_number(x)},{_number(-y)}"


def _number(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _escaped(text: str) -> str:
    """Text in which Graphviz sees no escape of its own."""
    return text.replace("\\", "\\\\")


def _quoted(text: object) -> str:
    return '"' + str(text).replace("\n", " ").replace('"', '\\"') + '"'


def _attributes(**values: object) -> str:
    words = (f"{key}={_quoted(f'{v:.4g}' if isinstance(v, float) else v)}" for key, v in values.items())
    return f"[{', '.join(words)}]"


def columns(count: int, left: float, right: float) -> Sequence[float]:
    """The centres of `count` equal columns between two edges."""
    step = (right - left) / max(count, 1)
    return [left + step * (k + 0.5) for k in range(count)]
