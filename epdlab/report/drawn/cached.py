"""A cached encode with one hit and one miss: who works when, where the ranks agree, and how a failed hit falls back."""

from __future__ import annotations

from collections.abc import Sequence

from .. import canvas as c
from ..canvas import Canvas, Look

HEIGHT = 488
LEFT = 112
ROWS = {"rank 0": 92, "I/O thread": 178, "other ranks": 252, "store": 338}
BAR = 44
EXCHANGE = Look(c.INK, "#ffffff")
FALLBACK = Look(c.VERMILLION, "#fdf1ea")

Block = tuple[str, float, float, Look, Sequence[str]]
BLOCKS: tuple[Block, ...] = (
    ("rank 0", 122, 72, c.ENCODER, ("look up:", "pool, store")),
    ("rank 0", 250, 60, c.ENCODER, ("pages for", "the hit")),
    ("rank 0", 322, 128, c.ENCODER, ("vision tower:", "the miss only")),
    ("rank 0", 462, 62, c.PLAIN, ("wait, at", "most 60 s")),
    ("rank 0", 586, 76, FALLBACK, ("vision tower:", "failed hits")),
    ("rank 0", 672, 62, c.ENCODER, ("stage the", "miss")),
    ("rank 0", 746, 66, c.ENCODER, ("assemble", "on GPU")),
    ("I/O thread", 322, 150, c.STORE, ("batch GET", "into the hit's pages")),
    ("I/O thread", 760, 104, c.STORE, ("PUT of the miss",)),
    ("other ranks", 322, 128, c.ENCODER, ("vision tower:", "the miss only")),
    ("other ranks", 586, 76, FALLBACK, ("vision tower:", "failed hits")),
    ("store", 134, 60, c.STORE, ("master",)),
    ("store", 322, 150, c.STORE, ("donor's segment",)),
    ("store", 760, 104, c.STORE, ("donor's segment",)),
)
AGREEMENTS = ((212, "mask of hits"), (540, "items to recompute"))


def draw() -> str:
    """The SVG of the cached encode."""
    canvas = Canvas(
        HEIGHT,
        "A cached encode",
        "Time runs to the right; rank 0 does the cache's work, all ranks run the vision tower.",
    )
    _lanes(canvas)
    for lane, x, w, look, lines in BLOCKS:
        top = ROWS[lane] - BAR / 2
        canvas.rect(x, top, w, BAR, look, dash="5 3" if look is FALLBACK else "")
        canvas.lines(x + w / 2, ROWS[lane] + (4 if len(lines) == 1 else -3), lines, size=11.5, anchor="middle", step=15)
    for x, label in AGREEMENTS:
        _agreement(canvas, x, label)
    _bytes(canvas)
    _states(canvas)
    entries = (
        (c.OBJECT, "object bytes"),
        (c.RPC, "RPC"),
        (c.LOCAL, "hand-over in the process"),
        (FALLBACK, "only if a hit failed"),
    )
    canvas.legend(18, HEIGHT - 16, entries)
    return canvas.svg()


def _lanes(canvas: Canvas) -> None:
    canvas.wire([(LEFT, 34), (868, 34)], c.INHERITS)
    canvas.text(LEFT, 26, "time", size=11.5, colour=c.MUTED)
    canvas.text(
        170,
        26,
        "/encode has answered already: all of this runs in the background, for video only",
        size=11.5,
        colour=c.MUTED,
    )
    for name, y in ROWS.items():
        canvas.text(16, y + 4, name, bold=True)
        canvas.line((LEFT, y), (868, y), c.RULE, 1)


def _agreement(canvas: Canvas, x: float, label: str) -> None:
    top, bottom = ROWS["rank 0"], ROWS["other ranks"]
    canvas.wire([(x + 14, top + BAR / 2 - 4), (x + 14, bottom)], c.Stroke(c.INK, 1.8))
    canvas.circle(x + 14, top, "=", EXCHANGE, radius=12)
    canvas.circle(x + 14, bottom, "=", EXCHANGE, radius=12)
    canvas.text(x + 14, bottom + 32, "broadcast:", size=11.5, anchor="middle", colour=c.MUTED)
    canvas.text(x + 14, bottom + 47, label, size=11.5, anchor="middle", colour=c.MUTED)


def _bytes(canvas: Canvas) -> None:
    rank, thread, store = (ROWS[name] for name in ("rank 0", "I/O thread", "store"))
    half = BAR / 2
    canvas.wire([(150, rank + half), (150, store - half)], c.RPC, tail=True)
    canvas.wire([(290, rank + half), (290, thread), (322, thread)], c.LOCAL)
    canvas.wire([(466, store - half), (466, thread + half)], c.OBJECT)
    canvas.wire([(472, thread), (494, thread), (494, rank + half)], c.LOCAL)
    canvas.wire([(703, rank + half), (703, thread), (760, thread)], c.LOCAL)
    canvas.wire([(812, thread + half), (812, store - half)], c.OBJECT)


def _states(canvas: Canvas) -> None:
    top = HEIGHT - 104
    for number, (name, bars) in enumerate(
        (
            (
                "entry, hit",
                ((290, 182, "FILLING", c.PLAIN), (472, 340, "READY, not pinned: staging may evict it", c.DONE)),
            ),
            ("entry, miss", ((672, 62, "FILLING", c.PLAIN), (734, 134, "READY, pinned", c.DONE))),
        )
    ):
        y = top + number * 32
        canvas.text(16, y + 5, name, bold=True)
        for x, w, label, look in bars:
            canvas.box(x, y - 12, w, 24, look, "", [label], centre=True)
