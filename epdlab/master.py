"""The Mooncake master: `mooncake_master` as a child process, and its HTTP pages as a small client.

Owns the master's ports, log and end. Nothing of the data path passes through here, nor through the master: it keeps
the list of segments, keys, replicas and leases. Flags and pages: mooncake 0.3.13.post1.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .child import Child
from .doctor import installed_wheels
from .errors import LabError

START_S = 15.0
_TRIES = 3


class MasterFailed(LabError):
    """mooncake_master is missing, of another version, or did not start."""

    kind = "master"


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory one process donates to the store. Bytes."""

    name: str
    endpoint: str
    used: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Replica:
    """Where one copy of an object lies: in which segment (None once it is gone), at which address, how large."""

    segment: str | None
    address: int
    nbytes: int


class MasterPages:
    """The master's HTTP pages. Every call is one short, blocking GET.

    Raises:
        MasterFailed: the master does not answer.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def metrics(self) -> dict[str, float]:
        """Every metric without labels, by its name (`master_key_count`, `master_allocated_bytes` ...)."""
        values = {}
        for line in self.get("/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#") and "{" not in name:
                values[name] = float(value)
        return values

    def segments(self) -> list[Segment]:
        """Mounted segments, by name."""
        rows = json.loads(self.get("/get_segments_detail"))["segments"]
        return sorted((_segment(row) for row in rows), key=lambda segment: segment.name)

    def keys(self) -> list[str]:
        """Every key, sorted. Grants no lease."""
        return sorted(line for line in self.get("/get_all_keys").splitlines() if line)

    def replicas(self, key: str) -> list[Replica]:
        """Where an object lies; empty if the key is unknown. Grants a lease, as every lookup does."""
        rows = json.loads(self.get(f"/query_key?key={key}", missing="{}")).get("data", [])
        names = {segment.endpoint: segment.name for segment in self.segments()}
        return [_replica(row, names) for row in rows]

    def get(self, path: str, missing: str | None = None) -> str:
        """One page as text. `missing` stands in for a page that is not 200."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            body: str = reply.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise MasterFailed(f"the master at {self.host}:{self.port} does not answer ({error}); is it up?") from None
        finally:
            connection.close()
        if reply.status == 200:
            return body
        if missing is not None:
            return missing
        raise MasterFailed(f"the master answers {path} with {reply.status}; is {self.port} its metrics port?")


class MooncakeMaster:
    """`mooncake_master` as a child process.

    Args:
        log: file its log is appended to.
        host: address it listens on.
        rpc_port, metrics_port: 0 takes a free one.
        flags: its own flags by name, such as `{"default_kv_lease_ttl": 500}`.
        binary: the program; by default the one of the installed wheel.
    """

    def __init__(
        self,
        log: Path,
        host: str = "127.0.0.1",
        rpc_port: int = 0,
        metrics_port: int = 0,
        flags: Mapping[str, str | int | float] | None = None,
        binary: Path | None = None,
    ) -> None:
        self.log, self.host, self.flags, self.binary = log, host, dict(flags or {}), binary
        self._asked = (rpc_port, metrics_port)
        self.rpc_port, self.metrics_port = rpc_port, metrics_port
        self.child: Child | None = None

    @property
    def address(self) -> str:
        """What clients set up with, `host:port`."""
        return f"{self.host}:{self.rpc_port}"

    @property
    def pages(self) -> MasterPages:
        return MasterPages(self.host, self.metrics_port)

    async def start(self) -> None:
        """Start it and wait until it serves. Ports that were left to choose are chosen again if a race takes them.

        Raises:
            MasterFailed: the program is missing or of another version, a port is taken, or it ended by itself.
        """
        if self.child is not None:
            raise MasterFailed(f"{self!r} is running already; stop it first")
        binary = self.binary or find_binary()
        check_version(binary)
        for left in reversed(range(_TRIES)):
            try:
                await self._start(binary)
            except MasterFailed:
                if all(self._asked) or left == 0:
                    raise
            else:
                return

    async def restart(self) -> None:
        """Stop it if it runs, and start an empty one on the same ports."""
        await self.stop()
        self._asked = (self.rpc_port, self.metrics_port)
        await self.start()

    async def stop(self) -> None:
        """End it by its pid. Idempotent."""
        child, self.child = self.child, None
        if child is not None:
            await child.end()

    async def kill(self) -> None:
        """SIGKILL, as a crash."""
        child, self.child = self.child, None
        if child is not None:
            await child.kill()

    async def _start(self, binary: Path) -> None:
        self.rpc_port, self.metrics_port = (port or _free_port(self.host) for port in self._asked)
        for what, port in (("RPC", self.rpc_port), ("metrics", self.metrics_port)):
            _check_free(self.host, port, what)
        child = Child([str(binary), *self._arguments()], self.log)
        if not await child.until(self._serves, START_S):
            ended = child.returncode
            await child.kill()
            raise MasterFailed(f"mooncake_master {_how(ended)}: {_reason(child)}; its log is {self.log}")
        self.child = child

    def _arguments(self) -> list[str]:
        flags: dict[str, Any] = {
            "rpc_address": self.host,
            "rpc_port": self.rpc_port,
            "metrics_host": self.host,
            "metrics_port": self.metrics_port,
            "logtostderr": "true",
        }
        return [f"--{name}={value}" for name, value in (flags | self.flags).items()]

    def _serves(self) -> bool:
        try:
            socket.create_connection((self.host, self.rpc_port), timeout=1).close()
            return bool(json.loads(self.pages.get("/health"))["service_ready"])
        except (OSError, MasterFailed):
            return False

    async def __aenter__(self) -> MooncakeMaster:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __repr__(self) -> str:
        return f"MooncakeMaster({self.address}, {self.child or 'stopped'})"


def find_binary() -> Path:
    """The mooncake_master of the installed wheel, else the one on the PATH.

    Raises:
        MasterFailed: there is none.
    """
    spec = find_spec("mooncake")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [Path(folder) / "mooncake_master" for folder in folders]
    if on_path := shutil.which("mooncake_master"):
        found.append(Path(on_path))
    for binary in found:
        if binary.is_file():
            return binary
    raise MasterFailed("mooncake_master is not installed; run `python -m epdlab doctor`")


def check_version(binary: Path) -> None:
    """The program must be of the installed wheel's release: master and client speak one protocol version.

    Raises:
        MasterFailed: it cannot run, or is of another release.
    """
    if not binary.is_file() or not os.access(binary, os.R_OK):
        raise MasterFailed(f"there is no mooncake_master at {binary}; run `python -m epdlab doctor`")
    if not os.access(binary, os.X_OK):
        raise MasterFailed(f"{binary} is not executable; run `chmod +x {binary}`")
    found = _version_of(binary)
    wheels = set(installed_wheels().values())
    if found not in wheels:
        wanted = " or ".join(sorted(wheels)) or "no wheel at all"
        raise MasterFailed(f"{binary} is version {found}, the client is {wanted}; use the binary of the same wheel")


def _version_of(binary: Path) -> str:
    try:
        answer = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MasterFailed(f"{binary} cannot run ({error}); run `python -m epdlab doctor`") from None
    match = re.search(r"mooncake_master version (\S+)", answer.stdout)
    if match is None:
        said = (answer.stderr or answer.stdout).strip().splitlines() or ["nothing"]
        raise MasterFailed(f"{binary} --version says: {said[-1]}; run `python -m epdlab doctor`")
    return match[1]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_free(host: str, port: int, what: str) -> None:
    """Bind it once: the master itself leaves no clear line about a taken RPC port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = error.strerror
            raise MasterFailed(f"{what} port {host}:{port} cannot be had ({why}); choose 0 or another") from None


def _how(code: int | None) -> str:
    return f"did not serve within {START_S:g} s" if code is None else f"ended at once with {code}"


def _reason(child: Child) -> str:
    """The last line of the log that is an error, or simply the last."""
    words = [line for line in child.last_words() if line.strip()]
    errors = [line for line in words if line[:1] in "EF" or "rror" in line]
    return (errors or words or ["it said nothing"])[-1].strip()


def _segment(row: dict[str, Any]) -> Segment:
    used, capacity = row["allocator_used_bytes"], row["allocator_capacity_bytes"]
    return Segment(row["segment_name"], row["te_endpoint"], used, capacity)


def _replica(row: dict[str, Any], names: Mapping[str, str]) -> Replica:
    return Replica(names.get(row["transport_endpoint_"]), row["buffer_address_"], row["size_"])
