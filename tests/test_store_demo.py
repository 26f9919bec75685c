"""The scenario of `epdlab store`, as a whole: processes, both caches, death of a donor; and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

from epdlab.lab.store_demo import run_store


def test_the_scenario(tmp_path: Path) -> None:
    said: list[str] = []
    answer = json.loads(json.dumps(run_store(tmp_path / "out", said.append)))
    assert answer["ok"], answer["checks"]
    assert set(answer["checks"]) == {
        "bytes_equal",
        "second_request_hits_locally",
        "other_encoder_hits_globally",
        "only_the_miss_is_computed",
        "the_pool_evicts",
        "evicted_entries_come_back",
        "a_dead_donor_costs_a_forward",
        "a_new_donor_is_used",
        "nothing_left_running",
    }
    assert {"local_hit", "global_hit", "miss", "fallback", "evicted", "refused"} == set(answer["counters"]["enc0"])
    ways = {(row["from"], row["to"]) for row in answer["copies"]}
    assert {("embedding", "pool"), ("pool", "segment"), ("segment", "pool"), ("pool", "embedding")} <= ways
    assert answer["ms"]["local_hit"] > 0
    assert answer["store"]["segments"]
    assert said
