"""The stepper as a panel of widgets in a notebook: menus and buttons, the diagram and the state side by side.

Every button is one line of code on the `Stepper`, which the panel shows as it runs it. Owns no lab of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, ClassVar

import ipywidgets as widgets

from ..errors import EpdLabError
from ..rules import PROFILES
from .demo import sample
from .lab import MAX_TP
from .stepper import Stepper, faults_for
from .view import Stop, waiting_words

SIZES = {f"{nbytes >> 10} KiB": f"bytes:{nbytes}:1" for nbytes in (1 << 16, 1 << 18)}
SIZES |= {f"{nbytes >> 20} MiB": f"bytes:{nbytes}:1" for nbytes in (1 << 20, 1 << 22, 1 << 26)}
PICTURE = "a picture"
KINDS = ("sequence", "timeline", "architecture")
FIGURE_POINTS = 640.0
GOES_WELL = "goes well"
_CODE_LINES = 3


class Panel:
    """Shows a stepper, and steps it.

    Args:
        stepper: what is stepped; also from cells, the panel follows. A panel that was shown before lets go of its own.
    """

    _shown: ClassVar[Panel | None] = None

    def __init__(self, stepper: Stepper) -> None:
        before, Panel._shown = Panel._shown, self
        if before is not None:
            before.forget(stepper)
        self.stepper = stepper
        self.code: list[str] = []
        self._profile = widgets.Dropdown(options=list(PROFILES), description="profile")
        self._tp = widgets.Dropdown(options=list(range(1, MAX_TP + 1)), description="TP")
        self._size = widgets.Dropdown(options=[*SIZES, PICTURE], description="size")
        self._next = widgets.Dropdown(description="next", layout=widgets.Layout(width="430px"))
        self._fault = widgets.Dropdown(description="fault", layout=widgets.Layout(width="300px"))
        self._kind = widgets.ToggleButtons(options=KINDS, style=widgets.ToggleButtonsStyle(button_width="110px"))
        self._stop, self._figure, self._state = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._step = _button("Step", "primary", self._on_step)
        self._run = _button("Run", "", self._on_run)
        self._reset = _button("Reset", "", self._on_reset)
        self._show_options()
        self.view = self._laid_out()
        stepper.watchers.append(self._follow)
        self._next.observe(lambda _: self._offer_faults(), "value")
        self._kind.observe(lambda _: self._draw(), "value")
        self._follow(stepper.look())

    def _laid_out(self) -> widgets.VBox:
        for menu, width in ((self._profile, "260px"), (self._tp, "150px"), (self._size, "200px")):
            menu.layout.width = width
        left = widgets.VBox([self._kind, self._figure], layout=widgets.Layout(width="62%", min_width="500px"))
        right = widgets.VBox([self._stop, self._state], layout=widgets.Layout(width="37%", min_width="340px"))
        return widgets.VBox(
            [
                widgets.HBox([self._profile, self._tp, self._size, self._reset]),
                widgets.HBox([self._next, self._fault, self._step, self._run]),
                widgets.HBox([left, right], layout=widgets.Layout(flex_flow="row wrap")),
            ]
        )

    def forget(self, other: Stepper) -> None:
        """Follow the stepper no more, and end its processes unless `other` is the same."""
        if self._follow in self.stepper.watchers:
            self.stepper.watchers.remove(self._follow)
        if self.stepper is not other:
            self.stepper.close()

    # ---- what the buttons do -------------------------------------------------------------------------------------

    def _on_step(self) -> None:
        outside = self._outside().get(self._fault.value)
        if outside is not None:
            self._do(*outside)
            return
        point = self.stepper.waiting[self._next.index].point if self.stepper.waiting else None
        where: dict[str, Any] = {}
        if point is not None and self._next.index != 0:
            where = {"step": point.step, "process": point.process}
            where |= {name: getattr(point, name) for name in ("rank", "part") if getattr(point, name) is not None}
        if self._fault.value not in (GOES_WELL, None):
            where["fault"] = self._fault.value
        self._do("step", where)

    def _on_run(self) -> None:
        self._do("run", {})

    def _on_reset(self) -> None:
        item = SIZES.get(self._size.value) or sample("harbour.png")
        self._do("reset", {"tp": self._tp.value, "profile": self._profile.value}, item)

    def _do(self, method: str, where: dict[str, Any], *given: Any) -> None:
        """Call the stepper, and show the line of code that does the same."""
        arguments = [repr(value) for value in given] + [f"{name}={value!r}" for name, value in where.items()]
        self.code.append(f"stepper.{method}({', '.join(arguments)})")
        self._busy(True)
        try:
            getattr(self.stepper, method)(*given, **where)
        except EpdLabError as error:
            self._stop.value = self._told(_alarm(" ".join(str(error).split())))
        finally:
            self._busy(False)

    def _outside(self) -> dict[str, tuple[Any, ...]]:
        """Faults that are no step's: a menu entry, and the call it stands for."""
        config, live = self.stepper.lab.config, list(self.stepper.lab.processes)
        found: dict[str, tuple[Any, ...]] = {}
        for rank in range(config.tp):
            found[f"rank{rank}'s client gives up"] = ("cancel", {"rank": rank})
            found[f"rank{rank}'s deadline fires"] = ("fire", {"rank": rank}, "deadline")
        found["the clean-up timer fires"] = ("fire", {}, "cleanup")
        killable = [name for name in live if name != "reference"]
        return found | {f"{name} is killed": ("kill", {}, name) for name in killable}

    def _busy(self, busy: bool) -> None:
        for button in (self._step, self._run, self._reset):
            button.disabled = busy

    # ---- what is shown -------------------------------------------------------------------------------------------

    def _show_options(self) -> None:
        config, item = self.stepper.lab.config, self.stepper.items[0]
        self._profile.value, self._tp.value = config.profile, config.tp
        self._size.value = next((name for name, made in SIZES.items() if made == item), PICTURE)

    def _follow(self, stop: Stop) -> None:
        waiting = [waiting_words(w) for w in stop.waiting]
        self._next.options = [f"{k + 1}. {words}" for k, words in enumerate(waiting)] or ["nobody waits"]
        self._next.index = 0
        self._offer_faults()
        self._draw()
        brief = "\n".join([*stop.brief(), *(f"note     {note}" for note in stop.notes)])
        self._stop.value = self._told(f"<pre style='{_PRE}'>{escape(brief)}</pre>" if brief else "")
        self._state.value = f"<div class='epdlab-state'>{self.stepper.state()._repr_html_()}</div>"

    def _offer_faults(self) -> None:
        waiting, index = self.stepper.waiting, self._next.index or 0
        at_step = faults_for(waiting[index]) if index < len(waiting) else []
        self._fault.options = [GOES_WELL, *at_step, *self._outside()]
        self._fault.value = GOES_WELL

    def _draw(self) -> None:
        try:
            options = {"width": FIGURE_POINTS} if self._kind.value == "sequence" else {}
            figure = self.stepper.draw(self._kind.value, **options).svg
        except EpdLabError as error:
            figure = _alarm(str(error))
        self._figure.value = f"<style>{_STYLE}</style><div class='epdlab-figure'><div>{figure}</div></div>"

    def _told(self, said: str) -> str:
        lines = "\n".join(self.code[-_CODE_LINES:])
        style = f"{_PRE};color:#5F6368"
        code = f"<pre class='epdlab-code' data-count='{len(self.code)}' style='{style}'>{escape(lines)}</pre>"
        return code + said

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = self.view._repr_mimebundle_(**options)
        return bundle | {"text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Panel({self.stepper!r})"


_PRE = (
    "font:12px/1.4 ui-monospace,monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;"
    "margin:0 0 6px;color:#1B1B1B;background:#fff"
)
_STYLE = (
    ".epdlab-figure{max-height:620px;overflow:auto;display:flex;flex-direction:column-reverse;background:#fff}"
    ".epdlab-figure svg{max-width:100%;height:auto}"
    ".epdlab-state{max-height:720px;overflow:auto}"
)


def _alarm(text: str) -> str:
    return f"<div style='color:#B34700;font-weight:600'>{escape(text)}</div>"


def _button(text: str, style: str, on_click: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=text, button_style=style, layout=widgets.Layout(width="80px"))
    button.on_click(lambda _: on_click())
    return button
