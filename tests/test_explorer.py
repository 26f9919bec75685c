"""The explorer over the very sender and receiver code: what breaks where, and that nothing breaks under `hardened`."""

import json
from pathlib import Path

import pytest

from epdlab.check import api
from epdlab.check.explorer import ALL, Progress, explore, kinds_of
from epdlab.check.scenario import FAULTS, Scenario
from epdlab.check.schedule import replay
from epdlab.errors import UsageError
from epdlab.modality import Modality
from epdlab.rules import PROFILES, Rule

SCHEDULES = Path(__file__).resolve().parents[1] / "results" / "schedules"


def broken(answer: dict) -> set[str]:
    return {violation["invariant"] for violation in answer["violations"]}


def test_every_order_of_two_siblings_of_0_5_16_shows_the_race() -> None:
    answer = api.explore("sglang-0.5.16")
    assert answer["exhaustive"]
    assert not answer["ok"]
    assert broken(answer) == {"overlap", "source_uncovered", "wrong_bytes", "false_ack", "lost_embedding"}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_hardened_keeps_every_invariant_in_every_order(fault: str | None) -> None:
    answer = api.explore("hardened", fault=fault)
    assert answer["exhaustive"]
    assert answer["schedules"] > 0
    assert answer["violations"] == []
    assert answer["defects"] == []
    assert answer["ok"]


@pytest.mark.parametrize(
    ("profile", "modality"),
    [
        *((name, profile.modality) for name, profile in PROFILES.items()),
        ("hardened", Modality.VIDEO),
    ],
)
def test_every_order_under_every_fault_and_each_finding_replays(profile: str, modality: Modality) -> None:
    """Two ranks, one request, at most one fault: the bound that is covered to its end for every profile."""
    found = explore(Scenario(profile, modality=modality), kinds_of(ALL))
    assert (found.exhaustive, found.defects) == (True, set())
    assert set(found.tallies) == set(kinds_of(ALL))
    for invariant, finding in found.findings.items():
        assert invariant in {breach.invariant for breach in replay(finding.schedule).breaches}
    assert bool(found.findings) == (profile != "hardened")


@pytest.mark.parametrize(("tp", "requests"), [(3, 1), (1, 2), (2, 2)])
def test_more_ranks_and_more_requests_in_every_order(tp: int, requests: int) -> None:
    found = explore(Scenario("hardened", tp, requests, pool=requests > 1))
    assert (found.exhaustive, found.findings, found.defects) == (True, {}, set())
    broken_before = explore(Scenario("sglang-0.5.16", tp, requests, pool=requests > 1), most=2_000).findings
    assert ("overlap" in broken_before) == (tp > 1)


def test_the_same_search_finds_the_same_twice() -> None:
    first, second = (api.explore("sglang-0.5.17", fault="cleanup_timer", seconds=None) for _ in range(2))
    for answer in (first, second):
        answer.pop("seconds")
        for tally in answer["faults"].values():
            tally.pop("seconds")
    assert first == second


def test_a_search_that_is_interrupted_keeps_what_it_found_and_says_so() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.findings:
            raise KeyboardInterrupt

    found = explore(Scenario("sglang-0.5.16"), kinds_of(ALL), report=interrupt)
    assert (found.interrupted, found.exhaustive) == (True, False)
    assert found.findings and found.schedules < explore(Scenario("sglang-0.5.16")).schedules


def test_what_the_budget_does_not_cover_is_sampled_with_a_seed() -> None:
    answer = api.explore("hardened", tp=3, fault="cleanup_timer", seconds=2.0)
    assert (answer["exhaustive"], answer["ok"]) == (False, True)
    assert 0 < answer["at_random"] < answer["schedules"]
    assert "raise --seconds" in answer["advice"]


def test_a_bound_that_takes_hours_is_refused_before_it_starts() -> None:
    with pytest.raises(UsageError, match="give --seconds, or fewer ranks"):
        api.explore("sglang-0.5.16", tp=3, requests=2, parts=2, seconds=None)
    with pytest.raises(UsageError, match="the explorer takes 1 to"):
        api.explore("hardened", tp=99)


@pytest.mark.parametrize(
    ("profile", "fault", "invariant"),
    [
        ("sglang-0.5.17", "cleanup_timer", "source_uncovered"),
        ("sglang-0.5.17", "send_repeated", "lost_embedding"),
        ("sglang-0.5.17", "register_refused", "source_uncovered"),
        ("sglang-0.5.17", "receiver_deadline", "destination_unsafe"),
        ("sglang-0.5.23", "transfer_fails", "lost_embedding"),
        ("sglang-0.5.23-cache", None, "overlap"),
    ],
)
def test_what_is_left_after_the_fix(profile: str, fault: str | None, invariant: str) -> None:
    assert invariant in broken(api.explore(profile, fault=fault, seconds=60.0))


def test_two_siblings_are_safe_after_the_fix_while_nothing_fails() -> None:
    answer = api.explore("sglang-0.5.17")
    assert (answer["exhaustive"], answer["violations"]) == (True, [])


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.value)
def test_without_a_rule_its_schedule_breaks_what_the_table_says(rule: Rule) -> None:
    path = SCHEDULES / f"without_{rule.value}.json"
    table = json.loads((SCHEDULES.parent / "ablation.json").read_text())["rules"]
    answer = api.replay(path)
    assert answer["ok"]
    assert table[rule.value]["invariant"] in broken(answer)
    assert answer["moves"] == table[rule.value]["moves"]


def test_a_schedule_of_one_profile_does_not_fit_another(tmp_path: Path) -> None:
    text = (SCHEDULES / "without_deferred_deregister.json").read_text()
    other = tmp_path / "other.json"
    other.write_text(text.replace("hardened-deferred_deregister", "hardened"))
    with pytest.raises(UsageError):
        api.replay(other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("transfer.write", "transfer.wriet"),
        lambda text: text.replace("hardened-", "softened-"),
        lambda text: "[]",
    ],
)
def test_a_damaged_schedule_is_one_clear_error(damage, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(damage((SCHEDULES / "without_deferred_deregister.json").read_text()))
    with pytest.raises(UsageError) as caught:
        api.replay(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_fault_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="cleanup_timer"):
        api.explore("hardened", fault="cleanup_timr")
