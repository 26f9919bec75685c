"""A world of one encode server and its ranks: which moves can come next, and what follows from each.

Its processes are `machine`s: the very sender and receiver, held at every step. When all of them wait, the steps that
wait are the moves; `take` lets one of them go on. Time advances only when no move is left. A write, a post and a
forward have two moves, a begin and an end, and other moves may come between them. Half of a write's bytes land at its
begin and half at its end; those of a late write land by a move of their own, `transfer.land`.

A world never changes a `State`: what was taken back is taken anew from the state before it. It takes no decision of
its own: the explorer, a schedule or a test drives it.
"""

from __future__ import annotations

from typing import NamedTuple

from ..steps import Event
from .footprints import Touched
from .machine import EncoderMachine, RankMachine
from .machine_ports import MEMORY_BYTES
from .model_engine import POISON
from .remembered import Remembered
from .scenario import ENCODER, Fault, Move, Scenario
from .strikes import LATE, Striker, striker_of
from .turn import Held, State, Turn, about

TICK_NS = 1000


class Taken(NamedTuple):
    """What a move led to."""

    state: State
    events: list[Event]
    touched: Touched
    defects: list[str]


class World:
    """What can happen in one scenario with one fault or none.

    Args:
        processes: machines of the same scenario that remember, from another world.

    Attributes:
        names: of the processes, the encoder first.
    """

    def __init__(
        self, scenario: Scenario, fault: Fault | None = None, processes: list[Remembered] | None = None
    ) -> None:
        self.scenario = scenario
        self.names = [ENCODER, *(f"rank{rank}" for rank in range(scenario.tp))]
        self.processes = processes or machines(scenario)
        self.striker: Striker = striker_of(fault)
        self.mortal = fault is not None and fault.kind == "encoder_dies"

    def start(self) -> Taken:
        """Every rank takes up its first request."""
        nobody = tuple(process.origin for process in self.processes)
        count = len(self.names)
        memory = (bytes([POISON]) * MEMORY_BYTES,) * count
        turn = Turn(self, State(nobody, ((),) * count, memory, ({},) * count), 0)
        for process in range(1, count):
            turn.feed(process, ("start",))
        return _done(turn)

    def enabled(self, state: State) -> list[Move]:
        """The moves that can come next, in the order they came up; a fault's own move is last."""
        return [*state.waiting, *state.late, *self.striker.moves(state)]

    def take(self, state: State, move: Move) -> Taken:
        """Let a move happen, until everybody waits again."""
        turn = Turn(self, state, 1 << state.moves)
        turn.state.moves += 1
        held = state.waiting.get(move)
        if held is not None:
            turn.state.waiting = {other: waits for other, waits in state.waiting.items() if other != move}
            self._go_on(turn, held)
        elif move in state.late:
            turn.land(move)
        else:
            turn.state.struck = True
            self.striker.strike(turn)
        return _done(turn)

    def sleep(self, state: State) -> Taken | None:
        """Fire the timer that is due next (of several, the one set first); None if there is none."""
        timer = min(state.timers, key=lambda timer: timer.due, default=None)
        if timer is None:
            return None
        turn = Turn(self, state, (1 << state.moves) - 1)
        turn.state.now = timer.due
        turn.fire(timer, at_once=False)
        return _done(turn)

    def finish(self, state: State) -> Taken:
        """The last request is over: every process counts what it still holds."""
        turn = Turn(self, state, 0)
        self.striker.finish(turn)
        for process in range(len(self.names)):
            turn.feed(process, ("census",))
        return _done(turn)

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def _go_on(self, turn: Turn, held: Held) -> None:
        point, striker = held.gate.point, self.striker
        if self.mortal and held.process == 0:
            turn.touch(("process",), "r")
        how = striker.decide(turn, point)
        if point.step == "transfer.write" and point.phase == "end" and about(point) in turn.state.writes:
            how = turn.end_write(point, late=how is LATE)
        elif point.step == "landing.read":
            how = turn.state.memory[held.process]
        turn.feed(held.process, ("take", held.gate.number, how))
        striker.taken(turn, point)


def _done(turn: Turn) -> Taken:
    return Taken(turn.state, turn.events, turn.touched, turn.defects)


def machines(scenario: Scenario) -> list[Remembered]:
    """The processes of a scenario, which have seen nothing yet."""
    ranks = [Remembered(lambda rank=rank: RankMachine(rank, scenario)) for rank in range(scenario.tp)]  # type: ignore[misc]
    return [Remembered(lambda: EncoderMachine(scenario)), *ranks]
