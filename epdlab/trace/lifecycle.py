"""State machines drawn from the transition tables of the core, so that a figure cannot say what the code does not.

The words on the arrows name the step that takes the transition; `unexplained` tells where they and a table disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from xml.sax.saxutils import escape

from epdlab import encode_server, landing, receiver, regions
from epdlab.errors import UsageError

from . import canvas as c
from .render import Drawing

Table = Mapping[Any, frozenset[Any]]


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """One noun's states.

    Attributes:
        table: the transition table of the core.
        steps: (from, to) -> what takes the transition.
    """

    title: str
    table: Table
    steps: Mapping[tuple[str, str], str]


_REQUEST_FAILS = {(state, "failed"): "error, deadline or cancel" for state in ("encoding", "allocating", "sending")}

LIFECYCLES: dict[str, Lifecycle] = {
    "region": Lifecycle(
        "lifecycle of a memory region",
        regions.TRANSITIONS,
        {
            ("pending", "live"): "mr.register = 0",
            ("pending", "refused"): "mr.register < 0",
            ("pending", "released"): "never registered",
            ("live", "released"): "mr.deregister",
            ("refused", "released"): "clean-up",
        },
    ),
    "slot": Lifecycle(
        "lifecycle of a landing slot",
        landing.TRANSITIONS,
        {
            ("held", "quarantined"): "landing.quarantine: a late write may come",
            ("held", "free"): "landing.free: its reader is done",
            ("quarantined", "free"): "landing.free: quarantine timer",
        },
    ),
    "part": Lifecycle(
        "lifecycle of a part on the encoder",
        encode_server.TRANSITIONS,
        {
            ("encoding", "ready"): "encode.forward",
            ("encoding", "failed"): "error of the forward",
            ("encoding", "releasing"): "part.release: timer",
            ("ready", "releasing"): "part.release: served, failed or timer",
            ("failed", "releasing"): "part.release",
            ("releasing", "released"): "drained; mr.deregister, embedding.drop",
        },
    ),
    "request": Lifecycle(
        "lifecycle of a request on a rank",
        receiver.TRANSITIONS,
        {
            ("encoding", "allocating"): "every /encode answered",
            ("allocating", "sending"): "landing.alloc",
            ("sending", "landed"): "every part acked",
            ("landed", "consumed"): "release",
            ("landed", "failed"): "error or cancel",
            **_REQUEST_FAILS,
        },
    ),
}


def lifecycle(name: str) -> Drawing:
    """Draw one lifecycle: `region`, `slot`, `part` or `request`.

    Raises:
        UsageError: no such lifecycle.
    """
    if name not in LIFECYCLES:
        raise UsageError(f"no lifecycle {name!r}; draw {', '.join(LIFECYCLES)}")
    drawn = LIFECYCLES[name]
    return Drawing(_dot(drawn), "dot", drawn.title)


def unexplained(name: str) -> set[tuple[str, str]]:
    """Transitions that stand in the table and have no words, or have words and do not stand in the table."""
    drawn = LIFECYCLES[name]
    return set(_edges(drawn.table)) ^ set(drawn.steps)


def _edges(table: Table) -> list[tuple[str, str]]:
    order = {state: k for k, state in enumerate(table)}
    return [(a.value, b.value) for a in table for b in sorted(table[a], key=order.__getitem__)]


def _path(table: Table) -> set[tuple[str, str]]:
    """The way through the table when nothing goes wrong: always the next state in the order of the Enum."""
    path, state = set(), next(iter(table))
    while table[state]:
        after = next(other for other in table if other in table[state])
        path.add((state.value, after.value))
        state = after
    return path


def _dot(drawn: Lifecycle) -> str:
    states = [_state(state, last=not drawn.table[state]) for state in drawn.table]
    first = next(iter(drawn.table)).value
    path = _path(drawn.table)
    edges = [_edge(a, b, drawn.steps.get((a, b), ""), (a, b) in path) for a, b in _edges(drawn.table)]
    head = (
        "graph [rankdir=LR, bgcolor=white, pad=0.15, nodesep=0.45, ranksep=0.5, fontname=Helvetica]\n"
        "  node [fontname=Helvetica, fontsize=11, height=0.42, margin=0.16]\n"
        f'  edge [fontname=Helvetica, fontsize=9, color="{c.MUTED}", fontcolor="{c.INK}", arrowsize=0.7]\n'
        f'  start [shape=point, width=0.16, color="{c.INK}"]\n'
        f'  start -> "{first}" [weight=4]'
    )
    return "digraph lifecycle {\n  " + "\n  ".join([head, *states, *edges]) + "\n}\n"


def _state(state: Enum, last: bool) -> str:
    bad = state.value in ("failed", "refused")
    colour = c.BREACH if bad else c.HTTP
    fill = c.TINT if bad else c.PALE
    return (
        f'"{state.value}" [shape=box, style="rounded,filled", fillcolor="{fill}", color="{colour}", '
        f"penwidth={1.2 if not last else 1.6}, peripheries={2 if last else 1}]"
    )


def _edge(a: str, b: str, words: str, path: bool) -> str:
    """`path`: it is on the way of a request that goes well, which is drawn as one straight line."""
    bad = b in ("failed", "refused")
    style = f', style=dashed, color="{c.BREACH}"' if bad else ""
    return f'"{a}" -> "{b}" [label=<{_boxed(words)}>, weight={20 if path else 1}{style}]'


def _boxed(words: str) -> str:
    """Words on white, so that no line runs through them."""
    text = escape(words.replace(": ", ":\n").replace("; ", ";\n")).replace("\n", "<BR/>")
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLPADDING="1" BGCOLOR="white"><TR><TD>{text}</TD></TR></TABLE>'
