"""Kernels of other environments: what is installed there is what their cells see."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, assert_nothing_left
from kernels import Kernel

from firepool_nb import environment


def make_environment(folder: Path) -> tuple[str, Path]:
    """A virtual environment that sees everything of this one; its python and site-packages."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120
    )
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / version / "site-packages"
    here = sysconfig.get_paths()["purelib"]
    (site / "everything.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return str(folder / "bin" / "python"), site


def install(site: Path, name: str, source: str) -> None:
    """Put a module into an environment as an installer does."""
    (site / f"{name}.py").write_text(source)
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.fixture
def other(firepool_home: Path) -> Iterator[tuple[Kernel, Path]]:
    """A kernel of another environment, and its site-packages."""
    python, site = make_environment(firepool_home / "venv")
    folder = firepool_home / "notebooks"
    folder.mkdir()
    kernel = Kernel(folder, python=python).load()
    try:
        yield kernel, site
    finally:
        kernel.shut_down()
    if embedded.find() is not None:
        embedded.stop()
    assert_nothing_left(firepool_home)


def test_cells_run_in_their_kernels_environment(other: tuple[Kernel, Path]) -> None:
    kernel, site = other
    folder = site.parents[2]
    assert kernel.remote("import sys\nprint(sys.prefix)").stdout == f"{folder}\n"
    install(site, "fp_installed", "value = 1\n")
    kernel.ok("import importlib; importlib.invalidate_caches()\nimport fp_installed")
    ran = kernel.remote("import fp_installed as m\nprint(m.value, m.__file__)")
    assert ran.stdout == f"1 {site}/fp_installed.py\n"


def test_two_environments_share_nothing(other: tuple[Kernel, Path]) -> None:
    kernel, site = other
    install(site, "fp_only_there", "")
    here = Kernel(site.parents[3] / "notebooks").load()
    try:
        prefix = "import sys\nprint(sys.prefix)"
        assert here.remote(prefix).stdout == f"{sys.prefix}\n"
        assert kernel.remote(prefix).stdout == f"{site.parents[2]}\n"
        found = "import importlib.util\nprint(importlib.util.find_spec('fp_only_there') is None)"
        assert here.remote(found).stdout == "True\n"
        assert kernel.remote(found).stdout == "False\n"
        with Api(embedded.ensure_running()) as api:
            digests = {each["environment_digest"] for each in api.get("/v1/sessions")["sessions"]}
        assert len(digests) == 2
    finally:
        here.shut_down()


def test_an_editable_install_is_used_as_it_is_now(other: tuple[Kernel, Path]) -> None:
    kernel, site = other
    source = site.parents[3] / "source"
    (source / "fp_editable").mkdir(parents=True)
    (source / "fp_editable" / "__init__.py").write_text("from .part import value\n")
    (source / "fp_editable" / "part.py").write_text("value = 'old'\n")
    (site / "fp_editable.pth").write_text(f"{source}\n")
    kernel.restart()
    kernel.load()
    kernel.ok("import fp_editable")
    assert kernel.remote("print(fp_editable.value)").stdout == "old\n"
    (source / "fp_editable" / "part.py").write_text("value = 'newer'\n")
    assert kernel.remote("print(fp_editable.value)").stdout == "newer\n"
    assert kernel.ok("fp_editable.value").texts == ["'old'"]


def test_the_digest_follows_every_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    seen = [environment.digest()]
    install(site, "fp_one", "")
    seen.append(environment.digest())
    (site / "fp_one-1.0.dist-info").rename(site / "fp_one-2.0.dist-info")
    seen.append(environment.digest())
    (site / "fp_two.pth").write_text("/somewhere\n")
    seen.append(environment.digest())
    (site / "fp_one.py").write_text("changed = 1\n")
    assert environment.digest() == seen[-1]
    assert len(set(seen)) == len(seen)


def test_the_description_is_what_the_broker_takes() -> None:
    described = environment.describe()
    assert described["executable"] == sys.executable
    assert all(Path(path).is_absolute() for path in described["path"] + described["visible"])
    assert sys.prefix in described["visible"]
    json.dumps(described)
