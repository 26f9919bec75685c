"""The ablation table: take one rule away from `hardened`, and see which invariant breaks, by which schedule.

A rule whose removal breaks nothing is no rule. Where to look first for each rule is data (`HUNTS`); what is found
there is found by exploring.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..rules import PROFILES, Rule
from .explorer import ALL, NONE, Exploration, Finding, explore, kinds_of
from .scenario import Scenario
from .schedule import save

HARDENED = "hardened"
HARDENED_SHARE = 0.25
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Hunt:
    """Where the removal of a rule shows.

    Attributes:
        breaks: the invariants that tell most, the most telling first. why: what happens without the rule.
    """

    breaks: tuple[str, ...]
    why: str
    fault: str = NONE
    requests: int = 1
    parts: int = 1
    tp: int = 2

    def scenario(self, profile: str) -> Scenario:
        return Scenario(profile, self.tp, self.requests, self.parts, pool=self.requests > 1)


HUNTS: dict[Rule, Hunt] = {
    Rule.SHARED_REGISTRATION: Hunt(("overlap",), "sibling /send calls each register the same buffer"),
    Rule.DEFERRED_DEREGISTER: Hunt(
        ("source_uncovered",), "the first /send to finish withdraws the region under a sibling's write"
    ),
    Rule.KEEP_EMBEDDING: Hunt(("lost_embedding",), "the first /send to finish drops the embedding of its siblings"),
    Rule.CHECK_TRANSFER_STATUS: Hunt(("false_ack",), "a failed write is acked", "transfer_fails"),
    Rule.CHECK_REGISTER_STATUS: Hunt(
        ("source_uncovered",), "a refused region is written from, then another owner's is withdrawn", "register_refused"
    ),
    Rule.COUNT_RECEIVERS: Hunt(("lost_embedding",), "a repeated /send counts as another receiver", "send_repeated"),
    Rule.DRAIN_BEFORE_RELEASE: Hunt(
        ("source_uncovered", "destination_unsafe"), "clean-up withdraws the region under a write", "cleanup_timer"
    ),
    Rule.QUARANTINE_AFTER_TIMEOUT: Hunt(
        ("wrong_bytes", "destination_unsafe"), "late bytes land in the next request's memory", "transfer_late", 2
    ),
    Rule.HOLD_LANDING_UNTIL_CONSUMED: Hunt(
        ("wrong_bytes",), "the next request is written over an embedding that was not read yet", NONE, 2
    ),
    Rule.CHECK_REQUEST_ID: Hunt(
        ("wrong_bytes",), "a late ack reaches the next request through a reused port", "receiver_deadline", 2
    ),
    Rule.CHECK_METADATA: Hunt(
        ("wrong_bytes",), "a second ack of one part stands in for the other part's", "send_repeated", parts=2
    ),
    Rule.NOTIFY_ERRORS: Hunt(("unfinished",), "an error that is known is waited out", "transfer_fails"),
}


def ablate(
    seconds: float | None = None, seed: int = 0, out: Path | None = None, say: Say = lambda _: None
) -> dict[str, Any]:
    """The whole table, and `hardened` itself on the same bound.

    Args:
        seconds: for all of it, a quarter of it for `hardened`; None: as long as it takes.
        out: a folder for the schedule files, one per rule.
    """
    began = time.monotonic()
    whole = explore(Scenario(HARDENED), kinds_of(ALL), None if seconds is None else seconds * HARDENED_SHARE, seed)
    say(f"hardened: {whole.schedules} schedules, {_broken(whole) or 'nothing breaks'}")
    rows: list[dict[str, Any]] = []
    interrupted = whole.interrupted
    for left, rule in zip(range(len(HUNTS), 0, -1), HUNTS, strict=True):
        if interrupted:
            break
        spare = None if seconds is None else max(0.1, seconds - (time.monotonic() - began)) / left
        row, found = _row(rule, spare, seed, out)
        interrupted = found.interrupted
        rows.append(row)
        say(f"without {rule.value}: {row['invariant'] or 'nothing'} breaks, {row['moves']} moves, fault {row['fault']}")
    return {
        "ok": not interrupted and not whole.findings and all(row["invariant"] for row in rows),
        "interrupted": interrupted,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 3),
        "schedules": whole.schedules + sum(row["schedules"] for row in rows),
        "exhaustive": whole.exhaustive and all(row["exhaustive"] for row in rows),
        "hardened": {
            "schedules": whole.schedules,
            "exhaustive": whole.exhaustive,
            "violations": sorted(whole.findings),
        },
        "rules": rows,
    }


def _row(rule: Rule, seconds: float | None, seed: int, out: Path | None) -> tuple[dict[str, Any], Exploration]:
    """One line of the table: `hardened` without this rule, where its removal shows."""
    hunt, profile = HUNTS[rule], PROFILES[HARDENED].without(rule).name
    found = explore(hunt.scenario(profile), [hunt.fault], seconds, seed)
    finding = _most_telling(found, hunt)
    row: dict[str, Any] = {
        "rule": rule.value,
        "meaning": rule.meaning,
        "without": hunt.why,
        "profile": profile,
        "tp": hunt.tp,
        "requests": hunt.requests,
        "parts": hunt.parts,
        "fault": hunt.fault,
        "invariant": finding.invariant if finding else None,
        "message": finding.message if finding else None,
        "moves": len(finding.schedule.moves) if finding else None,
        "minimised": finding.minimised if finding else False,
        "also": sorted(set(found.findings) - ({finding.invariant} if finding else set())),
        "schedules": found.schedules,
        "exhaustive": found.exhaustive,
        "schedule": msgspec.to_builtins(finding.schedule) if finding else None,
        "file": None,
        "command": None,
    }
    if finding is not None and out is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"without_{rule.value}.json"
        save(finding.schedule, path)
        row |= {"file": str(path), "command": f"python -m epdlab replay {path}"}
    return row, found


def _most_telling(found: Exploration, hunt: Hunt) -> Finding | None:
    """The finding that tells most: as the hunt ranks them, else the shortest."""
    for invariant in hunt.breaks:
        if invariant in found.findings:
            return found.findings[invariant]
    return min(found.findings.values(), key=lambda finding: finding.rank, default=None)


def _broken(found: Exploration) -> str:
    return ", ".join(found.findings)
