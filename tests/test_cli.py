"""The command line as people and scripts use it: what it answers, how it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lab_world import alive, light, wait_until
from PIL import Image

from epdlab import cli
from epdlab.errors import LabError
from epdlab.lab import demo, processes
from epdlab.lab.processes import Process
from epdlab.media import SAMPLES
from epdlab.steps import Event, read_trace

HARBOUR, TILES, BALL = (str(SAMPLES / name) for name in ("harbour.png", "tiles.png", "ball.gif"))
KEYS = {
    "ok": bool,
    "bytes": int,
    "bytes_equal": bool,
    "tokens": list,
    "tokens_equal": bool,
    "logits_max_abs_diff": float,
    "violations": list,
    "leaks": dict,
    "protocol": str,
    "device": str,
    "ms": float,
}


class Ran(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The one JSON object on stdout, which holds nothing else."""
        assert self.out.count("\n") == 1
        answer = json.loads(self.out)
        assert isinstance(answer, dict)
        return answer

    @property
    def refusal(self) -> str:
        """The one line on stderr, with nothing on stdout."""
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("epdlab: ")
        return lines[0].removeprefix("epdlab: ")


@pytest.fixture
def here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Ran]]:
    """Run a command in this process, which has its nursery already. No temporary file may outlive it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> Ran:
        code = cli.main(arguments)
        assert list(temporary.iterdir()) == []
        return Ran(code, *capsys.readouterr())

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def epdlab(*arguments: str, **options: Any) -> Ran:
    """Run a command as a process of its own."""
    command = [sys.executable, "-m", "epdlab", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    return Ran(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def ends(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, the process does not outlive the test."""
    with process:
        try:
            yield
        finally:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ---- the demo --------------------------------------------------------------------------------------------------------


def test_demo_as_json(here: Callable[..., Ran], tmp_path: Path) -> None:
    ran = here("demo", "--json", "--out", str(tmp_path / "out"))
    answer = ran.answer
    assert {name: type(answer[name]) for name in KEYS} == KEYS
    assert (ran.code, answer["ok"], answer["bytes_equal"], answer["tokens_equal"]) == (0, True, True, True)
    assert (answer["violations"], answer["leaks"], answer["logits_max_abs_diff"]) == ([], {}, 0.0)
    assert (answer["protocol"], answer["device"], answer["profile"]) == ("tcp", "cpu", "hardened")
    assert answer["bytes"] > 0
    assert len(answer["tokens"]) > 0
    _ended_with_everything(read_trace(tmp_path / "out" / "trace.jsonl"))


def test_demo_with_two_images_and_a_video_over_two_encoders(here: Callable[..., Ran], tmp_path: Path) -> None:
    items = ["--image", HARBOUR, "--image", TILES, "--video", BALL]
    shape = ["--tp", "3", "--encoders", "2", "--prompt", "What moves?"]
    ran = here("demo", *items, *shape, "--json", "--out", str(tmp_path))
    assert (ran.code, ran.answer["ok"], ran.answer["logits_max_abs_diff"]) == (0, True, 0.0)
    events = read_trace(tmp_path / "trace.jsonl")
    parts = {(event.part, event.process) for event in events if event.step == "transfer.write"}
    assert parts == {(0, "enc0"), (1, "enc1"), (2, "enc0")}
    _ended_with_everything(events)


def test_demo_for_people(here: Callable[..., Ran]) -> None:
    ran = here("demo", "--tp", "1", "--pool-bytes", "4MiB", "--profile", "sglang-0.5.17")
    assert ran.code == 0
    for told in ("POST /encode", "vision tower", "one-sided write", "ack pushed", "landing memory read"):
        assert told in ran.out
    assert re.search(r"bytes at both ends: equal \([\d,]+ per rank\)", ran.out)
    assert "equal to one process" in ran.out
    assert re.search(r"broken invariants: none; left behind: nothing", ran.out)


def test_demo_takes_a_file_whose_name_is_no_text(here: Callable[..., Ran], tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd.p\xff")
    odd.write_bytes(Path(TILES).read_bytes())
    assert here("demo", "--image", str(odd), "--tp", "1", "--json").answer["ok"] is True


def test_demo_takes_a_data_uri(here: Callable[..., Ran]) -> None:
    import base64

    uri = "data:image/png;base64," + base64.b64encode(Path(TILES).read_bytes()).decode()
    assert here("demo", "--image", uri, "--tp", "1", "--json").answer["ok"] is True


def _ended_with_everything(events: list[Event]) -> None:
    """Every process is gone, and so are the ports it had."""
    started = [event.data for event in events if event.step == "process.start" and event.data]
    assert len(started) >= 3
    for data in started:
        assert not alive(data["pid"])
        for address in (data.get("url"), data.get("session")):
            assert address is None or not listens(int(address.rpartition(":")[2]))


# ---- bad input: one line, an exit code, nothing left -----------------------------------------------------------------


def bomb(path: Path) -> str:
    """A PNG that says it has 20,000 x 20,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return str(path)


def text_file(path: Path) -> str:
    path.write_text("no image")
    return str(path)


def still(path: Path) -> str:
    Image.new("RGB", (8, 8)).save(path, "GIF")
    return str(path)


def loop(path: Path) -> str:
    path.symlink_to(path.name)
    return str(path)


BAD_DEMOS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such image": (lambda at: ["--image", "/no/such.png"], r"cannot open '/no/such.png'"),
    "not an image": (lambda at: ["--image", text_file(at / "x.png")], "not a whole image: pass one of PNG"),
    "a bomb": (lambda at: ["--image", bomb(at / "bomb.png")], "over 50000000 pixels: scale it down"),
    "a folder as an image": (lambda at: ["--image", str(at)], "pass the folder as a video"),
    "no such video": (lambda at: ["--video", "/no/such.gif"], "cannot open"),
    "a video of one frame": (lambda at: ["--video", still(at / "still.gif")], "1 frame"),
    "another scheme": (lambda at: ["--image", "file:///etc/passwd"], "'file'"),
    "a private URL": (lambda at: ["--image", "http://127.0.0.1:9/x.png"], "not public: allow private URLs"),
    "a data URI that is none": (lambda at: ["--image", "data:image/png;base64,!!"], "base64"),
    "an empty prompt": (lambda at: ["--prompt", ""], "prompt is empty"),
    "a blank prompt": (lambda at: ["--prompt", " \n"], "prompt is empty"),
    "no rank": (lambda at: ["--tp", "0"], r"--tp 0 is not possible: 1 to 8 ranks, each is a process"),
    "nine ranks": (lambda at: ["--tp", "9"], r"--tp 9 is not possible: 1 to 8 ranks, each is a process"),
    "ranks by name": (lambda at: ["--tp", "two"], "invalid int value: 'two'"),
    "no encoder": (lambda at: ["--encoders", "0"], "--encoders 0 is not possible"),
    "no such profile": (lambda at: ["--profile", "sglang-0.5.61"], "use sglang-0.5.17, sglang-0.5.16"),
    "no such device": (lambda at: ["--device", "tpu"], "invalid choice: 'tpu'"),
    "no such option": (lambda at: ["--colour"], "unrecognized arguments: --colour"),
    "a prompt that is no text": (lambda at: ["--prompt", os.fsdecode(b"\xff\xfe")], "the prompt is not UTF-8"),
    "an image that links to itself": (lambda at: ["--image", loop(at / "loop.png")], "loop"),
    "a video that links to itself": (lambda at: ["--video", loop(at / "loop.gif")], "loop"),
    "an image of no name": (lambda at: ["--image", ""], "is empty: name a file"),
    "a rule that is none": (lambda at: ["--profile", "hardened+nope"], "NAME-RULE take one of the 12 rules; shared"),
    "a rule misspelt": (lambda at: ["--profile", "hardened-notify_eror"], "12 rules; the nearest: notify_errors"),
    "a pool of no size": (lambda at: ["--pool-bytes", "lots"], "'lots' is no size; write 65536"),
}


@pytest.mark.parametrize("case", BAD_DEMOS)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_demo_that_cannot_be(
    here: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, as_json: bool
) -> None:
    """Refused before any process starts."""

    def no_process(*_: object) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes, "nursery", no_process)
    arguments, said = BAD_DEMOS[case]
    ran = here("demo", *arguments(tmp_path), *(["--json"] if as_json else []))
    assert ran.code == 2
    assert re.search(said, ran.refusal), ran.refusal


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "required: COMMAND; see `python -m epdlab --help`"),
        (["dance"], 2, "invalid choice: 'dance'"),
        (["demo", "--tp"], 2, "see `python -m epdlab demo --help`"),
        (["demo", "--out", "/proc/nothing"], 2, "--out /proc/nothing: No such file or directory; name a folder"),
        (["demo", "--out", "/etc/hostname"], 2, "--out /etc/hostname: File exists; name a folder"),
        (["race", "--out", "/proc/nothing"], 2, "--out /proc/nothing: "),
        (["explore", "--out", "/proc/nothing"], 2, "--out /proc/nothing: "),
        (["store", "--out", "/proc/nothing"], 2, "--out /proc/nothing: "),
        (["race", "--bytes", "20GiB"], 2, "--bytes 21474836480 is not possible; use 1 to 1073741824"),
        (["race", "--stagger", "-1"], 2, "'-1' is no time; write milliseconds, 0 or more"),
        (["race", "--stagger", "nan"], 2, "'nan' is no time; write milliseconds"),
        (["race", "--stagger", "inf"], 2, "'inf' is no time; write milliseconds"),
        (["race", "--repeat", "0"], 2, "'0' is no count; write a whole number, 1 or more"),
        (["explore", "--seconds", "0"], 2, "'0' is no time; write seconds"),
        (["explore", "--seconds", "-1"], 2, "'-1' is no time; write seconds"),
        (["explore", "--seconds", "inf"], 2, "'inf' is no time; write seconds"),
        (["encoder", "--nic-slices", "-1"], 2, "'-1' is no count; write a whole number, 0 or more"),
        (["encoder", "--media-root", "/no/such"], 2, "there is no '/no/such'; name a folder that is there"),
        (["encoder", "--port", "x"], 2, "'x' is no port; use 1 to 65535"),
        (["encoder", "--port", "65536"], 2, "'65536' is no port; use 1 to 65535"),
        (["encoder", "--send-timeout", "-1"], 2, "'-1' is no time; write seconds"),
        (["encoder", "--quarantine", "nan"], 2, "'nan' is no time; write seconds"),
        (["encoder", "--model", "synthetic", "--trace", "/no/such/folder/x"], 2, "--trace /no/such/folder/x: "),
        (["prefill"], 2, "--encoder-urls"),
        (["prefill", "--encoder-urls", "u", "--deadline", "soon"], 2, "'soon' is no time; write seconds"),
        (["prefill", "--encoder-urls", "u", "--tp", "0"], 2, "--tp 0 is not possible: 1 to 8 ranks"),
        (["prefill", "--encoder-urls", "u", "--tp", "9"], 2, "--tp 9 is not possible: 1 to 8 ranks"),
        (["replay", "/dev/zero"], 2, "/dev/zero is over 1048576 bytes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_that_cannot_be(here: Callable[..., Ran], arguments: list[str], code: int, said: str) -> None:
    ran = here(*arguments)
    assert (ran.code, said in ran.refusal) == (code, True), ran.err


@pytest.mark.parametrize("command", ["demo", "race", "explore"])
def test_help_says_the_defaults(here: Callable[..., Ran], capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: hardened)" in said
    assert ("budget (default: 60.0)" in said) == (command == "explore")


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_the_lab_as_root(here: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, user: int, allowed: bool) -> None:
    """JupyterLab starts as root only where it is told that it may."""
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 0)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert here("lab").code == 0
    assert ("--allow-root" in called[0]) == allowed


def test_a_model_that_is_not_there(here: Callable[..., Ran]) -> None:
    """Only the role that loads it finds out; its reason is the line one reads."""
    ran = here("demo", "--model", "/no/such/checkpoint", "--json")
    assert ran.code in (1, 2)
    assert ran.out == ""
    said = ran.err.splitlines()[-1]
    assert re.match(r"epdlab: (enc0|reference) ended.*'/no/such/checkpoint' is no checkpoint folder", said)


def test_rdma_where_there_is_none(here: Callable[..., Ran]) -> None:
    from epdlab.doctor import rdma_devices

    if any(rdma_devices().values()):
        pytest.skip("this machine has an RDMA device")
    ran = here("demo", "--protocol", "rdma", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "no RDMA device with an active port here" in ran.err
    assert "--protocol tcp" in ran.err


# ---- killed in mid-transfer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("process", "step", "failed"),
    [
        ("enc0", "transfer.write", {"rank0": "peer_lost", "rank1": "peer_lost"}),
        ("rank1", "ack.pull", {"rank1": "lab"}),
    ],
)
def test_a_process_killed_in_mid_transfer(
    here: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: str, step: str, failed: Any
) -> None:
    class Deadly(demo.Lab):
        def start(self) -> demo.Lab:
            super().start()
            self.fault("kill", step, process=process)
            return self

    monkeypatch.setattr(demo, "Lab", Deadly)
    ran = here("demo", "--json", "--out", str(tmp_path))
    answer = ran.answer
    assert (ran.code, answer["ok"], answer["leaks"]) == (1, False, {})
    assert {rank: error.partition(":")[0] for rank, error in answer["errors"].items()} == failed
    assert "Traceback" not in ran.err
    _ended_with_everything(read_trace(tmp_path / "trace.jsonl"))


# ---- interrupted -----------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """The children of every thread of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def recorded(folder: Path, step: str, process: str) -> bool:
    trace = folder / "trace.jsonl"
    if not trace.exists():
        return False
    return any(event.step == step and event.process == process for event in read_trace(trace))


MOMENTS: dict[str, Callable[[int, Path], bool]] = {
    "as its first process starts": lambda pid, out: bool(children(pid)),
    "when the encoder is up": lambda pid, out: recorded(out, "process.start", "enc0"),
    "while a request runs": lambda pid, out: recorded(out, "request.start", "rank0"),
}


@pytest.mark.parametrize(
    ("moment", "numbers"),
    [
        ("as its first process starts", [signal.SIGINT]),
        ("when the encoder is up", [signal.SIGINT, signal.SIGINT, signal.SIGTERM]),
        ("while a request runs", [signal.SIGTERM]),
    ],
)
def test_interrupted(tmp_path: Path, moment: str, numbers: list[signal.Signals]) -> None:
    """No process, no port, no temporary file stays, however often one presses."""
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    running = subprocess.Popen(
        [sys.executable, "-m", "epdlab", "demo", "--json", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    with ends(running):
        wait_until(lambda: MOMENTS[moment](running.pid, out), 90)
        nursery = children(running.pid)
        for number in numbers:
            running.send_signal(number)
        printed, said = running.communicate(timeout=90)
    assert (running.returncode, printed) == (130, "")
    assert said.splitlines()[-1] == "epdlab: interrupted; every process was ended"
    assert "Traceback" not in said
    assert not any(map(alive, nursery))
    assert list(temporary.glob("epdlab*")) == []
    for event in read_trace(out / "trace.jsonl") if (out / "trace.jsonl").exists() else []:
        if event.step == "process.start" and event.data:
            assert not alive(event.data["pid"])
            assert "url" not in event.data or not listens(int(event.data["url"].rpartition(":")[2]))


# ---- roles by hand ---------------------------------------------------------------------------------------------------


def test_roles_by_hand() -> None:
    """An encode server and a prefill rank, each started at a shell, and ended by a signal."""
    server = subprocess.Popen(
        [sys.executable, "-m", "epdlab", "encoder", "--model", "synthetic"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ends(server):
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"serves (http://127\.0\.0\.1:(\d+)), engine session 127\.0\.0\.1:\d+", line)
        assert found is not None
        rank = epdlab("prefill", "--model", "synthetic", "--encoder-urls", found[1], "--image", "bytes:4097:1")
        assert rank.code == 0, rank.err
        answer = rank.answer
        assert (answer["bytes"], answer["parts"]) == (4097, [["IMAGE", 4097, 1]])
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert not listens(int(found[2]))
        assert "Traceback" not in server.stderr.read()  # type: ignore[union-attr]


def in_nursery(name: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a role's command as the lab would, in a process of its own; its exit code and what it said."""
    process = Process(name, list(arguments), folder)
    code = process.ended(60)
    return code, process.log.read_text()


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = in_nursery("enc0", tmp_path, "encoder", "--port", str(port), "--model", "synthetic")
    assert code == 1
    assert f"epdlab: cannot listen on 127.0.0.1:{port} (" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("choose another --port or --host")
    assert "Traceback" not in said


def test_a_rank_whose_encoder_is_not_there(tmp_path: Path) -> None:
    arguments = ["prefill", "--model", "synthetic", "--encoder-urls", "http://127.0.0.1:9", "--image", "bytes:1:1"]
    code, said = in_nursery("rank0", tmp_path, *arguments)
    assert code == 1
    assert said.splitlines()[-1].startswith("epdlab: http://127.0.0.1:9/encode does not answer")
    assert "Traceback" not in said


def test_a_rank_that_is_none_of_its_group(tmp_path: Path) -> None:
    arguments = ["prefill", "--model", "synthetic", "--encoder-urls", "http://127.0.0.1:9", "--rank", "2", "--tp", "2"]
    code, said = in_nursery("rank2", tmp_path, *arguments)
    assert (code, "there is no rank 2 of 2; ranks are 0 to 1" in said.splitlines()[-1]) == (2, True)


def test_a_rank_without_items(tmp_path: Path) -> None:
    code, said = in_nursery(
        "rank0", tmp_path, "prefill", "--model", "synthetic", "--encoder-urls", "http://127.0.0.1:9"
    )
    assert (code, "give --image or --video" in said.splitlines()[-1]) == (2, True)


# ---- what a machine lacks --------------------------------------------------------------------------------------------


def shadowed(folder: Path) -> dict[str, str]:
    """An environment whose Mooncake does not find libibverbs."""
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    return os.environ | {"PYTHONPATH": str(folder)}


def test_without_libibverbs(tmp_path: Path) -> None:
    light(tmp_path)
    ran = epdlab("encoder", "--model", "synthetic", env=shadowed(tmp_path))
    assert ran.code == 1
    assert re.search(r"Mooncake cannot be loaded \(libibverbs.so.1.*run `python -m epdlab doctor`", ran.refusal)


def test_doctor_without_dot(tmp_path: Path) -> None:
    ran = epdlab("doctor", "--json", env=os.environ | {"PATH": str(tmp_path)})
    lacks = {lack["name"]: lack for lack in ran.answer["lacks"]}
    assert (ran.code, ran.answer["ok"], ran.answer["dot"]) == (1, False, None)
    assert "graphviz" in lacks["dot"]["mend"]
    assert ran.err == ""


def test_doctor_with_two_wheels(tmp_path: Path) -> None:
    for name in ("mooncake_transfer_engine", "mooncake_transfer_engine_cuda13"):
        info = tmp_path / f"{name}-0.3.13.post1.dist-info"
        info.mkdir()
        facts = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.3.13.post1\n"
        (info / "METADATA").write_text(facts)
    ran = epdlab("doctor", "--json", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    (lack,) = [lack for lack in ran.answer["lacks"] if lack["name"] == "mooncake"]
    assert (ran.code, ran.answer["ok"]) == (1, False)
    assert "overwrite each other" in lack["problem"]
    assert "uninstall -y" in lack["mend"]


def test_doctor_here() -> None:
    ran = epdlab("doctor")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "The demo can run here.")


# ---- what is imported ------------------------------------------------------------------------------------------------

HEAVY = {"torch", "transformers", "tokenizers", "mooncake", "numpy", "PIL", "zmq", "aiohttp", "graphviz", "matplotlib"}


@pytest.mark.parametrize("program", ["import epdlab", "import epdlab.cli; epdlab.cli._parser()"])
def test_importing_epdlab_is_light(program: str) -> None:
    asked = f"import sys; {program}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_the_hand_off_needs_neither_torch_nor_transformers() -> None:
    """Sender and receiver know ports; torch comes with an engine, a tower or a model."""
    modules = "encode_server, receiver, landing, regions, messages, rules, steps, control"
    heavy = "{'torch', 'transformers', 'mooncake'}"
    asked = f"import sys; from epdlab import {modules}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_a_nursery_that_cannot_start_is_one_line(here: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Any:
        raise LabError(processes.GONE)

    monkeypatch.setattr(processes, "nursery", gone)
    ran = here("demo", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines()[-1] == f"epdlab: {processes.GONE}"


def test_a_demo_that_fails_names_what_broke_and_waits_no_three_minutes() -> None:
    ran = epdlab("demo", "--profile", "sglang-0.5.12")
    assert ran.code == 1
    assert "sglang-0.5.12 tells ranks of no error" in ran.out
    assert re.search(r"^rank[01] failed: deadline: .* 10 s", ran.out, re.MULTILINE)
    assert "broken invariants: lost_embedding, unfinished; left behind: nothing" in ran.out
