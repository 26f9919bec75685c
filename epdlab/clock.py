"""Time for real processes: deadlines and timers on the running asyncio loop.

Timers are named, so that a schedule can fire one early (`LoopClock.fire`). The explorer has its own clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


class LoopTimer:
    """A pending call. `cancel` is idempotent; after firing it does nothing."""

    def __init__(self, clock: LoopClock, name: str, fire: Callable[[], Any], labels: dict[str, Any]) -> None:
        self.name, self.labels = name, labels
        self._clock, self._fire = clock, fire
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self.run)

    def run(self) -> None:
        self.cancel()
        self._fire()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._clock.pending.discard(self)

    def __repr__(self) -> str:
        return f"LoopTimer({self.name}, {self.labels})"


class LoopClock:
    """The clock port over the running loop."""

    def __init__(self) -> None:
        self.pending: set[LoopTimer] = set()

    def now(self) -> float:
        return time.monotonic()

    def timer(self, name: str, seconds: float, fire: Callable[[], Any], **labels: Any) -> LoopTimer:
        timer = LoopTimer(self, name, fire, labels)
        self.pending.add(timer)
        timer.start(seconds)
        return timer

    def fire(self, name: str, **labels: Any) -> int:
        """Fire the pending timers of that name and labels now; how many."""
        due = [t for t in self.pending if t.name == name and labels.items() <= t.labels.items()]
        for timer in due:
            timer.run()
        return len(due)
