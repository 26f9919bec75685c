"""Fixtures shared by the tests: real engines that live as long as the test process."""

from __future__ import annotations

import pytest
from handoff_world import EnginePool


@pytest.fixture(scope="session")
def engines() -> EnginePool:
    """Real engines, made on demand and reused: closing one takes Mooncake a second."""
    return EnginePool()
