"""The panel, the status bar and the output tab, over a broker that shows every state at once."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

PHASES = {
    "server-missing": (404, {"message": "Not Found"}, "pip install firepool-nb=="),
    "forbidden": (403, {"message": "no"}, "access to the resource"),
    "version-mismatch": (200, {"version": "9.9.9", "wire": 1}, "9.9.9"),
    "none": (200, {"broker": {"kind": "embedded", "state": "none"}}, "%%firepool"),
    "unreachable": (
        200,
        {"broker": {"kind": "remote", "state": "unreachable", "message": "check FIREPOOL_URL"}},
        "check FIREPOOL_URL",
    ),
    "incompatible": (
        200,
        {"broker": {"kind": "embedded", "state": "incompatible", "message": "wire version 2"}},
        "wire version 2",
    ),
}


def test_pools_show_the_five_words_the_queue_and_the_isolation(scripted_lab):
    panel = scripted_lab.show_panel()
    pool = panel.get_by_label("Pool h200-pair")
    expect(pool).to_contain_text("2 × h200, 16 cores, 128 GiB")
    counts = pool.get_by_label("Pods").locator("li").all_inner_texts()
    assert counts == ["0 warm-ready", "2 warming", "3 busy", "1 draining", "1 unhealthy"]
    expect(pool).to_contain_text("queue 3 (~42 s) · isolation: namespaces")
    assert panel.get_by_label("Pool cpu-small").locator("li").first.inner_text() == "2 warm-ready"


def test_jobs_show_state_path_latency_and_why_they_wait(scripted_lab):
    panel = scripted_lab.show_panel()
    rows = panel.locator("[data-job]")
    assert rows.evaluate_all("rows => rows.map(row => row.dataset.state)") == [
        *("QUEUED", "QUEUED", "RUNNING", "FAILED", "SUCCEEDED", "CANCELLED"),
    ]
    expect(rows.nth(0)).to_contain_text("2 jobs before this one")
    expect(rows.nth(2)).to_contain_text("train-small")
    expect(rows.nth(2)).to_contain_text("· warm · 12 ms")
    expect(rows.nth(3)).to_contain_text("· new · 9 ms · NonZeroExit")
    # its first line names a job, the notebook stands below; without a name the notebook does
    done = rows.nth(4)
    expect(done.locator(".jp-Firepool-name")).to_have_text(re.compile("^table = build"))
    expect(done).to_contain_text("analysis.ipynb · ")
    expect(rows.nth(3).locator(".jp-Firepool-name")).to_have_text("analysis.ipynb")
    assert rows.nth(3).inner_text().count("analysis.ipynb") == 1


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_themes(scripted_lab, theme):
    scripted_lab.theme(theme)
    panel = scripted_lab.show_panel()
    scripted_lab.screenshot(f"panel-{theme.split()[1].lower()}")
    name = panel.get_by_label("Pool cpu-small").locator(".jp-Firepool-name")
    for element in (name, panel.locator(".jp-Firepool-quiet").first):
        assert _contrast(element) >= 4.5
    scripted_lab.theme("JupyterLab Light")


def test_the_status_bar_counts_and_opens_the_panel_by_keyboard(scripted_lab):
    scripted_lab.show_panel()
    page = scripted_lab.page
    item = page.locator(".jp-Firepool-status [role=button]")
    expect(item).to_have_text("2 warm · 4 busy · queue 3")
    scripted_lab.command("application:toggle-left-area")
    expect(page.locator("#firepool-panel")).to_be_hidden()
    item.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#firepool-panel")).to_be_visible()


def test_everything_in_the_panel_is_reached_by_keyboard(scripted_lab):
    panel = scripted_lab.show_panel()
    page = scripted_lab.page
    summary = panel.locator("summary", has_text="Pools")
    summary.focus()
    page.keyboard.press("Enter")
    expect(panel.get_by_label("Pool cpu-small")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(panel.get_by_label("Pool cpu-small")).to_be_visible()
    names = panel.get_by_role("button").evaluate_all(
        "buttons => buttons.map(b => b.getAttribute('aria-label') ?? b.textContent)"
    )
    assert "Release the pods of analysis.ipynb" in names
    assert "Cancel train-small" in names
    assert "Show the output of train-small" in names
    assert len([name for name in names if name.startswith("Cancel")]) == 3


def test_output_is_replayed_in_a_tab(scripted_lab):
    panel = scripted_lab.show_panel()
    panel.get_by_label("Show the output of train-small").click()
    page = scripted_lab.page
    tab = page.locator(".jp-Firepool-output")
    expect(tab).to_contain_text("epoch 1")
    expect(tab).to_contain_text("done")
    expect(tab).to_contain_text("100%")
    assert "50%" not in tab.inner_text()  # the bar was drawn over
    expect(tab.locator("table")).to_contain_text("0.25")
    expect(tab.get_by_role("status")).to_contain_text("warm pod · started in 12 ms")
    scripted_lab.screenshot("panel-output")
    page.locator(".lm-TabBar-tab.lm-mod-current .lm-TabBar-tabCloseIcon").last.click()


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_missing_is_said_with_the_line_that_fixes_it(scripted_lab, phase):
    status, part, line = PHASES[phase]
    about = {"version": "0.1.0", "wire": 1, "broker": {"kind": "embedded", "state": "running"}}
    body = json.dumps(part if status != 200 else {**about, **part})
    scripted_lab.page.route(
        re.compile("firepool/about"),
        lambda route: route.fulfill(status=status, body=body, content_type="application/json"),
    )
    panel = scripted_lab.show_panel()
    scripted_lab.command("firepool:refresh")
    notice = panel.locator(f".jp-Firepool-notice[data-phase={phase}]")
    expect(notice).to_contain_text(line)
    if phase in {"server-missing", "version-mismatch"}:
        expect(notice).to_contain_text("0.1.0")  # this page's own release
    scripted_lab.screenshot(f"panel-{phase}")
    scripted_lab.page.unroute_all()
    scripted_lab.command("firepool:refresh")
    expect(panel.get_by_label("Pool cpu-small")).to_be_visible()


def test_changes_made_elsewhere_arrive_by_events(scripted_lab):
    panel = scripted_lab.show_panel()
    row = panel.locator("[data-job=job-waits]")
    expect(row).to_have_attribute("data-state", "QUEUED")
    scripted_lab.server.request("POST", "firepool/v1/jobs/job-waits/cancel").raise_for_status()
    expect(row).to_have_attribute("data-state", "CANCELLED", timeout=900)  # polling needs longer


def test_without_events_the_panel_polls_and_stops_when_hidden(scripted_lab):
    page = scripted_lab.page
    asked: list[str] = []
    page.route(re.compile("v1/events"), lambda route: route.abort())
    page.on("request", lambda request: asked.append(request.url))
    scripted_lab.command("application:toggle-left-area")  # leaves the stream that is open
    panel = scripted_lab.show_panel()
    with page.expect_request(re.compile("v1/events")):
        pass  # tried again, in vain
    with page.expect_request(re.compile("v1/pools")):
        pass
    expect(panel.get_by_label("Pool cpu-small")).to_be_visible()
    _hide(page, True)
    page.wait_for_timeout(200)  # what was on its way
    asked.clear()
    page.wait_for_timeout(2500)
    assert [url for url in asked if "/firepool/" in url] == []
    with page.expect_request(re.compile("v1/pools"), timeout=1000):
        _hide(page, False)


def _hide(page, hidden: bool) -> None:
    """Let the page believe that its browser tab is in the background."""
    page.evaluate(
        """hidden => {
            Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });
            document.dispatchEvent(new Event('visibilitychange'));
        }""",
        hidden,
    )


def test_cancel_and_release_act_and_show_at_once(scripted_lab):
    panel = scripted_lab.show_panel()
    panel.get_by_label("Cancel train-small").click()
    expect(panel.locator("[data-job=job-runs]")).to_have_attribute("data-state", "CANCELLED")
    session = panel.get_by_label("Session analysis.ipynb")
    expect(session).to_contain_text(re.compile("1 pod held until .+ · 1 running"))
    panel.get_by_label("Release the pods of analysis.ipynb").click()
    expect(session).to_contain_text("0 pods held")


def test_a_refusal_is_shown_until_dismissed(scripted_lab):
    panel = scripted_lab.show_panel()
    refusal = {"error": {"class": "Conflict", "message": "that job has ended already"}}
    scripted_lab.page.route(
        re.compile("/cancel"),
        lambda route: route.fulfill(
            status=409, body=json.dumps(refusal), content_type="application/json"
        ),
    )
    panel.get_by_role("button", name=re.compile("Cancel")).first.click()
    alert = panel.get_by_role("alert")
    expect(alert).to_contain_text("that job has ended already")
    alert.get_by_role("button").click()
    expect(alert).to_be_hidden()


def _contrast(element) -> float:
    """Contrast of text and background as WCAG 2 defines it."""
    return element.evaluate(
        """element => {
            const parse = text => text.match(/[\\d.]+/g).map(Number);
            const light = ([r, g, b]) => {
                const [x, y, z] = [r, g, b].map(value => {
                    const part = value / 255;
                    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * x + 0.7152 * y + 0.0722 * z;
            };
            const blend = (front, back) => {
                const alpha = front[3] ?? 1;
                return [0, 1, 2].map(i => front[i] * alpha + back[i] * (1 - alpha));
            };
            let ground = null;
            for (let node = element; node && !ground; node = node.parentElement) {
                const colour = parse(getComputedStyle(node).backgroundColor);
                if ((colour[3] ?? 1) > 0.99) { ground = colour; }
            }
            const text = blend(parse(getComputedStyle(element).color), ground);
            const [high, low] = [light(text), light(ground)].sort((a, b) => b - a);
            return (high + 0.05) / (low + 0.05);
        }"""
    )
