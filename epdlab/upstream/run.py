"""Plays the scenarios against the releases and stores what was seen; the command behind `python -m epdlab.upstream`.

A release's results are written only when all of its scenarios were played; a partial run prints them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import zmq

from ..engine import keep_native_log
from ..errors import EpdLabError, LabError
from . import driver, env, receivers
from .child import Json, Nursery
from .encoder import Encoder
from .scenarios import RELEASES, SCENARIOS, Scenario

SCENARIO_S = 150.0
RANKS = max(scenario.tp for scenario in SCENARIOS.values())
STANDS_IN = (
    "the constructor of MMEncoder, which would load a model: its attributes are set as it leaves them",
    "image and video preprocessing and the vision tower: an item is a seeded embedding",
    "the model's processor on the receiving side, and the TP group of the scheduler (gloo)",
    "torch.empty in the receiver module: landing memory is asked for on the GPU and comes from the host",
)
CACHE_STANDS_IN = "global_cache_* only: look-up and assembly of cached embeddings, which need CUDA"


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One release under test: its nursery, four ranks, and an encoder, replaced when a scenario left something."""

    def __init__(self, release: str, folder: Path, nursery: Nursery) -> None:
        self.release = release
        self.nursery = nursery
        self._folder = folder
        self._encoder: Encoder | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ranks = [driver.Rank(self._context) for _ in range(RANKS)]
        self._seeds = itertools.count(1, 100)

    async def play(self, scenario: Scenario) -> Json:
        """Plays one scenario, in a process that nothing was left behind in."""
        encoder = self._encoder or await Encoder.start(self.nursery, self.release, self._folder)
        self._encoder = None
        try:
            result = await asyncio.wait_for(self._played(scenario, encoder), SCENARIO_S)
        except BaseException as error:
            await encoder.end()
            if isinstance(error, TimeoutError):
                raise LabError(
                    f"{scenario.name} took over {SCENARIO_S:g} s on {self.release}; run it on a quiet machine"
                ) from None
            raise
        if scenario.role == "encoder" and _clean(result):
            self._encoder = encoder
        else:
            await encoder.end()
        return result

    async def _played(self, scenario: Scenario, encoder: Encoder) -> Json:
        seed = next(self._seeds)
        if scenario.role == "encoder":
            return await driver.play(scenario, self.release, encoder, self._ranks, seed)
        return await receivers.play(scenario, self.release, encoder, self.nursery, self._folder, seed)

    async def end(self) -> None:
        """Ends every process and closes the ranks."""
        if self._encoder is not None:
            await self._encoder.end()
        await self.nursery.end()
        for rank in self._ranks:
            rank.close()
        self._context.term()


def _clean(result: Json) -> bool:
    """Whether a scenario left nothing registered, held or pending in the encoder."""
    outcome = result["outcome"]
    settled = outcome.get(
        "settled", {"live_regions": outcome["live_regions_after"], "embeddings_held": outcome["embeddings_held_after"]}
    )
    return not any(settled.values())


def observed(scenario: Scenario, result: Json) -> str:
    """What was seen, in one sentence made from the counts."""
    found, outcome = result["counts"], result["outcome"]

    def codes(op: str) -> str:
        return ", ".join(f"{code} x{count}" for code, count in found[op].items()) or "none"

    parts = [
        f"{result['requests']} request(s), {scenario.tp} rank(s): registrations {codes('register')}",
        f"deregistrations {codes('deregister')}",
        f"writes {codes('transfer')}, {outcome['uncovered_writes']} of them without a live source region throughout",
        f"{outcome['received_ok']} right, {outcome['wrong_acked']} acked but wrong, {outcome['not_acked']} not acked",
        f"{outcome['http_errors']} HTTP errors",
        f"left behind: {outcome['live_regions_after']} region(s), {outcome['embeddings_held_after']} embedding(s)",
    ]
    if "settled" in outcome:
        left = outcome["settled"]
        parts.append(
            f"after the clean-up timer: {left['live_regions']} region(s), {left['embeddings_held']} embedding(s)"
        )
    if outcome.get("overwritten"):
        parts.append(f"{outcome['overwritten']} landing buffer(s) overwritten after the reader had them")
    return "; ".join(parts) + "."


async def play_release(release: str, scenarios: list[Scenario]) -> list[Json]:
    """Plays `scenarios` against one release, in order."""
    interpreter, folder = env.python(say), env.release_folder(release, say)
    say(f"{release}: importing")
    bench = Bench(release, folder, await Nursery.start(interpreter, release, folder))
    results = []
    try:
        for number, scenario in enumerate(scenarios, 1):
            began = time.monotonic()
            result = await bench.play(scenario)
            params = {
                key: value
                for key, value in asdict(scenario).items()
                if key not in ("name", "asks", "releases", "steps")
            }
            params["steps"] = [[step.do, step.rank, step.value] for step in scenario.steps]
            sentence = observed(scenario, result)
            names = {
                "name": scenario.name,
                "release": release,
                "versions": _versions(release, bench.nursery),
                "asks": scenario.asks,
            }
            results.append(names | {"params": params} | result | {"observed": sentence})
            say(f"{release}: {number}/{len(scenarios)} {scenario.name} ({time.monotonic() - began:.1f} s): {sentence}")
    finally:
        await bench.end()
    return results


def _versions(release: str, nursery: Nursery) -> dict[str, str]:
    names = {name.replace("-transfer-engine-non-cuda", ""): version for name, version in nursery.versions.items()}
    return {"sglang": release, **names}


def stored(release: str, results: list[Json], command: str) -> Json:
    """The content of one results file."""
    return {
        "release": release,
        "versions": results[0]["versions"] | {"sglang_wheel_sha256": env.wheel_digest(release, say)},
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.system(),
            "transport": "tcp, loopback",
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "stands_in": [*STANDS_IN, *([CACHE_STANDS_IN] if any(s["params"]["global_cache"] for s in results) else [])],
        "scenarios": results,
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epdlab.upstream", description="Run SGLang's own encoder and receiver code."
    )
    parser.add_argument("--release", action="append", choices=RELEASES, help="default: all")
    parser.add_argument(
        "--scenario", action="append", choices=list(SCENARIOS), help="default: all; some of them store nothing"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results (default: results)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Plays what the command line names; 0 if all of it could be played."""
    asked = _arguments(argv)
    env.cache_folder().mkdir(parents=True, exist_ok=True)
    keep_native_log(env.cache_folder() / "native.log")
    try:
        for release in asked.release or RELEASES:
            wanted = [SCENARIOS[name] for name in asked.scenario or SCENARIOS if release in SCENARIOS[name].releases]
            results = asyncio.run(play_release(release, wanted)) if wanted else []
            if asked.scenario:
                print(json.dumps(results, indent=1))
            else:
                _store(asked.out, release, results)
    except EpdLabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _store(folder: Path, release: str, results: list[Json]) -> None:
    """Writes one release's file as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"upstream_{release.replace('.', '_')}.json"
    text = json.dumps(stored(release, results, f"python -m epdlab.upstream --release {release}"), indent=1)
    draft = path.with_suffix(".draft")
    draft.write_text(text + "\n")
    draft.replace(path)
    say(f"wrote {path}")
