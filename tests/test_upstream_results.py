"""The stored runs of SGLang's own code: well-formed, of the scenarios as they are now, saying what we say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from epdlab.upstream import calls, run, scenarios, wire
from epdlab.upstream.recorder import RecordedEngine, Recorder, destination
from epdlab.upstream.scenarios import RELEASES, SCENARIOS, Scenario, Step

ROOT = Path(__file__).parents[1]
OUTCOME = {
    "received_ok",
    "wrong_acked",
    "not_acked",
    "http_errors",
    "uncovered_writes",
    "live_regions_after",
    "embeddings_held_after",
}
LANDING_OUTCOME = {"overwritten", "landing_regions_after", "landing_slots_after"}


def stored(release: str) -> dict[str, Any]:
    text = (ROOT / "results" / f"upstream_{release.replace('.', '_')}.json").read_text()
    return json.loads(text)


STORED = {release: stored(release) for release in RELEASES}
PLAYED = [(release, name) for release in RELEASES for name, s in SCENARIOS.items() if release in s.releases]


def result(release: str, name: str) -> dict[str, Any]:
    (found,) = [entry for entry in STORED[release]["scenarios"] if entry["name"] == name]
    return found


def outcome(release: str, name: str) -> dict[str, Any]:
    return result(release, name)["outcome"]


def sequence(release: str, name: str) -> list[tuple[str, int | None, int | None]]:
    """(op, rank, rc) of the first request."""
    return [(call["op"], call["rank"], call["rc"]) for call in result(release, name)["calls"]]


# --- form


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_says_what_ran_where_and_when(release: str) -> None:
    content = STORED[release]
    assert content["release"] == content["versions"]["sglang"] == release
    assert {"mooncake", "torch", "python", "sglang_wheel_sha256"} <= set(content["versions"])
    assert len(content["versions"]["sglang_wheel_sha256"]) == 64
    assert content["machine"]["cores"] >= 1
    assert content["command"] == f"python -m epdlab.upstream --release {release}"
    assert content["date"][:2] == "20"
    assert len(content["stands_in"]) >= 4
    names = [entry["name"] for entry in content["scenarios"]]
    assert names == [name for name, scenario in SCENARIOS.items() if release in scenario.releases]


@pytest.mark.parametrize(("release", "name"), PLAYED)
def test_a_result_is_well_formed_and_of_the_scenario_as_it_is(release: str, name: str) -> None:
    scenario, entry = SCENARIOS[name], result(release, name)
    assert entry["release"] == entry["versions"]["sglang"] == release
    assert entry["versions"]["mooncake"] == STORED[release]["versions"]["mooncake"]
    steps = [[step.do, step.rank, step.value] for step in scenario.steps]
    kept = {key: value for key, value in asdict(scenario).items() if key not in ("name", "asks", "releases", "steps")}
    assert entry["params"] == kept | {"steps": steps}, "the scenario has changed: run `make upstream`"
    assert entry["observed"] == run.observed(scenario, entry)
    assert set(entry["outcome"]) - {"settled"} == OUTCOME | (LANDING_OUTCOME if scenario.role == "receiver" else set())
    for call in entry["calls"]:
        assert call["op"] in calls.OPS
        assert call["rank"] is None or 0 <= call["rank"] < scenario.tp
        assert (call["rc"] is None) == (call["op"] not in calls.CODED)


@pytest.mark.parametrize(("release", "name"), PLAYED)
def test_the_counts_are_those_of_the_calls(release: str, name: str) -> None:
    entry = result(release, name)
    first = calls.counts(entry["calls"])
    if entry["requests"] == 1 or entry.get("distinct_orders") == 1:
        repeats = entry["requests"] if SCENARIOS[name].role == "encoder" else 1
        assert entry["counts"] == {op: {rc: n * repeats for rc, n in codes.items()} for op, codes in first.items()}
    for op, codes in first.items():
        assert all(entry["counts"][op][code] >= count for code, count in codes.items())


@pytest.mark.parametrize(("release", "name"), PLAYED)
def test_every_rank_that_asked_is_counted_once(release: str, name: str) -> None:
    scenario, seen = SCENARIOS[name], outcome(release, name)
    if scenario.role == "encoder":
        asked = {step.rank for step in scenario.steps if step.do == "send"}
        assert seen["received_ok"] + seen["wrong_acked"] + seen["not_acked"] == len(asked) * scenario.repeat


@pytest.mark.parametrize(("release", "name"), PLAYED)
def test_a_scenario_without_freedom_has_one_order(release: str, name: str) -> None:
    free = name.startswith(("concurrent_", "unordered_"))
    if SCENARIOS[name].role == "encoder" and not free:
        assert result(release, name)["distinct_orders"] == 1


# --- what the releases do


@pytest.mark.parametrize("size", ["64KiB", "4MiB"])
@pytest.mark.parametrize("tp", [2, 4])
def test_0_5_16_siblings_register_and_deregister_one_buffer_each(tp: int, size: str) -> None:
    found = result("0.5.16", f"concurrent_tp{tp}_{size}")
    requests = found["requests"]
    each = {"0": requests, "-7": requests * (tp - 1)}
    assert found["counts"]["register"] == each
    assert found["counts"]["deregister"] == {"0": requests, "-3": requests * (tp - 1)}
    assert found["outcome"]["received_ok"] == requests * tp, "over TCP the bytes arrive all the same"


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
@pytest.mark.parametrize("size", ["64KiB", "4MiB"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["concurrent", "unordered"])
def test_the_fix_registers_and_deregisters_once_a_request(release: str, kind: str, tp: int, size: str) -> None:
    found = result(release, f"{kind}_tp{tp}_{size}")
    once = {"0": found["requests"]}
    assert found["counts"] == {"register": once, "deregister": once, "transfer": {"0": found["requests"] * tp}}
    expected = dict.fromkeys(OUTCOME, 0) | {"received_ok": found["requests"] * tp}
    assert found["outcome"] == expected


@pytest.mark.parametrize("tp", [2, 4])
def test_0_5_16_unordered_siblings_lose_writes_or_embeddings(tp: int) -> None:
    for size in ("64KiB", "4MiB"):
        found = result("0.5.16", f"unordered_tp{tp}_{size}")
        registered, lost = found["counts"]["register"], found["outcome"]["not_acked"]
        assert registered["0"] + registered.get("-7", 0) + lost == found["requests"] * tp
        assert registered.get("-7", 0) == found["counts"]["deregister"].get("-3", 0) > 0
        assert found["outcome"]["http_errors"] == lost


def test_the_first_to_finish_takes_the_region_away_in_0_5_16_only() -> None:
    assert sequence("0.5.16", "first_done_under_sibling") == [
        ("encode", None, None),
        ("register", 0, 0),
        ("register", 1, -7),
        ("transfer", 0, 0),
        ("deregister", 0, 0),
        ("pop", 0, None),
        ("ack", 0, None),
        ("transfer", 1, 0),
        ("deregister", 1, -3),
        ("ack", 1, None),
    ]
    assert outcome("0.5.16", "first_done_under_sibling")["uncovered_writes"] == 3
    for release, registers in (("0.5.17", 0), ("0.5.23", None)):
        assert sequence(release, "first_done_under_sibling") == [
            ("encode", None, None),
            ("register", registers, 0),
            ("transfer", 0, 0),
            ("ack", 0, None),
            ("transfer", 1, 0),
            ("ack", 1, None),
            ("deregister", 1, 0),
            ("pop", 1, None),
        ]


def test_a_sibling_that_asks_later_gets_no_embedding_in_0_5_16_only() -> None:
    assert outcome("0.5.16", "staggered")["not_acked"] == outcome("0.5.16", "staggered")["http_errors"] == 3
    for release in ("0.5.17", "0.5.23"):
        assert outcome(release, "staggered")["received_ok"] == 6


def test_without_receive_count_only_the_timer_releases() -> None:
    for release in ("0.5.17", "0.5.23"):
        seen = outcome(release, "no_receive_count")
        assert (seen["live_regions_after"], seen["embeddings_held_after"]) == (1, 1)
        assert seen["settled"] == {"live_regions": 0, "embeddings_held": 0}


def test_a_repeated_send_counts_as_another_receiver_in_0_5_17_only() -> None:
    assert outcome("0.5.17", "repeated_send")["not_acked"] == 3
    assert outcome("0.5.17", "repeated_send_under_write")["uncovered_writes"] == 3
    assert sequence("0.5.17", "repeated_send_under_write")[-4:] == [
        ("deregister", 0, 0),
        ("pop", 0, None),
        ("transfer", 1, 0),
        ("ack", 1, None),
    ]
    for name in ("repeated_send", "repeated_send_under_write"):
        assert outcome("0.5.23", name) == dict.fromkeys(OUTCOME, 0) | {"received_ok": 6}


def test_a_failed_write_is_acked_by_0_5_16_never_counted_by_0_5_17_and_released_by_0_5_23() -> None:
    assert outcome("0.5.16", "failed_write_last")["wrong_acked"] == 3
    assert outcome("0.5.16", "failed_write_first")["wrong_acked"] == 3
    last = outcome("0.5.17", "failed_write_last")
    assert (last["wrong_acked"], last["not_acked"], last["live_regions_after"]) == (0, 3, 3)
    assert outcome("0.5.17", "failed_write_first")["received_ok"] == 3
    last = outcome("0.5.23", "failed_write_last")
    assert (last["wrong_acked"], last["not_acked"], last["live_regions_after"]) == (0, 3, 0)
    assert outcome("0.5.23", "failed_write_first")["not_acked"] == 6, "the sibling finds the request released"


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17"])
def test_a_refused_registration_is_hidden_and_costs_the_other_owner_its_region(release: str) -> None:
    same = sequence(release, "refused_same_start")
    assert ("register", 0, -7) in same
    assert ("deregister", 0, 0) in same, "clean-up deregisters what the encoder never registered"
    assert same[-1] == ("deregister", None, -3), "and its owner finds it gone"
    inside = sequence(release, "refused_inside")
    assert ("deregister", 0, -3) in inside
    assert inside[-1] == ("deregister", None, 0), "an owner that starts elsewhere keeps its region"
    assert outcome(release, "refused_inside")["uncovered_writes"] == 3


def test_0_5_23_refuses_to_send_what_it_could_not_register() -> None:
    for name in ("refused_same_start", "refused_inside"):
        assert result("0.5.23", name)["counts"]["transfer"] == {}
        assert outcome("0.5.23", name)["http_errors"] == 3
        assert sequence("0.5.23", name)[-1] == ("deregister", None, 0)


def test_the_timer_deregisters_under_a_write_in_0_5_17_and_waits_in_0_5_23() -> None:
    for name in ("timer_under_write", "asynchronous_timer_under_write"):
        assert outcome("0.5.17", name)["uncovered_writes"] == 1
        assert outcome("0.5.23", name)["uncovered_writes"] == 0
        order = [op for op, _, _ in sequence("0.5.17", name)]
        assert order.index("deregister") < order.index("transfer")
        order = [op for op, _, _ in sequence("0.5.23", name)]
        assert order.index("transfer") < order.index("deregister")
    assert outcome("0.5.16", "timer_under_write")["uncovered_writes"] == 0, "each /send owns its registration there"
    assert outcome("0.5.16", "asynchronous_timer_under_write")["uncovered_writes"] == 1


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["late_send_after_timer", "late_send_after_release"])
def test_a_late_send_is_an_error(release: str, name: str) -> None:
    seen = outcome(release, name)
    assert seen["http_errors"] >= SCENARIOS[name].repeat
    assert seen["wrong_acked"] == seen["uncovered_writes"] == 0


def test_the_asynchronous_path_registers_once_even_in_0_5_16() -> None:
    for release in RELEASES:
        found = result(release, "asynchronous")
        assert found["counts"]["register"] == found["counts"]["deregister"] == {"0": 1}
        assert found["outcome"]["received_ok"] == 2
    for release in ("0.5.16", "0.5.17"):
        assert result(release, "asynchronous")["metadata_before_forward"] == 1
        assert result(release, "tp1")["metadata_before_forward"] == 0, "the batching path answers after the forward"
    assert outcome("0.5.16", "asynchronous")["live_regions_after"] == 1, "no early release there"


def test_cached_embeddings_of_0_5_23_are_registered_for_every_send() -> None:
    staggered = result("0.5.23", "global_cache_staggered")
    assert staggered["counts"]["register"] == staggered["counts"]["deregister"] == {"0": 6}
    both = result("0.5.23", "global_cache_concurrent")
    assert both["counts"]["register"] == {"-7": 3, "0": 3}
    assert both["outcome"]["not_acked"] == both["outcome"]["http_errors"] == 3


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["end_to_end_pool", "end_to_end_per_request"])
def test_two_receivers_get_their_bytes(release: str, name: str) -> None:
    found = result(release, name)
    assert (found["outcome"]["received_ok"], found["outcome"]["wrong_acked"]) == (2, 0)
    parts = {"0": 2} | ({"-7": 2} if release == "0.5.16" else {})
    assert found["counts"]["register"] == parts
    landing = [[call["op"] for call in listed] for listed in found["landing_calls"].values()]
    assert landing == [["register"] if name == "end_to_end_pool" else ["register", "deregister"]] * 2


def test_a_late_rank_fails_the_whole_request_in_0_5_16_only() -> None:
    late = outcome("0.5.16", "end_to_end_staggered")
    assert (late["received_ok"], late["not_acked"], late["http_errors"]) == (0, 2, 2)
    for release in ("0.5.17", "0.5.23"):
        assert outcome(release, "end_to_end_staggered")["received_ok"] == 2


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_on_the_wire(release: str) -> None:
    found = result(release, "end_to_end_pool")["wire"]
    paths = {"/encode": 2, "/scheduler_receive_meta_data": 4, "/send": 4}
    assert found["times"] == (paths if release == "0.5.23" else {"/encode": 4, "/send": 4})
    sends = [entry["request"] for entry in found["exchanges"] if entry["path"] == "/send"]
    offsets = [send["buffer_address"] for send in sends]
    assert offsets == ["<landing of rank 0> + 0", f"<landing of rank 0> + {SCENARIOS['end_to_end_pool'].nbytes}"]
    assert all(("receive_count" in send) == (release != "0.5.16") for send in sends)
    assert found["ack_frames"] == [1], "no payload frame follows the metadata"
    assert {ack["fields"]["part_idx"] for ack in found["acks"]} == {0, 1}
    for ack in found["acks"]:
        assert ack["fields"]["embedding"] is None
        assert ack["frame_bytes"] < 1000


def test_a_deadline_frees_landing_memory_under_a_write() -> None:
    for release in ("0.5.16", "0.5.17"):
        for name in ("landing_wait_deadline", "landing_http_deadline"):
            assert outcome(release, name)["overwritten"] == outcome(release, name)["wrong_acked"] == 1
        assert result(release, "landing_per_request_deadline")["counts"]["transfer"] == {"-1": 1}
    waited = outcome("0.5.23", "landing_wait_deadline")
    assert (waited["overwritten"], waited["wrong_acked"]) == (0, 0), "the slot waits for its writer"
    assert outcome("0.5.23", "landing_http_deadline")["overwritten"] == 1, "the HTTP deadline still frees it"
    assert result("0.5.23", "landing_per_request_deadline")["counts"]["transfer"] == {"0": 1}


# --- the tools themselves


class RawEngine:
    """Answers as told and remembers; no memory is touched."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, int, int, int]] = []

    def register_memory(self, address: int, length: int) -> int:
        return -7 if address == 7 else 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        self.writes.append((session, source, target, length))
        return 0


def test_the_recorder_passes_codes_on_and_fails_one_write() -> None:
    recorder, raw = Recorder(), RawEngine()
    engine = RecordedEngine(raw, recorder)
    assert engine.register_memory(7, 4) == -7
    assert recorder.refused
    recorder.fail(destination("a:1", 100), -1)
    assert [engine.transfer_sync_write("a:1", 8, 100, 4) for _ in range(2)] == [-1, 0]
    assert raw.writes == [("a:1", 8, 100, 4)]
    assert [(event["op"], event["rc"]) for event in recorder.take()] == [
        ("register", -7),
        ("transfer", -1),
        ("transfer", 0),
    ]
    assert recorder.take() == []


def event(op: str, began: int, ended: int, address: int = 0, rc: int = 0, **facts: Any) -> dict[str, Any]:
    kept = {"bytes": 100, "injected": False, "owner": "release", "caller": None}
    return kept | {"op": op, "began": began, "ended": ended, "address": address, "rc": rc} | facts


def test_a_write_is_covered_only_if_the_region_lives_throughout() -> None:
    live = [event("register", 0, 1), event("deregister", 10, 11)]
    assert calls.uncovered_writes([*live, event("transfer", 2, 9)]) == 0
    assert calls.uncovered_writes([*live, event("transfer", 2, 12)]) == 1
    assert calls.uncovered_writes([*live, event("transfer", 0, 9)]) == 1
    assert calls.uncovered_writes([*live, event("transfer", 2, 9, bytes=101)]) == 1
    assert calls.uncovered_writes([event("register", 0, 1, rc=-7), event("transfer", 2, 9)]) == 1
    assert calls.uncovered_writes([*live, event("transfer", 2, 12, injected=True, rc=-1)]) == 0


def test_calls_carry_names_and_ranks() -> None:
    events = [
        event("encode", 0, 1, address=5, rc=None),
        event("register", 2, 3, address=9, owner="other"),
        event("register", 4, 5, address=5, rc=-7, caller="s:0"),
        event("transfer", 6, 7, address=5, session="s:1"),
        {"op": "ack", "began": 8, "ended": 8, "port": 71, "bytes": 3, "rc": None, "caller": None},
        event("register", 9, 10, address=12),
    ]
    named = calls.named(events, {"s:0": 0, "s:1": 1}, {71: 1})
    assert [(call["op"], call["rank"], call["region"]) for call in named] == [
        ("encode", None, "emb#1"),
        ("register", None, "other#1"),
        ("register", 0, "emb#1"),
        ("transfer", 1, "emb#1"),
        ("ack", 1, None),
        ("register", None, "region#1"),
    ]
    assert calls.live_regions(events) == 2


def test_a_scenario_refuses_what_it_cannot_play() -> None:
    with pytest.raises(ValueError, match="no step 'sned' for the encoder; use encode"):
        Scenario("x", "?", (Step("sned", 0),))
    with pytest.raises(ValueError, match="names rank 2 of 2"):
        Scenario("x", "?", (Step("send", 2),))


def test_scenarios_need_nothing_but_the_standard_library() -> None:
    code = "import importlib.util, sys\nspec = importlib.util.spec_from_file_location('s', sys.argv[1])\n"
    code += (
        "module = importlib.util.module_from_spec(spec)\nsys.modules['s'] = module\nspec.loader.exec_module(module)\n"
    )
    code += "print(len(module.SCENARIOS))"
    shown = subprocess.run(
        [sys.executable, "-ISc", code, str(scenarios.__file__)], capture_output=True, text=True, check=True, timeout=30
    )
    assert int(shown.stdout) == len(SCENARIOS)


def test_statuses_count_sends_only() -> None:
    events = [{"op": "http", "path": path, "status": status} for path, status in (("/encode", 200), ("/send", 500))]
    assert wire.statuses(events) == {"500": 1}


@pytest.mark.upstream
@pytest.mark.timeout(900)
def test_a_release_still_does_what_is_stored() -> None:
    command = [sys.executable, "-m", "epdlab.upstream", "--release", "0.5.16", "--scenario", "first_done_under_sibling"]
    shown = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True, timeout=850)
    (entry,) = json.loads(shown.stdout)
    assert entry["calls"] == result("0.5.16", "first_done_under_sibling")["calls"]
