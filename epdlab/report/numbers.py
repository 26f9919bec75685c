"""Numbers of the texts: `{{n:FILE:dotted.path}}` becomes a value of `results/FILE.json`.

Owns the resolution of a path and the formatting of a value. What never passes through here: a number typed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError
from .results import command_for

UNKNOWN = "?"
"""What a draft shows for a number that is not there yet."""

_ABSENT = object()


def resolve(macro: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of `FILE:dotted.path` or `FILE:dotted.path|SPEC`.

    A key may hold dots itself (`runs.sglang-0.5.17.sends`). An element of a list is named by its place, by what it
    holds (`sizes.bytes=65536.ratio`) or by the value of its key `name`. SPEC is a Python format spec, such as `.2f`,
    or `len` for how many a list holds; without one, integers get thousands separators and floats three significant
    digits.

    Args:
        results: gives each result file by name; raises UsageError for one that is not there.

    Raises:
        UsageError: the file or the key is missing, or the value does not take the spec.
    """
    place, _, spec = macro.partition("|")
    name, _, path = place.partition(":")
    value = find(results[name], path.split("."))
    if value is _ABSENT:
        raise UsageError(f"results/{name}.json has no {path}; make it anew with `{command_for(name)}`")
    try:
        return show(value, spec)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{{{{n:{macro}}}}}: {value!r} cannot be shown ({error}); name one number or text") from None


def find(value: Any, keys: Sequence[str]) -> Any:
    """The value under a path, or a marker that no JSON value equals; longer keys (with dots) are tried last."""
    if not keys:
        return value
    if isinstance(value, list):
        return find(_element(value, keys[0]), keys[1:])
    if not isinstance(value, Mapping):
        return _ABSENT
    for length in range(1, len(keys) + 1):
        key = ".".join(keys[:length])
        if key in value and (found := find(value[key], keys[length:])) is not _ABSENT:
            return found
    return _ABSENT


def _element(values: list[Any], key: str) -> Any:
    if key.isdigit():
        return values[int(key)] if int(key) < len(values) else _ABSENT
    field, named, wanted = key.partition("=")
    field, wanted = (field, wanted) if named else ("name", key)
    return next((v for v in values if isinstance(v, Mapping) and str(v.get(field)) == wanted), _ABSENT)


def show(value: Any, spec: str = "") -> str:
    """A number, text or truth value as the report shows it; with `len`, how many a list holds."""
    if spec == "len" and isinstance(value, list):
        return f"{len(value):,}"
    if isinstance(value, (Mapping, list)) or value is None:
        raise TypeError(f"{type(value).__name__} is not one value")
    if spec:
        return format(value, spec)
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return significant(value)


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits without an exponent: 0.0123, 1.23, 123, 12,300."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - len(f"{abs(int(rounded))}")) if abs(rounded) >= 1 else _leading_zeros(rounded) + digits
    return f"{rounded:,.{decimals}f}"


def _leading_zeros(value: float) -> int:
    exponent = int(f"{value:e}".partition("e")[2])
    return -exponent - 1
