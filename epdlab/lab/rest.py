"""When a lab is at rest: every step is held, or waits for one that is, and nothing moves any more.

Then what the reader sees is the whole truth, and which step comes next does not depend on chance. Termination
detection by counting: no thread works, no step runs, every message sent was taken in, twice in a row, with no event
in between. Nothing is held or let go here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import LabError
from .controller import Controller

POSTS = ("encode.post", "send.post")
SETTLED_ROUNDS = 2
LOST_ROUNDS = 8
PAUSE_S = 0.002


class _Line(msgspec.Struct):
    process: str
    step: str
    phase: str


class OpenSteps:
    """Follows a trace file: which steps have begun and not ended."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._decode = msgspec.json.Decoder(_Line).decode
        self.open: Counter[tuple[str, str]] = Counter()

    def follow(self) -> int:
        """Read on; how many bytes of whole lines were read so far."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        whole = chunk[: chunk.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._take(self._decode(line))
        self._offset += len(whole)
        return self._offset

    def _take(self, line: _Line) -> None:
        if line.phase != "note":
            self.open[line.process, line.step] += 1 if line.phase == "begin" else -1


class _Look(NamedTuple):
    """One look at the whole lab. `lost`: messages sent and not taken in; `works`: what is not held and runs."""

    lost: int
    works: tuple[str, ...]
    traced: int
    held: tuple[tuple[str, int], ...]


class Rest:
    """Waits until a lab is at rest.

    Args:
        live: the processes that can answer now.
    """

    def __init__(self, controller: Controller, trace: Path, live: Callable[[], Sequence[str]]) -> None:
        self._controller, self._steps, self._live = controller, OpenSteps(trace), live
        self._written_off = 0

    async def settle(self, timeout_s: float) -> None:
        """Return once nothing moves.

        A message that nobody will ever take (an ack to a request that has failed) is written off when everybody has
        had ample chance to.

        Raises:
            LabError: something still works after `timeout_s`; says what.
        """
        try:
            await asyncio.wait_for(self._settle(), timeout_s)
        except TimeoutError:
            works = ", ".join(self._running()) or "messages are on their way"
            raise LabError(f"the lab did not come to rest within {timeout_s:g} s: {works}; step on later") from None

    async def _settle(self) -> None:
        before, same = None, 0
        while True:
            look = await self._look()
            same = same + 1 if look == before and not look.works else 1
            balanced = look.lost == self._written_off
            if same >= (SETTLED_ROUNDS if balanced else LOST_ROUNDS) and not look.works:
                self._written_off = look.lost
                return
            before = look
            if look.works or not balanced:
                await asyncio.sleep(PAUSE_S)

    async def _look(self) -> _Look:
        names = [name for name in self._live() if name in self._controller.hellos]
        pulses = await asyncio.gather(*(self._controller.call(name, "pulse") for name in names), return_exceptions=True)
        known = [(name, p) for name, p in zip(names, pulses, strict=True) if not isinstance(p, BaseException)]
        traced = self._steps.follow()
        busy = [f"{name} works" for name, p in known if p["busy"]]
        held = tuple((w.point.process, w.ticket) for w in self._controller.waiting)
        return _Look(sum(p["sent"] - p["taken"] for _, p in known), (*self._running(), *busy), traced, held)

    def _running(self) -> list[str]:
        """Steps that have begun and neither ended nor are held at their end; a post waits for its peer.

        A write that is cut in slices waits for the slice that is held.
        """
        points = [waiting.point for waiting in self._controller.waiting]
        held = Counter((point.process, point.step) for point in points if point.phase == "end")
        held.update((point.process, "transfer.write") for point in points if point.step == "transfer.slice")
        live = set(self._live())
        return [
            f"{process} runs {step}"
            for (process, step), count in self._steps.open.items()
            if step not in POSTS and process in live and count > held[process, step]
        ]
