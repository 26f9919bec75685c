"""How much there is to explore, before it starts: a short probe, scaled up, and advice where a bound is too large."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .explorer import NONE
from .quiet import quiet
from .reduction import Search
from .remembered import Remembered, closing_all
from .scenario import Scenario, faults_of
from .world import World, machines

PROBE_S = 1.0
TOO_LONG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much there is to explore, as a short probe sees it: orders of magnitude, not figures.

    Attributes:
        exact: the probe covered everything.
    """

    schedules: float
    seconds: float
    exact: bool

    def __str__(self) -> str:
        about = "" if self.exact else "about "
        return f"{about}{self.schedules:,.0f} schedules, {about}{self.seconds:,.0f} s"


def estimate(scenario: Scenario, kinds: Sequence[str], processes: list[Remembered] | None = None) -> Estimate:
    """Probe each kind of fault for a moment and scale up."""
    processes = processes or machines(scenario)
    schedules, seconds, exact = 0.0, 0.0, True
    with quiet(), closing_all(processes):
        for kind in kinds:
            for fault in [None] if kind == NONE else faults_of(kind, scenario):
                search, began = Search(World(scenario, fault, processes)), time.monotonic()
                for _ in search:
                    if time.monotonic() - began > PROBE_S / len(kinds):
                        break
                covered = max(search.covered, 1e-12)
                schedules += search.runs / covered
                seconds += (time.monotonic() - began) / covered
                exact = exact and search.exhausted
    return Estimate(schedules, seconds, exact)


def advise(scenario: Scenario, kinds: Sequence[str], seconds: float | None) -> str | None:
    """What to say before a bound that is too large for its budget; None if it fits.

    Raises:
        UsageError: there is no budget, and it would take more than an hour.
    """
    guess = estimate(scenario, kinds)
    if seconds is None and guess.seconds > TOO_LONG_S:
        raise UsageError(f"this bound takes {guess}; give --seconds, or fewer ranks, requests or parts, or one --fault")
    if seconds is None or guess.seconds <= seconds:
        return None
    return (
        f"this bound takes {guess}, the budget is {seconds:,.0f} s: it will be covered in part and sampled at random; "
        "raise --seconds, or take fewer ranks, requests or parts, or one --fault"
    )
