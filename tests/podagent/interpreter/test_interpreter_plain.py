"""Cells without IPython, and other versions of Python."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def interpreters() -> list[str]:
    """Interpreters of supported versions on this machine, one of each version."""
    found: dict[str, str] = {}
    for version in VERSIONS:
        candidates = [
            *(shutil.which(f"python{version}", path=folder) for folder in os.get_exec_path()),
            *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))),
        ]
        for path in filter(None, candidates):
            done = subprocess.run(
                [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
            )
            if done.stdout.strip() == version:
                found[version] = path
                break
    return list(found.values())


@pytest.fixture(params=interpreters())
def any_template(request: pytest.FixtureRequest, make_template: Any, tmp_path: Path) -> Any:
    """A template of a bare environment of each version."""
    prefix = tmp_path / "venv"
    subprocess.run([request.param, "-m", "venv", "--without-pip", str(prefix)], check=True)
    return make_template(str(prefix / "bin" / "python"))


def test_every_version_runs_cells(any_template: Any) -> None:
    done = any_template.run(
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndef f():\n    return 41\nf() + 1",
        outputs=["_", "f"],
    )
    assert [each["type"] for each in done.messages] == ["stream", "stream", "execute_result"]
    assert done.of("execute_result")[0]["data"] == {"text/plain": "42"}
    results = {each["name"]: each for each in done.end["results"]}
    assert json.loads(base64.b64decode(results["_"]["data"])) == 42
    assert results["f"]["name"] == "f"
    failed = any_template.run("x = 1\ndef f():\n    1/0\nf()", line_offset=1)
    assert "line 5" in failed.traceback
    assert "line 4, in f" in failed.traceback
    assert "    1/0" in failed.traceback
    assert "firepool" not in failed.traceback
    assert failed.error["message"] == "ZeroDivisionError: division by zero"
    assert isinstance(failed.exception(), ZeroDivisionError)
    job = any_template.park().start("import asyncio\nprint('go')\nawait asyncio.sleep(60)")
    job.wait_text("go")
    job.interrupt()
    assert job.finish().error["class"] == "Interrupted"
    assert any_template.run("import asyncio\nasync def f(): return 7\nasyncio.run(f())").of(
        "execute_result"
    )


def test_await_and_last_values(bare_template: Any) -> None:
    assert bare_template.ready["dropped"] == {}
    done = bare_template.run("import asyncio\nx = await asyncio.sleep(0, 5)\nx")
    assert done.of("execute_result")[0]["data"]["text/plain"] == "5"
    assert bare_template.run("5;").messages == []
    assert bare_template.run("None").messages == []
    assert bare_template.run("[y async for y in g()]").error["ename"] == "NameError"
    left = bare_template.run(
        "import asyncio\nt = asyncio.create_task(asyncio.sleep(99)); await asyncio.sleep(0)"
    )
    assert (left.exit_code, left.stderr) == (0, "")


def test_errors_exits_and_syntax(bare_template: Any) -> None:
    assert bare_template.run("import sys; sys.exit(4)").exit_code == 4
    syntax = bare_template.run("x = = 1", line_offset=2)
    assert syntax.error["ename"] == "SyntaxError"
    assert "line 3" in syntax.traceback
    magic = bare_template.run("%pip install x")
    assert magic.error["ename"] == "SyntaxError"
    assert "IPython" in magic.error["message"]
    chained = bare_template.run("try: 1/0\nexcept Exception as e: raise KeyError('k') from e")
    assert "direct cause" in chained.traceback
    bad = bare_template.run("class B(Exception):\n    def __str__(self): raise ValueError\nraise B")
    assert bad.error["ename"] == "B"


def test_values_without_cloudpickle(bare_template: Any, harness: Any) -> None:
    done = bare_template.run("s = {1, 2}; f = lambda: 1", outputs=["s", "f"])
    by_name = {each["name"]: each for each in done.end["results"]}
    assert harness.loaded(by_name["s"]) == {1, 2}
    assert "pickle" in by_name["f"]["error"].lower()


def test_no_module_of_ours_is_in_the_way(bare_template: Any) -> None:
    done = bare_template.run(
        "import sys\nprint([p for p in sys.path if 'firepool' in p or p.endswith('interpreter')])\n"
        "import importlib.util\n"
        "print([n for n in ('frames', 'job', 'plain', 'template', 'results') "
        "if importlib.util.find_spec(n)])"
    )
    assert done.stdout == "[]\n[]\n"


def test_threads_and_pools_at_the_end_in_every_version(any_template: Any) -> None:
    done = any_template.run(
        "from concurrent.futures import ThreadPoolExecutor\nimport threading, time\n"
        "pool = ThreadPoolExecutor(2)\npool.submit(lambda: (time.sleep(0.2), print('pool')))\n"
        "threading.Thread(target=lambda: (time.sleep(0.4), print('thread'))).start()\nprint('main')"
    )
    assert done.stdout == "main\npool\nthread\n"
    job = any_template.park().start(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\nprint('go')"
    )
    job.wait_text("go")
    time.sleep(0.2)
    job.interrupt()
    assert job.finish().error["class"] == "Interrupted"
