"""Rules and profiles: what a release does about the memory lifecycle, as named flags.

A *rule* is one flag with one meaning. A *profile* is a named set of rules, plus the few facts about a release's
protocol that are no safety rule. Sender and receiver ask `profile.has(rule)`; no other module decides by release.
The cells are claims about upstream code and are checked line by line (epdlab/report/claims*.toml).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from enum import Enum

from .errors import UsageError
from .modality import Modality


class Rule(Enum):
    """A safety rule; the value is its name in JSON and on the command line."""

    SHARED_REGISTRATION = "shared_registration"
    DEFERRED_DEREGISTER = "deferred_deregister"
    KEEP_EMBEDDING = "keep_embedding"
    CHECK_TRANSFER_STATUS = "check_transfer_status"
    CHECK_REGISTER_STATUS = "check_register_status"
    COUNT_RECEIVERS = "count_receivers"
    DRAIN_BEFORE_RELEASE = "drain_before_release"
    QUARANTINE_AFTER_TIMEOUT = "quarantine_after_timeout"
    HOLD_LANDING_UNTIL_CONSUMED = "hold_landing_until_consumed"
    CHECK_REQUEST_ID = "check_request_id"
    CHECK_METADATA = "check_metadata"
    NOTIFY_ERRORS = "notify_errors"

    @property
    def meaning(self) -> str:
        return MEANINGS[self]


MEANINGS: dict[Rule, str] = {
    Rule.SHARED_REGISTRATION: "one memory region per request part, shared by sibling /send calls",
    Rule.DEFERRED_DEREGISTER: "deregister at request clean-up, not after each /send",
    Rule.KEEP_EMBEDDING: "the embedding lives until its region is gone",
    Rule.CHECK_TRANSFER_STATUS: "a negative transfer status is an error and is never acked",
    Rule.CHECK_REGISTER_STATUS: "a refused registration is an error",
    Rule.COUNT_RECEIVERS: "early release counts distinct receivers, not calls",
    Rule.DRAIN_BEFORE_RELEASE: "no clean-up deregisters or frees memory while a write is in flight",
    Rule.QUARANTINE_AFTER_TIMEOUT: "memory of a write that timed out stays set aside until it cannot be touched",
    Rule.HOLD_LANDING_UNTIL_CONSUMED: "landing memory is not reused before its reader is done",
    Rule.CHECK_REQUEST_ID: "an ack of another request is dropped",
    Rule.CHECK_METADATA: "part, shape, dtype and bytes of an ack are checked, and a duplicate is dropped",
    Rule.NOTIFY_ERRORS: "an encoder error reaches the receiver at once, not by its deadline",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A named rule set, and the facts of a release's protocol that are no safety rule.

    Attributes:
        name: as on the command line.
        rules: the rules in force.
        early_release: /send carries receive_count, and the last one releases the part (PR #31591, in 0.5.17).
        write_blocks_loop: the write runs on the event loop, so the encoder does nothing else meanwhile (0.5.12).
        async_video: /encode of a video answers before the vision forward has run (0.5.16, 0.5.17).
        register_when_ready: the shared region is registered after the forward, not by the first /send (0.5.23).
        failed_send_releases: one rank's failed /send releases the part for all (0.5.23).
        send_timeout_s: seconds until the encoder's clean-up timer releases a part nobody released.
        modality: of the items that take this path through the release.
        note: what a reader must know before comparing with the release.
    """

    name: str
    rules: frozenset[Rule]
    early_release: bool = True
    write_blocks_loop: bool = False
    async_video: bool = True
    register_when_ready: bool = False
    failed_send_releases: bool = False
    send_timeout_s: float = 180.0
    modality: Modality = Modality.IMAGE
    note: str = ""

    def has(self, rule: Rule) -> bool:
        return rule in self.rules

    def without(self, rule: Rule) -> Profile:
        """The same profile with one rule taken away, for the ablation table."""
        return replace(self, name=f"{self.name}-{rule.value}", rules=self.rules - {rule})

    def plus(self, rule: Rule) -> Profile:
        """The same profile with one rule more, to switch rules on one at a time."""
        return replace(self, name=f"{self.name}+{rule.value}", rules=self.rules | {rule})


_SHARED = frozenset({Rule.SHARED_REGISTRATION, Rule.DEFERRED_DEREGISTER, Rule.KEEP_EMBEDDING})
_HTTP = frozenset({Rule.NOTIFY_ERRORS, Rule.CHECK_REQUEST_ID})
_RULES_0517 = _HTTP | _SHARED | {Rule.CHECK_TRANSFER_STATUS}
_RULES_0523 = _RULES_0517 | {
    Rule.CHECK_REGISTER_STATUS,
    Rule.COUNT_RECEIVERS,
    Rule.DRAIN_BEFORE_RELEASE,
    Rule.CHECK_METADATA,
}


def _release_0523(name: str, rules: frozenset[Rule], note: str) -> Profile:
    return Profile(name, rules, async_video=False, register_when_ready=True, failed_send_releases=True, note=note)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "sglang-0.5.12",
            frozenset({Rule.HOLD_LANDING_UNTIL_CONSUMED}),
            early_release=False,
            write_blocks_loop=True,
            async_video=False,
            note="upstream has one receiver here (the tokenizer process): with TP > 1 a sibling finds no embedding",
        ),
        Profile("sglang-0.5.16", _HTTP, early_release=False, note="the path of images and audio"),
        Profile(
            "sglang-0.5.16-video",
            _HTTP | _SHARED,
            early_release=False,
            modality=Modality.VIDEO,
            note="the asynchronous path of videos",
        ),
        Profile(
            "sglang-0.5.17",
            _RULES_0517,
            note="hold_landing_until_consumed is off as with a landing pool; a buffer per request lives by its views",
        ),
        _release_0523(
            "sglang-0.5.23",
            _RULES_0523,
            "without the global embedding cache; an ack's dtype and bytes are not checked, and the receiver drains "
            "only until its HTTP calls end",
        ),
        _release_0523(
            "sglang-0.5.23-cache",
            _RULES_0523 - {Rule.SHARED_REGISTRATION, Rule.DEFERRED_DEREGISTER},
            "with the global embedding cache: each /send registers",
        ),
        Profile("hardened", frozenset(Rule), note="all rules"),
    )
}

DEFAULT_PROFILE = "hardened"


def profile(name: str) -> Profile:
    """The profile called `name`; `NAME-RULE` is profile NAME without that rule, `NAME+RULE` with it, and so on.

    Raises:
        UsageError: no such profile; names the nearest ones.
    """
    if name in PROFILES:
        return PROFILES[name]
    found = re.fullmatch(r"(.+)([-+])(.*)", name)
    if found and found[3] in {r.value for r in Rule}:
        base, rule = profile(found[1]), Rule(found[3])
        return base.plus(rule) if found[2] == "+" else base.without(rule)
    if found and found[1].startswith(tuple(PROFILES)) and not difflib.get_close_matches(name, PROFILES, cutoff=0.94):
        raise UsageError(_no_rule(found[3]))
    near = difflib.get_close_matches(name, PROFILES, n=2) or list(PROFILES)
    raise UsageError(f"no profile {name!r}; use {', '.join(near)}")


def _no_rule(word: str) -> str:
    rules = [rule.value for rule in Rule]
    near = difflib.get_close_matches(word.lower(), rules, n=2)
    which = f"the nearest: {', '.join(near)}" if near else ", ".join(rules)
    return f"no rule {word!r}; NAME+RULE and NAME-RULE take one of the {len(rules)} rules; {which}"
