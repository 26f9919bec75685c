"""mooncake_master as a child: up, looked at, down; and each way not to come up is one clear line at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_world import MASTER_FLAGS, MIB, until

from epdlab.donor import Donor
from epdlab.engine import TensorBuffer
from epdlab.errors import LabError
from epdlab.master import MasterFailed, MasterPages, MooncakeMaster, find_binary
from epdlab.store_client import Outcome, StoreClient, StoreConfig


async def test_up_pages_down(tmp_path: Path) -> None:
    async with (
        MooncakeMaster(tmp_path / "master.log", flags=MASTER_FLAGS) as master,
        Donor(master.address, 16 * MIB, tmp_path / "donor.log") as donor,
    ):
        [segment] = master.pages.segments()
        assert (segment.name, segment.used, segment.capacity) == (donor.segment, 0, 16 * MIB)
        store, memory = StoreClient(StoreConfig(master.address)), TensorBuffer(torch.ones(3000, dtype=torch.uint8))
        await store.open()
        store.register(memory)
        assert await store.put(["emb-1"], [[(memory.address, 3000)]]) == [Outcome.OK]
        await store.close()
        assert master.pages.keys() == ["emb-1"]
        [replica] = master.pages.replicas("emb-1")
        assert (replica.segment, replica.nbytes) == (donor.segment, 3000)
        assert master.pages.replicas("no-such-key") == []
        metrics = master.pages.metrics()
        assert metrics["master_key_count"] == 1
        assert metrics["master_total_capacity_bytes"] == 16 * MIB
        pid = master.child.pid if master.child else 0
        await donor.child.kill()
        await until(lambda: not master.pages.keys())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (tmp_path / "master.log").stat().st_size > 0
    await master.stop()
    with pytest.raises(MasterFailed, match="does not answer"):
        master.pages.keys()


async def test_a_restart_keeps_the_ports(tmp_path: Path) -> None:
    async with MooncakeMaster(tmp_path / "master.log") as master:
        ports = (master.rpc_port, master.metrics_port)
        with pytest.raises(MasterFailed, match="running already"):
            await master.start()
        await master.kill()
        await master.restart()
        assert ports == (master.rpc_port, master.metrics_port)
        assert master.pages.get("/role") == "leader"


@pytest.mark.parametrize("which", ["rpc_port", "metrics_port"])
async def test_a_taken_port(tmp_path: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MasterFailed, match=f"port 127.0.0.1:{port} cannot be had"):
            await MooncakeMaster(tmp_path / "master.log", **{which: port}).start()  # type: ignore[arg-type]
    assert not (tmp_path / "master.log").exists()


def script(body: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return write


def no_permission(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o644)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "there is no mooncake_master at"),
        (no_permission, "is not executable"),
        (script("echo mooncake_master version 0.1.2"), r"is version 0\.1\.2, the client is"),
        (script("echo no libibverbs.so.1 here >&2; exit 127"), "says: no libibverbs.so.1 here; run `python -m epdlab"),
        (script("exit 1"), "says: nothing"),
    ],
)
async def test_a_program_that_will_not_do(tmp_path: Path, make: Callable[[Path], None], why: str) -> None:
    make(binary := tmp_path / "mooncake_master")
    with pytest.raises(MasterFailed, match=why) as caught:
        await MooncakeMaster(tmp_path / "master.log", binary=binary).start()
    assert "\n" not in str(caught.value)


async def test_a_master_that_ends_at_once_says_why(tmp_path: Path) -> None:
    flags = {"eviction_ratio": "much"}
    with pytest.raises(MasterFailed, match=r"ended at once with 1: .*illegal value 'much'") as caught:
        await MooncakeMaster(tmp_path / "master.log", flags=flags).start()
    assert str(tmp_path / "master.log") in str(caught.value)


def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from epdlab.master import MooncakeMaster\n"
        "async def main():\n"
        "    master = MooncakeMaster(pathlib.Path(sys.argv[1]))\n"
        "    await master.start()\n"
        "    print(master.child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert running(pid)
        parent.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not running(pid)))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_pages_of_nobody() -> None:
    with pytest.raises(MasterFailed, match="is it up"):
        MasterPages("127.0.0.1", 1).metrics()


def test_the_binary_is_the_wheels() -> None:
    assert find_binary().parent.name == "mooncake"


async def test_a_donor_that_is_not_running() -> None:
    with pytest.raises(LabError, match="not running"):
        _ = Donor("127.0.0.1:1", 16 * MIB, Path("unused")).child
