"""Invariants about the hand-off: wrong_bytes, false_ack, lost_embedding, leak, unfinished.

Keeps, per part and rank, what was encoded, written, acked and asked for. Memory is `memory_checks`' business.
"""

from __future__ import annotations

from collections.abc import Callable

from epdlab.steps import Event

from .breach import Breach, breach
from .spans import times

Ask = tuple[str | None, int | None, int | None]
Part = tuple[str | None, int | None]
Request = tuple[str | None, int | None]

ENCODE_FAILED = "encode failed"
TIMED = "timed"


class HandoffChecks:
    """Feeds on events of requests, parts and acks of all processes."""

    def __init__(self, report: Callable[[Breach], None]) -> None:
        self._report = report
        self._ready: dict[Part, tuple[str, int]] = {}
        self._written: dict[Ask, tuple[str, int]] = {}
        self._outcomes: dict[Ask, list[tuple[int | str | None, int]]] = {}
        self._encoded: set[Part] = set()
        self._gone: set[Part] = set()
        self._served: set[Ask] = set()
        self._lost: set[Ask] = set()
        self._acked: dict[Request, int] = {}
        self._started: dict[Request, tuple[int, str]] = {}
        self._finished: set[Request] = set()
        self._deadlines: dict[Request, int] = {}
        self._errors: dict[str | None, list[tuple[int, int | None, str]]] = {}
        self._census: dict[str, tuple[int, Event]] = {}
        self._last_finish = -1

    # ---- parts on the encoder ------------------------------------------------------------------------------------

    def ready(self, event: Event, index: int) -> None:
        part = (event.req, event.part)
        self._encoded.add(part)
        if event.data is not None and "digest" in event.data:
            self._ready[part] = (event.data["digest"], index)

    def described(self, event: Event, index: int) -> None:
        if event.result == "ok":
            self._encoded.add((event.req, event.part))

    def released(self, event: Event, index: int) -> None:
        if event.data is not None and event.data.get("why") == ENCODE_FAILED:
            self._gone.add((event.req, event.part))
            self._errors.setdefault(event.req, []).append((index, None, ENCODE_FAILED))

    def timer_fires(self, event: Event, index: int) -> None:
        timer = (event.data or {}).get("timer")
        if timer == "cleanup":
            self._gone.add((event.req, event.part))
        elif timer == "deadline":
            self._deadlines[(event.req, event.rank)] = index

    def write_begins(self, event: Event, index: int) -> None:
        ready = self._ready.get((event.req, event.part))
        if ready is not None:
            self._written[(event.req, event.part, event.rank)] = ready

    def write_ends(self, event: Event, index: int) -> None:
        self._outcomes.setdefault((event.req, event.part, event.rank), []).append((event.result, index))

    def acked(self, event: Event, index: int) -> None:
        """Each ack answers for one write: a successful one that no ack has claimed yet, else the latest."""
        ask = (event.req, event.part, event.rank)
        outcomes = self._outcomes.get(ask, [])
        good = next((outcome for outcome in outcomes if outcome[0] == 0), None)
        answered = good or (outcomes[-1] if outcomes else None)
        if answered is not None:
            outcomes.remove(answered)
        if event.result != "ok":
            return
        self._served.add(ask)
        if good is None:
            how = "no write at all" if answered is None else f"a write that ended with {answered[0]}"
            proof = (index,) if answered is None else (answered[1], index)
            self._report(breach("false_ack", f"{_part(event)}: rank {event.rank} was acked for {how}", proof, *ask))

    # ---- a rank's request ----------------------------------------------------------------------------------------

    def started(self, event: Event, index: int) -> None:
        self._started[(event.req, event.rank)] = (index, event.process)

    def pulled(self, event: Event, index: int) -> None:
        if event.result == "ok":
            self._acked[(event.req, event.rank)] = index

    def read(self, event: Event, index: int) -> None:
        ask, digest = (event.req, event.part, event.rank), (event.data or {}).get("digest")
        expected = self._written.get(ask) or self._ready.get((event.req, event.part))
        acked = self._acked.get((event.req, event.rank))
        if acked is None or expected is None or digest is None or digest == expected[0]:
            return
        text = f"{_part(event)}: rank {event.rank} was acked and reads {digest}, the embedding is {expected[0]}"
        self._report(breach("wrong_bytes", text, (expected[1], acked, index), *ask))

    def finished(self, event: Event, index: int) -> None:
        request, result = (event.req, event.rank), str(event.result)
        self._finished.add(request)
        self._last_finish = index
        if not result.startswith("deadline"):
            return
        fired = self._deadlines.get(request, index)
        for at, rank, error in self._errors.get(event.req, ()):
            if at < fired and rank in (None, event.rank):
                text = f"{event.req} on rank {event.rank} ended by its deadline, although {error!r} was known before"
                self._report(breach("unfinished", text, (at, index), event.req, None, event.rank))
                return

    def failed(self, event: Event, index: int) -> None:
        """Any step that ended with an error."""
        error = str(event.result)
        if event.req is None or error == "dropped" or error.startswith("CancelledError"):
            return
        self._errors.setdefault(event.req, []).append((index, event.rank, error.partition(":")[0]))
        if error.startswith("lost_embedding") and event.step in ("send.lookup", "send.post"):
            self._lookup_failed(event, index)

    def _lookup_failed(self, event: Event, index: int) -> None:
        ask, part = (event.req, event.part, event.rank), (event.req, event.part)
        late = part in self._gone or (event.req, event.rank) in self._finished or ask in self._served
        if late or part not in self._encoded or ask in self._lost:
            return
        self._lost.add(ask)
        proof = (self._ready[part][1], index) if part in self._ready else (index,)
        text = f"{_part(event)}: rank {event.rank} asked in time and found no embedding"
        self._report(breach("lost_embedding", text, proof, *ask))

    # ---- the end of the trace ------------------------------------------------------------------------------------

    def counted(self, event: Event, index: int) -> None:
        self._census[event.process] = (index, event)

    def died(self, process: str) -> None:
        """A killed process finishes no request and holds nothing."""
        self._started = {req: start for req, start in self._started.items() if start[1] != process}
        self._census.pop(process, None)

    def conclude(self) -> None:
        """No event follows: what was left open is left for good."""
        for (req, rank), (index, process) in self._started.items():
            if (req, rank) not in self._finished:
                self._report(breach("unfinished", f"{req} on {process} never ended", (index,), req, None, rank))
        for process, (index, event) in self._census.items():
            kinds = [times(n, kind) for kind, n in (event.data or {}).items() if kind != TIMED and _held(n)]
            if index > self._last_finish and kinds:
                text = f"{process} still holds {', '.join(kinds)} after the last request"
                self._report(breach("leak", text, (index,), None))


def _held(count: object) -> bool:
    return isinstance(count, int) and count > 0


def _part(event: Event) -> str:
    return f"{event.req} part {event.part}"
