"""What passes in each direction, when, and what is said when it cannot."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time

import pytest

from firepool_nb.errors import BrokerUnreachable
from firepool_nb.server import forwarding
from firepool_nb.server.upstream import Broker


def test_requests_arrive_with_our_token_and_without_jupyters(
    run, http, url, token, embedded, scripted
):
    secret = token["Authorization"].removeprefix("token ")
    headers = {
        "Cookie": "session=1",
        "Idempotency-Key": "k1",
        "Firepool-File": "/etc/passwd",
        "X-Forwarded-For": "1.2.3.4",
    }
    target = url(f"v1/sessions/a%2Fb?limit=3&token={secret}&state=queued%20x&1796066073760")
    response = run(http.get(target, headers=headers))
    assert response.status_code == 200
    (seen,) = scripted.requests
    assert seen["target"] == "/v1/sessions/a%2Fb?limit=3&state=queued%20x"
    assert seen["headers"]["Authorization"] == "Bearer owner-token"
    assert seen["headers"]["Idempotency-Key"] == "k1"
    for name in ("Cookie", "Firepool-File", "X-Forwarded-For"):
        assert name not in seen["headers"]


def test_answers_come_without_the_brokers_own_headers(run, http, url, token, embedded):
    response = run(http.get(url("v1/pools"), headers=token))
    assert response.json() == {"path": "/v1/pools"}
    assert response.headers["Content-Type"].startswith("application/json")
    assert "mine=1" not in str(response.headers)
    assert "X-Internal" not in response.headers
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "owner-token" not in str(response.headers) + response.text


def test_the_brokers_errors_pass_unchanged(run, http, url, token, embedded):
    response = run(http.post(url("v1/refused"), headers=token, json={}))
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "7"
    assert response.json()["error"]["class"] == "QueueFull"


def test_events_arrive_while_the_stream_is_open(run, http, url, token, embedded, scripted):
    async def scene():
        async with http.stream("GET", url("v1/events"), headers=token) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert response.headers["X-Accel-Buffering"] == "no"
            chunks = response.aiter_text()
            assert "data: 1" in await asyncio.wait_for(anext(chunks), 5)
            scripted.release.set()
            rest = "".join([chunk async for chunk in chunks])
            assert "data: 2" in rest

    run(scene())


def test_a_reader_that_leaves_ends_the_brokers_stream(run, http, url, token, embedded, scripted):
    async def scene():
        async with http.stream("GET", url("v1/events"), headers=token) as response:
            await anext(response.aiter_text())
        await asyncio.wait_for(scripted.stream_ended.wait(), 5)

    run(scene())


def test_stopping_the_server_ends_open_streams_at_once(
    run, http, url, token, jp_serverapp, embedded
):
    (app,) = jp_serverapp.extension_manager.extension_apps["firepool_nb.server"]

    async def scene():
        async with http.stream("GET", url("v1/events"), headers=token) as response:
            await anext(response.aiter_text())
            await asyncio.wait_for(app.stop_extension(), 2)
            assert app.exchanges == set()

    run(scene())


@pytest.mark.parametrize("announced", [True, False], ids=["length", "chunked"])
def test_long_bodies_are_streamed_whole(run, http, url, token, embedded, scripted, announced):
    piece = bytes(range(256)) * 4096
    pieces = 5
    digest = hashlib.sha256(piece * pieces).hexdigest()

    async def body():
        for _ in range(pieces):
            yield piece

    headers = dict(token)
    if announced:
        headers["Content-Length"] = str(len(piece) * pieces)
    response = run(http.put(url(f"v1/blobs/{digest}"), content=body(), headers=headers))
    assert response.status_code == 200
    assert scripted.requests[-1]["digest"] == digest
    assert scripted.requests[-1]["size"] == len(piece) * pieces


def test_nothing_running_says_what_starts_it(run, http, url, token, embedded):
    embedded.running = False
    response = run(http.get(url("v1/pools"), headers=token))
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["class"] == "BrokerNotRunning"
    assert "firepool up" in error["message"]
    assert embedded.starts == 0


def test_work_starts_the_broker(run, http, url, token, embedded):
    embedded.running = False
    assert run(http.post(url("v1/jobs"), headers=token, json={})).status_code == 200
    assert embedded.starts == 1


def test_a_start_that_fails_says_why(run, http, url, token, embedded):
    embedded.running = False
    embedded.failure = BrokerUnreachable("no room left on device")
    response = run(http.post(url("start"), headers=token))
    assert response.status_code == 503
    assert response.json()["error"]["class"] == "BrokerStartFailed"
    assert "no room left on device" in response.json()["error"]["message"]


def test_a_slow_start_is_shared_and_blocks_nobody(run, http, url, token, embedded):
    embedded.running = False
    embedded.blocked = threading.Event()

    async def scene():
        starts = [asyncio.create_task(http.post(url("start"), headers=token)) for _ in range(3)]
        lag = await _loop_lag_seconds(0.5)
        embedded.blocked.set()
        assert [(await start).status_code for start in starts] == [200, 200, 200]
        return lag

    assert run(scene()) < 2.0  # a blocked loop would be late by the whole wait
    assert embedded.starts == 1


def test_a_hanging_broker_is_named_and_blocks_nobody(
    run, http, url, token, embedded, scripted, monkeypatch
):
    monkeypatch.setattr(forwarding, "_ANSWER_TIMEOUT_SECONDS", 0.6)

    async def scene():
        waiting = [asyncio.create_task(http.get(url("v1/hangs"), headers=token)) for _ in range(20)]
        lag = await _loop_lag_seconds(0.5)
        quick = await http.get(url("v1/pools"), headers=token)
        assert quick.status_code == 200
        for response in [await task for task in waiting]:
            assert response.status_code == 504
            assert response.json()["error"]["class"] == "BrokerTimeout"
        return lag

    assert run(scene()) < 2.0  # a blocked loop would be late by the whole wait


def test_a_replaced_broker_is_found_again(run, http, url, token, embedded, scripted):
    async def scene():
        assert (await http.get(url("v1/pools"), headers=token)).status_code == 200
        scripted.token = "the-next-broker"
        embedded.connection = embedded.connection._replace(token=scripted.token)
        reply = await http.post(url("v1/jobs"), headers=token, json={"code": "1"})
        assert reply.status_code == 200
        assert [request["headers"]["Authorization"] for request in scripted.requests[1:]] == [
            "Bearer owner-token",
            "Bearer the-next-broker",
        ]

    run(scene())


def test_a_broker_that_died_is_told_from_one_that_never_was(
    run, http, url, token, embedded, scripted
):
    async def scene():
        assert (await http.get(url("v1/pools"), headers=token)).status_code == 200
        await scripted.stop()
        reply = await http.get(url("v1/pools"), headers=token)
        assert (reply.status_code, reply.json()["error"]["class"]) == (502, "BrokerUnreachable")
        embedded.running = False
        reply = await http.get(url("v1/pools"), headers=token)
        assert (reply.status_code, reply.json()["error"]["class"]) == (503, "BrokerNotRunning")
        scripted.start()

    run(scene())


def test_a_remote_broker_is_named_with_the_variable_to_check(run, http, url, token, use_broker):
    use_broker(Broker({"FIREPOOL_URL": "http://127.0.0.1:9/", "FIREPOOL_TOKEN": "t"}))
    response = run(http.get(url("v1/pools"), headers=token))
    assert response.status_code == 502
    message = response.json()["error"]["message"]
    assert "FIREPOOL_URL" in message
    assert "http://127.0.0.1:9" in message


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ("nothing", "running"),
        ("stopped", "none"),
        ("wire", "incompatible"),
        ("gone", "unreachable"),
    ],
)
def test_about_tells_the_brokers_state(run, http, url, token, embedded, scripted, change, state):
    async def scene():
        if change == "stopped":
            embedded.running = False
        elif change == "wire":
            scripted.wire = 2
        elif change == "gone":
            await scripted.stop()
        about = (await http.get(url("about"), headers=token)).json()
        assert about["wire"] == 1
        assert about["version"]
        assert about["broker"]["state"] == state
        assert about["broker"]["kind"] == "embedded"
        if state in {"incompatible", "unreachable"}:
            assert about["broker"]["message"]
        if change == "gone":
            scripted.start()

    run(scene())


def test_reading_is_not_activity_and_acting_is(run, http, url, token, jp_serverapp, embedded):
    settings = jp_serverapp.web_app.settings
    settings.pop("api_last_activity", None)
    run(http.get(url("v1/pools"), headers=token))
    assert "api_last_activity" not in settings
    run(http.post(url("v1/jobs"), headers=token, json={}))
    assert "api_last_activity" in settings


async def _loop_lag_seconds(duration_seconds: float) -> float:
    """Return the longest time that the loop was late in the given span."""
    worst = 0.0
    end = time.monotonic() + duration_seconds
    while (now := time.monotonic()) < end:
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - now - 0.01)
    return worst
