"""Exercises of the notebooks: an answer is tried live, drawn, and judged in one line. What is asked is elsewhere.

    tried = try_place(place)      # runs the reader's function
    tried.drawing                 # what it did
    tried.verdict                 # `right`, what is wrong, or that there is no answer yet
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import one_line
from ..trace.render import Drawing
from ..trace.spans import times

Answer = Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    """What an answer is worth. `right` is None as long as there is no answer."""

    right: bool | None
    why: str

    def __repr__(self) -> str:
        word = {None: "no answer yet", True: "right", False: "not yet"}[self.right]
        return f"{word}: {self.why}"


@dataclass(frozen=True)
class Tried:
    """An answer that was run: what it did, drawn, and what it is worth."""

    drawing: Drawing
    verdict: Verdict


def body_lines(answer: Answer) -> int:
    """Lines of code in a function's body, without its docstring, comments and empty lines; 0 for a stub."""
    source = textwrap.dedent(inspect.getsource(answer))
    found = ast.parse(source).body[0]
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    body = [node for node in found.body if not _says_nothing(node)]
    lines = source.splitlines()
    used = {line for node in body for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return sum(bool(lines[line - 1].partition("#")[0].strip()) for line in used)


def _says_nothing(node: ast.stmt) -> bool:
    """A docstring, `...` or `pass`."""
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def judge(answer: Answer, budget: int, wrong: Callable[[], str | None], right: str) -> Verdict:
    """The verdict on an answer.

    Args:
        budget: lines its body may have.
        wrong: what is wrong with it, None if nothing is; not asked as long as there is no answer.
        right: what to say if it holds.
    """
    lines = body_lines(answer)
    if lines == 0:
        return Verdict(None, f"{answer.__name__} is still a stub of at most {times(budget, 'lines')}")
    if lines > budget:
        return Verdict(False, f"{answer.__name__} has {times(lines, 'lines')}, its budget is {budget}")
    found = wrong()
    return Verdict(found is None, right if found is None else found)


def attempt(answer: Answer, *arguments: Any) -> tuple[Any, str | None]:
    """Call an answer: what it returned, and the error it ended with, as one line."""
    try:
        return answer(*arguments), None
    except Exception as error:
        return None, f"{answer.__name__} raised {one_line(error)}"
