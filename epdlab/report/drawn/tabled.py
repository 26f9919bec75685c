"""Tables drawn as figures, from result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError
from ...trace.breach import INVARIANTS
from .. import canvas as c
from ..canvas import Canvas, Look

Json = Mapping[str, Any]
COLUMNS = ((16, 214, "rule taken away"), (236, 172, "invariant that breaks"), (414, 450, "shortest schedule"))
SIZE, STEP = 11.5, 15


def ablation(result: Json) -> str:
    """`ablation`: one row for each rule, in the order of the result."""
    if "rules" not in result:
        raise UsageError("results/ablation.json has no 'rules'; make it anew with `python -m epdlab explore --ablate`")
    rows = [_row(rule, found) for rule, found in result["rules"].items()]
    heights = [14 + STEP * max(len(schedule), 1) for _, _, schedule in rows]
    canvas = Canvas(58 + sum(heights), "What each rule is there for", "Rule taken away, invariant that breaks, shortest schedule.")
    for x, _, title in COLUMNS:
        canvas.text(x, 28, title, bold=True, size=12.5)
    y = 42.0
    for number, ((rule, invariants, schedule), height) in enumerate(zip(rows, heights, strict=True)):
        if number % 2 == 0:
            canvas.rect(8, y, 864, height, Look("#f6f8fa", "#f6f8fa"), radius=3, width=0)
        canvas.text(COLUMNS[0][0], y + 18, rule, mono=True, size=11)
        for place, key in enumerate(invariants):
            canvas.circle(COLUMNS[1][0] + 9, y + 14 + place * 22, str(INVARIANTS[key].number), c.WARNING, radius=8, size=11)
            canvas.text(COLUMNS[1][0] + 24, y + 18 + place * 22, key, mono=True, size=11)
        canvas.lines(COLUMNS[2][0], y + 18, schedule, size=SIZE, step=STEP)
        y += height
    return canvas.svg()


def _row(rule: str, found: Json) -> tuple[str, Sequence[str], list[str]]:
    words = c.wrap("; ".join(found["schedule"]), COLUMNS[2][1], SIZE)
    return rule, [found["invariant"]], words
