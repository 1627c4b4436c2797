"""A real JupyterLab under an odd base URL, and Chromium to use it as a person does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / "test-artifacts"
BASE_URL = "/user/ada%40lab/"
TOKEN = "lab-test-token"
CHROMIUM = os.environ.get("FIREPOOL_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# Machines are shared and slow; what is awaited comes at once on a free one
expect.set_options(timeout=15_000)
QUIET_SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    # One moment of saving, chosen by the test
    "docmanager-extension/plugin": '{"autosave": false}',
}
START_TIMEOUT_SECONDS = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@dataclasses.dataclass
class LabServer:
    """A running `jupyter lab` with folders of its own."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{BASE_URL}"

    @property
    def home(self) -> Path:
        """FIREPOOL_HOME of the server and its kernels."""
        return self.folder / "fp"

    @property
    def root(self) -> Path:
        """The folder that the file browser shows."""
        return self.folder / "root"

    @property
    def log(self) -> str:
        return (self.folder / "lab.log").read_text(errors="replace")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"token {TOKEN}"}
        return httpx.request(
            method, self.url + path, headers=headers, timeout=30, trust_env=False, **options
        )


@pytest.fixture(scope="module")
def lab_server() -> Iterator[LabServer]:
    """One JupyterLab for a module; nothing of it or of its broker may be left at the end."""
    # A short path: sockets below it have 108 bytes at most
    folder = Path(tempfile.mkdtemp(prefix="fplab-"))
    with run_lab(folder) as server:
        yield server
    shutil.rmtree(folder)


@contextlib.contextmanager
def run_lab(folder: Path, *options: str) -> Iterator[LabServer]:
    for name in ("config", "data", "runtime", "ipython", "root", "share/labextensions"):
        (folder / name).mkdir(parents=True)
    for name, text in QUIET_SETTINGS.items():
        file = folder / f"config/lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # The build of this checkout, not the one that was copied when the package was installed
    (folder / "share/labextensions/firepool-nb").symlink_to(ROOT / "firepool_nb/labextension")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FIREPOOL_")
    }
    environment |= {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PATH": str(folder / "share"),
        "IPYTHONDIR": str(folder / "ipython"),
        "FIREPOOL_HOME": str(folder / "fp"),
    }
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", *options]
    command += ["--ServerApp.port_retries=0", f"--ServerApp.base_url={BASE_URL}"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder / 'root'}"]
    command += ["--LabApp.extension_manager=readonly", "--LabApp.expose_app_in_browser=True"]
    with open(folder / "lab.log", "wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    server = LabServer(folder, port, process)
    try:
        _wait_until_up(server)
        yield server
        server.request("POST", "api/shutdown")
        # Nothing of ours keeps the server from ending
        assert process.wait(timeout=20) == 0, server.log[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        _stop_broker(folder / "fp")


def _wait_until_up(server: LabServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            if server.request("GET", "api/status").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert server.process.poll() is None, server.log[-4000:]
        assert time.monotonic() < deadline, server.log[-4000:]
        time.sleep(0.1)  # another program's start has no event that we could wait for


def _stop_broker(home: Path) -> None:
    """Stop the broker that the kernels shared; then no process of that home may be left."""
    environment = {**os.environ, "FIREPOOL_HOME": str(home)}
    stop = "from firepool_broker import embedded; embedded.stop()"
    subprocess.run([sys.executable, "-c", stop], env=environment, check=True, timeout=60)
    left = list(_processes_of(home))
    for process in left:
        process.kill()
    assert [process.info["cmdline"] for process in left] == []


def _processes_of(home: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FIREPOOL_HOME") == str(home):
                yield process


# Not for the session: while the synchronous Playwright lives, its event loop counts as running in
# this thread, and no other test could run one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("Chromium is not installed; `make test` installs it when run as root")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


class Lab:
    """One browser page with JupyterLab in it."""

    def __init__(self, server: LabServer, page: Page) -> None:
        self.server = server
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", self._note_error)
        page.on("dialog", lambda dialog: dialog.accept())  # "leave this page?"
        page.set_default_timeout(30_000)

    def _note_error(self, error: Any) -> None:
        """Keep the errors of our own scripts; Lab's parts have theirs when a kernel goes."""
        text = f"{error}\n{getattr(error, 'stack', '')}"
        if "firepool" in text:
            self.errors.append(text)

    def open(self) -> None:
        self.page.goto(f"{self.server.url}lab?token={TOKEN}&reset")
        self.wait_for_app()
        self.page.locator(".jp-Launcher-content").wait_for()

    def wait_for_app(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp !== undefined")
        self.page.evaluate("() => window.jupyterapp.restored.then(() => true)")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def command(self, name: str, **arguments: Any) -> None:
        """Run one of Lab's commands, as a menu entry does; not waiting for what it starts."""
        self.page.evaluate(
            "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }",
            [name, arguments],
        )

    def screenshot(self, name: str) -> None:
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png")

    def theme(self, name: str) -> None:
        self.page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
            name,
        )
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def show_panel(self) -> Any:
        self.command("firepool:open")
        panel = self.page.locator("#firepool-panel")
        panel.wait_for(state="visible")
        return panel

    # -- notebooks -----------------------------------------------------------------------------

    def open_notebook(self, name: str, *cells: str) -> None:
        """Write a notebook file, open it and wait for its kernel."""
        document = {
            "cells": [
                {
                    "id": f"cell-{index}",
                    "cell_type": "code",
                    "metadata": {},
                    "source": source,
                    "outputs": [],
                    "execution_count": None,
                }
                for index, source in enumerate(cells)
            ],
            "metadata": {
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        body = {"type": "notebook", "format": "json", "content": document}
        response = self.server.request("PUT", f"api/contents/{name}", json=body)
        response.raise_for_status()
        self.command("docmanager:open", path=name)
        self.wait_for_notebook(name)

    def wait_for_notebook(self, name: str) -> None:
        self.page.wait_for_function(
            """name => {
                const widget = window.jupyterapp.shell.currentWidget;
                const kernel = widget?.sessionContext?.session?.kernel;
                return widget?.context?.path === name && kernel
                    && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
            }""",
            arg=name,
        )

    def start(self, index: int) -> None:
        """Put the cursor into a cell and press Shift+Enter."""
        cell = self.cell(index)
        cell.scroll_into_view_if_needed()
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, index: int, timeout_seconds: float = 60) -> str:
        """Run a cell to its end and return the text that it shows."""
        self.start(index)
        self.wait_done(index, timeout_seconds)
        return self.text(index)

    def wait_done(self, index: int, timeout_seconds: float = 60) -> None:
        self.page.wait_for_function(
            """index => {
                const panel = window.jupyterapp.shell.currentWidget;
                const model = panel.content.widgets[index].model;
                return model.executionState === 'idle' && model.executionCount !== null
                    && panel.sessionContext.session.kernel.status === 'idle';
            }""",
            arg=index,
            timeout=timeout_seconds * 1000,
        )

    def wait_not_running(self, index: int) -> None:
        """Wait until nothing is written into a cell any more (after a reload it has no number)."""
        self.page.wait_for_function(
            "index => window.jupyterapp.shell.currentWidget.content.widgets[index]"
            ".model.executionState === 'idle'",
            arg=index,
        )

    def is_running(self, index: int) -> bool:
        """Tell whether the cell's prompt shows a star."""
        return self.cell(index).locator(".jp-InputPrompt").inner_text() == "[*]:"

    def execution_count(self, index: int) -> int | None:
        return self.page.evaluate(
            "index => window.jupyterapp.shell.currentWidget.content.widgets[index]"
            ".model.executionCount",
            index,
        )

    def reopen(self, name: str) -> None:
        """Come back to a notebook whose kernel may be busy."""
        self.command("docmanager:open", path=name)
        self.page.wait_for_function(
            """name => {
                const widget = window.jupyterapp.shell.currentWidget;
                return widget?.context?.path === name && widget.context.isReady
                    && widget.sessionContext?.session?.kernel?.connectionStatus === 'connected';
            }""",
            arg=name,
        )

    # -- the broker, as the Jupyter server forwards it -------------------------------------------

    def jobs(self, notebook: str) -> list[dict[str, Any]]:
        """Jobs of one notebook, newest first."""
        jobs = self.server.request("GET", "firepool/v1/jobs?limit=50").json()["jobs"]
        return [
            job for job in jobs if Path((job["cell"] or {}).get("notebook") or "").name == notebook
        ]

    def wait_for_job(self, notebook: str, state: str) -> None:
        (job,) = self.jobs(notebook)[:1]
        with httpx.stream(
            "GET",
            f"{self.server.url}firepool/v1/jobs/{job['id']}/output",
            headers={"Authorization": f"token {TOKEN}"},
            timeout=30,
            trust_env=False,
        ) as response:
            for _ in response.iter_lines():
                pass  # the stream ends with the job
        assert self.jobs(notebook)[0]["state"] == state

    # -- cells -----------------------------------------------------------------------------------

    def cell(self, index: int) -> Any:
        panel = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        return panel.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Any:
        return self.cell(index).locator(".jp-OutputArea")

    def text(self, index: int) -> str:
        """What a person reads below the cell."""
        return "".join(self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """What would be saved."""
        return self.page.evaluate(
            "index => window.jupyterapp.shell.currentWidget.content.widgets[index]"
            ".model.outputs.toJSON()",
            index,
        )

    def printed(self, index: int) -> str:
        """What the cell's code has written to stdout and stderr."""
        return "".join(part.get("text", "") for part in self.outputs(index))

    def save(self) -> None:
        self.page.evaluate(
            "() => window.jupyterapp.commands.execute('docmanager:save').then(() => true)"
        )

    def close_notebook(self) -> None:
        """Shut the kernel down and close the tab."""
        self.page.evaluate(
            """async () => {
                const panel = window.jupyterapp.shell.currentWidget;
                await panel?.sessionContext?.shutdown();
                panel?.dispose();
            }"""
        )


@pytest.fixture(scope="module")
def _lab(lab_server: LabServer, browser: Browser) -> Iterator[Lab]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    lab = Lab(lab_server, page)
    lab.open()
    yield lab
    page.close()


@pytest.fixture(scope="module")
def _scripted_lab(browser: Browser) -> Iterator[Lab]:
    """JupyterLab over a broker that shows every state at once."""
    folder = Path(tempfile.mkdtemp(prefix="fplab-"))
    with run_lab(folder) as server:
        script = Path(__file__).with_name("scripted_broker.py")
        broker = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "FIREPOOL_HOME": str(server.home)},
            stdout=subprocess.PIPE,
        )
        assert broker.stdout is not None
        try:
            assert broker.stdout.readline() == b"ready\n"
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            lab = Lab(server, page)
            lab.open()
            yield lab
            page.close()
        finally:
            broker.terminate()
            broker.wait()
            broker.stdout.close()
    shutil.rmtree(folder)


@pytest.fixture
def scripted_lab(_scripted_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    yield _scripted_lab
    if getattr(request.node, "failed", False):
        _scripted_lab.screenshot(f"failed-{request.node.name}")
    _scripted_lab.page.unroute_all()


@pytest.fixture
def lab(_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The shared page; a failed test leaves a picture, every test a closed notebook."""
    _lab.errors.clear()
    yield _lab
    failed = getattr(request.node, "failed", False)
    if failed:
        _lab.screenshot(f"failed-{request.node.name}")
    _lab.close_notebook()
    assert failed or _lab.errors == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.failed = report.failed  # type: ignore[attr-defined]
    return report
