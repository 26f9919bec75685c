"""Plays a receiver scenario: one real encode server and the release's real receiver, one process for each rank."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from . import calls, payload, wire
from .child import Child, Json, Nursery
from .encoder import Encoder
from .recorder import ANY
from .scenarios import Scenario, Step

PARTS = 2
"""Parts of an end-to-end request: two images, so that offsets show; one where a single slot is contended for."""


class Group:
    """The receiver ranks of one scenario."""

    def __init__(self, ranks: list[Child]) -> None:
        self.ranks = ranks

    @classmethod
    async def start(
        cls, scenario: Scenario, release: str, nursery: Nursery, folder: Path, url: str, store: Path
    ) -> Group:
        """Starts every rank; they meet through a gloo store in `store`."""
        common = {"version": release, "folder": str(folder), "tp": scenario.tp, "store": str(store), "url": url}
        common |= {
            "pool_mib": scenario.pool_mib,
            "wait_timeout": scenario.wait_timeout,
            "http_timeout": scenario.http_timeout,
        }
        starts = [nursery.spawn("receiver_proc", common | {"rank": rank}) for rank in range(scenario.tp)]
        done = await asyncio.gather(*starts, return_exceptions=True)
        group = cls([child for child in done if isinstance(child, Child)])
        for failure in done:
            if isinstance(failure, BaseException):
                await group.end()
                raise failure
        return group

    async def ask(self, **words: Any) -> list[Json]:
        """The same command to every rank, at the same time."""
        return list(await asyncio.gather(*(rank.ask(**words) for rank in self.ranks)))

    async def end(self) -> None:
        """Ends every rank."""
        await asyncio.gather(*(rank.end() for rank in self.ranks))


class Play:
    """One receiver scenario while it is played."""

    def __init__(self, scenario: Scenario, encoder: Encoder, group: Group, first_seed: int) -> None:
        self.scenario = scenario
        self.encoder = encoder
        self.group = group
        self.first_seed = first_seed
        self.parts = PARTS if scenario.tp > 1 else 1
        self.states: list[Json] = []
        self.looks: list[list[Json]] = []

    async def run(self) -> None:
        """Carries the steps out."""
        for step in self.scenario.steps:
            await getattr(self, f"_{step.do}")(step)

    def _name(self, step: Step) -> str:
        return f"req{step.value}"

    def _seeds(self, step: Step) -> list[int]:
        return [self.first_seed + 10 * (step.value or 0) + part for part in range(self.parts)]

    async def _ask(self, step: Step) -> None:
        items = [payload.item(self.scenario.nbytes, seed) for seed in self._seeds(step)]
        await self.group.ask(do="ask", request=self._name(step), items=items, parts=[1] * self.parts)

    async def _run(self, step: Step) -> None:
        answers = await self.group.ask(do="run", request=self._name(step))
        self.states.append({"request": self._name(step), "states": [answer["state"] for answer in answers]})

    async def _look(self, step: Step) -> None:
        rows = self.scenario.nbytes // payload.ROW_BYTES
        self.looks.append(await self.group.ask(do="look", request=self._name(step), rows=rows, seeds=self._seeds(step)))

    async def _hold(self, step: Step) -> None:
        await self.encoder.control("hold", key=ANY)

    async def _gather(self, step: Step) -> None:
        await self.encoder.control("gather", count=step.value)

    async def _park(self, step: Step) -> None:
        await self.encoder.control("park", sessions=[self.group.ranks[step.rank or 0].ready["session"]])

    async def _unpark(self, step: Step) -> None:
        await self.encoder.control("park", sessions=[])

    async def _answers(self, step: Step) -> None:
        await self.encoder.wait("await_answers", count=step.value)

    async def _held(self, step: Step) -> None:
        await self.encoder.wait("await_held", key=ANY)

    async def _release(self, step: Step) -> None:
        await self.encoder.control("release", keys=[ANY])

    async def _answered(self, step: Step) -> None:
        await self.encoder.wait("await_quiet")


async def play(
    scenario: Scenario, release: str, encoder: Encoder, nursery: Nursery, folder: Path, first_seed: int
) -> Json:
    """Plays a receiver scenario and gives its result."""
    await encoder.control("setup", send_timeout=scenario.send_timeout, global_cache=False)
    await encoder.control("take")
    with tempfile.TemporaryDirectory(prefix="epdlab-store-") as temporary:
        store = Path(temporary) / "gloo"
        group = await Group.start(scenario, release, nursery, folder, encoder.url, store)
        try:
            one = Play(scenario, encoder, group, first_seed)
            await one.run()
            await encoder.wait("await_quiet")
            ends = await group.ask(do="take")
            state = await encoder.control("take")
        finally:
            await group.end()
    return _result(one, ends, state)


def _result(one: Play, ends: list[Json], state: Json) -> Json:
    """Everything that is stored of a receiver scenario."""
    events = state["events"]
    sessions = {rank.ready["session"]: index for index, rank in enumerate(one.group.ranks)}
    sends = [event["request"] for event in events if event["op"] == "http" and event["path"] == "/send"]
    ports = {send["embedding_port"]: sessions[send["session_id"]] for send in sends}
    encoder_calls = calls.named(events, sessions, ports)
    landing = [calls.named(end["events"], {}, {}, "landing") for end in ends]
    return {
        "requests": len({step.value for step in one.scenario.steps if step.do == "ask"}),
        "calls": encoder_calls,
        "counts": calls.counts(encoder_calls),
        "landing_calls": {f"rank{index}": listed for index, listed in enumerate(landing)},
        "states": one.states,
        "statuses": wire.statuses(events),
        "outcome": _outcome(one, ends, state),
        "wire": wire.exchanges(events, sessions, ports, ends),
    }


def _outcome(one: Play, ends: list[Json], state: Json) -> Json:
    """The fields of `driver.Outcome`, and what became of the landing memory."""
    last = [look for answers in one.looks[-1:] for look in answers]
    first = [look for answers in one.looks[:1] for look in answers]
    final = {entry["request"]: entry["states"] for entry in one.states}
    return {
        "received_ok": sum(look["right"] for look in last),
        "wrong_acked": sum(look["ready"] and not look["right"] for look in last),
        "not_acked": sum(state != "ready" for states in final.values() for state in states),
        "http_errors": sum(count for status, count in wire.statuses(state["events"]).items() if status != "200"),
        "uncovered_writes": calls.uncovered_writes(state["events"]),
        "overwritten": sum(before["right"] and not after["right"] for before, after in zip(first, last, strict=True)),
        "live_regions_after": calls.live_regions(state["events"]),
        "embeddings_held_after": state["held"],
        "landing_regions_after": sum(calls.live_regions(end["events"]) for end in ends),
        "landing_slots_after": sum(end["slots"] or 0 for end in ends),
    }
