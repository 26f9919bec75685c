"""Fixtures shared by the tests: real engines that live as long as the test process."""

from __future__ import annotations

import socket

import pytest
import zmq
from handoff_world import EnginePool

from epdlab.link import ZmqPusher


@pytest.fixture(scope="session")
def engines() -> EnginePool:
    """Real engines, made on demand and reused: closing one takes Mooncake a second."""
    return EnginePool()


@pytest.fixture
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ack to a socket that is closed already fails at once; ZMQ itself would wait for a new one there."""
    monkeypatch.setattr("epdlab.link.PUSH_TIMEOUT_MS", 2_000)
    push = ZmqPusher.push

    async def push_or_refuse(self: ZmqPusher, frame: bytes) -> None:
        host, _, port = self.endpoint.rpartition(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))):
                raise self._lost(zmq.ZMQError(zmq.ECONNREFUSED))
        await push(self, frame)

    monkeypatch.setattr(ZmqPusher, "push", push_or_refuse)
