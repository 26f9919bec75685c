"""The notebooks as tests: what they store is compared, by rules that leave no way around, and a changed number fails.

That they run and show what they store is checked by nbval, in the same `make test`.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbval.plugin import IPyNbCell, get_sanitize_patterns

FOLDER = Path(__file__).parents[1] / "notebooks"
SANITIZE = FOLDER / "sanitize.cfg"
BOOKS = sorted(path for path in FOLDER.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
SOLVED = FOLDER / "solutions"
MAX_LINES = 26
PICTURES = ("image/png", "image/jpeg")
IGNORE = re.compile(r"^#\s*NBVAL_IGNORE_OUTPUT\s*$", re.MULTILINE)
OTHER_MARKERS = re.compile(r"#\s*(NBVAL_(?!IGNORE_OUTPUT)|PYTEST_VALIDATE)")
DURATION = re.compile(r"\d ?(ms|us|µs|s|seconds)\b")
STARTS_PROCESSES = re.compile(r"\b(Lab|Stepper|MooncakeEngine|run_demo|run_race)\(")
NUMBER = re.compile(r"(?<![\w.#])\d+(?![\w.])")
PATTERNS = OrderedDict(get_sanitize_patterns(SANITIZE.read_text()))
SKIPPED = ("metadata", "traceback", "prompt_number", "output_type", "name", "execution_count", *PICTURES)

every_book = pytest.mark.parametrize("path", BOOKS, ids=[str(path.relative_to(FOLDER)) for path in BOOKS])


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def ignored(cell: Any) -> bool:
    return "nbval-ignore-output" in cell.metadata.get("tags", []) or IGNORE.search(cell.source) is not None


def texts(cell: Any) -> list[tuple[Any, str]]:
    """Where the stored text of a cell stands: (the dict that holds it, its key)."""
    found: list[tuple[Any, str]] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append((output, "text"))
        found += [(output.data, mime) for mime in output.get("data", {}) if mime not in PICTURES]
    return found


def compares(cell: Any, other: Any) -> bool:
    """nbval's own verdict, with our sanitising, on a cell's outputs against others."""
    judge = IPyNbCell.__new__(IPyNbCell)
    judge.colors = type("Plain", (), dict.fromkeys(("OKBLUE", "FAIL", "ENDC"), ""))
    judge.parent = type("File", (), {"sanitize_patterns": PATTERNS, "skip_compare": SKIPPED})
    judge.format_output_compare = lambda *_: None
    return bool(judge.compare_outputs(copy.deepcopy(cell.outputs), copy.deepcopy(other.outputs)))


# ---- the rules ---------------------------------------------------------------------------------------------------


def test_there_are_notebooks_with_solutions_to_their_exercises() -> None:
    assert FOLDER / "02_step_through.ipynb" in BOOKS
    asking = [path for path in BOOKS if path.parent == FOLDER and "no answer yet" in path.read_text()]
    assert asking
    assert [path.name for path in asking if not (SOLVED / path.name).exists()] == []


@every_book
def test_cells_are_short_and_were_run_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.source for cell in cells if len(cell.source.splitlines()) > MAX_LINES] == []
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run them anew: python tools/run_notebooks.py"


@every_book
def test_outputs_are_ignored_only_where_they_are_a_picture_or_a_timing_that_a_later_cell_asserts(path: Path) -> None:
    cells = code_cells(path)
    for number, cell in enumerate(cells, start=1):
        assert set(cell.metadata.get("tags", [])) <= {"nbval-ignore-output"} and not OTHER_MARKERS.search(cell.source)
        drawn = any(mime.startswith("image/") for output in cell.outputs for mime in output.get("data", {}))
        timed = any(DURATION.search(str(holder[key])) for holder, key in texts(cell))
        if ignored(cell):
            assert drawn or timed, f"{cell.source!r} ignores what is no picture and no timing"
            after = next((later for later in cells[number:] if not ignored(later)), None)
            asserts = after is not None and ("assert " in after.source or texts(after))
            assert asserts, f"no cell asserts what {cell.source!r} shows, and none shows what is compared"


@every_book
def test_nothing_of_the_machine_is_stored(path: Path) -> None:
    book = read(path)
    assert set(book.metadata) == {"kernelspec", "language_info"} and set(book.metadata.language_info) == {"name"}
    for cell in book.cells:
        assert set(cell.metadata) <= {"tags"}
        streams = [output.name for output in cell.get("outputs", []) if output.output_type == "stream"]
        assert len(streams) == len(set(streams)), "how a stream was cut is of the minute"
        for output in cell.get("outputs", []):
            assert output.output_type != "error" and output.get("name") != "stderr"
            assert not any("widget" in mime for mime in output.get("data", {}))
    compared = [cell for cell in code_cells(path) if not ignored(cell)]
    stored = "\n".join(str(holder[key]) for cell in compared for holder, key in texts(cell))
    assert not re.search(r"0x[0-9a-f]{6,}|127\.0\.0\.1:\d|/tmp/|/home/|/root/", stored), "names, not addresses"


@every_book
def test_an_exercise_is_a_stub_with_dots_to_replace_and_its_solution_has_none(path: Path) -> None:
    stubs = sum(bool(re.search(r"^\s+\.\.\.$", cell.source, re.MULTILINE)) for cell in code_cells(path))
    verdicts = sum(cell.source.endswith(".verdict") for cell in code_cells(path))
    assert stubs == (verdicts if path.parent == FOLDER else 0)


@every_book
def test_a_stub_says_that_it_has_no_answer_and_a_solution_is_right(path: Path) -> None:
    verdicts = [cell.outputs[-1].data["text/plain"] for cell in code_cells(path) if cell.source.endswith(".verdict")]
    words = {verdict.partition(":")[0] for verdict in verdicts}
    assert words <= ({"right", "not yet"} if path.parent == SOLVED else {"no answer yet"})
    assert "right" in words or path.parent != SOLVED


# ---- a changed number fails --------------------------------------------------------------------------------------


@every_book
def test_changing_any_stored_number_is_seen_by_nbval(path: Path) -> None:
    """By nbval's own comparison, for every number in every compared output of the notebook."""
    changed = 0
    for cell in code_cells(path):
        if ignored(cell):
            continue
        assert compares(cell, cell)
        for holder, key in texts(cell):
            text = str(holder[key])
            for number in NUMBER.finditer(text):
                holder[key] = text[: number.start()] + str(int(number[0]) + 1) + text[number.end() :]
                if not sanitised(text, number):
                    assert not compares(cell, _with(cell, holder, key, text)), f"{number[0]} may change unseen"
                    changed += 1
                holder[key] = text
    assert changed > 0


def sanitised(text: str, number: re.Match[str]) -> bool:
    """Whether a number is part of something that is not compared: a duration."""
    found = [match for pattern in PATTERNS for match in re.finditer(pattern, text)]
    return any(match.start() <= number.start() and number.end() <= match.end() for match in found)


def _with(cell: Any, holder: Any, key: str, text: str) -> Any:
    """The cell as it was stored, while `holder` has a changed text."""
    mutated, holder[key] = holder[key], text
    stored = copy.deepcopy(cell)
    holder[key] = mutated
    return stored


def cut(path: Path) -> Any:
    """A notebook up to its first cell that stores a number, and that number changed."""
    book = read(path)
    for at, cell in enumerate(book.cells):
        for holder, key in texts(cell) if cell.cell_type == "code" else []:
            number = NUMBER.search(str(holder[key]))
            text = str(holder[key])
            if number is not None and not ignored(cell) and not sanitised(text, number):
                holder[key] = text[: number.start()] + str(int(number[0]) + 1) + text[number.end() :]
                book.cells = book.cells[: at + 1]
                return book
    raise AssertionError(f"{path} stores no number")


def effort(book: Any) -> tuple[int, int]:
    return sum(bool(STARTS_PROCESSES.search(cell.source)) for cell in book.cells), len(book.cells)


def test_a_notebook_with_one_changed_number_fails_when_it_is_run(tmp_path: Path) -> None:
    """For real, in a run of its own: the notebook that gets to its first number with the least effort."""
    book = min((cut(path) for path in BOOKS), key=effort)
    path = tmp_path / "changed.ipynb"
    nbformat.write(book, path)
    options = ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(path)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 1, run.stdout[-2000:]
    cells = sum(cell.cell_type == "code" for cell in book.cells)
    assert re.search(rf"1 failed(, {cells - 1} passed)?", run.stdout), run.stdout[-2000:]
    assert "Cell outputs differ" in run.stdout
