"""A person's cells, in real JupyterLab, on real warm pods."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect

LOAD = "%load_ext firepool_nb"


def gated(path: Path, before: int, after: int) -> str:
    """Code that prints, waits until a file appears, and prints on."""
    return f"""%%firepool
import os, time
for i in range({before}):
    print("line", i)
    time.sleep(0.05)
while not os.path.exists({str(path)!r}):
    time.sleep(0.02)
for i in range({before}, {before + after}):
    print("line", i)
    time.sleep(0.05)
"""


def numbered(count: int) -> str:
    return "".join(f"line {i}\n" for i in range(count))


def test_the_start_button_brings_warm_pods(lab):
    panel = lab.show_panel()
    lab.screenshot("start-before")
    panel.get_by_role("button", name="Start", exact=True).click()
    pool = panel.get_by_label("Pool cpu-small")
    expect(pool).to_be_visible(timeout=20_000)
    expect(pool.locator(".jp-mod-warm-ready b").first).not_to_have_text("0", timeout=20_000)
    expect(pool).to_contain_text(re.compile("isolation: (namespaces|process|none)"))
    status = lab.page.locator(".jp-Firepool-status")
    expect(status).to_have_text(re.compile(r"\d+ warm · 0 busy · queue 0"))
    lab.screenshot("start-after")


def test_output_arrives_while_the_cell_runs(lab):
    go = lab.server.root / "live.go"
    lab.open_notebook("live.ipynb", LOAD, gated(go, 3, 3))
    assert lab.run(0) == ""  # loading says nothing when all is well
    lab.start(1)
    expect(lab.output(1)).to_contain_text("line 2")
    assert lab.is_running(1)
    assert "line 3" not in lab.text(1)
    panel = lab.show_panel()
    expect(panel.locator("[data-state=RUNNING]")).to_be_visible()
    expect(lab.page.locator(".jp-Firepool-status")).to_contain_text("1 busy")
    lab.screenshot("cell-live")
    go.touch()
    lab.wait_done(1)
    assert lab.printed(1) == numbered(6)


def test_a_plot_is_one_picture(lab):
    lab.open_notebook(
        "plot.ipynb",
        LOAD,
        "%%firepool\nimport matplotlib.pyplot as plt\n"
        "plt.plot([1, 4, 9, 16])\nplt.title('on a warm pod')\nplt.show()",
    )
    lab.run(0)
    lab.run(1)
    pictures = [part for part in lab.outputs(1) if "image/png" in part.get("data", {})]
    assert len(pictures) == 1
    expect(lab.cell(1).locator("img")).to_have_count(1)
    lab.screenshot("cell-plot")


def test_a_progress_bar_moves_in_one_line(lab):
    go = lab.server.root / "tqdm.go"
    lab.open_notebook(
        "bar.ipynb",
        LOAD,
        f"""%%firepool
import os, time
from tqdm.auto import tqdm
for i in tqdm(range(20), desc="steps", mininterval=0.01):
    time.sleep(0.02)
    while i == 10 and not os.path.exists({str(go)!r}):
        time.sleep(0.02)
""",
    )
    lab.run(0)
    lab.start(1)
    expect(lab.output(1)).to_contain_text(re.compile("50%"))
    lab.screenshot("cell-bar-half")
    go.touch()
    lab.wait_done(1)
    text = lab.text(1)
    assert "steps: 100%" in text
    assert "50%" not in text
    assert len(text.strip().splitlines()) == 1
    lab.screenshot("cell-bar")


def test_an_exception_is_shown_once_and_stops_run_all(lab):
    lab.open_notebook(
        "raises.ipynb",
        LOAD,
        "%%firepool\ndef deep():\n    return int('seven')\n\ndeep()",
        "print('must not run')",
    )
    lab.command("notebook:run-all-cells")
    lab.wait_done(1)
    errors = [part for part in lab.outputs(1) if part["output_type"] == "error"]
    assert [part["ename"] for part in errors] == ["ValueError"]
    shown = lab.text(1)
    assert shown.count("Traceback (most recent call last)") <= 1
    assert shown.count("invalid literal for int() with base 10: 'seven'") == 1
    assert "deep()" in shown
    assert "In[2], line 5" in shown  # the notebook's own numbers, the magic's line counted
    assert "run_cell_magic" not in shown  # nothing of the local machinery
    lab.screenshot("cell-raises")
    assert lab.execution_count(2) is None
    assert lab.text(2) == ""


def test_a_remote_exception_is_caught_by_its_own_class(lab):
    lab.open_notebook(
        "except.ipynb",
        LOAD,
        "try:\n"
        "    get_ipython().run_cell_magic('firepool', '', 'raise ValueError(\"from the pod\")')\n"
        "except ValueError as error:\n"
        "    print('caught', error)",
    )
    lab.run(0)
    lab.run(1)
    assert "caught from the pod" in lab.text(1)


def test_stop_reaches_the_pod_and_leaves_it_warm(lab):
    lab.open_notebook(
        "stop.ipynb",
        LOAD,
        "%%firepool\nprint('first')",
        "%%firepool\nimport time\nprint('running', flush=True)\ntry:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('stopped in the pod')\n    raise",
        "%%firepool\nprint('next')",
    )
    lab.run(0)
    lab.run(1)
    lab.start(2)
    expect(lab.output(2)).to_contain_text("running")
    lab.page.locator(".jp-NotebookPanel-toolbar [data-command='notebook:interrupt-kernel']").click()
    lab.wait_done(2, timeout_seconds=15)
    assert "stopped in the pod" in lab.text(2)
    errors = [part["ename"] for part in lab.outputs(2) if part["output_type"] == "error"]
    assert len(errors) == 1
    assert errors[0] in {"Interrupted", "KeyboardInterrupt"}
    lab.screenshot("cell-stopped")
    lab.run(3)
    assert "next" in lab.text(3)
    newest, stopped, first = lab.jobs("stop.ipynb")[:3]
    assert [stopped["state"], newest["state"]] == ["CANCELLED", "SUCCEEDED"]
    assert first["pods"] == stopped["pods"] == newest["pods"]
    assert newest["acquisition"]["path"] == "warm"


def test_a_page_reloaded_during_a_cell_shows_all_output(lab):
    go = lab.server.root / "reload.go"
    lab.open_notebook("reload.ipynb", LOAD, gated(go, 3, 3))
    lab.run(0)
    lab.start(1)
    expect(lab.output(1)).to_contain_text("line 2")
    lab.save()
    lab.page.reload()
    lab.wait_for_app()
    lab.reopen("reload.ipynb")
    expect(lab.output(1)).to_contain_text("line 2")
    assert lab.is_running(1)
    lab.screenshot("cell-reloaded-running")
    go.touch()
    expect(lab.output(1)).to_contain_text("line 5")
    lab.wait_not_running(1)
    assert lab.printed(1) == numbered(6)
    lab.screenshot("cell-reloaded")
    # and it is the notebook's from now on: saved, run again
    lab.save()
    lab.run(1)
    assert lab.printed(1) == numbered(6)


def test_a_cell_that_ended_while_no_page_was_there_is_complete(lab):
    go = lab.server.root / "away.go"
    lab.open_notebook("away.ipynb", LOAD, gated(go, 2, 2))
    lab.run(0)
    lab.start(1)
    expect(lab.output(1)).to_contain_text("line 1")
    lab.save()
    lab.page.goto("about:blank")
    go.touch()
    lab.wait_for_job("away.ipynb", "SUCCEEDED")
    lab.page.goto(f"{lab.server.url}lab")
    lab.wait_for_app()
    lab.reopen("away.ipynb")
    expect(lab.output(1)).to_contain_text("line 3")
    lab.wait_not_running(1)
    assert lab.printed(1) == numbered(4)


def test_the_panel_shows_the_session_and_its_jobs(lab):
    lab.open_notebook("panel.ipynb", LOAD, "%%firepool\nprint('hello')")
    lab.run(0)
    lab.run(1)
    panel = lab.show_panel()
    session = panel.get_by_label("Session panel.ipynb")
    expect(session).to_contain_text("1 pod held")
    job = panel.locator("[data-job]").first
    expect(job).to_have_attribute("data-state", "SUCCEEDED")
    expect(job.locator(".jp-Firepool-name")).to_have_text("print('hello')")
    expect(job).to_contain_text(re.compile(r"panel\.ipynb · .* · (warm|new) · [\d.]+ m?s"))
    lab.screenshot("panel-real")
    job.get_by_role("button", name=re.compile("Show the output")).click()
    expect(lab.page.locator(".jp-Firepool-output")).to_contain_text("hello")
    lab.screenshot("panel-real-output")
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")
    session.get_by_role("button", name=re.compile("Release")).click()
    expect(session).to_contain_text("0 pods held")


def test_cancel_in_the_panel_ends_the_cell(lab):
    lab.open_notebook(
        "cancel.ipynb", LOAD, "%%firepool\nimport time\nprint('running')\ntime.sleep(600)"
    )
    lab.run(0)
    lab.start(1)
    expect(lab.output(1)).to_contain_text("running")
    panel = lab.show_panel()
    panel.get_by_role("button", name="Cancel import time").click()
    lab.wait_done(1)
    assert [part["ename"] for part in lab.outputs(1) if part["output_type"] == "error"] == [
        "JobCancelled"
    ]
    job = panel.locator("[data-job]").first
    expect(job).to_have_attribute("data-state", "CANCELLED")
    lab.screenshot("cell-cancelled")
