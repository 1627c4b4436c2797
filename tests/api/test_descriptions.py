"""What the broker says about itself: OpenAPI, metrics, health, references made from the code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
from firepool_broker.api import types
from firepool_broker.api.application import ROUTES
from firepool_broker.api.handlers import Handler
from firepool_broker.docstrings import field_texts
from firepool_broker.metrics import FleetSnapshot
from firepool_broker.store.committer import CommitReport

_DOCS = Path(__file__).parents[2] / "docs"


def test_the_references_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", _DOCS / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.references().items():
        assert path.read_text(encoding="utf-8") == text, "run python docs/generate_reference.py"


async def test_the_served_document_is_the_written_one(client: httpx.AsyncClient) -> None:
    served = (await client.get("/openapi.json")).json()
    assert served == json.loads((_DOCS / "reference" / "openapi.json").read_text())


async def test_every_method_of_every_handler_is_described(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for route in ROUTES:
        declared = {method.lower() for method in route.handler.OPERATIONS}
        implemented = {
            method
            for method in ("get", "head", "post", "put", "delete", "patch", "options")
            if getattr(route.handler, method) is not getattr(Handler, method)
        }
        assert declared <= implemented, route.path
        assert implemented - declared <= {"get"}, "inherited, and refused in prepare"
        assert declared <= set(document["paths"][route.path])
    references = [
        part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]
    ]
    assert set(references) <= set(document["components"]["schemas"])
    request = document["components"]["schemas"]["JobRequest"]
    assert request["additionalProperties"] is False
    assert request["required"] == ["kind"]
    assert "same job" in request["properties"]["id"]["description"]


def test_every_field_of_a_request_has_a_text() -> None:
    for kind in vars(types).values():
        if isinstance(kind, type) and issubclass(kind, types.Request):
            assert set(field_texts(kind)) >= set(kind.__struct_fields__), kind


async def test_metrics(broker: Any, client: httpx.AsyncClient) -> None:
    metrics = broker.parts.metrics
    for path in ("warm", "warm", "new"):
        metrics.acquired(path, "no idle pod" if path == "new" else "")
    metrics.started("accept", 0.004)
    metrics.started("first_instruction", 90.0)
    metrics.reset(0.002, clean=True)
    metrics.reset(0.5, clean=False)
    metrics.hold_broken("ceiling")
    metrics.retired("hold expired")
    metrics.job_ended("FAILED", "OOM")
    metrics.committed(CommitReport(writes=7, lost=2, seconds=0.001))
    metrics.watch_fleet(
        lambda: FleetSnapshot(
            pods={("cpu", "IDLE"): 2},
            supply={("cpu", "routable"): 2},
            queue_length={"cpu": 3},
            queue_age_seconds={"cpu": 1.5},
        )
    )
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    text = answer.text
    for line in (
        'firepool_acquisitions_total{path="warm",reason=""} 2.0',
        'firepool_acquisitions_total{path="new",reason="no idle pod"} 1.0',
        'firepool_start_seconds_bucket{le="0.005",phase="accept"} 1.0',
        'firepool_start_seconds_bucket{le="60.0",phase="first_instruction"} 0.0',
        'firepool_start_seconds_bucket{le="+Inf",phase="first_instruction"} 1.0',
        'firepool_resets_total{result="clean"} 1.0',
        'firepool_resets_total{result="unclean"} 1.0',
        'firepool_holds_broken_total{reason="ceiling"} 1.0',
        'firepool_jobs_ended_total{error_class="OOM",state="FAILED"} 1.0',
        "firepool_double_runs_total 0.0",
        'firepool_pods{pool="cpu",state="IDLE"} 2.0',
        'firepool_queue_length{pool="cpu"} 3.0',
        'firepool_queue_age_seconds{pool="cpu"} 1.5',
    ):
        assert line in text, text
    for number in range(200):
        metrics.acquired("new", f"reason {number}")
    assert 'reason="other"' in (await client.get("/metrics")).text


async def test_health_and_readiness(broker: Any) -> None:
    stranger = broker.client(None)
    assert (await stranger.get("/healthz")).json() == {"status": "ok"}
    assert (await stranger.get("/readyz")).json() == {"status": "ready"}
    broker.service.is_ready = False
    assert (await stranger.get("/readyz")).status_code == 503


async def test_what_every_client_asks_first(client: httpx.AsyncClient) -> None:
    answer = msgspec.json.decode((await client.get("/v1/whoami")).content, type=types.Whoami)
    assert (answer.caller, answer.session, answer.broker.wire) == ("ada", None, 1)
    assert (await client.get("/v1/pools")).json() == {"pools": [], "default": None}
    assert (await client.get("/v1/pods")).json() == {"pods": []}
