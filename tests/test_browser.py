"""The notebook of the stepper in a real JupyterLab and a real Chromium: run it, press Step, reload, close the kernel.

Chromium resolves no name but the loopback's, so whatever loads from a CDN fails here. Screenshots go to a temporary
folder, or to the one that EPDLAB_SCREENSHOTS names.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "02_step_through.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MINUTES = 60_000
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
OPTIONS = (
    "--allow-root",
    "--no-browser",
    "--ServerApp.port_retries=0",
    "--IdentityProvider.token=",
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)

SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells are there, also those out of sight
}

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]


class Jupyter:
    """A JupyterLab of its own: on a free port, with nothing of this user's settings."""

    def __init__(self, folder: Path) -> None:
        books = folder / "books"
        books.mkdir()
        shutil.copy(NOTEBOOK, books)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "jupyter.log"
        places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
        places |= {"IPYTHONDIR": "ipython", "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "work"}
        for extension, settings in SETTINGS.items():
            path = folder / "settings" / "@jupyterlab" / f"{extension}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        self.server = psutil.Popen(
            [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--port={port}", f"--notebook-dir={books}"],
            env=os.environ | {name: str(folder / place) for name, place in places.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self._serves = threading.Event()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        """Keep what the server says; the line with its URL comes once it answers."""
        with self.log.open("w") as log:
            for line in self.server.stdout:
                log.write(line)
                if f"{self.url}/lab" in line:
                    self._serves.set()

    def wait_ready(self) -> None:
        assert self._serves.wait(120), f"JupyterLab did not start: {self.log.read_text()[-2000:]}"

    def ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or "null")

    def below(self) -> list[psutil.Process]:
        """Every process under the server: kernels, and what these started."""
        return [child for child in self.server.children(recursive=True) if child.is_running()]

    def close(self) -> list[psutil.Process]:
        """Stop the server and all below it; the processes that had to be killed."""
        children = self.below()
        self.server.terminate()
        _, left = psutil.wait_procs([self.server, *children], timeout=30)
        for process in left:
            process.kill()
        self._listener.join()
        self.server.stdout.close()
        return left


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[Jupyter]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    server = Jupyter(tmp_path)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


class Page:
    """The notebook on the screen, and everything the browser complained about."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.complaints: list[str] = []
        page.set_default_timeout(2 * MINUTES)
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        page.on("requestfailed", lambda request: self._failed(request))

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"console: {message.text}")

    def _failed(self, request: Any) -> None:
        if "127.0.0.1" not in request.url:
            self.complaints.append(f"left the machine: {request.url}")

    def open(self, jupyter: Jupyter) -> None:
        """Open the notebook and wait for its kernel."""
        self.page.goto(f"{jupyter.url}/lab/tree/{NOTEBOOK.name}?reset", wait_until="commit")
        self.wait_idle()

    def wait_idle(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_selector("text=/\\| Idle/")

    def run_all(self) -> None:
        """Run > Run All Cells, and wait until the last code cell has a number again."""
        self.page.click("#jp-MainMenu >> text=Run")
        self.page.click("text=Run All Cells >> nth=0")
        self.page.wait_for_selector("text=/\\| Busy/")
        prompts = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.innerText)"
        self.page.wait_for_function(f"{prompts}.every(text => /^\\[\\d+\\]:$/.test(text))", timeout=3 * MINUTES)
        self.page.wait_for_selector("text=/\\| Idle/")
        self.panel.wait_for()

    @property
    def panel(self) -> Any:
        return self.page.locator(".jp-OutputArea-output:has(.epdlab-figure)")

    def figure(self) -> str:
        return str(self.panel.locator(".epdlab-figure").inner_html())

    def state(self) -> str:
        return str(self.panel.locator(".epdlab-state").inner_text())

    def press(self, button: str, line: str) -> None:
        """Press a button, and wait until the panel shows the line of code it stands for, and the answer."""
        before = self.panel.locator(".epdlab-code").get_attribute("data-count") or "0"
        self.panel.locator(f"button:has-text('{button}')").click()
        self.page.wait_for_selector(f".epdlab-code[data-count='{int(before) + 1}']")
        assert self.panel.locator(".epdlab-code").inner_text().splitlines()[-1] == line

    def errors(self) -> list[str]:
        """What cells put out as errors, or on stderr."""
        found = self.page.locator("[data-mime-type='application/vnd.jupyter.stderr'], .jp-RenderedText.jp-mod-error")
        return list(found.all_inner_texts())

    def shot(self, name: str) -> None:
        self.page.screenshot(path=self.folder / f"{name}.png")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    folder = Path(os.environ.get("EPDLAB_SCREENSHOTS", tmp_path / "shots"))
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield Page(browser.new_page(viewport={"width": 1700, "height": 1100}), folder)
        browser.close()


def test_step_three_times_in_jupyterlab_then_reload_and_close(jupyter: Jupyter, page: Page) -> None:
    page.open(jupyter)
    page.shot("opened")
    try:
        page.run_all()
    finally:
        page.shot("ran")
    assert page.errors() == []
    page.panel.scroll_into_view_if_needed()
    page.shot("panel-0")

    seen = [(page.figure(), page.state())]
    for count in (1, 2, 3):
        page.press("Step", "stepper.step()")
        seen.append((page.figure(), page.state()))
        page.shot(f"panel-{count}")
    figures, states = zip(*seen, strict=True)
    assert len(set(figures)) == 4, "each step changes the diagram"
    assert len(set(states)) == 4, "each step changes the state"
    assert "waits at encode.serve, part 0 for rank1" in states[3]
    assert "POST /encode part 0" in figures[3]

    roles = len(jupyter.below())
    page.page.reload(wait_until="commit")
    page.wait_idle()
    cell = page.page.locator(".jp-CodeCell:has-text('Panel(stepper)')").first
    cell.locator(".jp-InputArea-editor").click()
    page.page.keyboard.press("Shift+Enter")
    page.panel.locator("button:has-text('Step')").wait_for()
    page.press("Step", "stepper.step()")
    page.shot("reloaded")
    assert len(jupyter.below()) == roles, "a reload and another panel leave no process behind"
    assert page.complaints == []

    below = jupyter.below()
    assert len(below) >= 5, "a kernel, a nursery, an encoder, two ranks"
    for kernel in jupyter.ask("/api/kernels"):
        jupyter.ask(f"/api/kernels/{kernel['id']}", "DELETE")
    _, left = psutil.wait_procs(below, timeout=60)
    assert left == [], "closing the kernel ends every process of its lab"
