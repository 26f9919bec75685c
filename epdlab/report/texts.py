"""The texts of an edition, and the macros in them.

Owns `text/LANG/*.md` and the five macros: `{{c:CLAIM}}`, `{{n:FILE:path|spec}}`, `{{fig:NAME}}`, `{{table:NAME}}` and
`{{contents}}`. What a macro becomes is decided in `build`. What never passes through here: results and figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

TEXT = Path(__file__).parent / "text"
PARTS = ("part1", "part2", "part3", "part4", "part5")
DOCUMENTS = ("summary", "primer", *PARTS, "legend", "glossary", "built")
"""The texts of the full report, in order; the table of contents follows the summary."""

BRIEF = "brief"
CAPTIONS = "figures.toml"
MACRO = re.compile(r"\{\{(c|n|fig|table):([^{}]+)\}\}|\{\{(contents)\}\}")
_HEADING = re.compile(r"^(#{1,5}) (.+)$")
_FENCE = re.compile(r"^\s*(```|~~~)")
_NUMBER = re.compile(r"^(\d+)\. ")


@dataclass(frozen=True, slots=True)
class Edition:
    """One language of the report.

    Attributes:
        lang: the folder under `text/`.
        report: file name of the full report.
        brief: file name of the short version, if the edition has one.
        contents, figure: words that the build adds.
    """

    lang: str
    report: str
    brief: str | None
    contents: str
    figure: str

    @property
    def documents(self) -> tuple[str, ...]:
        return DOCUMENTS if self.brief is None else (*DOCUMENTS, BRIEF)


EDITIONS = (
    Edition("en", "REPORT.md", "REPORT_BRIEF.md", "Contents", "Figure"),
    Edition("zh", "REPORT.zh-CN.md", None, "目录", "图"),
)


def read_document(edition: Edition, name: str, folder: Path = TEXT) -> str:
    """One text.

    Raises:
        UsageError: it is not there.
    """
    path = folder / edition.lang / f"{name}.md"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"text/{edition.lang}/{name}.md is missing: write it, its macros equal to those of the English text"
        ) from None


def macros(text: str) -> Counter[str]:
    """How often a text uses each macro, as `kind:argument`."""
    return Counter(f"{kind}:{argument}" for kind, argument, _ in MACRO.findall(text) if kind)


def expand(text: str, handlers: Mapping[str, Callable[[str], str]]) -> str:
    """The text with every macro replaced by what its kind's handler gives.

    Raises:
        UsageError: something in double braces is no macro.
    """
    done = MACRO.sub(lambda found: handlers[found[1] or found[3]](found[2] or ""), text)
    if (at := done.find("{{")) >= 0:
        raise UsageError(
            f"{done[at : at + 40].splitlines()[0]!r} is no macro: use c, n, fig or table, as {{{{c:NAME}}}}"
        )
    return done


def disparities(texts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What the editions do not share: each text must use the same macros equally often in all of them.

    Args:
        texts: by language, the documents by name; the first language is what the others are held against.
    """
    first, *others = texts
    found = []
    for lang in others:
        for name in texts[lang]:
            mine, theirs = macros(texts[lang][name]), macros(texts[first].get(name, ""))
            found += [
                f"text/{lang}/{name}.md lacks {{{{{key}}}}}{_times(n)}" for key, n in sorted((theirs - mine).items())
            ]
            found += [
                f"text/{first}/{name}.md lacks {{{{{key}}}}}{_times(n)}" for key, n in sorted((mine - theirs).items())
            ]
    return found


def demoted(lines: Iterable[str], prefix: str) -> tuple[list[str], list[tuple[int, str, str]]]:
    """A text as part of a larger one: headings one level down, the upper two with an anchor each.

    Args:
        prefix: anchors are `prefix` and `prefix-N`, N from the heading's own number, else its place.

    Returns:
        The lines, and the headings of the upper two levels as (level before, title, anchor).
    """
    done: list[str] = []
    headings: list[tuple[int, str, str]] = []
    fenced, count = False, 0
    for line in lines:
        fenced ^= bool(_FENCE.match(line))
        found = None if fenced else _HEADING.match(line)
        if found is None:
            done.append(line)
            continue
        level, title = len(found[1]), found[2]
        if level <= 2:
            count += level == 2
            number = _NUMBER.match(title)
            anchor = prefix if level == 1 else f"{prefix}-{number[1] if number else count}"
            headings.append((level, title, anchor))
            done += [f'<a id="{anchor}"></a>', ""]
        done.append(f"#{line}")
    return done, headings


def _times(count: int) -> str:
    return "" if count == 1 else f" ({count} times)"
