"""The exercises of notebook 03: each runs an answer on labs of its own, draws what it did, and judges it."""

from __future__ import annotations

from ..rules import Rule
from ..trace.breach import INVARIANTS
from .exercise import Answer, Tried, attempt, judge
from .race_orders import NIC_SLICES, ORDERS, play, words
from .stepper import Stepper

BASE = "sglang-0.5.16"
LOST = "lost_embedding"


def try_too_late(answer: Answer) -> Tried:
    """`too_late(stepper)`: by order alone, rank 1 finds no embedding."""
    with Stepper(profile=BASE) as stepper:
        _, error = attempt(answer, stepper)
        stepper.walk()
        broken = {breach.invariant: breach.rank for breach in stepper.breaches}
        faults = [event.fault for event in stepper.events if event.fault]
        drawing = stepper.draw("sequence", title=f"what too_late did under {BASE}")

    def wrong() -> str | None:
        if error is not None or faults:
            return error or f"a fault was used ({faults[0]}); order alone is enough"
        if LOST not in broken:
            return f"invariant {INVARIANTS[LOST].number} [{LOST}] holds; broken: {', '.join(broken) or 'none'}"
        return None if broken[LOST] == 1 else f"rank {broken[LOST]} came too late; it should be rank 1"

    return Tried(drawing, judge(answer, 4, wrong, "rank 1 asked in time, and found no embedding"))


def try_mend(answer: Answer) -> Tried:
    """`mend()`: names of the rules that 0.5.16 lacks, no more than needed, for all three orders to end well."""
    given, error = attempt(answer)
    names = given if isinstance(given, list) and set(given) <= {rule.value for rule in Rule} else []
    profile = "+".join([BASE, *names])
    with Stepper(profile=profile, nic_slices=NIC_SLICES) as stepper:
        ORDERS["overlap"](stepper)
        drawing = stepper.draw("timeline", title=f"two writes that overlap, with {len(names)} rules more")

    def wrong() -> str | None:
        if error is not None or not names:
            return error or f"mend returned {given!r}, not a list of rules"
        broken = {order: tally.broken for order, tally in play(profile).items() if tally.broken}
        if broken:
            return "; ".join(f"in order {order} breaks: {words(numbers)}" for order, numbers in broken.items())
        return None if len(names) <= 4 else f"all orders end well, but {len(names)} rules are more than needed"

    return Tried(drawing, judge(answer, 3, wrong, f"with these {len(names)} rules all three orders end well"))
