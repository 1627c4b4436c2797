"""Plain programs: sessions, jobs, and what importing the package costs and brings in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import firepool_nb

PACKAGE = Path(firepool_nb.__file__).parent


def run(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", source],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_program_runs_code_and_leaves_nothing(shared_home: Path) -> None:
    done = run(
        "import firepool_nb\n"
        "session = firepool_nb.Session(tag='report').open()\n"
        "value = session.run('print(\"hello\")\\nx = a + 1', namespace={'a': 1}, outputs=['x'])\n"
        "print(value)\n"
        "try:\n    session.run('raise KeyError(\"k\")')\n"
        "except KeyError as error:\n    print('caught', error)\n"
        "job = session.submit('import time; time.sleep(0.2); y = 2', outputs=['y'])\n"
        "print(job.result(30), job.state, session.is_open)\n"
        "print(session.run('[1, 2]'), session.submit('3').result(30))\n",
        "-W", "error", "-X", "dev",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-6:] == [
        "hello", "{'x': 2}", "caught 'k'", "{'y': 2} SUCCEEDED True", "[1, 2]", "[1, 2] 3",
    ]  # fmt: skip
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_awaited_job(shared_home: Path) -> None:
    done = run(
        "import asyncio, firepool_nb\n"
        "async def main():\n"
        "    with firepool_nb.Session() as session:\n"
        "        jobs = [session.submit(f'v = {n} * 2', outputs=['v'], parallel=True)\n"
        "                for n in range(3)]\n"
        "        print(await asyncio.gather(*jobs))\n"
        "        failing = session.submit('1/0')\n"
        "        try:\n            await failing\n"
        "        except ZeroDivisionError as error:\n            print('caught', error)\n"
        "asyncio.run(main())\n",
        "-W", "error", "-X", "dev",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "[{'v': 0}, {'v': 2}, {'v': 4}]", "caught division by zero",
    ]  # fmt: skip


def test_a_session_that_ends_gives_its_pods_up(shared_home: Path) -> None:
    done = run(
        "import firepool_nb, time\n"
        "with firepool_nb.Session(tag='short') as session:\n"
        "    session.run('1')\n"
        "    print(len(session.release()))\n"
        "    session.run('1')\n"
        "client = firepool_nb.Client()\n"
        "deadline = time.monotonic() + 10\n"
        "while any(p['session'] == 'short' for p in client.pods()):\n"
        "    assert time.monotonic() < deadline, client.pods()\n"
        "    time.sleep(0.05)\n"
        "client.close()\n"
        "print('gone')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["1", "gone"]


def test_importing_brings_in_next_to_nothing() -> None:
    done = run(
        "import sys\nbefore = set(sys.modules)\nimport firepool_nb\n"
        "found = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(found - sys.stdlib_module_names))"
    )
    assert done.stdout.strip() == "['firepool_nb']"


def test_loading_brings_in_nothing_heavy() -> None:
    done = run(
        "import sys\nimport IPython.core.interactiveshell\nimport firepool_nb.magics\n"
        "heavy = {'httpx', 'rich', 'click', 'numpy', 'pandas', 'msgspec', 'tornado'}\n"
        "heavy |= {'sqlalchemy', 'yaml', 'firepool_podagent'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_only_one_module_imports_the_broker() -> None:
    importers = set()
    for path in PACKAGE.rglob("*.py"):
        if "server" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            if any(name.partition(".")[0] in ("firepool_broker", "firepool_podagent")
                   for name in names):  # fmt: skip
                importers.add(path.relative_to(PACKAGE).as_posix())
    assert importers == {"embedded.py"}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        firepool_nb.no_such_name  # noqa: B018
    assert {"Session", "Job", "Client"} <= set(dir(firepool_nb))
