"""Plays an encoder scenario: one real encode server, and ranks that are a bare Mooncake engine and a ZMQ socket each.

The ranks ask as the release's receivers ask. They count acknowledgements and compare bytes; no acknowledgement is decoded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from mooncake.engine import TransferEngine
from numpy.typing import NDArray

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
        self._engine = TransferEngine()
        self._landing: NDArray[np.uint8] = np.zeros(LANDING_BYTES, dtype=np.uint8)
        self._pull = context.socket(zmq.PULL)
        self.port = self._pull.bind_to_random_port(f"tcp://{HOST}")
        self.address = int(self._landing.ctypes.data)
        codes = (self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), self._engine.register_memory(self.address, LANDING_BYTES))
        if any(codes):
            raise LabError(f"a landing engine did not start (codes {codes}); see `epdlab doctor`")
        self.session = f"{HOST}:{self._engine.get_rpc_port()}"
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
        self._engine.unregister_memory(self.address)
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
        return f"play{self.seed}_local_part_0"

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
            encode = asyncio.create_task(self._checked("/encode", body | {"embedding_port": None}))
            asks = [self._checked("/scheduler_receive_meta_data", {"req_id": self.request, "part_idx": 0}) for _ in self.ranks]
        else:
            asks = [self._checked("/encode", self._counted(body) | {"embedding_port": rank.port}) for rank in self.ranks]
            encode = None
        self.metadata = list(await asyncio.gather(*asks))
        if encode is not None:
            await encode

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
        body |= {"prefill_host": HOST, "embedding_port": rank.port, "session_id": rank.session, "buffer_address": rank.address}
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


async def play(scenario: Scenario, release: str, encoder: Encoder, ranks: list[Rank], seeds: itertools.count[int]) -> Json:
    """Plays an encoder scenario and gives its result, see the package's README for the fields."""
    used = ranks[: scenario.tp]
    sessions, ports = {r.session: i for i, r in enumerate(used)}, {r.port: i for i, r in enumerate(used)}
    await encoder.control("setup", send_timeout=scenario.send_timeout, global_cache=scenario.global_cache)
    await encoder.control("take")
    outcome, total, orders, events = Outcome(), calls.counts([]), [], []
    statuses: Counter[str] = Counter()
    settled: Json = {}
    for _ in range(scenario.repeat):
        for rank in used:
            rank.clear()
        one = Play(scenario, release, encoder, used, next(seeds))
        await one.run()
        state = await encoder.control("take")
        outcome.add_ranks(one, _pull(used, state["events"], ports))
        statuses.update(str(task.result()[0]) for _, task in one.sends)
        fresh = state["events"]
        if scenario.settle:
            await encoder.wait("await_cleanup", request=one.request, done=True)
            later = await encoder.control("take")
            settled = {"live_regions": calls.live_regions(fresh + later["events"]), "embeddings_held": later["held"]}
            fresh = fresh + later["events"]
        orders.append(calls.named(fresh, sessions, ports))
        total = calls.add(total, calls.counts(orders[-1]))
        events += fresh
        outcome.uncovered_writes += calls.uncovered_writes(fresh)
        outcome.live_regions_after += calls.live_regions(state["events"])
        outcome.embeddings_held_after = state["held"]
    return {
        "requests": scenario.repeat,
        "calls": orders[0],
        "orders": len({str(order) for order in orders}),
        "counts": total,
        "statuses": dict(sorted(statuses.items())),
        "outcome": vars(outcome) | ({"settled": settled} if settled else {}),
    }


def _pull(ranks: list[Rank], events: list[Json], ports: dict[int, int]) -> dict[int, int]:
    """Takes from every rank's socket what the encoder has pushed to it."""
    pushed = Counter(ports[event["port"]] for event in events if event["op"] == "ack")
    return {rank: ranks[rank].pull_acks(count) for rank, count in pushed.items()}
