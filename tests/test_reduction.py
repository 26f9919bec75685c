"""The reduction against the search over every order: fewer runs, the same breaches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from epdlab.check.quiet import quiet
from epdlab.check.reduction import Search
from epdlab.check.scenario import FAULTS, Fault, Scenario, faults_of
from epdlab.check.turn import afresh
from epdlab.check.world import Taken, World
from epdlab.modality import Modality
from epdlab.rules import PROFILES
from epdlab.trace.invariants import check

MOST = 5_000
KINDS = [None, *FAULTS]


@pytest.fixture(autouse=True, scope="module")
def undisturbed() -> Iterator[None]:
    with quiet():
        yield


def faults(kind: str | None, scenario: Scenario) -> list[Fault | None]:
    return [None] if kind is None else [*faults_of(kind, scenario)]


def moments(world: World) -> list[Taken]:
    """Every moment of the run in which whatever came first goes first, with the events until then."""
    taken, events, found = world.start(), [], []
    events += taken.events
    while True:
        state = taken.state
        found.append(Taken(afresh(state), list(events), {}, []))
        moves = [*state.waiting, *state.late]
        slept = None if moves else world.sleep(state)
        if not moves and slept is None:
            return found
        taken = world.take(state, moves[0]) if moves else slept
        events += taken.events


def searched(search: Search) -> set[tuple[object, ...]]:
    """What broke in the runs of a search, or in the first of them."""
    broken = set()
    for run in search:
        assert run.defects == []
        broken |= {(breach.invariant, breach.req, breach.part, breach.rank) for breach in check(run.events())}
        if search.reduction == "none" and search.runs >= MOST:
            break
    return broken


def compare(scenario: Scenario, fault: Fault | None, left: int | None = None) -> tuple[int, int]:
    """Runs of the reduced search and of the full one, which break the same; `left`: from so many moves to the end."""
    with closing(World(scenario, fault)) as world:
        start = None if left is None else moments(world)[-left - 1]
        reduced, every = Search(world, "full", start), Search(world, "none", start)
        found, wanted = searched(reduced), searched(every)
    assert reduced.exhausted
    assert wanted <= found, fault
    assert found == wanted or not every.exhausted, fault
    return reduced.runs, every.runs


@pytest.mark.parametrize("modality", Modality)
@pytest.mark.parametrize("profile", PROFILES)
def test_one_rank_breaks_the_same_in_the_reduced_search_as_in_every_order(profile: str, modality: Modality) -> None:
    scenario = Scenario(profile, tp=1, modality=modality)
    runs = [compare(scenario, fault) for kind in KINDS for fault in faults(kind, scenario)]
    assert sum(few for few, _ in runs) < sum(all_ for _, all_ in runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("profile", PROFILES)
def test_two_ranks_break_the_same_from_a_late_moment_on(profile: str, kind: str | None) -> None:
    scenario = Scenario(profile)
    for fault in faults(kind, scenario):
        compare(scenario, fault, left=8)
