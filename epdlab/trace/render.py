"""Drawings as DOT text, and DOT text as SVG or PNG by Graphviz. What is drawn never passes through here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

import graphviz

from epdlab.errors import EpdLabError, UsageError

Layout = Literal["fixed", "dot"]
Format = Literal["svg", "png"]
ZOOM = 2


class DotMissing(EpdLabError):
    """Graphviz' programs are not installed."""

    kind = "dot_missing"


class DrawingFailed(EpdLabError):
    """Graphviz did not accept a drawing."""

    kind = "drawing"


class TraceTooLarge(UsageError):
    """A trace has more than a figure can show."""

    kind = "trace_too_large"


@dataclass(frozen=True)
class Drawing:
    """A figure.

    Attributes:
        dot: its Graphviz source; byte-equal for the same trace.
        layout: `fixed` if positions are given in the source, `dot` if Graphviz finds them.
        title: one line that says what it shows.
    """

    dot: str
    layout: Layout
    title: str

    @cached_property
    def svg(self) -> str:
        """The figure as SVG.

        Raises:
            DotMissing, DrawingFailed.
        """
        return _tidied(render(self.dot, "svg", self.layout).decode(), self.title)

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG, at twice its size for sharp screens."""
        return render(self.dot.replace("graph [", f"graph [dpi={96 * ZOOM}, ", 1), "png", self.layout)

    def save(self, path: Path) -> Path:
        """Write the figure; the suffix (.svg, .png, .dot) says as what.

        Raises:
            UsageError: another suffix.
        """
        contents = {".svg": lambda: self.svg.encode(), ".png": lambda: self.png, ".dot": lambda: self.dot.encode()}
        if path.suffix not in contents:
            raise UsageError(f"cannot draw a {path.suffix or 'file without suffix'}; use {', '.join(contents)}")
        path.write_bytes(contents[path.suffix]())
        return path

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        width, height = (int.from_bytes(self.png[at : at + 4], "big") // ZOOM for at in (16, 20))
        return self.png, {"width": width, "height": height}

    def __repr__(self) -> str:
        return f"Drawing({self.title})"


def render(dot: str, format_: Format, layout: Layout = "fixed") -> bytes:
    """DOT to bytes of an image.

    Raises:
        DotMissing: Graphviz is not installed. DrawingFailed: it refused the source.
    """
    engine, positions = ("neato", 2) if layout == "fixed" else ("dot", None)
    try:
        return bytes(graphviz.pipe(engine, format_, dot.encode(), neato_no_op=positions, quiet=True))
    except graphviz.ExecutableNotFound:
        raise DotMissing("no figure without Graphviz: `apt-get install graphviz` or `brew install graphviz`") from None
    except graphviz.CalledProcessError as error:
        reason = " ".join((error.stderr or b"").decode(errors="replace").split())[:200]
        raise DrawingFailed(f"Graphviz refused the figure ({reason}); run `python -m epdlab doctor`") from None


def _tidied(svg: str, title: str) -> str:
    """Without Graphviz' node names as hover texts, outer references and comments; with a title of its own."""
    svg = re.sub(r"<!--.*?-->\n?|<!DOCTYPE[^>]*>\n?|<title>.*?</title>\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<a xlink:title="( |&#160;)?">', "<a>", svg)
    svg = re.sub(r'<a xlink:title="([^"]+)">', r"<a><title>\1</title>", svg)
    return re.sub(r"(<svg [^>]*)>", rf'\1 role="img">\n<title>{escape(title)}</title>', svg, count=1)
