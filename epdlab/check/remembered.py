"""What a machine answered before, it need not be asked again: outcomes by all that happened to it until then.

The sender and the receiver run once for every history of their own process; a search then walks the outcomes. A
machine that has gone another way is built anew and led through the history that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .machine import Machine
from .outcome import Input, Outcome

FORGET_AT = 200_000


class History:
    """What happened to one machine so far: its last input, and what followed from it."""

    __slots__ = ("after", "before", "happened", "outcome")

    def __init__(self, before: History | None, happened: Input, outcome: Outcome) -> None:
        self.before, self.happened, self.outcome = before, happened, outcome
        self.after: dict[Input, History] = {}

    def inputs(self) -> list[Input]:
        """All inputs, oldest first."""
        found: list[Input] = []
        node: History | None = self
        while node is not None and node.before is not None:
            found.append(node.happened)
            node = node.before
        return found[::-1]


class Remembered:
    """One process: its histories, and a machine that has gone through one of them.

    Attributes:
        asked, run: how many outcomes were wanted, and how many the machine had to work out.
    """

    def __init__(self, build: Callable[[], Machine]) -> None:
        self._build = build
        self._machine: Machine | None = None
        self._at: History | None = None
        self._known = 0
        self.origin = History(None, (), Outcome())
        self.asked = self.run = 0

    def feed(self, history: History, happens: Input) -> History:
        """The history with one more input."""
        self.asked += 1
        found = history.after.get(happens)
        if found is None:
            machine = self._machine_at(history)
            found = history.after[happens] = History(history, happens, machine.feed(happens))
            self._at = found
            self._remember()
        return found

    def _machine_at(self, history: History) -> Machine:
        if self._machine is None or self._at is not history:
            self.close()
            self._machine = self._build()
            inputs = history.inputs()
            self._machine.lead(inputs)
            self.run += len(inputs)
        self.run += 1
        return self._machine

    def _remember(self) -> None:
        """Bound the memory: forget everything but what somebody still holds."""
        self._known += 1
        if self._known >= FORGET_AT:
            self._known = 0
            self.origin.after.clear()

    def close(self) -> None:
        """Let go of the machine; the histories stay."""
        if self._machine is not None:
            self._machine.close()
            self._machine = None


@contextmanager
def closing_all(processes: Sequence[Remembered]) -> Iterator[None]:
    """Let go of every machine at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.close()
