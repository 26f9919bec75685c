"""Do our profiles call the engine as the releases did? The stored runs of the releases against runs of ours.

Compared per scenario: how often each engine call answered each code, how many /send calls succeeded, and, where a
release did it in one order only, the order of its calls and acks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine import keep_native_log
from ..report.results import RESULTS, write_result
from .calls import Call
from .ours import Bed, play, profile_for
from .scenarios import RELEASES, SCENARIOS

COMPARED = ("register", "deregister", "transfer", "ack")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario on a release and on the profile that stands for it; `differences` is empty where they agree."""

    release: str
    scenario: str
    profile: str
    ordered: bool
    differences: tuple[str, ...]


def stored(release: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """What the release did, from results/upstream_*.json: the encoder scenarios whose order is forced."""
    data = json.loads((folder / f"upstream_{release.replace('.', '_')}.json").read_text())
    scenarios: list[dict[str, Any]] = data["scenarios"]
    return [s for s in scenarios if s["params"]["role"] == "encoder" and not s["name"].startswith("unordered")]


async def compare(release: str, bed: Bed) -> list[Comparison]:
    """Play every stored scenario of a release on our profile."""
    return [await _compared(release, theirs, bed) for theirs in stored(release)]


async def _compared(release: str, theirs: dict[str, Any], bed: Bed) -> Comparison:
    scenario = SCENARIOS[theirs["name"]]
    ours = await play(scenario, release, bed)
    ordered = theirs["distinct_orders"] == 1
    pairs = {
        "counts": (ours["counts"], theirs["counts"]),
        "sends that succeeded": (ours["sends_ok"], theirs["statuses"].get("200", 0)),
    }
    if ordered:
        pairs["order"] = (signature(ours["calls"]), signature(theirs["calls"]))
    different = tuple(f"{what}: ours {a}, the release {b}" for what, (a, b) in pairs.items() if a != b)
    return Comparison(release, scenario.name, profile_for(release, scenario), ordered, different)


def signature(calls: list[Call]) -> list[tuple[Any, ...]]:
    """The calls as both sides can tell them: what, for which rank where the release knows it, and the code."""
    return [_signed(call) for call in calls if call["op"] in COMPARED]


def _signed(call: Call) -> tuple[Any, ...]:
    told = call["op"] in ("transfer", "ack")
    return (call["op"], call["rank"] if told else None, None if call["op"] == "ack" else call["rc"])


async def compare_all() -> dict[str, Any]:
    """Every release: how many scenarios were compared, how many in order too, and what differs."""
    async with Bed() as bed:
        compared = {release: await compare(release, bed) for release in RELEASES}
    return {"releases": {f"v{release.replace('.', '_')}": _summed(found) for release, found in compared.items()}}


def _summed(found: list[Comparison]) -> dict[str, Any]:
    different = {c.scenario: list(c.differences) for c in found if c.differences}
    return {
        "scenarios": len(found),
        "ordered": sum(c.ordered for c in found),
        "agree": len(found) - len(different),
        "differences": different,
    }


def main() -> int:
    """Compare, keep results/conformance.json, and say where a profile and its release differ."""
    with tempfile.TemporaryDirectory(prefix="epdlab-conformance-") as folder:
        keep_native_log(Path(folder) / "engine.log")
        answer = asyncio.run(compare_all())
    write_result("conformance", answer, "python -m epdlab.upstream.conformance")
    for release, row in answer["releases"].items():
        print(f"{release}: {row['agree']} of {row['scenarios']} scenarios agree, {row['ordered']} of them in order too")
    return 0 if all(not row["differences"] for row in answer["releases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
