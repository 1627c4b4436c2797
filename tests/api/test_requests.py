"""What a caller may get wrong, and what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from firepool_broker.api import types, variables

MakeCell = Callable[..., dict[str, Any]]

_SHA = "0" * 64


async def refusal(client: httpx.AsyncClient, body: Any, path: str = "/v1/jobs") -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await client.post(path, content=content)
    assert 400 <= answer.status_code < 500, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) <= {"class", "message", "field", "retry_after", "job"}
    assert error["message"]
    return {"status": answer.status_code, **error}


async def test_a_misspelt_field_is_named_with_the_right_one(
    client: httpx.AsyncClient, cell: MakeCell
) -> None:
    error = await refusal(client, cell(lease_tga="nb"))
    assert error["class"] == "UnknownField"
    assert error["field"] == "lease_tga"
    assert error["message"] == "unknown field 'lease_tga'; did you mean 'lease_tag'?"


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"kind": "cell", "code": "1", "shape": {"gup": "h200"}}, "shape.gup", "'gpu'"),
        ({"kind": "zell"}, "kind", "did you mean 'cell'"),
        ({"code": "1"}, "kind", "missing"),
        ({"kind": "cell"}, "code", "needs code"),
        ({"kind": "command"}, "argv", "either argv or shell"),
        ({"kind": "command", "argv": ["a"], "shell": "b"}, "argv", "either"),
        ({"kind": "command", "argv": []}, "argv", "empty"),
        ({"kind": "command", "shell": "a\0b"}, "shell", "NUL"),
        ({"kind": "call"}, "inputs", "exactly one"),
        ({"kind": "cell", "code": "1", "shell": "x"}, "shell", "belongs to a command"),
        ({"kind": "cell", "code": 5}, "code", "expected `str"),
        ({"kind": "cell", "code": "1", "id": "../x"}, "id", "letters"),
        ({"kind": "cell", "code": "1", "id": ""}, "id", "letters"),
        ({"kind": "cell", "code": "1", "queue": ""}, "queue", "printable"),
        ({"kind": "cell", "code": "1", "lease_tag": "a\nb"}, "lease_tag", "printable"),
        ({"kind": "cell", "code": "1", "name": "x" * 300}, "name", "255"),
        ({"kind": "cell", "code": "1", "timeout_seconds": 0}, "timeout_seconds", "above 0"),
        ({"kind": "cell", "code": "1", "timeout_seconds": -1.5}, "timeout_seconds", "above 0"),
        ({"kind": "cell", "code": "1", "priority": 101}, "priority", "-100 and 100"),
        ({"kind": "cell", "code": "1", "max_retries": -1}, "max_retries", "within"),
        ({"kind": "cell", "code": "1", "pods": 0}, "pods", "within"),
        ({"kind": "cell", "code": "1", "sku": "a", "shape": {}}, "shape", "not both"),
        ({"kind": "cell", "code": "1", "shape": {"cpu": 0}}, "shape.cpu", "above 0"),
        ({"kind": "cell", "code": "1", "package": "abc"}, "package", "SHA-256"),
        ({"kind": "cell", "code": "1", "cwd": "relative"}, "cwd", "absolute"),
        ({"kind": "cell", "code": "1", "cwd": "/does/not/exist"}, "cwd", "is not there"),
        ({"kind": "cell", "code": "1", "cwd": "/etc/passwd"}, "cwd", "is not a folder"),
        ({"kind": "cell", "code": "1", "cwd": "/" + "a" * 5000}, "cwd", "is not there"),
        ({"kind": "cell", "code": "1", "line_offset": 1_000_001}, "line_offset", "1000000"),
        (
            {"kind": "cell", "code": "1", "inputs": [{"kind": "value", "format": "json"}]},
            "inputs[0]",
            "either data or blob",
        ),
        (
            {
                "kind": "cell",
                "code": "1",
                "inputs": [{"kind": "value", "format": "json", "data": "", "name": "a b"}],
            },
            "inputs[0].name",
            "Python accepts",
        ),
        (
            {
                "kind": "cell",
                "code": "1",
                "inputs": [{"kind": "value", "format": "json", "data": "!!!!", "name": "x"}],
            },
            "inputs[0].data",
            "not base64",
        ),
        ([], None, "expected `object`"),
        (b"{", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b'{"kind": "\xff"}', None, "not JSON"),
        (b'{"kind":' + b"[" * 5000, "kind", ""),
        (b'{"kind":"cell","code":"\\ud800"}', None, "not JSON"),
        (b'{"kind":"cell","code":"1","priority":1e400}', "priority", ""),
        (b'{"kind":"cell","code":"1","priority":99999999999999999999}', "priority", ""),
        (b'{"kind":"cell","code":"1","timeout_seconds":NaN}', None, "not JSON"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, body: Any, field: str | None, said: str
) -> None:
    error = await refusal(client, body)
    assert error.get("field") == field
    assert said in error["message"]


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTHONSTARTUP",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONBREAKPOINT",
        "CUDA_DEVICE_MEMORY_LIMIT_0",
        "CUDA_DEVICE_SM_LIMIT",
        "NVIDIA_VISIBLE_DEVICES",
        "FIREPOOL_JOB",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "PET_RDZV_ID",
        "TORCHELASTIC_RUN_ID",
        "RAY_ADDRESS",
        "A=B",
        "A\0B",
        "",
    ],
)
async def test_a_variable_that_is_not_the_jobs_is_refused_by_name(
    client: httpx.AsyncClient, cell: MakeCell, name: str
) -> None:
    error = await refusal(client, cell(env={name: "1"}))
    assert error["class"] == "InvalidRequest"
    assert repr(name) in error["message"] or not name
    assert error["field"].startswith("env")


async def test_ordinary_variables_pass(client: httpx.AsyncClient, cell: MakeCell) -> None:
    env = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "PATH": "/bin", "HF_TOKEN": "x"}
    answer = await client.post("/v1/jobs", json=cell(env=env))
    assert answer.status_code == 201
    assert not any(map(variables.is_protected, env))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("live", True),
        ("pods", 2),
        ("launcher", "torchrun"),
        ("image", "sha256:abc"),
        ("secrets", ["token"]),
    ],
)
async def test_what_nothing_serves_yet_says_so(
    client: httpx.AsyncClient, cell: MakeCell, field: str, value: Any
) -> None:
    error = await refusal(client, cell(**{field: value}))
    assert (error["status"], error["class"], error["field"]) == (422, "NotAvailable", field)
    assert "not available on this pool" in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/v1/jobs?stat=QUEUED", 400, "stat"),
        ("/v1/jobs?state=queued", 400, "state"),
        ("/v1/jobs?limit=0", 400, "limit"),
        ("/v1/jobs?limit=1_0", 400, "limit"),
        ("/v1/jobs?limit=٣", 400, "limit"),
        ("/v1/jobs/none", 404, None),
        ("/v1/jobs/none/output", 404, None),
        ("/v1/jobs/none/output?from=-1", 400, "from"),
        ("/v1/jobs/none/output?from=9" + "9" * 30, 400, "from"),
        ("/v1/jobs/%FF", 400, None),
        ("/v1/jobs?state=%FF", 400, None),
        ("/v1/sessions/none", 404, None),
        ("/v1/sessions/none/stream", 400, "client_id"),
        ("/v1/sessions/none/stream?client_id=c", 404, None),
        ("/v1/blobs/abc", 400, None),
        (f"/v1/blobs/{_SHA}", 404, None),
        (f"/v1/packages/{_SHA}", 405, None),
        ("/v1/nothing", 404, None),
        ("/v1/jobs/", 404, None),
        ("/", 404, None),
    ],
)
async def test_lookups_that_find_nothing(
    client: httpx.AsyncClient, path: str, status: int, field: str | None
) -> None:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].get("field") == field


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_a_method_that_does_not_exist_is_refused(
    client: httpx.AsyncClient, method: str
) -> None:
    answer = await client.request(method, "/v1/jobs")
    assert answer.status_code == 405
    if method != "TRACE":
        assert answer.json()["error"]["class"] in ("MethodNotAllowed", "BadRequest")


async def test_raw_garbage_never_costs_the_broker(broker: Any, client: httpx.AsyncClient) -> None:
    for garbage in (
        b"\x00\xff\n\n",
        b"GET\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"PUT /v1/blobs/" + _SHA.encode() + b" HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc",
    ):
        reader, writer = await asyncio.open_unix_connection(str(broker.socket))
        writer.write(garbage)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), timeout=10)
        assert b" 500 " not in answer[:40]
        writer.close()
        await writer.wait_closed()
    assert (await client.get("/healthz")).status_code == 200


async def test_wrong_sessions_are_refused(client: httpx.AsyncClient) -> None:
    good: dict[str, Any] = {"lease_tag": "nb", "client_id": "c"}
    environment = {
        "executable": "/usr/bin/python",
        "prefix": "/usr",
        "base_prefix": "/usr",
        "version": "3.11.7",
        "digest": "ab",
    }
    for body, field in (
        ({"client_id": "c"}, "lease_tag"),
        ({**good, "lease_tag": ""}, "lease_tag"),
        ({**good, "lease_tag": "x\x7f"}, "lease_tag"),
        ({**good, "cwd": "."}, "cwd"),
        ({**good, "env": {"A=B": "1"}}, "env"),
        (
            {**good, "environment": {**environment, "executable": "python"}},
            "environment.executable",
        ),
        ({**good, "environment": {**environment, "digest": "../x"}}, "environment.digest"),
        ({**good, "environment": {**environment, "digset": "x"}}, "environment.digset"),
    ):
        error = await refusal(client, body, "/v1/sessions")
        assert error["field"] == field


_NASTY = (
    None,
    True,
    -1,
    0,
    2**63,
    1.5,
    1e308,
    "",
    "\0",
    "../../etc/passwd",
    "x" * 5000,
    "\U0001f525\u202e",
    "\r\nX: y",
    [],
    [None],
    [[]],
    {},
    {"": ""},
    {"a": {"b": {}}},
    [{"kind": "value", "format": "json", "name": "x", "data": "%%%"}],
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/jobs", types.JobRequest),
        ("/v1/sessions", types.SessionRequest),
        ("/v1/shutdown", types.ShutdownRequest),
        ("/v1/jobs/none/interrupt", types.InterruptRequest),
        ("/v1/jobs/none/cancel", types.Empty),
    ],
)
async def test_no_value_of_any_field_costs_the_broker(broker: Any, path: str, kind: Any) -> None:
    good = {"kind": "cell", "code": "1"} if kind is types.JobRequest else {}
    if kind is types.SessionRequest:
        good = {"lease_tag": "nb", "client_id": "c"}
    async with broker.connection() as connection:
        for field in (*kind.__struct_fields__, "unknown"):
            for value in _NASTY:
                status, answer = await connection.post(path, {**good, field: value})
                assert status < 500, (field, value, answer)
                if status >= 400:
                    assert answer["error"]["message"]
                    assert answer["error"]["class"] not in ("BadRequest", "InternalError")
