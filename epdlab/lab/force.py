"""A whole schedule, forced on a running lab: the points it names are held, and let go in its order.

A move is a `Point`, or anything with its attributes; `nth` -1 marks a move from outside (a cancel, a timer that
fires early, a kill), `fault` and `value` make a step go wrong. What a schedule does not name runs freely.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from ..control import Pattern
from ..errors import LabError, UsageError
from ..steps import STEPS, Decision, FaultKind, Phase, step_spec

if TYPE_CHECKING:
    from .controller import Waiting
    from .lab import Lab

OUTSIDE = -1
FAULTS: dict[FaultKind, tuple[str, ...]] = {
    "fail": tuple(STEPS),
    "drop": ("ack.push",),
    "repeat": ("send.post", "ack.push", "transfer.write", "mr.register", "mr.deregister"),
    "kill": tuple(STEPS),
}
"""What can go wrong at a held step, and at which steps. A step that is late is one that is held."""


class Move(msgspec.Struct, frozen=True, omit_defaults=True):
    """One move of a schedule. None matches anything."""

    process: str
    step: str
    phase: Phase = "begin"
    req: str | None = None
    part: int | None = None
    rank: int | None = None
    nth: int = 0
    fault: FaultKind | None = None
    value: float | None = None

    @property
    def pattern(self) -> Pattern:
        return Pattern(self.step, self.phase, self.process, self.rank, self.req, self.part)

    @property
    def outside(self) -> bool:
        return self.nth == OUTSIDE or self.step in ("request.cancel", "process.kill")

    def __str__(self) -> str:
        said = {"req": self.req, "part": self.part, "rank": self.rank}
        labels = [f"{name} {value}" for name, value in said.items() if value is not None]
        return f"{self.process} {self.step} {self.phase}" + (f" [{', '.join(labels)}]" if labels else "")


def moves_of(schedule: Iterable[Any]) -> list[Move]:
    """A schedule's moves, from objects that have their attributes.

    Raises:
        UsageError: a step that does not exist, or something that is no move.
    """
    fields = Move.__struct_fields__
    found = []
    for number, given in enumerate(schedule, start=1):
        known = {name: getattr(given, name) for name in fields if hasattr(given, name)}
        try:
            move = msgspec.convert(known, Move)
        except msgspec.ValidationError as error:
            raise UsageError(f"move {number} of the schedule is no move ({error}); give process, step, phase") from None
        step_spec(move.step)
        found.append(move)
    return found


def force(lab: Lab, schedule: Iterable[Any], timeout_s: float) -> list[Waiting]:
    """Hold what the schedule names and nothing else, let it go in its order, then let everything run.

    A request sent before must be held at an early step (`encode.post`), so that it has not run past the schedule.

    Returns:
        What was let go.

    Raises:
        LabError: a move did not come up within `timeout_s`; names it, and who waits where instead.
    """
    moves = moves_of(schedule)
    lab.hold_only(list(dict.fromkeys(move.pattern for move in moves if not move.outside)))
    gone: list[Waiting] = []
    for number, move in enumerate(moves, start=1):
        if move.outside:
            _from_outside(lab, move)
            continue
        try:
            gone.append(lab.step_like(move.pattern, timeout_s, Decision(move.fault, move.value)))
        except LabError as error:
            raise LabError(f"move {number} of {len(moves)}, {move}, did not come up: {error}") from None
    lab.run()
    return gone


def _from_outside(lab: Lab, move: Move) -> None:
    if move.step == "request.cancel":
        lab.call(move.process, "cancel", req_id=move.req)
    elif move.step == "process.kill":
        lab.kill(move.process)
    elif move.step == "timer.fire":
        timer = "deadline" if move.process.startswith("rank") else "cleanup"
        labels = {name: getattr(move, name) for name in ("req", "part") if getattr(move, name) is not None}
        lab.call(move.process, "fire", timer=timer, labels=labels)
    else:
        raise UsageError(f"{move} cannot happen from outside; cancel a request, fire a timer or kill a process")
