"""The report's figures: which there are, what each is drawn from, and their files.

Owns the registry and `figures/NAME.svg`. How a figure looks is decided in `drawn/` and, for live traces, in `..trace`.
A file drawn by Graphviz ends with a line that seals its source and itself: other versions of Graphviz write other
bytes for the same source, and an altered file still shows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..steps import Event
from ..trace.render import Drawing
from .drawn import cached, classes, deployment, plots, pool, recorded, roles, tabled, video
from .results import ROOT, Sources

FIGURES = ROOT / "figures"
_SEAL = re.compile(r"\n<!-- drawn from ([0-9a-f]{64}), sealed ([0-9a-f]{64}) -->\n$")


@dataclass(frozen=True, slots=True)
class Sketch:
    """A figure before it is a file: its SVG, and its source where a layout program stands in between."""

    svg: str
    source: str | None = None


Draw = Callable[[Sources], Sketch]


def _fixed(draw: Callable[[], str]) -> Draw:
    return lambda _: Sketch(draw())


def _result(name: str, draw: Callable[[Mapping[str, Any]], str]) -> Draw:
    return lambda sources: Sketch(draw(sources[name]))


def _drawing(drawing: Drawing) -> Sketch:
    return Sketch(drawing.svg, drawing.dot)


def _trace(name: str, draw: Callable[[list[Event], str], Drawing], title: str) -> Draw:
    return lambda sources: _drawing(draw(sources.trace(name), title))


REGISTRY: dict[str, Draw] = {
    "deployment": _fixed(deployment.draw),
    "epd_request": _fixed(roles.draw),
    "store_classes": _fixed(classes.draw),
    "cached_encode": _fixed(cached.draw),
    "host_pool": _fixed(pool.draw),
    "async_video": _fixed(video.draw),
    "demo_sequence": _trace("demo", recorded.sequence_of, "One image, two ranks: the demo, live"),
    "two_phase_sequence": _trace("two_phase", recorded.sequence_of, "One request, two ranks, live"),
    "landing_pool": _trace("landing_pool", recorded.layout_of, "Landing pool of rank 0, live"),
    "mr_lifecycle": lambda _: _drawing(recorded.region_states()),
    "race_sequence_0516": _trace(
        "race_0516", recorded.sequence_of, "Two sibling /send calls under the rules of 0.5.16, live"
    ),
    "race_timeline_0516": _trace(
        "race_0516", recorded.timeline_of, "Regions and writes under the rules of 0.5.16, live"
    ),
    "race_sequence_0517": _trace(
        "race_0517", recorded.sequence_of, "Two sibling /send calls under the rules of 0.5.17, live"
    ),
    "race_timeline_0517": _trace(
        "race_0517", recorded.timeline_of, "Regions and writes under the rules of 0.5.17, live"
    ),
    "ablation": _result("ablation", tabled.ablation),
    "bench_transfer": _result("bench_transfer", plots.transfer),
    "bench_landing": _result("bench_landing", plots.landing),
    "bench_store": _result("bench_store", plots.store),
}


def draw(name: str, sources: Sources) -> str:
    """The SVG of a figure as its file holds it.

    Raises:
        UsageError: no figure of that name, or what it is drawn from is not there.
    """
    if name not in REGISTRY:
        raise UsageError(f"no figure {name!r}: the registry in report/figures.py has {', '.join(REGISTRY)}")
    sketch = REGISTRY[name](sources)
    return sketch.svg if sketch.source is None else _sealed(sketch.svg, sketch.source)


def same(rebuilt: str, stored: str) -> bool:
    """Whether a stored figure is what its source gives, whichever version of Graphviz wrote it."""
    if rebuilt == stored:
        return True
    new, old = _SEAL.search(rebuilt), _SEAL.search(stored)
    return bool(new and old and new[1] == old[1] and old[2] == _digest(stored[: old.start()]))


def _sealed(svg: str, source: str) -> str:
    body = svg.rstrip("\n")
    return f"{body}\n<!-- drawn from {_digest(source)}, sealed {_digest(body)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
