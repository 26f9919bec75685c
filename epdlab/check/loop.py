"""Virtual time: a minimal asyncio loop that runs until nothing is ready, and a clock whose timers fire when told to.

Tasks and futures are asyncio's own. There is no selector and no thread: whoever drives the loop decides what happens
next, so the same decisions always give the same run.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

_current_tasks: dict[Any, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]


class VirtualLoop(asyncio.AbstractEventLoop):  # the rest of a loop raises NotImplementedError there
    """Runs callbacks in the order they became ready; its time stands still.

    It keeps the *cause* of every task: a bit mask of the inputs the task was made by, taken on by, and heard of.

    Attributes:
        inputs: how many inputs there have been; input i has bit i.
        tasks: every task ever made here.
    """

    def __init__(self) -> None:
        self.inputs = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self.causes: dict[asyncio.Task[Any] | None, int] = {None: 0}
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def enter(self) -> Any:
        """Make this the running loop; what was before, for `leave`."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        return outer

    def leave(self, outer: Any) -> None:
        events._set_running_loop(outer)

    def run_ready(self) -> None:
        """Run until nothing is ready: every task waits for something. The loop must be entered."""
        ready = self._ready
        while ready:
            callback, args = ready.popleft()
            callback(*args)

    def abandon(self) -> None:
        """Let go of every task that has not ended, without running it any further."""
        self._ready.clear()
        outer = self.enter()
        for task in self.tasks:  # it grows while tasks clean up
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
        self.leave(outer)
        self.tasks.clear()
        self.causes.clear()
        self._ready.clear()

    def running(self) -> asyncio.Task[Any] | None:
        """The task that runs now."""
        return _current_tasks.get(self)

    def cause(self) -> int:
        """The cause of the task that runs now, and the input it runs by."""
        return self.causes[self.running()] | self.now_bit

    def heard(self, cause: int) -> None:
        """The task that runs now heard of inputs."""
        self.causes[self.running()] |= cause

    @property
    def now_bit(self) -> int:
        return 1 << self.inputs >> 1

    # ---- what asyncio asks of a loop -----------------------------------------------------------------------------

    def time(self) -> float:
        return 0.0

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> None:
        self._ready.append((callback, args))

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task")
        self.tasks.append(task)
        self.causes[task] = self.now_bit
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


def _close(coro: Any) -> None:
    try:
        coro.close()
    except BaseException:  # whatever its clean-up does in a world that has ended
        return
