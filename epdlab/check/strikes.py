"""How a fault strikes a world: at a step, through the gate's answer, or at any time, by a move of its own.

A striker keeps nothing: whether it has struck stands in the world's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..steps import Decision, Phase, Point
from .model_engine import FAILED, OK, covered
from .scenario import FIRST, GONE, Fault, Move

if TYPE_CHECKING:
    from .turn import State, Timer, Turn

OTHER = "other"
LATE = "late"


class Striker:
    """No fault at all, and the base of those there are."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault

    def moves(self, state: State) -> list[Move]:
        """The fault's own move, while it can come."""
        return []

    def strike(self, turn: Turn) -> None:
        """The fault's own move is taken."""

    def decide(self, turn: Turn, point: Point) -> object:
        """The gate's answer to a step that is taken: None, a Decision, or LATE."""
        return None

    def taken(self, turn: Turn, point: Point) -> None:
        """A step was taken, and everybody waits again."""

    def finish(self, turn: Turn) -> None:
        """The last request is over."""


class AtStep(Striker):
    """Strikes the first step that matches its target."""

    ANSWERS: ClassVar[dict[str, object]] = {
        "transfer_fails": Decision("fail", FAILED),
        "transfer_late": LATE,
        "send_repeated": Decision("repeat"),
        "ack_lost": Decision("drop"),
        "register_refused": Decision("fail", -7),
    }

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.target, self._answer = fault.target, self.ANSWERS[fault.kind]

    def decide(self, turn: Turn, point: Point) -> object:
        if turn.state.struck or not self.target.matches(point):
            return None
        turn.state.struck = True
        turn.touch(("fault",), "w")
        return self._answer


class RegisterRefused(AtStep):
    """The engine answers -7; another owner's region, half as long, starts at the same address, and is written from."""

    def taken(self, turn: Turn, point: Point) -> None:
        asked = next((event for event in turn.events if event.step == "mr.register" and event.fault == "fail"), None)
        if asked is None:
            return
        assert asked.address is not None and asked.bytes is not None
        process = turn.world.names.index(asked.process)
        span = {"address": asked.address, "bytes": asked.bytes // 2}
        turn.state.claim = {"req": OTHER, "region": f"{asked.process}.{OTHER}#1"} | span
        turn.feed(process, ("claim", asked.address, asked.bytes // 2))
        turn.note(process, "mr.register", "end", result=OK, **turn.state.claim)
        turn.note(process, "transfer.write", "begin", **turn.state.claim)

    def finish(self, turn: Turn) -> None:
        process, claim = turn.world.names.index(self.target.process), turn.state.claim
        if claim is None or process in turn.state.dead:
            return
        held = covered(turn.state.regions[process], claim["address"], claim["bytes"])
        turn.feed(process, ("claim", claim["address"], 0))
        turn.note(process, "transfer.write", "end", result=OK if held else FAILED, **claim)
        turn.note(process, "mr.deregister", "end", result=OK if held else -3, **claim)


class AnyTime(Striker):
    """Strikes by a move of its own, which can come as long as it is `possible`."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.target, target = fault.target, fault.target
        req = None if fault.kind == "encoder_dies" else FIRST
        phase: Phase = "begin" if target.step == "timer.fire" else "note"
        self._moves = [Move(target.process, target.step, phase, req, target.part, target.rank, -1)]

    def moves(self, state: State) -> list[Move]:
        return self._moves if not state.struck and self.possible(state) else []

    def possible(self, state: State) -> bool:
        raise NotImplementedError


class RankCancels(AnyTime):
    """The client of rank 0 gives its first request up."""

    def possible(self, state: State) -> bool:
        return (1, 0) not in state.ended

    def strike(self, turn: Turn) -> None:
        turn.feed(1, ("cancel", 0))


class TimerFires(AnyTime):
    """A deadline, or the encoder's clean-up timer, fires early."""

    NAMES: ClassVar[dict[str, str]] = {"receiver_deadline": "deadline", "cleanup_timer": "cleanup"}

    def possible(self, state: State) -> bool:
        return self._timer(state) is not None

    def strike(self, turn: Turn) -> None:
        timer = self._timer(turn.state)
        assert timer is not None
        turn.fire(timer, at_once=True)

    def _timer(self, state: State) -> Timer | None:
        assert self.fault is not None
        name, target = self.NAMES[self.fault.kind], self.fault.target
        wanted = (FIRST, target.part, target.rank)
        for timer in state.timers:
            labels = dict(timer.labels)
            if timer.name == name and (labels.get("req"), labels.get("part"), labels.get("rank")) == wanted:
                return timer
        return None


class EncoderDies(AnyTime):
    """The encoder's process is killed: it does nothing any more, its peers learn it, its writes may land late."""

    def possible(self, state: State) -> bool:
        return True

    def strike(self, turn: Turn) -> None:
        turn.note(0, "process.kill", "begin", fault="kill")
        turn.touch(("process",), "w")
        turn.state.dead |= {0}
        turn.state.waiting = {move: held for move, held in turn.state.waiting.items() if held.process != 0}
        turn.state.timers = tuple(timer for timer in turn.state.timers if timer.process != 0)
        for flying in turn.state.writes.values():
            turn.lands_late(flying)
        turn.state.writes = {}
        for client, number in sorted(turn.state.posts):
            turn.touch(("inbox", turn.world.names[client]), "c")
            turn.feed(client, ("answer", number, GONE))
        turn.state.posts = frozenset()


_AT_STEP: dict[str, type[AtStep]] = {"register_refused": RegisterRefused}
_ANY_TIME: dict[str, type[AnyTime]] = {
    "rank_cancels": RankCancels,
    "receiver_deadline": TimerFires,
    "cleanup_timer": TimerFires,
    "encoder_dies": EncoderDies,
}


def striker_of(fault: Fault | None) -> Striker:
    """What makes this fault happen in a world."""
    if fault is None:
        return Striker()
    if fault.kind in _ANY_TIME:
        return _ANY_TIME[fault.kind](fault)
    return _AT_STEP.get(fault.kind, AtStep)(fault)
