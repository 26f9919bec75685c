"""The exercises of notebook 04: each runs an answer on real memory, draws what it did, and judges it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from ..landing import LandingPool, LandingSlot
from ..rules import DEFAULT_PROFILE
from ..steps import Event
from ..trace.layout import of_pool
from .exercise import Answer, Tried, attempt, judge
from .lab import Lab
from .landing_bench import KIB, RANK, LandingBench

POOL_BYTES = 64 * KIB
ITEM_BYTES = 1 << 20
SEED = 3


async def try_fit(answer: Answer) -> Tried:
    """`fit(taken, nbytes, room)`: where the next slot goes. Held against a live pool, request by request."""
    async with LandingBench(POOL_BYTES) as bench:
        wrong_at, served = await _differs(answer, bench.pool)
        drawing = bench.draw("where your answer and the pool part" if wrong_at else "the pool after the last request")
    return Tried(drawing, judge(answer, 6, lambda: wrong_at, f"{served} requests went where the pool put them"))


async def _differs(answer: Answer, pool: LandingPool, requests: int = 60) -> tuple[str | None, int]:
    """The first request that the answer places elsewhere than the pool does; requests that were placed."""
    chance = random.Random(SEED)
    held: list[LandingSlot] = []
    for served in range(requests):
        nbytes = chance.randrange(1, 12 * KIB)
        memory = of_pool(pool, RANK)
        said, error = attempt(answer, [(slot.offset, memory.taken(slot)) for slot in memory.slots], nbytes, pool.nbytes)
        if nbytes > pool.largest_hole:
            if said is not None or error:
                return error or f"{nbytes} bytes fit nowhere, and the answer is {said!r}, not None", served
            await pool.free(held.pop(chance.randrange(len(held))))
            continue
        held.append(await pool.allocate(nbytes, "req"))
        true = held[-1].address - pool._base
        if error or said != true:
            return error or f"request {served + 1} of {nbytes} bytes lies at +{true}, not at {said!r}", served
    return None, requests


async def try_fragment(answer: Callable[[LandingPool], Coroutine[Any, Any, None]]) -> Tried:
    """`fragment(pool)`: three quarters of the pool are free, and half of it does not fit."""
    async with LandingBench(POOL_BYTES) as bench:
        pool, error = bench.pool, await _attempted(answer, bench.pool)
        free, hole, drawing = pool.free_bytes, pool.largest_hole, bench.draw("what fragment left")

    def wrong() -> str | None:
        if error is not None:
            return error
        if free < POOL_BYTES * 3 // 4:
            return f"{free} of {POOL_BYTES} bytes are free; three quarters must be"
        return f"a hole of {hole} bytes is left; half the pool still fits" if hole >= POOL_BYTES // 2 else None

    said = f"{free} of {POOL_BYTES} bytes are free, and the largest hole has {hole}"
    return Tried(drawing, judge(answer, 5, wrong, said))


async def _attempted(answer: Callable[[LandingPool], Awaitable[None]], pool: LandingPool) -> str | None:
    """The error an asynchronous answer ended with, as one line; a stub does nothing."""
    started, error = attempt(answer, pool)
    if error is not None:
        return error
    try:
        await started
    except Exception as failed:
        return f"{getattr(answer, '__name__', 'the answer')} raised {failed}"
    return None


class Foreign(NamedTuple):
    """What became of request B, and how.

    Attributes:
        own, read: digest of B's embedding, and of what the rank read; None if it did not read.
        faults: faults that were used. breaches: keys of the invariants that broke.
    """

    own: str | None
    read: str | None
    faults: tuple[str, ...]
    breaches: tuple[str, ...]


def landing_lab(profile: str) -> Lab:
    """One rank, one encoder, a pool with room for two requests of 1 MiB, and no timer that fires by itself."""
    day = 86_400.0
    timers: dict[str, Any] = {"deadline_s": day, "quarantine_s": day, "send_timeout_s": day}
    return Lab(model="synthetic", tp=1, profile=profile, pool_bytes=2 * ITEM_BYTES, **timers)


def try_foreign(answer: Answer, profile: str = "sglang-0.5.17") -> Tried:
    """`foreign(lab)`: request B reads other bytes than its own, by order and one deadline alone."""
    with landing_lab(profile) as lab:
        found, error, drawing = *_foreign(answer, lab), lab.draw("timeline", title=f"what foreign did under {profile}")

    def wrong() -> str | None:
        if error is not None:
            return error
        if found.faults:
            return f"a fault was used ({found.faults[0]}); a deadline and an order are enough"
        if found.read is None:
            return "no request B was read; send one and let it end"
        return None if found.read != found.own else f"B reads its own bytes ({found.own})"

    return Tried(drawing, judge(answer, 8, wrong, f"B's embedding is {found.own}, and its rank reads {found.read}"))


def same_foreign_hardened(answer: Answer) -> bool:
    """The same answer under the hardened rules: whether B reads its own bytes."""
    with landing_lab(DEFAULT_PROFILE) as lab:
        found, _ = _foreign(answer, lab)
    return found.read is not None and found.read == found.own


def _foreign(answer: Answer, lab: Lab) -> tuple[Foreign, str | None]:
    _, error = attempt(answer, lab)
    lab.run()
    for req_id in lab.pending:
        lab.result(req_id)
    return of_request("B", lab.events, [breach.invariant for breach in lab.breaches]), error


def of_request(req_id: str, events: list[Event], breaches: list[str]) -> Foreign:
    """What a request was to read and what its rank read, from a trace."""
    digests = {e.step: e.data["digest"] for e in events if e.req == req_id and e.data and "digest" in e.data}
    faults = tuple(event.fault for event in events if event.fault)
    return Foreign(digests.get("embedding.ready"), digests.get("landing.read"), faults, tuple(dict.fromkeys(breaches)))
