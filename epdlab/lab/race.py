"""The race, counted: sibling /send calls of one part on the real engine, request after request.

All ranks' sends are brought to the point where their write may start (or were refused) and let go together; or they
come `stagger_ms` apart, without that barrier. Owns the counting; the sends are real, from one process per rank to a
real encode server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..errors import UsageError
from ..rules import Rule, profile
from ..steps import Event
from ..tower import MAX_SYNTHETIC_BYTES
from ..trace.invariants import check
from .lab import Lab

NIC_SLICES = 16
SILENT_DEADLINE_S = 1.0
OPERATIONS = {"register": "mr.register", "deregister": "mr.deregister", "transfer": "transfer.write"}


@dataclass(frozen=True)
class RaceOptions:
    """What `epdlab race` takes. `bytes`: of the embedding; `stagger_ms`: between the ranks' requests."""

    profile: str = "hardened"
    tp: int = 2
    bytes: int = 64 << 10
    repeat: int = 50
    stagger_ms: float = 0.0
    nic: bool = False
    out: Path | None = None


def run_race(options: RaceOptions, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run the race; counts of raw engine codes, of broken invariants, and of what each rank got.

    Raises:
        UsageError: nothing to repeat, an unknown profile, or a size or time that cannot be; before a process starts.
    """
    _check(options)
    slices = NIC_SLICES if options.nic else 0
    chosen: dict[str, Any] = {"tp": options.tp, "profile": options.profile, "nic_slices": slices}
    if not profile(options.profile).has(Rule.NOTIFY_ERRORS):
        chosen["deadline_s"] = SILENT_DEADLINE_S
    with Lab(out=options.out, model="synthetic", send_timeout_s=3600.0, **chosen) as lab:
        outcomes = [_one(lab, options, number, say) for number in range(1, options.repeat + 1)]
        lab.census()
        events = lab.events
    received: Counter[str] = sum(outcomes, Counter())
    answer = asdict(options) | {"out": None} | _counts(events) | {"received": dict(received)}
    answer["ok"] = answer["ok"] and set(received) == {"ok"}
    say(summary(answer))
    return answer


def _check(options: RaceOptions) -> None:
    """Refuse what no run could answer."""
    if options.repeat < 1:
        raise UsageError(f"--repeat {options.repeat} asks for nothing; use at least 1")
    if not 1 <= options.bytes <= MAX_SYNTHETIC_BYTES:
        raise UsageError(f"--bytes {options.bytes} is not possible; use 1 to {MAX_SYNTHETIC_BYTES} (1GiB)")
    if not 0 <= options.stagger_ms < math.inf:
        raise UsageError(f"--stagger {options.stagger_ms} is no time; write milliseconds, 0 or more")


def _one(lab: Lab, options: RaceOptions, number: int, say: Callable[[str], None]) -> Counter[str]:
    together = not options.stagger_ms and not profile(options.profile).write_blocks_loop
    req_id = f"req{number}"
    if together:
        lab.hold("transfer.write")
        lab.hold("part.release")
    lab.request(f"bytes:{options.bytes}:{number}", req_id=req_id, stagger_ms=options.stagger_ms)
    if together:
        lab.wait_for_ranks(req_id)
        lab.run()
    results = lab.result(req_id)
    for error in results.values():
        if isinstance(error, UsageError):
            raise error
    if number % max(1, options.repeat // 10) == 0:
        say(f"{number} of {options.repeat} requests")
    return Counter(getattr(answer, "kind", "ok") for answer in results.values())


def _counts(events: list[Event]) -> dict[str, Any]:
    violations: dict[str, list[str]] = {}
    for breach in check(as_answered(events)):
        requests = violations.setdefault(breach.invariant, [])
        if breach.req is not None and breach.req not in requests:
            requests.append(breach.req)
    return {
        "ok": not violations,
        "sends": sum(event.step == "send.serve" and event.phase == "begin" for event in events),
        "codes": {name: _codes(events, step) for name, step in OPERATIONS.items()},
        "violations": violations,
    }


def as_answered(events: list[Event]) -> list[Event]:
    """Every write ends when the engine answered, not when the encoder's event loop heard of it: a fair count."""
    moved = [
        msgspec.structs.replace(event, t=event.data["answered"]) if event.data and "answered" in event.data else event
        for event in events
    ]
    return sorted(moved, key=lambda event: event.t)


def _codes(events: list[Event], step: str) -> dict[str, int]:
    """Raw codes of the encoder's calls, counted."""
    codes = Counter(str(e.result) for e in events if e.step == step and e.phase == "end" and e.process == "enc0")
    return dict(sorted(codes.items()))


def summary(answer: dict[str, Any]) -> str:
    """The counts as lines for people."""
    lines = [f"{answer['profile']}: {answer['repeat']} requests, {answer['sends']} sends of {answer['bytes']:,} bytes"]
    lines += [f"  {name:<11}{_listed(codes)}" for name, codes in answer["codes"].items()]
    lines.append(f"  {'ranks got':<11}{_listed(answer['received'])}")
    broken = {name: len(requests) for name, requests in answer["violations"].items()}
    lines.append(f"  {'broken':<11}{_listed(broken) or 'no invariant'}")
    return "\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{key}: {count}" for key, count in counts.items())
