"""The store client: Mooncake's, with every code a typed outcome, every wait bounded and every crash made impossible.

Owns the process's `MooncakeDistributedStore`, the threads its calls run in, and what is registered with it. What the
objects hold is their owner's business. Codes and calls: mooncake 0.3.13.post1 (`mooncake.store`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from .engine import load_mooncake
from .errors import BadBuffer, EngineNotReady, EpdLabError, UsageError
from .ports import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")
Extents = Sequence[tuple[int, int]]
Intact = Callable[[int], bool]

LOCAL_BUFFER_BYTES = 16 << 20
MIN_SEGMENT_BYTES = 16 << 20
CLOSE_WAIT_S = 35.0
_ABANDONED: list[object] = []


class StoreUnavailable(EpdLabError):
    """The store cannot be set up, or refused to register memory."""

    kind = "store"


class Outcome(Enum):
    """What became of one key of one call. The last three are no codes of Mooncake's."""

    OK = "ok"
    MISSING = "missing"
    NOT_READY = "not_ready"
    NO_ROOM = "no_room"
    INVALID = "invalid"
    LEASED = "leased"
    LEASE_EXPIRED = "lease_expired"
    TRANSFER_FAILED = "transfer_failed"
    MASTER_LOST = "master_lost"
    UNKNOWN = "unknown_code"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"
    CORRUPT = "corrupt"


CODES: dict[int, Outcome] = {
    -200: Outcome.NO_ROOM,
    -600: Outcome.INVALID,
    -703: Outcome.NOT_READY,
    -704: Outcome.MISSING,
    -706: Outcome.LEASED,
    -707: Outcome.LEASE_EXPIRED,
    -800: Outcome.TRANSFER_FAILED,
    -900: Outcome.MASTER_LOST,
}


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How to join a store.

    Attributes:
        master: `host:port` of the master's RPC port; hostname: the name peers reach this host by.
        segment_bytes: memory this process donates, at least 16 MiB; 0 only uses what others donate.
        wait_s: a call that takes longer is late; with `max_late` late ones of its kind, new ones are skipped.
        probe_every_s: how often a lost master is looked for again.
    """

    master: str
    hostname: str = "127.0.0.1"
    segment_bytes: int = 0
    protocol: str = "tcp"
    device: str = ""
    wait_s: float = 2.0
    max_late: int = 2
    probe_every_s: float = 0.5

    def __post_init__(self) -> None:
        if self.segment_bytes != 0 and self.segment_bytes < MIN_SEGMENT_BYTES:
            least = f"0 or at least {MIN_SEGMENT_BYTES}"
            raise UsageError(f"a segment of {self.segment_bytes} bytes is refused by Mooncake; donate {least} bytes")


class Lane:
    """Threads for one kind of call, so that a slow put never delays a get, nor either a lookup.

    A native call cannot be cut short. So late ones are counted, and while too many hang the lane takes no new ones.
    """

    def __init__(self, name: str, threads: int, wait_s: float, max_late: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"store-{name}")
        self._wait_s, self._max_late = wait_s, max_late
        self._running: dict[asyncio.Future[Any], float] = {}

    @property
    def running(self) -> set[asyncio.Future[Any]]:
        """Calls that have not ended, those that wait for a thread included."""
        return set(self._running)

    @property
    def blocked(self) -> bool:
        now = time.monotonic()
        return sum(now - began > self._wait_s for began in self._running.values()) >= self._max_late

    async def run(self, call: Callable[[], T]) -> T:
        """The call's answer. It runs to its end even if the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._running[future] = time.monotonic()
        future.add_done_callback(self._running.pop)
        return await asyncio.shield(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class StoreClient:
    """One client of one store. `get`, `put` and the rest never raise for what the store answers.

    Every key gets an `Outcome`. `get` and `put` end only when the store is done with the buffers, however long that
    takes; whoever must not wait that long waits outside (`EmbeddingCache` does).
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.segment = ""
        self._store: Any = None
        self._registered: dict[int, Buffer] = {}
        self._master_lost, self._probe_at = False, 0.0
        self._gets = Lane("get", 4, config.wait_s, config.max_late)
        self._puts = Lane("put", 2, config.wait_s, config.max_late)
        self._lookups = Lane("lookup", 2, config.wait_s, config.max_late)

    async def open(self) -> None:
        """Join the store.

        Raises:
            StoreUnavailable: nobody listens at the master's port, or setup did not answer 0.
        """
        if not await probe(self.config.master):
            raise StoreUnavailable(f"no mooncake_master at {self.config.master}; start one, or check --store")
        store = _load().MooncakeDistributedStore()
        code = await asyncio.to_thread(self._setup, store)
        if code != 0:
            raise StoreUnavailable(
                f"setup at {self.config.master} answered {code}: no mooncake_master of this release listens there; "
                "the native log says more"
            )
        self._store, self.segment = store, store.get_hostname()

    def register(self, memory: Buffer) -> None:
        """Make memory known to the store, and keep it alive until `unregister` or `close`. Once per region.

        Raises:
            StoreUnavailable: the store refused it; it overlaps a registered region.
        """
        code = self._live().register_buffer(memory.address, memory.nbytes)
        if code != 0:
            raise StoreUnavailable(f"register_buffer of {memory!r} answered {code}; register each region once")
        self._registered[memory.address] = memory

    def unregister(self, memory: Buffer) -> None:
        """Withdraw memory. Idempotent."""
        if self._registered.pop(memory.address, None) is not None:
            self._live().unregister_buffer(memory.address)

    async def exist(self, keys: Sequence[str]) -> list[Outcome]:
        """OK or MISSING per key, in one call; an existing key is leased. Bounded by `wait_s`."""

        def call(store: Any) -> list[Outcome]:
            return [_existence(code) for code in store.batch_is_exist(list(keys))]

        try:
            return await asyncio.wait_for(self._guarded(self._lookups, call, len(keys)), self.config.wait_s)
        except TimeoutError:
            return [Outcome.TIMEOUT] * len(keys)

    async def get(self, keys: Sequence[str], buffers: Sequence[Extents], intact: Intact | None = None) -> list[Outcome]:
        """Read each object into its extents. They must be as long as the object, to the byte.

        Ask for a key once: the same key twice in one call shares one fate (seen: one wrong length fails both).

        Args:
            intact: asked in the call's thread whether the bytes of the key at this index are good; else CORRUPT.

        Raises:
            BadBuffer: an extent is not registered (TCP would let it pass, RDMA would not).
        """
        addresses, sizes = self._extents(buffers)

        def call(store: Any) -> list[Outcome]:
            codes = store.batch_get_into_multi_buffers(list(keys), addresses, sizes)
            outcomes = [_read(code, sum(lengths)) for code, lengths in zip(codes, sizes, strict=True)]
            return [_judged(outcome, index, intact) for index, outcome in enumerate(outcomes)]

        return await self._guarded(self._gets, call, len(keys))

    async def put(self, keys: Sequence[str], buffers: Sequence[Extents]) -> list[Outcome]:
        """Write each object from its extents. OK also if the key is there already: then nothing is written.

        Raises:
            BadBuffer: an extent is not registered.
        """
        addresses, sizes = self._extents(buffers)

        def call(store: Any) -> list[Outcome]:
            codes = store.batch_put_from_multi_buffers(list(keys), addresses, sizes)
            return [_written(code) for code in codes]

        return await self._guarded(self._puts, call, len(keys))

    async def size(self, key: str) -> int | None:
        """Bytes of an object; None if it is not there or the store does not say."""
        nbytes = await self._one(lambda store: int(store.get_size(key)))
        return nbytes if nbytes is not None and nbytes >= 0 else None

    async def remove(self, key: str, force: bool = False) -> Outcome:
        """Drop an object; `force` also a leased one."""
        code = await self._one(lambda store: int(store.remove(key, force)))
        return Outcome.TIMEOUT if code is None else _written(code)

    async def close(self) -> None:
        """Leave the store once no call is in flight. Idempotent; later calls are skipped.

        If a call still hangs after CLOSE_WAIT_S the client is left to the end of the process: closing it under a call
        would crash.
        """
        store, self._store = self._store, None
        for lane in (self._gets, self._puts, self._lookups):
            lane.close()
        if store is None:
            return
        if running := self._running():
            await asyncio.wait(running, timeout=CLOSE_WAIT_S)
        if self.in_flight:
            _ABANDONED.append((store, self._registered))
            log.warning("%d store calls still hang; the client is left to the end of the process", self.in_flight)
            return
        for address in self._registered:
            store.unregister_buffer(address)
        self._registered = {}
        await asyncio.to_thread(store.close)

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self._running())

    @property
    def closed(self) -> bool:
        return self._store is None

    def _running(self) -> set[asyncio.Future[Any]]:
        return self._gets.running | self._puts.running | self._lookups.running

    async def _one(self, call: Callable[[Any], int]) -> int | None:
        """A call about one key, on the lookup lane; None if it was skipped or is late."""
        if not await self._usable(self._lookups):
            return None
        store = self._live()
        try:
            return await asyncio.wait_for(self._lookups.run(lambda: call(store)), self.config.wait_s)
        except TimeoutError:
            return None

    async def _guarded(self, lane: Lane, call: Callable[[Any], list[Outcome]], keys: int) -> list[Outcome]:
        if not await self._usable(lane):
            return [Outcome.MASTER_LOST if self._master_lost else Outcome.SKIPPED] * keys
        store = self._live()
        return await lane.run(lambda: self._noted(call(store)))

    def _noted(self, outcomes: list[Outcome]) -> list[Outcome]:
        if Outcome.MASTER_LOST in outcomes:
            self._master_lost, self._probe_at = True, time.monotonic() + self.config.probe_every_s
        return outcomes

    async def _usable(self, lane: Lane) -> bool:
        """Whether a call may go to the native client now: a lost master costs 4 s a call, so look for it first."""
        if self._master_lost and time.monotonic() >= self._probe_at:
            self._probe_at = time.monotonic() + self.config.probe_every_s
            self._master_lost = not await probe(self.config.master)
        return not (self.closed or self._master_lost or lane.blocked)

    def _setup(self, store: Any) -> int:
        config = self.config
        return int(
            store.setup(
                config.hostname,
                "P2PHANDSHAKE",
                config.segment_bytes,
                LOCAL_BUFFER_BYTES,
                config.protocol,
                config.device,
                config.master,
            )
        )

    def _extents(self, buffers: Sequence[Extents]) -> tuple[list[list[int]], list[list[int]]]:
        for address, nbytes in itertools.chain.from_iterable(buffers):
            if not self._covered(address, nbytes):
                raise BadBuffer(f"{nbytes} bytes at {address:#x} are not registered with the store; register the pool")
        return [[a for a, _ in extents] for extents in buffers], [[n for _, n in extents] for extents in buffers]

    def _covered(self, address: int, nbytes: int) -> bool:
        ends = ((start, start + memory.nbytes) for start, memory in self._registered.items())
        return any(start <= address and address + nbytes <= end for start, end in ends)

    def _live(self) -> Any:
        if self._store is None:
            raise StoreUnavailable("the store client is closed; open a new one")
        return self._store

    def __repr__(self) -> str:
        state = "closed" if self.closed else "master lost" if self._master_lost else self.segment
        return f"StoreClient({self.config.master}, {state}, {self.in_flight} calls in flight)"


async def probe(master: str, timeout_s: float = 1.0) -> bool:
    """Whether anybody listens at `host:port`."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise StoreUnavailable(f"{master!r} is no master address; write HOST:PORT")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), timeout_s)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def _existence(code: int) -> Outcome:
    if code == 1:
        return Outcome.OK
    return Outcome.MISSING if code == 0 else CODES.get(code, Outcome.UNKNOWN)


def _read(code: int, nbytes: int) -> Outcome:
    return Outcome.OK if code == nbytes else CODES.get(code, Outcome.UNKNOWN)


def _judged(outcome: Outcome, index: int, intact: Intact | None) -> Outcome:
    good = outcome is not Outcome.OK or intact is None or intact(index)
    return outcome if good else Outcome.CORRUPT


def _written(code: int) -> Outcome:
    return Outcome.OK if code == 0 else CODES.get(code, Outcome.UNKNOWN)


def _load() -> Any:
    """Mooncake's store module. A set-up without a master, and a call to a hanging one, end in seconds."""
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", "5000")
    try:
        return load_mooncake("store")
    except EngineNotReady as error:
        raise StoreUnavailable(str(error)) from None
