"""What is played against every release, as plain data: no release, no engine and no socket is needed to read it.

A scenario is a list of steps. A player carries them out against a release (`driver`, `receivers`) or against a profile
of ours; what it sees is compared by the counts and the order of the engine calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KIB, MIB = 1024, 1024 * 1024
RELEASES = ("0.5.16", "0.5.17", "0.5.23")

ENCODER_VERBS = {
    "encode": "every rank gets the metadata of the request's one part, the way the release's receivers do it",
    "hold": "the rank's next write waits just before the engine",
    "fail": "the rank's next write answers `value` and never reaches the engine",
    "occupy": "another owner registers the embedding's memory from byte `value` to its end, before the encoder can",
    "send": "the rank posts /send; the reply is not awaited",
    "held": "wait until the rank's write is held",
    "refused": "wait until a registration of the encoder was refused",
    "release": "the rank's held write goes on; without a rank all of them do, at once",
    "finish": "wait for the replies of the rank's /send calls; without a rank, of all",
    "cleanup": "wait until the encoder's clean-up of the request has begun",
    "owner_deregisters": "the other owner deregisters what it registered",
}
RECEIVER_VERBS = {
    "ask": "request `value` reaches every rank's scheduler",
    "gather": "the next `value` writes wait for each other just before the engine",
    "park": "the rank's /send calls are kept before the encoder",
    "answers": "wait until `value` /send calls were answered",
    "unpark": "they go on",
    "hold": "the next write waits just before the engine",
    "held": "wait until that write is held",
    "release": "the held write goes on",
    "run": "the schedulers run until request `value` is ready or given up; a rank alone stops after a few seconds",
    "look": "compare the landing memory that request `value` was given with what it asked for",
    "answered": "wait until the encoder has answered everything that was asked of it",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step: a verb of the tables above, the rank it is about, a number where the verb needs one."""

    do: str
    rank: int | None = None
    value: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Attributes:
        name: as on the command line and in the results.
        asks: the question it puts, one sentence.
        steps: what happens, in order.
        role: `encoder` (one real encoder, ranks are bare engines) or `receiver` (one real encoder, real receivers).
        tp: ranks.
        nbytes: bytes of one embedding.
        repeat: how often it is played, each time with another request.
        modality: IMAGE takes the batching path, VIDEO the single-request path (asynchronous in 0.5.16 and 0.5.17).
        receive_count: whether /send says how many ranks there are (0.5.16 has no such field).
        send_timeout: seconds until the encoder's clean-up timer fires (180 by default in the releases).
        settle: whether to look again after that timer.
        global_cache: whether the encoder takes the path of cached embeddings.
        pool_mib: the receivers' landing pool; 0 is a buffer for each request.
        wait_timeout, http_timeout: the receivers' two deadlines in seconds (180 and 1800 by default in the releases).
        releases: where it can be played.
    """

    name: str
    asks: str
    steps: tuple[Step, ...]
    role: Literal["encoder", "receiver"] = "encoder"
    tp: int = 2
    nbytes: int = 64 * KIB
    repeat: int = 3
    modality: Literal["IMAGE", "VIDEO"] = "IMAGE"
    receive_count: bool = True
    send_timeout: float = 20.0
    settle: bool = False
    global_cache: bool = False
    pool_mib: int = 0
    wait_timeout: float = 60.0
    http_timeout: float = 60.0
    releases: tuple[str, ...] = RELEASES

    def __post_init__(self) -> None:
        verbs = ENCODER_VERBS if self.role == "encoder" else RECEIVER_VERBS
        for step in self.steps:
            if step.do not in verbs:
                raise ValueError(f"{self.name}: no step {step.do!r} for the {self.role}; use {', '.join(verbs)}")
            if step.rank is not None and not 0 <= step.rank < self.tp:
                raise ValueError(f"{self.name}: step {step.do!r} names rank {step.rank} of {self.tp}")


def _each(do: str, tp: int) -> tuple[Step, ...]:
    return tuple(Step(do, rank) for rank in range(tp))


def _gathered(tp: int) -> tuple[Step, ...]:
    """Every rank's /send is inside its write before any write runs."""
    return (Step("encode"), *_each("hold", tp), *_each("send", tp), *_each("held", tp))


def _in_order(tp: int) -> tuple[Step, ...]:
    """All are writing, then they are done one after another."""
    ends = (step for rank in range(tp) for step in (Step("release", rank), Step("finish", rank)))
    return (*_gathered(tp), *ends)


def _free(tp: int) -> tuple[Step, ...]:
    return (Step("encode"), *_each("send", tp), Step("finish"))


def _one_by_one(*ranks: int) -> tuple[Step, ...]:
    return (Step("encode"), *(step for rank in ranks for step in (Step("send", rank), Step("finish", rank))))


def _siblings(tp: int, nbytes: int, size: str) -> tuple[Scenario, Scenario]:
    together = Scenario(
        f"concurrent_tp{tp}_{size}",
        f"What do {tp} sibling /send calls do to one buffer of {size} when all are writing at once?",
        (*_gathered(tp), Step("release"), Step("finish")),
        tp=tp,
        nbytes=nbytes,
        repeat=10,
    )
    free = Scenario(
        f"unordered_tp{tp}_{size}",
        f"And when {tp} ranks post /send at the same moment and nothing orders them?",
        _free(tp),
        tp=tp,
        nbytes=nbytes,
        repeat=20,
    )
    return together, free


_ENCODER = (
    Scenario("tp1", "What does one request of one rank cost?", _free(1), tp=1),
    *(
        s
        for tp in (2, 4)
        for nbytes, size in ((64 * KIB, "64KiB"), (4 * MIB, "4MiB"))
        for s in _siblings(tp, nbytes, size)
    ),
    Scenario(
        "first_done_under_sibling",
        "What happens to a sibling's write when the first rank is done?",
        _in_order(2),
    ),
    Scenario("staggered", "What does a rank get that asks after its sibling is done?", _one_by_one(0, 1)),
    Scenario(
        "no_receive_count",
        "When is an embedding released whose /send calls do not say how many ranks there are?",
        _in_order(2),
        receive_count=False,
        send_timeout=2.0,
        settle=True,
        repeat=1,
    ),
    Scenario(
        "repeated_send",
        "One rank repeats its /send before its sibling asks: is it counted twice?",
        _one_by_one(0, 0, 1),
    ),
    Scenario(
        "repeated_send_under_write",
        "The same while the sibling's write is in flight: is its source deregistered?",
        (
            *(Step("encode"), Step("hold", 1), Step("send", 1), Step("held", 1)),
            *(Step("send", 0), Step("finish", 0), Step("send", 0), Step("finish", 0)),
            *(Step("release", 1), Step("finish", 1)),
        ),
    ),
    Scenario(
        "failed_write_last",
        "The second rank's write fails: is it acked, and what stays behind?",
        (Step("fail", 1, -1), *_in_order(2)),
    ),
    Scenario(
        "failed_write_first",
        "The first rank's write fails: does its sibling still get the embedding?",
        (Step("encode"), Step("fail", 0, -1), *_one_by_one(0, 1)[1:]),
    ),
    Scenario(
        "refused_same_start",
        "Another owner holds the same memory: is the refusal noticed, and whose region does clean-up take?",
        (Step("occupy", value=0), *_one_by_one(0), Step("owner_deregisters")),
        tp=1,
    ),
    Scenario(
        "refused_inside",
        "The same with an owner that starts inside the buffer: does clean-up then deregister nothing?",
        (Step("occupy", value=4096), *_one_by_one(0), Step("owner_deregisters")),
        tp=1,
    ),
    Scenario(
        "timer_under_write",
        "The clean-up timer fires while a write is in flight: does it deregister under it?",
        (*_gathered(1), Step("cleanup"), Step("release", 0), Step("finish", 0)),
        tp=1,
        send_timeout=1.0,
        settle=True,
        repeat=1,
    ),
    Scenario(
        "late_send_after_timer",
        "A rank asks after the clean-up timer took the request: what is it told?",
        (Step("encode"), Step("cleanup"), Step("send", 0), Step("finish", 0)),
        tp=1,
        send_timeout=1.0,
        repeat=1,
    ),
    Scenario(
        "late_send_after_release", "A rank asks once more after all were served: what is it told?", _one_by_one(0, 1, 1)
    ),
    Scenario(
        "asynchronous",
        "Two siblings on the single-request path, where /encode may answer before the vision tower ran.",
        _in_order(2),
        modality="VIDEO",
        send_timeout=2.0,
        settle=True,
        repeat=1,
    ),
    Scenario(
        "asynchronous_timer_under_write",
        "The clean-up timer fires while a write of that path is in flight: does it deregister under it?",
        (*_gathered(1), Step("cleanup"), Step("release", 0), Step("finish", 0)),
        tp=1,
        modality="VIDEO",
        send_timeout=1.0,
        settle=True,
        repeat=1,
    ),
    Scenario(
        "global_cache_staggered",
        "How often is a cached embedding registered?",
        _one_by_one(0, 1),
        global_cache=True,
        releases=("0.5.23",),
    ),
    Scenario(
        "global_cache_concurrent",
        "And when two siblings write a cached embedding at once?",
        (
            *(Step("encode"), Step("hold", 0), Step("send", 0), Step("held", 0)),
            *(Step("send", 1), Step("refused"), Step("release", 0), Step("finish")),
        ),
        global_cache=True,
        releases=("0.5.23",),
    ),
)

_REUSE = (
    *(Step("hold"), Step("ask", value=1), Step("held"), Step("run", value=1)),
    *(Step("ask", value=2), Step("run", value=2), Step("look", value=2)),
    *(Step("release"), Step("answered"), Step("run", value=2), Step("look", value=2)),
)

_RECEIVER = (
    Scenario(
        "end_to_end_pool",
        "Two receiver ranks and one encoder, two images, the landing pool on: what is on the wire?",
        (Step("gather", value=4), Step("ask", value=1), Step("run", value=1), Step("look", value=1)),
        role="receiver",
        nbytes=MIB,
        pool_mib=4,
        repeat=1,
    ),
    Scenario(
        "end_to_end_per_request",
        "The same with a landing buffer for each request.",
        (Step("gather", value=4), Step("ask", value=1), Step("run", value=1), Step("look", value=1)),
        role="receiver",
        nbytes=MIB,
        repeat=1,
    ),
    Scenario(
        "end_to_end_staggered",
        "The same with a rank whose /send calls come after its sibling's were answered: do both get the request?",
        (
            *(Step("park", 1), Step("ask", value=1), Step("answers", value=2), Step("unpark")),
            *(Step("run", value=1), Step("look", value=1)),
        ),
        role="receiver",
        nbytes=MIB,
        repeat=1,
    ),
    Scenario(
        "landing_wait_deadline",
        "The receiver's deadline passes under a write into a pool of one slot: what does the next request hold?",
        _REUSE,
        role="receiver",
        tp=1,
        nbytes=MIB,
        pool_mib=1,
        wait_timeout=2.5,
        send_timeout=12.0,
        repeat=1,
    ),
    Scenario(
        "landing_http_deadline",
        "The same when the receiver's HTTP deadline passes.",
        _REUSE,
        role="receiver",
        tp=1,
        nbytes=MIB,
        pool_mib=1,
        http_timeout=2.5,
        send_timeout=12.0,
        repeat=1,
    ),
    Scenario(
        "landing_per_request_deadline",
        "The same without a pool: is the landing buffer deregistered and freed under the write?",
        (Step("hold"), Step("ask", value=1), Step("held"), Step("run", value=1), Step("release"), Step("answered")),
        role="receiver",
        tp=1,
        nbytes=MIB,
        wait_timeout=2.5,
        send_timeout=12.0,
        repeat=1,
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in (*_ENCODER, *_RECEIVER)}
