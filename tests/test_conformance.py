"""Our profiles against the stored call sequences of the releases."""

from pathlib import Path

import pytest

from epdlab.engine import keep_native_log
from epdlab.errors import UsageError
from epdlab.upstream.conformance import compare, signature, stored
from epdlab.upstream.ours import Bed, play
from epdlab.upstream.scenarios import RELEASES, SCENARIOS

# (release, scenario): why the profile cannot do what the release does.
KNOWN_DIFFERENCES: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize("release", RELEASES)
async def test_a_profile_calls_the_engine_as_its_release_did(release: str, tmp_path: Path) -> None:
    keep_native_log(tmp_path / "engine.log")
    async with Bed() as bed:
        compared = await compare(release, bed)
    assert len(compared) == len(stored(release)) > 10
    assert sum(comparison.ordered for comparison in compared) > 10
    different = {(c.release, c.scenario): c.differences for c in compared if c.differences}
    assert different.keys() == {key for key in KNOWN_DIFFERENCES if key[0] == release}, different


async def test_another_profile_does_not_pass_for_a_release(tmp_path: Path) -> None:
    keep_native_log(tmp_path / "engine.log")
    theirs = next(s for s in stored("0.5.16") if s["name"] == "first_done_under_sibling")
    async with Bed() as bed:
        ours = await play(SCENARIOS["first_done_under_sibling"], "0.5.17", bed)
    assert signature(ours["calls"]) != signature(theirs["calls"])
    assert ours["counts"] != theirs["counts"]


async def test_receiver_scenarios_are_refused(tmp_path: Path) -> None:
    receiver = next(s for s in SCENARIOS.values() if s.role == "receiver")
    async with Bed() as bed:
        with pytest.raises(UsageError, match="encoder scenarios"):
            await play(receiver, "0.5.17", bed)
