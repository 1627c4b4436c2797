"""What panels and operators see of a real broker while it works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api

SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}


@contextmanager
def watching(connection: embedded.Connection) -> Iterator[queue.Queue[tuple[str, Any]]]:
    """Watch ``/v1/events`` as a panel does."""
    seen: queue.Queue[tuple[str, Any]] = queue.Queue()
    watcher = Api(connection)

    def watch() -> None:
        try:
            for event in watcher.events("GET", "/v1/events"):
                seen.put(event)
        except (httpx.HTTPError, RuntimeError):
            return  # closed below

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    # a goodbye ends the stream: the broker says something once more, and the reader finds itself
    # closed
    watcher.close()
    with Api(connection) as api:
        api.session("wakes-the-watcher", client_id="x")
    thread.join(15)
    assert not thread.is_alive()


def next_of(seen: queue.Queue[tuple[str, Any]], kind: str, **fields: Any) -> Any:
    """Return the next event of a kind; those that came before it in between are kept."""
    passed = []
    try:
        while True:
            found, data = seen.get(timeout=15)
            if found == kind and all(data[name] == value for name, value in fields.items()):
                return data
            passed.append((found, data))
    finally:
        for event in passed:
            seen.put(event)


def test_a_panel_sees_jobs_pods_and_sessions_move(api: Api, broker: embedded.Connection) -> None:
    with watching(broker) as seen:
        while seen.empty():  # the first change that it sees says that it watches
            api.session("kernel-1")
            threading.Event().wait(0.05)
        job = api.submit("print(1)", sku="cpu-small", **SESSION)
        next_of(seen, "job", id=job["id"], state="RUNNING")
        pod = next_of(seen, "pod", job=job["id"], state="RUNNING")
        assert pod["session"] == "kernel-1"
        ended = next_of(seen, "job", id=job["id"], state="SUCCEEDED")
        assert ended["acquisition"]["path"] in ("warm", "new")
        next_of(seen, "pod", name=pod["name"], state="HELD")
        api.post("/v1/sessions/kernel-1/release")
        next_of(seen, "pod", name=pod["name"], state="GONE")
        assert next_of(seen, "session", lease_tag="kernel-1")["pods"] == []


def test_metrics_count_what_happened(api: Api) -> None:
    api.session("kernel-1")
    for _ in range(3):
        api.run("print(1)", sku="cpu-small", **SESSION)
    text = api.http.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]

    def total(*words: str) -> float:
        found = [line for line in lines if all(word in line for word in words)]
        assert found, f"{words} in\n{text}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    assert total("acquisitions_total", 'path="') == 3
    assert total("jobs_ended", "_total", 'state="SUCCEEDED"') == 3
    assert total("double_runs") == 0
    assert total("firepool_pods{", 'pool="cpu-small"') >= 1


def test_a_retired_pod_goes_and_is_replaced(api: Api) -> None:
    api.session("kernel-1")
    _, job = api.run("print(1)", sku="cpu-small", **SESSION)
    api.post(f"/v1/pods/{job['pods'][0]}/retire")
    _, after = api.run("print(1)", sku="cpu-small", **SESSION)
    assert after["pods"] != job["pods"]
    assert api.http.post("/v1/pods/there-is-none/retire").status_code == 404


def test_the_broker_says_who_it_is(api: Api, broker: embedded.Connection) -> None:
    told = api.get("/v1/whoami")["broker"]
    assert (told["pid"], told["wire"], told["backend"]) == (broker.pid, broker.wire, "local")
    assert told["network"] == "host"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_open(broker: embedded.Connection, path: str) -> None:
    with Api(broker, token="nobody") as api:
        assert api.http.get(path).status_code == 200
        assert api.http.get("/v1/whoami").status_code == 401
