"""Tables that the build makes: `{{table:NAME}}`.

Owns the columns and the words of both editions. Every cell comes from a result file, from the lab's own rules, or from
the claims; none is typed here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..check.scenario import FAULTS
from ..errors import UsageError
from ..rules import PROFILES, Rule
from ..trace.breach import INVARIANTS
from .chart import size_label
from .claims import Claim, SourceFile
from .numbers import significant
from .results import META

Json = Mapping[str, Any]
YES, NO = "yes", "-"


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
        """A fixed word or phrase in the sheet's language."""
        return WORDS[name][self.lang == "zh"]

    def head(self, *names: str) -> list[str]:
        return [self.word(name) for name in names]


WORDS: dict[str, tuple[str, str]] = {
    "code": ("code", "代号"),
    "file": ("file, under `python/sglang/`", "文件（位于 `python/sglang/` 下）"),
    "releases": ("releases quoted", "引用的版本"),
    "claims": ("claims", "论断数"),
    "what": ("what it is", "内容"),
    "result": ("result", "结果文件"),
    "command": ("command", "命令"),
    "date": ("date", "日期"),
    "machine": ("machine", "机器"),
    "versions": ("versions", "版本"),
    "rule": ("rule", "规则"),
    "meaning": ("what it says", "含义"),
    "number": ("no.", "编号"),
    "invariant": ("invariant", "不变式"),
    "breaks": ("what breaks it", "何为违反"),
    "profile": ("profile", "profile"),
    "tp": ("TP", "TP"),
    "size": ("size", "大小"),
    "sends": ("sends", "/send 次数"),
    "register": ("register codes", "注册返回码"),
    "deregister": ("deregister codes", "注销返回码"),
    "broken": ("invariants broken (requests)", "被违反的不变式（请求数）"),
    "none": ("none", "无"),
    "bare": ("bare write, GB/s", "裸写，GB/s"),
    "path": ("whole `/send`, GB/s", "完整 `/send`，GB/s"),
    "bare_ms": ("bare write, ms", "裸写，ms"),
    "path_ms": ("whole `/send`, ms", "完整 `/send`，ms"),
    "ratio": ("ratio", "比值"),
    "requests": ("requests", "请求数"),
    "transfer": ("transfer codes", "传输返回码"),
    "schedule": ("shortest schedule", "最短调度"),
    "fault": ("fault", "故障"),
    "bound": ("bound", "界"),
    "schedules": ("schedules", "调度数"),
    "exhaustive": ("exhaustive", "穷尽"),
    "scenario": ("scenario", "场景"),
    "uncovered": ("uncovered writes", "未覆盖的写"),
    "http": ("HTTP", "HTTP"),
    "left": ("regions, embeddings left", "残留的区域、embedding"),
    "cores": ("cores", "核"),
}


def table(name: str, lang: str, results: Mapping[str, Json], claims: Mapping[str, Claim], files: Mapping[str, SourceFile]) -> str:
    """A table as Markdown. `NAME:ARGUMENT` passes an argument on.

    Raises:
        UsageError: no such table, or a result it is made from is missing or lacks a key.
    """
    kind, _, argument = name.partition(":")
    if kind not in TABLES:
        raise UsageError(f"no table {name!r}; there are {', '.join(TABLES)}")
    try:
        return TABLES[kind](Sheet(lang, results, claims, files, argument))
    except KeyError as error:
        raise UsageError(f"table {name}: a result has no {error}; make the results anew (the build names their commands)") from None


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
        (f"`{file.code}`", f"`{file.path.removeprefix('sglang/')}`", ", ".join(sorted(releases[path])), count[path], getattr(file, sheet.lang))
        for path, file in sheet.files.items()
    ]
    return markdown(sheet.head("code", "file", "releases", "claims", "what"), rows)


def _sources(sheet: Sheet) -> str:
    """Every result file the report may quote, with where its numbers come from."""
    rows = []
    for name in sheet.results:
        meta = sheet.results[name][META]
        machine, versions = meta["machine"], meta["versions"]
        where = f"{machine['cpu']}, {machine['cores']} {sheet.word('cores')}, {machine['memory_gib']} GiB"
        with_what = ", ".join(f"{k} {v}" for k, v in versions.items())
        rows.append((f"`results/{name}.json`", f"`{meta['command']}`", meta["date"], where, with_what))
    return markdown(sheet.head("result", "command", "date", "machine", "versions"), rows)


def _profiles(sheet: Sheet) -> str:
    """Rules against profiles, from the lab's own rule sets."""
    rows = [(f"`{rule.value}`", *(YES if p.has(rule) else NO for p in PROFILES.values())) for rule in Rule]
    return markdown([sheet.word("rule"), *(name.removeprefix("sglang-") for name in PROFILES)], rows)


def _invariants(sheet: Sheet) -> str:
    rows = [(found.number, f"`{found.key}`", found.sentence) for found in INVARIANTS.values()]
    return markdown(sheet.head("number", "invariant", "breaks"), rows)


def _faults(sheet: Sheet) -> str:
    return markdown(sheet.head("fault", "meaning"), [(f"`{name}`", kind.sentence) for name, kind in FAULTS.items()])


def _race(sheet: Sheet) -> str:
    """`race`: one row a run, codes and broken invariants counted."""
    rows = []
    for run in sheet.results["race"]["runs"].values():
        how = [f"{run['stagger_ms']:g} ms stagger"] * bool(run["stagger_ms"]) + ["nic"] * bool(run["nic"])
        codes, broken = run["codes"], {name: len(requests) for name, requests in run["violations"].items()}
        cells = (_codes(codes["register"]), _codes(codes["deregister"]), _codes(codes["transfer"]), _counts(broken) or sheet.word("none"))
        rows.append((", ".join([_short(run["profile"]), *how]), run["tp"], size_label(run["bytes"]), run["repeat"], run["sends"], *cells))
    return markdown(sheet.head("profile", "tp", "size", "requests", "sends", "register", "deregister", "transfer", "broken"), rows)


def _transfer(sheet: Sheet) -> str:
    rows = [
        (size_label(r["bytes"]), *(significant(r[k]) for k in ("bare_ms", "path_ms", "bare_gbps", "path_gbps")), f"{r['ratio']:.2f}")
        for r in sheet.results["bench_transfer"]["sizes"]
    ]
    return markdown(sheet.head("size", "bare_ms", "path_ms", "bare", "path", "ratio"), rows)


def _codes(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code}: {count:,}" for code, count in codes.items()) or NO


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` {count:,}" for name, count in counts.items())


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
}
