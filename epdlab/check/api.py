"""What the command line and notebooks call: explore, ablate, replay. Each answers one JSON object.

Lines for people go to `say`; a bar of progress goes to stderr where that is a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ..modality import Modality
from ..rules import profile as profile_named
from . import ablation
from .budget import advise
from .explorer import Exploration, Progress, as_json, kinds_of
from .explorer import explore as explore_scenario
from .scenario import Scenario
from .schedule import load, save
from .schedule import replay as replay_schedule

Say = Callable[[str], None]
BAR_EVERY_S = 0.2
BAR_WIDTH = 20


def _silent(_: str) -> None:
    """Nobody reads."""


def explore(
    profile: str,
    tp: int = 2,
    requests: int = 1,
    parts: int = 1,
    fault: str | None = None,
    seconds: float | None = None,
    seed: int = 0,
    out: Path | None = None,
    say: Say = _silent,
    modality: Modality | None = None,
) -> dict[str, Any]:
    """Explore every order within a bound.

    Args:
        fault: a kind (see `scenario.FAULTS`), `all` for none and each of them; None: no fault.
        seconds: budget; what it does not cover is sampled at random with `seed`. None: as long as it takes.
        out: a folder for one schedule file per broken invariant.
        modality: of a single part; None: that of the profile.

    Raises:
        UsageError: unknown profile or fault, a bound out of range, or one that needs a budget.
    """
    modality = modality or profile_named(profile).modality
    scenario = Scenario(profile, tp, requests, parts, modality, pool=requests > 1).checked()
    kinds = kinds_of(fault)
    advice = advise(scenario, kinds, seconds)
    if advice is not None:
        say(advice)
    began = time.monotonic()
    bar = Bar(sys.stderr)
    found = explore_scenario(scenario, kinds, seconds, seed, bar.show)
    bar.clear()
    answer = as_json(found, time.monotonic() - began, seed) | {"advice": advice}
    if out is not None:
        _save_all(found, answer, out)
    for line in _lines(found, answer):
        say(line)
    return answer


def ablate(seconds: float | None = None, seed: int = 0, out: Path | None = None, say: Say = _silent) -> dict[str, Any]:
    """Take each rule away from `hardened`; see `ablation.ablate`."""
    return ablation.ablate(seconds, seed, out, say)


def replay(path: Path, say: Say = _silent) -> dict[str, Any]:
    """Replay a schedule file in the model. `ok`: it shows what the file says it shows, or, if it says nothing, ran.

    Raises:
        UsageError: the file is no schedule, or does not fit its profile.
    """
    schedule = load(path)
    replayed = replay_schedule(schedule)
    shown = [{"invariant": breach.invariant, "message": breach.message} for breach in replayed.breaches]
    expected = [msgspec.to_builtins(breach) for breach in schedule.breaches]
    same = not expected or _keys(shown) == _keys(expected)
    for number, move in enumerate(schedule.moves, start=1):
        say(f"{number:3} {move}")
    for breach in shown:
        say(f"    {breach['invariant']}: {breach['message']}")
    if not same:
        say(f"the file says {_keys(expected)}, this replay shows {_keys(shown)}")
    return {
        "ok": same and not replayed.defects,
        "profile": schedule.profile,
        "fault": schedule.fault,
        "moves": len(schedule.moves),
        "taken": len(replayed.moves),
        "violations": shown,
        "expected": expected,
        "defects": replayed.defects,
        "events": [msgspec.to_builtins(event) for event in replayed.events],
    }


def _keys(breaches: list[dict[str, Any]]) -> list[str]:
    return sorted({breach["invariant"] for breach in breaches})


def _save_all(found: Exploration, answer: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for violation in answer["violations"]:
        path = out / f"{answer['profile']}_{violation['invariant']}.json"
        save(found.findings[violation["invariant"]].schedule, path)
        violation["file"], violation["command"] = str(path), f"python -m epdlab replay {path}"


def _lines(found: Exploration, answer: dict[str, Any]) -> list[str]:
    extent = "every order" if answer["exhaustive"] else "a part of all orders"
    rate = answer["schedules"] / max(answer["seconds"], 1e-9)
    lines = [
        f"{answer['profile']}, TP {answer['tp']}: {extent}, {answer['schedules']:,} schedules, "
        f"{answer['states']:,} states, {answer['seconds']:.1f} s ({rate:,.0f}/s)"
        + (", interrupted" if answer["interrupted"] else "")
    ]
    for finding in found.findings.values():
        lines.append(f"{finding.invariant}: {finding.message}")
        lines += [f"  {number:3} {move}" for number, move in enumerate(finding.schedule.moves, start=1)]
    return lines if found.findings else [*lines, "no invariant breaks"]


class Bar:
    """One line of progress on a terminal, rewritten a few times a second; nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown, self._last = stream, stream.isatty(), 0.0

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._shown and now - self._last > BAR_EVERY_S:
            self._last = now
            done = round(BAR_WIDTH * progress.covered)
            bar = "#" * done + "." * (BAR_WIDTH - done)
            text = f"{progress.fault:18} [{bar}] {progress.schedules:,} schedules, {progress.findings} broken"
            print(f"\r{text:78}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        if self._shown:
            print(f"\r{'':78}\r", end="", file=self._stream, flush=True)
