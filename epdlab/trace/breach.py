"""The eight invariants by name, and what a breach of one looks like. How they are checked is `invariants`' business."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Invariant:
    """What must never be.

    Attributes:
        key: its name in JSON and on the command line.
        number: its number in figures and reports, 1 to 8.
        sentence: what breaks it, in one sentence.
    """

    key: str
    number: int
    sentence: str


INVARIANTS: dict[str, Invariant] = {
    key: Invariant(key, number, sentence)
    for number, (key, sentence) in enumerate(
        {
            "overlap": "a registration overlaps a region that is live in the same engine",
            "source_uncovered": "a write's source is not covered by one live region from its begin to its end",
            "destination_unsafe": "a write's destination is unregistered, freed or another request's before it ends",
            "wrong_bytes": "a rank was acked and does not hold exactly the embedding's bytes",
            "false_ack": "an ack was pushed for a write that did not succeed",
            "lost_embedding": "a rank asked in time and found no embedding",
            "leak": "something is still held after the last request",
            "unfinished": "a request neither succeeded nor failed with its error before its deadline",
        }.items(),
        start=1,
    )
}


class Breach(msgspec.Struct, frozen=True, omit_defaults=True):
    """One invariant, broken once.

    Attributes:
        invariant, number: which one.
        message: what happened, with names instead of addresses.
        req, part, rank: what it happened to, as far as it is one of them.
        events: indices into the trace of the events that prove it; the last one is where it broke.
    """

    invariant: str
    number: int
    message: str
    req: str | None = None
    part: int | None = None
    rank: int | None = None
    events: tuple[int, ...] = ()


def breach(
    key: str, message: str, events: tuple[int, ...], req: str | None, part: int | None = None, rank: int | None = None
) -> Breach:
    """A breach of the invariant called `key`."""
    return Breach(key, INVARIANTS[key].number, message, req, part, rank, events)
