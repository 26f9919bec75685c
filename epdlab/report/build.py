"""The build: texts, claims, numbers, tables and figures become REPORT.md, its short version and its Chinese edition.

Owns the order of the parts, contents, anchors and numbering of figures, and the check that the files on disk are what
the build gives. Nothing is measured here, and nothing is fetched except in `verify_claims`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import EpdLabError, UsageError
from . import figures, numbers, tables, texts
from .claims import Claim, SourceFile, load_claims, load_files, reference, verify, wheel_from_pip
from .results import RESULTS, ROOT, Sources
from .texts import BRIEF, EDITIONS, PARTS, Edition

_LINK = re.compile(r"\(figures/(\w+)\.svg\)")
_JUMP, _ANCHOR = re.compile(r"\]\(#([\w-]+)\)"), re.compile(r'<a id="([\w-]+)">')
MARK = "<!-- Built by `python -m epdlab report`; edit epdlab/report/, not this file. -->"


@dataclass
class Problems:
    """What keeps the report from being built, once each, in the order found."""

    found: list[str] = field(default_factory=list)

    def add(self, problem: object) -> None:
        line = " ".join(str(problem).split())
        if line not in self.found:
            self.found.append(line)


@dataclass(frozen=True)
class Stock:
    """What every file of the report is set from.

    Attributes:
        folder: the texts.
    """

    sources: Sources
    problems: Problems
    folder: Path
    claims: Mapping[str, Claim] = field(default_factory=load_claims)
    files: Mapping[str, SourceFile] = field(default_factory=load_files)


class Press:
    """Sets one file of one edition."""

    def __init__(self, edition: Edition, stock: Stock) -> None:
        self._edition, self._stock, self._problems = edition, stock, stock.problems
        self._captions = _captions(edition, stock.folder)
        self._used: dict[str, str] = {}
        self._numbered: dict[str, int] = {}

    def report(self) -> str:
        """The full report of the edition."""
        body: list[str] = []
        contents: list[tuple[int, str, str]] = []
        for name in texts.DOCUMENTS:
            if name == "summary":
                body.append(self._expanded(name, self._read(name)))
                body.append("{{contents}}")
                continue
            prefix = f"part-{name[4:]}" if name in PARTS else name
            lines, headings = texts.demoted(self._read(name).splitlines(), prefix)
            contents += headings
            body.append(self._expanded(name, "\n".join(lines)))
        text = "\n\n".join(part.strip() for part in body).replace("{{contents}}", self._contents(contents))
        return self._page(text)

    def brief(self) -> str:
        """The short version of the edition."""
        return self._page(self._expanded(BRIEF, self._read(BRIEF)).strip())

    def _page(self, text: str) -> str:
        for anchor in sorted(set(_JUMP.findall(text)) - set(_ANCHOR.findall(text))):
            self._problems.add(f"{self._edition.lang}: a link leads to #{anchor}, which is nowhere; correct the link")
        return f"{MARK}\n\n{text}\n\n{self._definitions()}\n"

    def _read(self, name: str) -> str:
        try:
            return texts.read_document(self._edition, name, self._stock.folder)
        except UsageError as error:
            self._problems.add(error)
            return ""

    def _expanded(self, name: str, text: str) -> str:
        handlers: dict[str, Callable[[str], str]] = {
            "c": self._claim,
            "n": lambda macro: self._guarded(name, lambda: numbers.resolve(macro, self._stock.sources)),
            "fig": lambda figure: self._figure(name, figure),
            "table": lambda table: self._guarded(name, lambda: self._table(table)),
            "contents": lambda _: "{{contents}}",
        }
        try:
            return texts.expand(text, handlers)
        except UsageError as error:
            self._problems.add(f"text/{self._edition.lang}/{name}.md: {error}")
            return text

    def _guarded(self, name: str, make: Callable[[], str]) -> str:
        """What `make` gives; a draft shows `?` for what is missing, and the problem is kept."""
        try:
            return make()
        except UsageError as error:
            self._problems.add(f"text/{self._edition.lang}/{name}.md: {error}")
            return numbers.UNKNOWN

    def _claim(self, name: str) -> str:
        claim = self._stock.claims.get(name)
        if claim is None:
            self._problems.add(
                f"{self._edition.report}: no claim {name!r} in claims_*.toml; write it or correct the name"
            )
            return numbers.UNKNOWN
        title = claim.text.replace('"', "'")
        self._used[name] = f'[{name}]: {claim.url} "{title}"'
        return f"[{reference(claim, self._stock.files)}][{name}]"

    def _definitions(self) -> str:
        """Where the references lead; GitHub shows the claim when the pointer rests on one."""
        return "\n".join(self._used[name] for name in sorted(self._used))

    def _figure(self, document: str, name: str) -> str:
        caption, alt = self._captions.get(name, ("", ""))
        if name not in figures.REGISTRY or not caption:
            self._problems.add(
                f"text/{self._edition.lang}/{document}.md: figure {name!r} has no drawing or no caption in figures.toml"
            )
        if name in self._numbered:
            self._problems.add(
                f"text/{self._edition.lang}/{document}.md: figure {name!r} is shown above; link to its section instead"
            )
        number = self._numbered.setdefault(name, len(self._numbered) + 1)
        return f"![{alt}](figures/{name}.svg)\n\n*{self._edition.figure} {number}. {caption}*"

    def _table(self, name: str) -> str:
        return tables.table(name, self._edition.lang, self._stock.sources, self._stock.claims, self._stock.files)

    def _contents(self, headings: list[tuple[int, str, str]]) -> str:
        """One paragraph a text: its title, then its sections in a row."""
        paragraphs: list[list[str]] = []
        for level, title, anchor in headings:
            if level == 1:
                paragraphs.append([f"**[{title}](#{anchor})**"])
            else:
                paragraphs[-1].append(f"[{title.replace('. ', '.&nbsp;', 1)}](#{anchor})")
        rows = [
            " · ".join(links) if len(links) == 1 else f"{links[0]}<br>\n{' · '.join(links[1:])}" for links in paragraphs
        ]
        return "\n\n".join([f"## {self._edition.contents}", *rows])


def render(
    problems: Problems, *, root: Path = ROOT, text_folder: Path = texts.TEXT, draft: bool = False
) -> dict[str, str]:
    """Every file of the report by its path under `root`, from what lies in `root/results`.

    Args:
        problems: takes what is missing or wrong.
        draft: leave out editions that are not written yet.
    """
    stock = Stock(Sources(root / RESULTS.name), problems, text_folder)
    editions = [e for e in EDITIONS if not draft or (text_folder / e.lang).is_dir()]
    files: dict[str, str] = {}
    for edition in editions:
        files[edition.report] = Press(edition, stock).report()
        if edition.brief is not None:
            files[edition.brief] = Press(edition, stock).brief()
    for problem in _disparities(editions, text_folder):
        problems.add(problem)
    return files | _figures(stock.sources, problems)


def build(root: Path = ROOT, *, draft: bool = False, text_folder: Path = texts.TEXT) -> list[Path]:
    """Write REPORT.md, REPORT_BRIEF.md, REPORT.zh-CN.md and figures/ under `root`; the files written.

    Args:
        draft: show `?` for numbers that are not there and leave out what cannot be drawn; never for a committed tree.

    Raises:
        UsageError: something is missing or wrong and this is no draft; then nothing is written.
    """
    problems = Problems()
    files = render(problems, root=root, text_folder=text_folder, draft=draft)
    if problems.found and not draft:
        raise UsageError(
            f"{problems.found[0]} ({len(problems.found)} such; `python -m epdlab report --check` lists them)"
        )
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return [root / name for name in files]


def check(root: Path = ROOT, text_folder: Path = texts.TEXT) -> list[str]:
    """What is missing or wrong, and where the files on disk are not what the build gives; empty if all is well."""
    problems = Problems()
    files = render(problems, root=root, text_folder=text_folder)
    for name, content in files.items():
        path = root / name
        if not path.exists():
            problems.add(f"{name} is missing; build it with `python -m epdlab report`")
        elif not _same(name, content, path.read_text(encoding="utf-8")):
            problems.add(f"{name} is not what the build gives; build it with `python -m epdlab report`")
    readme = root / "README.md"
    pages = [*files.values(), readme.read_text(encoding="utf-8") if readme.exists() else ""]
    shown = {name for page in pages for name in _LINK.findall(page)}
    for path in sorted((root / figures.FIGURES.name).glob("*.svg")):
        if path.stem not in figures.REGISTRY:
            problems.add(f"figures/{path.name} is no figure of the report; remove it or add it to report/figures.py")
    for name in figures.REGISTRY:
        if name not in shown:
            problems.add(f"figure {name} is shown nowhere; show it in the report or in README.md, or drop it")
    return problems.found


def verify_claims() -> list[str]:
    """Claims that do not hold in the releases' wheels, which pip fetches the first time."""
    return verify(load_claims().values(), wheel_from_pip)


def run_report(check: bool, draft: bool = False, traces: bool = False) -> int:
    """`epdlab report`: build, or with `check` say what differs; 0 if all is well.

    Args:
        draft: see `build`.
        traces: record the runs that the figures show anew, before all else.
    """
    if traces:
        from .traces import record_traces

        record_traces()
    if not check:
        for path in build(draft=draft):
            print(path.relative_to(ROOT))
        return 0
    found = _differences() + verify_claims()
    for line in found:
        print(f"epdlab: {line}", file=sys.stderr)
    print(f"{len(found)} differences" if found else "the report is what the build gives, and every claim holds")
    return 1 if found else 0


def _differences() -> list[str]:
    return check()


def _figures(sources: Sources, problems: Problems) -> dict[str, str]:
    drawn: dict[str, str] = {}
    for name in figures.REGISTRY:
        try:
            drawn[f"figures/{name}.svg"] = figures.draw(name, sources)
        except EpdLabError as error:
            problems.add(f"figure {name}: {error}")
    return drawn


def _disparities(editions: list[Edition], folder: Path) -> list[str]:
    written: dict[str, dict[str, str]] = {}
    for edition in editions:
        present = [n for n in edition.documents if (folder / edition.lang / f"{n}.md").exists()]
        written[edition.lang] = {name: texts.read_document(edition, name, folder) for name in present}
    return texts.disparities(written)


def _captions(edition: Edition, folder: Path) -> dict[str, tuple[str, str]]:
    path = folder / edition.lang / texts.CAPTIONS
    if not path.exists():
        return {}
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: (entry["caption"], entry["alt"]) for name, entry in read.items()}


def _same(name: str, content: str, stored: str) -> bool:
    return figures.same(content, stored) if name.endswith(".svg") else content == stored
