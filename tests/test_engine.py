"""The real engine: every code is a typed error that says what to do, and no call, however wrong, ends the process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_world import EnginePool

from epdlab import engine as engine_module
from epdlab.bench.late import FIRST, MIB, NEXT, FrozenPair, settled
from epdlab.engine import CODES, MooncakeEngine, TensorBuffer, check, error_for, init_mooncake_transfer_engine
from epdlab.errors import (
    BadBuffer,
    DeregistrationRefused,
    EngineError,
    EngineNotReady,
    RegistrationRefused,
    TransferFailed,
)

NOWHERE = 1 << 46
OUT_OF_RANGE = (-1, -4096, 0, 1 << 64, 1 << 70)


@pytest.fixture
def pair(engines: EnginePool) -> tuple[MooncakeEngine, MooncakeEngine]:
    source, target = engines.take(2)
    return source, target


@pytest.fixture
def here(pair: tuple[MooncakeEngine, MooncakeEngine]) -> MooncakeEngine:
    return pair[0]


def filled(nbytes: int, seed: int = 1) -> TensorBuffer:
    generator = torch.Generator().manual_seed(seed)
    return TensorBuffer(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))


# ---- codes -----------------------------------------------------------------------------------------------------------


def test_register_answers_0_then_minus_7(here: MooncakeEngine) -> None:
    buffer = filled(4096)
    assert here.register(buffer.address, 4096) == 0
    assert here.register(buffer.address, 4096) == -7
    assert here.register(buffer.address + 100, 8) == -7
    assert here.deregister(buffer.address) == 0


def test_deregister_answers_0_then_minus_3(here: MooncakeEngine) -> None:
    buffer = filled(4096)
    assert here.register(buffer.address, 4096) == 0
    assert here.deregister(buffer.address + 8) == -3
    assert here.deregister(buffer.address) == 0
    assert here.deregister(buffer.address) == -3


async def test_a_write_arrives(pair: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    source, target = pair
    buffer, landing = filled(10_007), target.allocate(10_007)
    assert target.register(landing.address, landing.nbytes) == 0
    assert await source.write(target.session_id, buffer.address, landing.address, landing.nbytes) == 0
    assert landing.digest() == buffer.digest()
    assert target.deregister(landing.address) == 0


async def test_a_write_answers_minus_1_where_it_may_not_land(pair: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    source, target = pair
    buffer, landing = filled(256), target.allocate(256)
    untouched = landing.digest()
    assert await source.write(target.session_id, buffer.address, landing.address, 256) == -1
    assert target.register(landing.address, 256) == 0
    assert await source.write(target.session_id, buffer.address, landing.address + 128, 256) == -1
    assert landing.digest() == untouched
    assert target.deregister(landing.address) == 0


@pytest.mark.parametrize(
    "peer", ["127.0.0.1:1", "garbage", "", ":", "127.0.0.1:99999", "127.0.0.1:x", "\0", "x" * 5000]
)
async def test_a_write_to_no_peer_answers_minus_1(here: MooncakeEngine, peer: str) -> None:
    buffer = filled(64)
    assert await here.write(peer, buffer.address, buffer.address, 64) == -1


async def test_batches(pair: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    source, target = pair
    buffers, landings = [filled(1000, seed) for seed in (1, 2)], [target.allocate(1000) for _ in range(2)]
    sources, targets = [b.address for b in buffers], [b.address for b in landings]
    assert target.register_batch(targets, [1000, 1000]) == 0
    assert target.register_batch(targets, [1000, 1000]) == -7
    assert await source.write_batch(target.session_id, sources, targets, [1000, 1000]) == 0
    assert [b.digest() for b in landings] == [b.digest() for b in buffers]
    assert await source.write_batch(target.session_id, sources, [targets[0], NOWHERE], [1000, 1000]) == -1
    assert target.deregister_batch(targets) == 0
    assert target.deregister_batch(targets) == -3


async def test_empty_batches_are_nothing(here: MooncakeEngine) -> None:
    assert (here.register_batch([], []), here.deregister_batch([])) == (0, 0)
    assert await here.write_batch(here.session_id, [], [], []) == 0


# ---- codes as errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "code", "kind"),
    [
        ("register", -7, RegistrationRefused),
        ("deregister", -3, DeregistrationRefused),
        ("transfer", -1, TransferFailed),
    ],
)
def test_a_known_code_is_an_error_with_number_meaning_and_mend(operation: Any, code: int, kind: type) -> None:
    error = error_for(operation, code, "of this")
    known = CODES[operation, code]
    assert type(error) is kind
    assert error.code == code
    for text in (str(code), "of this", known.meaning, known.mend):
        assert text in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("initialize", EngineNotReady),
        ("register", RegistrationRefused),
        ("deregister", DeregistrationRefused),
        ("transfer", TransferFailed),
    ],
)
def test_an_unknown_code_is_an_error_too(operation: Any, kind: type) -> None:
    error = error_for(operation, -999, "of this")
    assert type(error) is kind
    assert (error.code, "-999" in str(error), "engine log" in str(error)) == (-999, True, True)


def test_check_lets_0_pass() -> None:
    check("register", 0, "this")
    with pytest.raises(RegistrationRefused):
        check("register", -7, "this")


# ---- buffers ---------------------------------------------------------------------------------------------------------


def test_a_buffer_of_a_tensor_that_is_not_contiguous() -> None:
    with pytest.raises(BadBuffer, match=r"contiguous\(\)"):
        TensorBuffer(torch.zeros(8, 8).t())


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_buffer_of_an_empty_tensor(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadBuffer, match="empty"):
        TensorBuffer(torch.zeros(shape))


def test_a_freed_buffer_says_so() -> None:
    buffer = filled(16)
    buffer.free()
    buffer.free()
    for use in (lambda: buffer.address, buffer.digest, buffer.synchronize, lambda: buffer.slice(0, 1)):
        with pytest.raises(BadBuffer, match="freed"):
            use()
    assert repr(buffer) == "TensorBuffer(16 bytes, freed)"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (15, 2), (0, 17), (0, 0), (4, -1)])
def test_a_slice_outside_of_its_buffer(offset: int, nbytes: int) -> None:
    with pytest.raises(BadBuffer):
        filled(16).slice(offset, nbytes)


def test_a_slice_is_the_same_memory() -> None:
    buffer = TensorBuffer(torch.arange(8, dtype=torch.int32).reshape(2, 4))
    part = buffer.slice(4, 8)
    assert (part.address - buffer.address, part.nbytes) == (4, 8)
    assert part.tensor.view(torch.int32).tolist() == [1, 2]
    assert part.digest() == TensorBuffer(torch.tensor([1, 2], dtype=torch.int32)).digest()


# ---- misuse: a typed error, never a crash ----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, -1, -4096])
async def test_a_length_that_is_not_positive(here: MooncakeEngine, nbytes: int) -> None:
    address = filled(64).address
    with pytest.raises(BadBuffer, match="not positive"):
        here.register(address, nbytes)
    with pytest.raises(BadBuffer, match="not positive"):
        here.register_batch([address], [nbytes])
    with pytest.raises(BadBuffer, match="not positive"):
        await here.write(here.session_id, address, address, nbytes)
    with pytest.raises(BadBuffer, match="not positive"):
        await here.write_batch(here.session_id, [address], [address], [nbytes])
    with pytest.raises(BadBuffer, match="at least 1"):
        here.allocate(nbytes)


@pytest.mark.parametrize("address", [*OUT_OF_RANGE, NOWHERE, (1 << 64) - 4096])
async def test_an_address_that_is_not_mapped(here: MooncakeEngine, address: int) -> None:
    with pytest.raises(BadBuffer, match="not mapped"):
        here.register(address, 64)
    with pytest.raises(BadBuffer, match="not mapped"):
        await here.write(here.session_id, address, filled(64).address, 64)


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 64, 1 << 70])
def test_a_range_that_runs_out_of_its_mapping(here: MooncakeEngine, nbytes: int) -> None:
    with pytest.raises(BadBuffer, match="not mapped"):
        here.register(filled(64).address, nbytes)


@pytest.mark.parametrize("address", OUT_OF_RANGE)
async def test_an_address_no_memory_can_have(here: MooncakeEngine, address: int) -> None:
    source = filled(64)
    with pytest.raises(BadBuffer, match="no address"):
        here.deregister(address)
    with pytest.raises(BadBuffer, match="no address"):
        here.deregister_batch([address])
    with pytest.raises(BadBuffer, match="no address"):
        await here.write(here.session_id, source.address, address, 64)
    with pytest.raises(BadBuffer, match="no address"):
        await here.write_batch(here.session_id, [source.address], [address], [64])


def test_the_pointer_of_a_freed_tensor(here: MooncakeEngine) -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    with pytest.raises(BadBuffer, match="freed"):
        here.register(address, 64 << 20)


async def test_lists_of_different_lengths(here: MooncakeEngine) -> None:
    address = filled(64).address
    with pytest.raises(BadBuffer, match="2 addresses for 1"):
        here.register_batch([address, address + 32], [32])
    with pytest.raises(BadBuffer, match="1 addresses for 2"):
        await here.write_batch(here.session_id, [address, address], [address], [32, 32])


def test_more_memory_than_there_is(here: MooncakeEngine) -> None:
    with pytest.raises(BadBuffer, match="cannot allocate"):
        here.allocate(1 << 60)


@pytest.fixture(scope="module")
def closed() -> MooncakeEngine:
    engine = MooncakeEngine()
    engine.close()
    engine.close()
    return engine


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, address: engine.register(address, 64),
        lambda engine, address: engine.deregister(address),
        lambda engine, address: engine.register_batch([address], [64]),
        lambda engine, address: engine.deregister_batch([address]),
        lambda engine, address: engine.write_blocking("127.0.0.1:1", address, address, 64),
        lambda engine, address: asyncio.run(engine.write("127.0.0.1:1", address, address, 64)),
        lambda engine, address: asyncio.run(engine.write_batch("127.0.0.1:1", [address], [address], [64])),
    ],
)
def test_every_call_after_close_says_so(closed: MooncakeEngine, call: Callable[[MooncakeEngine, int], Any]) -> None:
    with pytest.raises(EngineNotReady, match="closed"):
        call(closed, filled(64).address)
    assert repr(closed) == "MooncakeEngine(tcp, closed)"


def test_a_protocol_that_does_not_exist() -> None:
    with pytest.raises(EngineNotReady, match="pigeon"):
        MooncakeEngine(protocol="pigeon")  # type: ignore[arg-type]


def test_an_engine_that_never_became_one() -> None:
    """Mooncake dies of a registration before initialize; here there is no such engine to call."""
    broken = MooncakeEngine.__new__(MooncakeEngine)
    broken.hostname, broken.protocol, broken.memory, broken._engine = "", "tcp", "cpu", None
    with pytest.raises(EngineNotReady):
        broken.register(filled(64).address, 64)


# ---- a write that is given up ----------------------------------------------------------------------------------------


async def test_a_cancelled_write_ends_with_the_write_itself(
    here: MooncakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may go as soon as the awaiting task is gone, so that task stays while the thread still reads."""
    import threading

    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: Any) -> int:
        begun.set()
        may_end.wait(20)
        ended.set()
        return 0

    monkeypatch.setattr(here, "write_blocking", slow)
    task = asyncio.ensure_future(here.write("127.0.0.1:1", 4096, 4096, 1))
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(3):
        task.cancel()
        await asyncio.wait([task], timeout=0)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# ---- the shared engine -----------------------------------------------------------------------------------------------


def test_the_shared_engine_is_one_and_refuses_a_second_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_shared", None)
    first = init_mooncake_transfer_engine()
    try:
        assert init_mooncake_transfer_engine() is first
        with pytest.raises(EngineNotReady, match="close it first"):
            init_mooncake_transfer_engine("localhost")
        with pytest.raises(EngineNotReady, match="close it first"):
            init_mooncake_transfer_engine(memory="cuda")
        assert init_mooncake_transfer_engine() is first
    finally:
        first.close()


def test_a_closed_shared_engine_makes_room_for_another(monkeypatch: pytest.MonkeyPatch, closed: MooncakeEngine) -> None:
    monkeypatch.setattr(engine_module, "_shared", (("127.0.0.1", "tcp", "", "cpu"), closed))
    second = init_mooncake_transfer_engine("localhost")
    try:
        assert (second is closed, second.session_id.partition(":")[0]) == (False, "localhost")
    finally:
        second.close()


# ---- the library -----------------------------------------------------------------------------------------------------


def test_a_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    reason = "libibverbs.so.1: cannot open shared object file"
    (package / "engine.py").write_text(f"raise ImportError({reason!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    with pytest.raises(EngineNotReady, match=r"libibverbs.*doctor"):
        MooncakeEngine()


def test_native_lines_go_to_the_log_and_pythons_stay(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from epdlab.engine import keep_native_log\n"
        "keep_native_log(Path(sys.argv[1])); os.write(2, b'from C++\\n'); print('from Python', file=sys.stderr)"
    )
    log = tmp_path / "native.log"
    answer = subprocess.run(
        [sys.executable, "-c", program, str(log)], capture_output=True, text=True, check=True, timeout=60
    )
    assert (log.read_text(), answer.stderr) == ("from C++\n", "from Python\n")


def test_mapped_looks_at_every_page() -> None:
    libc = ctypes.CDLL(None)
    page = engine_module.mmap.PAGESIZE
    with engine_module.mmap.mmap(-1, 3 * page) as three:
        address = ctypes.addressof(ctypes.c_char.from_buffer(three))
        assert engine_module._mapped(address + 5, 3 * page - 5)
        assert libc.munmap(ctypes.c_void_p(address + page), ctypes.c_size_t(page)) == 0
        assert engine_module._mapped(address, page)
        assert not engine_module._mapped(address, page + 1)
        assert not engine_module._mapped(address + page - 1, 2)
        assert engine_module._mapped(address + 2 * page, page)


def test_error_classes_are_engine_errors() -> None:
    assert {RegistrationRefused, DeregistrationRefused, TransferFailed, EngineNotReady, BadBuffer} <= set(
        EngineError.__subclasses__()
    )


def test_a_write_that_timed_out_lands_when_its_frozen_peer_goes_on() -> None:
    """-1 does not mean that the bytes are gone: they take the memory, and come from what the source holds by then."""
    with FrozenPair(MIB) as pair:
        assert pair.write()[0] == 0
        assert bool((pair.landing == FIRST).all())
        pair.freeze()
        assert pair.write()[0] == -1
        pair.landing.fill_(NEXT)
        pair.thaw()
        assert settled(pair.landing) > 0
