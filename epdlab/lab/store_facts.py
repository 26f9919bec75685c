"""What the bare Mooncake Store does when something is slow, full or dead: codes and times, each measured once.

The calls are Mooncake's own, without our cache in front of them. Codes: mooncake-transfer-engine 0.3.13.post1.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..donor import Donor
from ..engine import keep_native_log, load_mooncake
from ..master import MooncakeMaster

MIB = 1 << 20
LEASE_MS = 500
PUTS = 60
FLAGS = {"default_kv_lease_ttl": LEASE_MS, "client_ttl": 3}
CHILD = """
import os, sys
from epdlab.engine import load_mooncake
import numpy as np
store = load_mooncake("store").MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
data = np.ones(4 << 20, np.uint8)
store.register_buffer(data.ctypes.data, data.nbytes)
print("ready", flush=True)
sys.stdin.readline()
store.put_from(sys.argv[2], data.ctypes.data, data.nbytes)
"""
Say = Callable[[str], None]


class _Bare:
    """A client that lends nothing, with one registered buffer."""

    def __init__(self, master: str) -> None:
        self.store = load_mooncake("store").MooncakeDistributedStore()
        self.code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master)
        self.data = np.ones(4 * MIB, np.uint8)
        self.store.register_buffer(self.data.ctypes.data, self.data.nbytes)

    def put(self, key: str, nbytes: int = MIB) -> int:
        return int(self.store.put_from(key, self.data.ctypes.data, nbytes))

    def get(self, key: str, nbytes: int = MIB) -> int:
        return int(self.store.get_into(key, self.data.ctypes.data, nbytes))


def store_facts(say: Say = lambda line: None) -> dict[str, Any]:
    """Measure every fact once; about three minutes, half of them one set-up without a master."""
    with tempfile.TemporaryDirectory(prefix="epdlab-facts-") as folder:
        keep_native_log(Path(folder) / "engine.log")
        return asyncio.run(_facts(Path(folder), say))


async def _facts(folder: Path, say: Say) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for measure in (_lease, _killed_donor, _half_put, _frozen_donor, _full, _master, _no_master):
        say(f"measuring {measure.__name__.strip('_').replace('_', ' ')}")
        facts |= await measure(folder)
    return facts


async def _with_donor(
    folder: Path, act: Callable[[MooncakeMaster, Donor, _Bare], Awaitable[Any]], lent: int = 64 * MIB
) -> Any:
    """Run `act` on a fresh store of one master and one donor."""
    async with MooncakeMaster(folder / "master.log", flags=FLAGS) as master:
        donor = Donor(master.address, lent, folder / "donor.log")
        await donor.start()
        try:
            return await act(master, donor, await asyncio.to_thread(_Bare, master.address))
        finally:
            donor.child.thaw()
            await donor.stop()


async def _lease(folder: Path) -> dict[str, Any]:
    """A get that lasts longer than the lease: the donor is frozen meanwhile."""

    async def act(_: MooncakeMaster, donor: Donor, bare: _Bare) -> int:
        bare.put("leased")
        donor.child.freeze()
        getting = asyncio.create_task(asyncio.to_thread(bare.get, "leased"))
        await asyncio.sleep(3 * LEASE_MS / 1e3)
        donor.child.thaw()
        return await getting

    return {"lease_expired_code": await _with_donor(folder, act)}


async def _killed_donor(folder: Path) -> dict[str, Any]:
    async def act(master: MooncakeMaster, donor: Donor, bare: _Bare) -> dict[str, Any]:
        bare.put("gone")
        await donor.child.kill()
        began = time.monotonic()
        code = await asyncio.to_thread(bare.get, "gone")
        get_ms = (time.monotonic() - began) * 1e3
        await _until(lambda: all(segment.name != donor.segment for segment in master.pages.segments()))
        listed = time.monotonic() - began
        return {"killed_donor_get_code": code, "killed_donor_get_ms": get_ms, "killed_donor_listed_s": listed}

    found: dict[str, Any] = await _with_donor(folder, act)
    return found


async def _half_put(folder: Path) -> dict[str, Any]:
    """A writer is killed while the donor, frozen, has not taken its bytes."""

    async def act(master: MooncakeMaster, donor: Donor, bare: _Bare) -> int:
        donor.child.freeze()
        with _writer(master.address) as writer:
            assert writer.stdin is not None and writer.stdout is not None
            await asyncio.to_thread(writer.stdout.readline)
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
            await _until(lambda: master.pages.metrics().get("master_put_start_requests_total", 0) >= 1)
            writer.kill()
        donor.child.thaw()
        return await asyncio.to_thread(bare.get, "half", 4 * MIB)

    return {"half_put_code": await _with_donor(folder, act)}


def _writer(master: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, master, "half"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


async def _frozen_donor(folder: Path) -> dict[str, Any]:
    async def act(_: MooncakeMaster, donor: Donor, bare: _Bare) -> float:
        bare.put("frozen")
        donor.child.freeze()
        return await _seconds(lambda: bare.get("frozen"))

    return {"frozen_donor_get_s": await _with_donor(folder, act)}


async def _full(folder: Path) -> dict[str, Any]:
    """More objects of 1 MiB than the segment holds: back to back, then with a pause that lets eviction work."""

    async def filled(name: str, pause_s: float) -> dict[str, int]:
        async def act(_: MooncakeMaster, __: Donor, bare: _Bare) -> list[int]:
            return await asyncio.to_thread(_fill, bare, name, pause_s)

        codes: list[int] = await _with_donor(folder, act, 16 * MIB)
        return {"puts": len(codes), "ok": codes.count(0), "refused": codes.count(-200)}

    return {"burst": await filled("burst", 0.0), "paced": await filled("paced", 0.02)}


def _fill(bare: _Bare, name: str, pause_s: float) -> list[int]:
    codes = []
    for number in range(PUTS):
        codes.append(bare.put(f"{name}{number}"))
        time.sleep(pause_s)
    return codes


async def _master(folder: Path) -> dict[str, Any]:
    """The master dies; later it comes back on the same ports."""

    async def act(master: MooncakeMaster, _: Donor, bare: _Bare) -> dict[str, Any]:
        bare.put("before")
        await master.kill()
        first = await _seconds(lambda: int(bare.store.is_exist("before")))
        later = await _seconds(lambda: bare.get("before"))
        await master.restart()
        began = time.monotonic()
        await _until(lambda: bool(master.pages.segments()))
        return {
            "dead_master_first_call_ms": first * 1e3,
            "dead_master_later_call_s": later,
            "master_restart_remount_s": time.monotonic() - began,
        }

    found: dict[str, Any] = await _with_donor(folder, act)
    return found


async def _no_master(_: Path) -> dict[str, Any]:
    """A client's set-up where no master listens."""
    store = load_mooncake("store").MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", "127.0.0.1:1")
    return {"no_master_setup_s": await _seconds(lambda: store.setup(*arguments))}


async def _seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    await asyncio.to_thread(call)
    return time.monotonic() - began


async def _until(true: Callable[[], bool]) -> None:
    await asyncio.to_thread(_poll, true)


def _poll(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.02)
