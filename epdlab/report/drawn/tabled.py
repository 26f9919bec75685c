"""Tables drawn as figures, from result files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...rules import Rule
from ...trace.breach import INVARIANTS
from .. import canvas as c
from ..canvas import Canvas, Look

Json = Mapping[str, Any]
RULE, SAYS, BREAKS, FAULT, STEPS = 16, 222, 552, 706, 850
SIZE, STEP = 11.5, 15


def ablation(result: Json) -> str:
    """`ablation`: one row for each rule, in the order of the result: what it says, what breaks without it, and how."""
    if "rules" not in result:
        raise UsageError("results/ablation.json has no 'rules'; make it anew with `python -m epdlab bench ablation`")
    rows = [
        (rule, c.wrap(Rule(rule).meaning, BREAKS - SAYS - 16, SIZE), found) for rule, found in result["rules"].items()
    ]
    heights = [15 + STEP * len(meaning) for _, meaning, _ in rows]
    canvas = Canvas(
        52 + sum(heights), "What each rule is there for", "Rule taken away, invariant that breaks, fault, steps."
    )
    for x, title in (
        (RULE, "rule taken away"),
        (SAYS, "what it says"),
        (BREAKS, "what then breaks"),
        (FAULT, "with the fault"),
    ):
        canvas.text(x, 28, title, bold=True)
    canvas.text(864, 28, "steps", bold=True, anchor="end")
    y = 42.0
    for number, ((rule, meaning, found), height) in enumerate(zip(rows, heights, strict=True)):
        if number % 2 == 0:
            canvas.rect(8, y, 864, height, Look("#f6f8fa", "#f6f8fa"), radius=3, width=0)
        _row(canvas, y, height, rule, meaning, found)
        y += height
    return canvas.svg()


def _row(canvas: Canvas, y: float, height: float, rule: str, meaning: list[str], found: Json) -> None:
    middle = y + height / 2 + 4
    invariant = INVARIANTS[found["invariant"]]
    canvas.text(RULE, middle, rule, mono=True, size=11)
    canvas.lines(SAYS, middle - STEP / 2 * (len(meaning) - 1), meaning, size=SIZE, step=STEP)
    canvas.circle(BREAKS + 9, middle - 4, str(invariant.number), c.WARNING, radius=8, size=11)
    canvas.text(BREAKS + 23, middle, invariant.key, mono=True, size=10.5)
    canvas.text(FAULT, middle, found["fault"] or "none", mono=bool(found["fault"]), size=10.5)
    canvas.text(STEPS + 14, middle, str(len(found["schedule"])), size=12, anchor="end")
