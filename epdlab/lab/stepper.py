"""`Stepper`: one request, every step of it held, let go one by one. What panel, prompt and notebooks share.

    with Stepper("bytes:1048576:1", tp=2) as stepper:
        stepper.step()                              # the next step, in the order of the protocol
        stepper.until("transfer.write", rank=1)     # steps until this one is the next
        stepper.step(rank=1, fault="fail")          # this rank's next step, and it goes wrong
        stepper.run()                               # everything at once; `walk` does it step by step

Between two calls the lab is at rest, so the same calls always give the same stops. No widget passes through here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..control import Pattern
from ..errors import LabError, UsageError, one_line
from ..rules import DEFAULT_PROFILE
from ..steps import STEPS, Decision, Event, FaultKind, Phase, step_spec
from ..trace.breach import Breach
from ..trace.render import Drawing
from ..trace.state import WorldState
from .controller import Waiting
from .demo import leaks_of
from .force import FAULTS
from .lab import Lab, LabConfig
from .view import State, Stop, changed_lines, draw, waiting_words

NEVER_S = 86_400.0
MAX_STEPS = 5_000
REQUEST = "req1"
ITEM = "bytes:1048576:1"
PROMPT = "Describe what you see."


class Stepper:
    """One request through a lab of its own, held at every step.

    Args:
        items: pictures (paths), or `bytes:N:SEED` for an embedding of N bytes without a model.
        tp: prefill ranks. profile: whose rules. prompt: what the language model is asked.
        options: any other field of `LabConfig`, and `out`. Deadlines and timers are a day away: `fire` fires them.

    Attributes:
        lab: the processes. items: what is transferred. waiting: the steps that are held, the next one first.
        world: what the processes hold. watchers: called with every stop.
    """

    def __init__(
        self,
        *items: str,
        videos: Sequence[str] = (),
        tp: int = 2,
        profile: str = DEFAULT_PROFILE,
        prompt: str = PROMPT,
        **options: Any,
    ) -> None:
        self.watchers: list[Callable[[Stop], None]] = []
        self.items, self._videos, self._prompt = items or (ITEM,), tuple(videos), prompt
        self._options = options | {"tp": tp, "profile": profile}
        self._start()

    def _start(self) -> None:
        self.lab = Lab(**_defaults(self.items + self._videos) | self._options).start()
        self._forgotten = weakref.finalize(self, _close_aside, self.lab)
        try:
            self.lab.hold("*", phase=None)
            for rank in range(self.lab.config.tp):
                self.lab.request(*self.items, videos=self._videos, prompt=self._prompt, req_id=REQUEST, ranks=[rank])
                self.waiting = self.lab.settle()
        except BaseException:
            self.lab.close()
            raise
        self.world = self.lab.state().world
        self._breaches, self._told, self._counted = 0, False, False

    def close(self) -> None:
        """End every process. Idempotent."""
        self.lab.close()
        self._forgotten.detach()

    def reset(self, *items: str, **options: Any) -> Stop:
        """Begin anew, in fresh processes; with other items, `tp`, `profile` ... if given."""
        LabConfig(**_defaults(items or self.items) | {k: v for k, v in (self._options | options).items() if k != "out"})
        self.close()
        self.items = items or self.items
        self._options |= options
        self._start()
        return self.look()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- letting go ----------------------------------------------------------------------------------------------

    def step(
        self,
        step: str = "*",
        *,
        process: str | None = None,
        rank: int | None = None,
        part: int | None = None,
        fault: FaultKind | None = None,
    ) -> Stop:
        """Let one held step go: the first in the order of the protocol, or the first that matches.

        Args:
            fault: make it `fail`, `drop` or `repeat` it, or `kill` its process.

        Raises:
            UsageError: no such step, or it cannot go wrong like this. LabError: nobody waits there.
        """
        chosen = self._chosen(step, process, rank, part)
        return self._stop([self._let_go(chosen, fault)], STEPS[chosen.point.step].doc)

    def until(
        self,
        step: str,
        *,
        phase: Phase = "begin",
        process: str | None = None,
        rank: int | None = None,
        part: int | None = None,
    ) -> Stop:
        """Let steps go, in the order of the protocol, until this one is the next.

        Raises:
            LabError: the request ended without it.
        """
        step_spec(step)
        wanted = Pattern(step, phase, process, rank, None, part)
        gone: list[str] = []
        while not (self.waiting and wanted.matches(self.waiting[0].point)):
            if not self.waiting or len(gone) >= MAX_STEPS:
                raise LabError(f"{step} did not come up in {len(gone)} steps; `draw` shows what did, or `reset`")
            gone.append(self._let_go(self.waiting[0]))
        return self._stop(gone)

    def run(self) -> Stop:
        """Let go of everything that is held, and of all that follows."""
        self.lab.run()
        return self._settled("everything that was held, and all that followed")

    def walk(self) -> Stop:
        """Let every step go, one by one in the order of the protocol: `run` without chance."""
        gone: list[str] = []
        while self.waiting and len(gone) < MAX_STEPS:
            gone.append(self._let_go(self.waiting[0]))
        return self._stop(gone)

    def _chosen(self, step: str, process: str | None, rank: int | None, part: int | None) -> Waiting:
        if step != "*":
            step_spec(step)
        wanted = Pattern(step, None, process, rank, None, part)
        found = next((waiting for waiting in self.waiting if wanted.matches(waiting.point)), None)
        if found is None:
            there = "; ".join(map(waiting_words, self.waiting)) or f"nobody, {self._why_nobody()}"
            asked = [word for word in (step if step != "*" else "", process or "") if word]
            asked += [f"rank {rank}"] if rank is not None else []
            raise LabError(f"no held step {' of '.join(asked)}".rstrip() + f"; who waits: {there}")
        return found

    def _let_go(self, chosen: Waiting, fault: FaultKind | None = None) -> str:
        if fault is not None:
            _check_fault(fault, chosen)
        self.lab.let_go(chosen, Decision(fault))
        self.waiting = self.lab.settle()
        return waiting_words(chosen) + (f" [fault: {fault}]" if fault else "")

    def _why_nobody(self) -> str:
        if self.done:
            return "the request is over; `reset` begins anew"
        return "only a timer can go on; `fire` it, or `reset`"

    # ---- what goes wrong outside of a step -----------------------------------------------------------------------

    def cancel(self, rank: int) -> Stop:
        """A rank's client gives the request up."""
        self.lab.call(f"rank{rank}", "cancel", req_id=REQUEST)
        return self._settled(f"the client of rank{rank} gives the request up")

    def fire(self, timer: str = "cleanup", *, rank: int | None = None) -> Stop:
        """A timer fires now: the encoders' `cleanup`, a rank's `deadline`, or anybody's `quarantine`."""
        if timer == "deadline" and rank is None:
            raise UsageError("a deadline is a rank's; say whose: fire('deadline', rank=0)")
        encoders = [f"enc{index}" for index in range(self.lab.config.encoders)]
        where = encoders if rank is None else [f"rank{rank}"]
        fired = sum(self.lab.call(name, "fire", timer=timer, labels={}) for name in where)
        return self._settled(f"{fired} {timer} timer(s) of {', '.join(where)} fired")

    def kill(self, process: str) -> Stop:
        """A process is killed, as a crash would."""
        if process not in self.lab.processes:
            raise UsageError(f"no process {process!r}; there are {', '.join(self.lab.processes)}")
        self.lab.kill(process)
        return self._settled(f"{process} is killed")

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every rank has its answer."""
        return not self.lab.pending

    @property
    def events(self) -> list[Event]:
        return self.lab.events

    @property
    def breaches(self) -> list[Breach]:
        """The invariants broken so far."""
        return self.lab.breaches

    def look(self) -> Stop:
        """Where the request stands; lets nothing go."""
        return self._stop([])

    def state(self, *, addresses: bool = False) -> State:
        """What every process holds; what changed since the last look is marked."""
        return self.lab.state(addresses=addresses)

    def draw(self, kind: str = "sequence", **options: Any) -> Drawing:
        """A `sequence`, `timeline` or `architecture` diagram of what happened so far, in order, without times."""
        if kind == "sequence":
            options = {"everyone": [name for name in self.lab.processes if name != "reference"]} | options
        return draw(kind, _timeless(self.lab.shown), self.breaches, self.waiting, **options)

    def outcome(self) -> dict[str, str]:
        """How the request ended on each rank, in a line each; empty while it runs."""
        if not self.done:
            return {}
        expected = self._reference() if "reference" in self.lab.processes else None
        answers = self.lab.result(REQUEST)
        return {rank: self._named(_outcome(answer, self.events, expected)) for rank, answer in answers.items()}

    def _named(self, text: str) -> str:
        """Processes by their names instead of the ports they have in this run."""
        for name, process in self.world.processes.items():
            for fact in ("session", "url"):
                text = text.replace(str(process.facts.get(fact) or name), name)
        return text

    @property
    def good(self) -> bool:
        """Whether nothing has gone wrong so far: no broken invariant, and no rank whose request failed."""
        answers = self.lab.result(REQUEST).values() if self.done else ()
        return not self.breaches and not any(isinstance(answer, BaseException) for answer in answers)

    def _reference(self) -> list[int]:
        items = [("IMAGE", ref) for ref in self.items] + [("VIDEO", ref) for ref in self._videos]
        answer = self.lab.call("reference", "reference", items=items, prompt=self._prompt, max_new_tokens=8)
        return list(answer["tokens"])

    def _settled(self, what: str) -> Stop:
        self.waiting = self.lab.settle()
        return self._stop([what])

    def _stop(self, gone: Sequence[str], means: str = "") -> Stop:
        world = WorldState.at(self.lab.shown)
        changed, self.world = changed_lines(world, self.world), world
        stop = Stop(tuple(gone), tuple(changed), tuple(self.waiting), tuple(self._notes()), means)
        for watcher in self.watchers:
            watcher(stop)
        return stop

    def _notes(self) -> list[str]:
        """What is new to say: the outcome once, what is left once nothing waits any more, broken invariants."""
        notes: list[str] = []
        if self.done and not self._told:
            self._told = True
            notes += [f"{rank} {said}" for rank, said in self.outcome().items()]
        if self.done and not self.waiting and not self._counted:
            self._counted = True
            notes.append(_left(self.lab.census()))
        breaches = self.breaches
        notes += [f"broken: {b.number} [{b.invariant}] {b.message}" for b in breaches[self._breaches :]]
        self._breaches = max(self._breaches, len(breaches))
        return notes if self.waiting or self.done else [*notes, self._why_nobody()]

    def __repr__(self) -> str:
        config = self.lab.config
        where = "over" if self.done else f"{len(self.waiting)} held"
        names = ", ".join(item.rpartition("/")[2] for item in self.items + self._videos)
        return f"Stepper({names}, tp={config.tp}, {config.profile}, {where})"


def faults_for(waiting: Waiting) -> list[FaultKind]:
    """What can go wrong at a held step; nothing at its end, which has happened."""
    if waiting.point.phase == "end":
        return []
    return [fault for fault, steps in FAULTS.items() if waiting.point.step in steps]


def _left(census: dict[str, dict[str, int]]) -> str:
    """What the processes hold after the end; what waits for a timer is told apart."""
    left = ", ".join(f"{count} {kind}" for kind, count in leaks_of(census).items())
    timed = [name for name, counts in census.items() if counts.get("timed")]
    aside = f"; set aside until a timer fires: memory of {' and '.join(timed)}" if timed else ""
    return f"left behind: {left or 'nothing'}{aside}"


def _timeless(events: Sequence[Event]) -> list[Event]:
    """Without clock and without how long each step was held: here the reader's hand is the clock."""
    return [msgspec.structs.replace(event, t=index, held_ms=None) for index, event in enumerate(events)]


def _close_aside(lab: Lab) -> None:
    """End the processes of a stepper that nobody can reach any more; the collector may run on the lab's own thread."""
    threading.Thread(target=lab.close, name="epdlab-close", daemon=True).start()


def _defaults(items: Sequence[str]) -> dict[str, Any]:
    """What a stepper's lab is unless told otherwise: pictures need a model, and a folder they may come from."""
    chosen: dict[str, Any] = {"deadline_s": NEVER_S, "send_timeout_s": NEVER_S, "quarantine_s": NEVER_S}
    if items[0].startswith("bytes:"):
        return chosen | {"model": "synthetic"}
    local = [str(Path(item).resolve().parent) for item in items if "://" not in item and not item.startswith("data:")]
    root = {"media_root": os.path.commonpath(local)} if local else {}
    return chosen | {"model": "tiny", "reference": True} | root


def _check_fault(fault: FaultKind, waiting: Waiting) -> None:
    step = waiting.point.step
    if fault not in FAULTS:
        raise UsageError(f"no fault {fault!r} for a held step; use {', '.join(FAULTS)}")
    if waiting.point.phase == "end":
        raise UsageError(f"{step} has happened and waits at its end; a fault strikes at a begin")
    if fault not in faults_for(waiting):
        raise UsageError(f"{fault} does not go with {step}; it goes with {', '.join(FAULTS[fault])}")


def _outcome(answer: Any, events: Sequence[Event], expected: list[int] | None) -> str:
    if isinstance(answer, BaseException):
        return f"failed, {one_line(answer).partition(';')[0]}"
    ready = {e.part or 0: e.data["digest"] for e in events if e.step == "embedding.ready" and e.data}
    same = "equal" if answer["digests"] == [ready[part] for part in sorted(ready)] else "DIFFERENT"
    said = f"received {answer['bytes']:,} bytes, {same} at both ends"
    if expected is None:
        return said
    return f"{said}; tokens {answer['tokens']}, {'as' if answer['tokens'] == expected else 'NOT as'} in one process"
