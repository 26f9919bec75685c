"""Real processes: the bytes that leave an encoder are the bytes every rank reads, whatever the deployment."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from handoff_world import expected

from epdlab.control import Pattern
from epdlab.errors import DeadlineExceeded, EpdLabError, LandingFull, LostEmbedding, SourceUncovered
from epdlab.lab import Lab
from epdlab.lab.demo import leaks_of
from epdlab.modality import Modality
from epdlab.receiver import Item, split_items
from epdlab.rules import PROFILES, Rule, profile
from epdlab.trace.invariants import check, counts

KIB, MIB = 1 << 10, 1 << 20
ODD_SIZES = [1, 255, 4097, MIB + 3, 64 * MIB]
SMALL = ["bytes:1:1", "bytes:255:2", "bytes:4097:3"]


def digest(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def right_digests(images: list[str], videos: list[str], encoders: int) -> list[str]:
    """What every rank must read, part by part, made without any transfer."""
    items = [Item(Modality.IMAGE, ref) for ref in images] + [Item(Modality.VIDEO, ref) for ref in videos]
    return [digest(expected(*part.items)) for part in split_items(items, encoders)]


def arrives(lab: Lab, images: list[str], videos: list[str]) -> None:
    """One request on every rank, with the right bytes, no broken invariant and nothing left."""
    req_id = lab.request(*images, videos=videos)
    answers = lab.result(req_id)
    right = right_digests(images, videos, lab.config.encoders)
    assert {rank: answer["digests"] for rank, answer in answers.items()} == dict.fromkeys(answers, right)
    assert len(answers) == lab.config.tp
    lab.settle()
    assert leaks_of(lab.census()) == {}
    assert check(lab.events) == []


@pytest.fixture(scope="module", params=[0, 96 * MIB], ids=["per request", "pool"])
def one(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with Lab(tp=1, model="synthetic", pool_bytes=request.param) as lab:
        yield lab


@pytest.mark.parametrize("nbytes", ODD_SIZES)
def test_odd_sizes_arrive(one: Lab, nbytes: int) -> None:
    arrives(one, [f"bytes:{nbytes}:7"], [])


def test_odd_sizes_arrive_side_by_side(one: Lab) -> None:
    arrives(one, ["bytes:1:1", f"bytes:{MIB + 3}:2"], ["bytes:255:3", "bytes:4097:4"])


def test_many_requests_at_once(one: Lab) -> None:
    sent = {one.request(f"bytes:{1000 + n}:{n}"): [f"bytes:{1000 + n}:{n}"] for n in range(24)}
    for req_id, images in sent.items():
        assert one.result(req_id)["rank0"]["digests"] == right_digests(images, [], 1)
    one.settle()
    assert leaks_of(one.census()) == {}


@pytest.mark.parametrize(
    ("tp", "encoders", "pool_bytes"), [(2, 3, 0), (4, 1, 4 * MIB), (8, 3, 0)], ids=["tp2 enc3", "tp4 pool", "tp8 enc3"]
)
def test_every_rank_of_every_deployment_reads_the_same(tp: int, encoders: int, pool_bytes: int) -> None:
    with Lab(tp=tp, encoders=encoders, model="synthetic", pool_bytes=pool_bytes) as lab:
        arrives(lab, SMALL, [])
        arrives(lab, SMALL, [f"bytes:{MIB + 3}:4", "bytes:77:5"])
        arrives(lab, [], ["bytes:5:5"])
        forwards = [event for event in lab.events if event.step == "encode.forward" and event.phase == "begin"]
        parts = 2 * min(len(SMALL), encoders) + min(2, encoders) + 1
        assert len(forwards) == parts, "siblings share a part's forward"


def test_large_embeddings_on_two_ranks() -> None:
    with Lab(tp=2, model="synthetic") as lab:
        arrives(lab, [f"bytes:{64 * MIB}:1"], [f"bytes:{MIB + 3}:2"])


# ---- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_serves_one_rank(name: str) -> None:
    """With one rank there are no siblings to race, so every release's rules deliver."""
    with Lab(tp=1, model="synthetic", profile=name) as lab:
        answers = [lab.result(lab.request(*SMALL, req_id="i")), lab.result(lab.request(videos=SMALL, req_id="v"))]
        assert [answer["rank0"]["digests"] for answer in answers] == [right_digests(SMALL, [], 1)] * 2
        lab.settle()
        census, broken = lab.census(), counts(check(lab.events))
        assert leaks_of(census) == {}
        assert broken == {}
        assert census["enc0"]["timed"] == (0 if profile(name).early_release else 2), "the rest waits for its timer"
        assert lab.call("enc0", "fire", timer="cleanup", labels={}) == census["enc0"]["timed"]
        lab.settle()
        assert set(lab.census()["enc0"].values()) == {0}


def test_a_sibling_loses_its_embedding_where_it_is_not_kept() -> None:
    """0.5.12 pops the embedding after the only /send; 0.5.16 drops an image's after the first write."""
    for name in ("sglang-0.5.12", "sglang-0.5.16"):
        with Lab(tp=2, model="synthetic", profile=name, deadline_s=2.0) as lab:
            req_id = lab.request("bytes:1000:1", ranks=[0])
            first = lab.result(req_id)
            lab.request("bytes:1000:1", req_id=req_id, ranks=[1])
            answers = lab.result(req_id)
            assert first["rank0"]["bytes"] == answers["rank0"]["bytes"] == 1000
            late = LostEmbedding if profile(name).has(Rule.NOTIFY_ERRORS) else DeadlineExceeded
            assert isinstance(answers["rank1"], late)
            assert "lost_embedding" in counts(check(lab.events))


def test_strict_an_uncovered_write_is_an_error() -> None:
    """0.5.16: the first rank's deregistration takes the region from under the second rank's write."""
    with Lab(tp=2, model="synthetic", profile="sglang-0.5.16", strict=True) as lab:
        lab.hold("transfer.write", phase=None)
        assert len(lab.wait_for_ranks(lab.request("bytes:1000:1"))) == 2
        lab.step(rank=1)
        lab.settle()
        lab.hold_only([Pattern("transfer.write", "end", rank=1)])
        lab.settle()
        lab.run()
        answers = lab.result()
        assert answers["rank0"]["bytes"] == 1000
        assert isinstance(answers["rank1"], SourceUncovered)
        assert "source_uncovered" in counts(check(lab.events))


def test_hardened_is_strict_without_a_complaint() -> None:
    with Lab(tp=2, model="synthetic", strict=True) as lab:
        arrives(lab, SMALL, SMALL)


# ---- landing memory --------------------------------------------------------------------------------------------------


def test_a_pool_too_small_fails_the_request_and_serves_the_next() -> None:
    with Lab(tp=2, model="synthetic", pool_bytes=64 * KIB) as lab:
        answers = lab.result(lab.request(f"bytes:{64 * KIB + 1}:1"))
        assert {type(answer) for answer in answers.values()} == {LandingFull}
        assert "--pool-bytes" in str(answers["rank0"])
        lab.call("enc0", "fire", timer="cleanup", labels={})
        arrives(lab, [f"bytes:{64 * KIB}:1"], [])


def test_requests_wait_their_turn_for_the_pool() -> None:
    with Lab(tp=1, model="synthetic", pool_bytes=64 * KIB) as lab:
        sent = [lab.request(f"bytes:{40 * KIB}:{n}") for n in range(6)]
        assert all(not isinstance(lab.result(req_id)["rank0"], EpdLabError) for req_id in sent)
        allocated = [e.req for e in lab.events if e.step == "landing.alloc" and e.phase == "end"]
        assert sorted(allocated) == sorted(sent)
        lab.settle()
        assert (leaks_of(lab.census()), check(lab.events)) == ({}, [])
