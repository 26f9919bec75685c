"""Schedules of the explorer on real processes: what broke in the model breaks there, or it is said why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdlab.check.explorer import Exploration, explore
from epdlab.check.scenario import Scenario
from epdlab.check.schedule import Expected, Schedule, replay, save
from epdlab.errors import LabError, UsageError
from epdlab.lab.replay import _answer, replay_live


@pytest.fixture(scope="module")
def race() -> Exploration:
    return explore(Scenario("sglang-0.5.16"))


@pytest.fixture(scope="module")
def deadline() -> Exploration:
    return explore(Scenario("sglang-0.5.17", tp=1, pool=True), ("receiver_deadline",))


def saved(schedule: Schedule, folder: Path) -> Path:
    path = folder / "schedule.json"
    save(schedule, path)
    return path


@pytest.mark.parametrize("invariant", ["overlap", "lost_embedding", "source_uncovered", "false_ack", "wrong_bytes"])
def test_the_race_breaks_on_real_processes_what_it_breaks_in_the_model(
    race: Exploration, invariant: str, tmp_path: Path
) -> None:
    schedule = race.findings[invariant].schedule
    answer = replay_live(saved(schedule, tmp_path))
    assert answer["ok"] and answer["missing"] == []
    assert set(answer["breaches"]) == {breach.invariant for breach in replay(schedule).breaches}


def test_a_deadline_that_frees_a_slot_under_a_write(deadline: Exploration, tmp_path: Path) -> None:
    answer = replay_live(saved(deadline.findings["destination_unsafe"].schedule, tmp_path))
    assert answer["ok"] and "destination_unsafe" in answer["breaches"]


def test_every_move_is_said(race: Exploration, tmp_path: Path) -> None:
    schedule, said = race.findings["overlap"].schedule, list[str]()
    replay_live(saved(schedule, tmp_path), said.append)
    assert len([line for line in said if line[:3].strip().isdigit()]) == len(schedule.moves)
    assert any(line.startswith("broken: [overlap]") for line in said)


def test_a_truncated_file_is_refused_before_any_process_starts(race: Exploration, tmp_path: Path) -> None:
    path = saved(race.findings["overlap"].schedule, tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="truncated"):
        replay_live(path)


def test_a_move_that_does_not_come_up_is_named(
    race: Exploration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule of the race fits the rules of 0.5.16; the processes that meet it here follow others."""
    path = saved(race.findings["overlap"].schedule, tmp_path)
    monkeypatch.setattr("epdlab.lab.replay.MOVE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("epdlab.lab.replay.load", lambda _: _under_other_rules(race))
    with pytest.raises(LabError, match=r"move \d+ of \d+, enc0 mr.register .*, did not come up"):
        replay_live(path)


def _under_other_rules(race: Exploration) -> Schedule:
    schedule = race.findings["overlap"].schedule
    return Schedule("sglang-0.5.17", schedule.tp, schedule.requests, schedule.parts, schedule.moves)


def test_what_tcp_cannot_show_is_excused_and_nothing_else(race: Exploration) -> None:
    moves = race.findings["overlap"].schedule.moves
    expected = [Expected("wrong_bytes", "")]
    plain = Schedule("hardened", 2, 1, 1, moves, breaches=expected)
    late = Schedule("hardened", 2, 1, 1, moves, fault="transfer_late", breaches=expected)
    assert not _answer(plain, {}, lambda _: None)["ok"]
    excused = _answer(late, {}, lambda _: None)
    assert excused["ok"] and excused["missing"] == ["wrong_bytes"] and "TCP" in excused["why"]["wrong_bytes"]
    assert _answer(plain, {"wrong_bytes": ["it broke"]}, lambda _: None)["ok"]
