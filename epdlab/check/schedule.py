"""The schedule file: which moves, in which order, lead to a breach. Versioned JSON; it replays in the model.

After the last move of a schedule whatever waits goes on in the order it came, to the end.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from ..errors import UsageError
from ..modality import Modality
from ..steps import Event, Phase, step_spec
from ..trace.invariants import Breach, check
from .quiet import quiet
from .scenario import FAULTS, FIRST, Fault, Move, Scenario, Target, fault_kind
from .turn import State
from .world import TICK_NS, Taken, World

VERSION = 1
MAX_BYTES = 1024 * 1024


class ScheduledMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """One move: a step that is let go, or a fault's own move.

    Attributes:
        fault: the kind of fault that strikes here. nth: which one, of moves with equal labels; 0 is the first.
    """

    process: str
    step: str
    phase: Phase = "begin"
    req: str | None = None
    part: int | None = None
    rank: int | None = None
    fault: str | None = None
    nth: int = 0

    @property
    def move(self) -> Move:
        own = self.fault is not None and FAULTS[self.fault].strike == "any_time"
        return Move(self.process, self.step, self.phase, self.req, self.part, self.rank, -1 if own else self.nth)

    def __str__(self) -> str:
        about = [f"{key} {value}" for key, value in (("part", self.part), ("rank", self.rank)) if value is not None]
        words = [self.process, self.step, self.phase, self.req or "", *about, f"[{self.fault}]" if self.fault else ""]
        return " ".join(word for word in words if word)


class Expected(msgspec.Struct, frozen=True):
    """A breach the schedule shows."""

    invariant: str
    message: str


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A scenario, the moves to take, and what they show.

    Attributes:
        profile, tp, requests, parts, modality, pool: the scenario, see `scenario.Scenario`.
        fault: the kind of fault that strikes, at the move that names it.
        breaches: what a replay shows, in the order it happens.
    """

    profile: str
    tp: int
    requests: int
    parts: int
    moves: list[ScheduledMove]
    fault: str | None = None
    modality: Modality = Modality.IMAGE
    pool: bool = False
    breaches: list[Expected] = []
    v: int = VERSION

    @property
    def scenario(self) -> Scenario:
        return Scenario(self.profile, self.tp, self.requests, self.parts, self.modality, self.pool)

    def struck(self) -> Fault | None:
        """The fault, aimed at the move that names it."""
        for move in self.moves:
            if move.fault is not None:
                target = Target(move.process, move.step, move.phase, move.part, move.rank)
                return Fault(move.fault, target)
        return None


class Replayed(msgspec.Struct, frozen=True):
    """What a schedule led to in the model.

    Attributes:
        events: the whole trace, with virtual times. breaches: of the invariants.
        moves: what was taken, the schedule's moves first. defects: errors of the code itself.
    """

    events: list[Event]
    breaches: list[Breach]
    moves: list[Move]
    defects: list[str]


def schedule_of(scenario: Scenario, fault: Fault | None, moves: list[Move]) -> Schedule:
    """A schedule of these moves, with the fault at the move it strikes; without it, if it strikes none of them."""
    recorded, struck = [], False
    for move in moves:
        hits = fault is not None and not struck and _strikes(fault, move)
        struck = struck or hits
        kind = fault.kind if fault is not None and hits else None
        recorded.append(ScheduledMove(*move[:6], fault=kind, nth=max(move.nth, 0)))  # type: ignore[arg-type]
    return Schedule(
        scenario.profile,
        scenario.tp,
        scenario.requests,
        scenario.parts,
        recorded,
        fault.kind if fault is not None and struck else None,
        scenario.modality,
        scenario.pool,
    )


def _strikes(fault: Fault, move: Move) -> bool:
    return fault.target.matches(move) if fault.at_step else move.nth < 0


# ---- files -----------------------------------------------------------------------------------------------------------


def save(schedule: Schedule, path: Path) -> None:
    """Write the file; one move per line, to be read and edited."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(schedule), indent=2) + b"\n")


def load(path: Path) -> Schedule:
    """Read a schedule file.

    Raises:
        UsageError: it is not there, no schedule, truncated, of another version, names what does not exist, or does not
            fit its profile. The message says where, and what mends it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); make a schedule with `epdlab explore`") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is over {MAX_BYTES} bytes, which no schedule is; is it another file?")
    try:
        schedule = msgspec.json.decode(data, type=Schedule)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is no schedule: {error}; see `epdlab explore --json` for one") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no JSON ({error}); is it truncated? Write it anew with `epdlab explore`") from None
    validate(schedule)
    return schedule


def validate(schedule: Schedule) -> None:
    """Check a schedule against the steps, the faults, and its own profile.

    Raises:
        UsageError: what is wrong, and what mends it.
    """
    if schedule.v != VERSION:
        raise UsageError(f"schedule version {schedule.v}, ours is {VERSION}; make it anew with `epdlab explore`")
    schedule.scenario.checked()
    if not schedule.moves:
        raise UsageError("the schedule has no moves; is it truncated?")
    for number, move in enumerate(schedule.moves, start=1):
        try:
            step_spec(move.step)
            if move.fault is not None:
                fault_kind(move.fault)
        except UsageError as error:
            raise UsageError(f"move {number}: {error}") from None
    named = [move.fault for move in schedule.moves if move.fault is not None]
    if named != [schedule.fault] * len(named) or len(named) > 1 or (schedule.fault is not None and not named):
        raise UsageError(f"the schedule's fault is {schedule.fault}, its moves name {named}; one move names it, once")
    for number, move in enumerate(schedule.moves, start=1):
        if move.fault is not None and not _can_strike(move):
            raise UsageError(f"move {number}: {move.fault} strikes {FAULTS[move.fault].step} of {FIRST}, not {move}")
    _follow(schedule)


def _can_strike(move: ScheduledMove) -> bool:
    assert move.fault is not None
    return move.step == FAULTS[move.fault].step and move.req in (FIRST, None)


# ---- replay ----------------------------------------------------------------------------------------------------------


def replay(schedule: Schedule) -> Replayed:
    """Take the schedule's moves in the model, then whatever waits, to the end."""
    return _follow(schedule)


def _follow(schedule: Schedule) -> Replayed:
    with quiet(), closing(World(schedule.scenario, schedule.struck())) as world:
        return _to_the_end(schedule, world)


def _to_the_end(schedule: Schedule, world: World) -> Replayed:
    taken = world.start()
    tape = _Tape()
    tape.add(taken)
    for number, wanted in enumerate(schedule.moves, start=1):
        taken = _awake(world, taken, tape)
        if wanted.move not in world.enabled(taken.state):
            raise UsageError(_unfit(schedule, number, world, taken.state))
        taken = tape.take(world, taken.state, wanted.move)
    while True:
        taken = _awake(world, taken, tape)
        waiting = [*taken.state.waiting, *taken.state.late]
        if not waiting:
            break
        taken = tape.take(world, taken.state, waiting[0])
    tape.add(world.finish(taken.state))
    return Replayed(tape.events, check(tape.events), tape.moves, tape.defects)


class _Tape:
    """The moves taken, and the events with their times: each a tick after the one before."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.events: list[Event] = []
        self.defects: list[str] = []

    def take(self, world: World, state: State, move: Move) -> Taken:
        self.moves.append(move)
        return self.add(world.take(state, move))

    def add(self, taken: Taken) -> Taken:
        for event in taken.events:
            at = int(taken.state.now * 1e9) + (len(self.events) + 1) * TICK_NS
            self.events.append(msgspec.structs.replace(event, t=at))
        self.defects += taken.defects
        return taken


def _awake(world: World, taken: Taken, tape: _Tape) -> Taken:
    """Let time advance while nothing waits."""
    while not (taken.state.waiting or taken.state.late):
        slept = world.sleep(taken.state)
        if slept is None:
            break
        taken = tape.add(slept)
    return taken


def _unfit(schedule: Schedule, number: int, world: World, state: State) -> str:
    can = [str(ScheduledMove(*move[:6])) for move in world.enabled(state)]  # type: ignore[arg-type]
    return (
        f"move {number} ({schedule.moves[number - 1]}) cannot come here with profile {schedule.profile}; "
        f"what can: {', '.join(can) or 'nothing, the requests are over'}; was the schedule made for another profile?"
    )
