"""Requirements that fail, conflict or replace what is there; the kernel's environment stays."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api
from kernels import Kernel


def wheel(folder: Path, name: str, version: str) -> Path:
    """Make a wheel with one module of that name."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Provides-Extra: extra\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


class House:
    """A virtual environment that has fpmini 2.0 and pip, and a folder of wheels."""

    def __init__(self, home: Path, name: str = "venv") -> None:
        self.wheels = home / "notebooks" / "wheels"  # where it is visible in pods
        wheel(self.wheels, "fpmini", "1.0")
        baked = wheel(self.wheels, "fpmini", "2.0")
        wheel(self.wheels, "fpextra", "1.0")
        self.prefix = home / name
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(self.prefix)], check=True
        )
        self.python = str(self.prefix / "bin" / "python")
        (self.site,) = self.prefix.glob("lib/python*/site-packages")
        here = sysconfig.get_paths()["purelib"]
        (self.site / "everything.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        with zipfile.ZipFile(baked) as archive:
            archive.extractall(self.site)
        import pip

        source = Path(pip.__file__).parent
        shutil.copytree(source, self.site / "pip")
        (info,) = source.parent.glob("pip-*.dist-info")
        shutil.copytree(info, self.site / info.name)
        self.variables = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "UV_CACHE_DIR": str(home / "uv-cache"),
        }

    def with_tool(self, tool: str) -> dict[str, str]:
        """The variables of a session that has uv, or has not."""
        folder = self.prefix.parent / "notebooks" / "bin"
        folder.mkdir()
        if tool == "uv":
            found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            assert found is not None
            (folder / "uv").symlink_to(found)
        return {**self.variables, "PATH": f"{folder}:/usr/bin:/bin"}

    def snapshot(self) -> dict[str, Any]:
        """Every file of the environment with its content, mode and time."""
        found = {}
        for path in sorted(self.prefix.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[str(path)] = (
                status.st_mode,
                status.st_mtime_ns,
                hashlib.sha256(content).digest(),
            )
        return found


@pytest.fixture
def house(firepool_home: Path) -> House:
    return House(firepool_home)


@pytest.fixture
def unchanged(house: House) -> Iterator[House]:
    """The kernel's environment is afterwards, byte for byte, what it was."""
    before = house.snapshot()
    yield house
    after = house.snapshot()
    assert after.keys() == before.keys()
    assert after == before


def newest() -> dict[str, Any]:
    connection = embedded.find()
    assert connection is not None
    with Api(connection) as api:
        job: dict[str, Any] = api.get("/v1/jobs?limit=1")["jobs"][0]
    return job


def until_idle() -> None:
    """Wait for the reset: then nothing is held by a job that has failed."""
    connection = embedded.find()
    assert connection is not None
    deadline = time.monotonic() + 5
    with Api(connection) as api:
        while any(pool["counts"]["busy"] for pool in api.get("/v1/pools")["pools"]):
            assert time.monotonic() < deadline, api.get("/v1/pods")
            time.sleep(0.02)


VERSION = "import fpmini\nprint(fpmini.__version__)"


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_what_does_not_resolve_fails_once(
    unchanged: House, kernels: Callable[..., Kernel], tool: str
) -> None:
    """C30 (1)-(4): once, before user code, in the resolver's words, and nobody is stopped."""
    kernel = kernels(python=unchanged.python, env=unchanged.with_tool(tool))
    assert kernel.remote(VERSION).stdout == "2.0\n"
    pod = newest()["pods"]
    for lines, told in (
        (["fp-no-such-dist-14792==9.9"], "fp-no-such-dist-14792"),
        (["fpmini<2", "fpmini>=2"], "fpmini"),
        (["pkg @ git+https://user:hunter22@127.0.0.1:9/x.git"], "127.0.0.1:9"),
        (["fpmini==1.0 --hash=sha256:" + "0" * 64], "hash"),
    ):
        file = unchanged.prefix.parent / "lines.txt"
        file.write_text("\n".join(lines))
        began = time.monotonic()
        failed = kernel.run(f"%%firepool -r {file}\nprint('never')")
        assert time.monotonic() - began < 60
        assert failed.stdout == ""
        assert failed.error["ename"] == "RequirementsFailed", failed.error
        assert told in failed.error["evalue"].lower()
        assert failed.error["evalue"].startswith(tool)
        assert "hunter22" not in str(failed.outputs)
        job = newest()
        assert (job["state"], job["attempt"]) == ("FAILED", 1)
        assert job["error"]["class"] == "RequirementsFailed"
        assert job["retries"] == {"user": 0, "infra": 0}
        assert "hunter22" not in job["error"]["message"]
        until_idle()
        assert kernel.remote(VERSION).stdout == "2.0\n"
        assert newest()["pods"] == pod


def test_wheels_of_the_package(unchanged: House, kernels: Callable[..., Kernel]) -> None:
    """C30 (5): a wheel inside the package is installed; one that is not there is named."""
    kernel = kernels(python=unchanged.python, env=unchanged.variables)
    folder = unchanged.prefix.parent / "notebooks" / "code"
    wheel(folder / "wheels", "fpmini", "1.0")
    options = "--package code --with ./wheels/fpmini-1.0-py3-none-any.whl"
    assert kernel.remote(VERSION, options).stdout == "1.0\n"
    failed = kernel.run("%%firepool --package code --with ./wheels/absent-1.0.whl\nprint(1)")
    assert failed.error["ename"] == "RequirementsFailed"
    assert "wheels/absent-1.0.whl" in failed.error["evalue"]
    assert "no such file" in failed.error["evalue"]


def test_a_pinned_version_wins_and_is_seen_by_nobody_else(
    unchanged: House, kernels: Callable[..., Kernel]
) -> None:
    """C30 (6), (8): the pinned one although another is baked in and preloaded; then not again."""
    kernel = kernels(python=unchanged.python, env=unchanged.variables)
    for _ in range(3):  # seen by jobs, and so preloaded by the next spares
        assert kernel.remote(VERSION).stdout == "2.0\n"
    pinned = kernel.remote(VERSION, "--with 'fpmini[extra]==1.0' --with fpextra")
    assert pinned.stdout == "1.0\n"
    look = f"{VERSION}\nimport importlib.util as u; print(u.find_spec('fpextra'))"
    assert kernel.remote(look).stdout == "2.0\nNone\n"
    other = kernels(python=unchanged.python, env=unchanged.variables)
    assert other.remote(look).stdout == "2.0\nNone\n"


def test_pip_in_a_cell(unchanged: House, kernels: Callable[..., Kernel]) -> None:
    """C30 (7), (8): the new version or a restart line, and then the new one; for nobody else."""
    kernel = kernels(python=unchanged.python, env=unchanged.variables)
    ran = kernel.remote("import fpmini\n%pip install -q fpmini==1.0\nprint(fpmini.__version__)")
    last = ran.stdout.splitlines()[-1]
    assert last == "1.0" or any("restart needed: fpmini" in text for text in ran.texts), ran.texts
    assert kernel.remote(VERSION).stdout == "1.0\n"
    fresh = kernel.remote("%pip install -q fpextra\nimport fpextra\nprint(fpextra.__version__)")
    assert fresh.stdout.splitlines()[-1] == "1.0"
    assert kernel.remote("import fpextra; print(1)").stdout == "1\n"
    other = kernels(python=unchanged.python, env=unchanged.variables)
    look = f"{VERSION}\nimport importlib.util as u; print(u.find_spec('fpextra'))"
    assert other.remote(look).stdout == "2.0\nNone\n"


def test_pip_in_the_notebook_is_seen_by_its_next_remote_cell(
    house: House, kernels: Callable[..., Kernel]
) -> None:
    """Installed here by ``%pip``, there in the next cell; warm, and by no other environment."""
    kernel = kernels(python=house.python, env=house.variables)
    absent = "import importlib.util as u\nprint(u.find_spec('fpextra') is None)"
    assert kernel.remote(absent).stdout == "True\n"
    pod = newest()["pods"]
    here = kernel.ok("%pip install -q fpextra")
    assert "ERROR" not in here.stdout
    ran = kernel.remote("import fpextra\nprint(fpextra.__version__, fpextra.__file__)")
    assert ran.stdout == f"1.0 {house.site}/fpextra/__init__.py\n"
    assert newest()["pods"] == pod, "another environment costs a process, not a pod"
    stranger = kernels()
    assert stranger.remote(absent).stdout == "True\n"
    os.stat(house.site / "fpextra")


def interpreters(home: Path) -> dict[str, set[str]]:
    """The interpreters of each pod's templates, spares and jobs."""
    found: dict[str, set[str]] = {}
    for process in psutil.process_iter():
        try:
            marker = [word for word in process.cmdline() if f"firepool-pod={home}" in word]
            if marker:
                below = [each.cmdline() for each in process.children(recursive=True)]
                programs = {line[0] for line in below if line and "python" in line[0]}
                found.setdefault(marker[0].rpartition("/")[2], set()).update(programs)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_two_environments_share_no_process_spare_or_overlay(
    firepool_home: Path, kernels: Callable[..., Kernel]
) -> None:
    """In turn, with the same requirement: nothing of one is ever the other's."""
    houses = [House(firepool_home, name) for name in ("one", "two")]
    both = [kernels(python=house.python, env=house.variables) for house in houses]
    look = "import sys, fpextra\nprint(sys.executable, sys.prefix, fpextra.__file__)"
    pods: list[set[str]] = [set(), set()]
    overlays: list[set[str]] = [set(), set()]
    for _ in range(3):
        for number, (kernel, house) in enumerate(zip(both, houses, strict=True)):
            shown = kernel.remote(look, "--with fpextra").stdout.split()
            assert shown[:2] == [house.python, str(house.prefix)]
            overlays[number].add(str(Path(shown[2]).parents[1]))
            pods[number].update(newest()["pods"])
            assert kernel.remote("import sys; print(sys.prefix)").stdout == f"{house.prefix}\n"
            pods[number].update(newest()["pods"])
    assert overlays[0].isdisjoint(overlays[1])
    assert pods[0].isdisjoint(pods[1])
    seen = interpreters(firepool_home)
    for number, house in enumerate(houses):
        mine = {program for pod in pods[number] for program in seen.get(pod, set())}
        assert mine
        assert str(houses[1 - number].prefix) not in " ".join(mine), (mine, house.prefix)
