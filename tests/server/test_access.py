"""Who gets through: every route and method, under an odd base URL, with XSRF on."""

from __future__ import annotations

import httpx
import pytest
from jupyter_server.auth import Authorizer

from firepool_nb.server.handlers import ROUTES

PATHS = {
    r"/firepool/about": "about",
    r"/firepool/start": "start",
    r"/firepool/(v1/.+|healthz|metrics)": "v1/jobs/x",
}
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"]


def test_the_table_of_paths_covers_every_route():
    assert set(PATHS) == {route[0] for route in ROUTES}


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("header", [{}, {"Authorization": "token wrong"}])
def test_nobody_gets_in_without_the_token(run, http, url, embedded, scripted, path, method, header):
    response = run(http.request(method, url(path), headers=header))
    assert response.status_code in {403, 405}
    assert scripted.requests == []
    assert embedded.starts == 0
    assert "owner-token" not in response.text


class NothingAllowed(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        assert resource == "firepool"
        handler.settings["asked"].append(action)
        return False


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("GET", "about", "read"),
        ("POST", "start", "write"),
        ("GET", "v1/pools", "read"),
        ("HEAD", "v1/blobs/x", "read"),
        ("POST", "v1/jobs", "write"),
        ("PUT", "v1/blobs/x", "write"),
        ("DELETE", "v1/sessions/x", "write"),
    ],
)
def test_the_server_decides_who_may_do_what(
    run, http, url, token, jp_serverapp, embedded, scripted, method, path, action
):
    settings = jp_serverapp.web_app.settings
    settings["authorizer"] = NothingAllowed(parent=jp_serverapp)
    settings["asked"] = []
    response = run(http.request(method, url(path), headers=token))
    assert response.status_code == 403
    assert settings["asked"] == [action]
    assert scripted.requests == []


def test_cookies_need_the_xsrf_token_for_actions(run, http, url, token, jp_serverapp, embedded):
    async def scene():
        secret = token["Authorization"].removeprefix("token ")
        page = await http.get(url("about").replace("firepool/about", "login"))
        assert "_xsrf" in page.text  # the page has set the cookie
        await http.get(url("about"), params={"token": secret})  # logs in by cookie
        assert (await http.get(url("about"))).status_code == 200
        refused = await http.post(url("v1/jobs"), json={})
        assert refused.status_code == 403
        xsrf = http.cookies["_xsrf"]
        accepted = await http.post(url("v1/jobs"), json={}, headers={"X-XSRFToken": xsrf})
        assert accepted.status_code == 200
        assert accepted.json() == {"path": "/v1/jobs"}

    run(scene())


def test_a_long_body_is_not_taken_from_a_stranger(run, http, url, embedded, scripted):
    async def body():
        for _ in range(64):
            yield b"x" * 65536

    try:
        assert run(http.put(url("v1/blobs/abc"), content=body())).status_code == 403
    except httpx.TransportError:
        pass  # the server may hang up before a sender who does not look at the answer
    assert scripted.requests == []


@pytest.mark.parametrize("path", ["v1", "v2/jobs", "openapi.json", "docs", "v1x/jobs"])
def test_other_paths_of_the_broker_are_not_there(run, http, url, token, embedded, scripted, path):
    assert run(http.get(url(path), headers=token)).status_code == 404
    assert scripted.requests == []


@pytest.mark.parametrize("path", ["v1/%2e%2e/openapi.json", "v1/x/%2E%2e/y"])
def test_a_path_cannot_climb(run, http, url, token, embedded, scripted, path):
    response = run(http.get(url(path), headers=token))
    assert response.status_code == 400
    assert scripted.requests == []
