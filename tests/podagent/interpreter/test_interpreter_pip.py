"""``%pip install`` in a cell, overlays on a job's path, and when a job needs a new interpreter."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session-wheels")
    wheel(folder, "fpbaked", "1.0")
    wheel(folder, "fpbaked", "2.0")
    wheel(folder, "fpextra", "1.0")
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> dict[str, Any]:
    """An environment with IPython (borrowed from the tests' own) and fpbaked 2.0."""
    prefix = tmp_path_factory.mktemp("baked") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    (packages,) = prefix.glob("lib/python*/site-packages")
    import IPython

    (packages / "borrowed.pth").write_text(str(Path(IPython.__file__).parent.parent))
    with zipfile.ZipFile(wheels / "fpbaked-2.0-py3-none-any.whl") as archive:
        archive.extractall(packages)
    return {
        "executable": str(prefix / "bin" / "python"),
        "prefix": str(prefix),
        "base_prefix": sys.base_prefix,
        "version": sys.version.split()[0],
        "digest": "feed",
        "path": [],
    }


@pytest.fixture(scope="session")
def baked(
    environment: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, harness: Any
) -> Iterator[Any]:
    """A template of that environment with fpbaked preloaded."""
    each = harness.Template(environment["executable"], tmp_path_factory.mktemp("baked-template"))
    answer = each.request({"type": "preload", "modules": ["fpbaked"]})
    assert answer is not None
    assert answer["preloaded"] == ["fpbaked"]
    yield each
    each.close()


@pytest.fixture
def run(
    baked: Any, environment: dict[str, Any], wheels: Path, tmp_path: Path
) -> Callable[..., Any]:
    session = tmp_path / "session"
    session.mkdir()
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").symlink_to(uv)
    env = {
        **baked.park_env(),
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
    }

    def run_cell(code: str, overlays: tuple[str, ...] = (), **changes: Any) -> Any:
        changes.setdefault("env", env)
        return baked.run(
            code,
            environment=environment,
            session_dir=str(session),
            paths={"overlays": list(overlays)},
            **changes,
        )

    return run_cell


def listing(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).rglob("*") if "__pycache__" not in str(path))


def test_pip_install_fills_the_sessions_overlay(
    run: Callable[..., Any], environment: dict[str, Any], tmp_path: Path
) -> None:
    before = listing(environment["prefix"])
    done = run("%pip install fpextra\nimport fpextra\nprint(fpextra.__version__)")
    assert done.exit_code == 0, done.traceback
    assert done.stdout.splitlines()[-1] == "1.0"
    notes = [each["text"] for each in done.of("note")]
    assert notes == ["installed for this session's remote cells only: fpextra 1.0"]
    assert listing(environment["prefix"]) == before
    overlay = str(tmp_path / "session" / ".firepool" / "overlay-feed")
    later = run(
        "import fpextra, subprocess, sys\nprint(fpextra.__file__)\n"
        "print(subprocess.check_output([sys.executable, '-c', 'import fpextra; print(1)']))",
        (overlay,),
    )
    assert later.stdout.startswith(overlay)
    assert later.stdout.endswith("b'1\\n'\n")
    assert not [each for each in later.unordered if each["phase"] == "fresh"]
    assert "ModuleNotFoundError" in run("import fpextra").error["message"]


def test_another_version_of_what_was_imported(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("import fpbaked\n%pip install -q fpbaked==1.0\nprint(fpbaked.__version__)")
    assert done.exit_code == 0, done.traceback
    assert done.stdout.splitlines()[-1] == "2.0"
    assert any("restart needed: fpbaked" in each["text"] for each in done.of("note"))
    overlay = str(tmp_path / "session" / ".firepool" / "overlay-feed")
    later = run("import fpbaked; print(fpbaked.__version__)\n1", (overlay,))
    assert later.stdout == "1.0\n"
    assert [each["phase"] for each in later.unordered] == ["fresh", "started"]
    assert later.of("execute_result")[0]["data"]["text/plain"] == "1"
    assert run("import fpbaked; print(fpbaked.__version__)").stdout == "2.0\n"


def test_what_pip_cannot_do_here_is_said(run: Callable[..., Any]) -> None:
    failed = run("%pip install nosuchthing==9")
    assert failed.error["class"] == "RequirementsFailed"
    assert "stand-in" not in failed.error["message"]
    assert "nosuchthing" in failed.error["message"]
    assert failed.exit_code == 1
    assert "change the environment" in run("%pip uninstall fpbaked").error["message"]
    assert "change the environment" in run("%conda install x").error["message"]
    assert "fpextra 1.0" in run("%uv pip install fpextra").of("note")[0]["text"]


def test_start_up_variables_need_a_new_interpreter(run: Callable[..., Any], baked: Any) -> None:
    env = {**baked.park_env(), "PYTHONHASHSEED": "0"}
    code = (
        "import sys, os\nprint(hash('a'), os.environ['PYTHONHASHSEED'])\n"
        "print('e', file=sys.stderr)\n6*7"
    )
    first, second = run(code, env=env), run(code, env=env)
    assert first.stdout == second.stdout
    assert first.of("execute_result")[0]["data"]["text/plain"] == "42"
    assert first.unordered[0]["phase"] == "fresh"
    assert "PYTHONHASHSEED" in first.unordered[0]["reason"]
    failing = run("x = 1\n1/0", env=env, line_offset=1)
    assert "line 3" in failing.traceback
    assert "firepool" not in failing.traceback


def test_a_fresh_interpreter_takes_inputs_outputs_and_interrupts(
    baked: Any, harness: Any, environment: dict[str, Any]
) -> None:
    env = {**baked.park_env(), "PYTHONHASHSEED": "0"}
    done = baked.run("b = a + 1", env=env, inputs=[harness.value_input("a", 1)], outputs=["b"])
    assert base64.b64decode(done.end["results"][0]["data"]) == b"2"
    job = baked.park().start("import time\ntime.sleep(60)", env=env)
    job.interrupt()
    assert job.finish().error["class"] == "Interrupted"
