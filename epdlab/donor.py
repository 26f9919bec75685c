"""A donor: a process that only lends memory to the store, and its handle.

`python -m epdlab.donor --master HOST:PORT --bytes N` mounts one segment, says its name, and leaves when its stdin
closes. No embedding is made or read here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from .child import Child, started_line
from .errors import EpdLabError, LabError, one_line
from .store_client import StoreClient, StoreConfig

START_S = 30.0


class Donor:
    """A donor process.

    Args:
        master: `host:port` of the master.
        nbytes: size of the segment it lends, at least 16 MiB.
        log: file its output is appended to.
    """

    def __init__(self, master: str, nbytes: int, log: Path) -> None:
        self.master, self.nbytes, self.log = master, nbytes, log
        self.segment = ""
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        """The process. Raises LabError before `start`."""
        if self._child is None:
            raise LabError("the donor is not running; await donor.start() first")
        return self._child

    async def start(self) -> None:
        """Start it and wait until its segment is mounted.

        Raises:
            LabError: it ended, or did not mount in time.
        """
        options = ["--master", self.master, "--bytes", str(self.nbytes)]
        self._child = Child([sys.executable, "-m", "epdlab.donor", *options], self.log, talks=True)
        said = json.loads(await started_line(self._child, START_S))
        if "error" in said:
            await self._child.end()
            raise LabError(f"the donor did not start: {said['error']}")
        self.segment = said["segment"]

    async def stop(self) -> None:
        """Let it leave in order. Idempotent."""
        if self._child is not None:
            await self._child.end(term=False)

    async def __aenter__(self) -> Donor:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __repr__(self) -> str:
        return f"Donor({self.segment or 'not mounted'}, {self.nbytes} bytes, {self._child or 'not started'})"


async def _lend(master: str, nbytes: int) -> int:
    try:
        client = StoreClient(StoreConfig(master, segment_bytes=nbytes))
        await client.open()
    except EpdLabError as error:
        print(json.dumps({"error": one_line(error)}), flush=True)
        return 1
    print(json.dumps({"segment": client.segment}), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await client.close()
    return 0


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m epdlab.donor", description=__doc__)
    parser.add_argument("--master", required=True, help="HOST:PORT of the mooncake_master")
    parser.add_argument("--bytes", type=int, required=True, help="memory to lend")
    options = parser.parse_args()
    return asyncio.run(_lend(options.master, options.bytes))


if __name__ == "__main__":
    sys.exit(_main())
