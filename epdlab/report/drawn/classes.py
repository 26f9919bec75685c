"""The classes of upstream's store directory, who makes them for which job, and the way of the bytes of each job."""

from __future__ import annotations

from .. import canvas as c
from ..canvas import Canvas, Look, Stroke

HEIGHT = 566
PATHS = 372
MAKES = Stroke(c.INK, 1.4)
COPY = Stroke(c.MUTED, 2.2)
OUTSIDE = Look("#8c959f", c.PAPER)


def draw() -> str:
    """The SVG of the classes and the data paths."""
    canvas = Canvas(
        HEIGHT, "Classes and data paths of the store directory", "Two jobs with one base class and one client library."
    )
    for x, look, title in (
        (12, c.PREFILL, "Job 1: a tier of the KV cache"),
        (446, c.ENCODER, "Job 2: a cache of embeddings"),
    ):
        canvas.rect(x, 10, 422, 200, Look(look.line, look.fill), radius=8, width=1)
        canvas.text(x + 14, 31, title, size=13.5, bold=True)
    _kv_tier(canvas)
    _embedding_cache(canvas)
    _shared(canvas)
    _data_paths(canvas)
    entries = ((MAKES, "makes or uses"), (c.OBJECT, "object bytes, no copy in between"), (COPY, "copy"), (c.RPC, "RPC"))
    canvas.legend(18, HEIGHT - 16, entries)
    canvas.inherits([(560, HEIGHT - 20), (592, HEIGHT - 20)])
    canvas.text(600, HEIGHT - 16, "inherits", size=11.5, colour=c.MUTED)
    canvas.text(864, HEIGHT - 16, "dashed: outside the directory", size=11.5, colour=c.MUTED, anchor="end")
    return canvas.svg()


def _class(
    canvas: Canvas, x: float, y: float, w: float, name: str, under: str = "", *, inside: bool = True, h: float = 42
) -> None:
    look = Look(c.STORE.line, c.STORE.fill) if inside else OUTSIDE
    canvas.box(x, y, w, h, look, name, [under] if under else [], dash="" if inside else "4 3", centre=True, size=12)


def _kv_tier(canvas: Canvas) -> None:
    _class(canvas, 26, 44, 118, "HiRadixCache", "radix tree", inside=False)
    _class(canvas, 166, 44, 122, "HiCacheController", "", inside=False)
    _class(canvas, 310, 44, 110, "backend factory", "", inside=False)
    canvas.wire([(144, 65), (166, 65)], MAKES)
    canvas.wire([(288, 65), (310, 65)], MAKES)
    _class(canvas, 26, 112, 118, "HiCacheStorage", "interface", inside=False)
    _class(canvas, 234, 112, 186, "MooncakeStore", "every rank with HiCache")
    canvas.wire([(365, 86), (365, 112)], MAKES)
    canvas.inherits([(234, 133), (144, 133)])
    _class(canvas, 26, 164, 204, "MooncakeHostTensorAllocator", h=36)
    canvas.text(240, 187, "memory of the host KV pool", size=11.5, colour=c.MUTED)


def _embedding_cache(canvas: Canvas) -> None:
    _class(canvas, 460, 44, 118, "MMEncoder", "every rank", inside=False)
    _class(canvas, 640, 44, 214, "EmbeddingCacheController", "pools, entries, I/O thread")
    canvas.wire([(578, 65), (640, 65)], MAKES)
    canvas.text(609, 58, "if on", size=11, colour=c.MUTED, anchor="middle")
    _class(canvas, 460, 112, 186, "MooncakeEmbeddingStore", "thin client")
    canvas.wire([(700, 86), (700, 133), (646, 133)], MAKES)
    _class(canvas, 712, 112, 142, "page allocator, LRU", "range-aware")
    canvas.wire([(783, 86), (783, 112)], MAKES)
    canvas.text(496, 187, "switched on by --enable-mm-global-cache, off by default", size=11.5, colour=c.MUTED)


def _shared(canvas: Canvas) -> None:
    _class(canvas, 340, 234, 200, "MooncakeBaseStore", "client, configuration, registration")
    canvas.inherits([(402, 154), (402, 234)])
    canvas.inherits([(480, 154), (480, 234)])
    _class(canvas, 90, 234, 190, "MooncakeStoreConfig", "extra options, file, environment")
    canvas.wire([(340, 255), (280, 255)], MAKES)
    _class(canvas, 322, 306, 236, "MooncakeDistributedStore", "client library of the Mooncake wheel", inside=False)
    canvas.wire([(440, 276), (440, 306)], MAKES)
    canvas.box(654, 306, 200, 42, c.STORE, "mooncake_master", ["keys and places, no bytes"], centre=True, size=12)
    canvas.wire([(558, 327), (654, 327)], c.RPC)


def _data_paths(canvas: Canvas) -> None:
    canvas.rect(12, PATHS, 856, 162, Look(c.RULE, "#fafbfc"), radius=8, width=1)
    canvas.text(26, PATHS + 22, "Where the bytes go", size=13.5, bold=True)
    y = PATHS + 44
    for x, w, look, title, lines in (
        (26, 112, c.PREFILL, "KV cache", ["on the GPU"]),
        (212, 126, c.PREFILL, "host KV pool", ["registered once"]),
        (382, 116, c.STORE, "segments", ["of the donors"]),
        (572, 128, c.ENCODER, "host pool", ["vision, audio pages;", "registered once"]),
        (762, 96, c.ENCODER, "embedding", ["on the GPU"]),
    ):
        canvas.box(x, y, w, 70, look, title, lines, centre=True, size=12)
    middle = y + 35
    canvas.wire([(138, middle), (212, middle)], COPY, tail=True)
    canvas.wire([(700, middle), (762, middle)], COPY, tail=True)
    canvas.wire([(338, middle), (382, middle)], c.OBJECT, tail=True)
    canvas.wire([(498, middle), (572, middle)], c.OBJECT, tail=True)
    for x, words in (
        (175, ("HiCache copies pages", "down and up")),
        (360, ("one page, one or two", "objects; zero copy")),
        (535, ("one embedding, one object;", "one pointer a run")),
        (731, ("side stream down,", "assembly up")),
    ):
        canvas.lines(x, y + 90, words, size=11.5, anchor="middle", colour=c.MUTED, step=15)
