"""What a reader sees of a lab: its state with what changed marked, and its trace drawn. Nothing is asked here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..errors import UsageError
from ..steps import Event
from ..trace.architecture import architecture
from ..trace.breach import Breach
from ..trace.render import Drawing
from ..trace.sequence import sequence
from ..trace.state import KINDS, WRITES, WorldState
from ..trace.timeline import timeline
from .controller import Waiting

Line = tuple[str, str, str]
_FACTS = ("pid", "url", "session", "pool")
_MARKS = {"+": ("new", "#009E73"), "~": ("changed", "#E69F00"), "-": ("gone", "#D55E00")}


@dataclass(frozen=True)
class State:
    """The state of every process of a lab. Prints as text; a notebook shows a table.

    Attributes:
        world: what the processes hold; before: the same at the last look, None at the first one.
        waiting: the steps that are held. moving: what still ran when this was looked at, empty at rest.
        breaches: the invariants broken so far.
    """

    world: WorldState
    before: WorldState | None = None
    waiting: tuple[Waiting, ...] = ()
    breaches: tuple[Breach, ...] = ()
    moving: str = ""
    addresses: bool = False

    @property
    def changes(self) -> dict[Line, str]:
        """What changed since the last look: `+` new, `~` other, `-` gone, by (process, kind, name)."""
        return {} if self.before is None else self.world.diff(self.before)

    def held(self, process: str, kind: str) -> dict[str, str]:
        """What one process holds of one kind (`regions`, `slots`, ...): name to state."""
        return {held.name: held.state for held in getattr(self.world.processes[process], kind).values()}

    def lines(self) -> dict[Line, tuple[str, str]]:
        """(process, kind, name) -> (mark, what stands there), process by process; gone things keep their last line."""
        now = self.world.lines(self.addresses)
        before = self.before.lines(self.addresses) if self.before is not None else {}
        marks = self.changes
        gone = {key: before[key] for key, mark in marks.items() if mark == "-"}
        return {key: (marks.get(key, " "), text) for key, text in (now | gone).items()}

    def text(self, addresses: bool | None = None) -> str:
        """The state as lines; with `addresses`, where everything lies and which ports and pids there are."""
        shown = self.addresses if addresses is None else addresses
        lines = [self.world.text(self.before, addresses=shown)]
        lines += self.facts() if shown else []
        lines += [f"waiting  {waiting_words(w)}" for w in self.waiting]
        lines += [f"broken   {b.number} [{b.invariant}] {b.message}" for b in self.breaches]
        return "\n".join(lines + ([f"moving   {self.moving}"] if self.moving else []))

    def facts(self) -> list[str]:
        """Pids, ports and sessions: what differs from run to run."""
        found = []
        for name in self.world.names():
            facts = self.world.processes[name].facts
            said = [f"{fact} {facts[fact]}" for fact in _FACTS if facts.get(fact)]
            found.append(f"facts    {name}: {', '.join(said)}")
        return found

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = self.lines()
        cards = [self._card(name, lines) for name in self.world.names()]
        notes = [f"broken invariant {b.number} [{b.invariant}]: {b.message}" for b in self.breaches]
        notes += [f"still moving: {self.moving}"] if self.moving else []
        alarm = "".join(f'<div style="color:#B34700;font-weight:600">{escape(note)}</div>' for note in notes)
        return f'<div style="{_PAGE}">{alarm}<div style="{_ROW}">{"".join(cards)}</div></div>'

    def _card(self, name: str, lines: Mapping[Line, tuple[str, str]]) -> str:
        process = self.world.processes[name]
        role = str(process.facts.get("role", "")) + ("" if process.alive else " (killed)")
        mine = {key: line for key, line in lines.items() if key[0] == name}
        kinds = (*KINDS, WRITES)
        rows = [_row(key[1], key[2], *mine[key]) for key in sorted(mine, key=lambda key: kinds.index(key[1]))]
        rows = rows or [f'<tr><td colspan="4" style="{_CELL};color:{_MUTED}">holds nothing</td></tr>']
        waits = [waiting_words(w).removeprefix(f"{name} at ") for w in self.waiting if w.point.process == name]
        foot = "".join(f'<div style="{_WAITS}">waits at {escape(words)}</div>' for words in waits)
        head = f'<b>{escape(name)}</b> <span style="color:{_MUTED}">{escape(role)}</span>'
        return f'<div style="{_CARD}"><div>{head}</div><table style="{_TABLE}">{"".join(rows)}</table>{foot}</div>'


@dataclass(frozen=True)
class Stop:
    """Where a request stands after a call of the stepper. Prints as a few lines.

    Attributes:
        gone: what was let go, or happened. changed: what changed in the processes. waiting: who is held now.
        notes: outcomes, what is left behind, broken invariants. means: what a single step is about.
    """

    gone: tuple[str, ...]
    changed: tuple[str, ...]
    waiting: tuple[Waiting, ...]
    notes: tuple[str, ...] = ()
    means: str = ""

    def text(self) -> str:
        lines = self.brief() + _listed("changed", self.changed)
        lines += _listed("waits", [waiting_words(w) for w in self.waiting])
        return "\n".join(lines + _listed("note", self.notes)) or "nothing happened, and nobody waits"

    def brief(self) -> list[str]:
        """What was let go, and what that means."""
        return _listed("let go", _folded(self.gone)) + _listed("means", [self.means] if self.means else [])

    __str__ = __repr__ = text


def _listed(word: str, lines: Sequence[str]) -> list[str]:
    return [f"{word if k == 0 else '':<8} {line}" for k, line in enumerate(lines)]


def _folded(gone: Sequence[str]) -> list[str]:
    """Many steps are told by their first and their last."""
    return list(gone) if len(gone) <= 3 else [gone[0], f"... {len(gone) - 2} more steps ...", gone[-1]]


def changed_lines(world: WorldState, before: WorldState) -> list[str]:
    """What changed between two points of a trace, as `+ enc0 regions mr#1: live ...`."""
    new, old, marks = world.lines(), before.lines(), world.diff(before)
    ordered = dict.fromkeys(key for key in [*new, *old] if key in marks)
    return [f"{marks[key]} {' '.join(key)}: {(new if key in new else old)[key]}" for key in ordered]


_INK, _MUTED = "#1B1B1B", "#5F6368"
_PAGE = f"font:12px/1.45 system-ui,sans-serif;color:{_INK};background:#fff"
_ROW = "display:flex;flex-wrap:wrap;gap:8px"
_CARD = "border:1px solid #C9CCD1;border-radius:6px;padding:6px 9px;background:#fff;flex:1 1 300px"
_TABLE = f"table-layout:auto;border-collapse:collapse;width:100%;margin:3px 0;font-size:12px;color:{_INK};border:0"
_CELL = "text-align:left;padding:1px 7px 1px 0;vertical-align:top;background:#fff;border:0;min-width:9px"
_WAITS = "background:#FBF6C9;border-radius:4px;padding:1px 6px;margin-top:3px"


def _row(kind: str, name: str, mark: str, text: str) -> str:
    word, colour = _MARKS.get(mark, ("", "transparent"))
    struck = "text-decoration:line-through;color:#5F6368" if mark == "-" else ""
    words = escape(text.replace("  ", " · "))
    tight = f"{_CELL};width:1%;white-space:nowrap"
    return (
        f'<tr><td title="{word}" style="{tight};color:{colour};font-weight:700">{escape(mark.strip())}</td>'
        f'<td style="{tight};color:{_MUTED}">{kind}</td><td style="{tight}">{escape(name)}</td>'
        f'<td style="{_CELL};{struck};border-left:3px solid {colour};padding-left:6px">{words}</td></tr>'
    )


def waiting_words(waiting: Waiting) -> str:
    """`rank0 at mr.register`, `enc0 at transfer.write (end), part 0 for rank1`."""
    point = waiting.point
    end = " (end)" if point.phase == "end" else ""
    part = f"part {point.part}" if point.part is not None else ""
    to = f"for rank{point.rank}" if point.rank is not None and point.process != f"rank{point.rank}" else ""
    about = " ".join(word for word in (part, to) if word)
    return f"{point.process} at {point.step}{end}" + (f", {about}" if about else "")


def draw(
    kind: str, events: Sequence[Event], breaches: Sequence[Breach], waiting: Sequence[Waiting], **options: Any
) -> Drawing:
    """A trace as a `sequence`, `timeline` or `architecture` diagram; `options` as these take them.

    Raises:
        UsageError: no such drawing. TraceTooLarge: more than a page takes; says what to select.
    """
    drawings: dict[str, Callable[[], Drawing]] = {
        "sequence": lambda: sequence(events, breaches, waiting=[w.point for w in waiting], **options),
        "timeline": lambda: timeline(events, breaches, **options),
        "architecture": lambda: architecture(events, **options),
    }
    if kind not in drawings:
        near = difflib.get_close_matches(kind, drawings, n=1) or list(drawings)
        raise UsageError(f"no drawing {kind!r}; did you mean {', '.join(near)}?")
    return drawings[kind]()
