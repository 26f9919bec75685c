"""The encoder's host pool: its pages, runs and entries, made by the lab's own bookkeeping, and their states."""

from __future__ import annotations

from ...pages import TRANSITIONS, Entry, EntryState, PagePool, Run
from .. import canvas as c
from ..canvas import Canvas, Look

PAGES, PAGE = 24, 256 * 1024
HEIGHT = 464
LEFT, TOP, CELL = 20, 62, 35
LOOKS = {"A": c.ENCODER, "B": c.PREFILL, "C": c.STORE, "D": c.DONE, "E": c.DECODE}
FREE = Look("#c5ccd3", c.PAPER)


def scene() -> PagePool:
    """Entries come and go until one of them, C, has to take several runs; A is pinned by a reader, C is filling."""
    pool = PagePool(PAGES, PAGE)
    entries = {}
    for name, pages in (("A", 5), ("x", 3), ("B", 4), ("y", 3), ("E", 4)):
        entries[name] = _filled(pool, name, pages * PAGE - 20_000)
        pool.unpin(entries[name])
    pool.evict(entries["x"])
    pool.evict(entries["y"])
    pool.pin(entries["A"])
    pool.unpin(_filled(pool, "D", 2 * PAGE - 90_000))
    pool.reserve("C", 7 * PAGE - 60_000)
    return pool


def eviction_order() -> list[str]:
    """Whom the pool of `scene` would evict, one after the other."""
    pool, order = scene(), []
    while (entry := pool.victim((pool.free_pages + 1) * PAGE)) is not None and pool.evict(entry):
        order.append(entry.key)
    return order


def _filled(pool: PagePool, name: str, nbytes: int) -> Entry:
    entry = pool.reserve(name, nbytes)
    if entry is None:
        raise AssertionError(f"no room for {name} in the figure's pool; choose other sizes")
    pool.ready(entry)
    return entry


def draw() -> str:
    """The SVG of the pool, its entries, and the states of one."""
    pool = scene()
    canvas = Canvas(
        HEIGHT,
        "The host pool",
        "A pool of 24 pages with four entries, one of them in two runs, and the states of an entry.",
    )
    canvas.text(LEFT, 28, "One pool: page-locked host memory, registered once", size=13.5, bold=True)
    canvas.text(
        LEFT, 48, f"{PAGES} pages of {PAGE // 1024} KiB here; an entry owns whole pages", size=11.5, colour=c.MUTED
    )
    _pages(canvas, pool)
    _entries(canvas, pool)
    _queue(canvas, eviction_order())
    _states(canvas)
    return canvas.svg()


def _pages(canvas: Canvas, pool: PagePool) -> None:
    owners = {page: entry for entry in pool.entries for run in entry.runs for page in range(run.start, run.end)}
    for page in range(PAGES):
        entry = owners.get(page)
        look = LOOKS[entry.key] if entry else FREE
        dash = "4 3" if entry and entry.state is EntryState.FILLING else ""
        canvas.rect(LEFT + page * CELL, TOP, CELL - 3, 40, look, dash=dash, radius=3)
        canvas.text(LEFT + page * CELL + 16, TOP + 25, entry.key if entry else "", bold=True, anchor="middle")
        canvas.text(LEFT + page * CELL + 16, TOP + 54, str(page), size=10, anchor="middle", colour=c.MUTED)


def _entries(canvas: Canvas, pool: PagePool) -> None:
    y = TOP + 104
    canvas.text(LEFT, y - 22, "entries", bold=True)
    for title, x in (("pages", 150), ("state", 330), ("pins", 410), ("one pointer and size for each run", 470)):
        canvas.text(x, y - 22, title, size=11.5, colour=c.MUTED)
    for number, entry in enumerate(sorted(pool.entries, key=lambda entry: entry.key)):
        top = y + number * 27
        canvas.rect(
            LEFT, top - 13, 84, 20, LOOKS[entry.key], radius=3, dash="4 3" if entry.state is EntryState.FILLING else ""
        )
        canvas.text(LEFT + 42, top + 2, f"entry {entry.key}", anchor="middle", bold=True, size=12)
        runs = ", ".join(_span(run) for run in entry.runs)
        canvas.text(150, top + 2, runs, size=12)
        canvas.text(330, top + 2, entry.state.name, size=12)
        canvas.text(410, top + 2, "writer" if entry.state is EntryState.FILLING else str(entry.pins), size=12)
        pieces = " + ".join(f"{length / 1024:,.0f} KiB" for _, length in pool.extents(entry))
        canvas.text(470, top + 2, pieces, size=12)


def _span(run: Run) -> str:
    return f"{run.start}" if run.length == 1 else f"{run.start} to {run.end - 1}"


def _queue(canvas: Canvas, order: list[str]) -> None:
    y = TOP + 262
    canvas.text(LEFT, y, "eviction queue", bold=True)
    canvas.text(LEFT, y + 17, "READY and unpinned, oldest first", size=11.5, colour=c.MUTED)
    for number, key in enumerate(order):
        canvas.box(230 + number * 76, y - 16, 56, 32, LOOKS[key], key, centre=True)
    canvas.wire([(230, y), (206, y)], c.FAULT)
    canvas.text(
        230 + 76 * len(order) + 4, y + 5, "A is pinned, C is filling: neither can be evicted", size=11.5, colour=c.MUTED
    )


def _states(canvas: Canvas) -> None:
    y = HEIGHT - 72
    canvas.text(LEFT, y + 5, "states of an entry", bold=True)
    places = {"absent": 190, EntryState.FILLING.name: 420, EntryState.READY.name: 660}
    for name, x in places.items():
        look = c.DONE if name == "READY" else c.PLAIN
        canvas.box(x, y - 16, 104, 34, look, name, centre=True, dash="4 3" if name == "absent" else "")
    arrows = [((294, y - 6), (420, y - 6), "prefetch or staging"), ((524, y + 1), (660, y + 1), "bytes complete")]
    if EntryState.GONE in TRANSITIONS[EntryState.FILLING]:
        arrows.append(((420, y + 10), (294, y + 10), "GET failed"))
    for start, end, label in arrows:
        canvas.wire([start, end], c.Stroke(c.INK, 1.4))
        below = end[0] < start[0]
        canvas.text(
            (start[0] + end[0]) / 2, start[1] + (16 if below else -6), label, size=11, anchor="middle", colour=c.MUTED
        )
    if EntryState.GONE in TRANSITIONS[EntryState.READY]:
        canvas.wire([(712, y + 18), (712, y + 52), (242, y + 52), (242, y + 18)], c.Stroke(c.INK, 1.4))
        canvas.text(
            477, y + 46, "evicted: only when an allocation lacks pages", size=11, anchor="middle", colour=c.MUTED
        )
    canvas.text(772, y - 2, "pinned by", size=11, colour=c.MUTED)
    canvas.text(772, y + 12, "its readers", size=11, colour=c.MUTED)
