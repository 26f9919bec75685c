"""What the marks of a figure mean, and the breaches it shows, in words below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import canvas as c
from .breach import INVARIANTS, Breach
from .canvas import Canvas

MAX_BREACHES = 12

WIRES: dict[str, tuple[str, float, str, c.Head]] = {
    "http": (c.HTTP, 1.3, "solid", "normal"),
    "reply": (c.HTTP, 0.9, "solid", "vee"),
    "ack": (c.ACK, 1.4, "dashed", "normal"),
    "write": (c.WRITE, 3.6, "solid", "normal"),
    "late": (c.WRITE, 3.6, "dotted", "normal"),
}
"""How each kind of message is drawn: colour, width, style, head."""


def wires(page: Canvas, y: float, words: Sequence[tuple[str, str]]) -> float:
    """Samples of the lines, as (kind of message, its words); where they end."""
    x = 20.0
    for name, label in words:
        colour, width, style, head = WIRES[name]
        page.line(x, y, x + 30, y, colour=colour, width=width, style=style, head=head)
        page.text(x + 35, y, label, size=8.5)
        x += 44 + c.text_width(label, 8.5)
    return x


def marks(page: Canvas, x: float, y: float) -> None:
    """Samples of the marks a step can carry."""
    samples = (
        ("diamond", c.HELD, 9.0, "held"),
        ("triangle", c.SLOT, 9.0, "faulted"),
        ("square", c.ALERT, 6.0, "failed"),
    )
    for shape, fill, size, text in samples:
        page.mark(x, y, shape, fill, size=size)
        page.text(x + 8, y, text, size=8.5)
        x += 18 + c.text_width(text, 8.5)


def breaches(page: Canvas, y: float, shown: Iterable[Breach], *, messages: bool = True) -> float:
    """Each broken invariant with its sentence and, if wanted, what happened; where the list ends."""
    by_key: dict[str, list[Breach]] = {}
    for breach in shown:
        by_key.setdefault(breach.invariant, []).append(breach)
    for key, found in by_key.items():
        page.badge(26, y, found[0].number)
        page.text(38, y, f"[{key}] {INVARIANTS[key].sentence}", bold=True, size=9)
        for text in _messages(found) if messages else []:
            y += 13
            page.text(38, y, text, size=8.5, colour=c.ALERT)
        y += 18
    return y


def _messages(found: Sequence[Breach]) -> list[str]:
    more = len(found) - MAX_BREACHES
    return [breach.message for breach in found[:MAX_BREACHES]] + ([f"and {more} more"] if more > 0 else [])
