"""Claims about upstream: one sentence of ours each, tied to a release, a file, lines, and a literal found in them.

Owns the claims files (`claims_*.toml`), the short codes of upstream's files (`files.toml`) and the check of every claim
against the wheel of its release. What never passes through here: upstream's text into the report.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import UsageError
from ..upstream import env

HERE = Path(__file__).parent
MAIN_RELEASE = "0.5.17"
"""References to this release do not name it."""

SOURCE = "https://github.com/sgl-project/sglang/blob"
_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

T = TypeVar("T", bound=msgspec.Struct)


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One statement about upstream.

    Attributes:
        id: its name in the texts, `{{c:ID}}`.
        text: the statement, in our words.
        release: the SGLang release whose wheel is meant.
        file: path inside the wheel.
        first, last: lines, counted from 1, both included.
        pattern: a literal that occurs within these lines.
    """

    id: str
    text: str
    release: str
    file: str
    first: int
    last: int
    pattern: str

    @property
    def lines(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def url(self) -> str:
        """The public page of the release's tag, at the lines; GitHub numbers lines of Markdown only as plain text."""
        plain = "?plain=1" if self.file.endswith(".md") else ""
        anchor = f"L{self.first}" if self.first == self.last else f"L{self.first}-L{self.last}"
        return f"{SOURCE}/v{self.release}/python/{self.file}{plain}#{anchor}"


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One upstream file: the short code that references use, and what it is, in each edition."""

    code: str
    path: str
    en: str
    zh: str


class _ClaimsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    claim: list[Claim]


class _FilesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: list[SourceFile]


def load_claims(folder: Path = HERE) -> dict[str, Claim]:
    """Every claim of every `claims_*.toml`, by id.

    Raises:
        UsageError: a file does not fit the schema, an id is used twice or malformed, or lines make no range.
    """
    claims = [claim for path in sorted(folder.glob("claims_*.toml")) for claim in _read(path, _ClaimsFile).claim]
    if problems := list(_malformed(claims)):
        raise UsageError(f"{problems[0]} ({len(problems)} such): correct claims_*.toml")
    return {claim.id: claim for claim in claims}


def load_files(folder: Path = HERE) -> dict[str, SourceFile]:
    """Upstream's files, by path."""
    return {file.path: file for file in _read(folder / "files.toml", _FilesFile).file}


def reference(claim: Claim, files: Mapping[str, SourceFile]) -> str:
    """`ES:1903-1909`, or `ES@0.5.16:1837-1838` for a release other than the main one.

    Raises:
        UsageError: the claim's file has no short code.
    """
    if claim.file not in files:
        raise UsageError(f"claim {claim.id}: {claim.file} has no short code; add it to files.toml")
    release = "" if claim.release == MAIN_RELEASE else f"@{claim.release}"
    return f"{files[claim.file].code}{release}:{claim.lines}"


def verify(claims: Iterable[Claim], wheel: Callable[[str], Path]) -> list[str]:
    """What does not hold: one line per claim whose pattern is not within its lines of the release's file.

    Args:
        wheel: gives the path of a release's wheel; files are read out of it without unpacking.
    """
    by_release: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        by_release[claim.release].append(claim)
    problems: list[str] = []
    for release in sorted(by_release):
        with zipfile.ZipFile(wheel(release)) as archive:
            problems += _verify_release(by_release[release], archive)
    return problems


def wheel_from_pip(release: str) -> Path:
    """The release's wheel from the cache ($EPDLAB_CACHE or ~/.cache/epdlab), fetched by pip the first time."""
    return env.wheel(release, lambda _: None)


def _verify_release(claims: Iterable[Claim], archive: zipfile.ZipFile) -> Iterator[str]:
    inside, texts = set(archive.namelist()), dict[str, list[str]]()
    for claim in claims:
        if claim.file not in inside:
            yield f"claim {claim.id}: release {claim.release} has no file {claim.file}"
            continue
        if claim.file not in texts:
            texts[claim.file] = archive.read(claim.file).decode().splitlines()
        if claim.last > len(texts[claim.file]):
            yield f"claim {claim.id}: {claim.file} of {claim.release} ends at line {len(texts[claim.file])}"
        elif claim.pattern not in "\n".join(texts[claim.file][claim.first - 1 : claim.last]):
            yield f"claim {claim.id}: {claim.pattern!r} is not in {claim.file}:{claim.lines} of {claim.release}"


def _malformed(claims: list[Claim]) -> Iterator[str]:
    for name, count in Counter(claim.id for claim in claims).items():
        if count > 1:
            yield f"claim id {name} is used {count} times"
        if not _ID.fullmatch(name):
            yield f"claim id {name!r} is not of the form abc-def"
    for claim in claims:
        if not 1 <= claim.first <= claim.last:
            yield f"claim {claim.id}: lines {claim.first} to {claim.last} are no range"
        if not (claim.pattern.strip() and claim.text.strip()):
            yield f"claim {claim.id}: text and pattern must not be empty"


def _read(path: Path, schema: type[T]) -> T:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=schema)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path.name}: {error}") from error
