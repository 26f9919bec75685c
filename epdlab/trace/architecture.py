"""The architecture of a run: its processes and the links between them, from what they said of themselves and what
they really exchanged. A link that carried nothing is not drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from epdlab.steps import Event

from . import canvas as c
from . import legend
from .canvas import Canvas
from .render import Drawing
from .spans import lanes, size, times

PAGE = 780.0
BOX = 196.0
LABEL = 12.5
LINE = 12.5
FACTS = ("pid", "url", "session", "protocol", "device", "pool", "store", "acks", "ack_ports", "master", "rpc")
TOWARDS_STORE = ("cache.get", "cache.put", "cache.lookup")


Place = tuple[float, float]


@dataclass(slots=True)
class Link:
    """What went between two processes: how many HTTP requests, writes, acks; bytes written."""

    posts: int = 0
    writes: int = 0
    nbytes: int = 0
    acks: int = 0


@dataclass(slots=True)
class Architecture:
    """The processes of a run, and what passed between them.

    Attributes:
        facts: per process, what its `process.start` said (role, pid, url, session, ...).
        links: per (encoder, rank), what passed.
        store: per process, how often it used the embedding store.
    """

    facts: dict[str, dict[str, object]]
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)


def survey(events: Sequence[Event]) -> Architecture:
    """What a trace says of its processes and links."""
    facts: dict[str, dict[str, object]] = {name: {} for name in lanes(events)}
    links: defaultdict[tuple[str, str], Link] = defaultdict(Link)
    store: defaultdict[str, int] = defaultdict(int)
    for event in events:
        if event.step == "process.start":
            facts[event.process] = dict(event.data or {})
        elif event.phase == "begin":
            pair = (event.process, f"rank{event.rank}")
            if event.step in ("encode.serve", "send.serve"):
                links[pair].posts += 1
            elif event.step == "transfer.write":
                links[pair].writes += 1
                links[pair].nbytes += event.bytes or 0
            elif event.step == "ack.push":
                links[pair].acks += 1
            elif event.step in TOWARDS_STORE:
                store[event.process] += 1
    return Architecture(facts | _masters(facts), dict(links), dict(store))


def _masters(facts: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The store masters that processes use, if they did not speak for themselves: they are no process of ours."""
    if any(name.startswith("master") for name in facts):
        return {}
    addresses = sorted({str(said["store"]) for said in facts.values() if said.get("store")})
    return {f"master{number}": {"role": "mooncake_master", "rpc": rpc} for number, rpc in enumerate(addresses)}


def architecture(events: Sequence[Event], title: str = "processes and links of the run") -> Drawing:
    """Draw the processes of a run: encoders left, prefill ranks right, the store below."""
    return _Page(survey(events), title).drawing()


class _Page:
    """The geometry of one architecture diagram."""

    def __init__(self, found: Architecture, title: str) -> None:
        self.found, self.title, self.page = found, title, Canvas(title, PAGE)
        names = list(found.facts)
        self.encoders = [n for n in names if n.startswith("enc")]
        self.ranks = sorted((n for n in names if n.startswith("rank")), key=lambda n: int(n[4:] or 0))
        self.others = [n for n in names if n not in self.encoders and n not in self.ranks]
        self.roomy = len(self.encoders) * len(self.ranks) <= (6 if len(self.encoders) == 1 else 4)
        self.boxes: dict[str, tuple[float, float, float]] = {}

    def drawing(self) -> Drawing:
        self.page.text(14, 14, self.title, size=11, bold=True)
        left, right = self._heights(self.encoders), self._heights(self.ranks)
        tall = max(sum(left), sum(right))
        self._column(self.encoders, left, 20.0, 36 + (tall - sum(left)) / 2)
        self._column(self.ranks, right, PAGE - 20 - BOX, 36 + (tall - sum(right)) / 2)
        bottom = self._row(self.others, 36 + tall + 14)
        for (encoder, rank), link in sorted(self.found.links.items()):
            if encoder in self.boxes and rank in self.boxes:
                self._link(encoder, rank, link)
        self._store_links()
        for name in self.boxes:
            self._box(name)
        self._legend(bottom + 14)
        return Drawing(self.page.dot(), "fixed", self.title)

    # ---- processes -----------------------------------------------------------------------------------------------

    def _heights(self, names: list[str]) -> list[float]:
        return [self._height(name) + 16 for name in names]

    def _height(self, name: str) -> float:
        beside = len(self.ranks) if name in self.encoders else len(self.encoders) if name in self.ranks else 0
        ports = beside * (4 * LABEL if self.roomy and name in self.ranks else 17.0)
        return max(32.0 + LINE * len(self._facts(name)), 52.0, ports)

    def _facts(self, name: str) -> list[str]:
        facts = self.found.facts[name]
        known = [fact for fact in FACTS if facts.get(fact)]
        said = [f"{fact.replace('_', ' ')} {_value(fact, facts[fact])}" for fact in known]
        return said + ([] if self.roomy else self._received(name))

    def _received(self, name: str) -> list[str]:
        """Where lines are too many for words of their own, a rank's box says what reached it."""
        mine = [link for (_, rank), link in self.found.links.items() if rank == name]
        writes, nbytes = sum(link.writes for link in mine), sum(link.nbytes for link in mine)
        return [f"received {times(writes, 'writes')}, {size(nbytes)}"] if mine else []

    def _column(self, names: list[str], heights: list[float], x: float, y: float) -> None:
        for name, height in zip(names, heights, strict=True):
            self.boxes[name] = (x, y, height - 16)
            y += height

    def _row(self, names: list[str], y: float) -> float:
        for x, name in zip(c.columns(len(names), 20, PAGE - 20), names, strict=True):
            self.boxes[name] = (x - BOX / 2, y, self._height(name))
        return y + max((self._height(name) for name in names), default=0.0)

    def _box(self, name: str) -> None:
        x, y, height = self.boxes[name]
        role = str(self.found.facts[name].get("role", ""))
        self.page.box(x, y, BOX, height, fill=c.PALE, line=c.MUTED, round_=True, name=name)
        self.page.text(x + 9, y + 13, name, bold=True, size=10.5)
        self.page.text(x + BOX - 9, y + 13, role, "r", size=8.5, colour=c.MUTED)
        for k, fact in enumerate(self._facts(name)):
            self.page.text(x + 9, y + 28 + LINE * k, fact, size=8.5)

    # ---- links ---------------------------------------------------------------------------------------------------

    def _link(self, encoder: str, rank: str, link: Link) -> None:
        """Three lines: requests towards the encoder, writes and acks towards the rank."""
        x0, x1 = self.boxes[encoder][0] + BOX, self.boxes[rank][0]
        y0 = self._port(encoder, self.ranks.index(rank), len(self.ranks))
        y1 = self._port(rank, self.encoders.index(encoder), len(self.encoders))
        gap = min(13.0, (self.boxes[rank][2] - 10) / (3 * len(self.encoders)))
        share = 0.62 if len(self.encoders) == 1 else 0.8
        x, y = x0 + (x1 - x0) * share, y0 + (y1 - y0) * share
        for k, (kind, used, text) in enumerate(_lines(link)):
            if used:
                a, b = (x0, y0 + (k - 1) * 5), (x1, y1 + (k - 1) * gap)
                self._line(kind, text, a, b, (encoder, rank))
                if self.roomy:
                    self.page.text(x, y + (k - 1) * LABEL, text, "c", size=8, ground="white")

    def _line(self, kind: str, text: str, a: Place, b: Place, names: tuple[str, str]) -> None:
        colour, width, style, head = legend.WIRES[kind]
        start, end, ends = (b, a, names[::-1]) if kind == "http" else (a, b, names)
        tip = f"{names[0]}, {names[1]}: {text}"
        self.page.line(*start, *end, colour=colour, width=width, style=style, head=head, tip=tip, ends=ends)

    def _port(self, name: str, index: int, count: int) -> float:
        _, y, height = self.boxes[name]
        return y + height * (index + 0.5) / max(count, 1)

    def _store_links(self) -> None:
        for name, count in self.found.store.items():
            for master in (other for other in self.others if other.startswith("master")):
                if self.found.facts[master].get("rpc") not in (None, self.found.facts[name].get("store")):
                    continue
                x, y, height = self.boxes[name]
                mx, my, _ = self.boxes[master]
                a, b = (x + BOX / 2, y + height), (mx + BOX / 2, my)
                self.page.line(*a, *b, colour=c.MUTED, width=1.2, style="dotted", head="normal", ends=(name, master))
                middle = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
                self.page.text(*middle, times(count, "store calls"), "c", size=8, ground="white")

    def _legend(self, y: float) -> None:
        legend.wires(self.page, y, (("http", "HTTP"), ("write", "one-sided write"), ("ack", "ZMQ ack")))
        self.page.height = y + 12


def _lines(link: Link) -> list[tuple[str, int, str]]:
    """The kinds of line between two processes: its style in `legend.WIRES`, how often it was used, its words."""
    return [
        ("http", link.posts, times(link.posts, "POSTs")),
        ("write", link.writes, f"{times(link.writes, 'writes')}, {size(link.nbytes)}"),
        ("ack", link.acks, times(link.acks, "acks")),
    ]


def _value(fact: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return size(value) if fact == "pool" and isinstance(value, int) else str(value)
