"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

One group of tracks per process: its steps, its regions and its landing slots; arrows follow requests, acks and writes
from process to process; breaches stand above all. The format: "Trace Event Format" of Chromium's catapult.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from epdlab.steps import Event

from .breach import Breach
from .spans import Span, lanes, spans

Record = dict[str, Any]

STEPS_TRACK = 1
FIRST_REGION_TRACK = 1000
_OPENS = {"mr.register": "mr.deregister", "landing.alloc": "landing.free"}
_SENT = {"encode.post": "encode.serve", "send.post": "send.serve", "ack.push": "ack.pull"}


def perfetto(events: Sequence[Event], breaches: Sequence[Breach] = ()) -> Record:
    """The trace as one JSON object with `traceEvents`. Times are microseconds from the first event."""
    return {"traceEvents": list(_Writer(events).records(breaches)), "displayTimeUnit": "ms"}


def save_perfetto(events: Sequence[Event], path: Path, breaches: Sequence[Breach] = ()) -> Path:
    """Write the trace as JSON for ui.perfetto.dev."""
    path.write_bytes(msgspec.json.encode(perfetto(events, breaches)))
    return path


class _Writer:
    """Turns spans into records, and gives spans of a process that overlap tracks of their own."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events, self.spans = events, spans(events)
        self.pids = {name: k for k, name in enumerate(lanes(events), start=1)}
        self.origin = events[0].t if events else 0
        self.last = events[-1].t if events else 0
        self._tracks: dict[int, list[int]] = {pid: [] for pid in self.pids.values()}
        self._names: dict[tuple[int, int], str] = {}
        self._region_tracks: dict[tuple[int, str], int] = {}

    def records(self, breaches: Sequence[Breach]) -> Iterable[Record]:
        found = [record for span in self.spans for record in self._span(span)]
        found += self._regions()
        found += self._arrows()
        found += [self._breach(breach) for breach in breaches if breach.events]
        yield from self._metadata()
        yield from found

    def _us(self, t: int) -> float:
        return (t - self.origin) / 1e3

    def _metadata(self) -> Iterable[Record]:
        for name, pid in self.pids.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for (pid, tid), name in self._names.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}

    def _span(self, span: Span) -> Iterable[Record]:
        pid = self.pids[span.first.process]
        base = {"name": span.step, "cat": span.step.partition(".")[0], "pid": pid, "args": _args(span)}
        if span.begin == span.end:
            tid = self._track(pid, span.first.t, span.first.t)
            yield base | {"ph": "i", "s": "t", "ts": self._us(span.first.t), "tid": tid}
            return
        end = self.last if span.end is None else span.last.t
        yield base | {
            "ph": "X",
            "ts": self._us(span.first.t),
            "dur": (end - span.first.t) / 1e3,
            "tid": self._track(pid, span.first.t, end),
        }

    def _track(self, pid: int, begin: int, end: int) -> int:
        """The first track of the process that is free from `begin` on."""
        busy = self._tracks[pid]
        at = next((k for k, until in enumerate(busy) if until <= begin), len(busy))
        busy[at : at + 1] = [end]
        self._names.setdefault((pid, STEPS_TRACK + at), "steps")
        return STEPS_TRACK + at

    def _regions(self) -> Iterable[Record]:
        """Regions and slots, from the moment they are there to the moment they are gone."""
        alive: dict[tuple[str, str, object], Event] = {}
        for span in self.spans:
            event, step = span.last, span.step
            where = event.address if step.startswith("mr.") else event.region
            if step in _OPENS and event.result in (0, "ok") and span.end is not None:
                alive[(_OPENS[step], event.process, where)] = event
            elif step in _OPENS.values() and event.result in (0, "ok"):
                began = alive.pop((step, event.process, where), None)
                if began is not None:
                    yield self._life(began, event.t)
        for began in alive.values():
            yield self._life(began, self.last)

    def _life(self, began: Event, end: int) -> Record:
        pid, name = self.pids[began.process], began.region or "a region"
        tid = self._region_tracks.setdefault((pid, name), FIRST_REGION_TRACK + len(self._region_tracks))
        self._names[(pid, tid)] = name
        args = {"bytes": began.bytes, "req": began.req, "part": began.part}
        return {
            "ph": "X",
            "name": name,
            "cat": "memory",
            "pid": pid,
            "tid": tid,
            "ts": self._us(began.t),
            "dur": (end - began.t) / 1e3,
            "args": args,
        }

    def _arrows(self) -> Iterable[Record]:
        """Flow events from who sends to who takes."""
        sent: dict[tuple[object, ...], list[Event]] = {}
        number = 0
        for event in self.events:
            about = (event.req, event.part, event.rank)
            if event.phase == "begin" and event.step in _SENT:
                sent.setdefault((_SENT[event.step], *about), []).append(event)
            elif event.phase == "begin" and sent.get((event.step, *about)):
                began = sent[(event.step, *about)].pop(0)
                number += 1
                yield self._flow(began, "s", number)
                yield self._flow(event, "f", number) | {"bp": "e"}

    def _flow(self, event: Event, phase: str, number: int) -> Record:
        return {
            "ph": phase,
            "id": number,
            "name": "message",
            "cat": "message",
            "pid": self.pids[event.process],
            "tid": STEPS_TRACK,
            "ts": self._us(event.t),
        }

    def _breach(self, breach: Breach) -> Record:
        event = self.events[breach.events[-1]]
        return {
            "ph": "i",
            "s": "g",
            "name": f"[{breach.invariant}] {breach.message}",
            "cat": "breach",
            "pid": self.pids[event.process],
            "tid": STEPS_TRACK,
            "ts": self._us(event.t),
            "args": {"number": breach.number, "events": list(breach.events)},
        }


def _args(span: Span) -> Record:
    first, last = span.first, span.last
    known = {
        "req": first.req,
        "part": first.part,
        "rank": first.rank,
        "region": last.region,
        "bytes": last.bytes,
        "peer": first.peer,
        "result": last.result,
        "fault": first.fault,
        "held_ms": round(span.held_ms, 3) or None,
    }
    return {key: value for key, value in known.items() if value is not None}
