"""The exercises of notebook 00: each runs an answer on a lab of its own, draws what it did, and judges it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..steps import Event
from ..trace.architecture import architecture
from ..trace.render import Drawing
from ..trace.sequence import sequence
from .demo import leaks_of
from .exercise import Answer, Tried, attempt, body_lines, judge
from .lab import Lab

ASKED = ("bytes:4096:1", "bytes:65536:2")
COUNTED = ((2, 1), (3, 2))
STEPS_COUNTED = ("encode.forward", "transfer.write", "ack.push")
WORDS = ("vision forwards", "writes", "acks")


def try_ask(answer: Answer) -> Tried:
    """`ask(lab, items)`: both items in one request, and every rank's answer."""
    with Lab(tp=2, encoders=2, model="synthetic") as lab:
        given, error = attempt(answer, lab, list(ASKED))
        for req_id in lab.pending:
            lab.result(req_id)
        census, events = lab.census(), lab.events

    def wrong() -> str | None:
        asked = {event.req for event in events if event.step == "request.start"}
        if error is not None or len(asked) != 1:
            return error or f"{len(asked)} requests were sent; one takes both items"
        return _not_both(given) or (f"left behind: {leaks_of(census)}" if leaks_of(census) else None)

    said = "one request, a part for each encoder, and both parts in the memory of both ranks"
    return Tried(sequence(events, everyone=list(census), title="what ask did"), judge(answer, 2, wrong, said))


def _not_both(given: Any) -> str | None:
    """What an answer lacks that should tell of both items on both ranks."""
    if not isinstance(given, dict) or set(given) != {"rank0", "rank1"}:
        return f"it returned {given!r:.60}, not an answer for each rank"
    total = sum(int(item.split(":")[1]) for item in ASKED)
    got = {rank: told.get("bytes", 0) if isinstance(told, dict) else 0 for rank, told in given.items()}
    short = [f"{rank} received {nbytes:,} bytes of {total:,}" for rank, nbytes in got.items() if nbytes != total]
    return "; ".join(short) or None


def try_count(answer: Answer) -> Tried:
    """`count(tp, parts)`: vision forwards, writes and acks of one request, before it runs. Held against two runs."""
    runs = {case: _run(*case) for case in COUNTED}
    said = {case: attempt(answer, *case) for case in COUNTED}

    def wrong() -> str | None:
        for (tp, parts), (given, error) in said.items():
            found = error or _miscounted(given, _counts(runs[tp, parts]))
            if found:
                return found if error else f"with {tp} ranks and {parts} part(s), {found}"
        return None

    drawing = _counted(*COUNTED[-1], runs[COUNTED[-1]], answered=body_lines(answer) > 0)
    return Tried(drawing, judge(answer, 1, wrong, f"{len(runs)} runs have as many as you said"))


def _counted(tp: int, parts: int, events: Sequence[Event], answered: bool) -> Drawing:
    """A run and its counts; for who has not answered yet, only its processes."""
    if not answered:
        started = [event for event in events if event.step == "process.start"]
        return architecture(started, title=f"{tp} ranks, {parts} encode servers")
    counts = ", ".join(f"{n} {word}" for n, word in zip(_counts(events), WORDS, strict=True))
    return architecture(events, title=f"{tp} ranks, {parts} parts: {counts}")


def _run(tp: int, parts: int) -> list[Event]:
    with Lab(tp=tp, encoders=parts, model="synthetic") as lab:
        lab.request(*(f"bytes:4096:{part}" for part in range(parts)))
        lab.result()
        return lab.events


def _counts(events: Sequence[Event]) -> tuple[int, ...]:
    ended = [event.step for event in events if event.phase == "end"]
    return tuple(ended.count(step) for step in STEPS_COUNTED)


def _miscounted(given: Any, counted: tuple[int, ...]) -> str | None:
    if not isinstance(given, tuple) or len(given) != len(counted):
        return f"you returned {given!r:.60}, not ({', '.join(WORDS)})"
    pairs = zip(given, WORDS, counted, strict=True)
    return next((f"you said {said} {word}, the run has {real}" for said, word, real in pairs if said != real), None)


def try_first(answer: Answer) -> Tried:
    """`first(events)`: the rank whose write ended first, from the trace. Held against a run for either rank."""
    runs = {f"rank{rank}": _served_first(rank) for rank in (0, 1)}
    said = {rank: attempt(answer, events) for rank, events in runs.items()}

    def wrong() -> str | None:
        for rank, (given, error) in said.items():
            if error is not None or given != rank:
                return error or f"you said {given!r} of a run in which {rank}'s write ended first"
        return None

    rank, events = next(iter(runs.items()))
    drawing = sequence(events, title=f"a run in which {rank}'s write ended first")
    return Tried(drawing, judge(answer, 2, wrong, "in both runs that rank's write ended first"))


def _served_first(rank: int) -> list[Event]:
    """The trace of a run in which this rank's write begins last and ends first."""
    with Lab(tp=2, model="synthetic") as lab:
        lab.hold("transfer.write", phase=None)
        lab.hold("ack.pull", rank=rank)
        lab.request("bytes:65536:1")
        for begins in (1 - rank, rank):
            lab.step(step="transfer.write", rank=begins)
        lab.step(step="transfer.write", rank=rank)
        lab.step(step="ack.pull", rank=rank)
        lab.run()
        lab.result()
        return lab.events
