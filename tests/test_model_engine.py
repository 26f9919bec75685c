"""The model engine against the real one: the same random calls, the same codes and bytes, but for what is listed."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from epdlab.check.model_engine import (
    BASE,
    FAILED,
    NOT_MODELLED,
    OK,
    OVERLAP,
    POISON,
    STRICTER,
    UNKNOWN,
    Fabric,
    ModelEngine,
    ModelMemory,
    covered,
)
from epdlab.engine import MooncakeEngine
from epdlab.errors import BadBuffer, EngineNotReady

ARENA = 512
LARGE = 64 << 20
SIDES = st.sampled_from((0, 1))
STARTS = st.integers(0, 11).map(lambda n: n * 32)
LENGTHS = st.sampled_from((16, 32, 64, 96, 128))
RANGES = st.tuples(STARTS, LENGTHS)


class Arena:
    """Real memory of one side: `ARENA` bytes that stay where they are."""

    def __init__(self, nbytes: int = ARENA) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self._pin = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._pin)


@dataclass
class Pair:
    """Two real engines that know each other, one that is dead, and their memory."""

    engines: list[MooncakeEngine]
    dead: str
    arenas: list[Arena]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Engines of this module alone: without pooled connections, see NOT_MODELLED."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    engines = [MooncakeEngine() for _ in range(3)]
    patch.undo()
    dead = engines.pop()
    dead.close()
    return Pair(engines, dead.session_id, [Arena(), Arena()])


class BothEngines(RuleBasedStateMachine):
    """Every call goes to both; codes and bytes are the same, or the difference is in STRICTER."""

    pair: Pair

    @initialize()
    def start(self) -> None:
        fabric = Fabric()
        self.models = [ModelEngine(f"model{side}", ModelMemory(ARENA), fabric) for side in (0, 1)]
        for side in (0, 1):
            self.fill(side, side)

    def teardown(self) -> None:
        for side in (0, 1):
            for offset in range(0, ARENA, 16):
                self.pair.engines[side].deregister(self.real(side, offset))

    def real(self, side: int, offset: int) -> int:
        return self.pair.arenas[side].address + offset

    # ---- regions ----

    @rule(side=SIDES, span=RANGES)
    def register(self, side: int, span: tuple[int, int]) -> None:
        start, nbytes = span
        code = self.pair.engines[side].register(self.real(side, start), nbytes)
        assert code == self.models[side].register(BASE + start, nbytes)

    @rule(side=SIDES, start=STARTS, into=st.sampled_from((0, 0, 16)))
    def deregister(self, side: int, start: int, into: int) -> None:
        """Also what is registered nowhere, twice, or by an address inside the region."""
        code = self.pair.engines[side].deregister(self.real(side, start + into))
        assert code == self.models[side].deregister(BASE + start + into)

    @rule(side=SIDES, spans=st.lists(RANGES, min_size=1, max_size=3))
    def register_batch(self, side: int, spans: list[tuple[int, int]]) -> None:
        starts, lengths = [s for s, _ in spans], [n for _, n in spans]
        code = self.pair.engines[side].register_batch([self.real(side, s) for s in starts], lengths)
        assert code == self.models[side].register_batch([BASE + s for s in starts], lengths)

    @rule(side=SIDES, choice=st.integers(0, 2), unknown=STARTS)
    def deregister_batch(self, side: int, choice: int, unknown: int) -> None:
        """Live regions, or one unknown address. A mixture breaks the real engine, see NOT_MODELLED."""
        live = [start - BASE for start in sorted(self.models[side].regions)]
        starts = live[: choice + 1] or [unknown]
        code = self.pair.engines[side].deregister_batch([self.real(side, s) for s in starts])
        assert code == self.models[side].deregister_batch([BASE + s for s in starts])

    # ---- bytes ----

    @rule(side=SIDES, seed=st.integers(0, 255))
    def fill(self, side: int, seed: int) -> None:
        data = bytes((seed + 7 * i) % 256 for i in range(ARENA))
        self.pair.arenas[side].map[:] = data
        self.models[side].memory.write(BASE, data)

    @rule(source=SIDES, sink=SIDES, at=STARTS, to=STARTS, nbytes=LENGTHS)
    def write(self, source: int, sink: int, at: int, to: int, nbytes: int) -> None:
        """From and to anything: registered or not, in part, across regions, to oneself."""
        peer = self.pair.engines[sink].session_id
        code = self.pair.engines[source].write_blocking(peer, self.real(source, at), self.real(sink, to), nbytes)
        model, other = self.models[source], self.models[sink]
        answer = asyncio.run(model.write(other.session_id, BASE + at, BASE + to, nbytes))
        if answer == code:
            return
        strict = STRICTER[self.strictness(model, BASE + at, nbytes)]
        assert (code, answer) == (strict.tcp, strict.model)
        assert covered(other.regions, BASE + to, nbytes), "only a source may be judged more strictly here"
        other.memory.write(BASE + to, model.memory.read(BASE + at, nbytes))

    @rule(source=SIDES, at=STARTS, to=st.lists(STARTS, min_size=1, max_size=2), nbytes=LENGTHS)
    def write_batch(self, source: int, at: int, to: list[int], nbytes: int) -> None:
        """Several ranges from one covered source. What a failed batch leaves behind is not modelled."""
        model, target = self.models[source], 1 - source
        if not covered(model.regions, BASE + at, nbytes):
            return
        count, peer = len(to), self.pair.engines[target].session_id
        sources, targets = [self.real(source, at)] * count, [self.real(target, offset) for offset in to]
        code = asyncio.run(self.pair.engines[source].write_batch(peer, sources, targets, [nbytes] * count))
        other = self.models[target]
        offsets = [BASE + offset for offset in to]
        answer = asyncio.run(model.write_batch(other.session_id, [BASE + at] * count, offsets, [nbytes] * count))
        assert code == answer
        if code != OK:
            other.memory.write(BASE, self.pair.arenas[target].map[:])

    @rule(source=SIDES, at=STARTS, nbytes=LENGTHS)
    def write_to_the_dead(self, source: int, at: int, nbytes: int) -> None:
        code = self.pair.engines[source].write_blocking(self.pair.dead, self.real(source, at), self.real(0, 0), nbytes)
        assert code == asyncio.run(self.models[source].write("model2", BASE + at, BASE, nbytes)) == FAILED

    @invariant()
    def same_bytes(self) -> None:
        for side, model in enumerate(getattr(self, "models", [])):
            assert self.pair.arenas[side].map[:] == model.memory.read(BASE, ARENA)

    @staticmethod
    def strictness(model: ModelEngine, address: int, nbytes: int) -> str:
        """Which rule of RDMA a source breaks."""
        inside = [covered(model.regions, byte, 1) for byte in range(address, address + nbytes)]
        return "source_spans_regions" if all(inside) else "source_unregistered"


@pytest.mark.timeout(120)
def test_model_and_real_engine_answer_alike(pair: Pair) -> None:
    """Random calls to both, see BothEngines."""
    BothEngines.pair = pair
    quick = settings(
        max_examples=40,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(BothEngines, settings=quick)


@pytest.mark.parametrize("name", ["source_unregistered", "source_spans_regions"])
def test_the_model_is_stricter_with_sources(pair: Pair, name: str) -> None:
    """TCP lets a write pass whose source an RDMA NIC would reject, and its bytes arrive."""
    fabric = Fabric()
    models = [ModelEngine(f"model{side}", ModelMemory(ARENA), fabric) for side in (0, 1)]
    sources = {"source_unregistered": [], "source_spans_regions": [(0, 32), (32, 32)]}[name]
    for start, nbytes in sources:
        assert pair.engines[0].register(pair.arenas[0].address + start, nbytes) == OK
        assert models[0].register(BASE + start, nbytes) == OK
    assert pair.engines[1].register(pair.arenas[1].address, 64) == OK
    assert models[1].register(BASE, 64) == OK
    pair.arenas[0].map[:64] = bytes(range(64))
    real = pair.engines[0].write_blocking(
        pair.engines[1].session_id, pair.arenas[0].address, pair.arenas[1].address, 64
    )
    model = asyncio.run(models[0].write("model1", BASE, BASE, 64))
    for start, _ in sources:
        pair.engines[0].deregister(pair.arenas[0].address + start)
    pair.engines[1].deregister(pair.arenas[1].address)
    assert (real, model) == (STRICTER[name].tcp, STRICTER[name].model)
    assert pair.arenas[1].map[:64] == bytes(range(64))
    assert models[1].memory.read(BASE, 64) == bytes([POISON]) * 64


@pytest.mark.parametrize("name", ["source_withdrawn", "destination_withdrawn"])
def test_tcp_does_not_notice_what_is_withdrawn_under_a_write(pair: Pair, name: str) -> None:
    """The real engine answers 0. The model's -1 is the world's, see test_explorer."""
    source, target = Arena(LARGE), Arena(LARGE)
    source.map[:] = bytes([1]) * LARGE
    for _ in range(20):
        target.map[:] = bytes(LARGE)
        assert pair.engines[0].register(source.address, LARGE) == OK
        assert pair.engines[1].register(target.address, LARGE) == OK
        codes: list[int] = []
        session = pair.engines[1].session_id
        arguments = (session, source.address, target.address, LARGE)
        call = threading.Thread(target=lambda a=arguments, c=codes: c.append(pair.engines[0].write_blocking(*a)))
        call.start()
        while call.is_alive() and target.map[0] == 0:
            pass
        withdrawn = pair.engines[0] if name == "source_withdrawn" else pair.engines[1]
        withdrawn.deregister((source if name == "source_withdrawn" else target).address)
        in_time = target.map[LARGE - 1] == 0
        call.join()
        pair.engines[0].deregister(source.address)
        pair.engines[1].deregister(target.address)
        if in_time:
            assert codes == [STRICTER[name].tcp]
            return
    pytest.fail("twenty writes of 64 MiB ended before the region could be withdrawn")


def test_a_failed_batch_deregistration_spoils_its_ranges(pair: Pair) -> None:
    """The real engine's regions are gone, and can never come back; the model lets them (NOT_MODELLED)."""
    arena, engine = Arena(), pair.engines[0]
    model = ModelEngine("model", ModelMemory(ARENA))
    codes = []
    for one, start in ((engine, arena.address), (model, BASE)):
        codes.append(
            (
                one.register(start, 64),
                one.deregister_batch([start, start + 128]),
                one.deregister(start),
                one.register(start, 64),
            )
        )
    assert codes == [(OK, UNKNOWN, UNKNOWN, OVERLAP), (OK, UNKNOWN, UNKNOWN, OK)]
    assert "failed_batch_deregister" in NOT_MODELLED


def test_every_difference_is_listed() -> None:
    """The lists are data: each rule says what it is, and which code either engine answers."""
    assert set(STRICTER) == {
        "source_unregistered",
        "source_spans_regions",
        "source_withdrawn",
        "destination_withdrawn",
    }
    assert all((rule.tcp, rule.model) == (OK, FAILED) and rule.sentence for rule in STRICTER.values())
    assert all(NOT_MODELLED.values())


# ---- the model by itself ----


def test_freed_memory_is_poisoned_and_reused() -> None:
    memory = ModelMemory(64)
    first = memory.take(16)
    address = first.address
    memory.write(address, b"x" * 16)
    view = first.slice(4, 8)
    first.free()
    assert memory.read(address, 16) == b"x" * 16, "a view keeps the memory"
    del view
    assert memory.read(address, 16) == bytes([POISON]) * 16
    assert memory.take(16).address == address


def test_memory_refuses_what_it_cannot_hold() -> None:
    memory = ModelMemory(32)
    with pytest.raises(BadBuffer, match="at least 1"):
        memory.take(0)
    kept = memory.take(32)
    with pytest.raises(BadBuffer, match="no room"):
        memory.take(1)
    with pytest.raises(BadBuffer, match="outside"):
        kept.slice(16, 32)
    kept.free()
    with pytest.raises(BadBuffer, match="freed"):
        _ = kept.address


def test_codes_of_the_model() -> None:
    engine = ModelEngine("one", ModelMemory(ARENA))
    assert engine.register(BASE, 64) == OK
    assert engine.register(BASE + 32, 64) == OVERLAP
    assert engine.deregister(BASE + 32) == UNKNOWN
    assert engine.deregister(BASE) == OK
    assert engine.deregister(BASE) == UNKNOWN


def test_a_closed_engine_is_dead_to_its_peers_and_refuses_calls() -> None:
    fabric = Fabric()
    one, two = (ModelEngine(name, ModelMemory(ARENA), fabric) for name in ("one", "two"))
    assert (one.register(BASE, 64), two.register(BASE, 64)) == (OK, OK)
    assert asyncio.run(one.write("two", BASE, BASE, 64)) == OK
    two.close()
    two.close()
    assert asyncio.run(one.write("two", BASE, BASE, 64)) == FAILED
    with pytest.raises(EngineNotReady, match="create a new one"):
        two.register(BASE, 64)
