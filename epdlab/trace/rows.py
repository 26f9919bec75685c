"""A trace as the rows of a sequence diagram: messages between lanes and steps inside one. No geometry here."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from epdlab.steps import Event, FaultKind

from .spans import Span, kind_of, short, size, spans

Wire = Literal["http", "reply", "ack", "write", "late"]

HIDDEN = frozenset({"process.start", "process.census", "send.lookup", "transfer.slice"})
HELD_MS = 50.0


@dataclass(slots=True)
class Row:
    """One line of the diagram.

    Attributes:
        at: index of the event that places it.
        lane: the process it happens in or leaves from; `to`: the process a message goes to, None inside a lane.
        wire: how a message travels; `lost`: it has not arrived.
        began: for the end of a write, the index of its begin event.
        events: indices of all events it stands for.
    """

    at: int
    lane: str
    text: str
    to: str | None = None
    wire: Wire | None = None
    lost: bool = False
    failed: bool = False
    fault: FaultKind | None = None
    held_ms: float = 0.0
    began: int | None = None
    events: list[int] = field(default_factory=list)


def rows(events: Sequence[Event], keep: Sequence[int], collapse: bool = True) -> list[Row]:
    """The rows of the events at the indices `keep`, in time order.

    Args:
        collapse: leave out steps that say little when they go well (`HIDDEN`).
    """
    kept = [events[i] for i in keep]
    steps = spans(kept)
    found = _Rows(steps)
    for span in steps:
        found.add(span, collapse)
    for row in found.rows:
        row.at, row.began = keep[row.at], None if row.began is None else keep[row.began]
        row.events = [keep[i] for i in row.events]
    return sorted(found.rows, key=lambda row: row.at)


def flights(found: Sequence[Row], last: int) -> list[tuple[Row, Row | None, int]]:
    """Each write with its end, and the first column beside its lane that is free while it runs (until `last`)."""
    busy: defaultdict[str, list[int]] = defaultdict(list)
    ends = {row.began: row for row in found if row.began is not None}
    flying: list[tuple[Row, Row | None, int]] = []
    for row in found:
        if row.wire == "write":
            end, columns = ends.get(row.at), busy[row.lane]
            column = next((k for k, until in enumerate(columns) if until < row.at), len(columns))
            columns[column : column + 1] = [end.at if end else last]
            flying.append((row, end, column))
    return flying


class _Rows:
    """Brings the two ends of each message together."""

    def __init__(self, steps: Sequence[Span]) -> None:
        self.rows: list[Row] = []
        self._several = len({span.first.req for span in steps} - {None}) > 1
        self._serves: defaultdict[tuple[object, ...], deque[Span]] = defaultdict(deque)
        self._pulls: defaultdict[tuple[object, ...], deque[Span]] = defaultdict(deque)
        starts = [span.first for span in steps if span.step == "process.start"]
        self._encoders = {(event.data or {}).get("url"): event.process for event in starts}
        for span in steps:
            if span.step in ("encode.serve", "send.serve"):
                self._serves[_message(span.first, span.step[:-6])].append(span)
            elif span.step == "ack.pull":
                self._pulls[_message(span.first, "ack", (span.first.data or {}).get("of"))].append(span)

    def add(self, span: Span, collapse: bool) -> None:
        step = span.step
        quiet = not (span.failed or span.first.fault or span.held_ms >= HELD_MS)
        if step in ("encode.serve", "send.serve", "ack.pull") or (collapse and quiet and step in HIDDEN):
            return
        special = {
            "encode.post": self._post,
            "send.post": self._post,
            "ack.push": self._ack,
            "transfer.write": self._write,
            "transfer.land": self._late,
        }
        special.get(step, self._local)(span)

    def _post(self, span: Span) -> None:
        first, name = span.first, span.step[:-5]
        serve = _take(self._serves[_message(first, name)], span)
        encoder = serve.first.process if serve else self._encoder_of(first)
        text = self._named(first, f"POST /{name} part {first.part}")
        at = serve.begin if serve else span.begin
        row = self._row(span, at, text, to=encoder, wire="http", lost=serve is None, failed=False)
        row.events = [span.begin, *([serve.begin, serve.end or serve.begin] if serve else [])]
        row.held_ms = max(first.held_ms or 0.0, (serve.first.held_ms or 0.0) if serve else 0.0)
        if span.end is not None:
            self._reply(span, name, encoder)

    def _reply(self, span: Span, name: str, encoder: str | None) -> None:
        good = "sizes of part" if name == "encode" else "sent part"
        text = kind_of(span.last.result) if span.failed else f"{good} {span.first.part}"
        self.rows.append(
            Row(
                span.end or span.begin,
                encoder or span.first.process,
                self._named(span.first, text),
                to=span.first.process if encoder else None,
                wire="reply",
                failed=span.failed,
                held_ms=span.last.held_ms or 0.0,
                events=[span.end or span.begin],
            )
        )

    def _ack(self, span: Span) -> None:
        first = span.first
        pull = _take(self._pulls[_message(first, "ack")], span)
        text = self._named(first, f"ack part {first.part}")
        if span.failed or (pull and pull.failed):
            text += f": {kind_of(span.last.result if span.failed else pull.last.result if pull else '')}"
        at = (pull.end or pull.begin) if pull else (span.end or span.begin)
        row = self._row(span, at, text, to=f"rank{first.rank}", wire="ack", lost=pull is None)
        row.failed = row.failed or bool(pull and pull.failed)
        row.events += [pull.begin, pull.end or pull.begin] if pull else []

    def _write(self, span: Span) -> None:
        first = span.first
        what = f"write part {first.part}"
        row = self._row(
            span,
            span.begin,
            self._named(first, f"{what}, {size(first.bytes)}"),
            to=f"rank{first.rank}",
            wire="write",
            failed=False,
        )
        row.events, row.held_ms, row.lost = [span.begin], first.held_ms or 0.0, first.fault in ("fail", "drop")
        if span.end is not None:
            text = self._named(first, f"{what} to rank{first.rank} ended = {kind_of(span.last.result)}")
            end = self._row(span, span.end, text)
            end.began, end.fault, end.events, end.held_ms = span.begin, None, [span.end], span.last.held_ms or 0.0

    def _late(self, span: Span) -> None:
        event = span.first
        text = self._named(event, f"part {event.part} lands late, {size(event.bytes)}")
        self._row(span, span.begin, text, to=f"rank{event.rank}", wire="late")

    def _local(self, span: Span) -> None:
        words = _WORDS.get(span.step)
        text = words(span) if words else span.step
        if span.end is None and span.step != "process.kill":
            text += " ..."
        elif span.failed and span.last.result.__class__ is str and span.step != "request.finish":
            text += f": {kind_of(span.last.result)}"
        self._row(span, span.begin if span.end is None else span.end, self._named(span.first, text))

    def _row(self, span: Span, at: int, text: str, **more: object) -> Row:
        events = [span.begin] if span.end in (None, span.begin) else [span.begin, span.end]
        row = Row(at, span.first.process, text, fault=span.first.fault, held_ms=span.held_ms, events=events)
        row.failed = span.failed
        for name, value in more.items():
            setattr(row, name, value)
        self.rows.append(row)
        return row

    def _named(self, event: Event, text: str) -> str:
        """With more than one request in the diagram, every row says whose it is."""
        return f"{event.req}: {text}" if self._several and event.req and event.req not in text else text

    def _encoder_of(self, event: Event) -> str | None:
        url = (event.peer or "").rsplit("/", 1)[0]
        return self._encoders.get(url)


def _message(event: Event, kind: str, req: str | None = None) -> tuple[object, ...]:
    return kind, req or event.req, event.part, event.rank


def _take(waiting: deque[Span], sent: Span) -> Span | None:
    """The first arrival not before it was sent."""
    while waiting and waiting[0].begin < sent.begin:
        waiting.popleft()
    return waiting.popleft() if waiting else None


def _code(span: Span) -> str:
    return "" if span.end is None or span.last.result.__class__ is str else f" = {span.last.result}"


def _pool(span: Span) -> str:
    """A region that belongs to no request is as large as it is, and nobody would guess."""
    return "" if span.first.req else f", {size(span.first.bytes)}"


def _name(span: Span) -> str:
    return short(span.last.region, span.first.process)


def _data(span: Span, key: str, default: str = "") -> str:
    return str((span.last.data or span.first.data or {}).get(key, default))


_WORDS: dict[str, Callable[[Span], str]] = {
    "request.start": lambda s: f"takes up {s.first.req}",
    "request.finish": lambda s: f"{s.first.req} ends: {kind_of(s.last.result)}",
    "encode.forward": lambda s: f"vision forward, part {s.first.part}",
    "embedding.ready": lambda s: f"embedding of part {s.first.part}, {size(s.first.bytes)}",
    "embedding.drop": lambda s: f"drop embedding of part {s.first.part}",
    "landing.alloc": lambda s: f"allocate {_name(s)}, {size(s.first.bytes)}",
    "landing.read": lambda s: f"read part {s.first.part}",
    "landing.free": lambda s: f"free {_name(s)}",
    "landing.quarantine": lambda s: f"quarantine {_name(s)}",
    "mr.register": lambda s: f"register {_name(s)}{_pool(s)}{_code(s)}",
    "mr.deregister": lambda s: f"deregister {_name(s)}{_code(s)}",
    "send.lookup": lambda s: f"look up part {s.first.part} for rank{s.first.rank}",
    "part.release": lambda s: f"release part {s.first.part}: {_data(s, 'why', '?')}",
    "timer.fire": lambda s: f"{_data(s, 'timer', 'a')} timer fires",
    "request.cancel": lambda s: f"gives {s.first.req} up",
    "cache.lookup": lambda s: f"look up: {_data(s, 'local', '?')} here, {_data(s, 'global', '?')} in the store",
    "cache.get": lambda s: f"get {size(s.first.bytes)} from the store",
    "cache.put": lambda s: f"put {size(s.first.bytes)} to the store",
    "cache.copy": lambda s: f"copy {size(s.first.bytes)}, {_data(s, 'from')} to {_data(s, 'to')}",
    "cache.evict": lambda s: f"evict {size(s.first.bytes)} from the pool",
    "process.kill": lambda s: "is killed",
    "process.start": lambda s: "starts",
    "process.census": lambda s: "counts what it holds",
}
