"""One request through all roles: which message or byte goes when, how often, and who works in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import canvas as c
from ..canvas import Canvas, Look, Stroke

LANES: tuple[tuple[str, str, float, Look], ...] = (
    ("client", "", 72, c.PLAIN),
    ("tokenizer", "prefill host", 262, c.PREFILL),
    ("prefill ranks", "a process each", 452, c.PREFILL),
    ("encode server", "rank 0", 664, c.ENCODER),
    ("decode", "", 810, c.DECODE),
)
CLIENT, TOKENIZER, RANKS, ENCODER, DECODE = (x for _, _, x, _ in LANES)
TOP, MESSAGE, WORK, PHASE = 62, 40, 50, 16


@dataclass(frozen=True, slots=True)
class Phase:
    """A band behind the rows that follow."""

    title: str
    lines: Sequence[str] = ()
    height = PHASE


@dataclass(frozen=True, slots=True)
class Message:
    """An arrow between two lanes; `times` says how often it goes for one request."""

    start: float
    end: float
    stroke: Stroke
    label: str
    times: str = ""
    height = MESSAGE


@dataclass(frozen=True, slots=True)
class Work:
    """Something that lanes do by themselves, at the same time."""

    boxes: Sequence[tuple[float, Look, tuple[str, str]]]
    height = WORK


ROWS: tuple[Phase | Message | Work, ...] = (
    Phase("Plan"),
    Message(CLIENT, TOKENIZER, c.HTTP, "request, media"),
    Work([(TOKENIZER, c.PREFILL, ("split the items into parts,", "one encoder for each part"))]),
    Message(TOKENIZER, RANKS, c.LOCAL, "request and plan", "N"),
    Phase("Phase 1: learn the size", ("before landing memory", "is set aside")),
    Message(RANKS, ENCODER, c.HTTP, "POST /encode: what to encode", "N × P"),
    Work([(ENCODER, c.ENCODER, ("siblings folded; preprocess;", "vision tower once a part"))]),
    Message(ENCODER, RANKS, c.HTTP, "reply: bytes, rows, width", "N × P"),
    Phase("Phase 2: offer an address", ("the receiver allocates,", "the encoder writes")),
    Work([(RANKS, c.PREFILL, ("set landing memory aside,", "one area for all parts"))]),
    Message(RANKS, ENCODER, c.HTTP, "POST /send: session, address", "N × P"),
    Work([(ENCODER, c.ENCODER, ("region over the embedding,", "registered by the first /send"))]),
    Message(ENCODER, RANKS, c.WRITE, "one-sided write of the embedding", "N × P"),
    Phase("Phase 3: tell and release", ("the ack is the only thing", "that says: it has landed")),
    Message(ENCODER, RANKS, c.ACK, "ack: metadata, no payload", "N × P"),
    Work(
        [
            (RANKS, c.PREFILL, ("all parts acked on all ranks:", "language model, prefill")),
            (ENCODER, c.ENCODER, ("after the last ack:", "deregister, drop embedding")),
        ]
    ),
    Phase("Decode"),
    Message(RANKS, DECODE, c.WRITE, "KV cache", "N"),
    Message(DECODE, CLIENT, c.HTTP, "tokens, by way of the front end"),
)


def draw() -> str:
    """The SVG of the request, phase by phase."""
    bottom = TOP + sum(row.height for row in ROWS) + 14
    canvas = Canvas(
        bottom + 40, "One request through all roles", "Messages of one request between five roles, in four phases."
    )
    _bands(canvas, bottom)
    for name, under, x, look in LANES:
        canvas.line((x, 54), (x, bottom), "#b9c1ca", 1.3)
        canvas.box(x - 58, 12, 116, 40, look, name, [under] if under else [], centre=True, size=12)
    y = float(TOP)
    for row in ROWS:
        y += row.height
        if isinstance(row, Work):
            for x, look, lines in row.boxes:
                canvas.rect(x - 88, y - 34, 176, 38, look)
                canvas.lines(x, y - 18, lines, step=15, size=11.5, anchor="middle")
        elif isinstance(row, Message):
            _message(canvas, row, y)
    entries = ((c.HTTP, "HTTP"), (c.LOCAL, "inside the host"), (c.WRITE, "one-sided write"), (c.ACK, "ZMQ"))
    canvas.legend(16, bottom + 25, entries, gap=18)
    canvas.text(
        864, bottom + 25, "N: prefill TP ranks. P: parts of the request.", size=11.5, anchor="end", colour=c.MUTED
    )
    return canvas.svg()


def _bands(canvas: Canvas, bottom: float) -> None:
    y = float(TOP)
    tops: list[tuple[float, Phase]] = []
    for row in ROWS:
        if isinstance(row, Phase):
            tops.append((y + 10 * bool(tops), row))
        y += row.height
    ends = [top for top, _ in tops[1:]] + [bottom]
    for number, ((top, phase), end) in enumerate(zip(tops, ends, strict=True)):
        fill = "#f6f8fa" if number % 2 == 0 else c.PAPER
        canvas.rect(8, top, 864, end - top, Look(fill, fill), radius=4)
        if phase.lines:
            canvas.text(CLIENT + 14, top + 22, phase.title, bold=True)
            canvas.lines(CLIENT + 14, top + 40, phase.lines, size=11.5, colour=c.MUTED, step=15)


def _message(canvas: Canvas, row: Message, y: float) -> None:
    canvas.wire([(row.start, y), (row.end, y)], row.stroke)
    canvas.text((row.start + row.end) / 2, y - 8, row.label, size=12, anchor="middle", halo=True)
    if row.times:
        canvas.text(max(row.start, row.end) + 10, y + 4, row.times, size=11.5, colour=c.MUTED)
