"""When /encode answers: after the vision tower for images and audio, before it for video, and what ranks wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import canvas as c
from ..canvas import Canvas, Look

LEFT, RIGHT = 150, 864
LANES = ("rank 0", "event loop", "GPU", "rank 1")
LANE, HALF = 48, 13
PANEL = 40 + LANE * len(LANES) + 34
GPU = Look(c.GREEN, "#e0f3ed")
BLOCKED = Look(c.INK, "#d8dde3")


@dataclass(frozen=True, slots=True)
class Panel:
    """One path.

    Attributes:
        bars: lane, from, width, look, text.
        calls: time, from lane, to lane, label.
        note: what follows from it.
    """

    title: str
    bars: Sequence[tuple[str, float, float, Look, str]]
    calls: Sequence[tuple[float, str, str, str]]
    note: str


BATCHED = Panel(
    "Images and audio: the batched path",
    (
        ("event loop", 186, 90, c.ENCODER, "preprocess"),
        ("event loop", 276, 196, BLOCKED, "blocked by the tower"),
        ("GPU", 286, 150, GPU, "vision tower"),
        ("GPU", 436, 36, c.PLAIN, "copy"),
        ("rank 0", 502, 92, c.PREFILL, "set aside"),
        ("rank 1", 520, 92, c.PREFILL, "set aside"),
        ("event loop", 642, 190, c.WRITE_LOOK, "write, ack: both ranks"),
    ),
    (
        (166, "rank 0", "event loop", "/encode"),
        (206, "rank 1", "event loop", "/encode, folded"),
        (486, "event loop", "rank 0", "size"),
        (502, "event loop", "rank 1", "size"),
        (606, "rank 0", "event loop", "/send"),
        (626, "rank 1", "event loop", "/send"),
    ),
    "The answer comes after the tower. The embedding lies in host memory; the first /send registers it.",
)
VIDEO = Panel(
    "Video: the asynchronous path",
    (
        ("event loop", 186, 90, c.ENCODER, "preprocess"),
        ("event loop", 310, 226, BLOCKED, "blocked by the tower"),
        ("GPU", 310, 190, GPU, "vision tower"),
        ("GPU", 500, 36, c.PLAIN, "region"),
        ("rank 0", 318, 92, c.PREFILL, "set aside"),
        ("rank 1", 568, 92, c.PREFILL, "set aside"),
        ("event loop", 566, 112, c.WRITE_LOOK, "write, ack: 0"),
        ("event loop", 700, 112, c.WRITE_LOOK, "write, ack: 1"),
    ),
    (
        (166, "rank 0", "event loop", "/encode"),
        (206, "rank 1", "event loop", "/encode, folded"),
        (294, "event loop", "rank 0", "size"),
        (424, "rank 0", "event loop", "/send waits"),
        (550, "event loop", "rank 1", "size"),
        (672, "rank 1", "event loop", "/send"),
    ),
    "The size comes from the grid. One rank overlaps its allocation with the tower, its siblings are answered after "
    "it; the embedding stays on the GPU.",
)


def draw() -> str:
    """The SVG of both paths, one above the other."""
    canvas = Canvas(
        2 * PANEL + 62,
        "Two paths through /encode",
        "Time runs to the right: the batched path above, the asynchronous video path below.",
    )
    for number, panel in enumerate((BATCHED, VIDEO)):
        _panel(canvas, panel, 12 + number * (PANEL + 8))
    y = 2 * PANEL + 46
    canvas.legend(
        18,
        y,
        (
            (c.HTTP, "HTTP"),
            (c.PREFILL, "landing memory"),
            (c.WRITE_LOOK, "writes and acks"),
            (BLOCKED, "the loop serves no /send, no ack, no probe"),
        ),
    )
    return canvas.svg()


def _panel(canvas: Canvas, panel: Panel, top: float) -> None:
    canvas.rect(8, top, 864, PANEL, Look(c.RULE, "#fafbfc"), radius=8, width=1)
    canvas.text(20, top + 22, panel.title, size=13.5, bold=True)
    ys = {name: top + 54 + number * LANE for number, name in enumerate(LANES)}
    for name, y in ys.items():
        label = "encoder: loop" if name == "event loop" else "encoder: GPU" if name == "GPU" else f"prefill {name}"
        canvas.text(20, y + 4, label, bold=True, size=12)
        canvas.line((LEFT, y), (RIGHT, y), c.RULE, 1)
    for name, start, width, look, text in panel.bars:
        canvas.rect(start, ys[name] - HALF, width, 2 * HALF, look, radius=3)
        canvas.text(start + width / 2, ys[name] + 4, text, size=11.5, anchor="middle")
    for time, sender, receiver, label in panel.calls:
        down = 1 if ys[receiver] > ys[sender] else -1
        first, last = _edge(panel, time, sender, ys[sender], down), _edge(panel, time, receiver, ys[receiver], -down)
        canvas.wire([(time, first), (time, last)], c.HTTP)
        rank = sender if sender.startswith("rank") else receiver
        reply = sender == "event loop"
        y = ys[rank] + (26 if rank == "rank 0" else -18)
        canvas.text(time + (-6 if reply else 6), y, label, size=11, anchor="end" if reply else "start", halo=True)
    canvas.text(20, top + PANEL - 12, panel.note, size=12, colour=c.MUTED)


def _edge(panel: Panel, time: float, lane: str, y: float, towards: int) -> float:
    """Where a call leaves or meets a lane: at the border of the bar that lies there, if one does."""
    covered = any(name == lane and start <= time <= start + width for name, start, width, _, _ in panel.bars)
    return y + towards * HALF if covered else y
