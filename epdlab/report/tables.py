"""Tables that the build makes: `{{table:NAME}}`.

Owns the columns and the words of both editions. Every cell comes from a result file, from the lab's own rules, or from
the claims; none is typed here.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..check.scenario import FAULTS
from ..errors import UsageError
from ..rules import PROFILES, Rule
from ..trace.breach import INVARIANTS
from ..upstream.scenarios import RELEASES
from .chart import size_label
from .claims import Claim, SourceFile
from .numbers import significant
from .results import META

Json = Mapping[str, Any]
NO = "-"
SOURCES = {"race": "race", "upstream": "upstream_*", "explore": "explore", "transfer": "bench_transfer"}
"""The result files that a table is made from, named below it."""

SHOWN = ("epdlab", "sglang", "mooncake", "torch", "python")
"""The versions that the table of result files names; the files hold all of them."""

ODD_OUTCOMES = ("uncovered_writes", "wrong_acked", "overwritten", "live_regions_after", "embeddings_held_after")


@dataclass(frozen=True)
class Sheet:
    """What a table is made from.

    Attributes:
        lang: `en` or `zh`.
        argument: what stands after the table's name.
    """

    lang: str
    results: Mapping[str, Json]
    claims: Mapping[str, Claim]
    files: Mapping[str, SourceFile]
    argument: str = ""

    def word(self, name: str) -> str:
        """A fixed word or phrase in the sheet's language, from `words.toml`."""
        return _words()[name][self.lang]

    def sentence(self, group: str, key: str, english: str) -> str:
        """A sentence of the code: as it stands, or in the sheet's language from `words.toml`."""
        return english if self.lang == "en" else _words()[group][key]

    def head(self, *names: str) -> list[str]:
        return [self.word(name) for name in names]


@cache
def _words() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def table(
    name: str, lang: str, results: Mapping[str, Json], claims: Mapping[str, Claim], files: Mapping[str, SourceFile]
) -> str:
    """A table as Markdown. `NAME:ARGUMENT` passes an argument on.

    Raises:
        UsageError: no such table, or a result it is made from is missing or lacks a key.
    """
    kind, _, argument = name.partition(":")
    if kind not in TABLES:
        raise UsageError(f"no table {name!r}; there are {', '.join(TABLES)}")
    sheet = Sheet(lang, results, claims, files, argument)
    try:
        made = TABLES[kind](sheet)
        return f"{made}\n\n{sheet.word('source').format(SOURCES[kind])}" if kind in SOURCES else made
    except KeyError as error:
        raise UsageError(
            f"table {name}: a result has no {error}; make the results anew (the build names their commands)"
        ) from None


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as a Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _legend(sheet: Sheet) -> str:
    releases: defaultdict[str, set[str]] = defaultdict(set)
    count: Counter[str] = Counter()
    for claim in sheet.claims.values():
        releases[claim.file].add(claim.release)
        count[claim.file] += 1
    rows = [
        (
            f"`{file.code}`",
            f"{getattr(file, sheet.lang)}<br>`{file.path.removeprefix('sglang/')}`",
            ", ".join(sorted(releases[path])),
            count[path],
        )
        for path, file in sheet.files.items()
    ]
    return markdown(sheet.head("code", "file", "releases", "claims"), rows)


def _sources(sheet: Sheet) -> str:
    """Every result file the report may quote, with where its numbers come from."""
    rows = []
    for name, result in sheet.results.items():
        meta = result.get(META, result)
        with_what = ", ".join(f"{what} {meta['versions'][what]}" for what in SHOWN if what in meta["versions"])
        rows.append(
            (f"`{name}.json`", f"`{meta['command']}`", meta["date"], _machine(sheet, meta["machine"]), with_what)
        )
    return markdown(sheet.head("result", "command", "date", "machine", "versions"), rows)


def _machine(sheet: Sheet, machine: Json) -> str:
    units = {"cores": f" {sheet.word('cores')}", "memory_gib": " GiB"}
    return ", ".join(f"{value}{units.get(key, '')}" for key, value in machine.items())


def _profiles(sheet: Sheet) -> str:
    """Rules against profiles, from the lab's own rule sets."""
    yes = sheet.word("yes")
    rows = [(f"`{rule.value}`", *(yes if p.has(rule) else NO for p in PROFILES.values())) for rule in Rule]
    return markdown([sheet.word("rule"), *(name.removeprefix("sglang-") for name in PROFILES)], rows)


def _invariants(sheet: Sheet) -> str:
    rows = [
        (found.number, f"`{found.key}`", sheet.sentence("invariants", found.key, found.sentence))
        for found in INVARIANTS.values()
    ]
    return markdown(sheet.head("number", "invariant", "breaks"), rows)


def _faults(sheet: Sheet) -> str:
    rows = [(f"`{name}`", sheet.sentence("faults", name, kind.sentence)) for name, kind in FAULTS.items()]
    return markdown(sheet.head("fault", "happens"), rows)


def _race(sheet: Sheet) -> str:
    """`race`: one row a run in which something broke, and one for all the other runs of a profile."""
    rows = []
    clean: defaultdict[str, list[Json]] = defaultdict(list)
    for run in sheet.results["race"]["runs"].values():
        if run["violations"]:
            how = [f"{run['stagger_ms']:g} ms stagger"] * bool(run["stagger_ms"]) + ["nic"] * bool(run["nic"])
            broken = {name: len(requests) for name, requests in run["violations"].items()}
            name = ", ".join([_short(run["profile"]), *how])
            rows.append((name, run["tp"], _size(run["bytes"]), *_race_counts([run]), _counts(broken)))
        else:
            clean[run["profile"]].append(run)
    for profile, runs in clean.items():
        tps = ", ".join(map(str, sorted({run["tp"] for run in runs})))
        sizes = [_size(nbytes) for nbytes in sorted({run["bytes"] for run in runs})]
        name = f"{_short(profile)}{sheet.word('comma')}{sheet.word('clean_runs').format(len(runs))}"
        rows.append((name, tps, sheet.word("comma").join(sizes), *_race_counts(runs), sheet.word("none")))
    return markdown(
        sheet.head(
            "profile",
            "tp",
            "size",
            "requests",
            "sends",
            "register_codes",
            "deregister_codes",
            "transfer_codes",
            "broken",
        ),
        rows,
    )


def _race_counts(runs: Sequence[Json]) -> list[object]:
    """Requests, sends and codes of some runs together."""
    codes = {step: Counter[str]() for step in ("register", "deregister", "transfer")}
    for run in runs:
        for step, counted in codes.items():
            counted.update(run["codes"][step])
    return [sum(run[key] for run in runs) for key in ("repeat", "sends")] + [_codes(c) for c in codes.values()]


def _upstream(sheet: Sheet) -> str:
    """`upstream_*`: one row a scenario, one column a release; a cell names what is not as in a clean run.

    What is clean in all releases shares the last row; what each scenario asks is folded away below.
    """
    asks: dict[str, str] = {}
    requests: dict[str, int] = {}
    seen: dict[tuple[str, str], str] = {}
    for release in RELEASES:
        for found in sheet.results[f"upstream_{release.replace('.', '_')}"]["scenarios"]:
            name = found["name"]
            asks[name] = sheet.sentence("scenarios", name, found["asks"])
            requests[name] = found["requests"]
            seen[name, release] = _seen(sheet, found)
    odd, clean = [], []
    for name, count in requests.items():
        cells = [seen.get((name, release), NO) for release in RELEASES]
        title = f"`{name}` × {count}"
        if set(cells) <= {NO, sheet.word("clean")}:
            clean.append(title)
        else:
            odd.append((title, *cells))
    if clean:
        odd.append((sheet.word("comma").join(clean), *[sheet.word("clean")] * len(RELEASES)))
    listed = "\n".join(f"- `{name}`{sheet.word('colon')}{ask}" for name, ask in asks.items())
    folded = f"<details><summary>{sheet.word('asked')}</summary>\n\n{listed}\n\n</details>"
    return f"{markdown([sheet.word('scenario_requests'), *RELEASES], odd)}\n\n{folded}"


def _seen(sheet: Sheet, found: Json) -> str:
    odd = [
        f"{sheet.word(op)} {code} × {n}"
        for op, codes in found["counts"].items()
        for code, n in codes.items()
        if code != "0"
    ]
    odd += [f"HTTP {status} × {n}" for status, n in found["statuses"].items() if status != "200"]
    odd += [f"{sheet.word(key)} × {found['outcome'][key]}" for key in ODD_OUTCOMES if found["outcome"].get(key)]
    return "<br>".join(odd) or sheet.word("clean")


def _explore(sheet: Sheet) -> str:
    """`explore`: faults against profiles; a cell has the numbers of the invariants that some order breaks."""
    cells: dict[tuple[str, str], str] = {}
    for run in sheet.results["explore"]["runs"].values():
        broken = sorted({INVARIANTS[breach["invariant"]].number for breach in run["violations"]})
        mark = "" if run["exhaustive"] else " °"
        cells[run["fault"] or "-", run["profile"]] = (", ".join(map(str, broken)) or sheet.word("none")) + mark
    profiles = [name for name in PROFILES if any(name == profile for _, profile in cells)]
    faults = [fault for fault in ("-", *FAULTS) if any(fault == found for found, _ in cells)]
    rows = [(_fault(sheet, fault), *(cells.get((fault, name), "?") for name in profiles)) for fault in faults]
    return markdown([sheet.word("fault"), *map(_short, profiles)], rows)


def _fault(sheet: Sheet, name: str) -> str:
    return sheet.word("none") if name == "-" else f"`{name}`"


def _schedule(sheet: Sheet) -> str:
    """`ablation`: the shortest schedule that breaks an invariant without the rule named by the argument."""
    found = sheet.results["ablation"]["rules"][sheet.argument]
    number = INVARIANTS[found["invariant"]].number
    lines = [f"{place:>2}  {step}" for place, step in enumerate(found["schedule"], start=1)]
    comma, colon = sheet.word("comma"), sheet.word("colon")
    broken = f"{sheet.word('invariant')} {number}{comma}<code>{found['invariant']}</code>"
    head = f"{sheet.word('without')}{colon}{broken}{comma}{len(lines)} {sheet.word('steps')}"
    text = ["```text", *lines, "", f"$ {found['command']}", "```"]
    return "\n".join([f"<details><summary>{head}</summary>", "", *text, "", "</details>"])


def _transfer(sheet: Sheet) -> str:
    rows = [
        (
            _size(r["bytes"]),
            *(_spread(r[f"{k}_ms"], r[f"{k}_quartiles_ms"]) for k in ("bare", "path")),
            *(significant(r[f"{k}_gbps"]) for k in ("bare", "path")),
            f"{r['ratio']:.2f}",
        )
        for r in sheet.results["bench_transfer"]["sizes"]
    ]
    return markdown(sheet.head("size", "bare_ms", "path_ms", "bare", "path", "ratio"), rows)


def _spread(median: float, quartiles: Sequence[float]) -> str:
    low, high = map(significant, quartiles)
    return f"{significant(median)} ({low}–{high})"


def _codes(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code}:&nbsp;{count:,}" for code, count in codes.items()) or NO


def _size(nbytes: int) -> str:
    return size_label(nbytes).replace(" ", "&nbsp;")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}`&nbsp;{count:,}" for name, count in counts.items())


def _short(profile: str) -> str:
    return profile.removeprefix("sglang-")


TABLES: dict[str, Callable[[Sheet], str]] = {
    "legend": _legend,
    "sources": _sources,
    "profiles": _profiles,
    "invariants": _invariants,
    "faults": _faults,
    "race": _race,
    "transfer": _transfer,
    "upstream": _upstream,
    "explore": _explore,
    "schedule": _schedule,
}
