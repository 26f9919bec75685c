"""A world of one encode server and its ranks: which moves can come next, and what follows from each.

Its processes are `machine`s: the very sender and receiver, held at every step. When all of them wait, the steps that
wait are the moves; `take` lets one of them go on. Time advances only when no move is left. A write, a post and a
forward have two moves, a begin and an end, and other moves may come between them. Half of a write's bytes land at its
begin and half at its end; those of a late write land by a move of their own, `transfer.land`.

A world never changes a `State`: what was taken back is taken anew from the state before it. It takes no decision of
its own: the explorer, a schedule or a test drives it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ..steps import Event, Phase, Point
from .footprints import Thing, Touched, add
from .machine import EncoderMachine, Gate, Input, Outcome, RankMachine, Writing
from .machine_ports import MEMORY_BYTES, Message
from .model_engine import BASE, FAILED, OK, POISON, Mode, Regions, cells, covered
from .remembered import History, Remembered
from .scenario import ENCODER, Fault, Move, Scenario
from .strikes import GONE, LATE, Striker, striker_of

TICK_NS = 1000
About = tuple[str | None, int | None, int | None]


class Held(NamedTuple):
    """A step at the gate of a process; `birth` is a bit mask of the moves it stems from."""

    process: int
    gate: Gate
    birth: int


class Timer(NamedTuple):
    """A timer that is set."""

    due: float
    process: int
    number: int
    name: str
    seconds: float
    labels: tuple[tuple[str, Any], ...]


class Flying(NamedTuple):
    """A write in flight: who writes to whom, and whether it can still succeed."""

    writing: Writing
    process: int
    peer: int
    failed: bool
    late: bool = False


@dataclass(slots=True)
class State:
    """A quiet moment. Its parts are replaced, never changed.

    Attributes:
        histories, causes, memory, regions: one per process; causes tells the moves that each input stems from.
        waiting: the steps that wait at a gate, in the order they came.
        sockets: whose each open port is. posts: those not answered yet. ended: requests that are over.
        writes: in flight. late: writes that have answered and will land. moves: how many there were.
    """

    histories: tuple[History, ...]
    causes: tuple[tuple[int, ...], ...]
    memory: tuple[bytes, ...]
    regions: tuple[Regions, ...]
    waiting: dict[Move, Held] = field(default_factory=dict)
    timers: tuple[Timer, ...] = ()
    sockets: dict[int, int] = field(default_factory=dict)
    posts: frozenset[tuple[int, int]] = frozenset()
    writes: dict[About, Flying] = field(default_factory=dict)
    late: dict[Move, Flying] = field(default_factory=dict)
    ended: frozenset[tuple[int, int]] = frozenset()
    dead: frozenset[int] = frozenset()
    now: float = 0.0
    moves: int = 0
    struck: bool = False
    claim: dict[str, Any] | None = None

    def copy(self) -> State:
        return State(
            self.histories,
            self.causes,
            self.memory,
            self.regions,
            self.waiting,
            self.timers,
            self.sockets,
            self.posts,
            self.writes,
            self.late,
            self.ended,
            self.dead,
            self.now,
            self.moves,
            self.struck,
            self.claim,
        )


T = TypeVar("T")


def _replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


class Turn:
    """One move being taken: the state it leads to, the events, and what it touched."""

    __slots__ = ("_inputs", "cause", "defects", "events", "state", "touched", "world")

    def __init__(self, world: World, state: State, cause: int) -> None:
        self.world, self.state, self.cause = world, state.copy(), cause
        self.events: list[Event] = []
        self.touched: Touched = {}
        self.defects: list[str] = []
        self._inputs: deque[tuple[int, Input, int]] = deque()

    def touch(self, thing: Thing, mode: Mode) -> None:
        add(self.touched, thing, mode)

    def note(self, process: int, step: str, phase: Phase, **labels: Any) -> None:
        """Record what no process records itself."""
        self.events.append(Event(0, self.world.names[process], step, phase, **labels))

    # ---- processes -----------------------------------------------------------------------------------------------

    def feed(self, process: int, happens: Input) -> None:
        """Something happens to a process, and whatever follows from it, in all processes."""
        inputs = self._inputs
        inputs.append((process, happens, self.cause))
        while inputs:
            process, happens, cause = inputs.popleft()
            if process not in self.state.dead:
                self._feed(process, happens, cause)

    def _feed(self, process: int, happens: Input, cause: int) -> None:
        state = self.state
        history = self.world.processes[process].feed(state.histories[process], happens)
        state.histories = _replaced(state.histories, process, history)
        state.causes = _replaced(state.causes, process, (*state.causes[process], cause))
        out = history.outcome
        self.events += out.events
        if out.touched:
            self._touch_all(out.touched)
        if out.gone:
            gone = set(out.gone)
            state.waiting = {m: h for m, h in state.waiting.items() if h.process != process or h.gate.number not in gone}
        if out.gates:
            self._gates(process, out.gates)
        if out.timers or out.cancelled:
            self._timers(process, out)
        for address, data in out.pokes:
            self.poke(process, address, data)
        for address, nbytes in out.regions:
            self._region(process, address, nbytes)
        if out.writing is not None:
            self._begin_write(process, out.writing)
        if out.ended:
            state.ended |= {(process, number) for number in out.ended}
        self.defects += out.defects
        for message in out.messages:
            self._MESSAGES[message.kind](self, process, message)

    def _touch_all(self, touched: Touched) -> None:
        if self.touched:
            for thing, mode in touched.items():
                add(self.touched, thing, mode)
        else:
            self.touched = dict(touched)

    def _gates(self, process: int, gates: list[Gate]) -> None:
        waiting = dict(self.state.waiting)
        for gate in gates:
            waiting[gate.move] = Held(process, gate, self._stems_from(process, gate.cause))
        self.state.waiting = waiting

    def _stems_from(self, process: int, cause: int) -> int:
        """The moves that inputs of a process (a bit mask) stem from (a bit mask)."""
        causes, moves = self.state.causes[process], 0
        while cause:
            moves |= causes[cause.bit_length() - 1]
            cause ^= 1 << cause.bit_length() - 1
        return moves

    def _timers(self, process: int, out: Outcome) -> None:
        state, cancelled = self.state, out.cancelled
        kept = [t for t in state.timers if t.process != process or t.number not in cancelled]
        new = [Timer(state.now + s.seconds, process, *s) for s in out.timers if s.number not in cancelled]
        state.timers = (*kept, *new)

    def _region(self, process: int, address: int, nbytes: int) -> None:
        regions = {start: size for start, size in self.state.regions[process].items() if start != address}
        if nbytes:
            regions[address] = nbytes
        self.state.regions = _replaced(self.state.regions, process, regions)

    def poke(self, process: int, address: int, data: bytes) -> None:
        """Bytes of a process's memory change."""
        at, memory = address - BASE, self.state.memory[process]
        changed = memory[:at] + data + memory[at + len(data) :]
        self.state.memory = _replaced(self.state.memory, process, changed)

    def fire(self, timer: Timer, at_once: bool) -> None:
        """A timer fires; `at_once`: the step it leads to is not held."""
        self.state.timers = tuple(other for other in self.state.timers if other is not timer)
        self.feed(timer.process, ("timer", timer.number, at_once))

    # ---- messages ------------------------------------------------------------------------------------------------

    def _post(self, process: int, message: Message) -> None:
        cause = self._stems_from(process, message.cause)
        if self.world.mortal:
            self.touch(("process",), "r")
        if 0 in self.state.dead:
            self._inputs.append((process, ("answer", message.number, GONE), cause))
            return
        self.state.posts |= {(process, message.number)}
        path = "/" + message.where.rpartition("/")[2]
        self._inputs.append((0, ("request", path, message.payload, (process, message.number)), cause))

    def _answer(self, process: int, message: Message) -> None:
        if message.number in self.state.posts:
            client, number = message.number
            self.state.posts -= {message.number}
            self.touch(("inbox", self.world.names[client]), "c")
            self._inputs.append((client, ("answer", number, message.payload), self._stems_from(process, message.cause)))

    def _push(self, process: int, message: Message) -> None:
        cause, port = self._stems_from(process, message.cause), int(message.where.rpartition(":")[2])
        self.touch(("port", port), "w")
        open_ = port in self.state.sockets
        if open_:
            self._inputs.append((self.state.sockets[port], ("frame", port, message.payload), cause))
        self._inputs.append((process, ("pushed", message.number, open_), cause))

    def _open(self, process: int, message: Message) -> None:
        self.state.sockets = {**self.state.sockets, message.number: process}

    def _close(self, process: int, message: Message) -> None:
        self.state.sockets = {port: owner for port, owner in self.state.sockets.items() if port != message.number}

    _MESSAGES = {"post": _post, "answer": _answer, "push": _push, "open": _open, "close": _close}

    # ---- writes --------------------------------------------------------------------------------------------------

    def _begin_write(self, process: int, writing: Writing) -> None:
        peer = self.world.names.index(writing.session)
        flying = Flying(writing, process, peer, False)
        flying = flying._replace(failed=not self._possible(flying))
        self._touch_write(flying)
        if not flying.failed:
            self._land(flying, 0, writing.nbytes // 2)
        self.state.writes = {**self.state.writes, _about(writing.point): flying}

    def end_write(self, about: About, late: bool) -> int:
        """The write's code: RDMA's rule once more. A late one answers -1, and lands by a move of its own."""
        flying = self.state.writes[about]
        self.state.writes = {key: other for key, other in self.state.writes.items() if key != about}
        self._touch_write(flying)
        if flying.failed or not self._possible(flying):
            return FAILED
        if late:
            self.lands_late(flying)
            return FAILED
        self._land(flying, flying.writing.nbytes // 2, flying.writing.nbytes)
        return OK

    def lands_late(self, flying: Flying) -> None:
        """From now on the rest of a write's bytes land by a move of their own."""
        point = flying.writing.point
        move = Move(point.process, "transfer.land", "note", point.req, point.part, point.rank, 0)
        self.state.late = {**self.state.late, move: flying}

    def land(self, move: Move) -> None:
        """The rest of a late write lands, unless its peer has withdrawn the destination. Nobody checks its source."""
        flying, self.state.late = self.state.late[move], {m: f for m, f in self.state.late.items() if m != move}
        self._touch_write(flying)
        writing, point = flying.writing, flying.writing.point
        if not flying.failed and covered(self.state.regions[flying.peer], writing.target, writing.nbytes):
            self._land(flying, writing.nbytes // 2, writing.nbytes)
            labels = {"req": point.req, "part": point.part, "rank": point.rank, "region": point.region}
            span = {"address": writing.source, "bytes": writing.nbytes, "target": writing.target}
            self.note(flying.process, "transfer.land", "note", **labels, **span)

    def _possible(self, flying: Flying) -> bool:
        """RDMA's rule: one live region over each side."""
        writing = flying.writing
        source = covered(self.state.regions[flying.process], writing.source, writing.nbytes)
        return source and covered(self.state.regions[flying.peer], writing.target, writing.nbytes)

    def _land(self, flying: Flying, start: int, stop: int) -> None:
        """Bytes [start, stop) arrive, as the source holds them now."""
        at = flying.writing.source - BASE
        self.poke(flying.peer, flying.writing.target + start, self.state.memory[flying.process][at + start : at + stop])

    def _touch_write(self, flying: Flying) -> None:
        writing, names = flying.writing, self.world.names
        for cell in cells(writing.source, writing.nbytes):
            self.touch(("regions", names[flying.process], cell), "r")
        for cell in cells(writing.target, writing.nbytes):
            self.touch(("regions", names[flying.peer], cell), "r")
            self.touch(("memory", names[flying.peer], cell), "w")


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

    def __init__(self, scenario: Scenario, fault: Fault | None = None, processes: list[Remembered] | None = None) -> None:
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
        if point.step == "transfer.write" and point.phase == "end" and _about(point) in turn.state.writes:
            how = turn.end_write(_about(point), late=how is LATE)
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


def _about(point: Point) -> About:
    return point.req, point.part, point.rank
