"""Who may reach what."""

from __future__ import annotations

import itertools
import re
from typing import Any

import httpx
import pytest
from firepool_broker.api.application import ROUTES
from firepool_broker.identity.tokens import Authenticator

_OPEN = {"/healthz", "/readyz"}


def _concrete(path: str) -> str:
    return re.sub(r"\{sha256\}", "0" * 64, path).replace("{", "").replace("}", "")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_every_route_asks_for_a_token(broker: Any, route: Any) -> None:
    client = broker.client(None)
    tokens = (None, "wrong", "fps_" + "0" * 64, "owner-tokem", "é")
    for method, token in itertools.product((*route.handler.OPERATIONS, "PATCH"), tokens):
        headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
        answer = await client.request(method, _concrete(route.path), headers=headers)
        if route.path in _OPEN:
            assert answer.status_code in (200, 405)
        else:
            assert answer.status_code == 401, (method, answer.text)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["class"] == "Unauthorized"


async def test_an_unknown_path_tells_a_stranger_nothing(broker: Any) -> None:
    answer = await broker.client(None).get("/v1/secret")
    assert answer.status_code == 401


@pytest.mark.parametrize("header", ["", "Bearer", "Basic owner-token", "owner-token"])
async def test_other_headers_prove_nothing(broker: Any, header: str) -> None:
    answer = await broker.client(None).get("/v1/whoami", headers={"Authorization": header})
    assert answer.status_code == 401


async def test_an_unauthenticated_upload_leaves_nothing(broker: Any, tmp_path: Any) -> None:
    for path in (f"/v1/blobs/{'0' * 64}", f"/v1/packages/{'0' * 64}"):
        answer = await broker.client(None).put(path, content=b"x" * 1_000_000)
        assert answer.status_code == 401
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []


async def _open(client: httpx.AsyncClient, tag: str) -> dict[str, Any]:
    answer = await client.post("/v1/sessions", json={"lease_tag": tag, "client_id": "c"})
    assert answer.status_code == 200, answer.text
    opened: dict[str, Any] = answer.json()
    return opened


async def test_a_session_token_names_caller_and_session(
    broker: Any, client: httpx.AsyncClient
) -> None:
    token = (await _open(client, "nb/1"))["token"]
    session = broker.client(token)
    who = (await session.get("/v1/whoami")).json()
    assert (who["caller"], who["session"]) == ("ada", "nb/1")
    job = (await session.post("/v1/jobs", json={"kind": "cell", "code": "1"})).json()
    assert job["lease_tag"] == "nb/1", "the token's session is the job's"
    assert (await session.get("/v1/sessions/nb%2F1")).json()["lease_tag"] == "nb/1"
    assert (await _open(session, "nb/1"))["token"] == token, "registering again keeps it"


async def test_a_session_token_does_not_end_the_broker(
    broker: Any, client: httpx.AsyncClient
) -> None:
    session = broker.client((await _open(client, "nb"))["token"])
    answer = await session.post("/v1/shutdown", json={})
    assert (answer.status_code, answer.json()["error"]["class"]) == (403, "Forbidden")
    assert broker.service.shutdowns == []
    assert (await client.post("/v1/shutdown", json={"drain": False})).status_code == 202
    assert broker.service.shutdowns == [False]


async def test_another_caller_sees_and_touches_nothing(
    broker: Any, client: httpx.AsyncClient
) -> None:
    mine = (await client.post("/v1/jobs", json={"kind": "cell", "code": "1", "id": "mine"})).json()
    await _open(client, "nb")
    stranger = broker.client(await broker.parts.authenticator.session_token("eve", "hers"))
    assert (await stranger.get("/v1/jobs")).json() == {"jobs": []}
    assert (await stranger.get("/v1/sessions")).json() == {"sessions": []}
    for method, path in (
        ("GET", f"/v1/jobs/{mine['id']}"),
        ("GET", f"/v1/jobs/{mine['id']}/output"),
        ("POST", f"/v1/jobs/{mine['id']}/cancel"),
        ("POST", f"/v1/jobs/{mine['id']}/interrupt"),
        ("GET", "/v1/sessions/nb"),
        ("GET", "/v1/sessions/nb/stream?client_id=c"),
        ("DELETE", "/v1/sessions/nb"),
        ("POST", "/v1/sessions/nb/release"),
    ):
        assert (await stranger.request(method, path)).status_code == 404
    taken = await stranger.post("/v1/jobs", json={"kind": "cell", "code": "2", "id": "mine"})
    assert taken.status_code == 409
    assert "job" not in taken.json()["error"]


async def test_a_goodbye_revokes_the_token(broker: Any, client: httpx.AsyncClient) -> None:
    session = broker.client((await _open(client, "nb"))["token"])
    assert (await session.delete("/v1/sessions/nb?how=later")).status_code == 400
    assert (await session.delete("/v1/sessions/nb?how=restart")).status_code == 200
    assert (await session.get("/v1/whoami")).status_code == 200
    assert (await session.delete("/v1/sessions/nb?client_id=c")).status_code == 200
    assert (await session.get("/v1/whoami")).status_code == 401


async def test_a_token_outlives_the_broker(broker: Any, client: httpx.AsyncClient) -> None:
    token = (await _open(client, "nb"))["token"]
    after_restart = Authenticator(
        broker.service.store,
        secret=b"s" * 32,
        owner_token="new",
        owner_caller="ada",
        clock=lambda: 0.0,
    )
    assert after_restart.cached(f"Bearer {token}") is None
    identity = await after_restart.authenticate(f"Bearer {token}")
    assert identity is not None
    assert identity.session == "nb"
    assert after_restart.cached(f"Bearer {token}") == identity


async def test_start_up_hooks_of_a_captured_environment_are_left_out(
    broker: Any, client: httpx.AsyncClient
) -> None:
    env = {"HOME": "/h", "LD_PRELOAD": "x", "PYTHONSTARTUP": "y", "SSH_AUTH_SOCK": "/s"}
    body = {"lease_tag": "nb", "client_id": "c", "env": env}
    assert (await client.post("/v1/sessions", json=body)).status_code == 200
    assert broker.service.requests[-1].env == {"HOME": "/h", "SSH_AUTH_SOCK": "/s"}
