"""The seam: every protocol action is a named step, and every step passes through one `Steps` object per process.

A step can be recorded (one `Event` type, one JSONL file per run), held and ordered (by the `Gate`), and faulted
(by the gate's `Decision`). Drawings, invariants, explorer, tests and notebooks all live off this seam.
Nothing here knows about engines, sockets or the model.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from .errors import StepFault, UsageError, one_line

T = TypeVar("T")
HELD_MS = 1.0
Phase = Literal["begin", "end", "note"]
FaultKind = Literal["fail", "delay", "drop", "repeat", "kill"]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What one step means.

    Attributes:
        doc: one sentence for readers of a trace.
        failure: the value a `fail` fault returns instead of acting; None raises `StepFault`.
        spans: True if other steps can run between its begin and its end; the gate then holds its end too.
    """

    doc: str
    failure: int | None = None
    spans: bool = False


STEPS: dict[str, StepSpec] = {
    "process.start": StepSpec("a process of the lab is ready; data says its role, pid, ports and session"),
    "process.census": StepSpec("a process counts what it still holds"),
    "request.start": StepSpec("a rank takes up a request"),
    "encode.post": StepSpec("a rank asks an encoder for the metadata of one part (POST /encode)", spans=True),
    "encode.serve": StepSpec("the encoder takes an /encode from the wire"),
    "encode.forward": StepSpec("the encoder runs the vision tower", spans=True),
    "embedding.ready": StepSpec("an embedding is complete in the encoder's memory; data has its digest"),
    "landing.alloc": StepSpec("a rank sets landing memory aside"),
    "mr.register": StepSpec("memory becomes a region of the transfer engine", failure=-7),
    "send.post": StepSpec("a rank asks an encoder to write one part (POST /send)", spans=True),
    "send.serve": StepSpec("the encoder takes a /send from the wire"),
    "send.lookup": StepSpec("the encoder looks up the part's embedding"),
    "transfer.write": StepSpec("the one-sided write runs", failure=-1, spans=True),
    "transfer.slice": StepSpec("one slice of the write runs (emulated NIC)", failure=-1),
    "transfer.land": StepSpec("bytes of a write that had ended with a negative code land after all (model only)"),
    "mr.deregister": StepSpec("a region is withdrawn from the transfer engine", failure=-3),
    "embedding.drop": StepSpec("the encoder lets go of an embedding"),
    "ack.push": StepSpec("the encoder pushes the part's metadata to the rank (ZMQ)"),
    "ack.pull": StepSpec("the rank takes an ack from its socket"),
    "landing.read": StepSpec("the rank's language model reads its landing memory"),
    "landing.quarantine": StepSpec("landing memory is set aside: a late write may still touch it"),
    "landing.free": StepSpec("landing memory goes back"),
    "part.release": StepSpec("the encoder cleans a part up"),
    "timer.fire": StepSpec("a deadline or a clean-up timer fires"),
    "request.finish": StepSpec("a rank's request ends"),
    "request.cancel": StepSpec("a rank's client gives its request up (a fault)"),
    "process.kill": StepSpec("a process is killed from outside (a fault)"),
    "cache.lookup": StepSpec("the embedding cache looks keys up"),
    "cache.get": StepSpec("the embedding cache fetches pages from the store", spans=True),
    "cache.put": StepSpec("the embedding cache writes pages to the store", spans=True),
    "cache.evict": StepSpec("the embedding cache evicts an entry"),
    "cache.copy": StepSpec("bytes are copied between a cache page and a tensor"),
}


def step_spec(name: str) -> StepSpec:
    """The spec of a step; an unknown name is answered with the nearest right ones."""
    try:
        return STEPS[name]
    except KeyError:
        near = difflib.get_close_matches(name, STEPS, n=3) or sorted(STEPS)
        raise UsageError(f"no step {name!r}; did you mean {', '.join(near)}?") from None


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a run's trace.

    Attributes:
        t: CLOCK_MONOTONIC nanoseconds (virtual nanoseconds under the explorer).
        process: `enc0`, `rank1`, `master`, `lab`.
        step, phase: the step and whether this is its begin, its end, or a note without duration.
        req, part, rank: request id, part index, TP rank the step is about.
        region: a stable name, such as `enc0.mr#1` or `rank1.slot#3`.
        address, bytes: the memory range the step touches in `process`.
        peer: the process or session at the other end; `target`: the address there.
        result: the engine's raw code, `ok`, or `kind: message` of the error.
        fault: the fault injected here, if one was.
        held_ms: milliseconds the step waited at the gate, if it was at least HELD_MS.
        data: anything more, flat (shape, digest, counts, ports).
    """

    t: int
    process: str
    step: str
    phase: Phase
    req: str | None = None
    part: int | None = None
    rank: int | None = None
    region: str | None = None
    address: int | None = None
    bytes: int | None = None
    peer: str | None = None
    target: int | None = None
    result: int | str | None = None
    fault: FaultKind | None = None
    held_ms: float | None = None
    data: dict[str, Any] | None = None


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step about to begin (or end): what the gate sees and a hold or a schedule matches."""

    process: str
    step: str
    phase: Phase = "begin"
    req: str | None = None
    part: int | None = None
    rank: int | None = None
    region: str | None = None


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The gate's answer: go on, with a fault or without. `value` is a code (fail) or seconds (delay)."""

    fault: FaultKind | None = None
    value: float | None = None


GO = Decision()


class Gate(Protocol):
    """Holds, orders and faults steps. `enter` returns when the step may run."""

    def enter(self, point: Point) -> Awaitable[Decision]: ...


class Recorder(Protocol):
    """Takes events in the order they happen in one process."""

    def __call__(self, event: Event) -> None: ...


class TraceFile:
    """Appends events to a run's JSONL file; several processes may share one file (one write(2) per event)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, event: Event) -> None:
        os.write(self._fd, self._encode(event) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_trace(path: Path) -> list[Event]:
    """The events of a run, in time order. A truncated last line (a killed process) is left out."""
    decode = msgspec.json.Decoder(Event).decode
    return sorted(_decoded(path.read_bytes().splitlines(), decode), key=lambda event: event.t)


def _decoded(lines: list[bytes], decode: Callable[[bytes], Event]) -> Iterator[Event]:
    for number, line in enumerate(lines, start=1):
        try:
            yield decode(line)
        except msgspec.DecodeError:
            if number != len(lines):
                raise UsageError(f"line {number} of the trace is no event; was the file edited?") from None


class Steps:
    """One process's pass through the seam. Sender and receiver call `do`, `wait` and `note`, nothing else.

    Without a gate and a recorder a step costs one method call.
    """

    def __init__(
        self,
        process: str,
        record: Recorder | None = None,
        gate: Gate | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.process = process
        self.gate = gate
        self.record = record
        self._clock_ns = clock_ns

    def now(self) -> int:
        """The time events carry, in ns; from any thread."""
        return self._clock_ns()

    async def do(
        self, step: str, action: Callable[[], T], ends: Callable[[T], dict[str, Any]] | None = None, **labels: Any
    ) -> T:
        """Run a synchronous action as a step. `ends` gives labels known only afterwards."""
        if STEPS[step].spans:
            return await self.wait(step, _as_async(action), ends, **labels)
        began, decision = self._clock_ns(), GO
        if self.gate is not None:
            decision = await self.gate.enter(_point(self.process, step, "begin", labels))
        self._begin(step, labels, decision, began)
        try:
            result = action() if decision.fault is None else await _act(step, decision, _as_async(action))
        except BaseException as error:
            self._emit(step, "end", labels, one_line(error))
            raise
        self._end(step, labels, decision, result, ends)
        return result

    async def wait(
        self,
        step: str,
        action: Callable[[], Awaitable[T]],
        ends: Callable[[T], dict[str, Any]] | None = None,
        **labels: Any,
    ) -> T:
        """Run an asynchronous action as a step.

        Raises:
            StepFault: the gate injected a failure into a step that has no failure code.
        """
        began, decision = self._clock_ns(), GO
        if self.gate is not None:
            decision = await self.gate.enter(_point(self.process, step, "begin", labels))
        self._begin(step, labels, decision, began)
        try:
            result, acted = await self._through(step, decision, action, labels)
        except BaseException as error:
            self._emit(step, "end", labels, one_line(error))
            raise
        self._end(step, labels, decision, result, ends, acted)
        return result

    def note(self, step: str, **labels: Any) -> None:
        """Record a fact that cannot be held."""
        if self.record is not None:
            self.record(Event(self._clock_ns(), self.process, step, "note", **labels))

    async def _through(
        self, step: str, decision: Decision, action: Callable[[], Awaitable[T]], labels: dict[str, Any]
    ) -> tuple[T, int]:
        """Act; when that was over, in ns. A step that spans is held at its end too, whether it succeeded or failed."""
        held = self.gate if STEPS[step].spans else None
        try:
            result = await _act(step, decision, action)
        except Exception:
            if held is not None:
                await held.enter(_point(self.process, step, "end", labels))
            raise
        acted = self._clock_ns()
        if held is not None:
            await held.enter(_point(self.process, step, "end", labels))
        return result, acted

    def _begin(self, step: str, labels: dict[str, Any], decision: Decision, since: int) -> None:
        if self.record is not None:
            now = self._clock_ns()
            self.record(
                Event(now, self.process, step, "begin", fault=decision.fault, held_ms=_held(now - since), **labels)
            )

    def _end(
        self,
        step: str,
        labels: dict[str, Any],
        decision: Decision,
        result: T,
        ends: Callable[[T], dict[str, Any]] | None,
        since: int | None = None,
    ) -> None:
        known = {} if ends is None or decision.fault == "drop" else ends(result)
        if self.record is not None:
            now = self._clock_ns()
            held = None if since is None else _held(now - since)
            after = {"result": _word(result), "held_ms": held} | labels | known
            self.record(Event(now, self.process, step, "end", **after))

    def _emit(self, step: str, phase: Phase, labels: dict[str, Any], result: str) -> None:
        if self.record is not None:
            self.record(Event(self._clock_ns(), self.process, step, phase, result=result, **labels))


def _point(process: str, step: str, phase: Phase, labels: dict[str, Any]) -> Point:
    get = labels.get
    return Point(process, step, phase, get("req"), get("part"), get("rank"), get("region"))


def _held(ns: int) -> float | None:
    return ns / 1e6 if ns >= HELD_MS * 1e6 else None


def _as_async(action: Callable[[], T]) -> Callable[[], Awaitable[T]]:
    async def act() -> T:
        return action()

    return act


async def _act(step: str, decision: Decision, action: Callable[[], Awaitable[T]]) -> T:
    return await action() if decision.fault is None else await _faulted(STEPS[step], decision, action)


async def _faulted(spec: StepSpec, decision: Decision, action: Callable[[], Awaitable[T]]) -> T:
    """Act under a fault. A dropped step returns None in place of its result: only steps without one are dropped."""
    if decision.fault == "kill":
        os._exit(9)
    if decision.fault == "delay":
        await asyncio.sleep(decision.value or 0.0)
    if decision.fault == "drop":
        return None  # type: ignore[return-value]
    if decision.fault == "fail":
        if spec.failure is None:
            raise StepFault(f"injected at a step without a code: {spec.doc}")
        return int(decision.value or spec.failure)  # type: ignore[return-value]
    if decision.fault == "repeat":
        await action()
    return await action()


def _word(result: object) -> int | str:
    return result if isinstance(result, int) and not isinstance(result, bool) else "ok"
