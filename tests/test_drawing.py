"""Drawings: the same trace gives the same bytes, everything that happened is in them, and too much is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from handoff_world import EnginePool, World, within
from tape import PART_BYTES, SOURCE, TARGET, Tape, race

from epdlab.errors import UsageError
from epdlab.landing import LandingPool
from epdlab.steps import Event, Point
from epdlab.trace import canvas, legend
from epdlab.trace.architecture import architecture, survey
from epdlab.trace.breach import INVARIANTS
from epdlab.trace.canvas import Canvas
from epdlab.trace.invariants import check
from epdlab.trace.layout import layout, of_pool, of_trace
from epdlab.trace.lifecycle import LIFECYCLES, lifecycle, unexplained
from epdlab.trace.perfetto import perfetto, save_perfetto
from epdlab.trace.render import DotMissing, Drawing, DrawingFailed, TraceTooLarge, render
from epdlab.trace.rows import rows
from epdlab.trace.sequence import sequence
from epdlab.trace.spans import lanes, spans
from epdlab.trace.timeline import timeline

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: Drawing) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing.svg).iter(f"{SVG}text")]


def size_of(drawing: Drawing) -> tuple[float, float]:
    root = ElementTree.fromstring(drawing.svg)
    return tuple(float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))  # type: ignore[return-value]


def of_race(draw: Callable[..., Drawing], **options: Any) -> Drawing:
    events = race().events
    return draw(events, check(events), **options)


# ---- the same bytes --------------------------------------------------------------------------------------------------

DRAWN = {
    "sequence": lambda events: sequence(events, check(events)),
    "timeline": lambda events: timeline(events, check(events)),
    "timeline by time": lambda events: timeline(events, check(events), scale="time"),
    "architecture": architecture,
    "layout": lambda events: layout(of_trace(events, "rank0")),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_trace_gives_the_same_dot(name: str) -> None:
    events = Tape().handoff(3, parts=2).events + race().events
    again = msgspec.json.decode(msgspec.json.encode(events), type=list[Event])
    assert DRAWN[name](events).dot == DRAWN[name](again).dot


def test_the_dot_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from tape import race; from epdlab.trace.invariants import check;"
        "from epdlab.trace.sequence import sequence; from epdlab.trace.timeline import timeline;"
        "from epdlab.trace.architecture import architecture; events = race().events; found = check(events);"
        "print(sequence(events, found).dot, timeline(events, found).dot, architecture(events).dot)"
    )

    def run(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        root = Path(__file__).parent.parent
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, check=True)
        return done.stdout.decode()

    assert run("1") == run("2")
    assert run("1").count("digraph") == 3


def test_other_traces_give_other_dot() -> None:
    assert of_race(sequence).dot != sequence(Tape().handoff(2).events).dot


# ---- SVG and PNG -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [sequence, timeline])
def test_the_svg_is_plain_and_on_white(draw: Callable[..., Drawing]) -> None:
    drawing = of_race(draw, title="two ranks & one part")
    root = ElementTree.fromstring(drawing.svg)
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title") == "two ranks & one part"
    ground = next(root.iter(f"{SVG}polygon"))
    assert ground.attrib["fill"] == "white"
    assert {text.attrib["font-family"] for text in root.iter(f"{SVG}text")} == {"Helvetica,sans-Serif"}
    assert "http" not in drawing.svg.replace("http://www.w3.org/", "")


def test_the_png_is_sharp_and_says_its_size() -> None:
    drawing = of_race(timeline)
    data, size = drawing._repr_png_()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = size_of(drawing)
    assert size["width"] == pytest.approx(width * 96 / 72, abs=3)
    assert size["height"] == pytest.approx(height * 96 / 72, abs=3)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".dot"])
def test_a_drawing_is_saved_by_its_suffix(tmp_path: Path, suffix: str) -> None:
    assert of_race(timeline).save(tmp_path / f"figure{suffix}").stat().st_size > 1000


def test_another_suffix_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.jpg.*\.svg, \.png, \.dot"):
        of_race(timeline).save(tmp_path / "figure.jpg")


def test_without_graphviz_the_error_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DotMissing, match="apt-get install graphviz"):
        render("digraph {}", "svg")


def test_bad_dot_is_a_typed_error() -> None:
    with pytest.raises(DrawingFailed, match="refused the figure"):
        render("digraph {", "svg")


def test_quotes_and_markup_in_a_name_survive() -> None:
    page = Canvas('a "title" <&>', 100, 40)
    page.text(10, 10, 'a "name" <&> \\')
    assert texts(Drawing(page.dot(), "fixed", "t")) == ['a "name" <&> \\']


# ---- the sequence diagram --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 10])
def test_every_process_has_a_lane_and_encoders_stand_between_ranks(ranks: int) -> None:
    tape = Tape().handoff(ranks)
    drawing = sequence(tape.events)
    names = [f"rank{rank}" for rank in range(ranks)]
    assert {*names, "enc0"} <= set(texts(drawing))
    order = lanes(tape.events)
    assert order.index("enc0") == (ranks + 1) // 2
    assert [name for name in order if name != "enc0"] == names


def test_ten_ranks_fit_a_page() -> None:
    width, _ = size_of(sequence(Tape().handoff(10).events))
    assert width < 920


def test_http_acks_and_writes_differ_in_line_colour_and_label() -> None:
    styles = [legend.WIRES[kind] for kind in ("http", "ack", "write")]
    assert len({style[0] for style in styles}) == 3
    assert [style[2] for style in styles] == ["solid", "dashed", "solid"]
    assert styles[2][1] > 2 * styles[0][1]
    drawing = sequence(Tape().handoff().events)
    for text in ("POST /encode part 0", "POST /send part 0", "ack part 0", "write part 0, 64 KiB"):
        assert text in texts(drawing)
    for name in ("http", "ack", "write"):
        assert legend.WIRES[name][0] in drawing.dot


def test_messages_go_from_lane_to_lane() -> None:
    found = [(row.lane, row.to, row.wire) for row in rows_of(Tape().handoff()) if row.to is not None]
    assert Counter(found) == {
        ("rank0", "enc0", "http"): 2,
        ("enc0", "rank0", "reply"): 2,
        ("enc0", "rank0", "ack"): 1,
        ("enc0", "rank0", "write"): 1,
    }


def rows_of(tape: Tape, collapse: bool = True) -> list[Any]:
    return rows(tape.events, range(len(tape.events)), collapse)


def test_collapsing_leaves_out_what_says_little_but_never_a_failure() -> None:
    tape = Tape().handoff()
    assert not any("look up" in row.text for row in rows_of(tape))
    assert any("look up" in row.text for row in rows_of(tape, collapse=False))
    tape.do("enc0", "send.lookup", "lost_embedding: gone", req="q1", part=0, rank=1)
    assert [row.text for row in rows_of(tape) if row.failed] == ["look up part 0 for rank1: lost_embedding"]


def test_a_request_is_selected_and_named_where_there_are_several() -> None:
    tape = Tape().handoff().handoff(req="q2")
    both, one = sequence(tape.events), sequence(tape.events, req="q2")
    assert "q1: ack part 0" in texts(both) and "q2: ack part 0" in texts(both)
    assert "ack part 0" in texts(one) and not any("q1" in text for text in texts(one))


def test_what_has_not_arrived_is_drawn_as_such() -> None:
    tape = Tape().handoff()
    tape.add("rank0", "send.post", "begin", req="q1", part=0, rank=0, peer="http://127.0.0.1:1/send")
    tape.introduce()
    tape.do("enc0", "ack.push", req="q1", part=0, rank=0)
    lost = [(row.text, row.lane, row.to) for row in rows_of(tape) if row.lost]
    assert lost == [("POST /send part 0", "rank0", "enc0"), ("ack part 0", "enc0", "rank0")]
    assert "ack part 0 (not arrived)" in texts(sequence(tape.events))


def test_late_bytes_are_a_message_of_their_own() -> None:
    tape = Tape()
    tape.write_late(rank=1)
    (row,) = rows_of(tape)
    assert (row.lane, row.to, row.wire) == ("enc0", "rank1", "late")


def test_held_faulted_and_failed_steps_are_marked() -> None:
    tape = Tape()
    tape.add("enc0", "mr.register", "begin", region="enc0.mr#1", address=SOURCE, bytes=PART_BYTES, held_ms=1200.0)
    tape.add("enc0", "mr.register", "end", region="enc0.mr#1", address=SOURCE, bytes=PART_BYTES, result=0)
    tape.add("enc0", "transfer.write", "begin", region="enc0.mr#1", req="q1", part=0, rank=0, fault="fail")
    tape.add("enc0", "transfer.write", "end", region="enc0.mr#1", req="q1", part=0, rank=0, result=-1)
    drawing = sequence(tape.events)
    body = drawing.dot.split('label="HTTP')[0]
    assert [body.count(f'shape="{shape}"') for shape in ("diamond", "triangle", "square")] == [1, 1, 1]
    assert any("[fault: fail]" in text for text in texts(drawing))
    assert any("ended = -1" in text for text in texts(drawing))
    assert "held 1200 ms" in drawing.svg


def test_who_waits_at_the_gate_is_drawn_below() -> None:
    waiting = [Point("enc0", "transfer.write", "begin", "q1", 0, 1), Point("rank7", "ack.pull", "begin", "q1", 0, 7)]
    shown = texts(sequence(Tape().handoff(2).events, waiting=waiting))
    assert "waits at transfer.write part 0 for rank1" in shown
    assert "waits at ack.pull part 0" in shown and "rank7" in shown


def test_breaches_carry_their_number_sentence_and_message() -> None:
    events = race().events
    found = check(events)
    drawing = sequence(events, found)
    for breach in found:
        assert drawing.dot.count(f'label="{breach.number}", tooltip="[{breach.invariant}]') == 1
        assert f"[{breach.invariant}] {INVARIANTS[breach.invariant].sentence}" in texts(drawing)
        assert breach.message in texts(drawing)
    assert "[overlap]" not in sequence(events).dot


def test_the_last_rows_can_be_drawn_alone() -> None:
    events = Tape().handoff(2).events
    assert "q1 ends: ok" in texts(sequence(events, last=5))
    assert "takes up q1" not in texts(sequence(events, last=5))


def test_a_modelled_trace_has_no_clock() -> None:
    events = [msgspec.structs.replace(event, t=k * 1000) for k, event in enumerate(Tape().handoff().events)]
    assert "ms" in texts(sequence(Tape().handoff().events))
    assert "ms" not in texts(sequence(events))


@pytest.mark.parametrize("draw", [sequence, timeline])
def test_an_empty_trace_is_an_empty_page(draw: Callable[..., Drawing]) -> None:
    assert ElementTree.fromstring(draw([]).svg).tag == f"{SVG}svg"


# ---- the timeline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["order", "time"])
def test_uncovered_spans_are_hatched_and_numbered(scale: Any) -> None:
    drawing = of_race(timeline, scale=scale)
    body = drawing.dot.split('label="registered')[0]
    hatched = [line for line in body.splitlines() if "striped" in line and canvas.BREACH in line]
    assert len(hatched) == 1
    assert "enc0.mr#1" not in texts(drawing) and "mr#1" in texts(drawing)
    assert "refused: -7" in texts(drawing)
    assert "[source_uncovered] " + INVARIANTS["source_uncovered"].sentence in texts(drawing)


def test_covered_writes_are_not_hatched() -> None:
    body = timeline(Tape().handoff(2).events).dot.split('label="registered')[0]
    assert "striped" not in body


def test_a_region_spans_from_its_registration_to_its_end() -> None:
    tape = Tape()
    tape.register("enc0", 1, SOURCE)
    tape.deregister("enc0", 1, SOURCE)
    tape.register("enc0", 2, SOURCE)
    shown = texts(timeline(tape.events))
    assert "64 KiB" in shown and "64 KiB, still there" in shown


# ---- the architecture ------------------------------------------------------------------------------------------------


def test_the_architecture_shows_the_processes_that_spoke_and_the_links_that_were_used() -> None:
    tape = Tape()
    tape.introduce(2)
    tape.note("enc1", "process.start", data={"role": "encoder", "url": "http://127.0.0.1:9"})
    tape.handoff(2, parts=2)
    found = survey(tape.events)
    assert set(found.facts) == {"enc0", "enc1", "rank0", "rank1"}
    assert set(found.links) == {("enc0", "rank0"), ("enc0", "rank1")}
    link = found.links["enc0", "rank0"]
    assert (link.posts, link.writes, link.acks, link.nbytes) == (4, 2, 2, 2 * PART_BYTES)
    shown = texts(architecture(tape.events))
    assert {"pid 100", "url http://127.0.0.1:1", "session 127.0.0.1:20", "2 writes, 128 KiB"} <= set(shown)


def test_the_store_is_linked_to_who_used_it() -> None:
    tape = Tape()
    tape.introduce()
    tape.note("master", "process.start", data={"role": "master", "pid": 7})
    tape.do("enc0", "cache.get")
    drawing = architecture(tape.events)
    assert "1 store call" in texts(drawing)
    assert '"enc0" -> "master"' in drawing.dot


def test_a_store_that_only_its_users_name_is_drawn_too() -> None:
    tape = Tape()
    for encoder, rpc in (("enc0", "127.0.0.1:7"), ("enc1", "127.0.0.1:8")):
        tape.note(encoder, "process.start", data={"role": "encoder", "store": rpc})
        tape.do(encoder, "cache.get")
    drawing = architecture(tape.events)
    assert {"rpc 127.0.0.1:7", "rpc 127.0.0.1:8"} <= set(texts(drawing))
    assert drawing.dot.count('"enc0" -> "master0"') == drawing.dot.count('"enc1" -> "master1"') == 1
    assert '"enc0" -> "master1"' not in drawing.dot


# ---- landing memory --------------------------------------------------------------------------------------------------


def test_the_layout_of_a_trace_gives_offsets_of_slots_and_parts() -> None:
    tape = Tape()
    tape.register("rank0", 1, TARGET, 1 << 20)
    for slot, (req, address) in enumerate((("q1", TARGET), ("q2", TARGET + 4 * PART_BYTES)), start=1):
        where = {"region": f"rank0.slot#{slot}", "address": address, "bytes": 2 * PART_BYTES}
        tape.do("rank0", "landing.alloc", req=req, rank=0, **where)
    for part in (0, 1):
        tape.write("begin", part=part)
    tape.do("rank0", "landing.quarantine", region="rank0.slot#2", req="q2", rank=0)
    memory = of_trace(tape.events, "rank0")
    assert (memory.pool, memory.nbytes) == (True, 1 << 20)
    assert [(s.name, s.offset, s.owner, s.quarantined) for s in memory.slots] == [
        ("rank0.slot#1", 0, "q1", False),
        ("rank0.slot#2", 4 * PART_BYTES, "q2", True),
    ]
    assert memory.slots[0].parts == [(0, 0, PART_BYTES), (1, PART_BYTES, PART_BYTES)]
    shown = texts(layout(memory))
    assert f"+{4 * PART_BYTES}" in shown and "q2 (quarantined)" in shown
    assert "768 KiB free, largest hole 640 KiB" in shown


def test_without_a_pool_each_request_has_memory_of_its_own() -> None:
    tape = Tape()
    tape.land(req="q1")
    tape.land(req="q2", address=9 * TARGET, slot=2)
    memory = of_trace(tape.events, "rank0")
    assert not memory.pool
    assert [slot.offset for slot in memory.slots] == [0, PART_BYTES]


async def test_the_layout_of_a_live_pool_is_that_of_its_trace(engines: EnginePool) -> None:
    async with World(engines, tp=1, pool_bytes=1 << 20) as world:
        first = await world.landed(0, "q1", "bytes:5000:1")
        second = await world.landed(0, "q2", "bytes:300:2")
        await first.release()
        await world.settled()
        pool = world.ranks[0].landing
        assert isinstance(pool, LandingPool)
        live, traced = of_pool(pool, "rank0"), of_trace(world.events, "rank0")
        for slot in traced.slots:
            assert slot.parts == [(0, 0, 300)]
            slot.parts = []
        assert live == traced
        assert [slot.owner for slot in live.slots] == ["q2"]
        await second.release()


def test_more_slots_than_a_page_takes_are_refused() -> None:
    tape = Tape()
    for slot in range(100):
        tape.land(req=f"q{slot}", address=TARGET + slot * PART_BYTES, slot=slot)
    with pytest.raises(TraceTooLarge, match="100 slots"):
        layout(of_trace(tape.events, "rank0"))


# ---- lifecycles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIFECYCLES)
def test_a_lifecycle_shows_every_state_and_explains_every_transition(name: str) -> None:
    assert unexplained(name) == set()
    drawing = lifecycle(name)
    table = LIFECYCLES[name].table
    assert {state.value for state in table} <= set(texts(drawing))
    for state, after in table.items():
        for other in after:
            assert f'"{state.value}" -> "{other.value}"' in drawing.dot


def test_an_unknown_lifecycle_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="region, slot, part, request"):
        lifecycle("socket")


# ---- colours ---------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, severity 1: what a reader without one kind of cone sees, in linear RGB.
SIGHT = {
    "common": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def linear(colour: str) -> list[float]:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in channels]


def luminance(colour: str) -> float:
    r, g, b = linear(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as such a reader sees it."""
    rgb = [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in SIGHT[sight]]
    r, g, b = (min(max(v, 0.0), 1.0) for v in rgb)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047, 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (*xyz, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_can_be_told_apart_with_any_sight(sight: str) -> None:
    for (one, a), (other, b) in itertools.combinations(canvas.PALETTE.items(), 2):
        distance = sum((x - y) ** 2 for x, y in zip(seen(a, sight), seen(b, sight), strict=True)) ** 0.5
        assert distance > 15, (one, other, distance)


@pytest.mark.parametrize("ink", [canvas.INK, canvas.ALERT, canvas.MUTED])
@pytest.mark.parametrize("ground", ["#FFFFFF", canvas.TINT, canvas.PALE])
def test_text_can_be_read_on_every_ground(ink: str, ground: str) -> None:
    dark, light = sorted((luminance(ink), luminance(ground)))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


# ---- too much --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hundred_thousand() -> list[Event]:
    tape = Tape()
    number = 0
    while len(tape.events) < 100_000:
        number += 1
        tape.handoff(2, req=f"q{number}")
    return tape.events


def test_a_huge_trace_is_refused_with_advice(hundred_thousand: list[Event]) -> None:
    for draw in (sequence, timeline):
        with pytest.raises(TraceTooLarge, match=r"select a request.*Perfetto"):
            draw(hundred_thousand)
    with pytest.raises(TraceTooLarge, match=r"\d+ rows, a page takes 5"):
        sequence(hundred_thousand, req="q7", max_rows=5)


def test_one_request_of_a_huge_trace_and_its_architecture_are_drawn(hundred_thousand: list[Event]) -> None:
    assert "takes up q77" in texts(sequence(hundred_thousand, req="q77"))
    assert "mr#1" in texts(timeline(hundred_thousand, req="q77"))
    assert "rank1" in texts(architecture(hundred_thousand))
    assert len(perfetto(hundred_thousand)["traceEvents"]) > 50_000


# ---- Perfetto --------------------------------------------------------------------------------------------------------


class TraceEvent(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of the Trace Event Format that a trace here may have."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: float | None = None
    dur: float | None = None
    cat: str | None = None
    id: int | None = None
    bp: str | None = None
    s: str | None = None
    args: dict[str, Any] = {}


def read_perfetto(path: Path) -> list[TraceEvent]:
    whole = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return msgspec.convert(whole["traceEvents"], type=list[TraceEvent])


def test_perfetto_reads_what_is_written(tmp_path: Path) -> None:
    events = race().events
    found = read_perfetto(save_perfetto(events, tmp_path / "trace.json", check(events)))
    needs = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "M": set(), "s": {"ts", "id"}, "f": {"ts", "id", "bp"}}
    for event in found:
        assert all(getattr(event, name) is not None for name in needs[event.ph]), event
        assert event.ts is None or event.ts >= 0
        assert event.dur is None or event.dur >= 0
    steps = [event for event in found if event.ph == "X" and event.cat not in ("memory",)]
    assert len(steps) == sum(span.begin != span.end for span in spans(events))


def test_perfetto_has_tracks_per_process_and_region(tmp_path: Path) -> None:
    events = race().events
    found = read_perfetto(save_perfetto(events, tmp_path / "trace.json", check(events)))
    names = {event.pid: event.args["name"] for event in found if event.name == "process_name"}
    assert sorted(names.values()) == ["enc0", "rank0", "rank1"]
    tracks = {(names[e.pid], e.args["name"]) for e in found if e.name == "thread_name" and e.args["name"] != "steps"}
    assert tracks == {("enc0", "enc0.mr#1")} | {
        (f"rank{r}", f"rank{r}.{kind}#1") for r in (0, 1) for kind in ("mr", "slot")
    }
    assert {event.name.split()[0] for event in found if event.cat == "breach"} == {"[overlap]", "[source_uncovered]"}


def test_perfetto_arrows_go_forward_and_in_pairs(tmp_path: Path) -> None:
    found = read_perfetto(save_perfetto(Tape().handoff(2).events, tmp_path / "trace.json"))
    ends: defaultdict[int | None, dict[str, TraceEvent]] = defaultdict(dict)
    for event in found:
        if event.ph in "sf":
            ends[event.id][event.ph] = event
    assert len(ends) == 6  # per rank: /encode, /send, ack
    assert all(pair["s"].ts <= pair["f"].ts for pair in ends.values())  # type: ignore[operator]


def test_perfetto_spans_of_one_track_do_not_cross(tmp_path: Path) -> None:
    found = read_perfetto(save_perfetto(race().events, tmp_path / "trace.json"))
    tracks: defaultdict[tuple[int, int], list[TraceEvent]] = defaultdict(list)
    for event in found:
        if event.ph == "X":
            tracks[event.pid, event.tid].append(event)
    for track in tracks.values():
        track.sort(key=lambda event: event.ts or 0.0)
        for before, after in itertools.pairwise(track):
            assert before.ts + before.dur <= after.ts  # type: ignore[operator]


# ---- a real run ------------------------------------------------------------------------------------------------------


async def test_a_real_run_of_ten_ranks_is_drawn_whole(engines: EnginePool) -> None:
    async with World(engines, tp=10) as world:
        await within(world.all_ranks("q1", "bytes:4096:1", videos=["bytes:512:2"]))
        await world.settled()
    drawing = sequence(world.events, check(world.events))
    shown = texts(drawing)
    assert {"enc0", *(f"rank{rank}" for rank in range(10))} <= set(shown)
    found = rows(world.events, range(len(world.events)))
    counted = Counter(row.wire for row in found)
    assert counted == {"http": 40, "reply": 40, "ack": 20, "write": 20, None: counted[None]}
    assert not any(row.lost for row in found)
