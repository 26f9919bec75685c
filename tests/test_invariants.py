"""Each invariant: the smallest trace that breaks it, its neighbour that does not, and real runs of both kinds."""

from __future__ import annotations

import asyncio

import pytest
from handoff_world import EnginePool, World, within
from tape import PART_BYTES, SOURCE, TARGET, Tape, race

from epdlab.trace.breach import INVARIANTS, Breach
from epdlab.trace.invariants import Checker, check, check_one, counts

LOST = "lost_embedding: no embedding for q1 part 0"


def only_breach(tape: Tape, key: str, complete: bool = True) -> Breach:
    """The one breach of a trace that breaks one invariant once."""
    found = check(tape.events, complete)
    assert [breach.invariant for breach in found] == [key]
    assert found[0].number == INVARIANTS[key].number
    assert found[0].events and all(0 <= index < len(tape.events) for index in found[0].events)
    return found[0]


def steps_of(tape: Tape, breach: Breach) -> list[tuple[str, str]]:
    return [(tape.events[index].step, tape.events[index].phase) for index in breach.events]


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_the_eight_invariants_have_keys_numbers_and_sentences() -> None:
    assert [invariant.number for invariant in INVARIANTS.values()] == list(range(1, 9))
    assert list(INVARIANTS) == [
        "overlap",
        "source_uncovered",
        "destination_unsafe",
        "wrong_bytes",
        "false_ack",
        "lost_embedding",
        "leak",
        "unfinished",
    ]
    assert all(len(invariant.sentence.split()) > 5 for invariant in INVARIANTS.values())


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 2), (4, 3)])
def test_a_sound_handoff_breaks_nothing(ranks: int, parts: int) -> None:
    tape = Tape().handoff(ranks, parts=parts)
    for process in ("enc0", *(f"rank{rank}" for rank in range(ranks))):
        tape.census(process, regions=0, embeddings=0, parts=0, tasks=0, timed=0)
    assert check(tape.events) == []


def test_feeding_event_by_event_finds_what_check_finds() -> None:
    events = race().events
    checker = Checker()
    for event in events:
        checker.feed(event)
    assert checker.conclude() == check(events) != []


def test_counts_and_check_one_select() -> None:
    events = race().events
    assert counts(check(events)) == {"overlap": 1, "source_uncovered": 1}
    assert [b.invariant for b in check_one("overlap", events)] == ["overlap"]
    assert check_one(INVARIANTS["leak"], events) == []


def test_a_large_trace_is_judged_like_a_small_one() -> None:
    tape = Tape()
    for number in range(1_000):
        tape.handoff(2, req=f"q{number}")
    tape.register("enc0", 1, SOURCE, req="last")
    tape.register("enc0", 2, SOURCE + 1, code=-7, req="last")
    assert len(tape.events) > 60_000
    assert [(b.invariant, b.req) for b in check(tape.events)] == [("overlap", "last")]


# ---- 1 overlap -------------------------------------------------------------------------------------------------------


def test_overlap_is_a_registration_over_a_live_region() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE, req="q1", part=0, rank=0)
    at = tape.register("enc0", 2, SOURCE, code=-7, req="q1", part=0, rank=1)
    found = only_breach(tape, "overlap")
    assert (found.req, found.part, found.rank, found.events) == ("q1", 0, 1, (1, at))
    assert "enc0.mr#2 overlaps enc0.mr#1" in found.message


@pytest.mark.parametrize("start", [-PART_BYTES, PART_BYTES])
def test_neighbouring_regions_do_not_overlap(start: int) -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.register("enc0", 2, SOURCE + start)
    assert check(tape.events) == []


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 2), (1, 1), (PART_BYTES - 1, 9), (-9, 3 * PART_BYTES)])
def test_one_shared_byte_overlaps(start: int, nbytes: int) -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.register("enc0", 2, SOURCE + start, nbytes, code=-7)
    only_breach(tape, "overlap")


def test_no_overlap_after_deregistration_nor_in_another_process() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.register("rank0", 1, SOURCE)
    tape.deregister("enc0", 1, SOURCE)
    tape.register("enc0", 2, SOURCE)
    assert check(tape.events) == []


def test_a_refused_deregistration_leaves_the_region_live() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.deregister("enc0", 1, SOURCE, code=-3)
    tape.register("enc0", 2, SOURCE, code=-7)
    only_breach(tape, "overlap")


# ---- 2 source_uncovered ----------------------------------------------------------------------------------------------


def test_a_source_that_is_deregistered_under_a_write_is_uncovered() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    began = tape.write("begin")
    gone = tape.deregister("enc0", 1, SOURCE)
    tape.write("end", result=0)
    assert only_breach(tape, "source_uncovered").events == (began, gone)


def test_a_source_that_is_deregistered_after_the_write_is_covered() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.wrote()
    tape.deregister("enc0", 1, SOURCE)
    assert check(tape.events) == []


def test_a_write_from_a_refused_region_is_uncovered_from_its_begin() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE, code=-1)
    tape.wrote()
    assert "began without a live source region (enc0.mr#1)" in only_breach(tape, "source_uncovered").message


def test_two_regions_side_by_side_do_not_cover_one_write() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE, PART_BYTES // 2)
    tape.register("enc0", 2, SOURCE + PART_BYTES // 2, PART_BYTES // 2)
    tape.wrote()
    only_breach(tape, "source_uncovered")


def test_a_sibling_region_that_covers_the_source_is_enough() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE - 64, PART_BYTES + 128)
    tape.wrote(region="enc0.mr#7")
    assert check(tape.events) == []


def test_an_uncovered_write_is_reported_once() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE, PART_BYTES // 2)
    tape.write("begin")
    tape.deregister("enc0", 1, SOURCE)
    tape.write("end", result=0)
    only_breach(tape, "source_uncovered")


# ---- 3 destination_unsafe --------------------------------------------------------------------------------------------


def landing(slot_of: str = "q1", registered: bool = True) -> Tape:
    """Landing memory of rank 0 and a live source; what a write needs."""
    tape = Tape()
    tape.land(req=slot_of)
    if not registered:
        tape.deregister("rank0", 1, TARGET)
    tape.register("enc0", 1, SOURCE)
    return tape


def test_landing_memory_of_the_same_request_is_safe() -> None:
    tape = landing()
    tape.wrote()
    tape.deregister("rank0", 1, TARGET)
    tape.free()
    assert check(tape.events) == []


@pytest.mark.parametrize(
    ("slot_of", "registered", "reason"), [("q1", False, "unregistered"), ("q9", True, "no slot of q1")]
)
def test_a_write_into_wrong_memory_is_unsafe(slot_of: str, registered: bool, reason: str) -> None:
    tape = landing(slot_of, registered)
    at = tape.write("begin")
    tape.write("end", result=0)
    found = only_breach(tape, "destination_unsafe")
    assert found.events == (at,) and reason in found.message


def test_a_write_past_the_slot_is_unsafe() -> None:
    tape = landing()
    tape.wrote(target=TARGET + 1)
    only_breach(tape, "destination_unsafe")


@pytest.mark.parametrize("how", ["deregister", "free"])
def test_memory_that_goes_under_a_write_is_unsafe(how: str) -> None:
    tape = landing()
    began = tape.write("begin")
    gone = tape.deregister("rank0", 1, TARGET) if how == "deregister" else tape.free()
    tape.write("end", result=0)
    assert only_breach(tape, "destination_unsafe").events == (began, gone)


def test_a_quarantined_slot_is_safe_for_late_bytes_and_a_freed_one_is_not() -> None:
    tape = landing()
    tape.wrote(-1)
    tape.do("rank0", "landing.quarantine", region="rank0.slot#1", req="q1", rank=0)
    tape.write_late()
    assert check(tape.events) == []
    tape.free()
    late = tape.write_late()
    assert only_breach(tape, "destination_unsafe").events == (late,)


def test_late_bytes_in_memory_reused_for_another_request_are_unsafe() -> None:
    tape = landing()
    tape.wrote(-1)
    tape.free()
    where = {"region": "rank0.slot#2", "address": TARGET, "bytes": PART_BYTES}
    tape.do("rank0", "landing.alloc", req="q2", rank=0, **where)
    tape.write_late()
    assert "no slot of q1" in only_breach(tape, "destination_unsafe").message


def test_a_rank_whose_memory_the_trace_does_not_tell_is_not_judged() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.wrote(rank=5)
    assert check(tape.events) == []


def test_a_killed_process_takes_its_writes_along() -> None:
    tape = landing()
    tape.write("begin")
    tape.add("enc0", "process.kill", "begin", fault="kill")
    tape.free()
    assert check(tape.events) == []


# ---- 4 wrong_bytes ---------------------------------------------------------------------------------------------------


def acked() -> Tape:
    tape = Tape()
    tape.ready()
    tape.register("enc0", 1, SOURCE)
    tape.wrote()
    tape.ack()
    return tape


def test_an_acked_rank_that_reads_other_bytes_has_wrong_bytes() -> None:
    tape = acked()
    read = tape.read(digest="d2")
    found = only_breach(tape, "wrong_bytes")
    assert found.events[-1] == read and found.rank == 0
    assert steps_of(tape, found)[0] == ("embedding.ready", "note")


def test_equal_bytes_are_right_and_unacked_reads_are_not_judged() -> None:
    tape = acked()
    tape.read()
    assert check(tape.events) == []
    unacked = Tape()
    unacked.ready()
    unacked.read(digest="d2")
    assert check(unacked.events) == []


def test_the_embedding_that_was_written_counts_not_a_later_one() -> None:
    tape = acked()
    tape.ready(digest="made anew")
    tape.read()
    assert check(tape.events) == []


# ---- 5 false_ack -----------------------------------------------------------------------------------------------------


def test_an_ack_for_a_failed_write_is_false() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    ended = tape.wrote(-1)
    tape.ack()
    found = only_breach(tape, "false_ack")
    assert found.events[0] == ended and "ended with -1" in found.message


def test_an_ack_without_a_write_is_false() -> None:
    tape = Tape()
    tape.ack()
    assert "no write at all" in only_breach(tape, "false_ack").message


def test_each_ack_answers_for_one_write() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.wrote()
    tape.wrote(-1)
    tape.ack()
    assert check(tape.events) == []
    tape.ack()
    only_breach(tape, "false_ack")


def test_an_ack_that_could_not_be_pushed_is_no_false_one() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.wrote(-1)
    tape.do("enc0", "ack.push", "peer_lost: nobody pulls", req="q1", part=0, rank=0)
    assert check(tape.events) == []


# ---- 6 lost_embedding ------------------------------------------------------------------------------------------------


def lookup(tape: Tape, rank: int = 1) -> int:
    return tape.do("enc0", "send.lookup", LOST, req="q1", part=0, rank=rank)


def test_a_rank_in_time_that_finds_nothing_lost_its_embedding() -> None:
    tape = Tape()
    tape.ready()
    at = lookup(tape)
    found = only_breach(tape, "lost_embedding")
    assert (found.part, found.rank, found.events) == (0, 1, (0, at))


def test_one_loss_is_reported_once_though_both_ends_see_it() -> None:
    tape = Tape()
    tape.ready()
    tape.add("rank1", "send.post", "begin", req="q1", part=0, rank=1)
    lookup(tape)
    tape.add("rank1", "send.post", "end", result=LOST, req="q1", part=0, rank=1)
    only_breach(tape, "lost_embedding")


def test_a_loss_seen_only_by_the_rank_counts_and_metadata_is_a_promise() -> None:
    tape = Tape()
    tape.do("rank1", "encode.post", req="q1", part=0, rank=1)
    tape.do("rank1", "send.post", LOST, req="q1", part=0, rank=1)
    only_breach(tape, "lost_embedding")


@pytest.mark.parametrize("why", ["never encoded", "timer", "failed", "finished", "served"])
def test_who_asks_late_or_for_nothing_lost_nothing(why: str) -> None:
    tape = Tape()
    if why != "never encoded":
        tape.ready()
    if why == "timer":
        tape.fire("enc0", "cleanup", req="q1", part=0)
    if why == "failed":
        tape.do("enc0", "part.release", req="q1", part=0, data={"why": "encode failed"})
    if why == "finished":
        tape.finish(1)
    if why == "served":
        tape.register("enc0", 1, SOURCE)
        tape.wrote(rank=1)
        tape.ack(1)
    lookup(tape)
    assert check(tape.events) == []


def test_a_release_for_another_reason_is_no_excuse() -> None:
    tape = Tape()
    tape.ready()
    tape.do("enc0", "part.release", req="q1", part=0, data={"why": "a send failed"})
    lookup(tape)
    only_breach(tape, "lost_embedding")


# ---- 7 leak ----------------------------------------------------------------------------------------------------------


def test_what_is_left_after_the_last_request_is_a_leak() -> None:
    tape = Tape().handoff()
    at = tape.census("enc0", regions=2, embeddings=1, tasks=0)
    found = only_breach(tape, "leak")
    assert found.events == (at,) and "2 regions, 1 embedding " in found.message


def test_what_waits_for_a_timer_is_no_leak() -> None:
    tape = Tape().handoff()
    tape.census("enc0", regions=0, timed=3)
    assert check(tape.events) == []


def test_only_the_last_count_after_the_last_request_counts() -> None:
    tape = Tape()
    tape.census("enc0", regions=5)
    tape.handoff()
    tape.census("enc0", regions=1)
    tape.census("enc0", regions=0)
    assert check(tape.events) == []


# ---- 8 unfinished ----------------------------------------------------------------------------------------------------


def test_a_request_without_an_end_is_unfinished_only_once_the_trace_is_over() -> None:
    tape = Tape()
    at = tape.start()
    assert check(tape.events, complete=False) == []
    assert only_breach(tape, "unfinished").events == (at,)


def by_deadline(tape: Tape) -> None:
    tape.fire("rank0", "deadline", req="q1", rank=0)
    tape.finish(0, result="deadline: q1 had not landed after 1 s")


@pytest.mark.parametrize(
    ("process", "step", "labels"),
    [
        ("enc0", "ack.push", {"rank": 0}),
        ("enc0", "encode.forward", {}),
        ("rank0", "send.post", {"rank": 0}),
    ],
)
def test_a_known_error_that_reaches_the_rank_by_its_deadline_is_unfinished(
    process: str, step: str, labels: dict[str, int]
) -> None:
    tape = Tape()
    tape.start()
    at = tape.do(process, step, "transfer_failed: -1", req="q1", part=0, **labels)
    by_deadline(tape)
    assert only_breach(tape, "unfinished").events[0] == at


def test_an_encoder_that_gave_a_part_up_in_silence_is_unfinished() -> None:
    tape = Tape()
    tape.start()
    tape.do("enc0", "part.release", req="q1", part=0, data={"why": "encode failed"})
    by_deadline(tape)
    only_breach(tape, "unfinished")


def test_a_deadline_without_an_error_or_with_a_siblings_or_a_later_one_is_an_end() -> None:
    tape = Tape()
    tape.start()
    tape.do("enc0", "ack.push", "peer_lost: gone", req="q1", part=0, rank=1)
    by_deadline(tape)
    tape.do("rank0", "send.post", "CancelledError", req="q1", part=0, rank=0)
    tape.do("enc0", "ack.push", "peer_lost: gone", req="q1", part=0, rank=0)
    assert check(tape.events) == []


def test_a_typed_failure_is_an_end() -> None:
    tape = Tape()
    tape.start()
    tape.do("rank0", "send.post", "transfer_failed: -1", req="q1", part=0, rank=0)
    tape.finish(0, result="transfer_failed: -1")
    assert check(tape.events) == []


def test_a_killed_rank_finishes_nothing() -> None:
    tape = Tape()
    tape.start()
    tape.add("rank0", "ack.pull", "begin", req="q1", rank=0, fault="kill")
    assert check(tape.events) == []


# ---- real runs -------------------------------------------------------------------------------------------------------


async def sibling_sends(engines: EnginePool, rules: str) -> World:
    """Two ranks: rank 1's write begins under rank 0's and ends after rank 0's send has cleaned up."""
    async with World(engines, rules=rules, tp=2, expect_clean=False) as world:
        world.hand.hold("transfer.write", rank=0)
        world.hand.hold("transfer.write", rank=1, phase="end")
        first = world.start(0, "q1", "bytes:4096:1")
        (held,) = await world.hand.appears("transfer.write", rank=0)
        second = world.start(1, "q1", "bytes:4096:1")
        (late,) = await world.hand.appears("transfer.write", rank=1)
        world.hand.go(held)
        await world.until(lambda: bool(world.seen("ack.push", "end", rank=0)))
        world.hand.go(late)
        await within(asyncio.gather(first, second))
        await world.settled()
    return world


async def test_the_race_of_0_5_16_is_seen_in_a_real_run(engines: EnginePool) -> None:
    world = await sibling_sends(engines, "sglang-0.5.16")
    found = check(world.events)
    assert counts(found) == {"overlap": 1, "source_uncovered": 1}
    assert {(breach.req, breach.part, breach.rank) for breach in found} == {("q1", 0, 1)}
    uncovered = next(breach for breach in found if breach.invariant == "source_uncovered")
    assert [world.events[index].step for index in uncovered.events] == ["transfer.write", "mr.deregister"]


@pytest.mark.parametrize("rules", ["sglang-0.5.17", "hardened"])
async def test_the_same_schedule_breaks_nothing_once_the_region_is_shared(engines: EnginePool, rules: str) -> None:
    world = await sibling_sends(engines, rules)
    assert check(world.events) == []
    assert len(world.seen("mr.register", process="enc0")) == 1


async def test_a_late_sibling_of_0_5_16_finds_no_embedding(engines: EnginePool) -> None:
    async with World(engines, rules="sglang-0.5.16", tp=2, expect_clean=False) as world:
        world.hand.hold("send.serve", rank=1)
        first, second = (world.start(rank, "q1", "bytes:4096:1") for rank in (0, 1))
        (held,) = await world.hand.appears("send.serve", rank=1)
        await within(first)
        world.hand.go(held)
        await within(asyncio.gather(second, return_exceptions=True))
    assert counts(check(world.events)) == {"lost_embedding": 1}
