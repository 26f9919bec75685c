"""Axes, lines and bars on a canvas. What is measured, and in which unit, is the caller's business."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import canvas as c
from .canvas import Canvas
from .numbers import significant

GRID = "#e4e8ec"
SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: its name, its colour, and a value for each place on the x axis."""

    name: str
    colour: str
    values: Sequence[float]
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a chart on its canvas, and how values become heights.

    Attributes:
        low, high: the ends of the y axis.
        log: whether the y axis is logarithmic.
    """

    canvas: Canvas
    x: float
    y: float
    w: float
    h: float
    low: float
    high: float
    log: bool = False

    def place(self, index: int, count: int) -> float:
        """The x of the place `index` of `count`, with half a step of margin at both ends."""
        return self.x + self.w * (index + 0.5) / count

    def height(self, value: float) -> float:
        """The y of a value; values beyond the axis lie at its end."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        share = (scale(min(max(value, self.low), self.high)) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.y + self.h * (1 - share)

    def axes(self, title: str, unit: str, labels: Sequence[str], ticks: Sequence[float]) -> None:
        """Title, unit, grid lines at `ticks`, and a label for each place on the x axis."""
        self.canvas.text(self.x - 34, self.y - 32, title, size=13, bold=True)
        self.canvas.text(self.x - 34, self.y - 16, unit, size=11, colour=c.MUTED)
        for tick in ticks:
            y = self.height(tick)
            self.canvas.line((self.x, y), (self.x + self.w, y), GRID, 1)
            self.canvas.text(self.x - 6, y + 4, _tick(tick), size=11, anchor="end", colour=c.MUTED)
        for index, label in enumerate(labels):
            self.canvas.text(
                self.place(index, len(labels)), self.y + self.h + 17, label, size=10.5, anchor="middle", colour=c.MUTED
            )
        self.canvas.line((self.x, self.y + self.h), (self.x + self.w, self.y + self.h), "#8c959f", 1)

    def lines(self, series: Sequence[Series]) -> None:
        """Lines with marks, drawn in order."""
        for number, one in enumerate(series):
            points = [(self.place(i, len(one.values)), self.height(v)) for i, v in enumerate(one.values)]
            self.canvas.wire(points, c.Stroke(one.colour, 2, one.dash), head=False)
            for point in points:
                self.canvas.mark(*point, SHAPES[number % len(SHAPES)], one.colour)

    def bars(self, series: Sequence[Series], spec: Callable[[float], str]) -> None:
        """Bars side by side at each place, each with its value above."""
        count = len(series[0].values)
        width = min(self.w / count / (len(series) + 0.8), 34)
        for number, one in enumerate(series):
            for index, value in enumerate(one.values):
                x = self.place(index, count) + (number - len(series) / 2) * width
                top = self.height(value)
                self.canvas.rect(
                    x + 1, top, width - 2, self.y + self.h - top, c.Look(one.colour, one.colour), radius=1, width=0
                )
                self.canvas.text(x + width / 2, top - 4, spec(value), size=10.5, anchor="middle")

    def limit(self, value: float, label: str) -> None:
        """A dashed line at a value that something is held against."""
        y = self.height(value)
        self.canvas.line((self.x, y), (self.x + self.w, y), c.VERMILLION, 1.3, "6 4")
        self.canvas.text(self.x + 6, y - 5, label, size=11, colour="#a84300")


def key(canvas: Canvas, x: float, y: float, series: Sequence[Series]) -> None:
    """Names of lines, each after a sample of it."""
    for number, one in enumerate(series):
        canvas.wire([(x, y - 4), (x + 28, y - 4)], c.Stroke(one.colour, 2, one.dash), head=False)
        canvas.mark(x + 14, y - 4, SHAPES[number % len(SHAPES)], one.colour)
        x += 36 + canvas.text(x + 34, y, one.name, size=11.5) + 20


def decades(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Ends and ticks of a logarithmic axis: whole powers of ten around all values."""
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    return 10.0**low, 10.0**high, [10.0**power for power in range(low, high + 1)]


def size_label(nbytes: int) -> str:
    """`64 KiB`, `4 MiB`: whole binary units."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def _tick(value: float) -> str:
    return f"{value:g}" if value < 1000 else significant(value, 1)
