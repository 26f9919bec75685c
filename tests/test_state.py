"""The state of the world at any point of a trace, and what changed since another."""

from __future__ import annotations

from handoff_world import EnginePool, World, within
from tape import PART_BYTES, SOURCE, TARGET, Tape, race

from epdlab.trace.state import WorldState


def index_of(tape: Tape, step: str, phase: str, nth: int = 0, **where: object) -> int:
    """The index of the nth such event."""
    found = [
        index
        for index, event in enumerate(tape.events)
        if (event.step, event.phase) == (step, phase) and all(getattr(event, k) == v for k, v in where.items())
    ]
    return found[nth]


def at(tape: Tape, step: str, phase: str, nth: int = 0, **where: object) -> WorldState:
    return WorldState.at(tape.events, index_of(tape, step, phase, nth, **where))


def test_the_state_in_the_middle_of_the_race_reads_like_this() -> None:
    world = at(race(), "transfer.write", "begin", rank=1)
    assert world.text() == "\n".join(
        [
            "rank0 prefill",
            "  requests   q1                   sending",
            "  sockets    acks of q1           open",
            "  regions    mr#1                 live  64 KiB  for q1  1 write in flight",
            "  slots      slot#1               held  64 KiB  for q1  1 write in flight",
            "enc0 encoder",
            "  embeddings q1 part 0            held  64 KiB",
            "  regions    mr#1                 live  64 KiB  for q1 part 0  2 writes in flight",
            "  regions    mr#2                 refused -7  64 KiB  for q1 part 0",
            "  writes     q1 part 0 to rank0   in flight from mr#1  64 KiB",
            "  writes     q1 part 0 to rank1   in flight from mr#2  64 KiB",
            "rank1 prefill",
            "  requests   q1                   sending",
            "  sockets    acks of q1           open",
            "  regions    mr#1                 live  64 KiB  for q1  1 write in flight",
            "  slots      slot#1               held  64 KiB  for q1  1 write in flight",
        ]
    )
    assert str(world) == world.text()
    assert repr(world) == "WorldState(2 requests, 2 sockets, 1 embedding, 4 regions, 2 slots, 2 writes)"


def test_what_changed_is_marked() -> None:
    tape = race()
    before, after = at(tape, "transfer.write", "end", rank=0), at(tape, "mr.deregister", "end", process="enc0")
    assert after.diff(before) == {("enc0", "regions", "mr#1"): "-"}
    later = at(tape, "ack.pull", "end", rank=0)
    assert later.diff(after) == {
        ("enc0", "regions", "mr#2"): "-",
        ("enc0", "writes", "q1 part 0 to rank1"): "-",
        ("rank0", "requests", "q1"): "~",
        ("rank0", "sockets", "acks of q1"): "-",
        ("rank1", "regions", "mr#1"): "~",
        ("rank1", "slots", "slot#1"): "~",
    }
    text = later.text(after)
    assert "- writes     q1 part 0 to rank1   in flight from mr#2  64 KiB" in text
    assert "~ requests   q1                   landed" in text
    assert later.diff(later) == {}


def test_something_new_is_marked() -> None:
    tape = Tape()
    tape.land()
    marks = WorldState.at(tape.events).diff(WorldState.at(tape.events, 0))
    assert marks == {("rank0", "slots", "slot#1"): "+", ("rank0", "regions", "mr#1"): "+"}


def test_addresses_are_shown_on_demand() -> None:
    world = at(race(), "transfer.write", "begin", rank=0)
    assert hex(SOURCE) not in world.text() and hex(TARGET) not in world.text()
    assert f"at {SOURCE:#x}" in world.text(addresses=True) and f"at {TARGET:#x}" in world.text(addresses=True)


def test_a_request_goes_through_its_states() -> None:
    tape = Tape().handoff(parts=2)
    moments = [
        ("request.start", "note", 0),
        ("landing.alloc", "begin", 0),
        ("landing.alloc", "end", 0),
        ("ack.pull", "end", 0),
        ("ack.pull", "end", 1),
        ("request.finish", "note", 0),
    ]
    states = [at(tape, *moment).processes["rank0"].requests["q1"].state for moment in moments]
    assert states == ["encoding", "allocating", "sending", "sending, 1 of 2 acked", "landed", "consumed"]


def test_a_failed_request_says_why_and_is_forgotten_with_the_next() -> None:
    tape = Tape()
    tape.start()
    tape.finish(result="deadline: too late")
    assert WorldState.at(tape.events).processes["rank0"].requests["q1"].state == "failed: deadline"
    tape.start(req="q2")
    assert list(WorldState.at(tape.events).processes["rank0"].requests) == ["q2"]


def test_after_a_whole_handoff_nothing_is_held() -> None:
    world = WorldState.at(Tape().handoff(2, parts=2).events)
    assert set(world.lines()) == {("rank0", "requests", "q1"), ("rank1", "requests", "q1")}
    assert "enc0\n  holds nothing" in world.text()


def test_a_slot_is_quarantined_and_freed() -> None:
    tape = Tape()
    tape.land()
    tape.do("rank0", "landing.quarantine", region="rank0.slot#1", req="q1", rank=0)
    assert WorldState.at(tape.events).processes["rank0"].slots["rank0.slot#1"].state == "quarantined"
    tape.free()
    assert WorldState.at(tape.events).processes["rank0"].slots == {}


def test_deregistration_goes_by_address_as_the_engine_does() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.register("enc0", 2, SOURCE, code=-7)
    tape.deregister("enc0", 2, SOURCE)
    assert WorldState.at(tape.events).processes["enc0"].regions == {}


def test_a_killed_process_holds_nothing_and_its_writes_are_gone() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.write("begin")
    tape.add("enc0", "process.kill", "begin", fault="kill")
    world = WorldState.at(tape.events)
    assert world.text() == "enc0 (killed)\n  holds nothing"
    assert world.flying == []


def test_repeated_writes_of_one_part_stand_side_by_side() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.write("begin")
    tape.write("begin")
    assert [held.name for held in WorldState.at(tape.events).writes_of("enc0")] == [
        "q1 part 0 to rank0",
        "q1 part 0 to rank0'",
    ]
    tape.write("end", result=0)
    assert len(WorldState.at(tape.events).flying) == 1


def test_feeding_and_jumping_agree() -> None:
    tape, world = race(), WorldState()
    for index, event in enumerate(tape.events):
        world.feed(event)
        assert world.lines(addresses=True) == WorldState.at(tape.events, index).lines(addresses=True)


async def test_the_state_of_a_real_run_agrees_with_what_its_processes_hold(engines: EnginePool) -> None:
    async with World(engines, rules="sglang-0.5.17", tp=2) as world:
        world.hand.hold("transfer.write", rank=1)
        tasks = [world.start(rank, "q1", f"bytes:{PART_BYTES}:1") for rank in (0, 1)]
        (held,) = await world.hand.appears("transfer.write")
        await within(tasks[0])
        state = WorldState.at(world.events)
        (encoder,) = world.encoders
        assert set(state.processes["enc0"].regions) == {region.name for region in encoder.regions.live}
        assert len(state.processes["enc0"].embeddings) == 1
        for rank in world.ranks:
            name = rank.steps.process
            assert set(state.processes[name].slots) == {slot.name for slot in rank.landing.slots}
            assert set(state.processes[name].regions) == {r.name for r in rank.landing.regions.live}
        world.hand.go(held)
        await within(tasks[1])
