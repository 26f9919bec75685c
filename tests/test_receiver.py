"""The receiver over the real engine and the real link: what lands, what is refused, and that nothing is ever left."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251  # the attack: a frame as upstream's ack would be
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from handoff_world import EnginePool, World, content, expected, turns, within
from hypothesis import given, settings
from hypothesis import strategies as st

from epdlab.errors import (
    BadBuffer,
    DeadlineExceeded,
    EncodeFailed,
    EpdLabError,
    HandoffError,
    LandingFull,
    MetadataMismatch,
    PeerLost,
    RegistrationRefused,
    StateError,
    TransferFailed,
    UsageError,
)
from epdlab.landing import SlotState
from epdlab.link import HttpZmqLink, ZmqAcks
from epdlab.messages import MAX_FRAME_BYTES, Ack, EncodeReply, to_frame, to_json
from epdlab.modality import Modality
from epdlab.receiver import TRANSITIONS, Item, PartPlan, RequestState, WaitingRequest, split_items
from epdlab.steps import Event

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
ITEM = "bytes:5000:1"
GOOD = Ack(req_id="q", part_idx=0, num_parts=1, modality=IMAGE, shape=(5000, 1), dtype="uint8", nbytes=5000)
REPLY = EncodeReply(
    req_id="q",
    encoder_idx=0,
    num_parts=1,
    part_idx=0,
    modality=IMAGE,
    embedding_size=64,
    embedding_len=64,
    embedding_dim=1,
    dtype="uint8",
    grid=[(1, 64, 1)],
)


pytestmark = pytest.mark.usefixtures("refused_at_once")


@asynccontextmanager
async def pushing(port: int) -> AsyncIterator[Callable[..., Any]]:
    """Anybody's PUSH socket to a rank's acks."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield lambda *frames: socket.send_multipart(frames)
    finally:
        context.destroy(linger=200)


def ack_port(world: World, req_id: str = "q") -> int:
    return world.encoders[0].parts[f"{req_id}/part0"].request.embedding_port


async def over(world: World) -> None:
    """Fire what still waits for a timer, and see that nothing at all is left."""
    await world.settled()
    for timer in ("deadline", "cleanup", "quarantine"):
        world.clock.fire(timer)
        await world.settled()
    assert world.census() == {}
    assert world.clock.pending == set()
    assert len(world.seen("landing.alloc", phase="end", result="ok")) == len(world.seen("landing.free", phase="end"))


# ---- what lands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
@pytest.mark.parametrize("encoders", [1, 3])
async def test_images_and_videos_land_part_by_part(engines: EnginePool, encoders: int, pool_bytes: int) -> None:
    images, videos = [f"bytes:{n}:{n}" for n in (1, 255, 4097, 30_000)], ["bytes:9:1", "bytes:70000:2"]
    async with World(engines, tp=2, encoders=encoders, pool_bytes=pool_bytes) as world:
        plan = split_items([Item(IMAGE, ref) for ref in images] + [Item(VIDEO, ref) for ref in videos], encoders)
        answers = await world.all_ranks("q", *images, videos=videos)
        assert answers == [[expected(*part.items) for part in plan]] * 2


async def test_one_view_per_modality_without_a_copy(engines: EnginePool) -> None:
    async with World(engines, encoders=2) as world:
        items = [Item(VIDEO, "bytes:10:1"), Item(IMAGE, "bytes:20:2"), Item(IMAGE, "bytes:30:3")]
        received = await within(world.ranks[0].receive("q", items))
        views = received.by_modality()
        assert [meta.modality for meta in received.parts] == [IMAGE, IMAGE, VIDEO]
        assert content(views[IMAGE]) == expected("bytes:20:2", "bytes:30:3")
        assert content(views[VIDEO]) == expected("bytes:10:1")
        slot = world.ranks[0].landing.slots[0]
        assert (views[IMAGE].address, views[VIDEO].address) == (slot.address, slot.address + 50)
        await received.release()


async def test_a_released_request_cannot_be_read(engines: EnginePool) -> None:
    async with World(engines) as world:
        received = await world.landed(0, "q", ITEM)
        await received.release()
        await received.release()
        for use in (lambda: received.part(0), received.by_modality):
            with pytest.raises(HandoffError, match="released already"):
                use()
        with pytest.raises(HandoffError, match="released already"):
            await received.read()
        assert len(world.seen("landing.free")) == 1


async def test_landing_memory_is_held_until_its_reader_is_done(engines: EnginePool) -> None:
    async with World(engines, pool_bytes=8192) as world:
        first = await world.landed(0, "first", ITEM)
        second = world.start(0, "second", "bytes:8000:2")
        await world.until(lambda: len(world.seen("encode.post", phase="end")) == 2)
        await turns()
        assert world.ranks[0].requests["second"].state is RequestState.ALLOCATING
        assert content(first.part(0)) == expected(ITEM)
        await first.release()
        assert await within(second) == [expected("bytes:8000:2")]


async def test_an_id_in_use_is_refused_and_the_first_goes_on(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("transfer.write")
        first = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        with pytest.raises(UsageError, match="'q' is in use"):
            await world.landed(0, "q", ITEM)
        world.hand.run()
        assert await within(first) == [expected(ITEM)]
        assert await within(world.start(0, "q", "bytes:7:7")) == [expected("bytes:7:7")]


async def test_the_same_id_with_other_items_on_another_rank_is_refused(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.hold("transfer.write", rank=0)
        first = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        with pytest.raises(MetadataMismatch, match="in use for other items"):
            await within(world.start(1, "q", "bytes:5000:2"))
        with pytest.raises(MetadataMismatch, match="in use for other items"):
            await within(world.start(1, "q", ITEM, "bytes:1:1"))
        world.hand.run()
        assert await within(first) == [expected(ITEM)]
        await over(world)


async def test_without_items_or_encoders() -> None:
    with pytest.raises(UsageError, match="--image"):
        split_items([], 1)
    with pytest.raises(UsageError, match="encoder URL"):
        split_items([Item(IMAGE, "a")], 0)


@pytest.mark.parametrize(
    ("images", "videos", "encoders", "plan"),
    [
        ("abc", "", 1, [(0, IMAGE, "abc")]),
        ("abc", "", 2, [(0, IMAGE, "a"), (1, IMAGE, "bc")]),
        ("ab", "", 3, [(0, IMAGE, "a"), (1, IMAGE, "b")]),
        ("ab", "v", 2, [(0, IMAGE, "a"), (1, IMAGE, "b"), (0, VIDEO, "v")]),
        ("", "vwxyz", 2, [(0, VIDEO, "vw"), (1, VIDEO, "xyz")]),
    ],
)
def test_items_are_spread_evenly_and_in_order(
    images: str, videos: str, encoders: int, plan: list[tuple[int, Modality, str]]
) -> None:
    items = [Item(VIDEO, ref) for ref in videos] + [Item(IMAGE, ref) for ref in images]
    assert split_items(items, encoders) == [
        PartPlan(index, encoder, modality, tuple(refs)) for index, (encoder, modality, refs) in enumerate(plan)
    ]


@given(images=st.integers(0, 20), videos=st.integers(0, 20), encoders=st.integers(1, 9))
def test_every_item_is_in_exactly_one_part(images: int, videos: int, encoders: int) -> None:
    items = [Item(IMAGE, f"i{n}") for n in range(images)] + [Item(VIDEO, f"v{n}") for n in range(videos)]
    if not items:
        return
    plan = split_items(items, encoders)
    assert [ref for part in plan for ref in part.items] == [item.ref for item in items]
    assert [part.part_idx for part in plan] == list(range(len(plan)))
    for modality in Modality:
        sizes = [len(part.items) for part in plan if part.modality is modality]
        assert all(part.encoder_idx < encoders for part in plan)
        assert not sizes or (max(sizes) - min(sizes) <= 1 and min(sizes) >= 1)


# ---- acks from anybody -----------------------------------------------------------------------------------------------


def garbage() -> list[bytes]:
    """Frames that are no ack of ours."""
    return [
        b"",
        b"\x00",
        b"garbage",
        bytes(MAX_FRAME_BYTES + 1),
        b"\x82\xa4type\xa3ack\xa4more" + b"\x91" * 20_000 + b"\xc0",
        pickle.dumps(GOOD),
        to_frame(msgspec.structs.replace(GOOD, v=99)),
        to_frame(GOOD)[:-1],
    ]


async def test_garbage_is_counted_and_dropped_and_hurts_nobody(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("transfer.write")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        async with pushing(ack_port(world)) as push:
            for frame in garbage():
                await push(frame)
            await push(b"two", b"frames")
            await push(to_frame(msgspec.structs.replace(GOOD, req_id="somebody else")))
            await world.until(lambda: len(world.seen("ack.pull", phase="end", result="dropped")) == 1)
        assert world.ranks[0].dropped == len(garbage()) + 2
        world.hand.run()
        assert await within(task) == [expected(ITEM)]


async def test_a_frame_far_over_the_limit_cuts_its_sender_off_and_nobody_else(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("transfer.write")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        async with pushing(ack_port(world)) as push:
            await push(bytes(64 << 20))
        world.hand.run()
        assert await within(task) == [expected(ITEM)]


async def test_the_ack_of_another_request_is_dropped(engines: EnginePool) -> None:
    """A's ack is late, A is given up, and B's socket gets A's port."""
    async with World(engines) as world:
        world.hand.hold("ack.push", req="a", times=1)
        first = world.start(0, "a", "bytes:100:1")
        (late,) = await world.hand.appears("ack.push")
        port = ack_port(world, "a")
        first.cancel()
        await asyncio.wait([first])
        link = world.ranks[0].link
        assert isinstance(link, HttpZmqLink)
        link.acks = lambda: _on_port(HttpZmqLink.acks(link), port)  # type: ignore[method-assign]
        world.hand.hold("transfer.write", req="b")
        second = world.start(0, "b", "bytes:100:2")
        await world.hand.appears("transfer.write")
        world.hand.go(late)
        await world.until(lambda: len(world.seen("ack.pull", phase="end", result="dropped")) == 1)
        assert [(event.req, event.data) for event in world.seen("ack.pull", phase="end")] == [("b", {"of": "a"})]
        world.hand.run()
        assert await within(second) == [expected("bytes:100:2")]
        await over(world)


def _on_port(acks: ZmqAcks, port: int) -> ZmqAcks:
    acks._socket.unbind(f"tcp://127.0.0.1:{acks.port}")
    acks._socket.bind(f"tcp://127.0.0.1:{port}")
    acks.port = port
    return acks


async def test_the_ack_of_another_request_counts_where_nobody_looks(engines: EnginePool) -> None:
    nobody_else_has = "bytes:5000:4711"
    async with World(engines, rules="sglang-0.5.12", expect_clean=False) as world:
        world.hand.hold("transfer.write")
        task = world.start(0, "q", nobody_else_has)
        await world.hand.appears("transfer.write")
        async with pushing(ack_port(world)) as push:
            await push(to_frame(msgspec.structs.replace(GOOD, req_id="somebody else")))
            (too_early,) = await within(task)
        assert too_early != expected(nobody_else_has), "memory given back by an earlier test may hold its bytes"


async def test_a_repeated_ack_counts_once(engines: EnginePool) -> None:
    async with World(engines, encoders=2) as world:
        world.hand.hold("transfer.write", part=1)
        world.hand.fault("repeat", "ack.push", part=0)
        task = world.start(0, "q", ITEM, ITEM)
        await world.hand.appears("transfer.write")
        await world.until(lambda: len(world.seen("ack.pull", phase="end")) == 2)
        assert (world.ranks[0].dropped, task.done()) == (1, False)
        world.hand.run()
        assert await within(task) == [expected(ITEM)] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (4999, 1)},
        {"dtype": "float32"},
        {"nbytes": 4999},
        {"modality": VIDEO},
        {"part_idx": 1},
        {"part_idx": -1},
        {"num_parts": 2},
    ],
    ids=str,
)
async def test_an_ack_that_says_something_else_is_an_error(engines: EnginePool, wrong: dict[str, Any]) -> None:
    async with World(engines) as world:
        world.hand.hold("transfer.write")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        async with pushing(ack_port(world)) as push:
            await push(to_frame(msgspec.structs.replace(GOOD, **wrong)))
            with pytest.raises(MetadataMismatch):
                await within(task)
        world.hand.run()
        await over(world)


async def test_an_ack_that_carries_an_error_is_that_error(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("transfer.write")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        async with pushing(ack_port(world)) as push:
            await push(to_frame(msgspec.structs.replace(GOOD, error="encode_failed: out of memory")))
            with pytest.raises(EncodeFailed, match="out of memory"):
                await within(task)
        world.hand.run()
        await over(world)


# ---- an encoder that answers nonsense --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"req_id": "other"},
        {"part_idx": 1},
        {"num_parts": 2},
        {"modality": VIDEO},
        {"embedding_size": 0},
        {"embedding_size": -300},
        {"embedding_size": 65},
        {"embedding_len": 0},
        {"embedding_dim": -1},
        {"embedding_size": 1 << 60, "embedding_len": 1 << 60},
    ],
    ids=str,
)
@pytest.mark.parametrize("pool_bytes", [0, 4096])
async def test_a_reply_that_describes_no_embedding(engines: EnginePool, wrong: dict[str, Any], pool_bytes: int) -> None:
    async def lie(_: bytes) -> bytes:
        return to_json(msgspec.structs.replace(REPLY, **wrong))

    async with World(engines, pool_bytes=pool_bytes) as world, encoder_that(world, lie):
        with pytest.raises((MetadataMismatch, BadBuffer, LandingFull)):
            await within(world.start(0, "q", ITEM))


@asynccontextmanager
async def encoder_that(world: World, answers: Callable[[bytes], Any]) -> AsyncIterator[None]:
    """Another server in the encoder's place."""
    link = HttpZmqLink()
    url = await link.serve({"/encode": answers, "/send": answers})
    rank = world.ranks[0]
    rank.config = type(rank.config)(rank.config.rank, rank.config.tp, (url,), deadline_s=rank.config.deadline_s)
    try:
        yield
    finally:
        await link.close()


async def test_a_reply_that_is_none(engines: EnginePool) -> None:
    async def nonsense(_: bytes) -> bytes:
        return b"<html>"

    async with World(engines) as world, encoder_that(world, nonsense):
        with pytest.raises(MetadataMismatch, match="no EncodeReply"):
            await within(world.start(0, "q", ITEM))


async def test_a_server_that_is_no_encoder(engines: EnginePool) -> None:
    async with World(engines) as world:
        rank = world.ranks[0]
        rank.config = type(rank.config)(0, 1, (f"{world.encoders[0].url}/elsewhere",))
        with pytest.raises(HandoffError, match="HTTP 404"):
            await within(world.start(0, "q", ITEM))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:99999", "nonsense", ""])
async def test_nobody_answers(engines: EnginePool, url: str) -> None:
    async with World(engines) as world:
        rank = world.ranks[0]
        rank.config = type(rank.config)(0, 1, (url,))
        with pytest.raises(PeerLost, match="is the encoder running"):
            await within(world.start(0, "q", ITEM))


# ---- errors, at once -------------------------------------------------------------------------------------------------


async def test_one_failed_part_ends_the_request_before_the_others_are_done(engines: EnginePool) -> None:
    async with World(engines, encoders=2) as world:
        world.hand.hold("transfer.write", process="enc0")
        world.hand.fault("fail", "transfer.write", process="enc1")
        with pytest.raises(TransferFailed):
            await within(world.start(0, "q", ITEM, ITEM))
        assert [slot.state for slot in world.ranks[0].landing.slots] == [SlotState.HELD], "a write may still come"
        world.hand.run()
        await over(world)


async def test_memory_that_may_still_be_written_is_set_aside(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.fault("fail", "transfer.write")
        with pytest.raises(TransferFailed):
            await within(world.start(0, "q", ITEM))
        await world.settled()
        assert [slot.state for slot in world.ranks[0].landing.slots] == [SlotState.QUARANTINED]
        await over(world)


@pytest.mark.parametrize("process", ["enc0", "rank0"])
async def test_a_refused_registration_ends_the_request(engines: EnginePool, process: str) -> None:
    async with World(engines) as world:
        world.hand.fault("fail", "mr.register", process=process)
        with pytest.raises(RegistrationRefused, match="-7"):
            await within(world.start(0, "q", ITEM))
        await world.settled()
        assert world.ranks[0].landing.slots == [], "no write can have begun"
        await over(world)


async def test_a_refused_deregistration_on_a_rank_shows(engines: EnginePool) -> None:
    async with World(engines, expect_clean=False) as world:
        world.hand.fault("fail", "mr.deregister", process="rank0")
        with pytest.raises(EpdLabError, match="-3"):
            await within(world.start(0, "q", ITEM))
        await world.settled()
        assert world.ranks[0].census()["regions"] == 1
        world.withdraw_by_hand()


async def test_where_errors_are_not_notified_the_deadline_ends_it(engines: EnginePool) -> None:
    async with World(engines, rules="sglang-0.5.12", expect_clean=False) as world:
        world.hand.fault("fail", "encode.forward")
        task = world.start(0, "q", ITEM)
        await world.until(lambda: len(world.seen("encode.post", phase="end")) == 1)
        await turns()
        assert not task.done()
        world.clock.fire("deadline")
        with pytest.raises(DeadlineExceeded):
            await within(task)


async def test_no_room_fails_this_request_alone(engines: EnginePool) -> None:
    async with World(engines, pool_bytes=4096) as world:
        with pytest.raises(LandingFull, match="--pool-bytes"):
            await within(world.start(0, "q", ITEM))
        assert await within(world.start(0, "next", "bytes:4096:1")) == [expected("bytes:4096:1")]
        await over(world)


# ---- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "phase", "state"),
    [
        ("encode.post", "begin", "encoding"),
        ("encode.forward", "begin", "encoding"),
        ("encode.post", "end", "encoding"),
        ("landing.alloc", "begin", "allocating"),
        ("send.post", "begin", "sending"),
        ("transfer.write", "begin", "sending"),
        ("transfer.write", "end", "sending"),
        ("ack.push", "begin", "sending"),
        ("ack.pull", "begin", "sending"),
    ],
)
@pytest.mark.parametrize("pool_bytes", [0, 8192])
async def test_the_deadline_ends_a_request_wherever_it_is(
    engines: EnginePool, step: str, phase: str, state: str, pool_bytes: int
) -> None:
    async with World(engines, pool_bytes=pool_bytes) as world:
        world.hand.hold(step, phase=phase)

        async def client() -> int:
            with pytest.raises(DeadlineExceeded, match=f"it was {state}"):
                await world.receive(0, "q", [ITEM])
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()

        waiting = asyncio.ensure_future(client())
        await world.hand.appears(step)
        assert world.clock.fire("deadline", req="q") == 1
        assert await within(waiting) == 0, "to its caller the task was not cancelled"
        assert world.ranks[0].requests == {}
        world.hand.run()
        await over(world)


async def test_a_deadline_after_landing_does_nothing(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("timer.fire")
        world.hand.hold("transfer.write")
        task = asyncio.ensure_future(world.landed(0, "q", ITEM))
        await world.hand.appears("transfer.write")
        assert world.clock.fire("deadline") == 1
        await world.hand.appears("timer.fire")
        for held in await world.hand.appears("transfer.write"):
            world.hand.go(held)
        received = await within(task)
        world.hand.run()
        await world.settled()
        assert content(received.part(0)) == expected(ITEM)
        await received.release()


async def test_a_late_deadline_does_not_end_the_next_request_of_the_same_id(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("timer.fire")
        world.hand.hold("transfer.write")

        async def twice() -> list[bytes]:
            first = await world.receive(0, "q", [ITEM])
            return first + await world.receive(0, "q", ["bytes:3:3"])

        task = asyncio.ensure_future(twice())
        (write,) = await world.hand.appears("transfer.write")
        world.clock.fire("deadline")
        (late,) = await world.hand.appears("timer.fire")
        world.hand.go(write)
        await world.until(lambda: len(world.seen("transfer.write", phase="begin")) == 1)
        await world.until(lambda: len(world.seen("request.finish", phase=None)) == 1)
        await world.hand.appears("transfer.write")
        world.hand.go(late)
        await turns()
        world.hand.run()
        assert await within(task) == [expected(ITEM), expected("bytes:3:3")]


# ---- cancellation ----------------------------------------------------------------------------------------------------

AWAITS: list[tuple[str, str, str | None]] = [
    ("encode.post", "begin", None),
    ("encode.post", "end", None),
    ("encode.serve", "begin", None),
    ("encode.forward", "begin", None),
    ("encode.forward", "end", None),
    ("landing.alloc", "begin", None),
    ("mr.register", "begin", "rank0"),
    ("mr.register", "begin", "enc0"),
    ("send.post", "begin", None),
    ("send.post", "end", None),
    ("send.serve", "begin", None),
    ("send.lookup", "begin", None),
    ("transfer.write", "begin", None),
    ("transfer.write", "end", None),
    ("ack.push", "begin", None),
    ("ack.pull", "begin", None),
    ("landing.read", "begin", None),
    ("mr.deregister", "begin", "rank0"),
    ("mr.deregister", "begin", "enc0"),
    ("landing.free", "begin", None),
    ("part.release", "begin", None),
    ("embedding.drop", "begin", None),
]


@pytest.mark.parametrize(
    ("step", "phase", "process", "pool_bytes"),
    [(*where, 0) for where in AWAITS] + [(*where, 8192) for where in AWAITS if where[2] != "rank0"],
)
async def test_cancelled_wherever_it_waits_a_request_releases_everything_once(
    engines: EnginePool, step: str, phase: str, process: str | None, pool_bytes: int
) -> None:
    async with World(engines, pool_bytes=pool_bytes) as world:
        world.hand.hold(step, phase=phase, process=process)
        task = world.start(0, "q", ITEM)
        await world.hand.appears(step)
        for _ in range(3):
            task.cancel()
            await turns()
        world.hand.run()
        await asyncio.wait([task])
        await over(world)
        assert await within(world.start(0, "q", ITEM)) == [expected(ITEM)]


@pytest.mark.parametrize("rules", ["sglang-0.5.12", "sglang-0.5.16", "sglang-0.5.17", "sglang-0.5.23"])
@pytest.mark.parametrize("step", ["landing.alloc", "ack.pull", "mr.deregister", "landing.free", "landing.read"])
async def test_cancelled_under_upstreams_rules_the_slot_is_freed_once_too(
    engines: EnginePool, rules: str, step: str
) -> None:
    async with World(engines, rules=rules, expect_clean=False) as world:
        world.hand.hold(step, process="rank0")
        task = world.start(0, "q", ITEM)
        await world.hand.appears(step)
        for _ in range(2):
            task.cancel()
            await turns()
        world.hand.run()
        await asyncio.wait([task])
        await world.settled(world.ranks[0])
        assert (world.ranks[0].landing.slots, world.ranks[0].landing.regions.live) == ([], [])
        assert len(world.seen("landing.free", phase="end")) == len(
            world.seen("landing.alloc", phase="end", result="ok")
        )


async def test_cancelled_while_it_waits_for_the_reply_to_its_send(engines: EnginePool) -> None:
    """The ack comes before the reply to /send. A reader that is cancelled then must not lose the slot."""
    async with World(engines) as world:
        world.hand.hold("send.post", phase="end")
        received = await within(world.landed(0, "q", ITEM))
        releasing = asyncio.ensure_future(received.release())
        await turns()
        releasing.cancel()
        await asyncio.wait([releasing])
        assert len(world.ranks[0].landing.slots) == 1, "a write may still run"
        world.hand.run()
        await over(world)


async def test_closing_a_rank_in_the_middle_gives_everything_back(engines: EnginePool) -> None:
    async with World(engines, expect_clean=False) as world:
        world.hand.fault("fail", "transfer.write", req="failed")
        await asyncio.gather(world.start(0, "failed", ITEM), return_exceptions=True)
        await world.settled()
        received = await world.landed(0, "landed", ITEM)
        world.hand.hold("transfer.write")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        await world.ranks[0].close()
        await asyncio.wait([task])
        assert (world.ranks[0].landing.slots, world.ranks[0].landing.regions.live) == ([], [])
        assert world.clock.fire("quarantine", rank=0) == 0, "no timer stays"
        await received.release()


# ---- lifecycle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("to", RequestState)
def test_only_the_tables_transitions_exist(state: RequestState, to: RequestState) -> None:
    request = WaitingRequest("q", [], state)
    if to in TRANSITIONS[state]:
        request.transition(to)
    else:
        with pytest.raises(StateError, match=f"from {state.value} to {to.value}"):
            request.transition(to)


async def test_a_socket_that_cannot_be_had_leaves_no_request(engines: EnginePool) -> None:
    async with World(engines) as world:
        link = world.ranks[0].link

        def none_left() -> Any:
            raise zmq.ZMQError(zmq.EMFILE)

        link.acks = none_left  # type: ignore[method-assign]
        with pytest.raises(HandoffError):
            await within(world.start(0, "q", ITEM))
        assert (world.ranks[0].requests, world.clock.pending) == ({}, set())


# ---- any requests, any trouble ---------------------------------------------------------------------------------------

FAULTS = [
    ("fail", "encode.forward"),
    ("fail", "encode.post"),
    ("fail", "send.post"),
    ("fail", "transfer.write"),
    ("fail", "mr.register"),
    ("fail", "ack.push"),
    ("fail", "encode.serve"),
    ("fail", "send.lookup"),
    ("repeat", "encode.post"),
    ("repeat", "send.post"),
    ("repeat", "transfer.write"),
    ("repeat", "ack.push"),
    ("drop", "ack.push"),
    ("drop", "ack.pull"),
]


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with one request on one rank: a fault, or a cancellation or a deadline after some events."""

    rank: int
    fault: tuple[str, str] | None = None
    cancel_after: int | None = None
    expire_after: int | None = None


@dataclass(frozen=True)
class Asked:
    images: tuple[int, ...]
    videos: tuple[int, ...]
    trouble: Trouble | None

    def refs(self, number: int) -> tuple[list[str], list[str]]:
        return [f"bytes:{n}:{number}" for n in self.images], [f"bytes:{n}:{number + 50}" for n in self.videos]


sizes = st.lists(st.integers(1, 3000), max_size=3).map(tuple)
troubles = st.builds(Trouble, st.integers(0, 1), fault=st.sampled_from(FAULTS)) | st.builds(
    Trouble, st.integers(0, 1), cancel_after=st.integers(0, 40)
) | st.builds(Trouble, st.integers(0, 1), expire_after=st.integers(0, 40))  # fmt: skip
asked = st.builds(Asked, sizes, sizes, st.none() | troubles).filter(lambda one: one.images or one.videos)


class Director:
    """Cancels a task or fires a deadline once so many events of its request have happened.

    Of a dropped ack it fires the deadline, and of memory set aside the end of its quarantine: others wait for it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._acts: list[tuple[str, int, Callable[[], object]]] = []
        record = world._record
        for holder in [*world.encoders, *world.ranks]:
            holder.steps.record = lambda event: (record(event), self._look(event))[0]

    def _soon(self, timer: str, event: Event) -> None:
        fire = lambda: self._world.clock.fire(timer, req=event.req, rank=event.rank)  # noqa: E731
        asyncio.get_running_loop().call_soon(fire)

    def after(self, req_id: str, count: int, act: Callable[[], object]) -> None:
        self._acts.append((req_id, count, act))

    def _look(self, event: Event) -> None:
        if event.fault == "drop":
            self._soon("deadline", event)
        if event.step == "landing.quarantine" and event.phase == "end":
            self._soon("quarantine", event)
        for one in [one for one in self._acts if one[0] == event.req]:
            self._acts.remove(one)
            req_id, count, act = one
            if count > 0:
                self._acts.append((req_id, count - 1, act))
            else:
                asyncio.get_running_loop().call_soon(act)


@given(st.lists(asked, min_size=1, max_size=5), st.integers(1, 2), st.sampled_from([0, 4096, 1 << 16]), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_requests_with_any_trouble_leave_nothing(
    engines: EnginePool, requests: list[Asked], encoders: int, pool_bytes: int, one_by_one: bool
) -> None:
    asyncio.run(_any_requests(engines, requests, encoders, pool_bytes, one_by_one))


async def _any_requests(
    engines: EnginePool, requests: list[Asked], encoders: int, pool_bytes: int, one_by_one: bool
) -> None:
    async with World(engines, tp=2, encoders=encoders, pool_bytes=pool_bytes, deadline_s=1e6) as world:
        director = Director(world)
        answers = []
        for number, one in enumerate(requests):
            images, videos = one.refs(number)
            tasks = [world.start(rank, f"r{number}", *images, videos=videos) for rank in range(2)]
            _prepare(world, director, f"r{number}", tasks, one.trouble)
            answers.append(tasks)
            if one_by_one:
                await within(asyncio.wait(tasks))
        await within(asyncio.wait([task for tasks in answers for task in tasks]))
        await over(world)
        world.check()
        for number, one in enumerate(requests):
            _check_answers(answers[number], number, one, encoders)


def _prepare(
    world: World, director: Director, req_id: str, tasks: list[asyncio.Task[list[bytes]]], trouble: Trouble | None
) -> None:
    if trouble is None:
        return
    if trouble.fault is not None:
        kind, step = trouble.fault
        rank = None if step == "encode.forward" else trouble.rank
        world.hand.fault(kind, step, req=req_id, rank=rank)  # type: ignore[arg-type]
    elif trouble.cancel_after is not None:
        director.after(req_id, trouble.cancel_after, tasks[trouble.rank].cancel)
    elif trouble.expire_after is not None:
        expire = lambda: world.clock.fire("deadline", req=req_id, rank=trouble.rank)  # noqa: E731
        director.after(req_id, trouble.expire_after, expire)


def _check_answers(tasks: list[asyncio.Task[list[bytes]]], number: int, one: Asked, encoders: int) -> None:
    """The right bytes, or an error with a type; and without trouble the only error is a pool too small."""
    images, videos = one.refs(number)
    plan = split_items([Item(IMAGE, ref) for ref in images] + [Item(VIDEO, ref) for ref in videos], encoders)
    for task in tasks:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            assert task.result() == [expected(*part.items) for part in plan]
        else:
            assert isinstance(error, EpdLabError | asyncio.CancelledError)
            assert one.trouble is not None or isinstance(error, LandingFull), error
