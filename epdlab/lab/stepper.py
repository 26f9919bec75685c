"""`Stepper`: one request, every step of it held, let go one by one. What the panel, the prompt and a notebook share.

    with Stepper("bytes:1048576:1", tp=2) as stepper:
        stepper.step()                              # the next step, in the order of the protocol
        stepper.until("transfer.write", rank=1)     # step until this one waits
        stepper.step(rank=1, fault="fail")          # this rank's next step, and it goes wrong
        stepper.run()                               # let go of everything

Between two calls the lab is at rest, so the same calls always give the same stops. No widget passes through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..control import Pattern
from ..errors import LabError, UsageError, one_line
from ..rules import DEFAULT_PROFILE
from ..steps import STEPS, Decision, Event, FaultKind, Phase, step_spec
from ..trace.breach import Breach
from ..trace.render import Drawing
from ..trace.state import WorldState
from .controller import Waiting
from .lab import Lab
from .view import State, waiting_words

NEVER_S = 86_400.0
MAX_STEPS = 5_000
REQUEST = "req1"

FAULTS: dict[FaultKind, tuple[str, ...]] = {
    "fail": ("*",),
    "kill": ("*",),
    "drop": ("ack.push",),
    "repeat": ("send.post", "ack.push", "transfer.write", "mr.register", "mr.deregister"),
}
"""What can go wrong at a held step, and at which steps. A step that waits longer is simply held longer."""


@dataclass(frozen=True)
class Stop:
    """Where the request stands after a call of the stepper. Prints as a few lines.

    Attributes:
        gone: the steps that were let go. waiting: those that are held now, the next one first.
        changed: what changed in the processes, as lines.
        notes: what else happened: broken invariants, ends, the outcome. means: what a single step is about.
    """

    gone: tuple[str, ...]
    changed: tuple[str, ...]
    waiting: tuple[Waiting, ...]
    notes: tuple[str, ...] = ()
    means: str = ""

    def text(self) -> str:
        lines = _listed("let go", _folded(self.gone)) + _listed("means", [self.means] if self.means else [])
        lines += _listed("changed", self.changed) + _listed("waits", [waiting_words(w) for w in self.waiting])
        return "\n".join(lines + _listed("note", self.notes)) or "nothing happened, and nobody waits"

    __str__ = __repr__ = text


def _listed(word: str, lines: Sequence[str]) -> list[str]:
    return [f"{word if k == 0 else '':<8} {line}" for k, line in enumerate(lines)]


def _folded(gone: Sequence[str]) -> list[str]:
    """Many steps are told by their first and last."""
    return list(gone) if len(gone) <= 3 else [gone[0], f"... {len(gone) - 2} more steps ...", gone[-1]]


class Stepper:
    """One request through a lab of its own, held at every step.

    Attributes:
        waiting: the steps that are held, the next one first.

    Args:
        item: a picture (path), or `bytes:N:SEED` for an embedding of N bytes without a model.
        tp: prefill ranks. profile: whose rules. prompt: what the language model is asked.
        options: any other field of `LabConfig`. Deadlines and clean-up timers are a day away: `fire` fires them.
    """

    def __init__(
        self,
        item: str = "bytes:1048576:1",
        *,
        tp: int = 2,
        profile: str = DEFAULT_PROFILE,
        prompt: str = "Describe what you see.",
        **options: Any,
    ) -> None:
        self.item, self.prompt = item, prompt
        made = item.startswith("bytes:")
        given = {"model": "synthetic" if made else "tiny", "reference": not made, "deadline_s": NEVER_S}
        given |= {"send_timeout_s": NEVER_S, "quarantine_s": NEVER_S}
        self._options = given | options | {"tp": tp, "profile": profile}
        self._breaches = 0
        self._told = False
        self.lab = self._started()

    def _started(self) -> Lab:
        lab = Lab(**self._options).start()
        try:
            lab.hold("*", phase=None)
            lab.request(self.item, prompt=self.prompt, req_id=REQUEST)
            self.waiting = lab.settle()
        except BaseException:
            lab.close()
            raise
        self._breaches, self._told, self._seen = 0, False, WorldState.at(lab.events)
        return lab

    def close(self) -> None:
        """End every process. Idempotent."""
        self.lab.close()

    def reset(self, item: str | None = None, **options: Any) -> Stop:
        """Begin anew, in fresh processes; with another item, `tp`, `profile` ... if given."""
        self.close()
        self.item = item or self.item
        self._options |= options
        self.lab = self._started()
        return self._stop([])

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
            fault: `fail`, `drop`, `repeat`, or `kill` its process.

        Raises:
            UsageError: no such step, or it cannot go wrong like this. LabError: nobody waits (there).
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
                raise LabError(f"{step} did not come up in {len(gone)} steps; `draw` shows what did, `reset` begins anew")
            gone.append(self._let_go(self.waiting[0]))
        return self._stop(gone)

    def run(self) -> Stop:
        """Let go of everything that is held, and of all that follows."""
        self.lab.run()
        self.waiting = self.lab.settle()
        return self._stop(["everything that was held, and all that followed"])

    def _chosen(self, step: str, process: str | None, rank: int | None, part: int | None) -> Waiting:
        if step != "*":
            step_spec(step)
        wanted = Pattern(step, None, process, rank, None, part)
        found = next((waiting for waiting in self.waiting if wanted.matches(waiting.point)), None)
        if found is None:
            there = "; ".join(map(waiting_words, self.waiting)) or f"nobody: {self._why_nobody()}"
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
        return "the request is over; `reset` begins anew" if self.done else "only a timer can go on; `fire` it, or `reset`"

    # ---- what goes wrong outside of a step ---------------------------------------------------------------------

    def cancel(self, rank: int) -> Stop:
        """A rank's client gives the request up."""
        self.lab.call(f"rank{rank}", "cancel", req_id=REQUEST)
        return self._outside(f"the client of rank{rank} gives the request up")

    def fire(self, timer: str = "cleanup", *, rank: int | None = None) -> Stop:
        """A timer fires now: the encoders' `cleanup`, a rank's `deadline`, or anybody's `quarantine`."""
        if timer == "deadline" and rank is None:
            raise UsageError("a deadline is a rank's; say whose: fire('deadline', rank=0)")
        encoders = [f"enc{k}" for k in range(self.lab.config.encoders)]
        where = [f"rank{rank}"] if rank is not None else encoders
        fired = sum(self.lab.call(name, "fire", timer=timer, labels={}) for name in where)
        return self._outside(f"{fired} {timer} timer{'s' * (fired != 1)} of {', '.join(where)} fire{'s' * (fired == 1)}")

    def kill(self, process: str) -> Stop:
        """A process is killed, as a crash would."""
        if process not in self.lab.processes:
            raise UsageError(f"no process {process!r}; there are {', '.join(self.lab.processes)}")
        self.lab.kill(process)
        return self._outside(f"{process} is killed")

    def _outside(self, what: str) -> Stop:
        self.waiting = self.lab.settle()
        return self._stop([what])

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

    def state(self, *, addresses: bool = False) -> State:
        """What every process holds; what changed since the last look is marked."""
        return self.lab.state(addresses=addresses)

    def draw(self, kind: str = "sequence", **options: Any) -> Drawing:
        """A `sequence`, `timeline` or `architecture` diagram of what happened so far."""
        return self.lab.draw(kind, **options)

    def outcome(self) -> dict[str, str]:
        """How the request ended on each rank, in one line each; empty while it runs."""
        if not self.done:
            return {}
        results = self.lab.result(REQUEST)
        expected = self._reference() if "reference" in self.lab.processes else None
        return {rank: _outcome(answer, self.events, expected) for rank, answer in results.items()}

    def _reference(self) -> list[int]:
        answer = self.lab.call(
            "reference", "reference", items=[("IMAGE", self.item)], prompt=self.prompt, max_new_tokens=8
        )
        return list(answer["tokens"])

    def _stop(self, gone: Sequence[str], means: str = "") -> Stop:
        world = WorldState.at(self.lab.events)
        changed = changed_lines(world, self._seen)
        self._seen = world
        return Stop(tuple(gone), tuple(changed), tuple(self.waiting), tuple(self._notes()), means)

    def _notes(self) -> list[str]:
        breaches = self.breaches
        notes = [f"broken: {b.number} [{b.invariant}] {b.message}" for b in breaches[self._breaches :]]
        self._breaches = max(self._breaches, len(breaches))
        if self.done and not self._told:
            self._told = True
            notes += [f"{rank}: {said}" for rank, said in self.outcome().items()]
        if not self.waiting and not self.done:
            notes.append(self._why_nobody())
        return notes

    def __repr__(self) -> str:
        where = "over" if self.done else f"{len(self.waiting)} held"
        config = self.lab.config
        return f"Stepper({self.item.rpartition('/')[2]}, tp={config.tp}, {config.profile}, {where})"


def changed_lines(world: WorldState, before: WorldState) -> list[str]:
    """What changed between two points of a trace, as `+ enc0 regions mr#1: live ...`."""
    new, old = world.lines(), before.lines()
    marks = world.diff(before)
    ordered = [key for key in [*new, *old] if key in marks]
    return [f"{marks[key]} {' '.join(key)}: {(new if key in new else old)[key]}" for key in dict.fromkeys(ordered)]


def _check_fault(fault: FaultKind, waiting: Waiting) -> None:
    step = waiting.point.step
    if fault not in FAULTS:
        raise UsageError(f"no fault {fault!r} for a held step; use {', '.join(FAULTS)}")
    if waiting.point.phase == "end":
        raise UsageError(f"{step} has happened already and waits at its end; a fault strikes at a begin")
    if FAULTS[fault] != ("*",) and step not in FAULTS[fault]:
        raise UsageError(f"{step} cannot {fault}; {fault} goes with {', '.join(FAULTS[fault])}")


def faults_for(waiting: Waiting) -> list[FaultKind]:
    """What can go wrong at a held step."""
    if waiting.point.phase == "end":
        return []
    return [fault for fault, steps in FAULTS.items() if steps == ("*",) or waiting.point.step in steps]


def _outcome(answer: Any, events: Sequence[Event], expected: list[int] | None) -> str:
    if isinstance(answer, BaseException):
        return f"failed, {one_line(answer)}"
    sent = [e.data["digest"] for e in events if e.step == "embedding.ready" and e.data]
    same = "the embedding's bytes" if answer["digests"] == sent else "OTHER bytes than the embedding's"
    if expected is None:
        return f"received {same}"
    tokens = "as" if answer["tokens"] == expected else "NOT as"
    return f"received {same}, tokens {answer['tokens']} {tokens} in one process"
