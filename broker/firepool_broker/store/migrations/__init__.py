"""Alembic migrations of the store, from the first table on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.config import Config


def upgrade(config: Config) -> None:
    """Bring the database of ``config.attributes["connection"]`` to the newest revision."""
    from alembic import command  # importing Alembic takes longer than a start may

    command.upgrade(config, "head")
