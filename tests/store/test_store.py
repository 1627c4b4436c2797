from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from firepool_broker.store import prebuilt
from firepool_broker.store.committer import GROUP_LIMIT, CommitReport, Committer
from firepool_broker.store.database import Database
from firepool_broker.store.errors import (
    IdempotencyConflict,
    LeadershipHeld,
    LeadershipLost,
    SchemaTooNew,
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from firepool_broker.store.records import JobChange, JobRow, Launch, SessionRow
from firepool_broker.store.store import Store
from firepool_broker.store.writes import InsertJob

MakeJob = Callable[..., JobRow]


def launch(job_id: str, version: int = 1, attempt: int = 1, uid: str = "u1") -> Launch:
    return Launch(
        job_id=job_id,
        version=version,
        attempt=attempt,
        pods=[(f"pod-{uid}", uid)],
        path="warm",
        reason="",
        claimed_at=1.0,
        committed_at=2.0,
    )


# -- idempotency -------------------------------------------------------------------------------


async def test_the_same_request_gives_the_same_job(store: Store, job: MakeJob) -> None:
    first = await store.insert_job(job("a"), idempotency_key="k")
    again = await store.insert_job(job("b"), idempotency_key="k")
    by_id = await store.insert_job(job("a"))
    assert (first[1], again[1], by_id[1]) == (True, False, False)
    assert {row.id for row, _ in (first, again, by_id)} == {"a"}
    assert await store.get_job("b") is None


async def test_another_request_under_the_same_key_or_id_is_refused(
    store: Store, job: MakeJob
) -> None:
    await store.insert_job(job("a"), idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match="different request") as by_key:
        await store.insert_job(job("b", request_digest="other"), idempotency_key="k")
    assert by_key.value.job_id == "a"
    with pytest.raises(IdempotencyConflict, match="'a'"):
        await store.insert_job(job("a", request_digest="other"))
    with pytest.raises(IdempotencyConflict) as taken:
        await store.insert_job(job("a", caller="eve"))
    assert taken.value.job_id is None, "another caller's job is not told"


async def test_a_key_belongs_to_its_caller(store: Store, job: MakeJob) -> None:
    await store.insert_job(job("a"), idempotency_key="k")
    _, created = await store.insert_job(job("b", caller="eve"), idempotency_key="k")
    assert created


async def test_retries_in_one_group_make_one_job(store: Store, job: MakeJob) -> None:
    results = await asyncio.gather(
        *(store.insert_job(job(f"j{i}"), idempotency_key="k") for i in range(50))
    )
    assert sum(created for _, created in results) == 1
    assert len({row.id for row, _ in results}) == 1
    assert len(await store.list_jobs()) == 1


# -- conditional commits -----------------------------------------------------------------------


async def test_exactly_the_losers_of_a_group_are_reported(store: Store, job: MakeJob) -> None:
    await asyncio.gather(*(store.insert_job(job(f"j{i:03}")) for i in range(200)))
    lost = {f"j{i:03}" for i in range(0, 200, 7)}
    for job_id in lost:
        assert await store.commit_transition(job_id, 1, "CANCELLED")
    results = await asyncio.gather(*(store.commit_launch(launch(f"j{i:03}")) for i in range(200)))
    assert {f"j{i:03}" for i, won in enumerate(results) if not won} == lost
    bound = await store.bindings_of_jobs(f"j{i:03}" for i in range(200))
    assert set(bound) == {f"j{i:03}" for i in range(200)} - lost


async def test_of_two_launches_of_one_job_one_wins(store: Store, job: MakeJob) -> None:
    await store.insert_job(job("a"))
    won = await asyncio.gather(
        store.commit_launch(launch("a", uid="u1")), store.commit_launch(launch("a", uid="u2"))
    )
    assert won == [True, False]
    assert set(await store.bindings_by_pod_uid(["u1", "u2"])) == {"u1"}


async def test_a_launch_binds_pods_to_the_jobs_owner(store: Store, job: MakeJob) -> None:
    await store.insert_job(job("a", lease_tag="nb", queue="q"))
    await store.commit_launch(launch("a"))
    row = await store.get_job("a")
    assert row is not None
    assert (row.state, row.version, row.attempt) == ("RUNNING", 2, 1)
    binding = (await store.bindings_by_pod_uid(["u1"]))["u1"]
    assert (binding.caller, binding.lease_tag, binding.queue) == ("ada", "nb", "q")
    await store.commit_transition("a", 2, "QUEUED", JobChange(infra_retries=1))
    await store.commit_launch(launch("a", version=3, attempt=2, uid="u2"))
    assert [b.pod_uid for b in (await store.bindings_of_jobs(["a"]))["a"]] == ["u2"]


async def test_a_transition_changes_only_what_it_names(store: Store, job: MakeJob) -> None:
    await store.insert_job(job("a", sku="cpu", queued_at=5.0))
    change = JobChange(exit_code=3, error=b'{"class":"Signal"}', queued_at=None, ended_at=9.5)
    assert await store.commit_transition("a", 1, "FAILED", change)
    row = await store.get_job("a")
    assert row is not None
    assert (row.state, row.version, row.exit_code, row.sku) == ("FAILED", 2, 3, "cpu")
    assert (row.queued_at, row.ended_at, row.attached) == (None, 9.5, True)
    assert not await store.commit_transition("a", 1, "QUEUED")
    assert not await store.commit_transition("missing", 1, "QUEUED")


# -- leadership --------------------------------------------------------------------------------


async def test_nothing_is_written_without_leadership(tmp_path: Path, job: MakeJob) -> None:
    store = await Store.open(tmp_path / "b.db")
    with pytest.raises(LeadershipLost):
        await store.insert_job(job("a"))
    assert await store.list_jobs() == []
    await store.close()


async def test_a_deposed_leader_writes_nothing(store: Store, tmp_path: Path, job: MakeJob) -> None:
    await store.insert_job(job("a"))
    second = await Store.open(tmp_path / "broker.db")
    with pytest.raises(LeadershipHeld, match="first"):
        await second.acquire_leadership("second", 30.0, time.time())
    taken = await second.acquire_leadership("second", 30.0, time.time(), predecessor_is_dead=True)
    assert taken == 2
    for write in (
        store.insert_job(job("b")),
        store.commit_launch(launch("a")),
        store.commit_transition("a", 1, "CANCELLED"),
        store.renew_leadership(30.0, time.time()),
    ):
        with pytest.raises(LeadershipLost):
            await write
    assert [row.id for row in await second.list_jobs()] == ["a"]
    assert await second.commit_launch(launch("a"))
    await second.close()


async def test_a_lease_that_ran_out_is_taken(store: Store, tmp_path: Path) -> None:
    second = await Store.open(tmp_path / "broker.db")
    assert await second.acquire_leadership("second", 30.0, time.time() + 31) == 2
    await second.renew_leadership(30.0, time.time())
    assert second.epoch == 2
    await second.close()


# -- groups ------------------------------------------------------------------------------------


class SlowDatabase(Database):
    """A real database whose commits take a while."""

    def run(self, name: str, parameters: Any) -> int:
        time.sleep(0.0005)
        return super().run(name, parameters)


class PoisonedDatabase(Database):
    """A real database that fails for one job after it has written for it."""

    def run(self, name: str, parameters: Any) -> int:
        changed = super().run(name, parameters)
        if parameters.get("id") == "poison":
            raise sqlite3.OperationalError("disk I/O error")
        return changed


async def _committer(
    database: Database, on_commit: Callable[[CommitReport], None] | None = None
) -> Committer:
    from firepool_broker.store.writes import AcquireLeadership

    database.ensure_schema()
    committer = Committer(database, time.monotonic, on_commit)
    await committer.submit(AcquireLeadership("x", 30.0, time.time(), False))
    return committer


async def test_what_queued_during_a_commit_shares_the_next(tmp_path: Path, job: MakeJob) -> None:
    reports: list[CommitReport] = []
    committer = await _committer(SlowDatabase(tmp_path / "b.db"), reports.append)
    reports.clear()
    await asyncio.gather(*(committer.submit(InsertJob(job(f"j{i}"), None)) for i in range(600)))
    assert sum(report.writes for report in reports) == 600
    assert max(report.writes for report in reports) == GROUP_LIMIT
    assert len(reports) < 10
    await committer.close()


async def test_a_write_that_fails_costs_only_itself(tmp_path: Path, job: MakeJob) -> None:
    committer = await _committer(PoisonedDatabase(tmp_path / "b.db"))
    names = [*(f"j{i}" for i in range(20)), "poison", *(f"k{i}" for i in range(20))]
    results = await asyncio.gather(
        *(committer.submit(InsertJob(job(name), None)) for name in names), return_exceptions=True
    )
    failed = [
        name
        for name, result in zip(names, results, strict=True)
        if isinstance(result, BaseException)
    ]
    assert failed == ["poison"]
    await committer.close()
    rows = sqlite3.connect(tmp_path / "b.db").execute("SELECT id FROM jobs").fetchall()
    assert {row[0] for row in rows} == set(names) - {"poison"}


async def test_a_waiter_that_gives_up_disturbs_nobody(store: Store, job: MakeJob) -> None:
    writes = [asyncio.ensure_future(store.insert_job(job(f"j{i}"))) for i in range(20)]
    await asyncio.sleep(0)
    writes[3].cancel()
    await asyncio.gather(*writes, return_exceptions=True)
    assert len(await store.list_jobs()) == 20


async def test_closing_commits_what_is_queued(tmp_path: Path, job: MakeJob) -> None:
    store = await Store.open(tmp_path / "b.db")
    await store.acquire_leadership("x", 30.0, time.time())
    writes = [asyncio.ensure_future(store.insert_job(job(f"j{i}"))) for i in range(300)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    with pytest.raises(StoreClosed):
        await store.insert_job(job("late"))
    with pytest.raises(StoreClosed):
        await store.list_jobs()
    assert [path.name for path in tmp_path.iterdir()] == ["b.db"], "the log is folded in"


async def test_ten_thousand_submits_in_a_burst_are_all_there(store: Store, job: MakeJob) -> None:
    results = await asyncio.gather(*(store.insert_job(job(f"j{i}")) for i in range(10_000)))
    assert all(created for _, created in results)
    assert len(await store.unfinished_jobs()) == 10_000


async def test_the_log_is_folded_in_when_nothing_waits(
    store: Store, tmp_path: Path, job: MakeJob
) -> None:
    log = tmp_path / "broker.db-wal"
    big = [job(f"j{i}", request=b"x" * 100_000) for i in range(100)]
    await asyncio.gather(*map(store.insert_job, big))
    assert log.stat().st_size > 8_000_000
    for number in range(200):  # a write now and then; the checkpoint comes in between
        await store.insert_job(job(f"k{number}"))
        if log.stat().st_size < 2_000_000:
            break
        await asyncio.sleep(0.05 if number else 1.0)
    assert log.stat().st_size < 2_000_000
    assert len(await store.unfinished_jobs()) > 100


# -- queries -----------------------------------------------------------------------------------


async def test_jobs_are_listed_newest_first_and_page_by_page(store: Store, job: MakeJob) -> None:
    for i in range(10):
        # two at a time share a moment: the id decides between them
        await store.insert_job(job(f"j{i}", submitted_at=float(i // 2), lease_tag=f"t{i % 2}"))
    await store.insert_job(job("other", caller="eve", submitted_at=99.0))
    seen: list[str] = []
    before = None
    while page := await store.list_jobs(caller="ada", limit=3, before=before):
        seen += [row.id for row in page]
        before = page[-1].id
    assert seen == [f"j{i}" for i in reversed(range(10))]
    assert [row.id for row in await store.list_jobs(lease_tag="t1", limit=2)] == ["j9", "j7"]
    await store.commit_transition("j4", 1, "CANCELLED")
    assert [row.id for row in await store.list_jobs(state="CANCELLED")] == ["j4"]
    assert [row.id for row in await store.unfinished_jobs()][:5] == ["j0", "j1", "j2", "j3", "j5"]


async def test_old_jobs_go_with_their_keys_and_bindings(store: Store, job: MakeJob) -> None:
    await store.insert_job(job("old"), idempotency_key="k")
    await store.insert_job(job("young"))
    await store.commit_launch(launch("old"))
    await store.commit_transition("old", 2, "SUCCEEDED", JobChange(ended_at=100.0))
    assert await store.delete_jobs(ended_before=100.0) == []
    assert await store.delete_jobs(ended_before=100.5) == ["old"]
    assert await store.bindings_by_pod_uid(["u1"]) == {}
    _, created = await store.insert_job(job("new", request_digest="other"), idempotency_key="k")
    assert created


async def test_a_session_is_kept_renewed_ended_and_forgotten(store: Store) -> None:
    row = SessionRow(
        caller="ada",
        lease_tag="nb",
        client_id="c1",
        request=b"{}",
        session_dir="/s",
        created_at=1.0,
        expires_at=31.0,
    )
    await store.upsert_session(row)
    row.client_id = "c2"
    await store.upsert_session(row)
    await store.touch_sessions([("ada", "nb"), ("ada", "unknown")], 61.0)
    await store.put_token("digest", "ada", "nb", 1.0)
    await store.put_token("digest", "ada", "nb", 2.0)
    assert await store.token("digest") == ("ada", "nb")
    (stored,) = await store.sessions()
    assert (stored.client_id, stored.expires_at, stored.ended_at) == ("c2", 61.0, None)
    assert await store.end_session("ada", "nb", 70.0)
    assert not await store.end_session("ada", "nb", 71.0)
    assert await store.token("digest") is None, "a goodbye revokes the token"
    await store.delete_session("ada", "nb")
    assert await store.sessions() == []


# -- a database that is not as it should be ----------------------------------------------------


async def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    path.write_bytes(b"precious" * 1000)
    with pytest.raises(StoreCorrupt, match=r"b\.db"):
        await Store.open(path)
    assert path.read_bytes() == b"precious" * 1000


async def test_a_damaged_database_is_named(tmp_path: Path, job: MakeJob) -> None:
    store = await Store.open(tmp_path / "b.db")
    await store.acquire_leadership("x", 30.0, time.time())
    await asyncio.gather(*(store.insert_job(job(f"j{i}")) for i in range(500)))
    await store.close()
    data = bytearray((tmp_path / "b.db").read_bytes())
    data[4096 * 8 :] = os.urandom(len(data) - 4096 * 8)
    (tmp_path / "b.db").write_bytes(data)
    damaged = await Store.open(tmp_path / "b.db")
    with pytest.raises(StoreCorrupt, match="Move it aside"):
        await damaged.unfinished_jobs()
    await damaged.close()


async def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    await (await Store.open(tmp_path / "b.db")).close()
    with sqlite3.connect(tmp_path / "b.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(SchemaTooNew, match=f"9999.*{prebuilt.REVISION}"):
        await Store.open(tmp_path / "b.db")


async def test_an_older_schema_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: MakeJob
) -> None:
    from alembic import command
    from firepool_broker.store import migrations

    await (await Store.open(tmp_path / "b.db")).close()
    known = prebuilt.REVISION
    monkeypatch.setattr(prebuilt, "REVISION", "next")
    monkeypatch.setattr(prebuilt, "OLDER_REVISIONS", (known,))

    def upgrade(config: Any) -> None:
        command.upgrade(config, "head")
        connection = config.attributes["connection"]
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'next'")

    monkeypatch.setattr(migrations, "upgrade", upgrade)
    store = await Store.open(tmp_path / "b.db")
    await store.acquire_leadership("x", 30.0, time.time())
    await store.insert_job(job("a"))
    await store.close()
    Database(tmp_path / "b.db").close()


async def test_a_database_that_another_process_holds_is_busy(
    store: Store, tmp_path: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = sqlite3.connect(tmp_path / "broker.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    impatient = Database(tmp_path / "broker.db")
    impatient._connection.execute("PRAGMA busy_timeout=50")
    with pytest.raises(StoreBusy, match="another process"), impatient.transaction():
        pass
    impatient.close()
    write = asyncio.ensure_future(store.insert_job(job("a")))
    await asyncio.sleep(0.1)
    assert not write.done()
    holder.execute("COMMIT")
    holder.close()
    assert (await write)[1], "a short hold only delays"


async def test_a_lock_that_is_held_for_long_is_waited_for_once_not_by_each(
    tmp_path: Path, job: MakeJob
) -> None:
    database = Database(tmp_path / "b.db")
    committer = await _committer(database)
    database._connection.execute("PRAGMA busy_timeout=300")
    holder = sqlite3.connect(tmp_path / "b.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    results = await asyncio.gather(
        *(committer.submit(InsertJob(job(f"j{i}"), None)) for i in range(40)),
        return_exceptions=True,
    )
    assert all(isinstance(result, StoreBusy) for result in results)
    assert time.monotonic() - started < 40 * 0.3 / 3
    holder.execute("COMMIT")
    holder.close()
    await committer.submit(InsertJob(job("j1"), None))
    await committer.close()


async def test_a_full_disk_loses_nothing_that_was_acknowledged(
    tmp_path: Path, job: MakeJob
) -> None:
    database = Database(tmp_path / "b.db")
    committer = await _committer(database)
    await committer.submit(InsertJob(job("kept"), None))
    database._connection.execute("PRAGMA max_page_count=40")
    big = [InsertJob(job(f"j{i}", request=b"x" * 60_000), None) for i in range(10)]
    results = await asyncio.gather(*map(committer.submit, big), return_exceptions=True)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert refused
    assert all(isinstance(error, StoreFull) and "free some" in str(error) for error in refused)
    database._connection.execute("PRAGMA max_page_count=4000")
    await committer.submit(InsertJob(job("later"), None))
    await committer.close()
    reopened = Database(tmp_path / "b.db")
    acknowledged = {
        write.row.id
        for write, result in zip(big, results, strict=True)
        if not isinstance(result, BaseException)
    }
    stored = {row[0] for row in reopened.rows("job_unfinished", {})}
    assert stored == {"kept", "later"} | acknowledged
    reopened.close()


@pytest.mark.parametrize(
    ("location", "named"),
    [("/nonexistent/folder/b.db", "not a folder"), ("mysql://host/db", "sqlite:///FILE")],
)
async def test_what_cannot_be_opened_says_why(location: str, named: str) -> None:
    with pytest.raises(StoreUnavailable, match=named):
        await Store.open(location)


async def test_the_file_is_its_owners_alone(store: Store, tmp_path: Path) -> None:
    assert (tmp_path / "broker.db").stat().st_mode & 0o777 == 0o600


# -- kill -9 -----------------------------------------------------------------------------------

_WRITER = """
import asyncio, os, sys, time
from firepool_broker.store.records import JobRow
from firepool_broker.store.store import Store

async def write(store, job_id):
    row = JobRow(id=job_id, caller="ada", request=b"x" * 500, request_digest="d", kind="cell",
                 queue="default", submitted_at=time.time())
    await store.insert_job(row)
    os.write(1, (job_id + "\\n").encode())

async def main():
    store = await Store.open(sys.argv[1])
    await store.acquire_leadership("x", 30.0, time.time(), predecessor_is_dead=True)
    number = 0
    while True:
        await asyncio.gather(*(write(store, f"{sys.argv[2]}-{number + i}") for i in range(40)))
        number += 40

asyncio.run(main())
"""


def test_a_killed_broker_loses_no_acknowledged_job(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    acknowledged: set[str] = set()
    for round_ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(round_)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(200 + 97 * round_)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
        process.wait()
        process.stdout.close()
        acknowledged |= {line.decode().strip() for line in lines if line.endswith(b"\n")}
    database = Database(path)
    stored = {row[0] for row in database.rows("job_unfinished", {})}
    assert acknowledged <= stored
    assert database._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_opening_imports_no_sqlalchemy(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from firepool_broker.store.store import Store\n"
        "async def main():\n    await (await Store.open(sys.argv[1])).close()\n"
        "for _ in range(2): asyncio.run(main())\n"
        "print(sorted({'sqlalchemy', 'alembic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "b.db")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_every_error_of_the_store_has_one_base() -> None:
    assert all(
        issubclass(error, StoreError)
        for error in (StoreBusy, StoreCorrupt, StoreFull, LeadershipLost, IdempotencyConflict)
    )
