"""Records what a release asks of the Mooncake engine, beneath its own wrapper, with the engine's raw return codes.

Besides recording it can hold the next write, fail it, and let another owner register memory first. It uses the standard
library only, runs in the process of the release, and knows nothing of SGLang.
"""

from __future__ import annotations

import contextlib
import threading
import time
from contextvars import ContextVar
from typing import Any

CALLER: ContextVar[str | None] = ContextVar("caller", default=None)
"""The session whose /send is being served; empty in timers and background tasks."""

ANY = "*"
"""A hold or a fault for the next write, wherever it goes."""

HOLD_LIMIT_S = 120.0
"""No write stays held longer than this, so that no process is left behind."""


def destination(session: str, address: int) -> str:
    """The key of a landing place, for holds and faults."""
    return f"{session}/{address}"


class Hold:
    """Keeps one write from reaching the engine until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def wait(self) -> None:
        """Called by the write: waits until it is let go."""
        self.let_go.wait(HOLD_LIMIT_S)


class Meeting:
    """Keeps writes from reaching the engine until all of them are there."""

    def __init__(self, count: int) -> None:
        self.missing = count
        self._barrier = threading.Barrier(count)

    def wait(self) -> None:
        """Called by each of the writes."""
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(HOLD_LIMIT_S)

    def call_off(self) -> None:
        """Those that came go on."""
        self._barrier.abort()


class Recorder:
    """The log of one process, and the holds and faults armed in it.

    An event is a flat dict: `op`, `rc`, `began` and `ended` (CLOCK_MONOTONIC nanoseconds), `caller`, and facts.

    Attributes:
        refused: whether a registration of the release was refused since the last `disarm`.
        serving: requests of the hand-off whose reply is not complete.
        answered: /send calls that were answered since the last `disarm`.
        parked: sessions whose /send is kept before the release's app.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._holds: dict[str, Hold] = {}
        self._taken: dict[str, Hold] = {}
        self._faults: dict[str, int] = {}
        self.refused = False
        self.serving = 0
        self.answered = 0
        self.parked: set[str] = set()
        self._meeting: Meeting | None = None

    def note(self, op: str, *, began: int | None = None, **facts: Any) -> None:
        """Adds one event that ends now; without `began` it has no length."""
        ended = time.monotonic_ns()
        event = {"op": op, "began": began or ended, "ended": ended, "caller": CALLER.get(), **facts}
        with self._lock:
            self._events.append(event)

    def take(self) -> list[dict[str, Any]]:
        """Every event since the last call, in the order in which they ended."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def hold(self, key: str) -> None:
        """The next write to `key` waits for `release`; the ones after it do not."""
        with self._lock:
            self._holds[key] = Hold()

    def gather(self, count: int) -> None:
        """The next `count` writes wait for each other."""
        with self._lock:
            self._meeting = Meeting(count)

    def is_held(self, key: str) -> bool:
        """Whether a write to `key` came and is waiting, or did wait."""
        with self._lock:
            return key in self._taken

    def release(self, keys: list[str]) -> None:
        """Lets the waiting writes to `keys` go, all at once."""
        with self._lock:
            holds = [self._taken[key] for key in keys if key in self._taken]
        for hold in holds:
            hold.let_go.set()

    def disarm(self) -> None:
        """Takes every hold and fault away; writes that are held go on."""
        with self._lock:
            holds = list(self._taken.values())
            self._taken, self._holds, self._faults, self.refused = {}, {}, {}, False
            meeting, self._meeting = self._meeting, None
            self.answered, self.parked = 0, set()
        if meeting is not None:
            meeting.call_off()
        for hold in holds:
            hold.let_go.set()

    def fail(self, key: str, code: int) -> None:
        """The next write to `key` answers `code` and never reaches the engine."""
        with self._lock:
            self._faults[key] = code

    def meet(self, key: str) -> tuple[Hold | Meeting | None, int | None]:
        """Called by every write that begins: what it waits for, the code it answers instead of writing."""
        with self._lock:
            if self._meeting is not None and self._meeting.missing:
                self._meeting.missing -= 1
                return self._meeting, None
            name = key if key in self._holds else ANY
            hold = self._holds.pop(name, None)
            if hold is not None:
                self._taken[name] = hold
            return hold, self._faults.pop(key if key in self._faults else ANY, None)


class RecordedEngine:
    """Sits between a release's wrapper and `mooncake.engine.TransferEngine`; the codes are the engine's own."""

    def __init__(self, raw: Any, recorder: Recorder) -> None:
        self.raw = raw
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def register_memory(self, address: int, length: int, owner: str = "release") -> int:
        """Registers for the release, or for another owner whom a scenario puts in its way."""
        began = time.monotonic_ns()
        code = int(self.raw.register_memory(address, length))
        self._recorder.refused |= code != 0 and owner == "release"
        self._recorder.note("register", began=began, address=address, bytes=length, rc=code, owner=owner)
        return code

    def unregister_memory(self, address: int, owner: str = "release") -> int:
        """Deregisters; see `register_memory`."""
        began = time.monotonic_ns()
        code = int(self.raw.unregister_memory(address))
        self._recorder.note("deregister", began=began, address=address, rc=code, owner=owner)
        return code

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        """One write; it counts as begun when the release asks for it, also while it is held."""
        began = time.monotonic_ns()
        hold, fault = self._recorder.meet(destination(session, target))
        if hold is not None:
            hold.wait()
        code = fault if fault is not None else int(self.raw.transfer_sync_write(session, source, target, length))
        facts = {"address": source, "bytes": length, "rc": code, "session": session, "injected": fault is not None}
        self._recorder.note("transfer", began=began, **facts)
        return code
