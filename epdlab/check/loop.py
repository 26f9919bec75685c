"""Virtual time: a minimal asyncio loop that runs until nothing is ready, and a clock whose timers fire when told to.

Tasks and futures are asyncio's own. There is no selector and no thread: whoever drives the loop decides what happens
next, so the same decisions always give the same run.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

Ready = tuple[Callable[..., object], tuple[Any, ...]]


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order they became ready. Time stands still unless `now` is set.

    It keeps the *cause* of every task: a bit mask of the moves the task was made by, passed, and heard of by messages.
    `moves` is how many moves there have been.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.moves = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self.causes: dict[asyncio.Task[Any] | None, int] = {None: 0}
        self._ready: deque[Ready] = deque()

    def run_ready(self) -> None:
        """Run until nothing is ready: every task waits for something."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            ready = self._ready
            while ready:
                callback, args = ready.popleft()
                callback(*args)
        finally:
            events._set_running_loop(outer)

    def abandon(self) -> None:
        """Let go of every task that has not ended, without running it any further."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            for task in self.tasks:  # it grows while tasks clean up
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _close(task.get_coro())
        finally:
            events._set_running_loop(outer)
        self.tasks.clear()
        self._ready.clear()

    def cause(self) -> int:
        """The cause of the task that runs now."""
        return self.causes[asyncio.current_task(self)]

    def heard(self, cause: int) -> None:
        """The task that runs now got a message of that cause."""
        self.causes[asyncio.current_task(self)] |= cause

    # ---- what asyncio asks of a loop -----------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        self._ready.append((callback, args))

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task")
        self.tasks.append(task)
        self.causes[task] = 1 << self.moves >> 1
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error nobody asked for is judged by the trace, not printed."""


def _close(coro: Coroutine[Any, Any, Any] | Any) -> None:
    try:
        coro.close()
    except BaseException:  # whatever its clean-up does in a world that has ended
        return


class VirtualTimer:
    """A pending call (see `ports.Timer`)."""

    def __init__(self, clock: VirtualClock, due: float, name: str, labels: dict[str, Any], fire: Callable[[], Any]):
        self.due, self.process, self.name, self.labels = due, clock.process, name, labels
        self._clock, self._fire = clock, fire

    def cancel(self) -> None:
        if self in self._clock.timers:
            self._clock.timers.remove(self)

    def run(self) -> None:
        """Fire, as the loop's next callback."""
        self.cancel()
        self._clock.loop.call_soon(self._fire)


class VirtualClock:
    """One process's clock over the loop's virtual time. `timers` is shared by all processes of a world."""

    def __init__(self, loop: VirtualLoop, process: str, timers: list[VirtualTimer]) -> None:
        self.loop, self.process, self.timers = loop, process, timers

    def now(self) -> float:
        return self.loop.now

    def timer(self, name: str, seconds: float, fire: Callable[[], Any], **labels: Any) -> VirtualTimer:
        timer = VirtualTimer(self, self.loop.now + seconds, name, labels, fire)
        self.timers.append(timer)
        return timer


def next_due(timers: list[VirtualTimer]) -> VirtualTimer | None:
    """The timer that fires first; of several due together, the one made first."""
    return min(timers, key=lambda timer: timer.due, default=None)
