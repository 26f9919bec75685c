"""Turns recorded events into what is stored: calls with names instead of addresses, counts, and what must never be.

Pure functions over lists of dicts; nothing here starts a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
Call = dict[str, Any]
Counts = dict[str, dict[str, int]]

CODED = ("register", "deregister", "transfer")
OPS = (*CODED, "ack", "encode", "pop")


def named(
    events: Iterable[Event], sessions: Mapping[str, int], ports: Mapping[int, int], kind: str = "region"
) -> list[Call]:
    """The calls of one process in the order in which they returned.

    Args:
        events: of one process, see Recorder.
        sessions: the rank behind each landing session.
        ports: the rank behind each acknowledgement port.
        kind: what memory is called that is neither an embedding nor another owner's.
    """
    names: dict[tuple[str, int], str] = {}
    seen: Counter[str] = Counter()

    def name(event: Event) -> str | None:
        if "address" not in event:
            return None
        owner = event.get("owner", "release")
        key = (owner, event["address"])
        if event["op"] == "encode" or key not in names:
            sort = "other" if owner == "other" else "emb" if event["op"] == "encode" else kind
            seen[sort] += 1
            names[key] = f"{sort}#{seen[sort]}"
        return names[key]

    calls = []
    for event in events:
        if event["op"] in OPS:
            caller = event.get("session") or event.get("caller")
            rank = ports.get(event["port"]) if event["op"] == "ack" else sessions.get(caller or "")
            about = {"region": name(event), "bytes": event.get("bytes"), "rc": event["rc"]}
            calls.append({"op": event["op"], "rank": rank, **about})
    return calls


def counts(calls: Iterable[Call]) -> Counts:
    """How often each engine call answered each code: {"register": {"0": 1, "-7": 1}, ...}."""
    found: dict[str, Counter[str]] = {op: Counter() for op in CODED}
    for call in calls:
        if call["op"] in CODED:
            found[call["op"]][str(call["rc"])] += 1
    return {op: dict(sorted(found[op].items())) for op in CODED}


def live_regions(events: Iterable[Event]) -> int:
    """Regions registered and not deregistered again in these events."""
    live: set[int] = set()
    for event in events:
        if event["op"] == "register" and event["rc"] == 0:
            live.add(event["address"])
        elif event["op"] == "deregister" and event["rc"] == 0:
            live.discard(event["address"])
    return len(live)


def uncovered_writes(events: Iterable[Event]) -> int:
    """Writes whose source was not inside one live region from begin to end; RDMA refuses them, TCP lets them pass."""
    listed = list(events)
    spans = _spans(listed)
    writes = [event for event in listed if event["op"] == "transfer" and not event["injected"]]
    return sum(not any(_covers(span, write) for span in spans) for write in writes)


def _spans(events: list[Event]) -> list[tuple[int, int, int, int]]:
    """(address, end, live from, live until) of each registration: from its return to the call that takes it back."""
    spans, starts = [], {}
    for event in events:
        if event["op"] == "register" and event["rc"] == 0:
            starts[event["address"]] = event
        elif event["op"] == "deregister" and event["rc"] == 0 and event["address"] in starts:
            spans.append((starts.pop(event["address"]), event["began"]))
    spans += [(start, 1 << 63) for start in starts.values()]
    return [(start["address"], start["address"] + start["bytes"], start["ended"], until) for start, until in spans]


def _covers(span: tuple[int, int, int, int], write: Event) -> bool:
    low, high, since, until = span
    inside = low <= write["address"] and write["address"] + write["bytes"] <= high
    return bool(inside and since <= write["began"] and write["ended"] <= until)
