"""Requirements: what goes into an overlay, what fails, and that nothing else is written."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from firepool_podagent import overlays
from firepool_podagent.overlays import MARKER, Overlay
from firepool_podagent.requirements import Installation, RequirementsFailedError, masked

TOOLS = ("uv", "pip")


def wheel(folder: Path, name: str, version: str, *requires: str, script: bool = False) -> Path:
    """Make a wheel with one module of that name."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n\ndef main(): print(__version__)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Provides-Extra: extra\n" + "".join(f"Requires-Dist: {each}\n" for each in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name}-say = {name}:main\n"
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


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "fpmini", "1.0")
    wheel(folder, "fpmini", "2.0")
    wheel(folder, "fpdep", "1.0", script=True)
    wheel(folder, "fptop", "1.0", "fpdep", "fpmini")
    return folder


@pytest.fixture
def environment(tmp_path: Path, wheels: Path) -> dict[str, Any]:
    """An environment that has fpmini 2.0 and pip."""
    prefix = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    version = sys.version.split()[0]
    packages = prefix / "lib" / f"python{version.rpartition('.')[0]}" / "site-packages"
    with zipfile.ZipFile(wheels / "fpmini-2.0-py3-none-any.whl") as archive:
        archive.extractall(packages)
    import pip

    source = Path(pip.__file__).parent
    shutil.copytree(source, packages / "pip")
    (info,) = source.parent.glob("pip-*.dist-info")
    shutil.copytree(info, packages / info.name)
    return {
        "executable": str(prefix / "bin" / "python"),
        "prefix": str(prefix),
        "base_prefix": sys.base_prefix,
        "version": version,
        "digest": "d" * 16,
    }


@pytest.fixture(params=TOOLS)
def variables(request: pytest.FixtureRequest, wheels: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a session that installs with uv, and of one that installs with pip."""
    folder = tmp_path / "bin"
    folder.mkdir()
    if request.param == "uv":
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert uv is not None
        (folder / "uv").symlink_to(uv)
    return {
        "PATH": f"{folder}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_TARGET": str(tmp_path / "leak"),
        "PIP_PREFIX": str(tmp_path / "leak"),
        "PIP_USER": "1",
        "UV_TARGET": str(tmp_path / "leak"),
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
        "PYTHONPATH": str(tmp_path / "leak"),
        "VIRTUAL_ENV": str(tmp_path / "leak"),
    }


def install(
    environment: dict[str, Any], lines: list[str], variables: dict[str, str], **changes: Any
) -> Installation:
    if "destination" not in changes:
        changes.setdefault("overlay_root", os.path.join(variables["HOME"], "overlays"))
    installation = Installation(environment, lines, variables=variables, **changes)
    assert installation.overlay.acquire()
    command = installation.begin()
    while command is not None:
        done = subprocess.run(
            command.argv,
            env=command.env,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        command = installation.advance(done.returncode, done.stdout)
    return installation


def imported(environment: dict[str, Any], overlay: Path, expression: str) -> str:
    done = subprocess.run(
        [environment["executable"], "-B", "-c", f"import fpmini; print({expression})"],
        env={"PYTHONPATH": str(overlay)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def snapshot(folder: str | Path) -> dict[str, Any]:
    """Every name below a folder with its content and times."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found


def test_only_what_the_environment_lacks_is_installed(
    environment: dict[str, Any], variables: dict[str, str]
) -> None:
    before = snapshot(environment["prefix"])
    installation = install(environment, ["fptop"], variables)
    assert installation.installed == {"fpdep": "1.0", "fptop": "1.0"}
    assert installation.overlay.is_complete()
    path = installation.overlay.path
    assert imported(environment, path, "__import__('fptop').__version__ + fpmini.__version__") == (
        "1.02.0"
    )
    assert snapshot(environment["prefix"]) == before
    assert not os.path.exists(os.path.join(variables["HOME"], "leak"))
    assert [each.name for each in path.parent.iterdir() if "partial" in each.name] == []


def test_a_pinned_version_stands_before_the_environments(
    environment: dict[str, Any], variables: dict[str, str]
) -> None:
    before = snapshot(environment["prefix"])
    installation = install(environment, ["fpmini[extra]==1.0"], variables)
    assert imported(environment, installation.overlay.path, "fpmini.__version__") == "1.0"
    assert imported(environment, Path("/nonexistent"), "fpmini.__version__") == "2.0"
    assert snapshot(environment["prefix"]) == before


def test_what_is_there_already_makes_an_empty_overlay(
    environment: dict[str, Any], variables: dict[str, str]
) -> None:
    installation = install(environment, ["fpmini>=1"], variables)
    assert installation.installed == {}
    assert os.listdir(installation.overlay.path) == [MARKER]


def test_scripts_run_with_the_environments_interpreter(
    environment: dict[str, Any], variables: dict[str, str]
) -> None:
    path = install(environment, ["fpdep"], variables).overlay.path
    done = subprocess.run(
        [path / "bin" / "fpdep-say"], env={"PYTHONPATH": str(path)}, capture_output=True, text=True
    )
    assert done.stdout == "1.0\n", done.stderr


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["fp-no-such-dist-14792==9.9"], "fp-no-such-dist-14792"),
        (["fpmini<2", "fpmini>=2"], "fpmini"),
        (["pkg @ git+https://user:hunter22@127.0.0.1:9/x.git"], "127.0.0.1:9"),
        (["fpmini==1.0 --hash=sha256:" + "0" * 64], "hash"),
    ],
)
def test_failures_say_what_the_resolver_said_and_leave_nothing(
    environment: dict[str, Any], variables: dict[str, str], lines: list[str], told: str
) -> None:
    before = snapshot(environment["prefix"])
    with pytest.raises(RequirementsFailedError) as failed:
        install(environment, lines, variables)
    assert told in str(failed.value).lower()
    assert "hunter22" not in str(failed.value)
    assert snapshot(environment["prefix"]) == before
    root = Path(variables["HOME"], "overlays", environment["digest"])
    assert [each.name for each in root.iterdir() if not each.name.endswith(".lock")] == []


def test_files_of_the_package(
    environment: dict[str, Any], variables: dict[str, str], tmp_path: Path
) -> None:
    package = tmp_path / "package"
    wheel(package / "wheels", "fpmini", "1.0")
    for line in (
        "./wheels/fpmini-1.0-py3-none-any.whl",
        "wheels/fpmini-1.0-py3-none-any.whl",
        "fpmini @ ./wheels/fpmini-1.0-py3-none-any.whl",
    ):
        installation = install(environment, [line], variables, package=str(package))
        assert installation.installed == {"fpmini": "1.0"}
        shutil.rmtree(installation.overlay.path)
    for line, told in (
        ("./wheels/absent.whl", "no such file"),
        ("../outside.whl", "outside the package"),
        ("-e ./wheels", "travels as a package"),
        ("-r more.txt", "lines of that file"),
    ):
        with pytest.raises(RequirementsFailedError, match=told) as failed:
            install(environment, [line], variables, package=str(package))
        assert line.split()[-1] in str(failed.value)


def test_the_key_is_what_is_installed_not_where_it_lies(
    environment: dict[str, Any], variables: dict[str, str], tmp_path: Path
) -> None:
    def key(lines: list[str], **changes: Any) -> str:
        return Installation(
            environment, lines, overlay_root="/o", variables=variables, **changes
        ).overlay.path.name

    for name in ("one", "two"):
        wheel(tmp_path / name, "fpmini", "1.0")
    line = "./fpmini-1.0-py3-none-any.whl"
    assert key([line], package=str(tmp_path / "one")) == key([line], package=str(tmp_path / "two"))
    assert key(["a"]) != key(["b"])
    assert key(["a"]) != key(["a"], index_url="https://elsewhere/simple")
    assert key(["a", "b"]) != key(["ab"])


def test_a_sessions_overlay_grows(environment: dict[str, Any], variables: dict[str, str]) -> None:
    destination = os.path.join(variables["HOME"], "session", "overlay")
    install(environment, ["fpmini==1.0"], variables, destination=destination, keep=True)
    second = install(environment, ["fptop"], variables, destination=destination, keep=True)
    assert second.installed == {"fpdep": "1.0", "fptop": "1.0"}
    assert imported(environment, Path(destination), "fpmini.__version__") == "1.0"
    third = install(environment, ["fpmini==2.0"], variables, destination=destination, keep=True)
    assert third.installed == {"fpmini": "2.0"}
    assert set(overlays.distributions(Path(destination))) == {"fpdep", "fpmini", "fptop"}
    assert imported(environment, Path(destination), "fpmini.__version__") == "2.0"


def test_an_unfinished_overlay_is_removed_and_filled_again(
    environment: dict[str, Any], variables: dict[str, str]
) -> None:
    first = install(environment, ["fpdep"], variables)
    (first.overlay.path / MARKER).unlink()
    (first.overlay.path / "half").mkdir()
    second = install(environment, ["fpdep"], variables)
    assert second.overlay.is_complete()
    assert not (second.overlay.path / "half").exists()


def test_an_environment_without_tools_uses_what_comes_with_python(
    environment: dict[str, Any], wheels: Path, tmp_path: Path
) -> None:
    packages = next(Path(environment["prefix"]).glob("lib/python*/site-packages"))
    for path in packages.glob("pip*"):
        shutil.rmtree(path)
    variables = {
        "PATH": "/nonexistent",
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    assert install(environment, ["fpdep"], variables).installed == {"fpdep": "1.0"}


def test_index_credentials_stay_out_of_the_command_line_and_messages(
    environment: dict[str, Any], variables: dict[str, str]
) -> None:
    installation = Installation(
        environment,
        ["fpmini"],
        overlay_root="/nonexistent",
        index_url="https://user:s3cretword@index.invalid/simple",
        variables={**variables, "PIP_EXTRA_INDEX_URL": "https://other:pw12345@x.invalid/simple"},
    )
    text = "GET https://user:s3cretword@index.invalid/simple failed (password s3cretword, pw12345)"
    assert "s3cretword" not in installation.masked(text)
    assert "pw12345" not in installation.masked(text)
    assert masked("git+https://token@host/x") == "git+https://****@host/x"


def test_locks_and_eviction(tmp_path: Path) -> None:
    made: list[Overlay] = []
    for number in range(4):
        overlay = Overlay(tmp_path / "environment" / f"key{number}")
        assert overlay.acquire()
        assert not Overlay(overlay.path).acquire()
        stage = overlay.stage()
        (stage / "data").write_bytes(bytes(1000))
        overlay.put(stage)
        overlay.release()
        os.utime(overlay.path / MARKER, (number, number))
        made.append(overlay)
    assert made[0].is_complete()  # used just now, so it is the newest
    assert made[1].acquire()  # somebody fills it
    removed = overlays.evict(tmp_path, limit_bytes=3500, keep=[str(made[2].path)])
    assert removed == [str(made[3].path)]
    made[1].release()
    assert overlays.evict(tmp_path, limit_bytes=2500) == [str(made[1].path)]
    assert made[0].is_complete()
    assert made[2].is_complete()
