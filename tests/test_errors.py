"""The error tree: every class of it stands in its own drawing."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import epdlab
from epdlab import errors


def descendants(kind: type[Exception]) -> Iterator[type[Exception]]:
    for below in kind.__subclasses__():
        yield below
        yield from descendants(below)


def test_the_drawing_of_the_tree_names_every_error_of_the_package() -> None:
    for module in pkgutil.walk_packages(epdlab.__path__, "epdlab."):
        if not module.name.startswith("epdlab.upstream.") and module.name != "epdlab.__main__":
            importlib.import_module(module.name)
    ours = [kind for kind in descendants(errors.EpdLabError) if kind.__module__.startswith("epdlab.")]
    assert len(ours) > 20
    assert [kind.__name__ for kind in ours if kind.__name__ not in str(errors.__doc__)] == []
