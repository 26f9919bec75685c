"""`epdlab demo --step`: the stepper at a prompt, for those without a browser. Reads lines, prints stops."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from ..errors import EpdLabError, UsageError
from ..steps import FaultKind
from .demo import DemoOptions, stage_media
from .stepper import Stepper

HELP = """  Enter                    let the next step go
  step PROCESS [FAULT]     let this process's next step go; it may fail, drop, repeat or kill
  until STEP               let steps go until this one is the next, such as: until transfer.write
  run                      let go of everything
  state                    what every process holds; + new, ~ changed, - gone since the last look
  draw [KIND]              save a sequence, timeline or architecture diagram as SVG
  kill PROCESS             kill a process
  fire TIMER [RANK]        fire a cleanup, deadline or quarantine timer now
  reset                    begin anew
  help, quit"""
MOST_WORDS = {"step": 2, "until": 1, "draw": 1, "kill": 1, "fire": 2}

Say = Callable[[str], None]


def step_demo(options: DemoOptions) -> int:
    """Step through the demo's request; 0 unless it ended badly."""
    with tempfile.TemporaryDirectory(prefix="epdlab-media-") as folder:
        items = stage_media(options.images, options.videos, Path(folder), options.allow_private_urls)
        print("starting the processes; every step of the request will be held")
        with _stepper(options, items, Path(folder)) as stepper:
            return _Prompt(stepper, options.out or Path.cwd(), print).run(_lines())


def _stepper(options: DemoOptions, items: list[tuple[str, str]], root: Path) -> Stepper:
    return Stepper(
        *(ref for modality, ref in items if modality == "IMAGE"),
        videos=[ref for modality, ref in items if modality == "VIDEO"],
        prompt=options.prompt,
        tp=options.tp,
        profile=options.profile,
        encoders=options.encoders,
        device=options.device,
        protocol=options.protocol,
        model=options.model,
        pool_bytes=options.pool_bytes,
        strict=options.strict,
        allow_private_urls=options.allow_private_urls,
        media_root=str(root),
        out=options.out,
    )


def _lines() -> Iterator[str]:
    """What the user types; it ends with the input."""
    person = sys.stdin.isatty()
    while True:
        if person:
            print("(Enter, run, state, draw, help, quit) ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print(end="\n" if person else "")
            return
        print(end="" if person else f"> {line}")
        yield line.strip()


class _Prompt:
    """Answers one line after the other."""

    def __init__(self, stepper: Stepper, folder: Path, say: Say) -> None:
        self._stepper, self._folder, self._say = stepper, folder, say

    def run(self, lines: Iterator[str]) -> int:
        self._say(self._stepper.look().text())
        for line in lines:
            if line in ("quit", "q", "exit"):
                break
            try:
                self._say(self._answer(*line.split()))
            except EpdLabError as error:
                self._say(f"  {' '.join(str(error).split())}")
        return 0 if self._stepper.good else 1

    def _answer(self, word: str = "", *rest: str) -> str:
        stepper = self._stepper
        first, second = (*rest, None, None)[:2]
        answers: dict[str, Callable[[], Any]] = {
            "": stepper.step,
            "step": lambda: stepper.step(process=first, fault=cast(FaultKind | None, second)),
            "until": lambda: stepper.until(first or "?"),
            "run": stepper.run,
            "state": stepper.state,
            "draw": lambda: self._draw(first or "sequence"),
            "kill": lambda: stepper.kill(first or "?"),
            "fire": lambda: stepper.fire(first or "cleanup", rank=_rank(second)),
            "reset": stepper.reset,
            "help": lambda: HELP,
        }
        if word not in answers or len(rest) > MOST_WORDS.get(word, 0):
            raise UsageError(f"{' '.join((word, *rest))!r} is not understood; `help` lists what is")
        return str(answers[word]())

    def _draw(self, kind: str) -> str:
        drawing = self._stepper.draw(kind)
        return f"  {drawing.save(self._folder / f'epdlab-{kind}.svg')}"


def _rank(word: str | None) -> int | None:
    if word is None or word.removeprefix("rank").isdigit():
        return None if word is None else int(word.removeprefix("rank"))
    raise UsageError(f"{word!r} is no rank; write 0 or rank0")
