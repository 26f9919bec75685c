"""The lab: steps held, let go, faulted and killed in real processes, and no process ever left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from lab_world import alive, light, parent, wait_until

from epdlab.control import Held, Hello, pack
from epdlab.errors import DeadlineExceeded, EpdLabError, HandoffError, LabError, PeerLost, TransferFailed, UsageError
from epdlab.lab import Lab
from epdlab.lab import processes as processes_module
from epdlab.lab.controller import Controller
from epdlab.lab.demo import leaks_of
from epdlab.lab.processes import Nursery, Process
from epdlab.steps import Decision, Point
from epdlab.trace.invariants import check

ITEM = "bytes:65536:1"


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    """Two ranks, one encoder, for every test that kills nothing."""
    with Lab(tp=2, model="synthetic", deadline_s=60.0) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """The shared lab with nothing held, and nothing left afterwards."""
    yield shared
    shared.unhold()
    shared.run()
    for req_id in shared.pending:
        shared.result(req_id)
    for timer in ("cleanup", "quarantine"):
        for process in shared.processes:
            shared.call(process, "fire", timer=timer, labels={})
    shared.settle()
    assert leaks_of(shared.census()) == {}


def good(answers: dict[str, Any]) -> bool:
    return all(isinstance(answer, dict) and answer["bytes"] for answer in answers.values())


# ---- hold, step, run -------------------------------------------------------------------------------------------------


def test_a_held_step_waits_until_it_is_let_go(lab: Lab) -> None:
    lab.hold("transfer.write", rank=1)
    lab.request(ITEM)
    waiting = lab.run_until("transfer.write", rank=1)
    assert str(waiting) == "enc0 waits at transfer.write [part 0, rank 1]"
    assert lab.waiting == [waiting]
    assert lab.step(step="transfer.write").point == waiting.point
    assert good(lab.result())


def test_run_until_lets_everything_else_go(lab: Lab) -> None:
    lab.hold()
    req_id = lab.request(ITEM)
    assert lab.run_until("ack.pull", rank=0).point.process == "rank0"
    done = {(event.step, event.rank) for event in lab.events_of(req_id) if event.phase == "end"}
    assert ("transfer.write", 0) in done
    lab.run()
    assert good(lab.result())


def test_stepping_through_a_whole_request(lab: Lab) -> None:
    lab.hold(phase=None)
    req_id = lab.request(ITEM, ranks=[0])
    steps = []
    while req_id in lab.pending:
        for waiting in lab.settle():
            steps.append((waiting.point.step, waiting.point.phase))
            lab.let_go(waiting)
    assert [step for step, phase in steps if phase == "begin"][:4] == [
        "encode.post",
        "encode.serve",
        "encode.forward",
        "landing.alloc",
    ]
    assert ("transfer.write", "end") in steps
    lab.run()


def test_a_hold_by_rank_request_part_and_process(lab: Lab) -> None:
    for where in ({"rank": 1}, {"req": "this"}, {"part": 0}, {"process": "rank1"}):
        lab.hold("ack.pull", **where)
        lab.request(ITEM, req_id="this")
        point = lab.run_until("ack.pull", **where).point
        assert all(getattr(point, name) == value for name, value in where.items())
        lab.run()
        assert good(lab.result("this"))
        lab._requests.clear()


def test_a_step_let_go_with_a_fault(lab: Lab) -> None:
    lab.hold("transfer.write", rank=0)
    lab.request(ITEM, ranks=[0])
    lab.step(step="transfer.write", decision=Decision("fail"))
    assert isinstance(lab.result()["rank0"], TransferFailed)


def test_nothing_held_says_what_is_held_and_who_waits(lab: Lab) -> None:
    lab.hold("transfer.write", rank=1)
    lab.request(ITEM)
    lab.run_until("transfer.write", rank=1)
    with pytest.raises(LabError) as error:
        lab.step(step="mr.register", rank=7, timeout_s=0.05)
    assert str(error.value) == (
        "no held step mr.register of rank 7 within 0.05 s; "
        "enc0 waits at transfer.write [part 0, rank 1] (held: transfer.write)"
    )
    lab.run()
    with pytest.raises(LabError, match=r"nobody waits \(held: nothing\)"):
        lab.step(timeout_s=0.05)


@pytest.mark.parametrize(
    "use",
    [
        lambda lab: lab.hold("transfer.wrote"),
        lambda lab: lab.fault("fail", "transfer.wrote"),
        lambda lab: lab.step(step="transfer.wrote"),
        lambda lab: lab.run_until("transfer.wrote"),
    ],
)
def test_a_wrong_step_is_answered_with_the_nearest(lab: Lab, use: Callable[[Lab], object]) -> None:
    with pytest.raises(UsageError, match=r"no step 'transfer.wrote'; did you mean transfer.write"):
        use(lab)
    assert lab.controller.patterns == []


@pytest.mark.parametrize(
    "use",
    [
        lambda lab: lab.fault("explode", "transfer.write"),
        lambda lab: lab.hold("transfer.write", phase="middle"),
        lambda lab: lab.hold("transfer.write", rank="one"),
        lambda lab: lab.fault("fail", "transfer.write", times="often"),
        lambda lab: lab.kill("rank9"),
        lambda lab: lab.freeze("rank9"),
        lambda lab: lab.thaw("rank9"),
        lambda lab: lab.result("req999"),
    ],
)
def test_a_wrong_word_is_refused_here_and_ends_no_process(lab: Lab, use: Callable[[Lab], object]) -> None:
    lab.request("bytes:1:1")
    lab.result()
    with pytest.raises(UsageError):
        use(lab)
    lab.request(ITEM)
    assert good(lab.result())


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda lab: lab.fault("drop", "encode.post"), "drop does not go with encode.post; it goes with ack.push"),
        (lambda lab: lab.fault("drop", "*"), "drop does not go with *; it goes with ack.push"),
        (lambda lab: lab.fault("repeat", "landing.read"), "repeat does not go with landing.read; it goes with send."),
        (lambda lab: lab.fault("explode", "*"), "no fault 'explode'; use fail, delay, drop, repeat, kill"),
        (lambda lab: lab.fault("fail", "transfer.write", times=-3), "times=-3 is not possible; use 1 or more, or None"),
        (lambda lab: lab.fault("fail", "transfer.write", times=0), "times=0 is not possible; use 1 or more, or None"),
        (lambda lab: lab.fault("delay", "transfer.write"), "a delay of None s is not possible; say how long, such as"),
        (lambda lab: lab.fault("delay", "*", value=-1.0), "a delay of -1.0 s is not possible; say how long, such as"),
        (lambda lab: lab.fault("fail", "*", process="zz"), "no process 'zz'; there are enc0, rank0, rank1"),
        (lambda lab: lab.hold(process="zz"), "no process 'zz'; there are enc0, rank0, rank1"),
        (lambda lab: lab.hold(rank=9), "no rank 9; there are 0, 1"),
        (lambda lab: lab.fault("kill", "*", rank=-1), "no rank -1; there are 0, 1"),
    ],
)
def test_what_could_never_happen_is_refused(lab: Lab, use: Callable[[Lab], object], told: str) -> None:
    with pytest.raises(UsageError) as error:
        use(lab)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)
    assert lab.controller.patterns == []


def test_what_could_happen_at_any_step_is_taken_for_all(lab: Lab) -> None:
    for kind, value in (("fail", None), ("kill", None), ("delay", 0.0)):
        lab.fault(kind, "*", value=value, times=None)  # type: ignore[arg-type]
    assert len(lab.controller.patterns) == 3


def test_an_operation_nobody_has(lab: Lab) -> None:
    with pytest.raises(UsageError, match=r"rank0 has no operation 'dance'; it has cancel, census, fire, generate"):
        lab.call("rank0", "dance")
    with pytest.raises(LabError, match="rank9 is not connected"):
        lab.call("rank9", "census")


@pytest.mark.parametrize(
    ("kind", "step", "told"),
    [
        ("fail", "transfer.write", "transfer_failed"),
        ("fail", "mr.register", "registration_refused"),
        ("fail", "encode.forward", "step_fault"),
        ("delay", "transfer.write", "ok"),
        ("repeat", "transfer.write", "ok"),
    ],
)
def test_faults(lab: Lab, kind: Any, step: str, told: str) -> None:
    lab.fault(kind, step, process="enc0", value=0.01 if kind == "delay" else None)
    lab.request(ITEM, ranks=[0])
    assert getattr(lab.result()["rank0"], "kind", "ok") == told


def test_a_fault_that_has_happened_does_not_come_back(lab: Lab) -> None:
    lab.fault("fail", "transfer.write", rank=0)
    lab.request(ITEM, ranks=[0])
    assert isinstance(lab.result()["rank0"], TransferFailed)
    lab.hold("transfer.write", rank=0)
    lab.request(ITEM, ranks=[0])
    lab.run_until("transfer.write", rank=0)
    lab.run()
    assert good(lab.result())
    lab.fault("fail", "transfer.write", rank=0)
    lab.request(ITEM, ranks=[0])
    assert isinstance(lab.result()["rank0"], TransferFailed), "asked for again, it happens again"


def test_a_dropped_ack_ends_by_the_deadline(lab: Lab) -> None:
    lab.fault("drop", "ack.push", rank=0)
    req_id = lab.request(ITEM)
    lab.settle()
    assert lab.pending == [req_id]
    assert lab.call("rank0", "fire", timer="deadline", labels={"req": req_id}) == 1
    answers = lab.result()
    assert isinstance(answers["rank0"], DeadlineExceeded)
    assert answers["rank1"]["bytes"] == 65536


def test_cancelling_a_request(lab: Lab) -> None:
    lab.hold("landing.alloc", rank=0)
    req_id = lab.request(ITEM)
    lab.run_until("landing.alloc", rank=0)
    assert lab.call("rank0", "cancel", req_id=req_id) is True
    assert lab.call("rank0", "cancel", req_id="nobody") is False
    lab.run()
    answers = lab.result()
    assert isinstance(answers["rank0"], EpdLabError)
    assert answers["rank1"]["bytes"] == 65536


def test_one_id_twice_at_once(lab: Lab) -> None:
    lab.hold("transfer.write", rank=0)
    lab.request(ITEM, req_id="twice", ranks=[0])
    lab.run_until("transfer.write", rank=0)
    with pytest.raises(UsageError, match="'twice' is in use"):
        lab.call("rank0", "generate", req_id="twice", items=[("IMAGE", ITEM)])
    lab.run()
    assert good(lab.result("twice"))


def test_a_frozen_process_goes_on_when_thawed(lab: Lab) -> None:
    lab.freeze("enc0")
    lab.request(ITEM)
    lab.thaw("enc0")
    assert good(lab.result())


def test_the_deployment_as_coroutines(lab: Lab) -> None:
    async def inside() -> Any:
        await lab.a.request(ITEM)
        return await lab.a.result()

    assert good(asyncio.run(inside()))


# ---- killing ---------------------------------------------------------------------------------------------------------


def test_an_encoder_killed_in_mid_transfer() -> None:
    """Both ranks say so at once; what may still be written is set aside, then goes."""
    with Lab(tp=2, model="synthetic") as lab:
        lab.hold("transfer.write", phase="end")
        assert len(lab.wait_for_ranks(lab.request(ITEM))) == 2
        lab.kill("enc0")
        assert {type(answer) for answer in lab.result().values()} == {PeerLost}
        assert lab.waiting == [], "a held step of a dead process waits no more"
        _nothing_left(lab)
        lab.request(ITEM)
        answers = lab.result()
        assert all(isinstance(answer, PeerLost) for answer in answers.values())
        assert "is the encoder running" in str(answers["rank0"])
        _nothing_left(lab)


def test_a_rank_killed_in_mid_transfer() -> None:
    """Its sibling gets its embedding, and the encoder lets the part go."""
    with Lab(tp=2, model="synthetic") as lab:
        lab.hold("transfer.write", rank=0)
        lab.hold("transfer.write", rank=1, phase="end")
        lab.request("bytes:4194304:1")
        lab.run_until("transfer.write", rank=0)
        lab.kill("rank0")
        lab.run()
        answers = lab.result()
        assert isinstance(answers["rank0"], LabError)
        assert "SIGKILL" in str(answers["rank0"])
        assert answers["rank1"]["bytes"] == 4 << 20
        _nothing_left(lab)
        with pytest.raises(LabError, match="SIGKILL"):
            lab.call("rank0", "census")


def test_a_rank_that_kills_itself_at_a_step() -> None:
    with Lab(tp=2, model="synthetic") as lab:
        lab.fault("kill", "landing.read", rank=1)
        lab.request(ITEM)
        answers = lab.result()
        assert isinstance(answers["rank1"], LabError)
        assert "exit code 9" in str(answers["rank1"])
        _nothing_left(lab)


def _nothing_left(lab: Lab) -> None:
    """What is left waits for a timer; fired early, nothing is left, and no invariant was broken."""
    lab.settle()
    for process in list(lab.processes):
        if lab.processes[process].running:
            for timer in ("cleanup", "quarantine"):
                lab.call(process, "fire", timer=timer, labels={})
    lab.settle()
    assert leaks_of(lab.census()) == {}
    assert check(lab.events) == []


# ---- ending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [None, "encode.forward", "transfer.write", "landing.free"])
def test_closing_leaves_no_process_whatever_is_held(held: str | None) -> None:
    with Lab(tp=2, model="synthetic") as lab:
        pids = [process.pid for process in lab.processes.values()]
        folder = lab.out
        if held is not None:
            lab.hold(held)
            lab.request(ITEM)
            lab.run_until(held)
    assert not any(alive(pid) for pid in pids)
    assert not folder.exists()
    lab.close()
    if held is not None:
        assert all(isinstance(answer, LabError | HandoffError) for answer in lab.result().values())


def test_closing_with_a_frozen_process() -> None:
    with Lab(tp=1, model="synthetic") as lab:
        pids = [process.pid for process in lab.processes.values()]
        lab.freeze("rank0")
    assert not any(alive(pid) for pid in pids)


def test_roles_end_in_order() -> None:
    with Lab(tp=1, model="synthetic") as lab:
        processes = list(lab.processes.values())
        lab.request(ITEM)
        lab.result()
    assert [process.ended() for process in processes] == [0, 0]


def test_a_role_that_cannot_start_says_why_and_nothing_stays() -> None:
    lab = Lab(tp=1, model="/no/such/checkpoint")
    with pytest.raises(LabError, match=r"enc0 ended with exit code [12].*/no/such/checkpoint"):
        lab.start()
    assert lab.processes == {}
    assert not lab.out.exists()


@pytest.mark.parametrize("options", [{"tp": 0}, {"tp": 9}, {"encoders": 0}, {"encoders": 9}, {"profile": "sglang-9"}])
def test_a_deployment_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Lab(model="synthetic", **options)


def test_a_lab_that_was_never_started() -> None:
    lab = Lab(model="synthetic")
    with pytest.raises(LabError, match="not running"):
        lab.request(ITEM)
    with pytest.raises(UsageError, match="no request was sent"):
        lab.result()
    lab.close()
    lab.close()


NOT_RUNNING: list[Callable[[Lab], object]] = [
    lambda lab: lab.request(ITEM),
    lambda lab: lab.hold(),
    lambda lab: lab.fault("fail", "*"),
    lambda lab: lab.unhold(),
    lambda lab: lab.step(),
    lambda lab: lab.run(),
    lambda lab: lab.settle(),
    lambda lab: lab.census(),
    lambda lab: lab.kill("rank0"),
    lambda lab: lab.state(),
    lambda lab: lab.draw(),
    lambda lab: lab.events,
    lambda lab: lab.events_of("req1"),
    lambda lab: lab.shown,
    lambda lab: lab.breaches,
]


def test_a_lab_that_does_not_run_says_so_in_every_order() -> None:
    fresh, closed, ended = Lab(model="synthetic"), Lab(model="synthetic"), Lab(tp=1, model="synthetic")
    closed.close()
    with ended:
        ended.request(ITEM)
        ended.result()
    for lab in (fresh, closed, ended):
        for use in NOT_RUNNING:
            with pytest.raises(LabError, match=r"^the lab is not running; use `with Lab\(\.\.\.\) as lab:`$"):
                use(lab)
    fresh.close()
    for lab in (fresh, closed, ended):
        with pytest.raises(LabError, match="not running"):
            lab.start()
        lab.close()
        lab.close()


def test_a_trace_that_was_kept_can_be_looked_at_after_the_end(tmp_path: Path) -> None:
    with Lab(tp=1, model="synthetic", out=tmp_path) as lab:
        req_id = lab.request(ITEM)
        lab.result()
    assert lab.events_of(req_id)
    assert lab.breaches == []
    assert "enc0" in str(lab.state())
    assert lab.draw() is not None


def test_an_interrupted_close_goes_on_when_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tp=1, model="synthetic").start()
    started = list(lab.processes.values())
    wait = lab._wait

    def interrupted(work: Any) -> Any:
        work.close()
        raise KeyboardInterrupt

    lab.freeze("rank0")
    monkeypatch.setattr(lab, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.close()
    monkeypatch.setattr(lab, "_wait", wait)
    lab.close()
    assert not any(process.running for process in started)
    assert not lab.out.exists()


LEFT_OPEN = """
import sys
from epdlab.lab import Lab

lab = Lab(tp=1, model="synthetic").start()
lab.request("bytes:1:1")
print(lab.out, *(process.pid for process in lab.processes.values()), flush=True)
if sys.argv[1:]:
    raise SystemExit(7) if sys.argv[1] == "exit" else ValueError("the reader's own")
"""


@pytest.mark.parametrize(("how", "code"), [((), 0), (("raise",), 1), (("exit",), 7)])
def test_a_lab_left_open_is_closed_at_exit(tmp_path: Path, how: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, *how]
    done = subprocess.run(command, env=light(tmp_path), capture_output=True, text=True, timeout=30, check=False)
    folder, *pids = done.stdout.split()
    assert (done.returncode, len(pids)) == (code, 2)
    assert not any(alive(int(pid)) for pid in pids)
    assert not Path(folder).exists()
    assert "ignored" not in done.stderr
    assert done.stderr.count("Traceback") == (how == ("raise",))


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook, while the encoders are up and the ranks are not."""
    lab = Lab(tp=2, model="synthetic")
    started: list[Process] = []
    spawn = lab._spawn

    def watched(name: str, arguments: list[str]) -> None:
        spawn(name, arguments)
        started.append(lab.processes[name])
        if name == "enc0":
            signal.raise_signal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else os.kill(
                os.getpid(), signal.SIGINT
            )

    monkeypatch.setattr(lab, "_spawn", watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.name for process in started][:1] == ["enc0"]
    assert not any(process.running for process in started)


CHILD = """
import sys
from epdlab.lab import Lab

with Lab(tp=1, model="synthetic") as lab:
    lab.hold("encode.post")
    lab.request("bytes:1:1")
    lab.run_until("encode.post")
    print(*(process.pid for process in lab.processes.values()), flush=True)
    sys.stdin.read()
"""


def test_a_parent_that_dies_takes_its_processes_along(tmp_path: Path) -> None:
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-c", CHILD], env=light(tmp_path), **quiet)  # type: ignore[call-overload]
    with child:
        assert child.stdout is not None
        pids = [int(word) for word in child.stdout.readline().split()]
        nursery = parent(pids[0])
        assert len(pids) == 2
        assert all(map(alive, [*pids, nursery]))
        child.kill()
        child.wait(30)
        wait_until(lambda: not any(map(alive, [*pids, nursery])))


def test_a_nursery_that_dies_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its children die with it; whoever waits for their end, or wants a new one, is told."""
    monkeypatch.setenv("PYTHONPATH", light(tmp_path)["PYTHONPATH"])
    nursery = Nursery()
    _, ended = nursery.start(_idle_role(), tmp_path / "no folder" / "x.log")
    assert ended.result(30) == 1, "a child that breaks ends, and the nursery goes on"
    assert "FileNotFoundError" in capfd.readouterr().err
    pid, ended = nursery.start(_idle_role(), tmp_path / "y.log")
    try:
        os.kill(nursery._child.pid, signal.SIGKILL)
        assert ended.result(30) == -signal.SIGKILL
        wait_until(lambda: not alive(pid))
    finally:
        nursery.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(LabError, match="nursery ended"):
        nursery.start(_idle_role(), tmp_path / "z.log")


def ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_interrupts_while_the_nursery_is_closed_at_exit_leave_no_traceback(tmp_path: Path) -> None:
    env = light(tmp_path)
    (tmp_path / "torch/__init__.py").write_text("import atexit, time; atexit.register(time.sleep, 1.0)")
    program = "from epdlab.lab.processes import nursery; nursery()"
    child = subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, text=True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    wait_until(lambda: all(ignores(child.pid, number) for number in numbers))
    for number in numbers:
        child.send_signal(number)
    assert child.communicate(timeout=30)[1] == ""
    assert child.returncode == 0


def test_a_nursery_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", light(tmp_path)["PYTHONPATH"])
    monkeypatch.setattr(processes_module, "END_GRACE_S", 0.1)
    nursery = Nursery()
    os.kill(nursery._child.pid, signal.SIGSTOP)
    nursery.close()
    assert nursery._child.returncode == -signal.SIGKILL


def test_a_nursery_that_nobody_hears_ends_quietly(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "epdlab.lab.nursery"]
    with subprocess.Popen(command, env=light(tmp_path), **pipes) as nursery:  # type: ignore[call-overload]
        nursery.stdout.close()
        nursery.stdin.write(json.dumps({"argv": _idle_role(), "log": str(tmp_path / "x.log")}).encode() + b"\n")
        nursery.stdin.flush()
        assert nursery.stderr.read() == b""
        assert nursery.wait(30) == 0


def test_a_closed_terminal_ends_a_command(tmp_path: Path) -> None:
    """SIGHUP is taken as SIGTERM is: one line, exit code 130, no temporary folder left."""
    command = [sys.executable, "-m", "epdlab", "demo", "--json"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any(tmp_path.glob("epdlab-*/trace.jsonl")), 60)
    child.send_signal(signal.SIGHUP)
    printed, said = child.communicate(timeout=60)
    assert (child.returncode, printed) == (130, "")
    assert said.splitlines()[-1] == "epdlab: interrupted; every process was ended"
    assert "Traceback" not in said
    assert list(tmp_path.glob("epdlab*")) == []


def _idle_role() -> list[str]:
    """A rank that waits for a lab that never speaks."""
    control = ["--control", "tcp://127.0.0.1:9", "--model", "synthetic"]
    return ["prefill", "--name", "rank0", "--encoder-urls", "http://127.0.0.1:9", *control]


# ---- the lab's end of the channel ------------------------------------------------------------------------------------


class Peer:
    """A role's end of the channel, spoken by hand."""

    def __init__(self, controller: Controller, name: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(controller.address)
        self.name = name

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def hello(self) -> None:
        self.say(pack(Hello(self.name, {})))

    def close(self) -> None:
        self._context.destroy(linger=1000)


async def arrives(controller: Controller, fact: Callable[[], bool]) -> None:
    await controller.until(fact, 20.0, lambda: "it never arrived")


async def test_frames_that_are_none_do_not_end_the_lab() -> None:
    controller = Controller()
    peer = Peer(controller, "rank0")
    deep = b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 20_000
    for frames in ((b"garbage",), (b"",), (b"a", b"b"), (b"\x91" * 5000,), (deep,)):
        peer.say(*frames)
    peer.hello()
    await arrives(controller, lambda: "rank0" in controller.hellos)
    peer.close()
    await controller.close()


async def test_a_process_that_dies_between_its_hello_and_a_call() -> None:
    """The channel may take a call to a dead peer; nobody waits for the answer for ever."""
    controller = Controller()
    peer = Peer(controller, "rank0")
    peer.hello()
    await arrives(controller, lambda: "rank0" in controller.hellos)
    asked = asyncio.ensure_future(controller.call("rank0", "census"))
    await asyncio.wait([asked], timeout=0.01)
    controller.lost("rank0", "ended by signal SIGKILL")
    with pytest.raises(LabError, match="rank0 ended by signal SIGKILL"):
        await asked
    with pytest.raises(LabError, match="rank0 ended by signal SIGKILL"):
        await controller.call("rank0", "census")
    peer.close()
    await controller.close()


async def test_a_hello_whose_sender_is_gone_does_not_end_the_lab() -> None:
    controller = Controller()
    controller._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    await controller._take("nobody", Hello("nobody", {}))
    peer = Peer(controller, "rank0")
    peer.hello()
    await arrives(controller, lambda: "rank0" in controller.hellos)
    peer.close()
    await controller.close()


async def test_a_step_held_just_before_its_process_died_is_nobodys() -> None:
    controller = Controller()
    controller.lost("rank0", "ended")
    first, second = Peer(controller, "rank0"), Peer(controller, "rank1")
    first.say(pack(Held(1, Point("rank0", "transfer.write"))))
    first.hello()
    second.hello()
    await arrives(controller, lambda: "rank1" in controller.hellos)
    assert (controller.waiting, list(controller.hellos)) == ([], ["rank1"])
    first.close()
    second.close()
    await controller.close()
