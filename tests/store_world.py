"""What the store's tests share: towers that count, encoder sides over a real master, bytes to compare with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from epdlab.cached_tower import Agreement, CachedTower, open_cached_tower
from epdlab.donor import Donor
from epdlab.encode_server import Prepared
from epdlab.engine import TensorBuffer
from epdlab.master import MooncakeMaster
from epdlab.modality import Modality
from epdlab.ports import Buffer
from epdlab.steps import GO, Decision, Event, Point, Steps
from epdlab.store import CacheConfig, EmbeddingCache
from epdlab.store_client import StoreClient, StoreConfig
from epdlab.tower import SyntheticTower

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 20.0
MASTER_FLAGS = {
    "default_kv_lease_ttl": 500,
    "client_ttl": 2,
    "put_start_discard_timeout_sec": 1,
    "put_start_release_timeout_sec": 2,
}


class CountingTower(SyntheticTower):
    """Remembers every item it ran a forward for, and how many forwards there were."""

    def __init__(self, model: str = "synthetic") -> None:
        super().__init__()
        self.model = model
        self.forwards: list[list[int]] = []

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        self.forwards.append([seed for prepared in batch for _, seed in prepared.payload])
        return await super().forward(batch)

    def fingerprint(self) -> str:
        return self.model


class Hook:
    """A gate that runs a coroutine where a step begins, or decides about it."""

    def __init__(self, step: str, act: Callable[[], Awaitable[None]] | None = None, decision: Decision = GO) -> None:
        self.step, self.act, self.decision = step, act, decision
        self.seen = 0

    async def enter(self, point: Point) -> Decision:
        if point.step != self.step or point.phase != "begin":
            return GO
        self.seen += 1
        if self.act is not None:
            await self.act()
        return self.decision


class Encoder:
    """One encoder side: a counting tower behind a cache, and its trace."""

    def __init__(self, tower: CachedTower, inner: CountingTower, events: list[Event]) -> None:
        self.tower, self.inner, self.events = tower, inner, events

    async def embed(self, *items: str) -> bytes:
        """One request's embedding."""
        prepared = await self.tower.prepare(items, Modality.IMAGE)
        [buffer] = await self.tower.forward([prepared])
        return raw(buffer)

    async def right(self, *items: str) -> bool:
        """Whether a request's embedding is what the tower alone makes of it."""
        return await self.embed(*items) == await plain(*items)

    async def settled(self) -> None:
        await self.tower.cache.settled()

    @property
    def computed(self) -> list[int]:
        return [seed for seeds in self.inner.forwards for seed in seeds]

    @property
    def counts(self) -> dict[str, int]:
        """The counters that are not 0."""
        return {name: count for name, count in self.tower.counters.items() if count}

    @property
    def reasons(self) -> dict[str, int]:
        return dict(self.tower.cache.counters.reasons)

    def steps_of(self, step: str, phase: str = "begin") -> list[Event]:
        return [event for event in self.events if event.step == step and event.phase == phase]


class World:
    """A master, a donor and clients that several tests share: a client's close takes a second."""

    def __init__(self, out: Path) -> None:
        self.master = MooncakeMaster(out / "master.log", flags=MASTER_FLAGS)
        self.donor: Donor | None = None
        self.clients: list[StoreClient] = []
        self.out = out

    async def start(self, donor_bytes: int, clients: int) -> None:
        await self.master.start()
        self.donor = Donor(self.master.address, donor_bytes, self.out / "donor.log")
        await self.donor.start()
        store = StoreConfig(self.master.address, wait_s=PATIENCE_S)
        self.clients = [StoreClient(store) for _ in range(clients)]
        for one in self.clients:
            await one.open()

    async def stop(self) -> None:
        await asyncio.gather(*(one.close() for one in self.clients))
        if self.donor is not None:
            await self.donor.stop()
        await self.master.stop()

    @asynccontextmanager
    async def encoder(
        self, *, pool: int = 8 * MIB, model: str = "synthetic", gate: Any = None, agreement: Agreement | None = None
    ) -> AsyncIterator[Encoder]:
        """An encoder side with a fresh pool over one of the shared clients."""
        store, events, inner = self.clients.pop(), list[Event](), CountingTower(model)
        cache = EmbeddingCache(Steps("enc", events.append, gate), store, CacheConfig(pool, 64 * KIB, PATIENCE_S))
        await cache.open()
        try:
            yield Encoder(CachedTower(inner, cache, agreement=agreement), inner, events)
        finally:
            await cache.settled()
            store.unregister(cache.memory.buffer)
            self.clients.append(store)
        assert cache.census() == {"fills": 0, "cache_tasks": 0, "pinned": 0}

    @asynccontextmanager
    async def client(self, nbytes: int = MIB) -> AsyncIterator[tuple[StoreClient, TensorBuffer]]:
        """One of the shared clients with registered memory."""
        store, memory = self.clients.pop(), TensorBuffer(torch.zeros(nbytes, dtype=torch.uint8))
        store.register(memory)
        try:
            yield store, memory
        finally:
            store.unregister(memory)
            self.clients.append(store)


@asynccontextmanager
async def encoders(
    master: str, *gates: Any, wait_s: float = PATIENCE_S, max_late: int = 2, pool: int = 8 * MIB
) -> AsyncIterator[list[Encoder]]:
    """Encoder sides with clients of their own, one per gate (None for no gate)."""
    made = []
    config = CacheConfig(pool, 64 * KIB, fetch_wait_s=wait_s)
    store = StoreConfig(master, wait_s=wait_s, max_late=max_late, probe_every_s=0.05)
    try:
        for gate in gates:
            events, inner = list[Event](), CountingTower()
            tower = await open_cached_tower(inner, Steps("enc", events.append, gate), store, config)
            made.append(Encoder(tower, inner, events))
        yield made
    finally:
        await asyncio.gather(*(enc.tower.close() for enc in made))
    for enc in made:
        assert enc.tower.cache.census() == {"fills": 0, "cache_tasks": 0, "pinned": 0}


def raw(buffer: Buffer) -> bytes:
    assert isinstance(buffer, TensorBuffer)
    return bytes(buffer.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


async def plain(*items: str) -> bytes:
    """The embedding without any cache."""
    tower = SyntheticTower()
    [buffer] = await tower.forward([await tower.prepare(items, Modality.IMAGE)])
    return raw(buffer)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll; fails the test if it never holds."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), timeout_s)
