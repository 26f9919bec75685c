"""The demo: one request through a real deployment, held against the same model in one process.

Owns what `epdlab demo` shows and answers. The transfer itself is the roles' business.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import one_line
from ..media import MediaPolicy, load_item, resolved
from ..modality import Modality
from ..rules import Rule, profile
from ..steps import Event
from ..trace.invariants import check
from .lab import Lab, LabConfig

SILENT_DEADLINE_S = 10.0
"""Of a rank, under a profile whose encoder tells ranks of no error."""
LANES = {
    "encode.post": "POST /encode",
    "encode.forward": "vision tower",
    "landing.alloc": "landing memory set aside",
    "mr.register": "memory region registered",
    "send.post": "POST /send",
    "transfer.write": "one-sided write",
    "ack.push": "ack pushed (ZMQ, metadata only)",
    "ack.pull": "ack taken",
    "landing.read": "landing memory read by the language model",
    "mr.deregister": "memory region deregistered",
    "landing.free": "landing memory given back",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `epdlab demo` takes."""

    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    prompt: str = "Describe what you see."
    tp: int = 2
    encoders: int = 1
    profile: str = "hardened"
    device: str = "cpu"
    protocol: str = "tcp"
    model: str = "tiny"
    out: Path | None = None
    max_new_tokens: int = 8
    pool_bytes: int = 0
    strict: bool = False
    allow_private_urls: bool = False


def sample(name: str) -> str:
    """The path of a picture or video that comes with the package."""
    return str(files("epdlab") / "samples" / name)


def run_demo(options: DemoOptions, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run one request end to end; the JSON answer of `epdlab demo` (keys as in the README).

    Raises:
        UsageError: an option or an item is refused, before any process starts.
    """
    with tempfile.TemporaryDirectory(prefix="epdlab-media-") as folder:
        root = Path(folder)
        items = stage_media(options.images, options.videos, root, options.allow_private_urls)
        return _run(options, items, root, say)


def _run(options: DemoOptions, items: list[tuple[str, str]], root: Path, say: Callable[[str], None]) -> dict[str, Any]:
    began = time.perf_counter()
    chosen = _lab_options(options, root)
    if "deadline_s" in chosen:
        say(f"{options.profile} tells ranks of no error: one that waits in vain gives up after {SILENT_DEADLINE_S:g} s")
    lab = Lab(out=options.out, **chosen)
    say(f"starting {options.encoders} encode server(s), {options.tp} prefill rank(s), and the one-process reference")
    with lab:
        say(f"ready after {time.perf_counter() - began:.1f} s; sending {len(items)} item(s) to every rank")
        started = time.perf_counter()
        images = [ref for modality, ref in items if modality == "IMAGE"]
        videos = [ref for modality, ref in items if modality == "VIDEO"]
        lab.request(*images, videos=videos, prompt=options.prompt, max_new_tokens=options.max_new_tokens)
        results = lab.result()
        ms = (time.perf_counter() - started) * 1e3
        for line in narrate(lab.events):
            say(line)
        reference = lab.call(
            "reference", "reference", items=items, prompt=options.prompt, max_new_tokens=options.max_new_tokens
        )
        census, events = lab.census(), lab.events
        pids = [process.pid for process in lab.processes.values()]
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    answer = _answer(options, results, reference, census, events, len(left)) | {"ms": round(ms, 1)}
    say(_summary(answer, events))
    return answer


def _lab_options(options: DemoOptions, root: Path) -> dict[str, Any]:
    names = ("tp", "encoders", "profile", "device", "protocol", "model", "pool_bytes", "strict", "allow_private_urls")
    chosen = {name: getattr(options, name) for name in names} | {"reference": True, "media_root": str(root)}
    if not profile(options.profile).has(Rule.NOTIFY_ERRORS):
        chosen["deadline_s"] = SILENT_DEADLINE_S
    LabConfig(**chosen)
    return chosen


def stage_media(
    images: Sequence[str], videos: Sequence[str], root: Path, allow_private_urls: bool = False
) -> list[tuple[str, str]]:
    """Copy the user's own local files into `root`, the encoders' allowed folder, and check that each can be loaded.

    Returns (modality, reference) pairs: images first.
    """
    wanted = [(Modality.IMAGE, ref) for ref in images] + [(Modality.VIDEO, ref) for ref in videos]
    if not wanted:
        wanted = [(Modality.IMAGE, sample("harbour.png"))]
    staged = []
    for index, (modality, ref) in enumerate(wanted):
        local = "://" not in ref and not ref.startswith("data:")
        path = resolved(ref) if local else None
        policy = MediaPolicy(path.parent if path else None, allow_private_urls=allow_private_urls)
        _blocking(load_item(str(path or ref), modality, policy))
        staged.append((modality.value, _copied(Path(ref), root / f"item{index}") if local else ref))
    return staged


def _blocking(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine to its end, also where a loop runs already (a notebook)."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def _copied(source: Path, target: Path) -> str:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return str(target)


def _answer(
    options: DemoOptions,
    results: dict[str, Any],
    reference: dict[str, Any],
    census: dict[str, dict[str, int]],
    events: list[Event],
    processes_left: int,
) -> dict[str, Any]:
    failed = {rank: one_line(answer) for rank, answer in results.items() if isinstance(answer, BaseException)}
    good = [answer for answer in results.values() if not isinstance(answer, BaseException)]
    violations = [{"invariant": b.invariant, "message": b.message} for b in check(events)]
    leaks = leaks_of(census) | ({"processes": processes_left} if processes_left else {})
    bytes_equal = bool(good) and not failed and all(a["digests"] == _sent_digests(events) for a in good)
    tokens_equal = bool(good) and not failed and all(a["tokens"] == reference["tokens"] for a in good)
    diff = max((_difference(a["logits"], reference["logits"]) for a in good), default=None)
    answer: dict[str, Any] = {
        "ok": bytes_equal and tokens_equal and not violations and not leaks,
        "bytes": good[0]["bytes"] if good else 0,
        "bytes_equal": bytes_equal,
        "tokens": good[0]["tokens"] if good else [],
        "text": good[0]["text"] if good else "",
        "tokens_equal": tokens_equal,
        "logits_max_abs_diff": diff,
        "violations": violations,
        "leaks": leaks,
        "protocol": options.protocol,
        "device": options.device,
        "profile": options.profile,
    }
    return answer | ({"errors": failed} if failed else {})


def leaks_of(census: dict[str, dict[str, int]]) -> dict[str, int]:
    """What the processes still hold, summed by kind; what waits for a timer of its own is no leak."""
    totals: dict[str, int] = {}
    for counts in census.values():
        for kind, count in counts.items():
            if kind != "timed" and count:
                totals[kind] = totals.get(kind, 0) + count
    return totals


def _sent_digests(events: list[Event]) -> list[str]:
    ready = {event.part: event.data["digest"] for event in events if event.step == "embedding.ready" and event.data}
    return [ready[part] for part in sorted(ready, key=lambda part: part or 0)]


def _difference(ours: bytes, reference: bytes) -> float:
    a, b = np.frombuffer(ours, np.float32), np.frombuffer(reference, np.float32)
    return float(np.abs(a - b).max())


def narrate(events: list[Event]) -> list[str]:
    """The steps of a run as lines for people: when, who, what, how much, how long."""
    begun: dict[tuple[Any, ...], Event] = {}
    lines, zero = [], None
    for event in events:
        if event.step not in LANES:
            continue
        key = (event.process, event.step, event.req, event.part, event.rank, event.region)
        if event.phase == "begin":
            begun[key[:5]] = event
            zero = zero or event.t
        elif event.phase == "end":
            begin = begun.get(key[:5], event)
            lines.append((begin.t, _line(begin, event, zero or event.t)))
    return [line for _, line in sorted(lines)]


def _line(begin: Event, end: Event, zero: int) -> str:
    who = f"{begin.process}" + (f" for rank {begin.rank}" if begin.rank is not None and "enc" in begin.process else "")
    what = LANES[begin.step]
    size = f", {begin.bytes:,} bytes" if begin.bytes else ""
    code = f" = {end.result}" if isinstance(end.result, int) else "" if end.result == "ok" else f": {end.result}"
    name = f" {end.region}" if end.region and begin.step.startswith("mr.") else ""
    took = f"{(end.t - begin.t) / 1e6:.1f} ms"
    return f"  {(begin.t - zero) / 1e6:8.1f} ms  {who:<16} {what}{name}{code}{size} ({took})"


def _summary(answer: dict[str, Any], events: list[Event]) -> str:
    broken = ", ".join(dict.fromkeys(found["invariant"] for found in answer["violations"])) or "none"
    left = f"broken invariants: {broken}; left behind: {answer['leaks'] or 'nothing'}"
    if "errors" in answer:
        return "\n".join([f"{rank} failed: {error}" for rank, error in answer["errors"].items()] + [left])
    diff = answer["logits_max_abs_diff"]
    lines = [
        f"bytes at both ends: {'equal' if answer['bytes_equal'] else 'DIFFERENT'} ({answer['bytes']:,} per rank)",
        f"tokens: {answer['tokens']} ({'equal to' if answer['tokens_equal'] else 'DIFFERENT from'} one process)",
        f"logits: largest difference {diff}",
        left,
    ]
    return "\n".join(lines)
