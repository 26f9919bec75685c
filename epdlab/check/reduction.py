"""Search over all orders of a world's moves, without visiting orders that cannot differ.

Depth-first. Orders that differ only in independent moves (`footprints`) are one order. The reduction is dynamic
partial-order reduction with source sets and sleep sets (Abdulla, Aronis, Jonsson, Sagonas, POPL 2014): where two
dependent moves of a run could have come the other way round, that way is tried too. A move that another move takes away
(a cancelled step) is tried before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from ..steps import Event
from .footprints import Thing, Touched, independent
from .model_engine import Mode
from .scenario import Move
from .turn import State
from .world import Taken, World

Reduction = Literal["full", "processes", "none"]


@dataclass(slots=True)
class Node:
    """A quiet moment of the current run, and the move that was taken there.

    Attributes:
        state: of the world. before: the events between the last move and this moment (timers that fired).
        enabled: what can come next, each with the moves before it that brought it up (bit i: the move of node i).
        asleep: moves that need not be tried here, with what they touch. todo: moves to try. tried: those that were.
        move, touched, events: the move of the current run, and what it did. past: the moves that must come before it.
    """

    state: State
    before: list[Event]
    enabled: dict[Move, int]
    asleep: dict[Move, Touched]
    todo: list[Move] = field(default_factory=list)
    tried: set[Move] = field(default_factory=set)
    move: Move | None = None
    touched: Touched = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    past: int = 0

    def next(self) -> Move | None:
        """What to try here next."""
        for move in self.todo:
            if move not in self.tried and move not in self.asleep:
                return move
        return None


@dataclass(frozen=True, slots=True)
class Run:
    """One complete order.

    Attributes:
        nodes: the moments it went through. first, last: the events before and after them.
        strikes: whether the fault struck. defects: errors of the code itself that it met.
    """

    nodes: list[Node]
    first: list[Event]
    last: list[Event]
    strikes: bool
    defects: list[str]

    @property
    def moves(self) -> list[Move]:
        return [node.move for node in self.nodes if node.move is not None]

    def events(self) -> list[Event]:
        """The trace, without times: an invariant needs none."""
        events = list(self.first)
        for node in self.nodes:
            events += node.before
            events += node.events
        return events + self.last

    def past(self, event: int) -> int:
        """The nodes without whose moves this event of the trace would not be, as a bit mask.

        What is only seen after the last move (what is left) takes all of them.
        """
        seen = len(self.first)
        for at, node in enumerate(self.nodes):
            seen += len(node.before) + len(node.events)
            if seen > event:
                return node.past | 1 << at
        return (1 << len(self.nodes)) - 1

    def cone(self, past: int) -> list[Move]:
        """The moves of these nodes, in order: the shortest way to what they lead to."""
        return [node.move for i, node in enumerate(self.nodes) if past >> i & 1 and node.move is not None]

    @property
    def struck(self) -> int:
        """The node at whose move the fault struck, as a bit mask; 0 if it did not."""
        later = [node.state.struck for node in self.nodes[1:]] + [True]
        return 0 if not self.strikes else 1 << later.index(True)


class Search:
    """The orders of a world.

    Args:
        start: a moment to begin at, see `turn.afresh`, and what led there; None: the very start.
        reduction: `full`; `processes`: any two moves of one process, or a write and its rank's moves, depend on each
            other; `none`: every order.

    Attributes:
        runs: complete orders so far. blocked: runs given up because another order covers them.
        states: quiet moments visited. exhausted: every order has been covered.
    """

    def __init__(self, world: World, reduction: Reduction = "full", start: Taken | None = None) -> None:
        self.world, self.reduction = world, reduction
        self.runs = self.blocked = self.states = 0
        self.exhausted = False
        self._first = start or world.start()
        self._nodes: list[Node] = []
        self._last: dict[Thing, list[tuple[int, Mode]]] = defaultdict(list)
        self._arrive(self._first.state, world.enabled(self._first.state), [])

    def __iter__(self) -> Iterator[Run]:
        """Each complete order, once per class of equivalent ones. Judge a run before asking for the next."""
        while not self.exhausted:
            run = None
            while run is None and (move := self._nodes[-1].next()) is not None:
                run = self._go_on(move)
            if run is None:
                self.blocked += 1
            else:
                self.runs += 1
                yield run
            self._back()

    @property
    def covered(self) -> float:
        """Roughly which part of all orders has been covered, 0 to 1; it can be far too high early on."""
        part, share = 0.0, 1.0
        for node in self._nodes:
            share /= max(1, len(node.todo))
            part += share * max(0, len(node.tried) - 1)
        return 1.0 if self.exhausted else part

    def _go_on(self, move: Move) -> Run | None:
        """Take one move at the last node; the run, if it ends there."""
        node, world = self._nodes[-1], self.world
        taken = world.take(node.state, move)
        enabled = world.enabled(taken.state)
        self._took(node, move, taken, enabled)
        state, before = taken.state, []
        while not enabled and (slept := world.sleep(state)) is not None:
            state, enabled = slept.state, world.enabled(slept.state)
            before += slept.events
        if enabled:
            self._arrive(state, enabled, before)
            return None
        end = world.finish(state)
        return Run(self._nodes, self._first.events, before + end.events, state.struck, taken.defects + end.defects)

    def random_move(self, random: Random) -> Run | None:
        """Take any move at the last node; the run, if it ends there."""
        return self._go_on(random.choice(list(self._nodes[-1].enabled)))

    def _took(self, node: Node, move: Move, taken: Taken, left: list[Move]) -> None:
        node.move, node.events = move, taken.events
        node.touched = _by_process(move) if self.reduction == "processes" else taken.touched
        node.tried.add(move)
        if self.reduction != "none":
            self._order(len(self._nodes) - 1, node)
            node.todo += [m for m in node.enabled if m not in left and m not in node.tried and m not in node.todo]

    def _arrive(self, state: State, enabled: list[Move], before: list[Event]) -> None:
        """The next node: what was enabled before keeps its birth; what is new was brought up by the last move."""
        self.states += 1
        if not self._nodes:
            node = Node(state, [], dict.fromkeys(enabled, 0), {})
        else:
            last = self._nodes[-1]
            slept = state.now > last.state.now
            born = {m: last.enabled[m] if m in last.enabled else self._birth(state, m, slept) for m in enabled}
            asleep = {m: f for m, f in last.asleep.items() if m in born and independent(f, last.touched)}
            node = Node(state, before, born, asleep)
        node.todo = enabled if self.reduction == "none" else [m for m in enabled if m not in node.asleep][:1]
        self._nodes.append(node)

    def _birth(self, state: State, move: Move, slept: bool) -> int:
        """What must come before a move that is new: what brought it up, and what its task did and heard."""
        depth = len(self._nodes)
        if slept:
            return (1 << depth) - 1
        held = state.waiting.get(move)
        birth, causes = 0, 1 << depth - 1 | (0 if held is None else held.birth)
        while causes:
            latest = causes.bit_length() - 1
            birth |= self._nodes[latest].past | 1 << latest
            causes &= ~birth
        return birth

    # ---- what must come before what ------------------------------------------------------------------------------

    def _order(self, depth: int, node: Node) -> None:
        """Find the moves before this one that it depends on; where one could have come after it, try that."""
        assert node.move is not None
        nodes, born = self._nodes, node.enabled[node.move]
        past, hidden, rivals = born, 0, []
        for thing, mode in node.touched.items():
            entries = self._last[thing]
            for index, other in reversed(entries):
                if other == mode and mode in "rc":
                    continue
                past |= nodes[index].past | 1 << index
                if not born >> index & 1 and not (mode == "j" and other == "c"):
                    hidden |= nodes[index].past
                    rivals.append(index)
                if other in "wj":
                    break
            entries.append((depth, mode))
        node.past = past
        for index in set(rivals):
            if not hidden >> index & 1:
                self._reverse(index, depth, node)

    def _reverse(self, index: int, depth: int, late: Node) -> None:
        """Make sure that `late` also comes before the move at `index`."""
        node, between, first = self._nodes[index], 0, []
        for at in range(index + 1, depth + 1):
            other = self._nodes[at] if at < depth else late
            if at == depth or not other.past >> index & 1:
                if not other.past & between:
                    first.append(other.move)
                between |= 1 << at
        if any(m in node.tried or m in node.asleep or m in node.todo for m in first):
            return
        assert first[-1] in node.enabled
        node.todo.append(first[-1])

    def _back(self) -> None:
        """Go back to the last node where something is left to try."""
        nodes = self._nodes
        while nodes:
            node = nodes[-1]
            if node.move is not None:
                if self.reduction != "none":
                    for thing in node.touched:
                        self._last[thing].pop()
                    node.asleep[node.move] = node.touched
                node.move = None
            if node.next() is not None:
                return
            nodes.pop()
        self.exhausted = True


def walk(world: World, random: Random) -> Run:
    """One order, drawn at random."""
    search = Search(world)
    while (run := search.random_move(random)) is None:
        pass
    return run


def _by_process(move: Move) -> Touched:
    """What a move touches if nothing is known of it but its process: all of that, and of a rank it works for."""
    return {("process", move.process): "w", ("rank", move.rank): "w"}
