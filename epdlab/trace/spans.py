"""Begin and end events brought together, and the words drawings use for processes, regions, sizes and times.

Every drawing starts here, so that all of them agree on what belongs together and on what it is called.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epdlab.steps import Event

OK = ("ok", 0, None)
MODEL_NS = 2_000  # no real process passes two steps in less


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one process.

    Attributes:
        begin, end: indices into the trace; equal for a note; `end` is None if the step never ended.
        first, last: the events there (`last` is `first` while the step runs).
    """

    begin: int
    end: int | None
    first: Event
    last: Event

    @property
    def step(self) -> str:
        return self.first.step

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, a negative code, or dropped."""
        return self.last.result not in OK

    @property
    def held_ms(self) -> float:
        """How long the gate held it, begin and end together."""
        held = [event.held_ms or 0.0 for event in {self.begin: self.first, self.end: self.last}.values()]
        return sum(held)


def spans(events: Sequence[Event]) -> list[Span]:
    """Every step of a trace once, in the order they began. Equal steps end in the order they began."""
    found: list[Span] = []
    open_: defaultdict[tuple[object, ...], deque[int]] = defaultdict(deque)
    for index, event in enumerate(events):
        if event.phase == "note":
            found.append(Span(index, index, event, event))
            continue
        key = (event.process, event.step, event.req, event.part, event.rank, _identity(event))
        if event.phase == "begin":
            open_[key].append(len(found))
            found.append(Span(index, None, event, event))
        elif open_[key]:
            at = open_[key].popleft()
            found[at] = Span(found[at].begin, index, found[at].first, event)
    return found


def _identity(event: Event) -> object:
    """A landing slot has no name before it is allocated; all else is told apart by its region."""
    return None if event.step == "landing.alloc" else event.region


def only(events: Sequence[Event], req: str | None) -> list[int]:
    """Indices of the events of one request, and of those that belong to none; of all events for None."""
    return [i for i, event in enumerate(events) if req is None or event.req in (req, None)]


def lanes(events: Iterable[Event]) -> list[str]:
    """The processes of a trace as they stand side by side: encoders between the ranks, others to the right."""
    seen = sorted({event.process for event in events}, key=_natural)
    ranks = [name for name in seen if name.startswith("rank")]
    encoders = [name for name in seen if name.startswith("enc")]
    others = [name for name in seen if name not in ranks and name not in encoders]
    half = (len(ranks) + 1) // 2
    return ranks[:half] + encoders + ranks[half:] + others


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def short(name: str | None, process: str | None = None) -> str:
    """`enc0.mr#1` is `mr#1` inside enc0's own lane."""
    if name is None:
        return "?"
    return name.removeprefix(f"{process}.") if process else name


def times(count: int, things: str) -> str:
    """`2 writes`, `1 write`."""
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def size(nbytes: int | None) -> str:
    """`4 MiB`, `100 KiB`, `12 B`."""
    if nbytes is None:
        return "?"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def origin(events: Sequence[Event], keep: Sequence[int]) -> int | None:
    """When a figure's clock starts, in nanoseconds: with its first request, else with its first event.

    None for a modelled trace: its events are nanoseconds apart, and say nothing of time.
    """
    if not keep or events[keep[-1]].t - events[keep[0]].t < MODEL_NS * len(keep):
        return None
    starts = (events[i].t for i in keep if events[i].step == "request.start")
    return next(starts, events[keep[0]].t)


def millis(event: Event, origin: int | None) -> str:
    """Milliseconds since `origin`; nothing where there is none."""
    return "" if origin is None else f"{(event.t - origin) / 1e6:.2f}"


def kind_of(result: object) -> str:
    """`lost_embedding` of `lost_embedding: no embedding for q1 ...`."""
    return str(result).partition(":")[0]
