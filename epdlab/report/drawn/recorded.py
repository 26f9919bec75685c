"""The figures that show recorded runs: what `..trace` draws, with titles, and the moment of the layout."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import UsageError
from ...steps import Event
from ...trace.invariants import check
from ...trace.layout import layout, of_trace
from ...trace.lifecycle import lifecycle
from ...trace.render import Drawing
from ...trace.sequence import sequence
from ...trace.timeline import timeline

REQUEST = "req1"


def sequence_of(events: Sequence[Event], title: str) -> Drawing:
    """The sequence diagram of the recorded request; its clock starts with the request."""
    shown = _from_request(events)
    return sequence(shown, check(shown), req=REQUEST, title=title)


def timeline_of(events: Sequence[Event], title: str) -> Drawing:
    """Regions and writes of the recorded request, one step apart; its clock starts with the request."""
    shown = _from_request(events)
    return timeline(shown, check(shown), req=REQUEST, title=title)


def layout_of(events: Sequence[Event], title: str) -> Drawing:
    """The landing memory of rank 0 when it held the most: the latest such moment, when all parts are noted."""
    moments = [i for i, event in enumerate(events) if event.process == "rank0" and event.phase == "end"]
    if not moments:
        raise UsageError(
            "the recorded trace has no step of rank0; record it anew with `python -m epdlab report --traces`"
        )
    best = max(moments, key=lambda i: (_held(events, i), i))
    return layout(of_trace(events, "rank0", best), title)


def region_states() -> Drawing:
    """The lifecycle of a memory region, from the transition table of the lab."""
    return lifecycle("region")


def _from_request(events: Sequence[Event]) -> list[Event]:
    """The events with those before the request moved to its start: coming up takes no room."""
    start = next((event.t for event in events if event.step == "request.start" and event.req == REQUEST), None)
    if start is None:
        raise UsageError(f"the recorded trace has no {REQUEST}; record it anew with `python -m epdlab report --traces`")
    return [event if event.t >= start else msgspec.structs.replace(event, t=start) for event in events]


def _held(events: Sequence[Event], index: int) -> int:
    return sum(slot.nbytes for slot in of_trace(events, "rank0", index).slots)
