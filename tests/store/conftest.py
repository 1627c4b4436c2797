from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from firepool_broker.store.records import JobRow
from firepool_broker.store.store import Store


@pytest.fixture
def job() -> Callable[..., JobRow]:
    def make(job_id: str, **fields: Any) -> JobRow:
        values: dict[str, Any] = {
            "caller": "ada",
            "request": b'{"kind":"cell"}',
            "request_digest": "d",
            "kind": "cell",
            "queue": "default",
            "submitted_at": time.time(),
            **fields,
        }
        return JobRow(id=job_id, **values)

    return make


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(tmp_path / "broker.db")
    await opened.acquire_leadership("first", 30.0, time.time())
    yield opened
    await opened.close()
