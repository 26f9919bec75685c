"""Profiles by name: releases, and releases with a rule more or less."""

from __future__ import annotations

import pytest

from epdlab.errors import UsageError
from epdlab.rules import PROFILES, Rule, profile


@pytest.mark.parametrize("name", PROFILES)
def test_a_release_answers_to_its_name(name: str) -> None:
    assert profile(name).name == name


@pytest.mark.parametrize("rule", Rule)
def test_a_rule_is_taken_away(rule: Rule) -> None:
    less = profile(f"hardened-{rule.value}")
    assert less.rules == frozenset(Rule) - {rule}
    assert less.name == f"hardened-{rule.value}"


def test_rules_are_added_one_after_the_other() -> None:
    more = profile("sglang-0.5.16+keep_embedding+shared_registration")
    assert more.rules == PROFILES["sglang-0.5.16"].rules | {Rule.KEEP_EMBEDDING, Rule.SHARED_REGISTRATION}
    assert more.early_release is PROFILES["sglang-0.5.16"].early_release
    assert profile(more.name) == more


def test_what_is_added_can_be_taken_away() -> None:
    assert profile("sglang-0.5.16+keep_embedding-keep_embedding").rules == PROFILES["sglang-0.5.16"].rules


@pytest.mark.parametrize("name", ["hardend", "sglang-0.5.23-cahce", "nothing+keep_embedding", "hardened+", ""])
def test_another_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(UsageError, match=r"no profile .*; use .*"):
        profile(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hardened-no_such_rule", "no rule 'no_such_rule'; .* one of the 12 rules; shared_registration, "),
        ("hardened-keep_embedding+Check-metadata", "no rule 'metadata'"),
        ("sglang-0.5.17+count_receiver", "one of the 12 rules; the nearest: count_receivers"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        profile(name)
