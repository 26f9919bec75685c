"""The eight invariants as one pass over any list of events, real, replayed or modelled.

`Checker` takes events one by one, in time order; `check` judges a whole trace. What they are called and what they
mean stands in `breach`, how they are found in `memory_checks` and `handoff_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from epdlab.steps import Event

from .breach import INVARIANTS, Breach, Invariant
from .handoff_checks import HandoffChecks
from .memory_checks import MemoryChecks

__all__ = ["INVARIANTS", "Breach", "Checker", "Invariant", "check", "check_one", "counts"]

Handler = Callable[[Event, int], None]


class Checker:
    """Judges a trace event by event.

    Attributes:
        breaches: what was found so far, in the order it happened.
    """

    __slots__ = ("_begin", "_end", "_handoff", "_index", "_memory", "_note", "breaches")

    def __init__(self) -> None:
        self.breaches: list[Breach] = []
        self._index = 0
        memory = self._memory = MemoryChecks(self.breaches.append)
        handoff = self._handoff = HandoffChecks(self.breaches.append)
        self._begin: dict[str, Handler] = {
            "transfer.write": self._write_begins,
            "timer.fire": handoff.timer_fires,
            "part.release": handoff.released,
        }
        self._end: dict[str, Handler] = {
            "mr.register": memory.registered,
            "mr.deregister": memory.deregistered,
            "landing.alloc": memory.allocated,
            "landing.free": memory.freed,
            "transfer.write": self._write_ends,
            "encode.post": handoff.described,
            "ack.push": handoff.acked,
            "ack.pull": handoff.pulled,
            "landing.read": handoff.read,
        }
        self._note: dict[str, Handler] = {
            "embedding.ready": handoff.ready,
            "transfer.land": memory.lands_late,
            "request.start": handoff.started,
            "request.finish": handoff.finished,
            "process.census": handoff.counted,
        }

    def feed(self, event: Event) -> None:
        """Take the next event."""
        index, phase = self._index, event.phase
        self._index = index + 1
        if phase == "begin":
            handler = self._begin.get(event.step)
            if event.fault == "kill":
                self._died(event.process)
        elif phase == "end":
            handler, result = self._end.get(event.step), event.result
            if result != "ok" and result.__class__ is str:
                self._handoff.failed(event, index)
        else:
            handler = self._note.get(event.step)
        if handler is not None:
            handler(event, index)

    def conclude(self) -> list[Breach]:
        """The trace is over: adds what only its end shows (leak, unfinished). All breaches."""
        self._handoff.conclude()
        return self.breaches

    def _write_begins(self, event: Event, index: int) -> None:
        self._memory.write_begins(event, index)
        self._handoff.write_begins(event, index)

    def _write_ends(self, event: Event, index: int) -> None:
        self._memory.write_ends(event, index)
        self._handoff.write_ends(event, index)

    def _died(self, process: str) -> None:
        self._memory.died(process)
        self._handoff.died(process)


def check(events: Iterable[Event], complete: bool = True) -> list[Breach]:
    """Every breach of a trace, in the order it happened.

    Args:
        events: in time order.
        complete: False for a run that goes on: what is open may still end, so leak and unfinished are not judged.
    """
    checker = Checker()
    feed = checker.feed
    for event in events:
        feed(event)
    return checker.conclude() if complete else checker.breaches


def check_one(invariant: Invariant | str, events: Iterable[Event]) -> list[Breach]:
    """The breaches of one invariant."""
    key = invariant if isinstance(invariant, str) else invariant.key
    return [breach for breach in check(events) if breach.invariant == key]


def counts(breaches: Iterable[Breach]) -> dict[str, int]:
    """How often each invariant was broken, for JSON; only those that were."""
    found = Counter(breach.invariant for breach in breaches)
    return {key: found[key] for key in INVARIANTS if found[key]}
