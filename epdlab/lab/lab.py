"""`Lab`: the processes of one EPD deployment, and the reader's hand on every step.

    with Lab(tp=2, profile="sglang-0.5.16") as lab:
        lab.hold("transfer.write", rank=1)
        lab.request("image.png")
        lab.run_until("transfer.write", rank=1)
        print(lab.state())
        lab.run()

Every method works as a plain call and, inside a coroutine, with `async with Lab(...)` and `await lab.a.step()`.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import msgspec

from ..control import Pattern
from ..errors import LabError, UsageError
from ..rules import DEFAULT_PROFILE, profile
from ..steps import GO, STEPS, Decision, Event, FaultKind, Phase, Steps, TraceFile, read_trace, step_spec
from ..trace.invariants import Breach, check
from ..trace.perfetto import save_perfetto
from ..trace.render import Drawing
from ..trace.state import WorldState
from .controller import Controller, Waiting
from .force import FAULTS, force
from .processes import Process, ignore_interrupts, nursery
from .rest import Rest
from .view import State, draw

T = TypeVar("T")

MAX_TP = 8
START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 30.0
LOOK_TIMEOUT_S = 5.0
NOT_RUNNING = "the lab is not running; use `with Lab(...) as lab:`"
CLEAN_UP = ("mr.deregister", "embedding.drop", "landing.quarantine", "landing.free", "part.release", "timer.fire")


class LabConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment.

    Attributes:
        tp: prefill ranks, each a process; encoders: encode servers, each a process.
        model: `tiny`, a checkpoint folder, or `synthetic` (items are `bytes:N:SEED`, no model is loaded).
        pool_bytes: landing pool per rank, registered once; 0 allocates per request.
        nic_slices: emulate an NIC: cut writes into so many slices, each needing a live source region; 0 is off.
        send_timeout_s: the encoder's clean-up timer; None takes the profile's.
        master: `host:port` of a Mooncake store; the encoders cache embeddings there. None: no cache.
    """

    tp: int = 2
    encoders: int = 1
    profile: str = DEFAULT_PROFILE
    model: str = "tiny"
    device: str = "cpu"
    protocol: str = "tcp"
    pool_bytes: int = 0
    nic_slices: int = 0
    deadline_s: float = 180.0
    quarantine_s: float = 60.0
    send_timeout_s: float | None = None
    strict: bool = False
    digest: bool = True
    reference: bool = False
    media_root: str | None = None
    allow_private_urls: bool = False
    master: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= MAX_TP:
            raise UsageError(f"--tp {self.tp} is not possible: 1 to {MAX_TP} ranks, each is a process with a model")
        if not 1 <= self.encoders <= MAX_TP:
            raise UsageError(f"--encoders {self.encoders} is not possible: 1 to {MAX_TP} encode servers")
        profile(self.profile)


class Lab:
    """A deployment that runs, and can be held at any step. Use as a context manager.

    Args:
        out: folder for the trace and the logs; a temporary one that goes with the lab if not given.
        options: any field of `LabConfig`.
    """

    def __init__(self, *, out: Path | str | None = None, **options: Any) -> None:
        self.config = LabConfig(**options)
        self._temporary = None if out is not None else tempfile.TemporaryDirectory(prefix="epdlab-")
        self.out = Path(out if out is not None else self._temporary.name)  # type: ignore[union-attr]
        self.out.mkdir(parents=True, exist_ok=True)
        self.trace_path = self.out / "trace.jsonl"
        self.trace_path.unlink(missing_ok=True)
        self.processes: dict[str, Process] = {}
        self.a = AsyncLab(self)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="epdlab-lab", daemon=True)
        self._closing = threading.Lock()
        self._closed = False
        self._controller: Controller | None = None
        self._leaving: dict[str, Process] = {}
        self._requests: dict[str, list[Future[dict[str, Any]]]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._answered: Counter[str] = Counter()
        self._frozen: set[str] = set()
        self._looked: WorldState | None = None
        self._count = 0

    # ---- up and down ---------------------------------------------------------------------------------------------

    def start(self) -> Lab:
        """Start every process and wait until it is ready; `close`, or Python's exit, ends them. The same as `with`."""
        if self._closed:
            raise LabError(NOT_RUNNING)
        if self._thread.is_alive():
            return self
        self._thread.start()
        try:
            nursery()  # its own end at exit must come after the lab's
            atexit.register(self._close_at_exit)
            self._wait(self._start())
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Lab:
        return self.start()

    def __await__(self) -> Generator[Any, None, Lab]:
        return asyncio.to_thread(self.start).__await__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Lab:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End every process and give everything back. Idempotent; an interrupted one goes on when called again."""
        with self._closing:
            if self._closed:
                return
            if self._thread.is_alive():
                self._wait(self._stop())
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()
            if self._temporary is not None:
                self._temporary.cleanup()
            self._closed = True
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        ignore_interrupts()
        self.close()

    async def _start(self) -> None:
        self._controller = Controller()
        self._trace = TraceFile(self.trace_path)
        self._rest = Rest(self._controller, self.trace_path, self._live)
        self.steps = Steps("lab", self._trace)
        config = self.config
        encoders = [f"enc{index}" for index in range(config.encoders)]
        if config.reference:
            self._spawn("reference", ["reference", *self._reference_arguments()])
        for name in encoders:
            self._spawn(name, ["encoder", *self._encoder_arguments()])
        await self._ready(encoders)
        urls = ",".join(self.controller.hellos[name]["url"] for name in encoders)
        ranks = [f"rank{rank}" for rank in range(config.tp)]
        for rank, name in enumerate(ranks):
            self._spawn(name, ["prefill", "--rank", str(rank), "--encoder-urls", urls, *self._prefill_arguments()])
        await self._ready([*ranks, *(["reference"] if config.reference else [])])

    def _spawn(self, name: str, arguments: list[str]) -> None:
        common = ["--name", name, "--control", self.controller.address, "--trace", str(self.trace_path)]
        process = self.processes[name] = Process(name, [*arguments, *common], self.out)
        self._watches.add(asyncio.get_running_loop().create_task(self._watch(process)))

    async def _watch(self, process: Process) -> None:
        await process.over()
        if self.processes.get(process.name) is process:
            await self._lost(process)

    async def _lost(self, process: Process) -> None:
        self.controller.lost(process.name, process.why())
        await self.controller.notify()

    async def _ready(self, names: Sequence[str]) -> None:
        def ready() -> bool:
            return all(name in self.controller.hellos for name in names) or any(
                not self.processes[name].running for name in names
            )

        await self.controller.until(ready, START_TIMEOUT_S, lambda: f"not ready after {START_TIMEOUT_S:g} s: {names}")
        for name in sorted(names, key=lambda name: self.processes[name].running):
            if name not in self.controller.hellos:
                raise LabError(f"{name} {self.processes[name].why()}")

    async def _stop(self) -> None:
        if self._controller is None:
            return
        self._leaving |= self.processes
        self.processes = {}
        for name, process in self._leaving.items():
            if name in self._controller.hellos:
                await self._controller.shut_down(name)
            else:
                process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
        await asyncio.gather(*(process.end() for process in self._leaving.values()))
        await asyncio.gather(*self._watches, return_exceptions=True)
        for name in self._leaving:
            self._controller.lost(name, "ended with the lab")
        answers = [asyncio.wrap_future(answers) for sent in self._requests.values() for answers in sent]
        await asyncio.gather(*answers, return_exceptions=True)
        await self._controller.close()
        self._trace.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    def request(
        self,
        *images: str,
        videos: Sequence[str] = (),
        prompt: str = "Describe what you see.",
        req_id: str | None = None,
        max_new_tokens: int = 8,
        ranks: Sequence[int] | None = None,
        stagger_ms: float = 0.0,
    ) -> str:
        """Send one request to every rank (or to `ranks`; to others later) and return at once; its id."""
        self._count += 1
        req_id = req_id or f"req{self._count}"
        items = [("IMAGE", ref) for ref in images] + [("VIDEO", ref) for ref in videos]
        args = {"req_id": req_id, "items": items, "prompt": prompt, "max_new_tokens": max_new_tokens}
        chosen = range(self.config.tp) if ranks is None else ranks
        answers = self._later(self._run_request(args, list(chosen), stagger_ms / 1e3))
        self._requests.setdefault(req_id, []).append(answers)
        return req_id

    async def _run_request(self, args: dict[str, Any], ranks: list[int], stagger_s: float) -> dict[str, Any]:
        async def one(place: int, rank: int) -> Any:
            await asyncio.sleep(place * stagger_s)
            try:
                return await self.controller.call(f"rank{rank}", "generate", **args)
            finally:
                self._answered[args["req_id"]] += 1
                await self.controller.notify()

        answers = await asyncio.gather(*(one(*pair) for pair in enumerate(ranks)), return_exceptions=True)
        return {f"rank{rank}": answer for rank, answer in zip(ranks, answers, strict=True)}

    def result(self, req_id: str | None = None, timeout_s: float = 300.0) -> dict[str, Any]:
        """Each rank's answer to a request (the latest by default): a dict, or the error it failed with."""
        if not self._requests:
            raise UsageError("no request was sent yet; call lab.request(...) first")
        give_up = time.monotonic() + timeout_s
        req_id = req_id or next(reversed(self._requests))
        if req_id not in self._requests:
            raise UsageError(f"no request {req_id!r}; there are {', '.join(self._requests)}")
        futures = self._requests[req_id]
        try:
            answers = [future.result(max(0.0, give_up - time.monotonic())) for future in futures]
            return {rank: answer for found in answers for rank, answer in found.items()}
        except TimeoutError:
            raise LabError(f"no result after {timeout_s:g} s; {self._who_waits()}") from None

    def call(self, process: str, op: str, **args: Any) -> Any:
        """Ask one process (see roles.py for the operations)."""
        return self._wait(self.controller.call(process, op, **args))

    # ---- holding and letting go ----------------------------------------------------------------------------------

    def hold(
        self,
        step: str = "*",
        *,
        phase: Phase | None = "begin",
        process: str | None = None,
        rank: int | None = None,
        req: str | None = None,
        part: int | None = None,
    ) -> None:
        """From now on, hold this step (any process, rank, request, part unless given)."""
        self._add(Pattern(_known(step), phase, process, rank, req, part))

    def fault(
        self,
        kind: FaultKind,
        step: str,
        *,
        value: float | None = None,
        times: int | None = 1,
        process: str | None = None,
        rank: int | None = None,
        req: str | None = None,
        part: int | None = None,
    ) -> None:
        """Make the next such step fail, wait (`value` seconds), be dropped, run twice, or kill its process."""
        pattern = Pattern(_known(step), "begin", process, rank, req, part, Decision(kind, value), times)
        if kind not in get_args(FaultKind):
            raise UsageError(f"no fault {kind!r}; use {', '.join(get_args(FaultKind))}")
        self._add(pattern, first=True)

    def unhold(self) -> None:
        """Forget all holds and faults. Steps that wait already go on waiting."""
        self._wait(self.controller.set_patterns([]))

    def _add(self, pattern: Pattern, first: bool = False) -> None:
        try:
            msgspec.convert(msgspec.to_builtins(pattern), Pattern)
        except msgspec.ValidationError as error:
            raise UsageError(f"{pattern.step} cannot be held or faulted like this: {error}") from None
        old = self.controller.patterns
        _check_fault(pattern)
        self._check_where(pattern)
        self._wait(self.controller.set_patterns([pattern, *old] if first else [*old, pattern]))

    def _check_where(self, pattern: Pattern) -> None:
        if pattern.process is not None:
            self._process(pattern.process)
        if pattern.rank is not None and not 0 <= pattern.rank < self.config.tp:
            there = ", ".join(map(str, range(self.config.tp)))
            raise UsageError(f"no rank {pattern.rank}; there are {there}")

    @property
    def waiting(self) -> list[Waiting]:
        """The steps that are held now, longest first."""
        return list(self.controller.waiting)

    def step(self, *, timeout_s: float = STEP_TIMEOUT_S, decision: Decision = GO, **where: Any) -> Waiting:
        """Let the longest held step go (of `rank=`, `process=`, `step=` ... if given); which one it was.

        Raises:
            LabError: none waited within `timeout_s`; says who waits for what.
        """
        return self.step_like(Pattern(_known(where.pop("step", "*")), None, **where), timeout_s, decision)

    def step_like(self, pattern: Pattern, timeout_s: float = STEP_TIMEOUT_S, decision: Decision = GO) -> Waiting:
        """Let the longest held step that matches go, with a fault or without; which one it was."""
        return self._wait(self._step(pattern, timeout_s, decision))

    def let_go(self, waiting: Waiting, decision: Decision = GO) -> None:
        """Let exactly this held step go, with a fault or without."""
        self._wait(self.controller.release(waiting, decision))

    async def _step(self, pattern: Pattern, timeout_s: float, decision: Decision = GO) -> Waiting:
        waiting = await self._appears(pattern, timeout_s)
        await self.controller.release(waiting, decision)
        return waiting

    async def _appears(self, pattern: Pattern, timeout_s: float) -> Waiting:
        await self.controller.until(
            lambda: bool(self._matching(pattern)), timeout_s, self._nothing(pattern, timeout_s)
        )
        return self._matching(pattern)[0]

    def _nothing(self, pattern: Pattern, timeout_s: float) -> Any:
        named = f"{pattern.step}" + (f" of rank {pattern.rank}" if pattern.rank is not None else "")
        return lambda: f"no held step {named} within {timeout_s:g} s; {self._who_waits()}"

    def _who_waits(self) -> str:
        held = ", ".join(p.step for p in self.controller.patterns if p.decision is None) or "nothing"
        who = "; ".join(map(str, self.controller.waiting)) or "nobody waits"
        return f"{who} (held: {held})"

    def run_until(self, step: str, *, timeout_s: float = STEP_TIMEOUT_S, **where: Any) -> Waiting:
        """Let everything go until this step waits; it stays held."""
        pattern = Pattern(_known(step), where.pop("phase", "begin"), **where)
        return self._wait(self._run_until(pattern, timeout_s))

    async def _run_until(self, pattern: Pattern, timeout_s: float) -> Waiting:
        await self._hold_only([pattern])
        return await self._appears(pattern, timeout_s)

    def hold_only(self, patterns: Sequence[Pattern]) -> None:
        """Forget all other holds (no faults), and let go of what waits and is not meant."""
        self._wait(self._hold_only(patterns))

    async def _hold_only(self, patterns: Sequence[Pattern]) -> None:
        faults = [p for p in self.controller.patterns if p.decision is not None]
        await self.controller.set_patterns([*faults, *patterns])
        for waiting in list(self.controller.waiting):
            if not any(pattern.matches(waiting.point) for pattern in patterns):
                await self.controller.release(waiting)

    def wait_for_ranks(self, req_id: str, *, timeout_s: float = STEP_TIMEOUT_S) -> list[Waiting]:
        """Wait until every rank of a request has a held step or its answer; the held ones."""
        return self._wait(self._ranks_settled(Pattern("*", None, req=req_id), timeout_s))

    async def _ranks_settled(self, pattern: Pattern, timeout_s: float) -> list[Waiting]:
        def settled() -> bool:
            return len(self._matching(pattern)) + self._answered[str(pattern.req)] >= self.config.tp

        await self.controller.until(settled, timeout_s, self._nothing(pattern, timeout_s))
        return self._matching(pattern)

    def _matching(self, pattern: Pattern) -> list[Waiting]:
        return [w for w in self.controller.waiting if pattern.matches(w.point)]

    def run(self) -> None:
        """Forget all holds and let everything that waits go."""
        self.hold_only([])

    def force(self, schedule: Iterable[Any], *, timeout_s: float = STEP_TIMEOUT_S) -> list[Waiting]:
        """Let the steps of a schedule happen in its order, then let everything go; see `force`."""
        return force(self, schedule, timeout_s)

    def settle(self, *, timeout_s: float = STEP_TIMEOUT_S) -> list[Waiting]:
        """Wait until nothing moves: every step is held, or waits for one that is. Who is held, in a stable order.

        Raises:
            LabError: something still works after `timeout_s`; says what.
        """
        self._need_running()
        self._wait(self._rest.settle(timeout_s))
        return sorted(self.waiting, key=_protocol_order)

    # ---- looking -------------------------------------------------------------------------------------------------

    def state(self, *, addresses: bool = False) -> State:
        """What every process holds, once nothing moves; what changed since the last look is marked."""
        moving = ""
        try:
            self.settle(timeout_s=LOOK_TIMEOUT_S)
        except LabError as error:
            moving = str(error)
        world, before = WorldState.at(self.shown), self._looked
        self._looked = world
        waiting = tuple(sorted(self.waiting, key=_protocol_order))
        return State(world, before, waiting, tuple(self.breaches), moving, addresses)

    def draw(self, kind: str = "sequence", **options: Any) -> Drawing:
        """The run so far as a `sequence`, `timeline` or `architecture` diagram; `options` as these take them."""
        return draw(kind, self.shown, self.breaches, self.waiting, **options)

    def perfetto(self, path: Path | str) -> Path:
        """Write the run so far as JSON that ui.perfetto.dev opens."""
        return save_perfetto(self.shown, Path(path), self.breaches)

    @property
    def breaches(self) -> list[Breach]:
        """The invariants broken so far; what is open may still end well, unless every request is over."""
        return check(self.shown, complete=not self.pending)

    @property
    def pending(self) -> list[str]:
        """The requests that some rank has not answered yet."""
        return [req_id for req_id, sent in self._requests.items() if not all(answers.done() for answers in sent)]

    @property
    def events(self) -> list[Event]:
        """The trace so far; after the end too, if the lab was given a folder for it (`out`)."""
        try:
            return read_trace(self.trace_path)
        except FileNotFoundError:
            raise LabError(NOT_RUNNING) from None

    def events_of(self, req_id: str) -> list[Event]:
        """The events of one request."""
        return [event for event in self.events if event.req == req_id]

    @property
    def shown(self) -> list[Event]:
        """The trace so far, of the processes that hand over; what drawings show."""
        return [event for event in self.events if event.process != "reference"]

    def census(self) -> dict[str, dict[str, int]]:
        """What every process still holds, by kind; also recorded in the trace."""
        self._need_running()
        names = [name for name in self.processes if name != "reference"]
        return {name: self.call(name, "census") for name in names if self.processes[name].running}

    def kill(self, process: str) -> None:
        """SIGKILL one process, as a crash would."""
        victim = self._process(process)
        victim.signal(signal.SIGKILL)
        victim.ended()
        self._wait(self._lost(victim))
        self._trace(Event(time.monotonic_ns(), process, "process.kill", "begin", fault="kill"))

    def freeze(self, process: str) -> None:
        """SIGSTOP one process: it holds its sockets and does nothing."""
        self._process(process).signal(signal.SIGSTOP)
        self._frozen.add(process)

    def thaw(self, process: str) -> None:
        self._process(process).signal(signal.SIGCONT)
        self._frozen.discard(process)

    def _live(self) -> list[str]:
        """The processes that can answer."""
        out = {"reference", *self._frozen}
        return [name for name, process in self.processes.items() if name not in out and process.running]

    # ---- plumbing ------------------------------------------------------------------------------------------------

    @property
    def controller(self) -> Controller:
        if self._controller is None:
            raise LabError(NOT_RUNNING)
        return self._controller

    def _need_running(self) -> None:
        if self._controller is None or not self._thread.is_alive():
            raise LabError(NOT_RUNNING)

    def _later(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            work.close()
            raise LabError(NOT_RUNNING)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result; an interrupted caller takes the work back."""
        future = self._later(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _process(self, name: str) -> Process:
        self._need_running()
        if name not in self.processes:
            raise UsageError(f"no process {name!r}; there are {', '.join(self.processes)}")
        return self.processes[name]

    def _encoder_arguments(self) -> list[str]:
        config = self.config
        options = ["--model", config.model, *self._shared_arguments(), "--nic-slices", str(config.nic_slices)]
        if config.send_timeout_s is not None:
            options += ["--send-timeout", str(config.send_timeout_s)]
        if config.media_root is not None:
            options += ["--media-root", config.media_root]
        if config.master is not None:
            options += ["--store", config.master]
        return options + (["--allow-private-urls"] if config.allow_private_urls else [])

    def _reference_arguments(self) -> list[str]:
        config = self.config
        options = ["--model", config.model, "--device", config.device]
        if config.media_root is not None:
            options += ["--media-root", config.media_root]
        return options + (["--allow-private-urls"] if config.allow_private_urls else [])

    def _prefill_arguments(self) -> list[str]:
        config = self.config
        return [
            *("--tp", str(config.tp), "--model", config.model, *self._shared_arguments()),
            *("--pool-bytes", str(config.pool_bytes), "--deadline", str(config.deadline_s)),
        ]

    def _shared_arguments(self) -> list[str]:
        config = self.config
        options = ["--profile", config.profile, "--device", config.device, "--protocol", config.protocol]
        options += ["--quarantine", str(config.quarantine_s)]
        return options + (["--strict"] if config.strict else []) + ([] if config.digest else ["--no-digest"])


class AsyncLab:
    """The lab's methods as coroutines: `await lab.a.step()`."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._lab, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call


def _protocol_order(waiting: Waiting) -> tuple[Any, ...]:
    """Held steps as the protocol has them, clean-up last; of equal ones the lower part and rank first."""
    point = waiting.point
    place = point.step in CLEAN_UP, list(STEPS).index(point.step), point.phase == "end"
    return *place, point.req or "", point.part or 0, point.rank or 0, point.process, waiting.ticket


def _check_fault(pattern: Pattern) -> None:
    """Refuse a fault that could not happen like this."""
    decision, times = pattern.decision, pattern.times
    if decision is None or decision.fault is None:
        return
    if times is not None and times < 1:
        raise UsageError(f"times={times} is not possible; use 1 or more, or None for every time")
    if decision.fault == "delay":
        if decision.value is None or not 0 <= decision.value < math.inf:
            raise UsageError(f"a delay of {decision.value} s is not possible; say how long, such as value=0.5")
    elif pattern.step not in (steps := FAULTS[decision.fault]) and (pattern.step != "*" or len(steps) < len(STEPS)):
        raise UsageError(f"{decision.fault} does not go with {pattern.step}; it goes with {', '.join(steps)}")


def _known(step: str) -> str:
    if step != "*":
        step_spec(step)
    return step
