"""What a caller must show, what it gets back, and that asking twice changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from firepool_podagent import wire
from firepool_podagent.testing import Agent, RefusedError, until


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent()


def answer(
    agent: Agent, method: str, target: str, headers: dict[str, str], body: bytes = b""
) -> Any:
    connection = agent.request(method, target, body, headers=headers)
    with contextlib.closing(connection.connection):  # type: ignore[attr-defined]
        return connection.status, json.loads(connection.read() or b"{}")


ROUTES = [
    ("GET", "/v1/health"),
    ("PUT", f"/v1/packages/{'0' * 64}"),
    ("HEAD", f"/v1/blobs/{'0' * 64}"),
    ("POST", "/v1/prepare"),
    ("POST", "/v1/attempts/a:1"),
    ("GET", "/v1/attempts/a:1"),
    ("GET", "/v1/attempts/a:1/output?from=0"),
    ("POST", "/v1/attempts/a:1/signal"),
    ("POST", "/v1/attempts/a:1/ack"),
    ("GET", "/v1/attempts/a:1/results/x"),
    ("POST", "/v1/drain"),
    ("POST", "/v1/shutdown"),
    ("GET", "/anything"),
]


@pytest.mark.parametrize(("method", "target"), ROUTES)
def test_every_route_wants_a_signature(agent: Agent, method: str, target: str) -> None:
    wrong = {wire.HEADER_SIGNATURE: "0" * 64}
    assert answer(agent, method, target, wrong)[0] == 401
    expired = wire.sign(agent.key, method, target, wire.EMPTY_DIGEST, 1, int(time.time()) - 1)
    assert answer(agent, method, target, expired)[0] == 401
    distant = wire.sign(agent.key, method, target, wire.EMPTY_DIGEST, 1, int(time.time()) + 10**6)
    assert answer(agent, method, target, distant)[0] == 401
    other = wire.sign(agent.key, method, "/v1/other", wire.EMPTY_DIGEST, 1, int(time.time()) + 9)
    assert answer(agent, method, target, other)[0] == 401
    assert agent.health()["state"] == "idle"


def test_a_body_must_be_the_signed_one(agent: Agent) -> None:
    target = "/v1/prepare"
    signed = wire.sign(agent.key, "POST", target, wire.EMPTY_DIGEST, 1, int(time.time()) + 9)
    status, body = answer(agent, "POST", target, signed, b'{"environment":null}')
    assert status == 401
    assert body["error"]["class"] == "Unauthorized"


def test_an_older_leader_is_refused_also_after_a_restart(
    start_agent: Callable[..., Agent], agent: Agent
) -> None:
    agent.epoch = 7
    agent.health()
    agent.epoch = 6
    with pytest.raises(RefusedError) as refused:
        agent.health()
    assert (refused.value.status, refused.value.error["class"]) == (409, "StaleEpoch")
    agent.kill()
    agent.start()
    with pytest.raises(RefusedError):
        agent.health()
    agent.epoch = 7
    assert agent.health()["uid"] == agent.config["uid"]


def test_one_connection_serves_many_requests_and_survives_refusals(agent: Agent) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(agent.socket)
        stream = raw.makefile("rwb")
        for target, expected in (("/v1/health", 200), ("/v1/nothing", 404), ("/v1/health", 200)):
            signed = wire.sign(agent.key, "GET", target, wire.EMPTY_DIGEST, 1, int(time.time()) + 9)
            head = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
            stream.write(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode())
            stream.flush()
            assert int(stream.readline().split()[1]) == expected
            length = 0
            while (line := stream.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.split()[1])
            stream.read(length)


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000])
def test_junk_is_answered_and_forgotten(agent: Agent, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(5)
        raw.connect(agent.socket)
        with contextlib.suppress(BrokenPipeError):
            raw.sendall(junk)
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    assert agent.health()["state"] == "idle"


def test_an_attempt_runs_once_however_often_it_is_asked_for(agent: Agent) -> None:
    spec = agent.spec("open('marks', 'a').write('x'); print('ran')")
    target = f"/v1/attempts/{spec['attempt']}"
    first = agent.call("POST", target, spec)
    assert first["_status"] == 201
    again = agent.call("POST", target, spec)
    assert again["_status"] == 200
    done = agent.finish(spec["attempt"])
    assert done.text() == "ran\n"
    ended = agent.call("POST", target, spec)
    assert ended["state"] == "ended"
    assert {"type": "outcome", **ended["outcome"]} == done.outcome
    agent.call("POST", f"{target}/ack", {"next": done.outcome["next"], "outcome": True})
    assert agent.call("POST", target, spec)["outcome"] == ended["outcome"]
    assert (agent.session_dir / "marks").read_text() == "x"


def test_one_attempt_at_a_time(agent: Agent) -> None:
    attempt = agent.start_attempt("import time; time.sleep(60)")
    with pytest.raises(RefusedError) as refused:
        agent.start_attempt("1")
    assert refused.value.error["class"] == "Busy"
    assert agent.health()["active"] == attempt
    agent.signal(attempt, "kill")
    agent.finish(attempt)
    until(lambda: agent.health()["state"] == "idle", 5, "not idle")


def test_output_resumes_anywhere_and_follows(agent: Agent) -> None:
    code = "import time\nfor n in range(5): print(n); time.sleep(0.1)\nprint('end')"
    attempt = agent.start_attempt(code)
    seen = []
    for message in agent.output(attempt):
        seen.append(message)
        if len(seen) == 3:
            break
    rest = list(agent.output(attempt, start=3))
    whole = agent.finish(attempt)
    assert [*seen, *rest][: len(whole.messages)] == whole.messages
    assert rest[-2]["type"] == "outcome"
    assert rest[-1]["type"] == "reset"
    assert whole.text() == "0\n1\n2\n3\n4\nend\n"


def test_past_attempts_are_readable_after_the_agent_came_back(agent: Agent) -> None:
    done = agent.run("print('kept')")
    running = agent.start_attempt("print('begun', flush=True); import time; time.sleep(60)")
    for message in agent.output(running):
        if message["type"] == "stream":
            break
    agent.kill()
    agent.start()
    assert agent.finish("job1:1").messages == done.messages
    state = agent.call("GET", f"/v1/attempts/{running}")
    assert state["state"] == "lost"
    lines = list(agent.output(running))
    assert [m["text"] for m in lines if m["type"] == "stream"] == ["begun\n"]
    assert agent.call("POST", f"/v1/attempts/{running}", agent.spec("1"))["state"] == "lost"
    assert agent.run("print('again')").text() == "again\n"


def test_blobs_are_verified_delivered_and_gone_afterwards(agent: Agent, short_dir: Any) -> None:
    content = os.urandom(300_000)
    sha256 = agent.put("blobs", content)
    head = agent.request("HEAD", f"/v1/blobs/{sha256}")
    assert head.status == 200
    head.connection.close()  # type: ignore[attr-defined]
    source = short_dir / "blob \u00e9"
    for size in (1000, 3 << 20):
        linked = os.urandom(size)
        source.write_bytes(linked)
        digest = wire.digest(linked)
        # the agent of a namespace pod sees below /tmp only what is its own: elsewhere
        place = agent.directory / f"from-{size}"
        place.write_bytes(linked)
        link = {wire.HEADER_LINK: str(place)}
        response = agent.request("PUT", f"/v1/blobs/{digest}", b"", digest, link)
        assert response.status == 201, response.read()
        response.connection.close()  # type: ignore[attr-defined]
        assert (agent.directory / "blobs" / digest).read_bytes() == linked
    wrong = agent.request("PUT", f"/v1/blobs/{'a' * 64}", content, "a" * 64)
    assert wrong.status == 422
    wrong.connection.close()  # type: ignore[attr-defined]
    inputs = [
        {"name": "data", "names": None, "kind": "value", "format": "cloudpickle", "data": None}
    ]
    with pytest.raises(RefusedError) as refused:
        agent.start_attempt("1", inputs=[{**inputs[0], "blob": "b" * 64}])
    assert refused.value.status == 424
    agent.run("1")
    assert not list((agent.directory / "blobs").iterdir())


def test_large_results_are_fetched_by_name_until_acknowledged(agent: Agent) -> None:
    done = agent.run("big = b'x' * 200_000; small = 5", outputs=["big", "small"])
    results = {result["name"]: result for result in done.outcome["results"]}
    assert results["small"]["data"]
    assert results["big"]["sha256"]
    attempt = done.outcome["attempt"]
    response = agent.request("GET", f"/v1/attempts/{attempt}/results/big")
    data = response.read()
    response.connection.close()  # type: ignore[attr-defined]
    assert wire.digest(data) == results["big"]["sha256"]
    agent.call("POST", f"/v1/attempts/{attempt}/ack", {"next": 99, "outcome": True})
    response = agent.request("GET", f"/v1/attempts/{attempt}/results/big")
    assert response.status == 404
    response.connection.close()  # type: ignore[attr-defined]


def test_a_drained_pod_takes_nothing_more(agent: Agent) -> None:
    attempt = agent.start_attempt("print('to the end')")
    agent.call("POST", "/v1/drain", {})
    assert agent.finish(attempt).text() == "to the end\n"
    until(lambda: agent.health()["state"] == "draining", 5, "not draining")
    with pytest.raises(RefusedError) as refused:
        agent.start_attempt("1")
    assert refused.value.error["class"] == "Busy"
