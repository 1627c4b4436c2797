"""Alembic's entry: migrations run on the connection that the store hands over."""

from __future__ import annotations

from alembic import context

from firepool_broker.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,  # SQLite cannot alter a column in place
)
with context.begin_transaction():
    context.run_migrations()
