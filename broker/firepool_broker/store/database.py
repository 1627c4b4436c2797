"""The SQLite database behind the store: opening, schema, transactions, error translation.

The contract: a database is opened with write-ahead logging and ``synchronous=FULL``, at exactly
the schema that this program knows, or not at all; every error of SQLite leaves here as one of
the store's own, naming the file and the fix.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from firepool_broker.store import prebuilt
from firepool_broker.store.errors import (
    SchemaTooNew,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

_BUSY_TIMEOUT_SECONDS = 5.0
_CHECKPOINT_BYTES = 4 * 1024 * 1024
_CHECKPOINT_NOW_BYTES = 64 * 1024 * 1024


class Database:
    """One connection to the SQLite file; used by one thread at a time.

    Parameters
    ----------
    path
        The database file; its folder must exist.
    read_only
        Refuse every write on this connection (readers).
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._log = path.with_name(path.name + "-wal")
        with self._translated():
            self._connection = sqlite3.connect(
                path,
                timeout=_BUSY_TIMEOUT_SECONDS,
                isolation_level=None,  # transactions are begun and ended here, by name
                check_same_thread=False,  # opened by one thread, handed to another
                cached_statements=256,
            )
        try:
            with self._translated():
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                # a checkpoint inside a commit would add its own syncs to that commit's latency
                self._connection.execute("PRAGMA wal_autocheckpoint=0")
                # so that the log's size says how much of it still waits for a checkpoint
                self._connection.execute(f"PRAGMA journal_size_limit={_CHECKPOINT_BYTES // 4}")
                if read_only:
                    self._connection.execute("PRAGMA query_only=ON")
        except BaseException:
            self._connection.close()
            raise

    def ensure_schema(self) -> None:
        """Create or migrate the schema.

        Raises
        ------
        SchemaTooNew
            A newer version of this program wrote the file.
        """
        revision = self._revision()
        if revision == prebuilt.REVISION:
            return
        if revision is None:
            with self.transaction():
                if self._revision() is None:  # another process may have been faster
                    for statement in prebuilt.SCHEMA:
                        self._connection.execute(statement)
                    self._connection.execute(
                        "INSERT INTO alembic_version (version_num) VALUES (?)",
                        (prebuilt.REVISION,),
                    )
            return
        if revision not in prebuilt.OLDER_REVISIONS:
            raise SchemaTooNew(
                f"{self._path} has schema {revision}; this version of firepool-nb knows up to "
                f"{prebuilt.REVISION}. Install the version that wrote it, or name another state "
                "folder"
            )
        self._migrate()

    def _revision(self) -> str | None:
        with self._translated():
            found = self._connection.execute(
                "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'"
            ).fetchone()
            if not found[0]:
                return None
            row = self._connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return None if row is None else str(row[0])

    def _migrate(self) -> None:
        # imported here: a start that finds its own schema must not pay for it
        from sqlalchemy import create_engine, event
        from sqlalchemy.pool import NullPool

        from firepool_broker.store import migrations
        from firepool_broker.store.prebuild import alembic_config

        engine = create_engine(f"sqlite:///{self._path}", poolclass=NullPool)

        @event.listens_for(engine, "connect")
        def _manual_transactions(connection: sqlite3.Connection, _record: object) -> None:
            connection.isolation_level = None  # else the driver commits before DDL

        @event.listens_for(engine, "begin")
        def _begin(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        with engine.begin() as connection:
            config = alembic_config()
            config.attributes["connection"] = connection
            migrations.upgrade(config)
        engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block in one write transaction: all of it is durable afterwards, or none."""
        with self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def run(self, name: str, parameters: Mapping[str, object]) -> int:
        """Run a prebuilt statement; returns the number of rows it changed."""
        return self._connection.execute(prebuilt.STATEMENTS[name], parameters).rowcount

    def row(self, name: str, parameters: Mapping[str, object]) -> tuple[Any, ...] | None:
        """Return the first row of a prebuilt query."""
        with self._translated():
            row: tuple[Any, ...] | None = self._connection.execute(
                prebuilt.STATEMENTS[name], parameters
            ).fetchone()
            return row

    def rows(self, name: str, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Return all rows of a prebuilt query."""
        with self._translated():
            return self._connection.execute(prebuilt.STATEMENTS[name], parameters).fetchall()

    def checkpoint(self, *, idle: bool) -> None:
        """Move the write-ahead log into the database when it has grown enough.

        Parameters
        ----------
        idle
            Nothing waits to be written, so that the time it takes delays nobody.
        """
        try:
            size_bytes = self._log.stat().st_size
        except FileNotFoundError:
            return
        if size_bytes > (_CHECKPOINT_BYTES if idle else _CHECKPOINT_NOW_BYTES):
            with self._translated():
                # passive: a reader that takes its time must not hold up the writes
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "disk is full" in text or "disk quota" in text:
            return StoreFull(f"no space left for {self._path}: free some, then try again ({text})")
        if "malformed" in text or "not a database" in text:
            return StoreCorrupt(
                f"{self._path} is damaged ({text}); it was left as it is. Move it aside to start "
                "with an empty one"
            )
        if "is locked" in text or "is busy" in text:
            return StoreBusy(f"another process holds {self._path} ({text}); try again")
        return StoreUnavailable(f"{self._path} cannot be used: {text}")
