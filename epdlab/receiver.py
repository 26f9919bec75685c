"""The receiver: one TP rank of the prefill side, from a list of items to landing memory full of embeddings.

Follow a request from top to bottom: `receive` asks the encoders for sizes (/encode), allocates landing memory, asks
for the writes (/send), collects the acks, and hands out zero-copy views. `Received.release` gives the memory back.
`MMReceiver` holds no I/O of its own. After SGLang 0.5.17 encode_receiver.py (MMReceiverHTTP, WaitingImageRDMARequest).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .errors import (
    DeadlineExceeded,
    EncodeFailed,
    EpdLabError,
    HandoffError,
    MetadataMismatch,
    StateError,
    UsageError,
    one_line,
)
from .landing import POOL, Landing, LandingSlot, SlotState
from .messages import Ack, EncodeReply, EncodeRequest, SendReply, SendRequest, from_frame, from_json, to_json
from .modality import Modality
from .ports import AckSocket, Buffer, Clock, EnginePort, LinkPort, Timer
from .rules import Profile, Rule
from .steps import Steps

log = logging.getLogger(__name__)

WRITE_NEVER_BEGAN = frozenset({"lost_embedding", "encode_failed", "registration_refused", "metadata_mismatch"})


@dataclass(frozen=True, slots=True)
class Item:
    """One image or video of a request: its modality and a reference (path, data: URI, URL)."""

    modality: Modality
    ref: str


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Which items one encoder turns into one part."""

    part_idx: int
    encoder_idx: int
    modality: Modality
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """Who this rank is, whom it asks, and how long it waits (seconds)."""

    rank: int
    tp: int
    encoders: tuple[str, ...]
    host: str = "127.0.0.1"
    deadline_s: float = 180.0
    quarantine_s: float = 60.0
    digest: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.tp:
            raise UsageError(f"there is no rank {self.rank} of {self.tp}; ranks are 0 to {self.tp - 1}")


class RequestState(Enum):
    """Lifecycle of a request on one rank."""

    ENCODING = "encoding"
    ALLOCATING = "allocating"
    SENDING = "sending"
    LANDED = "landed"
    CONSUMED = "consumed"
    FAILED = "failed"


_FAILED = frozenset({RequestState.FAILED})
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.ENCODING: frozenset({RequestState.ALLOCATING}) | _FAILED,
    RequestState.ALLOCATING: frozenset({RequestState.SENDING}) | _FAILED,
    RequestState.SENDING: frozenset({RequestState.LANDED}) | _FAILED,
    RequestState.LANDED: frozenset({RequestState.CONSUMED}) | _FAILED,
    RequestState.CONSUMED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(eq=False)
class WaitingRequest:
    """One request on its way into this rank's memory."""

    req_id: str
    plan: list[PartPlan]
    state: RequestState = RequestState.ENCODING
    metas: list[EncodeReply] = field(default_factory=list)
    slot: LandingSlot | None = None
    acks: list[Ack] = field(default_factory=list)
    posts: list[asyncio.Task[Any]] = field(default_factory=list)
    expired: bool = False

    def transition(self, to: RequestState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"request {self.req_id} cannot go from {self.state.value} to {to.value}")
        self.state = to

    @property
    def complete(self) -> bool:
        return len(self.acks) >= len(self.plan)

    @property
    def offsets(self) -> list[int]:
        """Byte offset of each part in the slot: parts lie one after the other, in part order."""
        sizes = [meta.embedding_size for meta in self.metas]
        return [sum(sizes[:index]) for index in range(len(sizes))]


class Received:
    """A request's embeddings in landing memory. Use as an async context manager, or call `release` once done."""

    def __init__(self, receiver: MMReceiver, request: WaitingRequest, buffer: Buffer | None) -> None:
        self._receiver, self._request, self._buffer = receiver, request, buffer

    @property
    def req_id(self) -> str:
        return self._request.req_id

    @property
    def parts(self) -> list[EncodeReply]:
        return self._request.metas

    def part(self, index: int) -> Buffer:
        """A zero-copy view of one part: `embedding_size` bytes, [embedding_len, embedding_dim] of `dtype`."""
        if self._buffer is None:
            raise HandoffError(f"{self.req_id} was released already; read it before release")
        return self._buffer.slice(self._request.offsets[index], self.parts[index].embedding_size)

    def by_modality(self) -> dict[Modality, Buffer]:
        """One zero-copy view per modality: its parts lie side by side."""
        if self._buffer is None:
            raise HandoffError(f"{self.req_id} was released already; read it before release")
        views: dict[Modality, Buffer] = {}
        for modality in dict.fromkeys(meta.modality for meta in self.parts):
            mine = [i for i, meta in enumerate(self.parts) if meta.modality is modality]
            nbytes = sum(self.parts[i].embedding_size for i in mine)
            views[modality] = self._buffer.slice(self._request.offsets[mine[0]], nbytes)
        return views

    async def read(self) -> list[str]:
        """Read every part once, as the language model does; its digests, in part order."""
        return [await self._receiver._read_part(self, index) for index in range(len(self.parts))]

    async def release(self) -> None:
        """The reader is done: the landing memory goes back. Idempotent."""
        if self._buffer is not None:
            self._buffer = None
            await self._receiver._consumed(self._request)

    async def __aenter__(self) -> Received:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class MMReceiver:
    """One TP rank's receiver. All methods run on one event loop."""

    def __init__(
        self,
        config: ReceiverConfig,
        engine: EnginePort,
        landing: Landing,
        link: LinkPort,
        clock: Clock,
        steps: Steps,
        profile: Profile,
    ) -> None:
        self.config, self.engine, self.landing = config, engine, landing
        self.link, self.clock, self.steps, self.profile = link, clock, steps, profile
        self.requests: dict[str, WaitingRequest] = {}
        self.dropped = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._quarantines: dict[str, Timer] = {}

    async def receive(self, req_id: str, items: Sequence[Item]) -> Received:
        """Bring a request's embeddings into this rank's landing memory.

        Raises:
            UsageError: no items, no encoders, or the id is in use.
            HandoffError: the request failed; whatever it held is released, exactly once.
        """
        request = self._admit(req_id, items)
        labels = self._labels(request)
        self.steps.note("request.start", **labels, data={"parts": len(request.plan)})
        task = asyncio.current_task()
        timer = self.clock.timer("deadline", self.config.deadline_s, lambda: self._expire(request, task), **labels)
        try:
            return await self._with_acks(request)
        except BaseException as error:
            reason = await self._give_up(request, error)
            raise reason from None
        finally:
            timer.cancel()

    async def _with_acks(self, request: WaitingRequest) -> Received:
        acks = self.link.acks()
        try:
            return await self._receive(request, acks)
        finally:
            acks.close()

    async def _receive(self, request: WaitingRequest, acks: AckSocket) -> Received:
        await self._encode(request, acks.port)
        request.transition(RequestState.ALLOCATING)
        total = sum(meta.embedding_size for meta in request.metas)
        request.slot = await self.landing.allocate(total, request.req_id, **self._labels(request))
        request.transition(RequestState.SENDING)
        await self._send(request, request.slot, acks)
        request.transition(RequestState.LANDED)
        received = Received(self, request, request.slot.buffer.slice(0, total))
        if not self.profile.has(Rule.HOLD_LANDING_UNTIL_CONSUMED):
            await self._surely(self.landing.free(request.slot, **self._labels(request)))
        return received

    # ---- phase 1: /encode ----------------------------------------------------------------------------------------

    async def _encode(self, request: WaitingRequest, ack_port: int) -> None:
        posts = [self._spawn(self._post_encode(request, part, ack_port)) for part in request.plan]
        try:
            request.metas = await self._all(posts)
        finally:
            for post in posts:
                post.cancel()

    async def _post_encode(self, request: WaitingRequest, part: PartPlan, ack_port: int) -> EncodeReply:
        message = EncodeRequest(
            req_id=request.req_id,
            encoder_idx=part.encoder_idx,
            mm_items=list(part.items),
            num_parts=len(request.plan),
            part_idx=part.part_idx,
            modality=part.modality,
            prefill_host=self.config.host,
            embedding_port=ack_port,
            receive_count=self.config.tp,
            tp_rank=self.config.rank,
        )
        url = f"{self.config.encoders[part.encoder_idx]}/encode"
        body = await self.steps.wait(
            "encode.post",
            lambda: self.link.post(url, to_json(message)),
            peer=url,
            **self._labels(request, part.part_idx),
        )
        reply = from_json(body, EncodeReply)
        if self.profile.has(Rule.CHECK_METADATA):
            _check_reply(request, part, reply)
        return reply

    # ---- phase 2: /send, and phase 3: acks -----------------------------------------------------------------------

    async def _send(self, request: WaitingRequest, slot: LandingSlot, acks: AckSocket) -> None:
        addresses = [slot.address + offset for offset in request.offsets]
        for part, meta, address in zip(request.plan, request.metas, addresses, strict=True):
            request.posts.append(self._spawn(self._post_send(request, part, meta, address, acks.port)))
        collecting = self._spawn(self._collect(request, acks))
        try:
            await self._landed(request, collecting)
        finally:
            collecting.cancel()

    async def _landed(self, request: WaitingRequest, collecting: asyncio.Task[None]) -> None:
        """Wait until every part is acked; with notify_errors, or until a /send fails."""
        watched: list[asyncio.Task[Any]] = [collecting]
        if self.profile.has(Rule.NOTIFY_ERRORS):
            watched += request.posts
        pending = set(watched)
        while not collecting.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        collecting.result()

    async def _post_send(
        self, request: WaitingRequest, part: PartPlan, meta: EncodeReply, address: int, ack_port: int
    ) -> SendReply:
        message = SendRequest(
            req_id=request.req_id,
            part_idx=part.part_idx,
            num_parts=len(request.plan),
            modality=part.modality,
            prefill_host=self.config.host,
            embedding_port=ack_port,
            session_id=self.engine.session_id,
            buffer_address=address,
            embedding_size=meta.embedding_size,
            receive_count=self.config.tp,
            tp_rank=self.config.rank,
        )
        url = f"{self.config.encoders[part.encoder_idx]}/send"
        labels = self._labels(request, part.part_idx)
        body = await self.steps.wait("send.post", lambda: self.link.post(url, to_json(message)), peer=url, **labels)
        return from_json(body, SendReply)

    async def _collect(self, request: WaitingRequest, acks: AckSocket) -> None:
        while not request.complete:
            ack = self._decoded(await acks.pull())
            if ack is not None:
                await self.steps.do(
                    "ack.pull",
                    lambda ack=ack: self._accept(request, ack),  # type: ignore[misc]
                    lambda accepted: {"result": "ok" if accepted else "dropped"},
                    **self._labels(request, ack.part_idx),
                    data={"of": ack.req_id},
                )

    def _decoded(self, frame: bytes) -> Ack | None:
        try:
            return from_frame(frame)
        except MetadataMismatch as error:
            self.dropped += 1
            log.warning("rank %d dropped a frame: %s", self.config.rank, one_line(error))
            return None

    def _accept(self, request: WaitingRequest, ack: Ack) -> bool:
        """Whether the ack counts.

        Raises:
            EncodeFailed: it carries the encoder's error. MetadataMismatch: it describes another embedding.
        """
        if self.profile.has(Rule.CHECK_REQUEST_ID) and ack.req_id != request.req_id:
            self.dropped += 1
            return False
        if ack.error is not None:
            raise EncodeFailed(ack.error)
        if self.profile.has(Rule.CHECK_METADATA):
            if any(ack.part_idx == other.part_idx for other in request.acks):
                self.dropped += 1
                return False
            _check_ack(request, ack)
        request.acks.append(ack)
        return True

    # ---- the end of a request ------------------------------------------------------------------------------------

    async def _read_part(self, received: Received, index: int) -> str:
        meta, view = received.parts[index], received.part(index)
        return await self.steps.do(
            "landing.read",
            view.digest,
            lambda digest: {"data": {"digest": digest}},
            address=view.address,
            bytes=meta.embedding_size,
            **self._labels(received._request, index),
        )

    async def _consumed(self, request: WaitingRequest) -> None:
        request.transition(RequestState.CONSUMED)
        self.requests.pop(request.req_id, None)
        self.steps.note("request.finish", **self._labels(request), result="ok")
        await self._surely(self._reclaim(request))

    async def _give_up(self, request: WaitingRequest, error: BaseException) -> BaseException:
        """Release what a failed request holds; the error to raise."""
        reason = self._reason(request, error)
        request.transition(RequestState.FAILED)
        self.requests.pop(request.req_id, None)
        self.steps.note("request.finish", **self._labels(request), result=one_line(reason))
        if self.profile.has(Rule.DRAIN_BEFORE_RELEASE):
            self._spawn(self._reclaim(request))
        else:
            await self._surely(self._reclaim(request))
        return reason

    def _reason(self, request: WaitingRequest, error: BaseException) -> BaseException:
        if request.expired:
            _uncancel()
            return DeadlineExceeded(
                f"{request.req_id} had not landed after {self.config.deadline_s:g} s (it was {request.state.value}); "
                "see the trace for the step it waited at"
            )
        if isinstance(error, asyncio.CancelledError | EpdLabError):
            return error
        return HandoffError(f"{request.req_id}: {one_line(error)}")

    async def _reclaim(self, request: WaitingRequest) -> None:
        """Give the landing memory back: after the last write that may touch it, where the profile says so."""
        slot = request.slot
        if self.profile.has(Rule.DRAIN_BEFORE_RELEASE):
            await asyncio.gather(*request.posts, return_exceptions=True)
        if slot is None or slot.state is not SlotState.HELD:
            return
        if self._may_still_be_written(request) and self.profile.has(Rule.QUARANTINE_AFTER_TIMEOUT):
            await self._quarantine(request, slot)
        else:
            await self.landing.free(slot, **self._labels(request))

    def _may_still_be_written(self, request: WaitingRequest) -> bool:
        """Whether a write of a finished /send could still land: it failed after it may have begun."""
        errors = [post.exception() for post in request.posts if post.done() and not post.cancelled()]
        return any(error is not None and getattr(error, "kind", "") not in WRITE_NEVER_BEGAN for error in errors)

    async def _quarantine(self, request: WaitingRequest, slot: LandingSlot) -> None:
        labels = self._labels(request)
        await self.landing.quarantine(slot, **labels)
        fire = lambda: self._spawn(self._after_quarantine(request, slot))  # noqa: E731
        self._quarantines[slot.name] = self.clock.timer("quarantine", self.config.quarantine_s, fire, **labels)

    async def _after_quarantine(self, request: WaitingRequest, slot: LandingSlot) -> None:
        labels = self._labels(request)
        del self._quarantines[slot.name]
        await self.steps.do("timer.fire", lambda: None, data={"timer": "quarantine"}, **labels)
        await self.landing.free(slot, **labels)

    def _expire(self, request: WaitingRequest, task: asyncio.Task[Any] | None) -> None:
        async def fire() -> None:
            await self.steps.do("timer.fire", lambda: None, data={"timer": "deadline"}, **self._labels(request))
            runs = self.requests.get(request.req_id) is request and request.state is not RequestState.LANDED
            if runs and task is not None:
                request.expired = True
                task.cancel()

        self._spawn(fire())

    # ---- housekeeping --------------------------------------------------------------------------------------------

    def _admit(self, req_id: str, items: Sequence[Item]) -> WaitingRequest:
        if req_id in self.requests:
            raise UsageError(f"request id {req_id!r} is in use; give every request its own")
        request = WaitingRequest(req_id, split_items(items, len(self.config.encoders)))
        self.requests[req_id] = request
        return request

    def _labels(self, request: WaitingRequest, part: int | None = None) -> dict[str, Any]:
        labels: dict[str, Any] = {"req": request.req_id, "rank": self.config.rank}
        return labels if part is None else labels | {"part": part}

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    async def _surely(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that goes on even if whoever waits is cancelled: a release is whole, and happens once."""
        await asyncio.shield(self._spawn(work))

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("rank %d: %s", self.config.rank, one_line(error))

    async def _all(self, tasks: list[asyncio.Task[Any]]) -> list[Any]:
        """All results; with notify_errors the first error at once, else only when all are done."""
        if self.profile.has(Rule.NOTIFY_ERRORS):
            return await asyncio.gather(*tasks)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if any(isinstance(result, BaseException) for result in results):
            await asyncio.Event().wait()
        return results

    def census(self) -> dict[str, int]:
        """What is still held, by kind. A quarantined slot waits for its timer: it counts as `timed`.

        `regions` are those that neither a slot nor the pool accounts for.
        """
        slots = self.landing.slots
        timed = sum(slot.state is SlotState.QUARANTINED for slot in slots)
        owned = {id(slot.region) for slot in slots}
        strays = [r for r in self.landing.regions.live if id(r) not in owned and r.owner != POOL]
        return {
            "requests": len(self.requests),
            "slots": len(slots) - timed,
            "regions": len(strays),
            "tasks": len(self._tasks),
            "timed": timed,
        }

    async def close(self) -> None:
        """Cancel what runs, give all landing memory back. The engine stays its owner's."""
        for timer in self._quarantines.values():
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.landing.close()


def split_items(items: Sequence[Item], encoders: int) -> list[PartPlan]:
    """Spread items over encoders: per modality, contiguous runs as even as possible; one part per run.

    Raises:
        UsageError: nothing to encode, or nobody to encode it.
    """
    if not items:
        raise UsageError("a request needs at least one image or video; give --image or --video")
    if encoders < 1:
        raise UsageError("no encoder is known; give at least one encoder URL")
    plan: list[PartPlan] = []
    for modality in Modality:
        refs = [item.ref for item in items if item.modality is modality]
        for index in range(min(encoders, len(refs))):
            first, last = (len(refs) * k // min(encoders, len(refs)) for k in (index, index + 1))
            plan.append(PartPlan(len(plan), index, modality, tuple(refs[first:last])))
    return plan


def _uncancel() -> None:
    """The deadline cancelled this task to end its request; to the outside it was not cancelled."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _check_reply(request: WaitingRequest, part: PartPlan, reply: EncodeReply) -> None:
    said = (reply.req_id, reply.part_idx, reply.num_parts, reply.modality)
    asked = (request.req_id, part.part_idx, len(request.plan), part.modality)
    if said != asked:
        raise MetadataMismatch(f"/encode of {asked} was answered for {said}; is the encoder of this release?")
    cells = reply.embedding_len * reply.embedding_dim
    if min(reply.embedding_len, reply.embedding_dim, reply.embedding_size) < 1 or reply.embedding_size % cells:
        shape = f"{reply.embedding_size} bytes for [{reply.embedding_len}, {reply.embedding_dim}]"
        raise MetadataMismatch(f"/encode of part {part.part_idx} says {shape}, which is no embedding")


def _check_ack(request: WaitingRequest, ack: Ack) -> None:
    if not 0 <= ack.part_idx < len(request.metas) or ack.num_parts != len(request.plan):
        raise MetadataMismatch(f"ack for part {ack.part_idx} of {ack.num_parts}, we asked for {len(request.plan)}")
    meta = request.metas[ack.part_idx]
    said = (ack.modality, tuple(ack.shape), ack.dtype, ack.nbytes)
    asked = (meta.modality, (meta.embedding_len, meta.embedding_dim), meta.dtype, meta.embedding_size)
    if said != asked:
        raise MetadataMismatch(f"ack of part {ack.part_idx} says {said}, /encode said {asked}; same encoder?")

