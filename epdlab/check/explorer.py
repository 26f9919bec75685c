"""Exploring a scenario: every order within the bound, as far as the budget goes, and the shortest way to each breach.

The search itself is `reduction`'s. Here: which faults are struck, how the budget is split, what is kept of a run, and
when a bound is too large to begin with.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec

from ..trace.invariants import Breach, check
from .quiet import quiet
from .reduction import Run, Search, walk
from .remembered import Remembered, closing_all
from .scenario import FAULTS, Fault, Scenario, fault_kind, faults_of
from .schedule import Expected, Schedule, replay, schedule_of
from .world import World, machines

ALL, NONE = "all", "none"
TIDY_EVERY = 10_000
RANDOM_SHARE = 0.25
AT_THE_END = ("leak", "unfinished")


@dataclass(slots=True)
class Finding:
    """One broken invariant: the shortest schedule of those that were run (if there is one that needs no fault, the
    shortest of these), and what it says.

    Attributes:
        minimised: the schedule was cut down by replaying it; else it is the shortest of all that were run.
    """

    invariant: str
    message: str
    schedule: Schedule
    minimised: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        """What comes first is kept: without a fault before with one, then the shorter."""
        return self.schedule.fault is not None, len(self.schedule.moves)


@dataclass(slots=True)
class Tally:
    """What was done for one kind of fault."""

    schedules: int = 0
    at_random: int = 0
    states: int = 0
    exhaustive: bool = True
    seconds: float = 0.0


@dataclass(slots=True)
class Exploration:
    """What an exploration found.

    Attributes:
        tallies: by kind of fault, `none` without one. defects: errors of the code itself; there must be none.
    """

    scenario: Scenario
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    defects: set[str] = field(default_factory=set)
    interrupted: bool = False

    @property
    def schedules(self) -> int:
        return sum(tally.schedules for tally in self.tallies.values())

    @property
    def exhaustive(self) -> bool:
        return not self.interrupted and all(tally.exhaustive for tally in self.tallies.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an exploration stands; `covered` is a rough part of the orders for this fault, 0 to 1."""

    fault: str
    covered: float
    schedules: int
    findings: int


Report = Callable[[Progress], None]


def kinds_of(fault: str | None) -> list[str]:
    """The kinds of fault to explore: none, one, or none and each.

    Raises:
        UsageError: no such kind.
    """
    if fault in (None, NONE):
        return [NONE]
    if fault == ALL:
        return [NONE, *FAULTS]
    fault_kind(str(fault))
    return [str(fault)]


def explore(
    scenario: Scenario,
    kinds: Sequence[str] = (NONE,),
    seconds: float | None = None,
    seed: int = 0,
    report: Report | None = None,
    processes: list[Remembered] | None = None,
    most: int | None = None,
) -> Exploration:
    """Explore a scenario with each of these kinds of fault.

    What cannot be covered in the budget is sampled at random for the last quarter of it. An interrupt keeps what was
    found so far.

    Args:
        seconds: for all kinds together; None: as long as it takes.
        most: schedules for each way a fault can strike, before the rest is given up.
        processes: machines of this scenario that remember, see `world.machines`.
    """
    found = Exploration(scenario.checked())
    processes = processes or machines(scenario)
    with quiet(), closing_all(processes):
        began = time.monotonic()
        try:
            for left, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
                spare = None if seconds is None else max(0.0, seconds - (time.monotonic() - began)) / left
                _explore_kind(found, kind, _Budget(spare, most, seed), report, processes)
        except KeyboardInterrupt:
            found.interrupted = True
        found.findings = {key: _minimised(finding) for key, finding in sorted(found.findings.items())}
    return found


@dataclass(frozen=True, slots=True)
class _Budget:
    seconds: float | None
    most: int | None
    seed: int


def _explore_kind(
    found: Exploration, kind: str, budget: _Budget, report: Report | None, processes: list[Remembered]
) -> None:
    tally = found.tallies[kind] = Tally(exhaustive=False)
    began, exhausted = time.monotonic(), []
    faults: list[Fault | None] = [None] if kind == NONE else [*faults_of(kind, found.scenario)]
    for left, fault in zip(range(len(faults), 0, -1), faults, strict=True):
        world = World(found.scenario, fault, processes)
        search, now = Search(world), time.monotonic()
        spare = None if budget.seconds is None else max(0.0, budget.seconds - (now - began)) / left
        ends = None if spare is None else now + spare * (1 - RANDOM_SHARE)
        for run in _until(ends, budget.most, search, tally, processes):
            _keep(found, fault, run)
            if report is not None:
                report(Progress(kind, search.covered, found.schedules, len(found.findings)))
        tally.states += search.states
        if not search.exhausted and spare is not None:
            _sample(found, world, Random(f"{budget.seed} {kind} {fault}"), now + spare, tally)
        exhausted.append(search.exhausted)
    tally.exhaustive = all(exhausted)
    tally.seconds = time.monotonic() - began


def _until(
    ends: float | None, most: int | None, search: Search, tally: Tally, processes: list[Remembered]
) -> Iterator[Run]:
    """The search's runs, counted, until the budget is spent."""
    for run in search:
        tally.schedules += 1
        yield run
        if (ends is not None and time.monotonic() > ends) or (most is not None and search.runs >= most):
            return
        if search.runs % TIDY_EVERY == 0:
            for process in processes:
                process.close()
            gc.collect()


def _sample(found: Exploration, world: World, random: Random, ends: float, tally: Tally) -> None:
    while time.monotonic() < ends:
        tally.schedules += 1
        tally.at_random += 1
        _keep(found, world.striker.fault, walk(world, random))


def _keep(found: Exploration, fault: Fault | None, run: Run) -> None:
    """Judge a run; keep its way to a breach if none is shorter."""
    found.defects.update(run.defects)
    breaches = check(run.events())
    struck = run.struck if breaches else 0
    for breach in breaches:
        past, kept = run.past(breach.events[-1]), found.findings.get(breach.invariant)
        if kept is None or (past & struck != 0, past.bit_count()) < kept.rank:
            schedule = schedule_of(found.scenario, fault, run.cone(past))
            found.findings[breach.invariant] = Finding(breach.invariant, breach.message, schedule)


# ---- the shortest schedule -------------------------------------------------------------------------------------------


def _minimised(finding: Finding) -> Finding:
    """What shows only at the end takes a whole run: find how few of its moves lead there, the rest following by itself.

    Any finding is replayed once, and tells what its own schedule shows.
    """
    schedule, minimised = finding.schedule, False
    if finding.invariant in AT_THE_END:
        shortest = _shortest_prefix(schedule, finding.invariant)
        minimised, schedule = len(shortest.moves) < len(schedule.moves), shortest
    breaches = replay(schedule).breaches
    shown = msgspec.structs.replace(schedule, breaches=[Expected(b.invariant, b.message) for b in breaches])
    return replace(finding, schedule=shown, message=_message(breaches, finding), minimised=minimised)


def _message(breaches: list[Breach], finding: Finding) -> str:
    return next((b.message for b in breaches if b.invariant == finding.invariant), finding.message)


def _shortest_prefix(schedule: Schedule, invariant: str) -> Schedule:
    """The shortest beginning of a schedule after which the rest, left to itself, still leads to the breach."""
    first = next((i + 1 for i, move in enumerate(schedule.moves) if move.fault is not None), 1)
    for length in range(first, len(schedule.moves)):
        shorter = msgspec.structs.replace(schedule, moves=schedule.moves[:length])
        if any(breach.invariant == invariant for breach in replay(shorter).breaches):
            return shorter
    return schedule


def as_json(found: Exploration, seconds: float, seed: int) -> dict[str, Any]:
    """The exploration as one JSON object."""
    scenario = found.scenario
    return {
        "ok": not found.findings and not found.defects,
        "profile": scenario.profile,
        "tp": scenario.tp,
        "requests": scenario.requests,
        "parts": scenario.parts,
        "modality": scenario.modality.value,
        "landing": "pool for one request" if scenario.pool else "per request",
        "schedules": found.schedules,
        "at_random": sum(tally.at_random for tally in found.tallies.values()),
        "states": sum(tally.states for tally in found.tallies.values()),
        "exhaustive": found.exhaustive,
        "interrupted": found.interrupted,
        "seed": seed,
        "seconds": round(seconds, 3),
        "faults": {kind: msgspec.to_builtins(tally) for kind, tally in found.tallies.items()},
        "violations": [_violation(finding) for finding in found.findings.values()],
        "defects": sorted(found.defects),
    }


def _violation(finding: Finding) -> dict[str, Any]:
    return {
        "invariant": finding.invariant,
        "message": finding.message,
        "fault": finding.schedule.fault,
        "moves": len(finding.schedule.moves),
        "minimised": finding.minimised,
        "schedule": msgspec.to_builtins(finding.schedule),
    }
