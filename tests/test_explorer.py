"""The explorer over the very sender and receiver code: what breaks where, and that nothing breaks under `hardened`."""

import json
from pathlib import Path

import pytest

from epdlab.check import api
from epdlab.check.scenario import FAULTS
from epdlab.errors import UsageError
from epdlab.rules import Rule

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
