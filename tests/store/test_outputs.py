from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from firepool_broker.api.types import StreamEvent
from firepool_broker.store.errors import OutputGap, StoreFull, StoreUnavailable
from firepool_broker.store.outputs import OutputStore
from hypothesis import given, settings
from hypothesis import strategies as st


def stream(number: int, text: str = "x") -> dict[str, Any]:
    return {"n": number, "type": "stream", "name": "stdout", "text": text}


async def numbers(events: AsyncIterator[StreamEvent]) -> list[int]:
    return [event.number async for event in events if event.number is not None]


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[OutputStore]:
    store = OutputStore(tmp_path / "outputs")
    yield store
    store.close()


# -- numbers -----------------------------------------------------------------------------------


async def test_numbers_go_on_over_attempts_and_own_messages(outputs: OutputStore) -> None:
    assert await outputs.append("j", [stream(0), stream(1)], attempt=1) == 2
    assert await outputs.append("j", [{"type": "divider", "text": "again"}]) == 3
    assert outputs.position("j", 1) == 2
    assert outputs.position("j", 2) == 0
    assert await outputs.append("j", [stream(0, "second")], attempt=2) == 4
    assert outputs.position("j", 2) == 1
    events = [event async for event in outputs.read("j")]
    assert [(event.number, event.event) for event in events] == [
        (0, "stream"),
        (1, "stream"),
        (2, "divider"),
        (3, "stream"),
    ]
    assert [json.loads(event.data)["n"] for event in events] == [0, 1, 2, 3]
    assert json.loads(events[3].data)["text"] == "second"


async def test_what_is_stored_already_is_skipped_and_a_gap_refused(outputs: OutputStore) -> None:
    await outputs.append("j", [stream(0), stream(1)], attempt=1)
    assert await outputs.append("j", [stream(0), stream(1), stream(2)], attempt=1) == 3
    with pytest.raises(OutputGap) as gap:
        await outputs.append("j", [stream(3), stream(5)], attempt=1)
    assert (gap.value.expected, gap.value.got) == (4, 5)
    assert outputs.position("j", 1) == 4
    assert await numbers(outputs.read("j")) == [0, 1, 2, 3]


async def test_a_message_cannot_forge_its_place(outputs: OutputStore) -> None:
    message = {"n": 0, "type": "stream", "attempt": 99, "taken": 10**6, "text": "\n\u2028\x00"}
    await outputs.append("j", [message], attempt=1)
    await outputs.append("j", [stream(1)], attempt=1)
    assert outputs.position("j", 1) == 2
    assert await numbers(outputs.read("j")) == [0, 1]


async def test_the_position_is_right_after_an_end_and_a_late_message(
    outputs: OutputStore,
) -> None:
    await outputs.append("j", [stream(0)], attempt=1)
    outputs.finish("j")
    before = outputs.summary("j")
    assert (before.next, before.bytes) == (1, outputs.summary("j").bytes)
    await outputs.append("j", [{"type": "note", "level": "info", "text": "late"}])
    assert outputs.summary("j").next == 2
    outputs.finish("j")
    assert outputs.summary("j").next == 2
    assert await numbers(outputs.read("j")) == [0, 1]


def test_a_job_id_that_leaves_the_folder_is_refused(outputs: OutputStore) -> None:
    for job_id in ("../x", "a/b", "", ".hidden", "x" * 65):
        with pytest.raises(StoreUnavailable, match="not a job id"):
            outputs.position(job_id, 1)


# -- restarts ----------------------------------------------------------------------------------


async def test_a_new_store_goes_on_where_the_old_one_stopped(tmp_path: Path) -> None:
    first = OutputStore(tmp_path)
    await first.append("j", [stream(i) for i in range(1000)], attempt=1)
    await first.append("j", [{"type": "note", "level": "info", "text": "own"}])
    first.close()
    second = OutputStore(tmp_path)
    assert second.position("j", 1) == 1000
    assert second.summary("j").next == 1001
    assert await second.append("j", [stream(1000)], attempt=1) == 1002
    assert await numbers(second.read("j", 998)) == [998, 999, 1000, 1001]
    second.close()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    cut=st.integers(0, 10**6),
    garbage=st.binary(max_size=40),
)
def test_a_torn_tail_is_cut_off_and_nothing_else(
    sizes: list[int], cut: int, garbage: bytes
) -> None:
    async def check(folder: Path) -> None:
        store = OutputStore(folder)
        await store.append("j", [stream(i, "é" * size) for i, size in enumerate(sizes)], attempt=1)
        store.close()
        path = folder / "j.ndjson"
        whole = path.read_bytes()
        kept = whole[: cut % (len(whole) + 1)]
        path.write_bytes(kept + garbage.replace(b"\n", b""))
        lines = kept.count(b"\n")
        store = OutputStore(folder)
        assert store.summary("j").next == lines
        assert store.position("j", 1) == lines
        rest = [stream(i, "again") for i in range(lines, len(sizes) + 2)]
        assert await store.append("j", rest, attempt=1) == len(sizes) + 2
        events = [event async for event in store.read("j")]
        assert [event.number for event in events] == list(range(len(sizes) + 2))
        assert [json.loads(event.data)["n"] for event in events] == list(range(len(sizes) + 2))
        store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Path(folder)))


_WRITER = """
import asyncio, os, sys
from pathlib import Path
from firepool_broker.store.outputs import OutputStore

async def main():
    store = OutputStore(Path(sys.argv[1]))
    number = store.position("j", 1)
    while True:
        batch = [{"n": number + i, "type": "stream", "text": "x" * 300} for i in range(25)]
        await store.append("j", batch, attempt=1)
        number += 25
        os.write(1, f"{number}\\n".encode())

asyncio.run(main())
"""


async def test_a_killed_broker_loses_no_acknowledged_message(tmp_path: Path) -> None:
    for lines in (20, 41):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(lines):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines(keepends=True)
        acknowledged = max([acknowledged, *(int(line) for line in rest if line.endswith(b"\n"))])
        process.wait()
        process.stdout.close()
        store = OutputStore(tmp_path)
        stored = store.summary("j").next
        assert acknowledged <= stored <= acknowledged + 50
        assert store.position("j", 1) == stored
        assert await numbers(store.read("j")) == list(range(stored))
        store.close()


# -- followers ---------------------------------------------------------------------------------


async def test_followers_at_every_place_see_everything_once(outputs: OutputStore) -> None:
    starts = [0, 0, 7, 250, 499, 500]
    following = [asyncio.ensure_future(numbers(outputs.follow("j", start))) for start in starts]
    await asyncio.sleep(0)
    for batch in range(50):
        messages = [stream(batch * 10 + i, "y" * 2000) for i in range(10)]
        await outputs.append("j", messages, attempt=1)
        if batch == 25:
            following.append(asyncio.ensure_future(numbers(outputs.follow("j", 3))))
    outputs.finish("j")
    for start, seen in zip([*starts, 3], await asyncio.gather(*following), strict=True):
        assert seen == list(range(start, 500))


async def test_a_slow_follower_delays_nobody_and_misses_nothing(outputs: OutputStore) -> None:
    slow = outputs.follow("j")
    await outputs.append("j", [stream(0)], attempt=1)
    assert (await anext(slow)).number == 0
    fast = asyncio.ensure_future(numbers(outputs.follow("j")))
    for batch in range(40):  # far more than is kept in memory
        messages = [stream(1 + batch * 10 + i, "z" * 10_000) for i in range(10)]
        await outputs.append("j", messages, attempt=1)
    outputs.finish("j")
    assert await fast == list(range(401))
    assert await numbers(slow) == list(range(1, 401))


async def test_events_reach_who_follows_now_and_only_the_last_of_a_kind(
    outputs: OutputStore,
) -> None:
    outputs.publish("j", "status", b"{}")  # nobody there: nothing to do
    follower = outputs.follow("j")
    waiting = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    for n in range(3):
        outputs.publish("j", "status", b"%d" % n)
    outputs.publish("j", "other", b"{}")
    events = [await waiting, await anext(follower)]
    assert [(event.event, event.data) for event in events] == [("status", b"2"), ("other", b"{}")]
    outputs.publish("j", "status", b"last")
    outputs.finish("j")
    assert [event.data async for event in follower] == [b"last"]


async def test_a_message_is_seen_before_its_sync_is_over(
    outputs: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_sync(_descriptor: int) -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(timeout=10)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    follower = outputs.follow("j")
    first = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    append = asyncio.ensure_future(outputs.append("j", [stream(0)], attempt=1))
    assert (await first).number == 0
    assert not append.done()
    gate.set()
    assert await append == 1
    await follower.aclose()  # type: ignore[attr-defined]


# -- large files, caps, full disks, retention --------------------------------------------------


async def test_reading_resumes_anywhere_in_a_large_file_without_reading_all(
    tmp_path: Path,
) -> None:
    store = OutputStore(tmp_path)
    for batch in range(60):
        await store.append(
            "j", [stream(batch * 500 + i, "w" * 1000) for i in range(500)], attempt=1
        )
    store.close()
    assert (tmp_path / "j.ndjson").stat().st_size > 30_000_000
    store = OutputStore(tmp_path)
    started = time.process_time()
    assert store.summary("j").next == 30_000
    assert time.process_time() - started < 0.05, "only the tail is read"
    for start in (1, 14_999, 29_990):
        events = store.read("j", start)
        assert [(await anext(events)).number for _ in range(10)] == list(range(start, start + 10))
        await events.aclose()  # type: ignore[attr-defined]
    assert await numbers(store.read("j", 30_000)) == []
    assert await numbers(store.read("unknown")) == []
    assert store.summary("unknown").next == 0


async def test_the_cap_holds_and_keeps_what_explains(tmp_path: Path) -> None:
    store = OutputStore(tmp_path, limit_bytes=10_000)
    await store.append("j", [stream(i, "x" * 1000) for i in range(20)], attempt=1)
    await store.append("j", [{"n": 20, "type": "error", "ename": "E"}], attempt=1)
    summary = store.summary("j")
    assert summary.bytes < 11_000
    assert summary.dropped_bytes > 9_000
    assert store.position("j", 1) == 21, "what was dropped is not asked for again"
    events = [event async for event in store.read("j")]
    assert [event.number for event in events] == list(range(len(events)))
    assert events[-1].event == "error"
    store.close()


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_is_named_and_leaves_whole_lines(outputs: OutputStore) -> None:
    await outputs.append("j", [stream(0)], attempt=1)
    messages = [stream(1, "x" * 60_000), stream(2, "x" * 60_000)]
    with file_size_limit(70_000), pytest.raises(StoreFull, match="free some"):
        await outputs.append("j", messages, attempt=1)
    assert outputs.position("j", 1) == 1
    assert await outputs.append("j", messages, attempt=1) == 3
    assert await numbers(outputs.read("j")) == [0, 1, 2]


async def test_old_outputs_go_and_those_of_unfinished_jobs_stay(tmp_path: Path) -> None:
    store = OutputStore(tmp_path)
    for job_id in ("old", "kept", "open", "young"):
        await store.append(job_id, [stream(0)], attempt=1)
        if job_id != "open":
            store.finish(job_id)
    now = time.time()
    for job_id in ("old", "kept", "open"):
        os.utime(tmp_path / f"{job_id}.ndjson", (now - 900, now - 900))
    assert store.sweep(now, 800.0, {"kept"}) == ["old"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["kept", "open", "young"]
    assert await numbers(store.read("old")) == []
    store.close()
