"""The real transfer engine: Mooncake's, with every code made a typed error and every crash made impossible.

Owns the process's engine, its codes and its native log. Which memory is registered, for whom and until when is
`regions`' business. Codes and calls: mooncake-transfer-engine 0.3.13.post1 (`mooncake.engine.TransferEngine`).
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from .doctor import bundled_cudart, rdma_devices
from .errors import (
    BadBuffer,
    DeregistrationRefused,
    EngineError,
    EngineNotReady,
    RegistrationRefused,
    TransferFailed,
    one_line,
)
from .ports import Buffer
from .tasks import to_the_end

if TYPE_CHECKING:
    import torch

Protocol = Literal["tcp", "rdma"]
Operation = Literal["initialize", "register", "deregister", "transfer"]

WRITE_THREADS = 32
_MS_ASYNC = 1
_ADDRESSES = range(1, 1 << 64)


@dataclass(frozen=True, slots=True)
class Code:
    """What one return code of one operation means, and what mends it."""

    error: type[EngineError]
    meaning: str
    mend: str


CODES: dict[tuple[Operation, int], Code] = {
    ("register", -7): Code(
        RegistrationRefused,
        "the range overlaps a region that is already registered",
        "share the live region instead of registering it again",
    ),
    ("deregister", -3): Code(
        DeregistrationRefused,
        "no region starts at this address",
        "deregister each region once, by the address it was registered with",
    ),
    ("transfer", -1): Code(
        TransferFailed,
        "the peer refused the address, is gone, or the write timed out",
        "check that the landing memory is registered and the receiver is alive; the run's log has the engine's line",
    ),
}

_FALLBACK: dict[Operation, type[EngineError]] = {
    "initialize": EngineNotReady,
    "register": RegistrationRefused,
    "deregister": DeregistrationRefused,
    "transfer": TransferFailed,
}


def error_for(operation: Operation, code: int, what: str) -> EngineError:
    """The typed error for a non-zero code, with its number, meaning and mend."""
    known = CODES.get((operation, code))
    if known is None:
        return _FALLBACK[operation](f"{operation} {what} answered {code}; see the run's engine log", code)
    return known.error(f"{operation} {what} answered {code}: {known.meaning}; {known.mend}", code)


def check(operation: Operation, code: int, what: str) -> None:
    """Raise `error_for` unless the code is 0."""
    if code != 0:
        raise error_for(operation, code, what)


class TensorBuffer:
    """A torch tensor as a buffer: pinned to its storage until `free`.

    Raises:
        BadBuffer: the tensor is empty or not contiguous.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise BadBuffer(f"tensor of shape {tuple(tensor.shape)} is not contiguous; call .contiguous() first")
        if tensor.numel() == 0:
            raise BadBuffer("tensor is empty; there is nothing to transfer")
        self._tensor: torch.Tensor | None = tensor
        self.nbytes = tensor.numel() * tensor.element_size()

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise BadBuffer("buffer was freed; allocate a new one")
        return self._tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def synchronize(self) -> None:
        """Wait for the stream that writes this tensor: the engine reads memory, not streams."""
        if self.tensor.is_cuda:
            import torch

            torch.cuda.current_stream(self.tensor.device).synchronize()

    def digest(self) -> str:
        flat: Any = self.tensor.detach().reshape(-1).view(_uint8()).cpu().numpy()
        return f"{zlib.crc32(flat):08x}"

    def slice(self, offset: int, nbytes: int) -> TensorBuffer:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise BadBuffer(f"[{offset}, {offset + nbytes}) is outside of {self.nbytes} bytes; slice inside the buffer")
        return TensorBuffer(self.tensor.reshape(-1).view(_uint8())[offset : offset + nbytes])

    def free(self) -> None:
        self._tensor = None

    def __repr__(self) -> str:
        state = "freed" if self._tensor is None else str(self._tensor.device)
        return f"TensorBuffer({self.nbytes} bytes, {state})"


class MooncakeEngine:
    """One initialised Mooncake TransferEngine. Methods answer raw codes; misuse raises before it can crash.

    Args:
        hostname: the name peers reach this host by. A port in it is ignored under P2PHANDSHAKE.
        protocol: `tcp` or `rdma`.
        device: an RDMA device list such as `mlx5_0`, or `` for the engine's own choice.
        memory: `cpu` or `cuda`: where `allocate` puts landing memory.

    Raises:
        EngineNotReady: the library cannot be loaded, there is no such transport here, or initialize did not answer 0.
    """

    def __init__(
        self, hostname: str = "127.0.0.1", protocol: Protocol = "tcp", device: str = "", memory: str = "cpu"
    ) -> None:
        self.hostname, self.protocol, self.memory = hostname, protocol, memory
        _check_protocol(protocol)
        self._engine: Any = load_mooncake("engine").TransferEngine()
        code = self._engine.initialize(hostname, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            self._engine = None
            raise error_for("initialize", code, f"{protocol} on {hostname!r}")
        self.session_id = f"{hostname}:{self._engine.get_rpc_port()}"
        self._threads = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="mooncake-write")

    def register(self, address: int, nbytes: int) -> int:
        self._guard([address], [nbytes])
        return int(self._live().register_memory(address, nbytes))

    def deregister(self, address: int) -> int:
        _check_addresses([address])
        return int(self._live().unregister_memory(address))

    def register_batch(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        self._guard(addresses, lengths)
        return int(self._live().batch_register_memory(list(addresses), list(lengths)))

    def deregister_batch(self, addresses: Sequence[int]) -> int:
        _check_addresses(addresses)
        return int(self._live().batch_unregister_memory(list(addresses)))

    def write_blocking(self, session_id: str, source: int, target: int, nbytes: int) -> int:
        """`transfer_sync_write` in the calling thread (the GIL is released)."""
        self._guard([source], [nbytes])
        _check_addresses([target])
        return int(self._live().transfer_sync_write(session_id, source, target, nbytes))

    async def write(
        self, session_id: str, source: int, target: int, nbytes: int, answered: Callable[[], None] | None = None
    ) -> int:
        """The write in a thread. If cancelled, it returns once the thread has left the memory alone."""
        self._live()

        def write() -> int:
            code = self.write_blocking(session_id, source, target, nbytes)
            if answered is not None:
                answered()
            return code

        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, write))

    async def write_batch(
        self, session_id: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        self._guard(sources, lengths)
        _check_addresses(targets)
        if len(targets) != len(lengths):
            raise BadBuffer(f"{len(targets)} addresses for {len(lengths)} lengths; give one length each")
        call, loop = self._live().batch_transfer_sync_write, asyncio.get_running_loop()
        args = (session_id, list(sources), list(targets), list(lengths))
        return int(await to_the_end(loop.run_in_executor(self._threads, call, *args)))

    def allocate(self, nbytes: int) -> TensorBuffer:
        import torch

        if nbytes <= 0:
            raise BadBuffer(f"cannot allocate {nbytes} bytes; ask for at least 1")
        pin = self.memory == "cpu" and torch.cuda.is_available()
        try:
            return TensorBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self.memory, pin_memory=pin))
        except RuntimeError as error:
            raise BadBuffer(f"cannot allocate {nbytes} bytes of {self.memory} memory ({one_line(error)})") from None

    def close(self) -> None:
        """Let go of the engine. Idempotent; every later call raises EngineNotReady."""
        if self._engine is not None:
            self._threads.shutdown(wait=True)
            self._engine = None

    def _live(self) -> Any:
        if self._engine is None:
            raise EngineNotReady("the engine is closed; create a new one")
        return self._engine

    def _guard(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        self._live()
        if len(addresses) != len(lengths):
            raise BadBuffer(f"{len(addresses)} addresses for {len(lengths)} lengths; give one length each")
        for address, nbytes in zip(addresses, lengths, strict=True):
            if nbytes <= 0:
                raise BadBuffer(f"length {nbytes} is not positive; register and write at least 1 byte")
            fits = address in _ADDRESSES and address + nbytes in _ADDRESSES
            if not fits or (self.memory == "cpu" and not _mapped(address, nbytes)):
                raise BadBuffer(f"{nbytes} bytes at {address:#x} are not mapped here; was the tensor freed?")

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else self.session_id
        return f"MooncakeEngine({self.protocol}, {state})"


_shared: tuple[tuple[str, str, str, str], MooncakeEngine] | None = None


def init_mooncake_transfer_engine(
    hostname: str = "127.0.0.1", protocol: Protocol = "tcp", device: str = "", memory: str = "cpu"
) -> MooncakeEngine:
    """The process's shared engine, made on the first call.

    Upstream keeps one per process too and returns it whatever the later arguments
    (SGLang 0.5.17 mooncake_transfer_engine.py); here a second, different configuration is refused.

    Raises:
        EngineNotReady: the shared engine exists with other arguments.
    """
    global _shared
    wanted = (hostname, protocol, device, memory)
    if _shared is None or _shared[1]._engine is None:
        _shared = (wanted, MooncakeEngine(hostname, protocol, device, memory))
    if _shared[0] != wanted:
        raise EngineNotReady(f"the shared engine is {_shared[0]}, not {wanted}; close it first, or use the same")
    return _shared[1]


def keep_native_log(path: Path) -> None:
    """Send what native code prints on fd 2 (Mooncake's C++ log) to a file, from now on.

    Python's own sys.stderr keeps its place.
    """
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    os.close(log)


def load_mooncake(module: str) -> Any:
    """Import `mooncake.MODULE`. A CUDA wheel needs a CUDA runtime that pip puts on no loader path: it is loaded first.

    Raises:
        EngineNotReady: it cannot be loaded.
    """
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    try:
        for runtime in bundled_cudart():
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        return importlib.import_module(f"mooncake.{module}")
    except (ImportError, OSError) as error:
        raise EngineNotReady(f"Mooncake cannot be loaded ({error}); run `python -m epdlab doctor`") from None


def _check_protocol(protocol: str) -> None:
    """Mooncake takes any word, and speaks TCP where there is no RDMA device: said here, before it pretends."""
    if protocol not in get_args(Protocol):
        raise EngineNotReady(f"no transport {protocol!r}; use {' or '.join(get_args(Protocol))}")
    if protocol == "rdma" and not any(rdma_devices().values()):
        raise EngineNotReady("no RDMA device with an active port here, Mooncake would speak TCP; use --protocol tcp")


def _check_addresses(addresses: Sequence[int]) -> None:
    for address in addresses:
        if address not in _ADDRESSES:
            raise BadBuffer(f"{address:#x} is no address; pass what the buffer says")


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8


_libc = ctypes.CDLL(None, use_errno=True)


def _mapped(address: int, nbytes: int) -> bool:
    """Whether every page of the range is mapped (msync answers ENOMEM for a hole)."""
    start = address - address % mmap.PAGESIZE
    length = ctypes.c_size_t(address + nbytes - start)
    return bool(_libc.msync(ctypes.c_void_p(start), length, _MS_ASYNC) == 0)


_: type[Buffer] = TensorBuffer
