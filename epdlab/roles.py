"""Role processes: an encode server, a prefill rank, the one-process reference - each an OS process of its own.

Started by the lab or by hand (`epdlab encoder`, `epdlab prefill`). Owns how a role is put together from engine, link,
clock, steps and model, and how it ends. The hand-off itself is in encode_server.py and receiver.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .clock import LoopClock
from .control import ControlClient, Operation, end_with_parent
from .encode_server import EncoderConfig, MMEncoder, Tower
from .engine import MooncakeEngine, Protocol, init_mooncake_transfer_engine, keep_native_log
from .errors import UsageError
from .landing import Landing, LandingPool, PerRequestLanding
from .link import HttpZmqLink
from .media import MediaPolicy
from .modality import Modality
from .ports import EnginePort
from .pulse import CountedLink, CountedThreads, pulse
from .receiver import Item, MMReceiver, Received, ReceiverConfig
from .regions import RegionTable
from .rules import DEFAULT_PROFILE, Rule, profile
from .slicing import SlicedEngine
from .steps import Steps, TraceFile
from .tasks import to_the_end

if TYPE_CHECKING:
    from .vlm import VLM

log = logging.getLogger(__name__)

SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """What every role takes.

    Attributes:
        name: the process's name in traces; control: the lab's endpoint, None when started by hand.
        trace: JSONL file for events; parent: the pid to end with.
    """

    name: str
    model: str = "tiny"
    device: str = "cpu"
    control: str | None = None
    trace: Path | None = None
    parent: int | None = None


@dataclass(frozen=True, kw_only=True)
class HandoffOptions(RoleOptions):
    """What both ends of the hand-off take. Seconds."""

    host: str = "127.0.0.1"
    profile: str = DEFAULT_PROFILE
    protocol: Protocol = "tcp"
    strict: bool = False
    digest: bool = True
    quarantine_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(HandoffOptions):
    """An encode server. `store`: `host:port` of a mooncake_master to cache embeddings in."""

    port: int = 0
    send_timeout_s: float | None = None
    nic_slices: int = 0
    media_root: Path | None = None
    allow_private_urls: bool = False
    store: str | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(HandoffOptions):
    """One prefill rank."""

    encoder_urls: tuple[str, ...]
    rank: int = 0
    tp: int = 1
    pool_bytes: int = 0
    deadline_s: float = 180.0


class Role:
    """The frame of a role process: control channel, trace, orderly end."""

    def __init__(self, options: RoleOptions) -> None:
        self.options = options
        if options.parent is not None:
            end_with_parent(options.parent)
        self.trace = TraceFile(options.trace) if options.trace is not None else None
        self.control = ControlClient(options.control, options.name) if options.control is not None else None
        self.steps = Steps(options.name, self.trace, self.control)
        self.threads = CountedThreads()
        asyncio.get_running_loop().set_default_executor(self.threads)
        self._stop = asyncio.Event()

    async def serve(self, data: dict[str, Any], operations: dict[str, Operation]) -> None:
        """Announce the role, then answer the lab until it, or a signal, says stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        hello = data | {"pid": os.getpid()}
        self.steps.note("process.start", data=hello)
        stopped = asyncio.ensure_future(self._stop.wait())
        waits: list[asyncio.Future[Any]] = [stopped]
        if self.control is not None:
            self.control.operations = operations
            waits.append(asyncio.ensure_future(self.control.serve(hello)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.control is not None:
            self.control.let_go()

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.trace is not None:
            self.trace.close()

    def pulse(self, link: CountedLink) -> Operation:
        async def answer() -> dict[str, int]:
            return await pulse(link, self.threads)

        return answer

    def census(self, count: Callable[[], dict[str, int]]) -> Operation:
        async def answer() -> dict[str, int]:
            counts = count()
            self.steps.note("process.census", data=counts)
            return counts

        return answer


async def run_encoder(options: EncoderOptions, announce: Callable[[str], None] = lambda line: None) -> None:
    """Serve /encode and /send until told to stop."""
    role = Role(options)
    engine = _engine(options)
    link, clock = CountedLink(HttpZmqLink(options.host, options.port)), LoopClock()
    chosen = profile(options.profile)
    config = EncoderConfig(options.send_timeout_s, options.quarantine_s, options.digest)
    sliced = SlicedEngine(engine, role.steps, options.nic_slices) if options.nic_slices else None
    port: EnginePort = sliced or engine
    vision = await _vision(options, role.steps)
    encoder = MMEncoder(vision.tower, port, link, clock, role.steps, chosen, config, options.strict)
    if sliced is not None:
        sliced.regions = encoder.regions
    try:
        url = await encoder.start()
        announce(f"encoder {options.name} serves {url}, engine session {engine.session_id}")
        data = {"role": "encoder", "url": url, "session": engine.session_id, "protocol": options.protocol}
        data |= {"store": options.store} if options.store else {}
        operations: dict[str, Operation] = {
            "census": role.census(encoder.census),
            "state": _answers(lambda: encoder_state(encoder)),
            "pulse": role.pulse(link),
            "fire": _fires(clock),
        } | vision.operations
        await role.serve(data, operations)
    finally:
        await link.close()
        await encoder.close()
        await vision.close()
        engine.close()
        role.close()


async def run_prefill(
    options: PrefillOptions,
    work: Callable[[PrefillRank], Awaitable[None]] | None = None,
) -> None:
    """Serve the lab as one rank; or, started by hand, do `work` and end."""
    role = Role(options)
    engine = _engine(options)
    link, clock, chosen = CountedLink(HttpZmqLink(options.host)), LoopClock(), profile(options.profile)
    landing = await _landing(options, engine, role.steps)
    config = ReceiverConfig(
        rank=options.rank,
        tp=options.tp,
        encoders=tuple(url.rstrip("/") for url in options.encoder_urls),
        host=options.host,
        deadline_s=options.deadline_s,
        quarantine_s=options.quarantine_s,
    )
    receiver = MMReceiver(config, engine, landing, link, clock, role.steps, chosen)
    vlm = None if options.model == SYNTHETIC else await asyncio.to_thread(_load, options, "prefill")
    rank = PrefillRank(receiver, vlm, options.digest)
    try:
        if work is not None:
            await work(rank)
            return
        data = {"role": "prefill", "rank": options.rank, "session": engine.session_id, "pool": options.pool_bytes}
        operations: dict[str, Operation] = {
            "generate": rank.generate,
            "cancel": rank.cancel,
            "census": role.census(receiver.census),
            "state": _answers(lambda: receiver_state(receiver, landing)),
            "pulse": role.pulse(link),
            "fire": _fires(clock),
        }
        await role.serve(data, operations)
    finally:
        await receiver.close()
        await link.close()
        engine.close()
        role.close()


class PrefillRank:
    """What a prefill rank does with a request: receive, read, prefill, decode, release."""

    def __init__(self, receiver: MMReceiver, vlm: VLM | None, digest: bool) -> None:
        self._receiver, self._vlm, self._digest = receiver, vlm, digest
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def generate(
        self, req_id: str, items: list[tuple[str, str]], prompt: str = "", max_new_tokens: int = 8
    ) -> dict[str, Any]:
        """One request. Answers tokens, text, logits (float32 bytes), digests per part, bytes and milliseconds.

        Raises:
            HandoffError: it did not arrive. PromptError: the prompt is empty. UsageError: the id is in use.
        """
        if req_id in self._tasks:
            raise UsageError(f"request id {req_id!r} is in use; give every request its own")
        task = asyncio.ensure_future(self._generate(req_id, items, prompt, max_new_tokens))
        self._tasks[req_id] = task
        try:
            return await task
        finally:
            del self._tasks[req_id]

    async def cancel(self, req_id: str) -> bool:
        """Cancel a running request; whether there was one."""
        task = self._tasks.get(req_id)
        return task is not None and task.cancel()

    async def _generate(self, req_id: str, items: list[tuple[str, str]], prompt: str, count: int) -> dict[str, Any]:
        began = time.perf_counter()
        wanted = [Item(Modality(modality), ref) for modality, ref in items]
        async with await self._receiver.receive(req_id, wanted) as received:
            arrived = time.perf_counter()
            digests = await received.read() if self._digest else []
            answer = {
                "bytes": sum(meta.embedding_size for meta in received.parts),
                "parts": [(meta.modality.value, meta.embedding_len, meta.embedding_dim) for meta in received.parts],
                "digests": digests,
                "transfer_ms": (arrived - began) * 1e3,
            }
            if self._vlm is not None:
                answer |= await to_the_end(asyncio.to_thread(self._decode, self._vlm, received, prompt, count))
        return answer | {"ms": (time.perf_counter() - began) * 1e3}

    def _decode(self, vlm: VLM, received: Received, prompt: str, count: int) -> dict[str, Any]:
        from .tower import as_tensor
        from .vlm import Part

        parts = []
        for index, meta in enumerate(received.parts):
            rows = as_tensor(received.part(index), (meta.embedding_len, meta.embedding_dim), meta.dtype)
            parts.append(Part(meta.modality, rows.to(vlm.device), meta.grid))
        logits, state = vlm.prefill(prompt, parts)
        tokens = vlm.decode(state, count)
        return {"tokens": tokens, "text": vlm.text(tokens), "logits": _floats(logits)}


async def run_reference(options: RoleOptions, media_root: Path | None, allow_private_urls: bool = False) -> None:
    """Answer `reference`: the same request in one process, without any transfer."""
    role = Role(options)
    vlm = await asyncio.to_thread(_load, options, "full")
    policy = MediaPolicy(allowed_root=media_root, allow_private_urls=allow_private_urls)

    async def reference(items: list[tuple[str, str]], prompt: str, max_new_tokens: int) -> dict[str, Any]:
        from .media import load_item

        media = [(Modality(modality), await load_item(ref, Modality(modality), policy)) for modality, ref in items]
        ordered = [pair for modality in Modality for pair in media if pair[0] is modality]
        answer = await asyncio.to_thread(vlm.reference, prompt, ordered, max_new_tokens)
        return {"tokens": answer.tokens, "text": vlm.text(answer.tokens), "logits": _floats(answer.logits)}

    try:
        await role.serve({"role": "reference"}, {"reference": reference})
    finally:
        role.close()


def encoder_state(encoder: MMEncoder) -> dict[str, Any]:
    """What an encoder holds now, by stable names (addresses beside them, for those who ask)."""
    parts = dict.fromkeys([*encoder.parts.values(), *encoder.releasing])
    return {
        "regions": _region_rows(encoder.regions),
        "embeddings": [
            {"part": part.key, "state": part.state.value, "bytes": part.buffer.nbytes if part.buffer else 0,
             "sends": part.sends, "served": sorted(part.served_ranks)}
            for part in parts
        ],
    }  # fmt: skip


def receiver_state(receiver: MMReceiver, landing: Landing) -> dict[str, Any]:
    """What a rank holds now, by stable names."""
    return {
        "regions": _region_rows(landing.regions),
        "slots": [
            {"name": slot.name, "bytes": slot.nbytes, "state": slot.state.value, "owner": slot.owner,
             "address": slot.address}
            for slot in landing.slots
        ],
        "requests": [
            {"request": request.req_id, "state": request.state.value, "parts": len(request.plan),
             "acked": len(request.acks)}
            for request in receiver.requests.values()
        ],
    }  # fmt: skip


def _region_rows(regions: RegionTable) -> list[dict[str, Any]]:
    return [
        {"name": region.name, "bytes": region.nbytes, "state": region.state.value, "owner": region.owner,
         "writes": region.writes, "address": region.address}
        for region in regions.live
    ]  # fmt: skip


def _engine(options: HandoffOptions) -> MooncakeEngine:
    import torch  # noqa: F401  # seconds, better before the first request than inside it

    if options.trace is not None:
        keep_native_log(options.trace.with_name(f"{options.name}.engine.log"))
    memory = "cuda" if options.device.startswith("cuda") and reaches_gpu(options.protocol) else "cpu"
    return init_mooncake_transfer_engine(options.host, options.protocol, memory=memory)


def reaches_gpu(protocol: Protocol) -> bool:
    """Whether the transport reads and writes GPU memory itself (GPUDirect); TCP goes through host memory."""
    return protocol == "rdma"


async def _landing(options: PrefillOptions, engine: EnginePort, steps: Steps) -> Landing:
    checked = profile(options.profile).has(Rule.CHECK_REGISTER_STATUS)
    regions = RegionTable(engine, steps, options.strict)
    if options.pool_bytes == 0:
        return PerRequestLanding(engine, regions, steps, checked)
    pool = LandingPool(engine, regions, steps, checked, options.pool_bytes)
    await pool.open()
    return pool


async def _nothing() -> None:
    """Nothing to close."""


@dataclass(frozen=True)
class _Vision:
    """An encoder's tower, how to close it, and what the lab may ask it."""

    tower: Tower
    close: Callable[[], Awaitable[None]] = _nothing
    operations: dict[str, Operation] = field(default_factory=dict)


async def _vision(options: EncoderOptions, steps: Steps) -> _Vision:
    tower = await _tower(options)
    if options.store is None:
        return _Vision(tower)
    from .cached_tower import open_cached_tower
    from .store_client import StoreConfig

    device = options.device if reaches_gpu(options.protocol) else "cpu"
    cached = await open_cached_tower(tower, steps, StoreConfig(options.store, options.host), device=device)
    return _Vision(cached, cached.close, {"counters": _answers(lambda: dict(cached.counters))})


async def _tower(options: EncoderOptions) -> Tower:
    from .tower import SyntheticTower, VlmTower

    if options.model == SYNTHETIC:
        return SyntheticTower(options.device if reaches_gpu(options.protocol) else "cpu")
    vlm = await asyncio.to_thread(_load, options, "encoder")
    policy = MediaPolicy(allowed_root=options.media_root, allow_private_urls=options.allow_private_urls)
    return VlmTower(vlm, policy, reaches_gpu(options.protocol))


def _load(options: RoleOptions, role: Literal["encoder", "prefill", "full"]) -> VLM:
    from .vlm import load_vlm

    return load_vlm(options.model, options.device, role)


def _answers(value: Callable[[], Any]) -> Operation:
    async def answer() -> Any:
        return value()

    return answer


def _fires(clock: LoopClock) -> Operation:
    async def fire(timer: str, labels: dict[str, Any]) -> int:
        """Fire a pending timer now."""
        if timer not in ("cleanup", "deadline", "quarantine"):
            raise UsageError(f"no timer {timer!r}; there are cleanup, deadline, quarantine")
        return clock.fire(timer, **labels)

    return fire


def _floats(logits: Any) -> bytes:
    return bytes(logits.detach().float().cpu().numpy().tobytes())
