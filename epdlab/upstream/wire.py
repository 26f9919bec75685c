"""What was on the wire: the JSON bodies of the hand-off and the acknowledgements, with names for what varies.

It reads events; it decodes no acknowledgement. The release's own receiver has done that in its own process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
Json = dict[str, Any]

VARYING = {"enter_time": "<seconds>", "encoder_url": "<url of the encoder>", "prefill_host": "<host of the rank>"}


def statuses(events: Iterable[Event]) -> dict[str, int]:
    """How often /send answered each HTTP status."""
    found = Counter(str(event["status"]) for event in events if event["op"] == "http" and event["path"] == "/send")
    return dict(sorted(found.items()))


def exchanges(events: list[Event], sessions: Mapping[str, int], ports: Mapping[int, int], ends: list[Json]) -> Json:
    """One of each exchange as rank 0 (or the tokenizer) sees it, how often each path was called, and rank 0's acks.

    Args:
        events: of the encoder.
        sessions, ports: the rank behind each landing session and acknowledgement port.
        ends: the last answer of every rank, see `receiver_proc.Rank.take`.
    """
    http = [event for event in events if event["op"] == "http"]
    bases = _landing_bases(http, sessions)
    kept: dict[tuple[str, int, int | None], Json] = {}
    for event in http:
        request = event["request"]
        rank = ports.get(request.get("embedding_port"))
        if rank in (0, None):
            head = {"path": event["path"], "rank": rank, "status": event["status"]}
            body = {side: _named(event[side], sessions, ports, bases) for side in ("request", "reply")}
            kept.setdefault((event["path"], request["part_idx"], rank), head | body)
    frames = sorted({event["frames"] for event in events if event["op"] == "ack"})
    return {
        "times": dict(sorted(Counter(event["path"] for event in http).items())),
        "exchanges": [kept[key] for key in sorted(kept, key=str)],
        "ack_frames": frames,
        "acks": ends[0]["acks"],
    }


def _landing_bases(http: list[Event], sessions: Mapping[str, int]) -> dict[int, int]:
    """The lowest landing address of each rank."""
    bases: dict[int, int] = {}
    for request in (event["request"] for event in http if event["path"] == "/send"):
        rank = sessions[request["session_id"]]
        bases[rank] = min(bases.get(rank, request["buffer_address"]), request["buffer_address"])
    return bases


def _named(body: Any, sessions: Mapping[str, int], ports: Mapping[int, int], bases: Mapping[int, int]) -> Any:
    """A body with hosts, ports, sessions, addresses and times replaced by what they are."""
    if not isinstance(body, dict):
        return body
    named = {key: VARYING[key] if key in VARYING and value is not None else value for key, value in body.items()}
    if named.get("embedding_port") is not None:
        named["embedding_port"] = f"<port of rank {ports.get(body['embedding_port'])}>"
    if "session_id" in named:
        rank = sessions[body["session_id"]]
        offset = body["buffer_address"] - bases[rank]
        named |= {"session_id": f"<session of rank {rank}>", "buffer_address": f"<landing of rank {rank}> + {offset}"}
    return named
