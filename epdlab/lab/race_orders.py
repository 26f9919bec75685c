"""The orders of the race, as scripts over a stepper: what notebook 03 shows by hand, for any profile.

    with Stepper(profile="sglang-0.5.16", nic_slices=4) as stepper:
        overlap(stepper)
        print(stepper.breaches)

Two ranks, one part. An order says who goes first and what goes wrong; which steps there are is the profile's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..steps import Event
from ..trace.breach import INVARIANTS, Breach
from .stepper import Stepper

NIC_SLICES = 4

Order = Callable[[Stepper], None]


def serve(stepper: Stepper, rank: int) -> None:
    """Let the steps about one rank go, until none of them waits."""
    while any(waiting.point.rank == rank for waiting in stepper.waiting):
        stepper.step(rank=rank)


def write(stepper: Stepper, rank: int) -> None:
    """Let one rank's write run to its end, where it waits, while no other runs."""
    stepper.step("transfer.write", rank=rank)
    while slices(stepper):
        stepper.step("transfer.slice")


def slices(stepper: Stepper) -> int:
    """Slices of writes that wait; none without an emulated NIC."""
    return sum(waiting.point.step == "transfer.slice" for waiting in stepper.waiting)


def overlap(stepper: Stepper) -> None:
    """Rank 1's write has begun when rank 0's ends, and all that follows that happens before rank 1's goes on."""
    stepper.until("transfer.write")
    write(stepper, 0)
    stepper.step("transfer.write", rank=1)
    if slices(stepper):
        stepper.step("transfer.slice")
    serve(stepper, 0)
    stepper.run()


def late(stepper: Stepper) -> None:
    """Rank 1's /send comes to the encoder when rank 0 has been served."""
    stepper.until("send.serve")
    while not any(waiting.point.step == "transfer.write" for waiting in stepper.waiting):
        stepper.step(rank=0)
    write(stepper, 0)
    serve(stepper, 0)
    stepper.run()


def failing(stepper: Stepper) -> None:
    """Rank 1's write answers -1."""
    stepper.until("transfer.write")
    stepper.step("transfer.write", rank=1, fault="fail")
    stepper.run()


ORDERS: dict[str, Order] = {"overlap": overlap, "late": late, "failing": failing}


@dataclass(frozen=True)
class Tally:
    """What an order came to: raw codes of the encoder's calls, and the invariants that broke, by number."""

    registers: tuple[int, ...]
    deregisters: tuple[int, ...]
    writes: tuple[int, ...]
    broken: tuple[int, ...]


def tally(stepper: Stepper) -> Tally:
    """The codes and the broken invariants of a stepper's request so far."""
    events = stepper.events
    registers, deregisters = _codes(events, "mr.register"), _codes(events, "mr.deregister")
    return Tally(registers, deregisters, _codes(events, "transfer.write"), numbers(stepper.breaches))


def _codes(events: Iterable[Event], step: str) -> tuple[int, ...]:
    ends = (e for e in events if e.step == step and e.phase == "end" and e.process == "enc0")
    return tuple(int(e.result or 0) for e in ends)


def numbers(breaches: Iterable[Breach]) -> tuple[int, ...]:
    """Numbers of the invariants that broke, each once, in order."""
    return tuple(sorted({breach.number for breach in breaches}))


def play(profile: str, orders: Iterable[str] = ORDERS) -> dict[str, Tally]:
    """Each order in fresh processes with two ranks and an emulated NIC: what it came to."""
    found = {}
    for name in orders:
        with Stepper(profile=profile, nic_slices=NIC_SLICES) as stepper:
            ORDERS[name](stepper)
            found[name] = tally(stepper)
    return found


def words(broken: Iterable[int]) -> str:
    """The names of invariants by number, or `-` for none."""
    keys = list(INVARIANTS)
    return ", ".join(keys[number - 1] for number in broken) or "-"
