"""The report: claims hold in the wheels, macros resolve, and the build says when a file is not what it gives."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epdlab.errors import LabError, UsageError
from epdlab.report import build, claims, figures, numbers, results, tables, texts
from epdlab.report.claims import Claim
from epdlab.report.drawn import pool
from epdlab.report.drawn import video as simple
from epdlab.report.figures import Sketch
from epdlab.report.results import Sources
from epdlab.trace.lifecycle import lifecycle

CLAIM = Claim("es17-x", "It writes.", "0.5.17", "sglang/a.py", 2, 3, "b = 2")


# ---- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_every_claim_holds_in_its_release() -> None:
    try:
        problems = build.verify_claims()
    except LabError as error:
        pytest.skip(f"a wheel is neither cached nor to be had: {error}")
    assert problems == []


def test_there_are_claims_about_every_release_the_report_names() -> None:
    found = claims.load_claims().values()
    assert len(found) >= 120
    assert {claim.release for claim in found} == {"0.5.12", "0.5.16", "0.5.17", "0.5.23"}


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[[str], Path]:
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/a.py", "a = 1\nb = 2\nc = 3\n")
    return lambda release: path


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"pattern": "b = 2\nc = 3"}, None),
        ({"pattern": "a = 1"}, "'a = 1' is not in sglang/a.py:2-3 of 0.5.17"),
        ({"first": 3}, "is not in sglang/a.py:3 of"),
        ({"last": 4}, "ends at line 3"),
        ({"file": "sglang/b.py"}, "has no file sglang/b.py"),
    ],
)
def test_a_claim_is_held_against_its_lines(
    change: dict[str, Any], problem: str | None, wheel: Callable[[str], Path]
) -> None:
    fields = {name: getattr(CLAIM, name) for name in CLAIM.__struct_fields__}
    found = claims.verify([Claim(**(fields | change))], wheel)
    assert [problem in line for line in found if problem] == [True] * bool(problem)
    assert len(found) == bool(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('text = "t"\nlines = 3', "lines"),
        ("", "text"),
        ('text = " "', "must not be empty"),
        ('text = "t"\n[[claim]]\nid = "a-b"\ntext = "u"', "used 2 times"),
    ],
)
def test_a_malformed_claims_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    rest = 'release = "0.5.17"\nfile = "f"\nfirst = 1\nlast = 2\npattern = "p"'
    pieces = [f'[[claim]]\nid = "a-b"\n{piece}\n{rest}' for piece in text.split('\n[[claim]]\nid = "a-b"\n')]
    (tmp_path / "claims_x.toml").write_text("\n".join(pieces))
    with pytest.raises(UsageError, match=problem):
        claims.load_claims(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"), [({"id": "A b"}, "not of the form"), ({"first": 9, "last": 2}, "are no range")]
)
def test_ids_and_lines_are_checked(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    fields = {"id": "a-b", "text": "t", "release": "1", "file": "f", "first": 1, "last": 2, "pattern": "p"} | change
    (tmp_path / "claims_x.toml").write_text(
        "[[claim]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in fields.items())
    )
    with pytest.raises(UsageError, match=problem):
        claims.load_claims(tmp_path)


def test_a_reference_names_the_release_only_if_it_is_another() -> None:
    path = "sglang/srt/disaggregation/encode_server.py"
    files = claims.load_files()
    for release, lines, expected in (("0.5.17", (7, 9), "ES:7-9"), ("0.5.16", (7, 7), "ES@0.5.16:7")):
        claim = Claim("x", "t", release, path, *lines, "p")
        assert claims.reference(claim, files) == expected
        assert claim.url.startswith(f"https://github.com/sgl-project/sglang/blob/v{release}/python/{path}#L7")
    with pytest.raises(UsageError, match=r"add it to files\.toml"):
        claims.reference(CLAIM, files)


def test_every_file_of_a_claim_has_a_code_that_means_one_file_per_release() -> None:
    files = claims.load_files()
    meant: dict[tuple[str, str], set[str]] = {}
    for claim in claims.load_claims().values():
        meant.setdefault((files[claim.file].code, claim.release), set()).add(claim.file)
    assert all(len(paths) == 1 for paths in meant.values())


# ---- numbers and results ---------------------------------------------------------------------------------------------

DATA = {
    "r": {
        "n": 12345,
        "x": 0.012345,
        "w": "ok",
        "runs": {"sglang-0.5.17": {"sends": 4}},
        "rows": [{"name": "one", "b": 8, "v": 1.5}],
    }
}


@pytest.mark.parametrize(
    ("macro", "expected"),
    [
        ("r:n", "12,345"),
        ("r:x", "0.0123"),
        ("r:x|.1e", "1.2e-02"),
        ("r:w", "ok"),
        ("r:runs.sglang-0.5.17.sends", "4"),
        ("r:rows.0.v", "1.50"),
        ("r:rows.b=8.v|.0f", "2"),
        ("r:rows.one.v", "1.50"),
        ("r:rows|len", "1"),
    ],
)
def test_a_number_is_found_and_shown(macro: str, expected: str) -> None:
    assert numbers.resolve(macro, DATA) == expected


@pytest.mark.parametrize("macro", ["r:y", "r:rows.1.v", "r:rows.b=9.v", "r:n.x"])
def test_a_missing_number_names_the_file_and_the_key(macro: str) -> None:
    with pytest.raises(UsageError, match=rf"results/r\.json has no {re.escape(macro[2:])}"):
        numbers.resolve(macro, DATA)


@pytest.mark.parametrize("macro", ["r:runs", "r:rows", "r:w|.2f", "r:w|len"])
def test_what_is_no_number_is_refused(macro: str) -> None:
    with pytest.raises(UsageError, match="cannot be shown"):
        numbers.resolve(macro, DATA)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (9.999, "10.0"), (-3.2, "-3.20"), (12345.6, "12,300"), (1e-5, "0.0000100")]
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert numbers.significant(value) == text


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    path = results.write_result("bench_x", {"ratio": 0.9}, "python -m epdlab bench x --write", tmp_path)
    read = results.read_result("bench_x", tmp_path)
    assert path == tmp_path / "bench_x.json"
    assert read["ratio"] == 0.9
    assert set(read["meta"]) == {"command", "date", "machine", "versions"}
    assert set(read["meta"]["machine"]) == {"cpu", "cores", "memory_gib"}
    assert {"python", "torch", "mooncake", "epdlab"} == set(read["meta"]["versions"])


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("bench_store", "epdlab bench store --write"),
        ("upstream_0_5_16", "make upstream"),
        ("ablation", "bench ablation --write"),
        ("trace_race_0516", "report --traces"),
    ],
)
def test_a_missing_result_names_the_command_that_makes_it(name: str, command: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"results/{name}.json; make it with `.*{command}`"):
        results.read_result(name, tmp_path)


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_what_is_no_macro_is_refused() -> None:
    assert texts.expand("a {{n:x:y}} b", {"n": str.upper}) == "a X:Y b"
    with pytest.raises(UsageError, match="is no macro"):
        texts.expand("a {{m:x}} b", {})


def test_editions_must_use_the_same_macros_equally_often() -> None:
    same = texts.disparities({"en": {"p": "{{c:a}} {{n:x:y}}"}, "zh": {"p": "{{n:x:y}} {{c:a}}"}})
    twice = texts.disparities({"en": {"p": "{{c:a}} {{c:a}}"}, "zh": {"p": "{{c:a}} {{fig:f}}"}})
    assert same == []
    assert twice == ["text/zh/p.md lacks {{c:a}}", "text/en/p.md lacks {{fig:f}}"]


def test_headings_go_one_level_down_and_get_anchors() -> None:
    lines, headings = texts.demoted(
        ["# T", "## 7. Seven", "### deep", "```", "# no heading", "```", "## Last"], "part-1"
    )
    assert headings == [(1, "T", "part-1"), (2, "7. Seven", "part-1-7"), (2, "Last", "part-1-2")]
    assert [line for line in lines if line.startswith("#")] == [
        "## T",
        "### 7. Seven",
        "#### deep",
        "# no heading",
        "### Last",
    ]


def test_every_claim_of_the_texts_has_an_entry() -> None:
    known = set(claims.load_claims())
    used = {key[2:] for path in texts.TEXT.glob("*/*.md") for key in texts.macros(path.read_text()) if key[:2] == "c:"}
    assert used - known == set()
    assert len(used) >= 120


# ---- figures ---------------------------------------------------------------------------------------------------------

FIXED = ("deployment", "epd_request", "store_classes", "cached_encode", "host_pool", "async_video")


@pytest.mark.parametrize("name", FIXED)
def test_a_drawn_figure_is_the_same_each_time_and_fits_a_page(name: str, tmp_path: Path) -> None:
    first, second = (figures.draw(name, Sources(tmp_path)) for _ in range(2))
    assert first == second
    assert '<svg xmlns="http://www.w3.org/2000/svg" width="880"' in first
    assert 'rx="8" fill="#ffffff"/>' in first
    inside = [float(x) for x in re.findall(r' x="([\d.-]+)"', first)]
    assert min(inside) >= 0
    assert max(inside) <= 880


def test_the_pool_figure_shows_what_the_bookkeeping_does() -> None:
    entries = {entry.key: entry for entry in pool.scene().entries}
    assert len(entries["C"].runs) > 1
    assert entries["A"].pins == 1
    assert "A" not in pool.eviction_order()
    assert "C" not in pool.eviction_order()


def test_text_is_measured_in_helvetica() -> None:
    from epdlab.report.canvas import text_width, wrap

    assert text_width("Mooncake", 10) == pytest.approx(10 * (833 + 556 + 556 + 556 + 500 + 556 + 500 + 556) / 1000)
    assert wrap("one two three", text_width("one two", 12), 12) == ["one two", "three"]


def test_a_figure_by_graphviz_is_sealed() -> None:
    drawing = lifecycle("region")
    stored = figures._sealed(drawing.svg, drawing.dot)
    other_version = figures._sealed(drawing.svg.replace("14.00", "13.99"), drawing.dot)
    assert figures.same(stored, stored)
    assert figures.same(stored, other_version)
    assert not figures.same(stored, other_version.replace("live", "dead"))
    assert not figures.same(stored, figures._sealed(drawing.svg, drawing.dot.replace("live", "dead")))
    assert not figures.same(stored, drawing.svg)


def test_a_figure_without_its_source_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="record it with `python -m epdlab report --traces`"):
        figures.draw("race_sequence_0516", Sources(tmp_path))


# ---- the build, on a small report ------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A report of two editions and two figures that is built and clean; gives what `check` finds in it."""
    known = next(iter(claims.load_claims()))
    registry = {
        "plain": lambda _: Sketch(simple.draw()),
        "placed": lambda _: Sketch(lifecycle("region").svg, lifecycle("region").dot),
    }
    monkeypatch.setattr(figures, "REGISTRY", registry)
    for lang in ("en", "zh"):
        folder = tmp_path / "text" / lang
        folder.mkdir(parents=True)
        for name in (*texts.DOCUMENTS, texts.BRIEF):
            (folder / f"{name}.md").write_text(f"# {name}\n\n## 1. One\n\n{{{{c:{known}}}}}\n")
        (folder / "part1.md").write_text(
            f"# T\n\n{{{{n:r:n}}}} {{{{c:{known}}}}} [t](#part-2-1)\n\n{{{{fig:plain}}}}\n\n{{{{fig:placed}}}}\n"
        )
        captions = "".join(f'[{name}]\ncaption = "c"\nalt = "a"\n' for name in registry)
        (folder / "figures.toml").write_text(captions)
    results.write_result("r", DATA["r"], "make r", tmp_path / "results")
    build.build(tmp_path, text_folder=tmp_path / "text")
    return lambda: build.check(tmp_path, tmp_path / "text")


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_was_built_is_clean(small: Callable[[], list[str]], tmp_path: Path) -> None:
    report = (tmp_path / "REPORT.md").read_text()
    assert small() == []
    assert "12,345" in report
    assert "![a](figures/plain.svg)\n\n*Figure 1. c*" in report
    assert (tmp_path / "REPORT.zh-CN.md").exists()
    assert (tmp_path / "REPORT_BRIEF.md").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("REPORT.md", "12,345", "12,346", "REPORT.md is not what the build gives"),
        ("REPORT.zh-CN.md", "12,345", "12,346", "REPORT.zh-CN.md is not what the build gives"),
        ("REPORT_BRIEF.md", "One", "Two", "REPORT_BRIEF.md is not what the build gives"),
        ("results/r.json", "12345", "12346", "REPORT.md is not what the build gives"),
        ("results/r.json", '"n"', '"m"', "results/r.json has no n"),
        ("figures/plain.svg", "probe", "other", "figures/plain.svg is not what the build gives"),
        ("figures/placed.svg", "live", "dead", "figures/placed.svg is not what the build gives"),
        ("text/en/part1.md", "{{c:", "{{c:no-", "no claim 'no-"),
        ("text/en/part1.md", "{{c:", "{{d:", "is no macro"),
        ("text/en/part1.md", "part-2-1", "part-9", "leads to #part-9, which is nowhere"),
        ("text/en/part1.md", "{{fig:plain}}", "", "text/en/part1.md lacks {{fig:plain}}"),
        ("text/zh/part1.md", "{{n:r:n}}", "12,345", "text/zh/part1.md lacks {{n:r:n}}"),
        ("text/zh/part1.md", "{{fig:plain}}", "{{fig:plan}}", "figure 'plan' has no drawing"),
        ("text/en/part1.md", "{{fig:plain}}", "{{fig:placed}}", "part1.md: figure 'placed' is shown above"),
    ],
)
def test_an_alteration_is_found(
    name: str, old: str, new: str, problem: str, small: Callable[[], list[str]], tmp_path: Path
) -> None:
    _edit(tmp_path / name, old, new)
    assert any(problem in line for line in small())


def test_missing_and_needless_files_are_found(small: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / "figures" / "placed.svg").rename(tmp_path / "figures" / "stray.svg")
    (tmp_path / "text" / "zh" / "part5.md").unlink()
    found = "\n".join(small())
    assert "figures/placed.svg is missing" in found
    assert "figures/stray.svg is no figure of the report" in found
    assert "text/zh/part5.md is missing" in found


def test_only_a_draft_is_built_with_gaps(small: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / "results" / "r.json").unlink()
    before = (tmp_path / "REPORT.md").read_text()
    with pytest.raises(UsageError, match=r"no results/r\.json; make it with"):
        build.build(tmp_path, text_folder=tmp_path / "text")
    assert (tmp_path / "REPORT.md").read_text() == before
    build.build(tmp_path, text_folder=tmp_path / "text", draft=True)
    assert f"\n{numbers.UNKNOWN} [" in (tmp_path / "REPORT.md").read_text()


RACE = {
    "profile": "sglang-0.5.16",
    "tp": 2,
    "bytes": 4 << 20,
    "repeat": 50,
    "stagger_ms": 5.0,
    "nic": True,
    "sends": 100,
    "codes": {"register": {"-7": 50, "0": 50}, "deregister": {}, "transfer": {"0": 1000}},
    "violations": {"overlap": ["req1", "req2"]},
}
TIDY = RACE | {
    "profile": "hardened",
    "codes": {step: {"0": 50} for step in ("register", "deregister", "transfer")},
    "violations": {},
}
SCENARIO = {
    "name": "tp1",
    "asks": "What?",
    "requests": 3,
    "counts": {"register": {"0": 3, "-7": 3}, "deregister": {"0": 3}, "transfer": {"0": 6}},
    "statuses": {"200": 5, "500": 1},
    "outcome": {"uncovered_writes": 2, "wrong_acked": 0, "live_regions_after": 0, "embeddings_held_after": 0},
}
BREACH = {
    "profile": "sglang-0.5.17",
    "fault": "cleanup_timer",
    "exhaustive": False,
    "violations": [{"invariant": "leak"}],
}
TRANSFER = {
    "bytes": 4096,
    "bare_ms": 1.0,
    "bare_quartiles_ms": [0.5, 2.0],
    "path_ms": 2.0,
    "path_quartiles_ms": [1.5, 2.5],
    "bare_gbps": 0.5,
    "path_gbps": 0.25,
    "ratio": 0.5,
}
WITHOUT = {"invariant": "overlap", "fault": None, "schedule": ["one", "two"], "command": "replay x"}
SAMPLES = {
    "race": {"runs": {"a": RACE, "b": TIDY, "c": TIDY | {"tp": 4, "bytes": 65536}}},
    "explore": {"runs": {"a": BREACH, "b": BREACH | {"fault": None, "violations": [], "exhaustive": True}}},
    "ablation": {"rules": {"keep_embedding": WITHOUT}},
    "upstream_0_5_16": {"scenarios": [SCENARIO]},
    "upstream_0_5_17": {"scenarios": [SCENARIO | {"counts": {"register": {"0": 1}}, "statuses": {}, "outcome": {}}]},
    "upstream_0_5_23": {"scenarios": [SCENARIO | {"name": "staggered", "counts": {}, "statuses": {}, "outcome": {}}]},
    "bench_transfer": {"sizes": [TRANSFER]},
}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (
            "race",
            "| 0.5.16, 5 ms stagger, nic | 2 | 4&nbsp;MiB | 50 | 100 | -7:&nbsp;50, 0:&nbsp;50 | - | 0:&nbsp;1,000 | "
            "`overlap`&nbsp;2 |",
        ),
        ("race", "| hardened, 2 runs | 2, 4 | 64&nbsp;KiB, 4&nbsp;MiB | 100 | 200 | 0:&nbsp;100 | 0:"),
        ("race", "| none |\n\n*From `results/race.json`.*"),
        ("upstream", "| `tp1` × 3 | register -7 × 3<br>HTTP 500 × 1<br>uncovered writes × 2 | clean | - |"),
        ("upstream", "| `staggered` × 3 | clean | clean | clean |\n\n<details><summary>What each scenario asks"),
        ("upstream", "- `tp1`: What?"),
        ("transfer", "| 4&nbsp;KiB | 1.00 (0.500–2.00) | 2.00 (1.50–2.50) | 0.500 | 0.250 | 0.50 |"),
        ("explore", "| none | none |\n| `cleanup_timer` | 7 ° |"),
        (
            "schedule:keep_embedding",
            "invariant 1, <code>overlap</code>, 2 steps</summary>\n\n```text\n 1  one\n 2  two\n\n$ replay x\n```",
        ),
        ("invariants", "| 8 | `unfinished` |"),
        ("faults", "| `ack_lost` |"),
        ("profiles", "| `drain_before_release` |"),
    ],
)
def test_a_table_is_made_from_its_result(name: str, row: str) -> None:
    assert row in tables.table(name, "en", SAMPLES, {}, {})
    assert tables.table(name, "zh", SAMPLES, {}, {}).count("\n|") == tables.table(name, "en", SAMPLES, {}, {}).count(
        "\n|"
    )


def test_a_result_that_lacks_a_key_is_named() -> None:
    with pytest.raises(UsageError, match="table schedule:x: a result has no 'x'"):
        tables.table("schedule:x", "en", SAMPLES, {}, {})


def test_the_chinese_words_cover_what_the_code_says() -> None:
    from epdlab.check.scenario import FAULTS
    from epdlab.trace.breach import INVARIANTS
    from epdlab.upstream.scenarios import SCENARIOS

    words = tables._words()
    for group, names in (("invariants", INVARIANTS), ("faults", FAULTS), ("scenarios", SCENARIOS)):
        assert set(words[group]) == set(names)


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(UsageError, match="no table 'x'; there are legend"):
        tables.table("x", "en", {}, {}, {})


# ---- the committed report --------------------------------------------------------------------------------------------


def test_the_committed_report_is_what_the_build_gives() -> None:
    assert build.check() == []
