"""Plays an encoder scenario: one real encode server, and ranks that are a bare Mooncake engine and a ZMQ socket each.

The ranks ask as the release's receivers ask. They count acknowledgements, undecoded, and compare bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from ..engine import MooncakeEngine, check
from ..errors import LabError
from . import calls, payload
from .child import Json
from .encoder import Encoder
from .recorder import destination
from .scenarios import MIB, Scenario, Step

HOST = "127.0.0.1"
LANDING_BYTES = 4 * MIB
ACK_S = 5.0


class Rank:
    """A receiving rank: landing memory registered with an engine of its own, and a PULL socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._engine = MooncakeEngine(HOST)
        self._landing: NDArray[np.uint8] = np.zeros(LANDING_BYTES, dtype=np.uint8)
        self._pull = context.socket(zmq.PULL)
        self.port = self._pull.bind_to_random_port(f"tcp://{HOST}")
        self.address = int(self._landing.ctypes.data)
        check("register", self._engine.register(self.address, LANDING_BYTES), "landing memory")
        self.session = self._engine.session_id
        self.key = destination(self.session, self.address)

    def clear(self) -> None:
        """Zeroes the landing memory."""
        self._landing[:] = 0

    def holds(self, nbytes: int, seed: int) -> bool:
        """Whether the landing memory starts with the embedding of `seed`."""
        want = payload.pattern(nbytes // payload.ROW_BYTES, seed).view(np.uint8)
        return bool(np.array_equal(self._landing[:nbytes], want))

    def pull_acks(self, expected: int) -> int:
        """Takes `expected` acknowledgements from the socket, undecoded; gives how many came."""
        came = 0
        while came < expected and self._pull.poll(round(ACK_S * 1000)):
            self._pull.recv_multipart()
            came += 1
        return came

    def close(self) -> None:
        """Deregisters the landing memory and closes the socket."""
        self._engine.deregister(self.address)
        self._engine.close()
        self._pull.close(linger=0)


@dataclass
class Play:
    """One request of a scenario while it is played."""

    scenario: Scenario
    release: str
    encoder: Encoder
    ranks: list[Rank]
    seed: int
    metadata: list[Json] = field(default_factory=list)
    sends: list[tuple[int, asyncio.Task[tuple[int, Any]]]] = field(default_factory=list)

    @property
    def request(self) -> str:
        """The request's id, in the form the receivers give to part 0."""
        return f"play{self.seed:05}_local_part_0"

    async def run(self) -> None:
        """Carries the steps out, then waits for every reply."""
        for step in self.scenario.steps:
            await getattr(self, f"_{step.do}")(step)
        await asyncio.gather(*(task for _, task in self.sends))

    async def _encode(self, step: Step) -> None:
        body = {
            "encoder_idx": 0,
            "mm_items": [payload.item(self.scenario.nbytes, self.seed)],
            "num_parts": 1,
            "part_idx": 0,
            "req_id": self.request,
            "modality": self.scenario.modality,
            "prefill_host": HOST,
        }
        if self.release == "0.5.23":
            asked = {"req_id": self.request, "part_idx": 0}
            encode = self._checked("/encode", body | {"embedding_port": None})
            pulls = (self._checked("/scheduler_receive_meta_data", asked) for _ in self.ranks)
            _, *self.metadata = await asyncio.gather(encode, *pulls)
        else:
            body = self._counted(body)
            posts = (self._checked("/encode", body | {"embedding_port": rank.port}) for rank in self.ranks)
            self.metadata = list(await asyncio.gather(*posts))

    def _counted(self, body: Json) -> Json:
        """0.5.16 knows no receive_count; the field is left out there and where the scenario says so."""
        known = self.release != "0.5.16" and self.scenario.receive_count
        return body | ({"receive_count": self.scenario.tp} if known else {})

    async def _checked(self, path: str, body: Json) -> Json:
        status, reply = await self.encoder.post(path, body)
        if status != 200:
            raise LabError(f"{self.scenario.name}: {path} answered {status}; the release did not come up as it should")
        return dict(reply)

    async def _send(self, step: Step) -> None:
        rank = self.ranks[step.rank or 0]
        body = {key: value for key, value in self.metadata[step.rank or 0].items() if key != "encoder_idx"}
        body |= {"prefill_host": HOST, "embedding_port": rank.port}
        body |= {"session_id": rank.session, "buffer_address": rank.address}
        task = asyncio.create_task(self.encoder.post("/send", self._counted(body)))
        self.sends.append((step.rank or 0, task))
        await asyncio.sleep(0)

    async def _finish(self, step: Step) -> None:
        await asyncio.gather(*(task for rank, task in self.sends if step.rank in (None, rank)))

    async def _hold(self, step: Step) -> None:
        await self.encoder.control("hold", key=self._key(step))

    async def _held(self, step: Step) -> None:
        await self.encoder.wait("await_held", key=self._key(step))

    async def _release(self, step: Step) -> None:
        ranks = self.ranks if step.rank is None else [self.ranks[step.rank]]
        await self.encoder.control("release", keys=[rank.key for rank in ranks])

    async def _fail(self, step: Step) -> None:
        await self.encoder.control("fail", key=self._key(step), code=step.value)

    async def _occupy(self, step: Step) -> None:
        await self.encoder.control("occupy", offset=step.value)

    async def _owner_deregisters(self, step: Step) -> None:
        await self.encoder.control("owner_deregisters")

    async def _cleanup(self, step: Step) -> None:
        await self.encoder.wait("await_cleanup", request=self.request, done=False)

    async def _refused(self, step: Step) -> None:
        await self.encoder.wait("await_refused")

    def _key(self, step: Step) -> str:
        return self.ranks[step.rank or 0].key


@dataclass
class Outcome:
    """What came of a scenario, summed over its requests; the fields are those of the results."""

    received_ok: int = 0
    wrong_acked: int = 0
    not_acked: int = 0
    http_errors: int = 0
    uncovered_writes: int = 0
    live_regions_after: int = 0
    embeddings_held_after: int = 0

    def add_ranks(self, play: Play, acks: dict[int, int]) -> None:
        """Judges every rank that asked: acked or not, right bytes or not, and the errors it was told."""
        for rank in sorted({rank for rank, _ in play.sends}):
            right = play.ranks[rank].holds(play.scenario.nbytes, play.seed)
            acked = acks.get(rank, 0) > 0
            self.received_ok += acked and right
            self.wrong_acked += acked and not right
            self.not_acked += not acked
        self.http_errors += sum(task.result()[0] != 200 for _, task in play.sends)


async def play(scenario: Scenario, release: str, encoder: Encoder, ranks: list[Rank], first_seed: int) -> Json:
    """Plays an encoder scenario and gives its result; the package's docstring names the fields."""
    await encoder.control("setup", send_timeout=scenario.send_timeout, global_cache=scenario.global_cache)
    await encoder.control("take")
    tally = Tally(ranks[: scenario.tp])
    for seed in range(first_seed, first_seed + scenario.repeat):
        one = Play(scenario, release, encoder, tally.ranks, seed)
        for rank in tally.ranks:
            rank.clear()
        await one.run()
        tally.add(one, await encoder.control("take"))
        if scenario.settle:
            await encoder.wait("await_cleanup", request=one.request, done=True)
            tally.add_settled(await encoder.control("take"))
    return tally.result()


class Tally:
    """Sums the requests of one scenario up."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self._sessions = {rank.session: index for index, rank in enumerate(ranks)}
        self._ports = {rank.port: index for index, rank in enumerate(ranks)}
        self._outcome = Outcome()
        self._statuses: Counter[str] = Counter()
        self._early = 0
        self._settled: Json = {}
        self._requests: list[list[Json]] = []

    def add(self, play: Play, state: Json) -> None:
        """One request that was played, and what the encoder recorded of it."""
        events = state["events"]
        self._requests.append(events)
        pushed = Counter(self._ports[event["port"]] for event in events if event["op"] == "ack")
        self._outcome.add_ranks(play, {rank: self.ranks[rank].pull_acks(count) for rank, count in pushed.items()})
        self._outcome.live_regions_after += calls.live_regions(events)
        self._outcome.embeddings_held_after = state["held"]
        self._statuses.update(str(task.result()[0]) for _, task in play.sends)
        self._early += _metadata_came_first(events)

    def add_settled(self, state: Json) -> None:
        """What the encoder recorded of the last request until its clean-up was through."""
        self._requests[-1] += state["events"]
        self._settled = {"live_regions": calls.live_regions(self._requests[-1]), "embeddings_held": state["held"]}

    def result(self) -> Json:
        """The scenario's result."""
        orders = [calls.named(events, self._sessions, self._ports) for events in self._requests]
        self._outcome.uncovered_writes = sum(map(calls.uncovered_writes, self._requests))
        return {
            "requests": len(orders),
            "calls": orders[0],
            "distinct_orders": len({str(order) for order in orders}),
            "counts": calls.counts(call for order in orders for call in order),
            "statuses": dict(sorted(self._statuses.items())),
            "metadata_before_forward": self._early,
            "outcome": vars(self._outcome) | ({"settled": self._settled} if self._settled else {}),
        }


def _metadata_came_first(events: list[Json]) -> bool:
    """Whether a rank had the metadata of its part before the vision tower ran."""
    replies = [event for event in events if event["op"] == "http" and event["path"] != "/send"]
    to_ranks = [reply for reply in replies if reply["path"] == "/scheduler_receive_meta_data"] or replies
    forward = next(event for event in events if event["op"] == "encode")
    return bool(min(reply["ended"] for reply in to_ranks) < forward["ended"])
