"""Compiles schema and statements into ``prebuilt.py``, so that a start imports no SQLAlchemy.

Run ``python -m firepool_broker.store.prebuild`` after a change of ``statements.py`` or a new
migration; a test fails while the file is out of date.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect

from firepool_broker.store import migrations, statements

TARGET = Path(__file__).with_name("prebuilt.py")


def alembic_config() -> Config:
    """Return Alembic's configuration for the migrations that ship with this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    return config


def _schema() -> list[str]:
    """Return what the migrations run on an empty SQLite database, statement by statement."""
    ran: list[str] = []
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        migrations.upgrade(config)
        rows = connection.exec_driver_sql(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name"
        )
        ran.extend(" ".join(str(row[0]).split()) for row in rows)
    engine.dispose()
    return ran


def source() -> str:
    """Return the text of ``prebuilt.py``."""
    script = ScriptDirectory.from_config(alembic_config())
    revisions = [revision.revision for revision in script.walk_revisions()]
    out = io.StringIO()
    out.write(
        '"""Schema and statements for SQLite, compiled by ``prebuild.py``; not to be edited."""\n\n'
        "from __future__ import annotations\n\n"
        f"REVISION = {revisions[0]!r}\n"
        f"OLDER_REVISIONS: tuple[str, ...] = {tuple(revisions[1:])!r}\n\n"
        "SCHEMA: tuple[str, ...] = (\n"
    )
    for statement in _schema():
        out.write(f"    {_quoted(statement)},\n")
    out.write(")\n\nSTATEMENTS: dict[str, str] = {\n")
    dialect = sqlite_dialect(paramstyle="named")
    for name, clause in statements.all_statements().items():
        compiled = clause.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
        text = " ".join(str(compiled).split())
        for key, bind in compiled.params.items():  # constants become part of the text
            if bind is not None:
                text = re.sub(rf":{key}\b", repr(bind), text)
        out.write(f"    {name!r}: {_quoted(text)},\n")
    out.write("}\n")
    return out.getvalue()


def _quoted(text: str) -> str:
    """Return a string literal broken into lines of at most 80 characters."""
    pieces: list[str] = []
    line = ""
    for word in text.split(" "):
        if line and len(line) + len(word) > 76:
            pieces.append(line + " ")
            line = word
        else:
            line = f"{line} {word}" if line else word
    pieces.append(line)
    if len(pieces) == 1:
        return repr(pieces[0])
    return "(\n" + "\n".join(f"        {piece!r}" for piece in pieces) + "\n    )"


if __name__ == "__main__":
    TARGET.write_text(source())
