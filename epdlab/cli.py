"""`python -m epdlab`: the command line. Parses, calls, prints; the work is done elsewhere.

Exit codes: 0 what was asked for held; 1 it did not; 2 it could not be asked like this; 130 interrupted.
`--json` prints one JSON object on stdout and nothing else there. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import EpdLabError, UsageError
from .modality import Modality
from .rules import DEFAULT_PROFILE, PROFILES

BENCHES = ("transfer", "landing", "steps", "store", "explore", "race", "late", "ablation", "hazards")
Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`".replace("\n", " "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    _on_interrupt(_as_interrupt)
    logging.basicConfig(level=logging.WARNING, format="epdlab: %(message)s", stream=sys.stderr)
    try:
        chosen = _parser().parse_args(arguments)
        command: Command = chosen.command
        _check_places(chosen)
        return command(chosen)
    except EpdLabError as error:
        print(f"epdlab: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print("epdlab: interrupted; every process was ended", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # nobody reads on; do not fail again at exit
        return 1
    except OSError as error:
        print(f"epdlab: {error}", file=sys.stderr)
        return 1
    finally:
        _on_interrupt(_nothing)  # the answer is out; what is left ends by itself


def _as_interrupt(*_: object) -> NoReturn:
    """The first Ctrl-C ends the command; a second one must not stop it from ending its processes."""
    _on_interrupt(_nothing)
    raise KeyboardInterrupt


def _nothing(*_: object) -> None:
    """Take a signal, and do nothing."""


def _on_interrupt(act: Callable[..., None]) -> None:
    """What Ctrl-C, SIGTERM and a closed terminal do from now on; under `nohup` the last is ignored as before."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, act)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m epdlab", description="Step through SGLang's EPD embedding hand-off over Mooncake.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for add in (_add_doctor, _add_demo, _add_race, _add_explore, _add_replay, _add_store, _add_bench, _add_report):
        add(commands)
    for add in (_add_lab, _add_encoder, _add_prefill, _add_reference):
        add(commands)
    return parser


def _command(commands: Any, name: str, text: str, command: Command, as_json: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    if as_json:
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    return parser


def _check_places(chosen: argparse.Namespace) -> None:
    """Make the folder of --out and the file of --trace before the work, not after it."""
    out, trace = getattr(chosen, "out", None), getattr(chosen, "trace", None)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: {error.strerror}; name a folder that is there or can be made") from None
        if not os.access(out, os.W_OK | os.X_OK):
            raise UsageError(f"--out {out}: one may not write there; name another folder")
    if trace is not None:
        try:
            trace.open("ab").close()
        except OSError as error:
            raise UsageError(f"--trace {trace}: {error.strerror}; name a file in a folder that is there") from None


def _finish(answer: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(answer))
    return 0 if answer["ok"] else 1


def _keep(chosen: argparse.Namespace, name: str, answer: dict[str, Any]) -> None:
    """With --write, keep an answer in results/NAME.json."""
    if chosen.write:
        from .report.results import command_for, write_result

        write_result(name, answer, command_for(name))


def _sayer(as_json: bool) -> Callable[[str], None]:
    """Where a command's lines for people go: stdout, or stderr beside JSON."""
    stream = sys.stderr if as_json else sys.stdout
    return lambda line: print(line, file=stream, flush=True)


def _size(text: str) -> int:
    """Bytes from `64KiB`, `4MiB`, `1GiB` or a plain number."""
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    number, unit = text.strip(), 1
    for name, factor in units.items():
        if number.lower().endswith(name):
            number, unit = number[: -len(name)].strip(), factor
    if not number.isdigit() or int(number) * unit < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 65536, 64KiB, 4MiB or 1GiB")
    return int(number) * unit


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use 1 to 65535, or 0 for a free one")
    return int(text)


def _number(text: str) -> float:
    """The number written; NaN if it is none, or not finite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write seconds, such as 0.5 or 180")
    return seconds


def _milliseconds(text: str) -> float:
    milliseconds = _number(text)
    if not milliseconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write milliseconds, 0 or more")
    return milliseconds


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write a whole number, {least} or more")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _there(text: str) -> Path:
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"there is no {text!r}; name a folder that is there")
    return Path(text)


def _add_doctor(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from . import doctor

        return doctor.run(json=chosen.json)

    _command(commands, "doctor", "say what this machine offers, and mend what it lacks", run)


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", "one real transfer, end to end, held against one process", _demo)
    parser.add_argument("--image", action="append", default=[], metavar="PATH_OR_URL", help="an image (repeatable)")
    parser.add_argument("--video", action="append", default=[], metavar="PATH", help="animated GIF or folder of frames")
    parser.add_argument("--prompt", default="Describe what you see.", help="(default: %(default)s)")
    parser.add_argument("--tp", type=int, default=2, help="prefill ranks (default: %(default)s)")
    parser.add_argument("--encoders", type=int, default=1, help="encode servers (default: %(default)s)")
    _add_deployment(parser)
    parser.add_argument("--pool-bytes", type=_size, default=0, help="landing pool per rank; default: per request")
    parser.add_argument("--out", type=Path, help="folder to keep the trace and the logs in; default: none is kept")
    parser.add_argument("--step", action="store_true", help="step through it at a prompt")
    parser.add_argument("--strict", action="store_true", help="an uncovered write is an error")
    parser.add_argument("--allow-private-urls", action="store_true", help="let images come from private addresses")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    text = f"one of {', '.join(PROFILES)}; NAME-RULE and NAME+RULE change a rule (default: %(default)s)"
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help=text)


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    _add_profile(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    parser.add_argument("--protocol", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--model", default="tiny", help="`tiny`, or the folder of a Qwen2.5-VL checkpoint")


def _device(chosen: argparse.Namespace) -> str:
    if chosen.device is not None:
        return str(chosen.device)
    from .vlm import best_device

    return best_device()


def _demo(chosen: argparse.Namespace) -> int:
    from .lab.demo import DemoOptions, run_demo
    from .vlm import check_prompt

    check_prompt(chosen.prompt)
    options = DemoOptions(
        images=tuple(chosen.image),
        videos=tuple(chosen.video),
        prompt=chosen.prompt,
        tp=chosen.tp,
        encoders=chosen.encoders,
        profile=chosen.profile,
        device=_device(chosen),
        protocol=chosen.protocol,
        model=chosen.model,
        out=chosen.out,
        pool_bytes=chosen.pool_bytes,
        strict=chosen.strict,
        allow_private_urls=chosen.allow_private_urls,
    )
    if chosen.step:
        from .lab.terminal import step_demo

        return step_demo(options)
    return _finish(run_demo(options, _sayer(chosen.json)), chosen.json)


def _add_race(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from .lab.race import RaceOptions, run_race

        options = RaceOptions(
            chosen.profile, chosen.tp, chosen.bytes, chosen.repeat, chosen.stagger, chosen.nic, chosen.out
        )
        return _finish(run_race(options, _sayer(chosen.json)), chosen.json)

    parser = _command(commands, "race", "sibling /send calls of one part on the real engine, counted", run)
    _add_profile(parser)
    parser.add_argument("--tp", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--bytes", type=_size, default="64KiB", help="embedding size (default: %(default)s)")
    parser.add_argument("--repeat", type=_positive, default=50, help="requests (default: %(default)s)")
    parser.add_argument(
        "--stagger", type=_milliseconds, default=0.0, metavar="MS", help="between ranks; default: all at once"
    )
    parser.add_argument("--nic", action="store_true", help="emulate an NIC: slices need a live source region")
    parser.add_argument("--out", type=Path, help="folder to keep the trace and the logs in; default: none is kept")


def _add_explore(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from .check import api

        say = _sayer(chosen.json)
        if chosen.ablate:
            return _finish(api.ablate(seconds=chosen.seconds, seed=chosen.seed, out=chosen.out, say=say), chosen.json)
        answer = api.explore(
            profile=chosen.profile,
            tp=chosen.tp,
            requests=chosen.requests,
            parts=chosen.parts,
            fault=chosen.fault,
            seconds=chosen.seconds,
            seed=chosen.seed,
            out=chosen.out,
            say=say,
            modality=chosen.modality,
        )
        return _finish(answer, chosen.json)

    parser = _command(commands, "explore", "every order of the steps within a bound, in the model", run)
    _add_profile(parser)
    parser.add_argument("--ablate", action="store_true", help="take each rule away from `hardened`")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--parts", type=int, default=1, help="images or videos of a request (default: %(default)s)")
    parser.add_argument("--modality", type=Modality, help="of a single part, IMAGE or VIDEO; default: the profile's")
    parser.add_argument("--fault", help="a kind of fault, or `all`; default: none")
    parser.add_argument("--seconds", type=_seconds, default=60.0, help="budget (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is sampled at random (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the schedule files")


def _add_replay(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        if chosen.live:
            from .lab.replay import replay_live

            return _finish(replay_live(chosen.file, _sayer(chosen.json)), chosen.json)
        from .check import api

        return _finish(api.replay(chosen.file, _sayer(chosen.json)), chosen.json)

    parser = _command(commands, "replay", "replay a schedule file, in the model or on real processes", run)
    parser.add_argument("file", type=Path)
    parser.add_argument("--live", action="store_true", help="on the real processes")


def _add_store(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from .lab.store_demo import run_store

        answer = run_store(chosen.out, _sayer(chosen.json))
        if chosen.facts:
            from .lab.store_facts import store_facts

            answer["facts"] = store_facts(_sayer(chosen.json))
        _keep(chosen, "store", answer)
        return _finish(answer, chosen.json)

    parser = _command(commands, "store", "the embedding cache over a real Mooncake Store", run)
    parser.add_argument("--out", type=Path, help="folder to keep the trace and the logs in; default: none is kept")
    parser.add_argument("--facts", action="store_true", help="measure the bare store's failures too (minutes)")
    parser.add_argument("--write", action="store_true", help="keep the answer in results/")


def _add_bench(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from . import bench

        return _finish(bench.run(chosen.name, chosen.quick, chosen.write, _sayer(chosen.json)), chosen.json)

    parser = _command(commands, "bench", f"measure or count: {', '.join(BENCHES)}", run)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")


def _add_report(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from .report.build import run_report

        return run_report(check=chosen.check, draft=chosen.draft, traces=chosen.traces)

    parser = _command(commands, "report", "build REPORT.md from texts, claims, results and figures", run, as_json=False)
    parser.add_argument("--check", action="store_true", help="only say whether the files are what the build gives")
    parser.add_argument("--draft", action="store_true", help="build although numbers are missing, and mark them")
    parser.add_argument("--traces", action="store_true", help="record the runs that the figures show anew")


def _add_lab(commands: Any) -> None:
    def run(_: argparse.Namespace) -> int:
        import subprocess

        folder = Path(__file__).resolve().parents[1] / "notebooks"
        root = ["--allow-root"] if os.geteuid() == 0 else []
        return subprocess.call([sys.executable, "-m", "jupyterlab", "--notebook-dir", str(folder), *root])

    _command(commands, "lab", "open the notebooks in JupyterLab", run, as_json=False)


def _add_role(commands: Any, name: str, text: str, command: Command) -> argparse.ArgumentParser:
    parser = _command(commands, name, text, command, as_json=False)
    parser.add_argument("--name", help="this process's name in traces")
    parser.add_argument("--model", default="tiny", help="`tiny`, `synthetic`, or the folder of a checkpoint")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trace", type=Path, help="JSONL file for this process's events")
    parser.add_argument("--control", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


def _add_handoff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="the address peers reach this host by")
    _add_profile(parser)
    parser.add_argument("--protocol", default="tcp", choices=("tcp", "rdma"))
    parser.add_argument("--strict", action="store_true", help="an uncovered write is an error")
    parser.add_argument("--no-digest", action="store_true", help="do not checksum embeddings")
    parser.add_argument("--quarantine", type=_seconds, default=60.0, metavar="S")


def _role_fields(chosen: argparse.Namespace, name: str) -> dict[str, Any]:
    fields = ("model", "device", "trace", "control", "parent")
    return {"name": chosen.name or name} | {field: getattr(chosen, field) for field in fields}


def _handoff_fields(chosen: argparse.Namespace, name: str) -> dict[str, Any]:
    fields = {field: getattr(chosen, field) for field in ("host", "profile", "protocol", "strict")}
    return _role_fields(chosen, name) | fields | {"digest": not chosen.no_digest, "quarantine_s": chosen.quarantine}


def _add_encoder(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from .roles import EncoderOptions, run_encoder

        options = EncoderOptions(
            **_handoff_fields(chosen, "enc0"),
            port=chosen.port,
            send_timeout_s=chosen.send_timeout,
            nic_slices=chosen.nic_slices,
            media_root=chosen.media_root,
            allow_private_urls=chosen.allow_private_urls,
            store=chosen.store,
        )
        asyncio.run(run_encoder(options, _sayer(False)))
        return 0

    parser = _add_role(commands, "encoder", "run one encode server", run)
    _add_handoff(parser)
    parser.add_argument("--port", type=_port, default=0, help="HTTP port, 0 for a free one")
    parser.add_argument("--send-timeout", type=_seconds, metavar="S", help="clean-up timer; default: the profile's")
    parser.add_argument("--nic-slices", type=_not_negative, default=0, help="emulate an NIC: so many slices a write")
    parser.add_argument("--media-root", type=_there, help="folder that file items may come from")
    parser.add_argument("--allow-private-urls", action="store_true")
    parser.add_argument("--store", metavar="HOST:PORT", help="mooncake_master of a store to cache embeddings in")


def _add_prefill(commands: Any) -> None:
    parser = _add_role(commands, "prefill", "run one prefill rank for one request", _prefill)
    _add_handoff(parser)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--encoder-urls", required=True, metavar="URL[,URL]")
    parser.add_argument("--pool-bytes", type=_size_or_zero, default=0)
    parser.add_argument("--deadline", type=_seconds, default=180.0, metavar="S")
    parser.add_argument("--image", action="append", default=[], help="as the encoder can load it (repeatable)")
    parser.add_argument("--video", action="append", default=[])
    parser.add_argument("--prompt", default="Describe what you see.")
    parser.add_argument("--req-id", default="req1", help="the same on every rank of one request")


def _size_or_zero(text: str) -> int:
    return 0 if text == "0" else _size(text)


def _check_ranks(chosen: argparse.Namespace) -> None:
    """Refuse what the lab would refuse, in the same words."""
    from .lab.lab import LabConfig

    LabConfig(tp=chosen.tp, profile=chosen.profile)


def _prefill(chosen: argparse.Namespace) -> int:
    from .roles import PrefillOptions, PrefillRank, run_prefill

    if chosen.control is None:
        _check_ranks(chosen)
    options = PrefillOptions(
        **_handoff_fields(chosen, f"rank{chosen.rank}"),
        encoder_urls=tuple(chosen.encoder_urls.split(",")),
        rank=chosen.rank,
        tp=chosen.tp,
        pool_bytes=chosen.pool_bytes,
        deadline_s=chosen.deadline,
    )
    if chosen.control is not None:
        asyncio.run(run_prefill(options))
        return 0
    items = [("IMAGE", ref) for ref in chosen.image] + [("VIDEO", ref) for ref in chosen.video]

    async def work(rank: PrefillRank) -> None:
        answer = await rank.generate(chosen.req_id, items, chosen.prompt)
        answer.pop("logits", None)
        print(json.dumps(answer), flush=True)

    asyncio.run(run_prefill(options, work))
    return 0


def _add_reference(commands: Any) -> None:
    def run(chosen: argparse.Namespace) -> int:
        from .roles import RoleOptions, run_reference

        options = RoleOptions(**_role_fields(chosen, "reference"))
        asyncio.run(run_reference(options, chosen.media_root, chosen.allow_private_urls))
        return 0

    parser = _add_role(commands, "reference", "run the one-process reference (for the lab)", run)
    parser.add_argument("--media-root", type=_there)
    parser.add_argument("--allow-private-urls", action="store_true")
