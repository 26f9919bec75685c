"""The sender: an encode server's parts, from /encode to clean-up.

Follow a part from top to bottom: `encode` makes it, `send` writes it to one rank, `release` cleans it up.
`MMEncoder` holds no I/O of its own: it speaks to a tower, an engine, a link and a clock. Which release it behaves
like is its profile's business. After SGLang 0.5.17 encode_server.py (MMEncoder, EncoderScheduler).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from .engine import error_for
from .errors import (
    EncodeFailed,
    EpdLabError,
    LostEmbedding,
    MetadataMismatch,
    PeerLost,
    RegistrationRefused,
    StateError,
    one_line,
)
from .messages import (
    Ack,
    EncodeReply,
    EncodeRequest,
    SendReply,
    SendRequest,
    from_json,
    part_id,
    to_frame,
    to_json,
)
from .modality import Modality
from .ports import AckPusher, Buffer, Clock, EnginePort, Handler, LinkPort, Timer
from .regions import MemoryRegion, RegionState, RegionTable
from .rules import Profile, Rule
from .steps import Steps

log = logging.getLogger(__name__)

MAX_BATCH = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """Items of one part, loaded and preprocessed, before the vision forward.

    Attributes:
        tokens: embedding rows per item; dim: embedding columns; dtype: torch's name.
        grid: one (t, h, w) patch grid per item.
        payload: what the tower needs for its forward.
        keys: one digest of the pixels per item (for the embedding cache).
    """

    modality: Modality
    tokens: list[int]
    dim: int
    dtype: str
    element_size: int
    grid: list[tuple[int, int, int]]
    payload: Any
    keys: list[bytes] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.tokens), self.dim

    @property
    def nbytes(self) -> int:
        return sum(self.tokens) * self.dim * self.element_size


class Tower(Protocol):
    """The vision side of the model."""

    async def prepare(self, items: Sequence[str], modality: Modality) -> Prepared:
        """Load and preprocess. Raises MediaError for an item that is refused."""

    async def forward(self, batch: Sequence[Prepared]) -> list[Buffer]:
        """One embedding [tokens, dim] per Prepared, each contiguous."""

    def subset(self, prepared: Prepared, indices: Sequence[int]) -> Prepared:
        """The same part with only these items."""

    def fingerprint(self) -> str:
        """Model, weights revision, dtype, width and processor settings, for cache keys."""


class PartState(Enum):
    """Lifecycle of one part on the encoder."""

    ENCODING = "encoding"
    READY = "ready"
    FAILED = "failed"
    RELEASING = "releasing"
    RELEASED = "released"


TRANSITIONS: dict[PartState, frozenset[PartState]] = {
    PartState.ENCODING: frozenset({PartState.READY, PartState.FAILED, PartState.RELEASING}),
    PartState.READY: frozenset({PartState.RELEASING}),
    PartState.FAILED: frozenset({PartState.RELEASING}),
    PartState.RELEASING: frozenset({PartState.RELEASED}),
    PartState.RELEASED: frozenset(),
}


class EmbeddingData:
    """One part of one request on the encoder: its embedding, its regions, who has been served."""

    def __init__(self, request: EncodeRequest) -> None:
        self.request = request
        self.key = part_id(request.req_id, request.part_idx)
        self.state = PartState.ENCODING
        self.prepared: Prepared | None = None
        self.buffer: Buffer | None = None
        self.digest: str | None = None
        self.error: EpdLabError | None = None
        self.described, self.ready, self.idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.registering = asyncio.Lock()
        self.shared_region: MemoryRegion | None = None
        self.refusal: RegistrationRefused | None = None
        self.kept_regions: list[MemoryRegion] = []
        self.sends = 0
        self.served_calls = 0
        self.served_ranks: set[int] = set()
        self.suspect = False
        self.timer: Timer | None = None

    def asked_by(self, request: EncodeRequest) -> bool:
        """Whether a sibling rank asks for the same thing, not only by the same id."""
        ours, theirs = self.request, request
        same = (ours.mm_items, ours.modality, ours.num_parts)
        return same == (theirs.mm_items, theirs.modality, theirs.num_parts)

    def encoding(self) -> bool:
        """Whether its embedding is still being made (it may have failed or been released meanwhile)."""
        return self.state is PartState.ENCODING

    @property
    def timed(self) -> bool:
        """Whether nothing runs for this part and a timer will clean it up."""
        return self.timer is not None and self.sends == 0

    @property
    def labels(self) -> dict[str, Any]:
        return {"req": self.request.req_id, "part": self.request.part_idx}

    def begin_send(self) -> None:
        self.sends += 1
        self.idle.clear()

    def end_send(self) -> None:
        self.sends -= 1
        if self.sends == 0:
            self.idle.set()

    def _transition(self, to: PartState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"part {self.key} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def __repr__(self) -> str:
        held = "no embedding" if self.buffer is None else f"{self.buffer.nbytes} bytes"
        return f"EmbeddingData({self.key}, {self.state.value}, {held}, sends={self.sends})"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What a deployment sets. Seconds; None takes the profile's own clean-up time."""

    send_timeout_s: float | None = None
    quarantine_s: float = 60.0
    digest: bool = True
    max_batch: int = MAX_BATCH


class MMEncoder:
    """One encode server. All methods run on one event loop."""

    def __init__(
        self,
        tower: Tower,
        engine: EnginePort,
        link: LinkPort,
        clock: Clock,
        steps: Steps,
        profile: Profile,
        config: EncoderConfig | None = None,
        strict: bool = False,
    ) -> None:
        self.tower, self.engine, self.link, self.clock = tower, engine, link, clock
        self.steps, self.profile, self.config = steps, profile, config or EncoderConfig()
        self.regions = RegionTable(engine, steps, strict)
        self.parts: dict[str, EmbeddingData] = {}
        self.releasing: set[EmbeddingData] = set()
        self.url = ""
        self._queues: dict[Modality, list[EmbeddingData]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop_lock = asyncio.Lock()
        self._closing = False

    async def start(self) -> str:
        """Serve /encode, /send and /health; the base URL."""
        handlers: dict[str, Handler] = {"/encode": self._on_encode, "/send": self._on_send, "/health": self._on_health}
        self.url = await self.link.serve(handlers)
        return self.url

    async def _on_encode(self, body: bytes) -> bytes:
        request = from_json(body, EncodeRequest)
        labels: dict[str, Any] = {"req": request.req_id, "part": request.part_idx, "rank": request.tp_rank}
        await self.steps.do("encode.serve", lambda: None, **labels)
        return to_json(await self.encode(request))

    async def _on_send(self, body: bytes) -> bytes:
        request = from_json(body, SendRequest)
        await self.steps.do("send.serve", lambda: None, **_send_labels(request))
        return to_json(await self.send(request))

    async def _on_health(self, _: bytes) -> bytes:
        return b'{"status":"ok"}'

    # ---- /encode -------------------------------------------------------------------------------------------------

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Make one part's embedding; sibling ranks asking for the same part share one forward.

        Returns when the metadata is known: after the forward, or before it on the asynchronous path.

        Raises:
            EncodeFailed: preprocessing or the forward failed; MediaError: an item was refused.
            MetadataMismatch: the id stands for other items. PeerLost: the encoder is closing.
        """
        if self._closing:
            raise PeerLost(f"{self.steps.process} is closing; ask another encoder")
        key = part_id(request.req_id, request.part_idx)
        part = self.parts.get(key)
        if part is None:
            part = self.parts[key] = EmbeddingData(request)
            self._spawn(self._make(part))
        elif not part.asked_by(request):
            raise MetadataMismatch(f"{key} is in use for other items or parts; give every request its own req_id")
        await part.described.wait()
        if part.error is not None:
            raise part.error
        return _reply(part)

    async def _make(self, part: EmbeddingData) -> None:
        request = part.request
        try:
            part.prepared = await self.tower.prepare(request.mm_items, request.modality)
            if request.modality is Modality.VIDEO and self.profile.async_video:
                self._describe(part)
                await self.batch_encode([part])
            else:
                self._queue(part)
        except Exception as error:
            await self._fail(part, error)

    def _queue(self, part: EmbeddingData) -> None:
        queue = self._queues.setdefault(part.request.modality, [])
        queue.append(part)
        if len(queue) == 1:
            self._spawn(self._drain(queue))

    async def _drain(self, queue: list[EmbeddingData]) -> None:
        while queue:
            batch = queue[: self.config.max_batch]
            await self.batch_encode(batch)
            del queue[: len(batch)]

    async def batch_encode(self, parts: Sequence[EmbeddingData]) -> None:
        """One vision forward for several parts of a modality (upstream fuses up to 8 queued requests)."""
        try:
            buffers: list[Buffer] = await self.steps.wait(
                "encode.forward",
                lambda: self.tower.forward([part.prepared for part in parts if part.prepared is not None]),
                lambda buffers: {"data": {"parts": [part.key for part in parts]}},
                bytes=sum(part.prepared.nbytes for part in parts if part.prepared is not None),
                **parts[0].labels,
            )
            made = list(zip(parts, buffers, strict=True))
        except Exception as error:
            for part in parts:
                await self._fail(part, error)
            return
        for part, buffer in made:
            try:
                await self._stage(part, buffer)
            except Exception as error:
                await self._fail(part, error)

    async def _stage(self, part: EmbeddingData, buffer: Buffer) -> None:
        """The embedding is there: let waiting /send calls go on, also where it came too late."""
        if not part.encoding():
            await self._too_late(part, buffer)
            return
        buffer.synchronize()
        part.buffer = buffer
        if self.config.digest:
            part.digest = buffer.digest()
            data = {"digest": part.digest}
            self.steps.note("embedding.ready", **part.labels, address=buffer.address, bytes=buffer.nbytes, data=data)
        if self._registers_when_ready(part):
            with suppress(RegistrationRefused):  # the first /send tries again, and says so
                await self._shared_region(part, buffer, part.labels)
            if not part.encoding():
                await self._too_late(part, buffer)
                return
        part._transition(PartState.READY)
        self._describe(part)
        part.ready.set()

    async def _too_late(self, part: EmbeddingData, buffer: Buffer) -> None:
        """The clean-up timer was faster than the forward: what was made goes, and who waits for it is told."""
        part.buffer = None
        for region in part.kept_regions:
            await self._deregister(region, part.labels)
        buffer.free()
        part.ready.set()

    def _registers_when_ready(self, part: EmbeddingData) -> bool:
        asynchronous = self.profile.async_video and part.request.modality is Modality.VIDEO
        return self.profile.has(Rule.SHARED_REGISTRATION) and (asynchronous or self.profile.register_when_ready)

    def _describe(self, part: EmbeddingData) -> None:
        """The metadata is known: answer /encode and start the clean-up timer."""
        if part.described.is_set():
            return
        seconds = self.config.send_timeout_s or self.profile.send_timeout_s
        part.timer = self.clock.timer("cleanup", seconds, lambda: self._on_cleanup_timer(part), **part.labels)
        part.described.set()

    async def _fail(self, part: EmbeddingData, error: Exception) -> None:
        known = error if isinstance(error, EpdLabError) else EncodeFailed(f"{part.key}: {one_line(error)}")
        part.error = known
        log.warning("part %s failed: %s", part.key, one_line(known))
        if part.state is PartState.ENCODING:
            part._transition(PartState.FAILED)
        part.described.set()
        part.ready.set()
        await self.release(part, "encode failed")

    # ---- /send ---------------------------------------------------------------------------------------------------

    async def send(self, request: SendRequest) -> SendReply:
        """Write one part to one rank, then ack.

        Raises:
            LostEmbedding: the part is unknown, released, or its embedding is gone.
            EncodeFailed: its forward failed.
            RegistrationRefused, TransferFailed: the engine's code, where the profile checks it.
        """
        if self.profile.write_blocks_loop:
            async with self._loop_lock:
                return await self._send_counted(request)
        return await self._send_counted(request)

    async def _send_counted(self, request: SendRequest) -> SendReply:
        labels = _send_labels(request)
        part = await self.steps.do("send.lookup", lambda: self._lookup(request), **labels)
        part.begin_send()
        try:
            await self._send(part, request, labels)
        except BaseException:
            part.end_send()
            await self._account_failure(part, request)
            raise
        part.end_send()
        await self._account(part, request)
        return SendReply(req_id=request.req_id, part_idx=request.part_idx)

    def _lookup(self, request: SendRequest) -> EmbeddingData:
        part = self.parts.get(part_id(request.req_id, request.part_idx))
        if part is None or (part.state is PartState.READY and part.buffer is None):
            raise LostEmbedding(
                f"no embedding for {request.req_id} part {request.part_idx}: never encoded, or released already; "
                "send before the clean-up timer and once per rank"
            )
        return part

    async def _send(self, part: EmbeddingData, request: SendRequest, labels: dict[str, Any]) -> None:
        """Write, then ack. The connection for the ack is made while the write runs."""
        with closing(self.link.pusher(f"{request.prefill_host}:{request.embedding_port}")) as pusher:
            await self._write_one(part, request, labels)
            await self._push_ack(pusher, part, request, labels)

    async def _write_one(self, part: EmbeddingData, request: SendRequest, labels: dict[str, Any]) -> None:
        await part.ready.wait()
        if part.error is not None:
            raise EncodeFailed(f"part {part.key}: {part.error}")
        buffer = part.buffer
        if buffer is None:
            raise LostEmbedding(f"the embedding of {part.key} is gone, by a sibling's /send or the clean-up timer")
        if request.embedding_size != buffer.nbytes:
            raise MetadataMismatch(f"{part.key} has {buffer.nbytes} bytes, not {request.embedding_size}; /encode again")
        region = await self._source_region(part, buffer, labels)
        try:
            status = await self._write(region, buffer, request, labels)
        finally:
            await self._after_write(part, region, labels)
        if status != 0:
            part.suspect = True
            if self.profile.has(Rule.CHECK_TRANSFER_STATUS):
                raise error_for("transfer", status, f"of {part.key} to {request.session_id}")

    async def _source_region(self, part: EmbeddingData, buffer: Buffer, labels: dict[str, Any]) -> MemoryRegion:
        if self.profile.has(Rule.SHARED_REGISTRATION):
            return await self._shared_region(part, buffer, labels)
        return await self._register(part, buffer, labels)

    async def _shared_region(self, part: EmbeddingData, buffer: Buffer, labels: dict[str, Any]) -> MemoryRegion:
        """The part's one region: registered by whoever comes first, shared by the rest; so is a refusal.

        Upstream's 0.5.23 registers before the first /send, and there every /send tries again.
        """
        async with part.registering:
            if part.refusal is not None and not self.profile.register_when_ready:
                raise part.refusal
            region = part.shared_region
            if region is None or region.state is RegionState.RELEASED:
                try:
                    region = part.shared_region = await self._register(part, buffer, labels)
                except RegistrationRefused as error:
                    part.refusal = error
                    raise
            return region

    async def _register(self, part: EmbeddingData, buffer: Buffer, labels: dict[str, Any]) -> MemoryRegion:
        checked = self.profile.has(Rule.CHECK_REGISTER_STATUS)
        region = await self.regions.register(buffer, part.key, must_succeed=checked, **labels)
        if self.profile.has(Rule.DEFERRED_DEREGISTER):
            part.kept_regions.append(region)
        return region

    async def _write(
        self, region: MemoryRegion, buffer: Buffer, request: SendRequest, labels: dict[str, Any]
    ) -> int:
        source, nbytes = buffer.address, buffer.nbytes
        covered: list[bool] = []
        answers: list[int] = []

        async def write() -> int:
            covered.append(self.regions.guard(source, nbytes))
            target = request.buffer_address
            return await self.engine.write(
                request.session_id, source, target, nbytes, lambda: answers.append(self.steps.now())
            )

        def ended(_: int) -> dict[str, Any]:
            covered.append(self.regions.guard(source, nbytes))
            return {"data": {"covered": covered} | ({"answered": answers[-1]} if answers else {})}

        region.begin_write()
        try:
            status = await self.steps.wait(
                "transfer.write",
                write,
                ended,
                region=region.name,
                address=source,
                bytes=nbytes,
                peer=request.session_id,
                target=request.buffer_address,
                **labels,
            )
        finally:
            region.end_write()
        self.regions.require(covered, f"the write of {part_id(request.req_id, request.part_idx)}")
        return status

    async def _after_write(self, part: EmbeddingData, region: MemoryRegion, labels: dict[str, Any]) -> None:
        if not self.profile.has(Rule.DEFERRED_DEREGISTER):
            await self._deregister(region, labels)
        if not self.profile.has(Rule.KEEP_EMBEDDING):
            await self._drop(part, labels)

    async def _push_ack(
        self, pusher: AckPusher, part: EmbeddingData, request: SendRequest, labels: dict[str, Any]
    ) -> None:
        assert part.prepared is not None
        ack = Ack(
            req_id=request.req_id,
            part_idx=request.part_idx,
            num_parts=part.request.num_parts,
            modality=part.request.modality,
            shape=part.prepared.shape,
            dtype=part.prepared.dtype,
            nbytes=part.prepared.nbytes,
            grid=part.prepared.grid,
            digest=part.digest,
        )
        frame = to_frame(ack)
        endpoint = f"{request.prefill_host}:{request.embedding_port}"
        await self.steps.wait("ack.push", lambda: pusher.push(frame), peer=endpoint, **labels)

    async def _account(self, part: EmbeddingData, request: SendRequest) -> None:
        """Early release: the last receiver served releases the part."""
        part.served_calls += 1
        part.served_ranks.add(request.tp_rank)
        if not self.profile.early_release or request.receive_count is None:
            return
        by_rank = self.profile.has(Rule.COUNT_RECEIVERS)
        served = len(part.served_ranks) if by_rank else part.served_calls
        if served >= request.receive_count:
            await self.release(part, "every receiver served")

    async def _account_failure(self, part: EmbeddingData, request: SendRequest) -> None:
        """A failed receiver: upstream forgets it (0.5.17) or releases the part (0.5.23); counting it is ours."""
        if self.profile.failed_send_releases:
            await self.release(part, "a send failed")
        elif self.profile.has(Rule.COUNT_RECEIVERS):
            await self._account(part, request)

    # ---- clean-up ------------------------------------------------------------------------------------------------

    async def release(self, part: EmbeddingData, reason: str) -> None:
        """Forget the part, withdraw its regions, drop its embedding. Idempotent.

        With drain_before_release it waits for running sends; with quarantine_after_timeout it leaves the memory of
        a failed write alone until no late byte can be read from it.
        """
        if part.state in (PartState.RELEASING, PartState.RELEASED):
            return
        part._transition(PartState.RELEASING)
        self.releasing.add(part)
        if part.timer is not None:
            part.timer.cancel()
            part.timer = None
        await self.steps.do("part.release", lambda: self.parts.pop(part.key, None), **part.labels, data={"why": reason})
        if self.profile.has(Rule.DRAIN_BEFORE_RELEASE):
            await part.idle.wait()
        if part.suspect and self.profile.has(Rule.QUARANTINE_AFTER_TIMEOUT):
            seconds = self.config.quarantine_s
            part.timer = self.clock.timer("quarantine", seconds, lambda: self._on_quarantine(part), **part.labels)
        else:
            await self._withdraw(part)

    async def _withdraw(self, part: EmbeddingData) -> None:
        part.timer = None
        try:
            for region in part.kept_regions:
                await self._deregister(region, part.labels)
        finally:
            await self._drop(part, part.labels)
            part._transition(PartState.RELEASED)
            self.releasing.discard(part)

    async def _deregister(self, region: MemoryRegion, labels: dict[str, Any]) -> None:
        await self.regions.release(region, must_succeed=self.profile.has(Rule.CHECK_REGISTER_STATUS), **labels)

    async def _drop(self, part: EmbeddingData, labels: dict[str, Any]) -> None:
        buffer, part.buffer = part.buffer, None
        if buffer is not None:
            await self.steps.do("embedding.drop", lambda: None, address=buffer.address, bytes=buffer.nbytes, **labels)

    def _on_cleanup_timer(self, part: EmbeddingData) -> None:
        self._spawn(self._fire(part, "cleanup", self.release(part, "clean-up timer")))

    def _on_quarantine(self, part: EmbeddingData) -> None:
        self._spawn(self._fire(part, "quarantine", self._withdraw(part)))

    async def _fire(self, part: EmbeddingData, timer: str, then: Coroutine[Any, Any, None]) -> None:
        await self.steps.do("timer.fire", lambda: None, **part.labels, data={"timer": timer})
        await then

    # ---- housekeeping --------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of the encoder failed: %s", one_line(error))

    def census(self) -> dict[str, int]:
        """What is still held, by kind. What waits for a timer of its own counts as `timed`, not by its kind."""
        everything = {*self.parts.values(), *self.releasing}
        timed = {part for part in everything if part.timed}
        owners = {part.key for part in timed}
        return {
            "regions": sum(region.owner not in owners for region in self.regions.live),
            "embeddings": sum(part.buffer is not None for part in everything - timed),
            "parts": len(everything - timed),
            "tasks": len(self._tasks),
            "timed": len(timed),
        }

    async def settled(self) -> None:
        """Wait until no background work of the encoder runs (timers may still be pending)."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Cancel what runs, let writes end, release every part, withdraw every region. The engine stays its owner's."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for part in [*self.parts.values(), *self.releasing]:
            self._abandon(part)
        self.parts.clear()
        self.releasing.clear()
        for region in self.regions.live:
            await region.drained()
            await self.regions.release(region, must_succeed=False)

    def _abandon(self, part: EmbeddingData) -> None:
        """Whoever waits for this part is told, and finds nothing."""
        if part.timer is not None:
            part.timer.cancel()
        part.error = part.error or PeerLost(f"{self.steps.process} is closing; ask another encoder")
        part.buffer = None
        part.described.set()
        part.ready.set()


def _send_labels(request: SendRequest) -> dict[str, Any]:
    return {"req": request.req_id, "part": request.part_idx, "rank": request.tp_rank}


def _reply(part: EmbeddingData) -> EncodeReply:
    assert part.prepared is not None
    return EncodeReply(
        req_id=part.request.req_id,
        encoder_idx=part.request.encoder_idx,
        num_parts=part.request.num_parts,
        part_idx=part.request.part_idx,
        modality=part.request.modality,
        embedding_size=part.prepared.nbytes,
        embedding_len=part.prepared.shape[0],
        embedding_dim=part.prepared.dim,
        dtype=part.prepared.dtype,
        grid=part.prepared.grid,
    )

