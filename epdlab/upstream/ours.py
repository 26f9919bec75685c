"""Plays the encoder scenarios against our own encoder under a profile, for comparison with what a release did.

The encoder, its engine and its links are real; ranks are a bare Mooncake engine and a ZMQ socket each, as in `driver`.
Receiver scenarios play schedulers, which a profile does not model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ..clock import LoopClock
from ..encode_server import MMEncoder
from ..engine import MooncakeEngine, check
from ..errors import EpdLabError, UsageError
from ..link import HttpZmqLink
from ..messages import EncodeReply, EncodeRequest, SendRequest
from ..modality import Modality
from ..ports import AckSocket, Buffer
from ..rules import profile
from ..steps import GO, Decision, Event, Point, Steps
from ..tower import SyntheticTower
from . import calls
from .calls import Call
from .scenarios import MIB, SCENARIOS, Scenario, Step

PROFILES = {"0.5.16": "sglang-0.5.16", "0.5.17": "sglang-0.5.17", "0.5.23": "sglang-0.5.23"}
ASYNCHRONOUS = {"0.5.16": "sglang-0.5.16-video"}
MAX_TP = max(scenario.tp for scenario in SCENARIOS.values())
OPERATIONS = {"mr.register": "register", "mr.deregister": "deregister", "transfer.write": "transfer", "ack.push": "ack"}


def profile_for(release: str, scenario: Scenario) -> str:
    """The profile that stands for a release on the path a scenario takes."""
    if scenario.global_cache:
        return f"{PROFILES[release]}-cache"
    if scenario.modality == "VIDEO":
        return ASYNCHRONOUS.get(release, PROFILES[release])
    return PROFILES[release]


@dataclass
class _Rank:
    engine: MooncakeEngine
    landing: Buffer
    acks: AckSocket

    def close(self) -> None:
        """Give the landing memory back."""
        self.acks.close()
        self.engine.deregister(self.landing.address)
        self.engine.close()


class Bed:
    """What plays share: one link, the encoder's engine, and ranks with landing memory. An async context manager."""

    async def __aenter__(self) -> Bed:
        self.link, self.engine = HttpZmqLink(), MooncakeEngine()
        self.ranks = [_rank(self.link) for _ in range(MAX_TP)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
        await self.link.close()
        self.engine.close()


@dataclass
class _Bench:
    """One encoder that is held and made to fail, and what it did."""

    bed: Bed
    events: list[Event] = field(default_factory=list)
    holds: dict[int, asyncio.Event] = field(default_factory=dict)
    held: dict[int, asyncio.Event] = field(default_factory=dict)
    fails: dict[int, int] = field(default_factory=dict)
    occupies: int | None = None
    occupied: int | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, event: Event) -> None:
        """Keep an event; at the moment the embedding is there, let the other owner register it first."""
        self.events.append(event)
        if event.step == "embedding.ready" and self.occupies is not None and event.address and event.bytes:
            self.occupied = event.address + self.occupies
            code = self.bed.engine.register(self.occupied, event.bytes - self.occupies)
            self.events.append(_of_another(event, "mr.register", code))
        if event.step == "part.release":
            self.released.set()
        if event.step == "mr.register" and event.result == -7:
            self.refused.set()

    async def enter(self, point: Point) -> Decision:
        """The gate: hold and fail writes by rank."""
        if point.step != "transfer.write" or point.phase != "begin" or point.rank is None:
            return GO
        if point.rank in self.holds:
            self.held.setdefault(point.rank, asyncio.Event()).set()
            await self.holds.pop(point.rank).wait()
        code = self.fails.pop(point.rank, None)
        return GO if code is None else Decision("fail", code)


def _of_another(near: Event, step: str, code: int) -> Event:
    """A call of the other owner, at the place in the record where it happened."""
    return Event(near.t, "other", step, "end", result=code)


async def play(scenario: Scenario, release: str, bed: Bed) -> dict[str, Any]:
    """Play one encoder scenario; counts, the first request's calls in order, and how each /send ended.

    Raises:
        UsageError: a receiver scenario.
    """
    if scenario.role != "encoder":
        raise UsageError(f"{scenario.name} plays receivers; only encoder scenarios can be played on a profile")
    seeds = range(1, scenario.repeat + 1)
    requests = [await _Play(scenario, release, _Bench(bed), bed.link).run(seed) for seed in seeds]
    orders = [request["calls"] for request in requests]
    return {
        "requests": len(requests),
        "calls": orders[0],
        "distinct_orders": len({str(order) for order in orders}),
        "counts": calls.counts(call for order in orders for call in order),
        "sends_ok": sum(request["ok"] for request in requests),
        "sends_failed": sum(request["failed"] for request in requests),
    }


class _Play:
    """One request of a scenario on one fresh encoder."""

    def __init__(self, scenario: Scenario, release: str, bench: _Bench, link: HttpZmqLink) -> None:
        self.scenario, self.bench, self.clock = scenario, bench, LoopClock()
        steps = Steps("enc0", bench.record, bench)
        chosen = profile(profile_for(release, scenario))
        self.encoder = MMEncoder(SyntheticTower(), bench.bed.engine, link, self.clock, steps, chosen)
        self.sends: list[tuple[int, asyncio.Task[Any]]] = []
        self.let_go: dict[int, asyncio.Event] = {}

    async def run(self, seed: int) -> dict[str, Any]:
        self.seed = seed
        try:
            for step in self.scenario.steps:
                await getattr(self, f"_{step.do}")(step)
            ended = await asyncio.gather(*(task for _, task in self.sends), return_exceptions=True)
            if self.scenario.settle and not self.bench.released.is_set():
                await self._cleanup(Step("cleanup"))
            await self.encoder.settled()
            return {"calls": self._calls(), "ok": ended.count(None), "failed": len(ended) - ended.count(None)}
        finally:
            for waiting in self.let_go.values():
                waiting.set()
            await self.encoder.close()

    def _calls(self) -> list[Call]:
        found = []
        for event in self.bench.events:
            if event.phase == "end" and event.step in OPERATIONS:
                rc = event.result if isinstance(event.result, int) else None
                who = "other" if event.process == "other" else "encoder"
                found.append({"op": OPERATIONS[event.step], "rank": event.rank, "owner": who, "rc": rc})
        return found

    async def _encode(self, step: Step) -> None:
        first = self.bench.bed.ranks[0].acks.port
        request = EncodeRequest(
            req_id=f"play{self.seed}",
            encoder_idx=0,
            mm_items=[f"bytes:{self.scenario.nbytes}:{self.seed}"],
            num_parts=1,
            part_idx=0,
            modality=Modality(self.scenario.modality),
            prefill_host="127.0.0.1",
            embedding_port=first,
        )
        self.meta: EncodeReply = await self.encoder.encode(request)

    async def _send(self, step: Step) -> None:
        index = step.rank or 0
        rank = self.bench.bed.ranks[index]
        request = SendRequest(
            req_id=self.meta.req_id,
            part_idx=0,
            num_parts=1,
            modality=self.meta.modality,
            prefill_host="127.0.0.1",
            embedding_port=rank.acks.port,
            session_id=rank.engine.session_id,
            buffer_address=rank.landing.address,
            embedding_size=self.meta.embedding_size,
            receive_count=self.scenario.tp if self.scenario.receive_count else None,
            tp_rank=index,
        )
        self.sends.append((index, asyncio.ensure_future(self._sent(request))))
        await asyncio.sleep(0)

    async def _sent(self, request: SendRequest) -> None:
        try:
            await self.encoder.send(request)
        except EpdLabError as error:
            raise RuntimeError(error.kind) from None

    async def _finish(self, step: Step) -> None:
        tasks = [task for rank, task in self.sends if step.rank in (None, rank)]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, step: Step) -> None:
        rank = step.rank or 0
        self.let_go[rank] = self.bench.holds[rank] = asyncio.Event()
        self.bench.held[rank] = asyncio.Event()

    async def _held(self, step: Step) -> None:
        await self.bench.held[step.rank or 0].wait()

    async def _release(self, step: Step) -> None:
        for rank in list(self.let_go) if step.rank is None else [step.rank]:
            self.let_go[rank].set()

    async def _fail(self, step: Step) -> None:
        self.bench.fails[step.rank or 0] = step.value or -1

    async def _occupy(self, step: Step) -> None:
        self.bench.occupies = step.value or 0

    async def _owner_deregisters(self, step: Step) -> None:
        assert self.bench.occupied is not None
        code = self.bench.bed.engine.deregister(self.bench.occupied)
        self.bench.events.append(_of_another(self.bench.events[-1], "mr.deregister", code))

    async def _cleanup(self, step: Step) -> None:
        """The clean-up timer fires (here at once, not after its seconds)."""
        self.clock.fire("cleanup")
        await self.bench.released.wait()

    async def _refused(self, step: Step) -> None:
        await self.bench.refused.wait()


def _rank(link: HttpZmqLink) -> _Rank:
    engine = MooncakeEngine()
    landing = engine.allocate(4 * MIB)
    check("register", engine.register(landing.address, landing.nbytes), "landing memory")
    return _Rank(engine, landing, link.acks())
