"""The sender over the real engine and the real link: forwards, sends, early release, clean-up, and every wrong call."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from handoff_world import EnginePool, World, content, encode_request, expected, send_request, turns, within

from epdlab.encode_server import MAX_BATCH, TRANSITIONS, EmbeddingData, EncoderConfig, PartState
from epdlab.errors import (
    EncodeFailed,
    HandoffError,
    LostEmbedding,
    MetadataMismatch,
    PeerLost,
    RegistrationRefused,
    SourceUncovered,
    StateError,
    TransferFailed,
    UsageError,
)
from epdlab.link import HttpZmqLink
from epdlab.messages import MAX_BODY_BYTES, EncodeReply, SendReply, from_json, to_json
from epdlab.modality import Modality
from epdlab.steps import Decision

pytestmark = pytest.mark.usefixtures("refused_at_once")
ITEM = "bytes:5000:1"
BOTH = ("bytes:5000:1", "bytes:77:2")


async def asked(world: World, path: str, body: bytes | io.BytesIO) -> tuple[int, dict[str, Any]]:
    """One POST as anybody could make it: status and JSON."""
    async with aiohttp.ClientSession() as session, session.post(f"{world.encoders[0].url}{path}", data=body) as reply:
        return reply.status, json.loads(await reply.read())


def digests_sent(world: World) -> int:
    return len(world.seen("embedding.ready", phase=None))


# ---- /encode ---------------------------------------------------------------------------------------------------------


async def test_encode_describes_the_embedding(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        body = to_json(encode_request(item=ITEM, num_parts=3, part_idx=2, encoder_idx=5))
        status, reply = await asked(world, "/encode", body)
        assert status == 200
        assert (reply["embedding_size"], reply["embedding_len"], reply["embedding_dim"]) == (5000, 5000, 1)
        assert (reply["encoder_idx"], reply["num_parts"], reply["part_idx"]) == (5, 3, 2)
        assert (reply["modality"], reply["dtype"], reply["grid"]) == ("IMAGE", "uint8", [[1, 5000, 1]])
        assert world.clock.fire("cleanup") == 1


@pytest.mark.parametrize("tp", [2, 4])
async def test_siblings_share_one_forward(engines: EnginePool, tp: int) -> None:
    async with World(engines, tp=tp) as world:
        assert await world.all_ranks("q", *BOTH) == [[expected(*BOTH)]] * tp
        assert (len(world.seen("encode.serve")), len(world.seen("encode.forward"))) == (tp, 1)
        assert (len(world.seen("transfer.write")), len(world.seen("mr.register", process="enc0"))) == (tp, 1)


async def test_a_sibling_that_asks_during_the_forward_waits_for_it(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.hold("encode.forward")
        first = world.start(0, "q", ITEM)
        await world.hand.appears("encode.forward")
        second = world.start(1, "q", ITEM)
        await world.until(lambda: len(world.seen("encode.serve", phase="end")) == 2)
        world.hand.run()
        assert await within(asyncio.gather(first, second)) == [[expected(ITEM)]] * 2
        assert len(world.seen("encode.forward")) == 1


@pytest.mark.parametrize("change", [{"item": "bytes:5000:2"}, {"num_parts": 2}, {"modality": Modality.VIDEO}])
async def test_a_sibling_that_means_something_else_is_refused(engines: EnginePool, change: dict[str, Any]) -> None:
    """One id for two things: folding would give the second asker the first one's embedding."""
    async with World(engines, tp=0) as world:
        encoder = world.encoders[0]
        await encoder.encode(encode_request(item=ITEM))
        with pytest.raises(MetadataMismatch, match=r"q/part0.*req_id"):
            await encoder.encode(encode_request(**({"item": ITEM} | change)))
        await encoder.encode(encode_request(item=ITEM, tp_rank=1, embedding_port=2, receive_count=4))
        assert world.clock.fire("cleanup") == 1


async def test_queued_requests_of_a_modality_run_as_one_batch(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("encode.forward", times=1)
        tasks = [world.start(0, "r0", "bytes:100:0")]
        await world.hand.appears("encode.forward")
        tasks += [world.start(0, f"r{n}", f"bytes:{100 + n}:{n}") for n in range(1, MAX_BATCH + 3)]
        await world.until(lambda: len(world.seen("encode.serve", phase="end")) == MAX_BATCH + 3)
        await turns()
        world.hand.run()
        right = [[expected(f"bytes:{100 + n}:{n}")] for n in range(MAX_BATCH + 3)]
        assert await within(asyncio.gather(*tasks)) == right
        batches = [event.data["parts"] for event in world.seen("encode.forward", phase="end") if event.data]
        assert [len(batch) for batch in batches] == [1, MAX_BATCH, 2]
        assert [part for batch in batches for part in batch] == [f"r{n}/part0" for n in range(MAX_BATCH + 3)]


async def test_modalities_have_queues_of_their_own(engines: EnginePool) -> None:
    async with World(engines, rules="sglang-0.5.23") as world:
        world.hand.hold("encode.forward", times=1)
        image = world.start(0, "i", ITEM)
        await world.hand.appears("encode.forward")
        video = world.start(0, "v", videos=[ITEM])
        assert await within(video) == [expected(ITEM)]
        assert not image.done()
        world.hand.run()
        await within(image)


async def test_encode_of_a_video_answers_before_the_forward(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("encode.forward")
        task = world.start(0, "v", videos=[ITEM])
        await world.until(lambda: len(world.seen("send.lookup", phase="end")) == 1)
        assert (len(world.seen("encode.post", phase="end")), digests_sent(world)) == (1, 0)
        assert world.seen("transfer.write") == []
        world.hand.run()
        assert await within(task) == [expected(ITEM)]


async def test_encode_of_an_image_answers_after_the_forward(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("encode.forward")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("encode.forward")
        assert not task.done()
        world.hand.run()
        await within(task)
        steps = [step for step, _ in world.order("encode.forward", "encode.post", phase="end")]
        assert steps == ["encode.forward", "encode.post"]


# ---- /encode that fails ----------------------------------------------------------------------------------------------


async def test_a_refused_item_is_told_to_every_sibling_and_leaves_nothing(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        answers = await world.all_ranks("q", "no such item")
        assert all(isinstance(answer, UsageError) and "bytes:N" in str(answer) for answer in answers)
        assert world.encoders[0].parts == {}


async def test_a_failed_forward_is_told_and_can_be_tried_again(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.fault("fail", "encode.forward")
        answers = await world.all_ranks("q", ITEM)
        assert all(type(answer).__name__ in ("StepFault", "EncodeFailed") for answer in answers)
        assert await world.all_ranks("q", ITEM) == [[expected(ITEM)]] * 2


async def test_a_failed_batch_fails_each_of_it_and_none_after_it(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("encode.forward", times=1)
        tasks = [world.start(0, f"r{n}", ITEM) for n in range(3)]
        (held,) = await world.hand.appears("encode.forward")
        world.hand.go(held, Decision("fail"))
        answers = await within(asyncio.gather(*tasks, return_exceptions=True))
        assert any(isinstance(answer, Exception) for answer in answers)
        assert await within(world.start(0, "later", ITEM)) == [expected(ITEM)]


async def test_a_video_whose_forward_fails_after_its_description(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.hold("encode.forward")
        tasks = [world.start(rank, "v", videos=[ITEM]) for rank in range(2)]
        await world.until(lambda: len(world.seen("send.lookup", phase="end")) == 2)
        (held,) = await world.hand.appears("encode.forward")
        world.hand.go(held, Decision("fail"))
        answers = await within(asyncio.gather(*tasks, return_exceptions=True))
        assert [type(answer) for answer in answers] == [EncodeFailed] * 2


@pytest.mark.parametrize("rules", ["hardened", "sglang-0.5.23"])
@pytest.mark.parametrize("videos", [False, True])
async def test_a_registration_refused_after_the_forward_fails_its_part_at_most(
    engines: EnginePool, rules: str, videos: bool
) -> None:
    async with World(engines, rules=rules) as world:
        world.hand.fault("fail", "mr.register", process="enc0")
        first = world.start(0, "v", videos=[ITEM]) if videos else world.start(0, "v", ITEM)
        if rules == "sglang-0.5.23":
            assert await within(first) == [expected(ITEM)], "the /send tries the shared registration again"
        else:
            with pytest.raises((HandoffError, RegistrationRefused)):
                await within(first)
        assert await within(world.start(0, "later", ITEM)) == [expected(ITEM)]
        assert await within(world.start(0, "later", videos=[ITEM])) == [expected(ITEM)]


async def test_a_refusal_in_a_batch_does_not_hold_up_its_neighbours(engines: EnginePool) -> None:
    async with World(engines, rules="sglang-0.5.23") as world:
        world.hand.hold("encode.forward", times=1)
        world.hand.fault("fail", "mr.register", process="enc0", req="r1")
        tasks = [world.start(0, "r0", "bytes:10:0")]
        await world.hand.appears("encode.forward")
        tasks += [world.start(0, f"r{n}", f"bytes:10:{n}") for n in (1, 2, 3)]
        await world.until(lambda: len(world.seen("encode.serve", phase="end")) == 4)
        await turns()
        world.hand.run_held_only()
        answers = await within(asyncio.gather(*tasks, return_exceptions=True))
        assert answers == [[expected(f"bytes:10:{n}")] for n in range(4)], "r1's /send registers it after all"


# ---- /send -----------------------------------------------------------------------------------------------------------


async def test_send_answers_after_the_ack(engines: EnginePool) -> None:
    async with World(engines) as world:
        await within(world.start(0, "q", ITEM))
        steps = [step for step, _ in world.order("transfer.write", "ack.push", "send.post", phase="end")]
        assert steps == ["transfer.write", "ack.push", "send.post"]


async def test_send_of_a_part_that_was_never_encoded(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        with pytest.raises(LostEmbedding, match="never encoded"):
            await world.encoders[0].send(send_request("nobody"))
        status, answer = await asked(world, "/send", to_json(send_request("nobody")))
        assert (status, answer["kind"]) == (404, "lost_embedding")


async def test_send_of_another_size(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        encoder = world.encoders[0]
        await encoder.encode(encode_request())
        with pytest.raises(MetadataMismatch, match="64 bytes, not 63"):
            await encoder.send(send_request(embedding_size=63))
        assert world.seen("transfer.write") == []
        world.clock.fire("cleanup")


async def test_a_write_that_fails_is_an_error_and_never_acked(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.fault("fail", "transfer.write")
        with pytest.raises(TransferFailed, match="answered -1"):
            await within(world.start(0, "q", ITEM))
        assert world.seen("ack.push") == []
        await world.settled()
        assert world.clock.fire("quarantine") == 2
        await world.settled()
        assert world.census() == {}


async def test_a_failed_write_is_acked_where_the_profile_does_not_look(engines: EnginePool) -> None:
    async with World(engines, rules="sglang-0.5.16", expect_clean=False) as world:
        world.hand.fault("fail", "transfer.write")
        (content_then,) = await within(world.start(0, "q", "bytes:5000:987"))
        assert content_then != expected("bytes:5000:987")
        assert len(world.seen("ack.push", phase="end", result="ok")) == 1


async def test_strict_an_uncovered_write_is_an_error(engines: EnginePool) -> None:
    async with World(engines, rules="hardened", strict=True, expect_clean=False) as world:
        world.hand.hold("transfer.write", phase="end")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        encoder = world.encoders[0]
        for region in encoder.regions.live:
            await encoder.regions.release(region)
        world.hand.run()
        with pytest.raises(SourceUncovered):
            await within(task)
        assert world.seen("ack.push") == []


async def test_an_ack_nobody_pulls_is_an_error_of_that_send_alone(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("send.serve")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("send.serve")
        task.cancel()
        await asyncio.wait([task])
        world.hand.run()
        await world.settled()
        failed = world.seen("ack.push", phase="end")
        assert [str(event.result).partition(":")[0] for event in failed] == ["peer_lost"]
        assert await within(world.start(0, "next", ITEM)) == [expected(ITEM)]
        world.clock.fire("quarantine")


# ---- early release ---------------------------------------------------------------------------------------------------


async def test_the_last_rank_served_releases_the_part(engines: EnginePool) -> None:
    async with World(engines, tp=3) as world:
        encoder = world.encoders[0]
        for rank in range(3):
            assert len(encoder.parts) == (0 if rank == 0 else 1)
            await within(world.start(rank, "q", ITEM))
        assert (encoder.parts, encoder.regions.live) == ({}, [])
        assert [event.data for event in world.seen("part.release")] == [{"why": "every receiver served"}]


async def test_a_send_repeated_by_one_rank_counts_once(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.fault("repeat", "send.post", rank=0)
        await within(world.start(0, "q", ITEM))
        await world.settled()
        assert len(world.seen("transfer.write", rank=0)) == 2
        assert await within(world.start(1, "q", ITEM)) == [expected(ITEM)]


async def test_a_send_repeated_by_one_rank_loses_its_siblings_embedding_where_calls_are_counted(
    engines: EnginePool,
) -> None:
    async with World(engines, rules="sglang-0.5.17", tp=2, expect_clean=False) as world:
        world.hand.hold("encode.post", phase="end", rank=1)
        late = world.start(1, "q", ITEM)
        await world.hand.appears("encode.post")
        world.hand.hold("ack.pull", rank=0)
        world.hand.fault("repeat", "send.post", rank=0)
        first = world.start(0, "q", ITEM)
        await world.until(lambda: len(world.seen("part.release", phase="end")) == 1)
        assert len(world.seen("transfer.write", phase="end", rank=0, result=0)) == 2
        world.hand.run()
        assert await within(first) == [expected(ITEM)]
        with pytest.raises(LostEmbedding):
            await within(late)


async def test_a_rank_that_failed_counts_as_served(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.fault("fail", "transfer.write", rank=0)
        answers = await world.all_ranks("q", ITEM)
        assert isinstance(answers[0], TransferFailed)
        assert answers[1] == [expected(ITEM)]
        await world.settled()
        assert world.encoders[0].parts == {}
        world.clock.fire("quarantine")
        await world.settled()
        assert world.census() == {}


async def test_release_waits_for_a_write_in_flight(engines: EnginePool) -> None:
    async with World(engines) as world:
        world.hand.hold("transfer.write", phase="end")
        task = world.start(0, "q", ITEM)
        await world.hand.appears("transfer.write")
        assert world.clock.fire("cleanup") == 1
        await world.until(lambda: len(world.seen("part.release", phase="end")) == 1)
        encoder = world.encoders[0]
        assert (encoder.parts, len(encoder.releasing), len(encoder.regions.live)) == ({}, 1, 1)
        world.hand.run()
        assert await within(task) == [expected(ITEM)]


async def test_a_send_that_comes_during_a_release_is_refused(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        world.hand.hold("transfer.write", phase="end", rank=0)
        world.hand.hold("encode.post", phase="end", rank=1)
        first, late = world.start(0, "q", ITEM), world.start(1, "q", ITEM)
        await world.hand.appears("transfer.write")
        await world.hand.appears("encode.post")
        world.clock.fire("cleanup")
        await world.until(lambda: len(world.seen("part.release", phase="end")) == 1)
        (held,) = await world.hand.appears("encode.post")
        world.hand.go(held)
        with pytest.raises(LostEmbedding):
            await within(late)
        world.hand.run()
        assert await within(first) == [expected(ITEM)]


@pytest.mark.parametrize("rules", ["hardened", "sglang-0.5.17", "sglang-0.5.16-video"])
async def test_the_cleanup_timer_during_a_videos_forward(engines: EnginePool, rules: str) -> None:
    """Whoever waits for the embedding is told, and what the forward makes goes."""
    async with World(engines, rules=rules, expect_clean=False) as world:
        world.hand.hold("encode.forward")
        task = world.start(0, "v", videos=[ITEM])
        await world.until(lambda: len(world.seen("send.lookup", phase="end")) == 1)
        assert world.clock.fire("cleanup") == 1
        await world.until(lambda: len(world.seen("part.release", phase="end")) == 1)
        world.hand.run()
        with pytest.raises(HandoffError):
            await within(task)
        await world.settled()
        assert world.encoders[0].census() == dict.fromkeys(world.encoders[0].census(), 0)


async def test_a_deregistration_that_is_refused_does_not_keep_the_part(engines: EnginePool) -> None:
    async with World(engines, expect_clean=False) as world:
        world.hand.fault("fail", "mr.deregister", process="enc0")
        await asyncio.gather(world.start(0, "q", ITEM), return_exceptions=True)
        await world.settled()
        census = world.encoders[0].census()
        assert (census["parts"], census["embeddings"], census["regions"]) == (0, 0, 1), "the region is what is left"
        assert world.seen("mr.deregister", phase="end", process="enc0", result=-3)
        world.withdraw_by_hand()


async def test_the_same_id_again_after_it_ended(engines: EnginePool) -> None:
    async with World(engines, tp=2) as world:
        for seed in (1, 2, 3):
            item = f"bytes:100:{seed}"
            assert await world.all_ranks("q", item) == [[expected(item)]] * 2


async def test_the_cleanup_timer_takes_what_nobody_sent_for(engines: EnginePool) -> None:
    config = EncoderConfig(send_timeout_s=1000.0)
    async with World(engines, tp=0, encoder_config=config) as world:
        encoder = world.encoders[0]
        await encoder.encode(encode_request())
        assert (encoder.census()["timed"], encoder.census()["parts"]) == (1, 0)
        assert world.clock.fire("cleanup", req="q", part=0) == 1
        await world.settled()
        assert encoder.census() == dict.fromkeys(encoder.census(), 0)
        assert world.clock.pending == set()


# ---- wrong calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/encode", "/send"])
@pytest.mark.parametrize("body", [b"", b"garbage", b"\x80\x04\x95", b"[]", b'{"a":' * 20_000, b"{" + b" " * 9000])
async def test_a_body_that_is_no_request_is_answered_and_forgotten(
    engines: EnginePool, path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with World(engines) as world:
        status, answer = await asked(world, path, body)
        assert (status, answer["kind"]) == (400, "metadata_mismatch")
        assert await within(world.start(0, "q", ITEM)) == [expected(ITEM)]
    assert "Traceback" not in caplog.text


async def test_a_body_over_the_limit(engines: EnginePool, caplog: pytest.LogCaptureFixture) -> None:
    async with World(engines, tp=0) as world:
        status, answer = await asked(world, "/encode", io.BytesIO(bytes(MAX_BODY_BYTES + 1)))
        assert (status, answer["kind"]) == (413, "metadata_mismatch")
    assert "Traceback" not in caplog.text


async def test_another_version_is_refused(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        status, answer = await asked(world, "/encode", to_json(encode_request(v=99)))
        assert status == 400
        assert "version 99" in answer["message"]


async def test_health_and_paths_that_do_not_exist(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world, aiohttp.ClientSession(world.encoders[0].url) as session:
        async with session.get("/health") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        async with session.get("/encode") as reply:
            assert reply.status == 405
        async with session.post("/other") as reply:
            assert reply.status == 404


async def test_no_items_at_all(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        with pytest.raises(EncodeFailed):
            await world.encoders[0].encode(encode_request(mm_items=[]))
        await world.settled()


# ---- closing ---------------------------------------------------------------------------------------------------------


async def test_closing_under_load_waits_for_writes_and_leaves_nothing(engines: EnginePool) -> None:
    async with World(engines, tp=2, expect_clean=False) as world:
        world.hand.hold("transfer.write", phase="end", rank=0)
        world.hand.hold("encode.forward", req="slow")
        tasks = [world.start(0, "q", ITEM), world.start(1, "slow", videos=[ITEM])]
        await world.hand.appears("transfer.write")
        await world.hand.appears("encode.forward")
        encoder = world.encoders[0]
        closing = asyncio.ensure_future(encoder.close())
        await asyncio.wait([closing], timeout=0)
        assert (len(encoder.regions.live), closing.done()) == (1, False), "a write still reads it"
        world.hand.run()
        await within(closing)
        assert (encoder.regions.live, encoder.parts, encoder.releasing) == ([], {}, set())
        answers = await within(asyncio.gather(*tasks, return_exceptions=True))
        assert isinstance(answers[1], HandoffError)


async def test_a_closed_encoder_takes_nothing_up(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        await world.encoders[0].close()
        with pytest.raises(PeerLost, match="closing"):
            await world.encoders[0].encode(encode_request())


async def test_two_servers_on_one_port(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        port = int(world.encoders[0].url.rpartition(":")[2])
        other = HttpZmqLink(port=port)
        with pytest.raises(Exception, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            await other.serve({})
        await other.close()


# ---- lifecycle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", PartState)
@pytest.mark.parametrize("to", PartState)
async def test_only_the_tables_transitions_exist(state: PartState, to: PartState) -> None:
    part = EmbeddingData(encode_request())
    part.state = state
    if to in TRANSITIONS[state]:
        part._transition(to)
    else:
        with pytest.raises(StateError, match=f"from {state.value} to {to.value}"):
            part._transition(to)


async def test_release_is_idempotent(engines: EnginePool) -> None:
    async with World(engines, tp=0) as world:
        encoder = world.encoders[0]
        await encoder.encode(encode_request())
        (part,) = encoder.parts.values()
        assert repr(part) == "EmbeddingData(q/part0, ready, 64 bytes, sends=0)"
        await asyncio.gather(*(encoder.release(part, "test") for _ in range(3)))
        assert (part.state, len(world.seen("embedding.drop"))) == (PartState.RELEASED, 1)


async def test_replies_are_the_messages_own(engines: EnginePool) -> None:
    async with World(engines) as world:
        encoder, rank = world.encoders[0], world.ranks[0]
        reply = await encoder.encode(encode_request(item=ITEM))
        assert isinstance(from_json(to_json(reply), EncodeReply), EncodeReply)
        slot = await rank.landing.allocate(5000, "q", req="q", rank=0)
        acks = rank.link.acks()
        fields = {"session_id": rank.engine.session_id, "buffer_address": slot.address, "embedding_size": 5000}
        sent = await encoder.send(send_request(**fields, embedding_port=acks.port, receive_count=1))
        assert sent == SendReply(req_id="q", part_idx=0)
        assert content(slot.buffer) == expected(ITEM)
        await within(acks.pull())
        acks.close()
        await rank.landing.free(slot)
