"""The race on the real engine: raw codes and broken invariants, by profile."""

from collections import Counter

import pytest
from tape import SOURCE, Tape

from epdlab.errors import UsageError
from epdlab.lab import race
from epdlab.lab.race import RaceOptions, as_answered, run_race
from epdlab.trace.invariants import check

REPEAT = 3
CLEAN = {"register": {"0": REPEAT}, "deregister": {"0": REPEAT}}


@pytest.mark.parametrize("tp", [2, 4])
def test_siblings_of_0_5_16_overlap_and_write_uncovered(tp: int) -> None:
    answer = run_race(RaceOptions("sglang-0.5.16", tp, 16 << 20, REPEAT))
    everyone = [f"req{number}" for number in range(1, REPEAT + 1)]
    refused = REPEAT * (tp - 1)
    assert answer["sends"] == REPEAT * tp
    assert answer["codes"]["register"] == {"-7": refused, "0": REPEAT}
    assert answer["codes"]["deregister"] == {"-3": refused, "0": REPEAT}
    assert answer["codes"]["transfer"] == {"0": REPEAT * tp}
    assert answer["violations"]["overlap"] == everyone
    assert answer["violations"]["source_uncovered"], "the first to end withdraws the region of those that write on"
    assert set(answer["violations"]["source_uncovered"]) <= set(everyone)
    assert not answer["ok"]


def test_a_write_ends_when_the_engine_answered_not_when_the_event_loop_heard_of_it() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.write("begin")
    answered = tape.events[-1].t + 1
    tape.deregister("enc0", 1, SOURCE)
    tape.write("end", result=0, data={"answered": answered})
    assert [breach.invariant for breach in check(tape.events)] == ["source_uncovered"]
    assert check(as_answered(tape.events)) == []


@pytest.mark.parametrize("profile", ["sglang-0.5.17", "sglang-0.5.23", "hardened"])
@pytest.mark.parametrize("tp", [2, 4])
def test_one_registration_and_one_deregistration_a_request_after_the_fix(profile: str, tp: int) -> None:
    answer = run_race(RaceOptions(profile, tp, 64 << 10, REPEAT))
    assert answer["codes"] == CLEAN | {"transfer": {"0": REPEAT * tp}}
    assert answer["received"] == {"ok": REPEAT * tp}
    assert answer["violations"] == {}
    assert answer["ok"]


def test_a_late_sibling_of_0_5_16_finds_no_embedding() -> None:
    answer = run_race(RaceOptions("sglang-0.5.16", 2, 4 << 10, 2, stagger_ms=400.0))
    assert answer["received"] == {"ok": 2, "lost_embedding": 2}
    assert set(answer["violations"]) == {"lost_embedding"}


@pytest.mark.parametrize(("profile", "clean"), [("sglang-0.5.16", False), ("hardened", True)])
def test_an_nic_would_have_refused_and_0_5_16_acks_all_the_same(profile: str, clean: bool) -> None:
    answer = run_race(RaceOptions(profile, 2, 4 << 20, 4, nic=True))
    assert answer["ok"] is clean
    assert ("overlap" in answer["violations"]) is not clean
    refused = answer["codes"]["transfer"].get("-1", 0)
    assert len(answer["violations"].get("false_ack", [])) == refused == len(answer["violations"].get("wrong_bytes", []))


def test_the_cached_path_of_0_5_23_refuses_siblings_and_writes_no_wrong_byte() -> None:
    answer = run_race(RaceOptions("sglang-0.5.23-cache", 2, 64 << 10, REPEAT))
    assert answer["received"] == {"ok": REPEAT, "registration_refused": REPEAT}
    assert set(answer["violations"]) == {"overlap"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (RaceOptions(repeat=0), "--repeat"),
        (RaceOptions(tp=9), "--tp"),
        (RaceOptions("sglang-0.5.18"), "no profile"),
        (RaceOptions(bytes=20 << 30), "--bytes 21474836480 .* use 1 to 1073741824"),
        (RaceOptions(stagger_ms=float("nan")), "--stagger"),
    ],
)
def test_what_cannot_be_raced(options: RaceOptions, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        run_race(options)


def test_what_the_encoder_refuses_is_no_answer_of_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_check", lambda options: None)
    with pytest.raises(UsageError, match="a synthetic item has 1 to 1073741824 bytes"):
        run_race(RaceOptions(bytes=(1 << 30) + 1, repeat=1))


def test_an_error_that_no_broken_invariant_explains_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_one", lambda *_: Counter(deadline=1))
    answer = run_race(RaceOptions(tp=1, repeat=1))
    assert (answer["ok"], answer["violations"], answer["received"]) == (False, {}, {"deadline": 1})
