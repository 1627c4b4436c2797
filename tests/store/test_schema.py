from __future__ import annotations

import re

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from firepool_broker.store import migrations, prebuild, prebuilt
from firepool_broker.store.records import BindingRow, JobChange, JobRow, SessionRow
from firepool_broker.store.statements import all_statements
from firepool_broker.store.tables import bindings, jobs, metadata, sessions
from firepool_broker.store.writes import _JOB_COLUMNS, _SESSION_COLUMNS
from sqlalchemy import create_engine
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.schema import CreateTable


def test_the_compiled_statements_are_up_to_date() -> None:
    namespace: dict[str, object] = {}
    exec(prebuild.source(), namespace)
    for name in ("REVISION", "OLDER_REVISIONS", "SCHEMA", "STATEMENTS"):
        assert namespace[name] == getattr(prebuilt, name), (
            "run python -m firepool_broker.store.prebuild"
        )


def test_the_migrations_make_the_declared_tables() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        config = prebuild.alembic_config()
        config.attributes["connection"] = connection
        migrations.upgrade(config)
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_rows_and_columns_agree() -> None:
    assert tuple(column.name for column in jobs.columns) == _JOB_COLUMNS
    assert set(JobRow.__struct_fields__) == set(_JOB_COLUMNS)
    assert set(JobChange.__struct_fields__) <= set(_JOB_COLUMNS)
    assert tuple(column.name for column in sessions.columns) == _SESSION_COLUMNS
    assert set(SessionRow.__struct_fields__) == set(_SESSION_COLUMNS)
    assert tuple(column.name for column in bindings.columns)[1:] == BindingRow.__struct_fields__


def test_schema_and_statements_compile_for_other_databases() -> None:
    for dialect in (mysql.dialect(), postgresql.dialect()):
        for table in metadata.sorted_tables:
            assert str(CreateTable(table).compile(dialect=dialect))
        for statement in all_statements().values():
            assert str(statement.compile(dialect=dialect))
    text = str(CreateTable(jobs).compile(dialect=mysql.dialect()))
    assert re.search(r"\bFLOAT\b", text) is None, "times would be rounded"
