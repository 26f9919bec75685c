"""What is explored: a scenario (profile, ranks, requests, parts) and the one fault that may strike it.

The ranks of a scenario are alike, so a fault strikes rank 0; it strikes the first request.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from ..errors import UsageError
from ..modality import Modality
from ..rules import Profile
from ..rules import profile as profile_named
from ..steps import Phase, Point

MAX_TP, MAX_REQUESTS, MAX_PARTS = 4, 2, 2
FIRST = "q1"
ENCODER = "enc0"
GONE = ("peer_lost", "the encoder does not answer; is it running?")
"""What a client hears of a killed encoder."""


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True):
    """One bound of the search.

    Attributes:
        profile: a profile's name, see `rules.profile`.
        tp: ranks. requests: per rank, one after the other; the second begins when the first is received or failed.
        parts: of each request. One part is an image, or a video; two are an image and a video.
        modality: of a single part.
        pool: landing memory is a pool with room for one request; without it each request brings its own.
    """

    profile: str
    tp: int = 2
    requests: int = 1
    parts: int = 1
    modality: Modality = Modality.IMAGE
    pool: bool = False

    def checked(self) -> Scenario:
        """The scenario itself.

        Raises:
            UsageError: unknown profile, or a bound that is not explored; says which is.
        """
        profile_named(self.profile)
        for name, value, largest in (
            ("tp", self.tp, MAX_TP),
            ("requests", self.requests, MAX_REQUESTS),
            ("parts", self.parts, MAX_PARTS),
        ):
            if not 1 <= value <= largest:
                raise UsageError(f"{name} is {value}; the explorer takes 1 to {largest} (orders grow exponentially)")
        return self

    @property
    def rules(self) -> Profile:
        return profile_named(self.profile)

    @property
    def modalities(self) -> list[Modality]:
        return [Modality.IMAGE, Modality.VIDEO] if self.parts == 2 else [self.modality]


class Move(NamedTuple):
    """What the scheduler chooses: a step that waits at the gate, or a fault's own move (`nth` is -1).

    `nth` tells moves with equal labels apart.
    """

    process: str
    step: str
    phase: str
    req: str | None
    part: int | None
    rank: int | None
    nth: int


@dataclass(frozen=True, slots=True)
class Target:
    """The step a fault strikes: the first one that matches. None matches anything."""

    process: str
    step: str
    phase: Phase = "begin"
    part: int | None = None
    rank: int | None = None

    def matches(self, point: Point | Move) -> bool:
        return (
            point.step == self.step
            and point.phase == self.phase
            and point.process == self.process
            and point.req == FIRST
            and (self.part is None or point.part == self.part)
            and (self.rank is None or point.rank == self.rank)
        )


Strike = Literal["at_step", "any_time"]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What can go wrong once.

    Attributes:
        strike: at a step (its `Target`), or at any time (a move of its own).
        step: the step it strikes, or the name of its own move.
    """

    sentence: str
    strike: Strike
    step: str


FAULTS: dict[str, FaultKind] = {
    "transfer_fails": FaultKind("a write answers -1 and no byte lands", "at_step", "transfer.write"),
    "transfer_late": FaultKind("a write answers -1, and the rest of it lands later", "at_step", "transfer.write"),
    "send_repeated": FaultKind("a rank posts one /send twice, as a client that retries", "at_step", "send.post"),
    "rank_cancels": FaultKind("a rank's client gives the request up", "any_time", "request.cancel"),
    "receiver_deadline": FaultKind("a rank's deadline fires", "any_time", "timer.fire"),
    "cleanup_timer": FaultKind("the encoder's clean-up timer fires", "any_time", "timer.fire"),
    "encoder_dies": FaultKind("the encoder's process is killed", "any_time", "process.kill"),
    "ack_lost": FaultKind("an ack is lost on its way", "at_step", "ack.push"),
    "register_refused": FaultKind(
        "the engine refuses a registration, and another owner holds a region that starts at the same address",
        "at_step",
        "mr.register",
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault kind with its target: a step, or for a fault at any time the part it is about."""

    kind: str
    target: Target

    @property
    def at_step(self) -> bool:
        return FAULTS[self.kind].strike == "at_step"


def fault_kind(name: str) -> FaultKind:
    """The kind called `name`; an unknown name is answered with the nearest right ones."""
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=3) or list(FAULTS)
        raise UsageError(f"no fault {name!r}; use {', '.join(near)}")
    return FAULTS[name]


def faults_of(kind: str, scenario: Scenario) -> list[Fault]:
    """Every way in which a fault of this kind can strike the scenario, up to renaming the ranks."""
    step = fault_kind(kind).step
    parts = range(scenario.parts)
    if kind in ("rank_cancels", "receiver_deadline"):
        return [Fault(kind, Target("rank0", step, rank=0))]
    if kind == "encoder_dies":
        return [Fault(kind, Target("enc0", step))]
    if kind == "cleanup_timer":
        return [Fault(kind, Target("enc0", step, part=part)) for part in parts]
    if kind == "send_repeated":
        return [Fault(kind, Target("rank0", step, part=part, rank=0)) for part in parts]
    if kind == "register_refused":
        landing = [] if scenario.pool else [Fault(kind, Target("rank0", step, rank=0))]
        return [Fault(kind, Target("enc0", step, part=part)) for part in parts] + landing
    phase: Phase = "end" if kind == "transfer_late" else "begin"
    return [Fault(kind, Target("enc0", step, phase, part, 0)) for part in parts]
