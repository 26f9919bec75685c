"""What happens to a machine, and all that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..steps import Event, Point
from .footprints import Thing
from .model_engine import Mode
from .scenario import Move

Input = tuple[Any, ...]
"""What happens to a machine (all hashable):

    ("start",)                      a rank takes up its first request
    ("take", gate, how)             a held step goes on. how: None, a Decision, the code of a write, or memory to read
    ("request", path, body, post)   a request comes in; `post` is what the answer names
    ("answer", number, payload)     the answer to its own post `number`: a body, or (kind, message) of an error
    ("frame", port, frame)          an ack comes in
    ("pushed", number, ok)          its push `number` went out, or nobody listens
    ("timer", number, at_once)      a timer fires; at_once: the step it leads to is not held
    ("cancel", number)              the client of its request `number` gives up
    ("claim", address, nbytes)      another owner registers memory; 0 bytes: withdraws it
    ("census",)                     count what is held
"""


class Gate(NamedTuple):
    """A step that waits: its number in this machine, what it is, and the inputs it stems from (a bit mask)."""

    number: int
    move: Move
    point: Point
    cause: int


class Writing(NamedTuple):
    """A one-sided write began."""

    point: Point
    session: str
    source: int
    target: int
    nbytes: int


class Message(NamedTuple):
    """What a machine sends, and the inputs it stems from (a bit mask).

    `post` (number, url, body), `answer` (post, payload), `push` (number, endpoint, frame), `open`, `close` (port).
    """

    kind: str
    cause: int
    number: Any
    where: str
    payload: Any


class Setting(NamedTuple):
    """A timer was set."""

    number: int
    name: str
    seconds: float
    labels: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Outcome:
    """All that follows from one input.

    Attributes:
        gates: steps that wait now. gone: gates whose steps wait no more, without having been taken.
        pokes: what the process wrote into its own memory. regions: (address, bytes), 0 bytes for a withdrawal.
        ended: requests that are over. defects: errors of the code itself, of which there must be none.
        touched: what it touched, see `footprints`.
    """

    gates: list[Gate] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    timers: list[Setting] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    pokes: list[tuple[int, bytes]] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    writing: Writing | None = None
    ended: list[int] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    touched: dict[Thing, Mode] = field(default_factory=dict)
