"""Stateless search over all orders of a world's moves, without visiting orders that cannot differ.

Depth-first, by running the world anew for every order. Orders that differ only in independent moves (`footprints`) are
one order. The reduction is dynamic partial-order reduction with source sets and sleep sets (Abdulla, Aronis, Jonsson,
Sagonas, POPL 2014): where two dependent moves of a run could have come the other way round, that way is tried too. A
move that another move takes away (a cancelled step) is tried before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .footprints import Footprint, Footprints, Thing, Touched, independent
from .model_engine import Mode
from .scenario import ENCODER, Fault, Move, Scenario
from .world import World

Reduction = Literal["full", "processes", "none"]


@dataclass(slots=True)
class Node:
    """A quiet moment of the current run, and the move that was taken there.

    Attributes:
        enabled: what could come next, each with the moves before it that brought it up (bit i: the move of node i).
        asleep: moves that need not be tried here, with their footprints. todo: moves to try. tried: those that were.
        move, touched: the move of the current run, and its footprint. past: the moves that must come before it.
        mark: how many events the trace had after it.
    """

    enabled: dict[Move, int]
    asleep: dict[Move, Footprint]
    todo: list[Move] = field(default_factory=list)
    tried: set[Move] = field(default_factory=set)
    move: Move | None = None
    footprint: Footprint = ()
    touched: Touched = field(default_factory=dict)
    past: int = 0
    mark: int = 0

    def next(self) -> Move | None:
        """What to try here next."""
        for move in self.todo:
            if move not in self.tried and move not in self.asleep:
                return move
        return None


@dataclass(frozen=True, slots=True)
class Run:
    """One complete order: its world, at the end, and the nodes it went through."""

    world: World
    nodes: list[Node]

    @property
    def moves(self) -> list[Move]:
        return [node.move for node in self.nodes if node.move is not None]

    def cone(self, event: int) -> list[Move]:
        """The moves without which this event of the trace would not be, in order: the shortest way to it."""
        at = next((i for i, node in enumerate(self.nodes) if node.mark > event), len(self.nodes) - 1)
        past = self.nodes[at].past | 1 << at
        return [node.move for i, node in enumerate(self.nodes) if past >> i & 1 and node.move is not None]


class Search:
    """The orders of one scenario with one fault or none.

    Args:
        reduction: `full`; `processes`: any two moves of one process, or a write and its rank's moves, depend on each
            other; `none`: every order.

    Attributes:
        runs: complete orders so far. blocked: runs given up because another order covers them.
        states: quiet moments visited. exhausted: every order has been covered.
    """

    def __init__(self, scenario: Scenario, fault: Fault | None = None, reduction: Reduction = "full") -> None:
        self.scenario, self.fault, self.reduction = scenario, fault, reduction
        self.runs = self.blocked = self.states = 0
        self.exhausted = False
        self._nodes: list[Node] = []
        self._last: dict[Thing, list[tuple[int, Mode]]] = defaultdict(list)

    def __iter__(self) -> Iterator[Run]:
        """Each complete order, once per class of equivalent ones. Judge a run before asking for the next."""
        while not self.exhausted:
            world = World(self.scenario, self.fault)
            world.start()
            if self._run(world):
                self.runs += 1
                yield Run(world, self._nodes)
            else:
                self.blocked += 1
            world.close()
            self._back()

    def _run(self, world: World) -> bool:
        """Replay the current path, then go on to an end; False if what follows is covered elsewhere."""
        nodes = self._nodes
        for node in nodes[:-1]:
            assert node.move is not None
            world.quiet()
            world.take(node.move)
        depth = max(0, len(nodes) - 1)
        footprints = Footprints(world)
        while True:
            waited = world.quiet()
            enabled = world.enabled()
            if not enabled:
                world.finish()
                return True
            if depth == len(nodes):
                self.states += 1
                nodes.append(self._node(world, enabled, waited))
            move = nodes[depth].next()
            if move is None:
                return False
            self._take(world, footprints, depth, move)
            depth += 1

    def _node(self, world: World, enabled: list[Move], waited: bool) -> Node:
        """The next node: what was enabled before keeps its birth; what is new was brought up by the last move."""
        if not self._nodes:
            node = Node(dict.fromkeys(enabled, 0), {})
        else:
            last = self._nodes[-1]
            born = {m: last.enabled[m] if m in last.enabled else self._birth(world, m, waited) for m in enabled}
            node = Node(born, {m: f for m, f in last.asleep.items() if m in born and independent(f, last.touched)})
        node.todo = enabled if self.reduction == "none" else [m for m in enabled if m not in node.asleep][:1]
        return node

    def _birth(self, world: World, move: Move, waited: bool) -> int:
        """What must come before a move that is new: what brought it up, and what its task did and heard."""
        depth = len(self._nodes)
        if waited:
            return (1 << depth) - 1
        birth, causes = 0, world.causes.get(move, 0) | 1 << depth - 1
        while causes:
            latest = causes.bit_length() - 1
            birth |= self._nodes[latest].past | 1 << latest
            causes &= ~birth
        return birth

    def _take(self, world: World, footprints: Footprints, depth: int, move: Move) -> None:
        node = self._nodes[depth]
        footprint = footprints.take(move)
        if self.reduction == "processes":
            footprint = _by_process(move)
        node.move, node.footprint, node.touched, node.mark = move, footprint, dict(footprint), len(world.events)
        node.tried.add(move)
        if self.reduction == "none":
            return
        self._order(depth, node)
        lost = set(node.enabled).difference(world.enabled())
        lost.discard(move)
        node.todo += [m for m in node.enabled if m in lost and m not in node.todo]

    # ---- what must come before what ------------------------------------------------------------------------------

    def _order(self, depth: int, node: Node) -> None:
        """Find the moves before this one that it depends on; where one could have come after it, try that."""
        assert node.move is not None
        nodes, born = self._nodes, node.enabled[node.move]
        past, hidden, rivals = born, 0, []
        for thing, mode in node.footprint:
            entries = self._last[thing]
            for index, other in reversed(entries):
                if other == mode != "w":
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
                for thing, _ in node.footprint if self.reduction != "none" else ():
                    self._last[thing].pop()
                if self.reduction != "none":
                    node.asleep[node.move] = node.footprint
                node.move = None
            if node.next() is not None:
                return
            nodes.pop()
        self.exhausted = True


def _by_process(move: Move) -> Footprint:
    """A footprint that needs no insight: a process is one thing; so is what an encoder does to a rank."""
    things: list[tuple[Thing, Mode]] = [(("process", move.process), "w")]
    if move.process == ENCODER:
        things.append((("rank", move.rank), "w"))
    else:
        things.append((("rank", move.rank), "w"))
    return tuple(things)
