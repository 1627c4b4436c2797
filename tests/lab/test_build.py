"""What the build and the installation must have brought."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "labextension"


def test_both_halves_are_of_one_release():
    project = (ROOT / "pyproject.toml").read_text()
    release = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    package = json.loads((EXTENSION / "package.json").read_text())
    source = (EXTENSION / "src/version.ts").read_text()
    assert package["version"] == release
    assert f"VERSION = '{release}'" in source


def test_the_lock_file_names_no_registry():
    lock = (EXTENSION / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert "omit-lockfile-registry-resolved=true" in (EXTENSION / ".npmrc").read_text()
    packages = json.loads(lock)["packages"]
    assert all("integrity" in package for name, package in packages.items() if name)


def test_every_import_is_declared():
    package = json.loads((EXTENSION / "package.json").read_text())
    imported = set()
    for file in EXTENSION.glob("src/**/*.ts*"):
        imported |= set(re.findall(r"from '([^'.][^']*)'", file.read_text()))
    assert imported == set(package["dependencies"])


def test_installation_enables_both_halves():
    lab = _jupyter("labextension", "list")
    assert re.search(r"firepool-nb v\S+ .*enabled.*OK", lab), lab
    server = _jupyter("server", "extension", "list")
    assert re.search(r"firepool_nb\.server.*enabled", server), server
    assert "validation failed" not in server.split("firepool_nb.server", 2)[2].split("\n\n")[0]


def _jupyter(*arguments: str) -> str:
    environment = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "jupyter", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return re.sub(r"\x1b\[[\d;]*m", "", result.stdout + result.stderr)
