"""The template: preloading, what disqualifies a module, forks, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An environment with a few ill-behaved packages and a project that is only linked in."""
    prefix = tmp_path_factory.mktemp("library") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    (packages,) = prefix.glob("lib/python*/site-packages")
    project = prefix.parent / "project"
    project.mkdir()
    (project / "editable.py").write_text("x = 1\n")
    (packages / "editable.pth").write_text(str(project))
    for name, text in {
        "honest": "import decimal\nVALUE = 1\n",
        "threads": "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
        "broken": "raise RuntimeError('cannot')\n",
        "leaves": "raise SystemExit(3)\n",
        "slow": "import time\ntime.sleep(60)\n",
        "plugin": "import editable\n",
        "large": "DATA = bytearray(300 << 20)\n",
    }.items():
        (packages / f"{name}.py").write_text(text)
    return str(prefix / "bin" / "python"), packages


@pytest.fixture
def fresh(make_template: Callable[..., Any], library: tuple[str, Path]) -> Callable[[], Any]:
    return lambda: make_template(library[0])


def test_what_is_installed_is_preloaded_and_the_rest_named(fresh: Callable[[], Any]) -> None:
    template = fresh()
    answer = template.request(
        {
            "type": "preload",
            "modules": ["honest", "json.tool", "nosuch", "editable", "broken", "leaves", "honest"],
        }
    )
    assert answer["type"] == "preloaded"
    assert answer["preloaded"] == ["honest", "json.tool"]
    assert answer["dropped"]["nosuch"] == "not an installed package"
    assert answer["dropped"]["editable"] == "not an installed package"
    assert "cannot" in answer["dropped"]["broken"]
    assert "SystemExit" in answer["dropped"]["leaves"]
    done = template.run(
        "import sys\nprint('honest' in sys.modules, 'editable' in sys.modules)\n"
        "import honest, editable\nprint(honest.VALUE)"
    )
    assert done.stdout == "True False\n1\n"


@pytest.mark.parametrize(
    ("module", "reason", "limits"),
    [
        ("threads", "starts a thread", {}),
        ("slow", "more than 1 s", {"seconds": 1}),
        ("plugin", "loads project code", {}),
        ("large", "of 200 MiB", {"memory_mib": 200}),
    ],
)
def test_what_a_fork_would_copy_into_every_job_ends_the_template(
    fresh: Callable[[], Any], module: str, reason: str, limits: dict[str, int]
) -> None:
    template = fresh()
    answer = template.request({"type": "preload", "modules": ["honest", module], **limits})
    assert answer["type"] == "tainted"
    assert answer["module"] == module
    assert reason in answer["reason"]
    assert template.process.wait(10) == 0


def test_an_open_device_taints(fresh: Callable[[], Any], library: tuple[str, Path]) -> None:
    # There need be no accelerator here: the check goes by the name of what is open.
    (library[1] / "device.py").write_text(
        "import os\nfrom firepool_podagent.interpreter import process\n"
        "fd = os.open('/dev/null', os.O_RDONLY)\n"
        "process._is_device = lambda path: path == '/dev/null' and "
        "os.path.exists(f'/proc/self/fd/{fd}')\n"
    )
    answer = fresh().request({"type": "preload", "modules": ["device"]})
    assert (answer["type"], answer["module"]) == ("tainted", "device")
    assert "/dev/null" in answer["reason"]


def test_the_template_ends_with_its_agent(fresh: Callable[[], Any]) -> None:
    template = fresh()
    template.control.close()
    assert template.process.wait(10) == 0


def test_a_parked_job_outlives_its_template(fresh: Callable[[], Any]) -> None:
    template = fresh()
    job = template.park()
    template.control.close()
    assert template.process.wait(10) == 0
    assert job.run("print('still here')").stdout == "still here\n"


def test_no_zombies_and_no_descriptors_gather(fresh: Callable[[], Any]) -> None:
    template = fresh()
    pid = template.ready["pid"]

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    before = descriptors()
    for number in range(5):
        assert template.run(f"print({number})").stdout == f"{number}\n"
    template.park().run("1")
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 10
    while children.read_text() and time.monotonic() < deadline:
        os.sched_yield()
    assert children.read_text() == ""
    assert descriptors() == before


def test_an_interrupt_from_a_terminal_does_not_end_it(fresh: Callable[[], Any]) -> None:
    template = fresh()
    os.kill(template.ready["pid"], signal.SIGINT)
    assert template.run("print(1)").stdout == "1\n"


def test_jobs_run_at_the_same_time(fresh: Callable[[], Any]) -> None:
    template = fresh()
    jobs = [template.park().start(f"import time; time.sleep(0.3); print({n})") for n in range(4)]
    assert [job.finish().stdout for job in jobs] == ["0\n", "1\n", "2\n", "3\n"]


def test_numerical_libraries_can_be_preloaded(make_template: Any) -> None:
    """Those that start threads by themselves are told not to while they are preloaded."""
    template = make_template()
    modules = ["numpy", "pyarrow", "pandas", "matplotlib.pyplot"]
    answer = template.request({"type": "preload", "modules": modules})
    assert answer["type"] == "preloaded", answer
    assert answer["preloaded"] == modules
    done = template.run(
        "import sys\n"
        "assert {'numpy', 'pandas', 'pyarrow', 'matplotlib.pyplot'} <= set(sys.modules)\n"
        "import matplotlib.pyplot as plt, pandas as pd\n"
        "plt.plot([1, 2])\npd.DataFrame({'a': ['x']})"
    )
    assert done.exit_code == 0, done.traceback
    assert done.stderr == ""
    assert done.end["imports_seconds"] < 0.5
    assert "text/html" in done.of("execute_result")[0]["data"]
    assert len([each for each in done.messages if "image/png" in each.get("data", {})]) == 1
