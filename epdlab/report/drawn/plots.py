"""Plots of the benches, from their result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .. import canvas as c
from ..canvas import Canvas
from ..chart import Frame, Series, decades, key, size_label
from ..numbers import significant

Json = Mapping[str, Any]
OURS, BARE, COPY = c.BLUE, c.ORANGE, "#6e7781"
LIMIT = 0.9
"""Of the bare goodput, what the whole path is to reach from 16 MiB on."""


def transfer(result: Json) -> str:
    """`bench_transfer`: goodput of the bare write and of the whole /send path, and their ratio, by size."""
    rows = _need(result, "sizes", "bench_transfer")
    labels = [size_label(row["bytes"]) for row in rows]
    bare = Series("bare transfer_sync_write", BARE, [row["bare_gbps"] for row in rows], "6 3")
    path = Series("whole /send path", OURS, [row["path_gbps"] for row in rows])
    canvas = Canvas(
        336, "Goodput of the transfer", "Goodput of the bare write and of the whole send path by size, and their ratio."
    )
    low, high, ticks = decades([*bare.values, *path.values])
    left = Frame(canvas, 52, 66, 400, 206, low, high, log=True)
    left.axes("Goodput", "GB/s, logarithmic", labels, ticks)
    left.lines([bare, path])
    ratios = [row["ratio"] for row in rows]
    right = Frame(canvas, 524, 66, 340, 206, 0.0, max(1.2, *ratios))
    right.axes("Whole path against bare write", "ratio of the two", labels, [0, 0.25, 0.5, 0.75, 1])
    right.limit(LIMIT, f"{LIMIT:g}")
    right.lines([Series("ratio", OURS, ratios)])
    key(canvas, 52, 322, [bare, path])
    return canvas.svg()


def landing(result: Json) -> str:
    """`bench_landing`: memory for each request or a slot of a pool, and a write into fresh or warm memory."""
    canvas = Canvas(
        336, "Cost of landing memory", "Two charts by size: setting memory up, and the first write into it."
    )
    panels = (
        (
            "setup",
            "Get it and give it back",
            "µs at the median, logarithmic",
            ("per_request_us", "each request its own"),
            ("pool_us", "slot of a pool"),
        ),
        (
            "first_touch",
            "A write into it",
            "ms at the median, logarithmic",
            ("fresh_ms", "fresh memory"),
            ("warm_ms", "memory written before"),
        ),
    )
    for number, (field, title, unit, *kinds) in enumerate(panels):
        rows = _need(result, field, "bench_landing")
        styles = ((BARE, "6 3"), (OURS, ""))
        series = [
            Series(name, colour, [row[k] for row in rows], dash)
            for (k, name), (colour, dash) in zip(kinds, styles, strict=True)
        ]
        low, high, ticks = decades([v for one in series for v in one.values])
        frame = Frame(canvas, 58 + number * 440, 66, 364, 206, low, high, log=True)
        frame.axes(title, unit, [size_label(row["bytes"]) for row in rows], ticks)
        frame.lines(series)
        key(canvas, 58 + number * 440, 322, series)
    return canvas.svg()


def store(result: Json) -> str:
    """`bench_store`: GET and PUT against the bare store calls and a memory copy, and a hit against the tower."""
    canvas = Canvas(
        336, "The embedding cache", "Goodput of GET and PUT by size, and the time of a hit against the vision tower."
    )
    rows = _need(result, "goodput", "bench_store")
    labels = [size_label(row["bytes"]).replace("iB", "") for row in rows]
    both = [_goodput(rows, kind) for kind in ("get", "put")]
    low, high, ticks = decades([v for series in both for one in series for v in one.values])
    for number, (title, series) in enumerate(zip(("GET", "PUT"), both, strict=True)):
        frame = Frame(canvas, 52 + number * 288, 66, 234, 206, low, high, log=True)
        frame.axes(title, "GB/s, logarithmic", labels, ticks)
        frame.lines(series)
    saved = _need(result, "saved_per_hit", "bench_store")
    kinds = (
        ("vision tower", "forward_ms", BARE),
        ("hit in the store", "global_hit_ms", OURS),
        ("hit in the pool", "local_hit_ms", COPY),
    )
    bars = [Series(name, colour, [row[field] for row in saved]) for name, field, colour in kinds]
    low, high, ticks = decades([v for one in bars for v in one.values])
    frame = Frame(canvas, 636, 66, 230, 206, low / 2, high * 1.6, log=True)
    frame.axes("A hit against the tower", "ms, logarithmic", ["{} × {}".format(*row["image"]) for row in saved], ticks)
    frame.bars(bars, lambda value: significant(value, 2))
    key(canvas, 24, 322, both[0])
    canvas.legend(496, 322, [(c.Look(one.colour, one.colour), one.name) for one in bars], gap=10)
    return canvas.svg()


def _goodput(rows: Sequence[Json], kind: str) -> list[Series]:
    return [
        Series("our pool", OURS, [row[f"{kind}_gbps"] for row in rows]),
        Series("bare store call", BARE, [row[f"bare_{kind}_gbps"] for row in rows], "6 3"),
        Series("memory copy", COPY, [row["memcpy_gbps"] for row in rows], "2 3"),
    ]


def _need(result: Json, field: str, name: str) -> Any:
    if field not in result:
        raise UsageError(
            f"results/{name}.json has no {field!r}; make it anew with `python -m epdlab bench {name[6:]} --write`"
        )
    return result[field]
