"""The stepper and what it stands on: the lab at rest, its state, its pictures, forced schedules; prompt and panel."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab_world import light

from epdlab import cli
from epdlab.control import Held, Hello, Pattern, Release, pack
from epdlab.errors import LabError, UsageError
from epdlab.lab import Lab
from epdlab.lab.exercise import Verdict, body_lines, judge
from epdlab.lab.force import Move
from epdlab.lab.stepper import Stepper
from epdlab.lab.terminal import _Prompt
from epdlab.steps import Point
from epdlab.trace.state import WorldState

SMALL = "bytes:65536:1"


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    with Stepper(SMALL) as made:
        yield made


def pids(lab: Lab) -> list[int]:
    return [process.pid for process in lab.processes.values()]


def gone(numbers: list[int]) -> bool:
    """Whether the processes end; waits for them, but not for ever."""
    alive = [psutil.Process(pid) for pid in numbers if psutil.pid_exists(pid)]
    return not psutil.wait_procs(alive, timeout=20)[1]


# ---- the lab at rest ---------------------------------------------------------------------------------------------


def test_the_same_calls_give_the_same_stops_and_the_same_pictures() -> None:
    seen = []
    for _ in range(2):
        with Stepper(SMALL) as stepper:
            stops = []
            while stepper.waiting:
                stops.append(stepper.step().text())
            seen.append((stops, stepper.draw("sequence").dot, stepper.draw("timeline").dot, stepper.state().text()))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 38
    assert "left behind: nothing" in seen[0][0][-1]


def test_at_every_stop_the_trace_says_what_the_processes_say(stepper: Stepper) -> None:
    stops = 0
    while stepper.waiting:
        for name in ("enc0", "rank0", "rank1"):
            said, shown = stepper.lab.call(name, "state"), stepper.world.processes[name]
            live = {held.name for held in shown.regions.values() if held.state == "live"}
            assert {region["name"] for region in said["regions"]} == live
            kept = [embedding["bytes"] for embedding in said.get("embeddings", ()) if embedding["bytes"]]
            dropping = [65536] if stepper.waiting[0].point.step == "embedding.drop" and name == "enc0" else []
            assert kept + dropping == [held.nbytes for held in shown.embeddings.values()]
            slots = {(slot["name"], slot["state"], slot["bytes"]) for slot in said.get("slots", ())}
            assert slots <= {(held.name, held.state, held.nbytes) for held in shown.slots.values()}
            open_ = {held.name for held in shown.requests.values() if held.state not in ("consumed",)}
            assert {request["request"] for request in said.get("requests", ())} == open_
        stepper.step()
        stops += 1
    assert stops == 38


def test_held_at_a_step_the_rest_of_the_world_goes_on() -> None:
    with Lab(tp=2, model="synthetic") as lab:
        lab.hold("transfer.write", rank=1)
        lab.request(SMALL)
        (waiting,) = lab.settle()
        assert (waiting.point.step, waiting.point.rank) == ("transfer.write", 1)
        state = lab.state()
        assert state.held("rank0", "requests") == {"req1": "consumed"}
        assert state.held("rank1", "requests") == {"req1": "sending"}
        lab.run()
        assert all(isinstance(answer, dict) for answer in lab.result().values())


def test_the_state_marks_what_changed_and_shows_addresses_only_on_demand(stepper: Stepper) -> None:
    assert stepper.state().changes == {}
    stepper.until("transfer.write")
    stepper.step()
    state = stepper.state()
    text = state.text()
    assert "+ regions    mr#1" in text and "~ requests   req1" in text
    assert "1 write in flight" in text and "waiting  enc0 at transfer.write (end), part 0 for rank0" in text
    assert "0x" not in text and "127.0.0.1" not in text
    addresses = state.text(addresses=True)
    assert "at 0x" in addresses and "session 127.0.0.1:" in addresses and "pid " in addresses
    html = state._repr_html_()
    assert html.count(">+<") > 0 and "1 write in flight" in html and "0x" not in html
    stepper.run()
    last = stepper.state()
    assert "- slots      slot#1" in last.text() and "line-through" in last._repr_html_()


def test_a_lab_that_does_not_come_to_rest_says_what_moves() -> None:
    with Lab(tp=1, model="synthetic") as lab:
        lab.fault("delay", "transfer.write", value=3.0)
        lab.hold("ack.push")
        lab.request(SMALL)
        with pytest.raises(LabError, match=r"did not come to rest within 0\.5 s.*enc0 runs transfer\.write"):
            lab.settle(timeout_s=0.5)
        assert [w.point.step for w in lab.settle()] == ["ack.push"]


async def test_a_lab_works_in_a_coroutine_too() -> None:
    lab = await Lab(tp=1, model="synthetic")
    numbers = pids(lab)
    await lab.a.hold("send.serve")
    await lab.a.request(SMALL)
    assert (await lab.a.settle())[0].point.step == "send.serve"
    await lab.a.run()
    assert (await lab.a.result())["rank0"]["bytes"] == 65536
    await lab.a.close()
    assert gone(numbers)


async def test_a_step_held_by_a_pattern_that_was_forgotten_meanwhile_goes_on() -> None:
    import zmq.asyncio

    from epdlab.control import _decode_to_role
    from epdlab.lab.controller import Controller

    controller = Controller()
    context = zmq.asyncio.Context()
    role = context.socket(zmq.DEALER)
    role.setsockopt(zmq.IDENTITY, b"rank0")
    role.connect(controller.address)
    await role.send(pack(Hello("rank0", {})))
    await role.recv()
    await controller.set_patterns([Pattern("ack.pull")])
    await role.recv()
    await role.send(pack(Held(1, Point("rank0", "mr.register"))))
    assert _decode_to_role.decode(await role.recv()) == Release(1)
    assert controller.waiting == []
    role.close()
    context.term()
    await controller.close()


# ---- letting go --------------------------------------------------------------------------------------------------


def test_wrong_names_are_answered_with_the_nearest_right_ones(stepper: Stepper) -> None:
    with pytest.raises(UsageError, match=r"no step 'mr\.regster'; did you mean mr\.register"):
        stepper.lab.hold("mr.regster")
    with pytest.raises(UsageError, match=r"did you mean transfer\.write"):
        stepper.until("transfer.writ")
    with pytest.raises(UsageError, match="did you mean sequence"):
        stepper.draw("sequences")
    with pytest.raises(LabError, match=r"no held step rank 7; who waits: rank0 at encode\.post"):
        stepper.step(rank=7)
    with pytest.raises(UsageError, match=r"drop does not go with encode\.post; it goes with ack\.push"):
        stepper.step(fault="drop")
    with pytest.raises(UsageError, match="no process 'enc7'"):
        stepper.kill("enc7")
    with pytest.raises(UsageError, match=r"no profile 'sglang-0\.5\.1'"):
        stepper.reset(profile="sglang-0.5.1")
    assert len(stepper.waiting) == 2, "a refused reset leaves everything as it was"


def test_a_step_that_never_comes_says_who_waits_for_what() -> None:
    with Lab(tp=1, model="synthetic") as lab:
        lab.hold("ack.push")
        lab.request(SMALL)
        lab.settle()
        with pytest.raises(LabError, match=r"no held step transfer\.write within 0\.1 s; enc0 waits at ack\.push"):
            lab.step(step="transfer.write", timeout_s=0.1)


@pytest.mark.parametrize(
    ("until", "fault", "failing", "why"),
    [
        ("transfer.write", "fail", "rank0", "transfer_failed"),
        ("landing.alloc", "fail", "rank0", "step_fault"),
        ("ack.push", "fail", "rank0", "step_fault"),
        ("send.lookup", "kill", "both", "peer_lost"),
        ("mr.register", "kill", "rank0", "lab: rank0 ended"),
    ],
)
def test_a_step_that_goes_wrong_fails_its_rank_and_nobody_else(until: str, fault: Any, failing: str, why: str) -> None:
    with Stepper(SMALL) as stepper:
        stepper.until(until)
        stepper.step(fault=fault)
        stepper.run()
        outcome = stepper.outcome()
        assert f"failed, {why}" in outcome["rank0"]
        assert outcome["rank1"].startswith("failed" if failing == "both" else "received 65,536 bytes, equal")
        assert stepper.breaches == []
        numbers = pids(stepper.lab)
    assert gone(numbers)


def test_a_repeated_ack_is_dropped_and_a_lost_one_waits_for_its_deadline(stepper: Stepper) -> None:
    stepper.until("ack.push")
    stepper.step(fault="repeat")
    stepper.until("ack.push", rank=1)
    stepper.step(fault="drop")
    stop = stepper.run()
    assert stop.notes == ("only a timer can go on; `fire` it, or `reset`",)
    stop = stepper.fire("deadline", rank=1)
    assert stepper.outcome()["rank0"].startswith("received")
    assert "deadline" in stepper.outcome()["rank1"]
    assert any(note.startswith("left behind: nothing") for note in stop.notes)
    assert stepper.breaches == []


def test_the_race_of_0516_by_hand_breaks_its_invariants_and_the_notes_say_so() -> None:
    with Stepper(SMALL, profile="sglang-0.5.16") as stepper:
        stepper.until("transfer.write")
        for step in ("transfer.write", "transfer.write", "mr.deregister"):
            stop = stepper.step(step, rank=0)
            if stop.gone[0].startswith("enc0 at transfer.write, "):
                stepper.step("transfer.write", rank=1)
        assert [note.partition("]")[0] for note in stop.notes] == ["broken: 2 [source_uncovered"]
        assert "broken   2 [source_uncovered]" in stepper.state().text()
        assert "broken invariant 2" in stepper.state()._repr_html_()
        assert not stepper.good


def test_a_schedule_is_forced_whole() -> None:
    order = [1, 0]
    with Lab(tp=2, model="synthetic") as lab:
        lab.hold("encode.post")
        lab.request(SMALL)
        lab.settle()
        moves = [Move("enc0", "transfer.write", phase, "req1", 0, rank) for rank in order for phase in ("begin", "end")]
        let_go = lab.force(moves)
        assert [(w.point.rank, w.point.phase) for w in let_go] == [(1, "begin"), (1, "end"), (0, "begin"), (0, "end")]
        lab.result()
        writes = [(e.rank, e.phase) for e in lab.events if e.step == "transfer.write"]
        assert writes == [(1, "begin"), (1, "end"), (0, "begin"), (0, "end")]


def test_a_forced_schedule_takes_faults_and_moves_from_outside() -> None:
    with Lab(tp=2, model="synthetic") as lab:
        lab.hold("encode.post")
        lab.request(SMALL)
        lab.settle()
        lab.force(
            [
                Move("enc0", "transfer.write", rank=0, fault="fail", value=-1),
                Move("rank1", "request.cancel", "note", "req1", nth=-1),
                Move("enc0", "transfer.write", rank=1),
            ]
        )
        answers = lab.result()
        assert answers["rank0"].kind == "transfer_failed" and isinstance(answers["rank1"], LabError)


def test_a_schedule_that_cannot_be_is_refused_with_the_move_that_is_wrong() -> None:
    with Lab(tp=1, model="synthetic") as lab:
        with pytest.raises(UsageError, match=r"did you mean transfer\.write"):
            lab.force([Move("enc0", "transfer.wrote")])
        with pytest.raises(UsageError, match="move 1 of the schedule is no move"):
            lab.force([object()])
        lab.hold("encode.post")
        lab.request(SMALL)
        with pytest.raises(LabError, match=r"move 2 of 2, rank0 cache\.put begin, did not come up"):
            lab.force([Move("rank0", "encode.post"), Move("rank0", "cache.put")], timeout_s=0.5)


# ---- nothing is left ---------------------------------------------------------------------------------------------

HOLDS_A_LAB = """
from epdlab.lab.stepper import Stepper
stepper = Stepper("bytes:65536:1")
assert len(stepper.waiting) == 2
print(*[process.pid for process in stepper.lab.processes.values()], flush=True)
input()
"""


def test_a_killed_process_that_was_held_leaves_nothing(stepper: Stepper) -> None:
    stepper.until("transfer.write")
    numbers = pids(stepper.lab)
    stop = stepper.kill("enc0")
    assert stepper.world.processes["enc0"].alive is False
    assert "- enc0 regions mr#1" in "\n".join(stop.changed)
    stepper.run()
    assert all("peer_lost" in said for said in stepper.outcome().values())
    stepper.close()
    assert gone(numbers)


def test_a_killed_python_leaves_no_process_of_its_lab(tmp_path: Path) -> None:
    """As a notebook's kernel that is killed, or crashes."""
    options: dict[str, Any] = {"stdin": -1, "stdout": -1, "text": True, "env": light(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_LAB], **options) as python:
        assert python.stdout is not None
        numbers = [int(word) for word in python.stdout.readline().split()]
        nursery = psutil.Process(numbers[0]).parent()
        assert len(numbers) == 3 and nursery is not None
        python.kill()
        python.wait()
        assert gone([*numbers, nursery.pid])


def test_a_stepper_that_nobody_holds_any_more_ends_its_processes() -> None:
    stepper = Stepper(SMALL)
    numbers = pids(stepper.lab)
    del stepper
    assert gone(numbers)


# ---- the prompt --------------------------------------------------------------------------------------------------


def test_the_prompt_steps_runs_shows_draws_and_explains(stepper: Stepper, tmp_path: Path) -> None:
    said: list[str] = []
    lines = ["", "step rank1", "until transfer.write", "state", "draw", "draw timeline", "fly", "step rank9", "run"]
    assert _Prompt(stepper, tmp_path, said.append).run(iter(lines)) == 0
    text = "\n".join(said)
    assert "let go   rank0 at encode.post, part 0" in text and "means    a rank asks an encoder" in text
    assert "enc0 encoder" in text and "'fly' is not understood" in text and "no held step rank9" in text
    assert "left behind: nothing" in text
    assert {path.name for path in tmp_path.iterdir()} == {"epdlab-sequence.svg", "epdlab-timeline.svg"}


def test_the_prompt_breaks_things_and_its_exit_code_says_so(stepper: Stepper, tmp_path: Path) -> None:
    said: list[str] = []
    lines = ["until ack.push", "step enc0 drop", "run", "fire deadline rank0", "step x y z", "kill rank1", "until"]
    assert _Prompt(stepper, tmp_path, said.append).run(iter(lines)) == 1
    text = "\n".join(said)
    assert "[fault: drop]" in text and "rank0 failed, deadline" in text and "'step x y z' is not understood" in text


def test_epdlab_demo_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nrun\nstate\nquit\n"))
    assert cli.main(["demo", "--step", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("as in one process") == 2 and "left behind: nothing" in out and "- sockets" in out


# ---- the panel ---------------------------------------------------------------------------------------------------


def test_the_panel_does_what_its_lines_of_code_do(stepper: Stepper) -> None:
    from epdlab.lab.panel import Panel

    panel = Panel(stepper)
    panel._step.click()
    panel._next.index = 1
    panel._step.click()
    assert panel.code == ["stepper.step()", "stepper.step(step='encode.serve', process='enc0', rank=0, part=0)"]
    assert [w.point.step for w in stepper.waiting] == ["encode.post", "encode.forward"]
    assert "waits at encode.forward" in panel._state.value and "<svg" in panel._figure.value
    before = panel._figure.value
    panel._kind.value = "timeline"
    assert panel._figure.value != before and "regions of the run" in panel._figure.value
    stepper.until("transfer.write")
    assert panel._next.options[0].startswith("1. enc0 at transfer.write")
    assert "fail" in panel._fault.options and "drop" not in panel._fault.options
    panel._fault.value = "fail"
    panel._step.click()
    assert panel.code[-1] == "stepper.step(fault='fail')"
    panel._run.click()
    assert "rank0 failed, transfer_failed" in panel._stop.value


def test_the_panel_breaks_from_outside_resets_and_reports_errors(stepper: Stepper) -> None:
    from epdlab.lab.panel import Panel

    panel = Panel(stepper)
    panel._fault.value = "rank1's client gives up"
    panel._step.click()
    assert panel.code[-1] == "stepper.cancel(rank=1)"
    panel._run.click()
    panel._step.click()
    assert "no held step" in panel._stop.value, "an error is told in the panel"
    numbers = pids(stepper.lab)
    panel._tp.value, panel._profile.value, panel._size.value = 3, "sglang-0.5.17", "64 KiB"
    panel._reset.click()
    assert panel.code[-1] == "stepper.reset('bytes:65536:1', tp=3, profile='sglang-0.5.17')"
    assert len(stepper.waiting) == 3 and "sglang-0.5.17" in repr(panel) and gone(numbers)


def test_a_panel_shown_anew_ends_the_processes_of_the_one_before() -> None:
    from epdlab.lab.panel import Panel

    with Stepper(SMALL) as first, Stepper(SMALL) as second:
        numbers = pids(first.lab)
        Panel(first)
        panel = Panel(second)
        assert gone(numbers)
        assert not gone_now(pids(second.lab))
        assert panel._repr_mimebundle_()["text/plain"] == "Panel(Stepper(bytes:65536:1, tp=2, hardened, 2 held))"


def gone_now(numbers: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in numbers)


# ---- drawing and exercises ---------------------------------------------------------------------------------------


def test_a_live_run_is_drawn_and_exported(stepper: Stepper, tmp_path: Path) -> None:
    stepper.until("transfer.write")
    figure = stepper.lab.draw("sequence")
    assert "waits at transfer.write part 0 for rank1" in figure.dot
    assert figure.save(tmp_path / "run.svg").read_text().startswith("<?xml")
    assert "session 127.0.0.1:" in stepper.draw("architecture").dot
    stepper.run()
    trace = json.loads(stepper.lab.perfetto(tmp_path / "run.json").read_text())
    assert sum(record["name"] == "transfer.write" for record in trace["traceEvents"]) == 2


def stub(sizes: list[int]) -> None:
    """A docstring is no line."""


def three_lines(sizes: list[int]) -> list[int]:
    """A docstring is no line."""
    # nor is a comment
    total = sum(sizes)

    total += 1
    return [total]


def test_an_answer_is_counted_and_judged() -> None:
    assert (body_lines(stub), body_lines(three_lines)) == (0, 3)
    assert repr(judge(stub, 3, lambda: "not asked", "")) == "no answer yet: stub is still a stub of at most 3 lines"
    assert judge(three_lines, 2, lambda: None, "").right is False
    assert judge(three_lines, 3, lambda: None, "it holds") == Verdict(True, "it holds")
    assert judge(three_lines, 3, lambda: "it does not", "it holds") == Verdict(False, "it does not")


def test_wrong_answers_to_the_exercises_are_told_what_is_wrong() -> None:
    from epdlab.lab.step_exercises import try_place, try_race, try_spoil

    def all_at_zero(sizes: list[int]) -> list[int]:
        return [0 for _ in sizes]

    def raises(sizes: list[int]) -> list[int]:
        return [sizes[9]]

    def cancels(stepper: Stepper) -> None:
        stepper.cancel(1)

    def walks(stepper: Stepper) -> None:
        stepper.walk()

    assert repr(try_place(all_at_zero).verdict).startswith("not yet: part 1 landed at +98304, not at +0")
    assert "raises raised IndexError" in repr(try_place(raises).verdict)
    assert repr(try_spoil(cancels).verdict) == "not yet: no write failed"
    assert repr(try_race(walks).verdict) == "not yet: invariant 2 [source_uncovered] holds; broken: 1 [overlap]"


def test_the_world_of_a_trace_is_that_of_its_last_stop(stepper: Stepper) -> None:
    stepper.until("landing.read")
    assert WorldState.at(stepper.lab.shown).lines() == stepper.world.lines()
