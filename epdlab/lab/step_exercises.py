"""The exercises of notebook 02: each runs an answer on a lab of its own, draws what it did, and judges it."""

from __future__ import annotations

from typing import Any

from ..rules import DEFAULT_PROFILE
from ..trace.breach import INVARIANTS
from ..trace.layout import Memory, Slot, layout
from .demo import leaks_of
from .exercise import Answer, Tried, attempt, judge
from .lab import Lab
from .stepper import Stepper

PLACED = ("bytes:98304:1", "bytes:40000:2", "bytes:65536:3")


def try_place(answer: Answer) -> Tried:
    """`place(sizes)`: the byte offset of each part in the landing slot. Held against a run with three encoders."""
    sizes, offsets = _landed()
    given, error = attempt(answer, list(sizes))
    placed = given if isinstance(given, list) and len(given) == len(sizes) else []
    parts = [(part, offset, nbytes) for part, (offset, nbytes) in enumerate(zip(placed, sizes, strict=False))]
    memory = Memory("rank0", sum(sizes), [Slot("rank0.slot#1", 0, sum(sizes), "req1", parts=parts)], pool=False)

    def wrong() -> str | None:
        if error is not None or not placed:
            return error or f"{answer.__name__} returned {given!r}, not one offset for each of {len(sizes)} parts"
        pairs = enumerate(zip(placed, offsets, strict=True))
        bad = [f"part {part} landed at +{true}, not at +{said}" for part, (said, true) in pairs if said != true]
        return "; ".join(bad) or None

    said = f"the three writes landed at {', '.join(f'+{offset}' for offset in offsets)}"
    return Tried(layout(memory, "where your parts lie"), judge(answer, 3, wrong, said))


def _landed() -> tuple[list[int], list[int]]:
    """Sizes of the parts, and where their writes really went: from the trace of a run."""
    with Lab(model="synthetic", tp=1, encoders=len(PLACED)) as lab:
        lab.request(*PLACED)
        for answer in lab.result().values():
            if isinstance(answer, BaseException):
                raise answer
        writes = [e for e in lab.events if e.step == "transfer.write" and e.phase == "begin"]
        slot = next(e for e in lab.events if e.step == "landing.alloc" and e.phase == "end")
    by_part = sorted((e.part or 0, e.bytes or 0, (e.target or 0) - (slot.address or 0)) for e in writes)
    return [nbytes for _, nbytes, _ in by_part], [offset for _, _, offset in by_part]


def try_spoil(answer: Answer) -> Tried:
    """`spoil(stepper)`: rank 1's write fails, rank 0's does not, no invariant breaks, nothing is left in the end."""
    with Stepper() as stepper:
        _, error = attempt(answer, stepper)
        stepper.run()
        outcome, breaches, census = stepper.outcome(), stepper.breaches, stepper.lab.census()
        failing = [e for e in stepper.events if e.step == "transfer.write" and e.fault == "fail"]
        drawing = stepper.draw("sequence", title="what spoil did")

    def wrong() -> str | None:
        failed = {rank for rank, said in outcome.items() if said.startswith("failed")}
        if error is not None or not outcome:
            return error or "the request has not ended on every rank: what nobody notices waits for its deadline"
        if not failing:
            return "no write failed"
        if failed != {"rank1"}:
            return f"{' and '.join(sorted(failed)) or 'no rank'} failed; it should be rank1 alone"
        if breaches:
            return f"invariant {breaches[0].number} broke: {breaches[0].message}"
        return _left(census)

    said = "rank1's write failed, rank0 received its bytes, and nothing is left behind"
    return Tried(drawing, judge(answer, 5, wrong, said))


def _left(census: dict[str, dict[str, int]]) -> str | None:
    left: dict[str, Any] = leaks_of(census)
    timed = [name for name, counts in census.items() if counts.get("timed")]
    if left or timed:
        return f"left behind: {left}" if left else f"memory of {' and '.join(timed)} is set aside until a timer fires"
    return None


def try_race(answer: Answer, profile: str = "sglang-0.5.16") -> Tried:
    """`race(stepper)`: by order alone, a write goes on without its source region."""
    key = "source_uncovered"
    with Stepper(profile=profile) as stepper:
        _, error = attempt(answer, stepper)
        broken = {breach.invariant for breach in stepper.breaches}
        stepper.walk()
        faults = [event.fault for event in stepper.events if event.fault]
        drawing = stepper.draw("timeline", title=f"what race did under {profile}")

    def wrong() -> str | None:
        if error is not None:
            return error
        if faults:
            return f"a fault was used ({faults[0]}); order alone is enough"
        if key not in broken:
            names = ", ".join(f"{INVARIANTS[name].number} [{name}]" for name in INVARIANTS if name in broken)
            return f"invariant {INVARIANTS[key].number} [{key}] holds; broken: {names or 'none'}"
        return None

    said = f"invariant {INVARIANTS[key].number} [{key}] broke, and nothing but the order was changed"
    return Tried(drawing, judge(answer, 5, wrong, said))


def same_order_hardened(answer: Answer) -> dict[str, int]:
    """The same answer to `race` under the hardened rules: how often each invariant broke."""
    with Stepper(profile=DEFAULT_PROFILE) as stepper:
        attempt(answer, stepper)
        stepper.walk()
        broken = [breach.invariant for breach in stepper.breaches]
    return {key: broken.count(key) for key in dict.fromkeys(broken)}
