"""A schedule file on real processes: the explorer's moves, forced one by one, over the real engine.

Every step is held, as in the model, and each move lets one go. A write is cut in two slices, each needing a live source
region: the first runs at the write's begin, the second at its end, so that half of the bytes land at either, as in the
model. What TCP cannot show is said, and is no failure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..check.schedule import Schedule, ScheduledMove, load
from ..control import Pattern
from ..errors import LabError
from ..modality import Modality
from ..steps import GO, Decision
from ..trace.invariants import check
from .controller import Waiting
from .force import OUTSIDE
from .lab import Lab

PART_BYTES = 1 << 16
DAY_S = 86_400.0
MOVE_TIMEOUT_S = 5.0
MAX_STEPS = 5_000
SLICE = "transfer.slice"

DECISIONS: dict[str, Decision] = {
    "transfer_fails": Decision("fail"),
    "send_repeated": Decision("repeat"),
    "ack_lost": Decision("drop"),
    "register_refused": Decision("fail"),
}
"""What strikes a held step. A write that lands late is no decision: its second slice fails."""

BEYOND_TCP: dict[str, str] = {
    "transfer_late": "over TCP nobody commands the late bytes of a write that has answered -1",
    "register_refused": "a live refusal is injected: no other owner's region lies there that could be withdrawn",
    "encoder_dies": "a killed process writes nothing more over TCP; a card's queue may still hold its write",
}


def replay_live(path: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run a schedule on real processes, and compare what breaks with what the schedule says.

    Returns:
        JSON: ok, profile, moves, expected (invariants), breaches (invariant to messages), missing, and why each of
        these cannot be shown. `ok` if nothing is missing that TCP can show.

    Raises:
        UsageError: no schedule, or it does not fit its profile. LabError: a move did not come up on real processes.
    """
    schedule = load(path)
    pool = schedule.parts * PART_BYTES if schedule.pool else 0
    timers: dict[str, Any] = {"deadline_s": DAY_S, "send_timeout_s": DAY_S, "quarantine_s": DAY_S}
    options: dict[str, Any] = {"model": "synthetic", "tp": schedule.tp, "profile": schedule.profile, "nic_slices": 2}
    with Lab(pool_bytes=pool, **options, **timers) as lab:
        replay = _Replay(lab, schedule, say)
        replay.moves()
        replay.rest()
        breaches = check(lab.shown)
    shown: dict[str, list[str]] = {}
    for breach in breaches:
        shown.setdefault(breach.invariant, []).append(breach.message)
    return _answer(schedule, shown, say)


def _answer(schedule: Schedule, shown: dict[str, list[str]], say: Callable[[str], None]) -> dict[str, Any]:
    expected = list(dict.fromkeys(breach.invariant for breach in schedule.breaches))
    missing = [key for key in expected if key not in shown]
    reason = BEYOND_TCP.get(schedule.fault or "")
    why = dict.fromkeys(missing, reason) if reason else {}
    for key, messages in shown.items():
        say(f"broken: [{key}] {messages[0]}" + (f", and {len(messages) - 1} more" if len(messages) > 1 else ""))
    for key in missing:
        say(f"not shown: [{key}] {why.get(key, 'although TCP can show it')}")
    return {
        "ok": len(why) == len(missing),
        "profile": schedule.profile,
        "moves": len(schedule.moves),
        "expected": expected,
        "breaches": shown,
        "missing": missing,
        "why": why,
    }


class _Replay:
    """One schedule on one running lab. Owns which slice belongs to which write."""

    def __init__(self, lab: Lab, schedule: Schedule, say: Callable[[str], None]) -> None:
        self._lab, self._schedule, self._say = lab, schedule, say
        self._slices: dict[tuple[str | None, int | None, int | None], Waiting] = {}
        lab.hold("*", phase=None)
        for number in range(1, schedule.requests + 1):
            self._request(number)

    def _request(self, number: int) -> None:
        items: dict[Modality, list[str]] = {modality: [] for modality in Modality}
        for part, modality in enumerate(self._schedule.scenario.modalities):
            items[modality].append(f"bytes:{PART_BYTES}:{2 * number + part}")
        for rank in range(self._schedule.tp):
            videos = items[Modality.VIDEO]
            self._lab.request(*items[Modality.IMAGE], videos=videos, req_id=f"q{number}", ranks=[rank])
            self._lab.settle()

    # ---- the moves -----------------------------------------------------------------------------------------------

    def moves(self) -> None:
        """Take the schedule's moves.

        Raises:
            LabError: one did not come up; says which, and who waits instead.
        """
        for number, move in enumerate(self._schedule.moves, start=1):
            self._say(f"{number:>3}  {move}")
            try:
                self._take(move)
            except LabError as error:
                where = f"move {number} of {len(self._schedule.moves)}, {move}"
                raise LabError(f"{where}, did not come up: {error}") from None
            self._lab.settle()

    def _take(self, move: ScheduledMove) -> None:
        if move.step == "transfer.land":
            return
        if move.move.nth == OUTSIDE:
            self._from_outside(move)
        elif move.step == "transfer.write" and move.phase == "end":
            self._write_ends(move)
        else:
            self._let_go(move)

    def _let_go(self, move: ScheduledMove) -> None:
        if move.step == "timer.fire" and not self._waits(move):
            self._fire(move)
        self._lab.step_like(self._pattern(move), MOVE_TIMEOUT_S, DECISIONS.get(move.fault or "", GO))
        if move.step == "transfer.write":
            self._write_begins(move)

    def _waits(self, move: ScheduledMove) -> bool:
        return any(w.point.step == move.step and w.point.process == move.process for w in self._lab.waiting)

    def _write_begins(self, move: ScheduledMove) -> None:
        """The first slice runs now; the second one waits for the write's end."""
        first = self._new_slice()
        if first is not None:
            self._lab.let_go(first)
            second = self._new_slice()
            if second is not None:
                self._slices[move.req, move.part, move.rank] = second

    def _new_slice(self) -> Waiting | None:
        """The slice that waits and belongs to no write yet; None if the write has ended before it."""
        known = {waiting.ticket for waiting in self._slices.values()}
        slices = [waiting for waiting in self._lab.settle() if waiting.point.step == SLICE]
        return next((waiting for waiting in slices if waiting.ticket not in known), None)

    def _write_ends(self, move: ScheduledMove) -> None:
        second = self._slices.pop((move.req, move.part, move.rank), None)
        if second is not None:
            self._lab.let_go(second, Decision("fail") if move.fault == "transfer_late" else GO)
        self._lab.step_like(self._pattern(move), MOVE_TIMEOUT_S)

    @staticmethod
    def _pattern(move: ScheduledMove) -> Pattern:
        return Pattern(move.step, move.phase, move.process, move.rank, move.req, move.part)

    # ---- from outside --------------------------------------------------------------------------------------------

    def _from_outside(self, move: ScheduledMove) -> None:
        if move.step == "request.cancel":
            self._lab.call(move.process, "cancel", req_id=move.req)
        elif move.step == "process.kill":
            self._lab.kill(move.process)
        else:
            self._fire(move)
            self._lab.step_like(self._pattern(move), MOVE_TIMEOUT_S)

    def _fire(self, move: ScheduledMove) -> None:
        """Fire the move's timer: nothing fires by itself here."""
        labels = {name: getattr(move, name) for name in ("req", "part") if getattr(move, name) is not None}
        first = "deadline" if move.process.startswith("rank") else "cleanup"
        if not self._lab.call(move.process, "fire", timer=first, labels=labels):
            self._lab.call(move.process, "fire", timer="quarantine", labels=labels)
        self._lab.settle()

    # ---- what the schedule does not name -------------------------------------------------------------------------

    def rest(self) -> None:
        """Whatever waits goes on in the order it came; then time passes, until nothing is left to fire."""
        self._drain()
        for timer in ("deadline", "cleanup", "quarantine"):
            for name in self._running():
                self._lab.call(name, "fire", timer=timer, labels={})
            self._drain()
        self._lab.run()
        self._lab.census()

    def _drain(self) -> None:
        for _ in range(MAX_STEPS):
            waiting = self._lab.settle()
            if not waiting:
                return
            self._lab.let_go(min(waiting, key=lambda held: held.ticket))
        raise LabError(f"the lab still has steps to take after {MAX_STEPS}; is there a loop in the profile's rules?")

    def _running(self) -> list[str]:
        return [name for name, process in self._lab.processes.items() if process.running]
