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


def sequence_of(events: Sequence[Event], title: str) -> Drawing:
    """The sequence diagram of the first recorded request; its clock starts with the request."""
    shown, req = _from_request(events)
    return sequence(shown, check(shown), req=req, title=title)


def timeline_of(events: Sequence[Event], title: str) -> Drawing:
    """Regions and writes of the first recorded request, one step apart; its clock starts with the request."""
    shown, req = _from_request(events)
    return timeline(shown, check(shown), req=req, title=title)


def layout_of(events: Sequence[Event], title: str) -> Drawing:
    """The landing memory of rank 0 when it had the most slots: the latest such moment, when all parts are noted."""
    moments = [i for i, event in enumerate(events) if event.process == "rank0" and event.phase == "end"]
    if not moments:
        raise UsageError(
            "the recorded trace has no step of rank0; record it anew with `python -m epdlab report --traces`"
        )
    best = max(moments, key=lambda i: (len(of_trace(events, "rank0", i).slots), i))
    return layout(of_trace(events, "rank0", best), title)


def region_states() -> Drawing:
    """The lifecycle of a memory region, from the transition table of the lab."""
    return lifecycle("region")


def _from_request(events: Sequence[Event]) -> tuple[list[Event], str | None]:
    """The first request, and the events with those before it moved to its start: coming up takes no room."""
    start = next((event for event in events if event.step == "request.start"), None)
    if start is None:
        raise UsageError("the recorded trace has no request; record it anew with `python -m epdlab report --traces`")
    moved = [event if event.t >= start.t else msgspec.structs.replace(event, t=start.t) for event in events]
    return moved, start.req
