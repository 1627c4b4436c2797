"""How the embedded broker is found: folders, connection file, who counts as alive."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from firepool_broker import embedded, processes
from firepool_broker.identity.keys import load_secret
from firepool_broker.testing import Api, assert_nothing_left, kill_hard, processes_of


@pytest.fixture
def connection(firepool_home: Path) -> embedded.Connection:
    """A connection file that names this very process."""
    written = embedded.Connection(
        socket=str(firepool_home / "run" / "broker.sock"),
        token="secret",
        wire=embedded.WIRE_VERSION,
        pid=os.getpid(),
        start_time=processes.start_time(os.getpid()) or 0,
        version="1.2.3",
        started_at=1.0,
    )
    embedded.write_connection(embedded.connection_path(), written)
    return written


def test_the_home_is_private_and_named_by_one_variable(firepool_home: Path) -> None:
    paths = embedded.home()
    assert paths == (str(firepool_home / "run"), str(firepool_home / "state"))
    for path in paths:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


def test_folders_that_others_can_enter_are_closed(firepool_home: Path) -> None:
    (firepool_home / "run").mkdir(mode=0o755)
    embedded.home()
    assert stat.S_IMODE((firepool_home / "run").stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(firepool_home: Path) -> None:
    (firepool_home / "elsewhere").mkdir()
    (firepool_home / "run").symlink_to("elsewhere")
    with pytest.raises(embedded.EmbeddedError, match="not a folder of yours"):
        embedded.home()


def test_without_variables_the_systems_own_folders_are_used(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FIREPOOL_HOME")
    for name in ("runtime", "state"):
        (firepool_home / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(firepool_home / "runtime"))
    monkeypatch.setenv("XDG_STATE_HOME", str(firepool_home / "state"))
    assert embedded.home() == (
        str(firepool_home / "runtime" / "firepool-nb"),
        str(firepool_home / "state" / "firepool-nb"),
    )


def test_a_home_on_a_network_disk_is_replaced_by_a_local_folder(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FIREPOOL_HOME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(firepool_home))
    monkeypatch.setenv("XDG_STATE_HOME", str(firepool_home / "nfs"))
    monkeypatch.setattr(embedded, "_is_local", lambda path: "nfs" not in path)
    monkeypatch.setattr(embedded, "_temporary_base", lambda: str(firepool_home / "tmp"))
    assert embedded.home().state_dir == str(firepool_home / "tmp" / "state")


def test_network_file_systems_are_told_from_the_mount_table(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "23 22 0:4 / /home rw shared:5 - nfs4 server:/home rw\n"
        "24 23 0:5 / /home/ada/local\\040disk rw - ext4 /dev/sdb rw\n"
        "25 22 0:6 / /mnt/far rw - fuse.sshfs far:/ rw\n"
    )
    real = open

    def opened(path, *args, **kwargs):  # type: ignore[no-untyped-def]
        if path == "/proc/self/mountinfo":
            (firepool_home / "mountinfo").write_text(table)
            path = firepool_home / "mountinfo"
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", opened)
    assert embedded._is_local("/var/lib")
    assert embedded._is_local("/homework")
    assert not embedded._is_local("/home/ada")
    assert embedded._is_local("/home/ada/local disk/state")
    assert not embedded._is_local("/mnt/far/x")


def test_the_connection_file_is_named_by_the_boot_alone_and_private(
    connection: embedded.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(embedded.connection_path())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")
    assert path.name == f"broker-{boot[:16]}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert embedded.find() == connection
    renamed = os.uname_result(("Linux", "renamed", "", "", ""))
    monkeypatch.setattr(os, "uname", lambda: renamed)
    assert embedded.find() == connection


def test_a_dead_brokers_file_does_not_count(connection: embedded.Connection) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = processes.start_time(process.pid)
        assert started is not None
        alive = connection._replace(pid=process.pid, start_time=started)
        embedded.write_connection(embedded.connection_path(), alive)
        assert embedded.find() == alive
        process.kill()
        process.wait()
        assert embedded.find() is None


def test_a_pid_that_was_handed_on_does_not_count(connection: embedded.Connection) -> None:
    another = connection._replace(start_time=connection.start_time + 1)
    embedded.write_connection(embedded.connection_path(), another)
    assert embedded.find() is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"socket": "x"}', "\xff"])
def test_a_file_that_says_nothing_is_no_broker(firepool_home: Path, content: str) -> None:
    Path(embedded.connection_path()).write_text(content)
    assert embedded.find() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"socket": 5},
        {"socket": "relative"},
        {"token": None},
        {"token": "\u2026"},
        {"wire": "1"},
        {"pid": "7"},
        {"pid": True},
        {"pid": -1},
        {"start_time": 1.5},
        {"version": 1},
        {"started_at": "now"},
    ],
    ids=str,
)
def test_a_file_of_other_types_is_no_broker(
    connection: embedded.Connection, wrong: dict[str, object]
) -> None:
    Path(embedded.connection_path()).write_text(json.dumps({**connection._asdict(), **wrong}))
    assert embedded.find() is None


def test_what_cannot_be_written_is_not_there_half(
    firepool_home: Path, connection: embedded.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves the old file, or none, and says why."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    secret = firepool_home / "secret"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=f"No space left on device.*{secret}"):
        load_secret(str(secret))
    with pytest.raises(OSError, match="No space left"):
        embedded.write_connection(embedded.connection_path(), connection._replace(token="x"))
    monkeypatch.undo()
    assert not secret.exists()
    assert not list(firepool_home.glob("**/*.new"))
    assert embedded.read_connection(str(next((firepool_home / "run").glob("*.json")))) == connection
    assert len(load_secret(str(secret))) == 32


def test_a_start_that_fails_is_explained_even_when_its_log_cannot_be_written(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.home()
    log = firepool_home / "state" / "broker.log"
    log.symlink_to("/dev/full")
    (firepool_home / "state" / "firepool.db").write_bytes(b"junk" * 1000)
    with pytest.raises(embedded.BrokerStartFailed, match=r"firepool\.db is damaged") as caught:
        embedded.ensure_running()
    assert "Move it aside" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_broker_that_is_not_ready_in_time_is_ended(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = firepool_home / "stuck" / "firepool_broker"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, signal, sys\n"
        "if os.fork(): os._exit(0)\n"
        f"open({str(firepool_home / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True: signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with pytest.raises(embedded.BrokerStartFailed, match="was not ready within 1 s"):
        embedded.ensure_running(timeout_seconds=1)
    pid = int((firepool_home / "pid").read_text())
    assert processes.wait_for_exit(pid, processes.start_time(pid) or 0, 5)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("secret", b"", "does not hold the broker's secret"),
        ("firepool.db", b"junk" * 1000, "is damaged"),
    ],
)
def test_pods_of_a_state_that_no_broker_can_read_are_ended_by_stop(
    broker: embedded.Connection, firepool_home: Path, name: str, content: bytes, said: str
) -> None:
    with Api(broker) as api:
        api.run("print(1)")
    kill_hard(broker)
    pods = processes_of(firepool_home)
    assert pods
    for path in (firepool_home / "state").glob(f"{name}*"):
        path.unlink()
    (firepool_home / "state" / name).write_bytes(content)
    with pytest.raises(embedded.BrokerStartFailed, match=said):
        embedded.ensure_running()
    assert embedded.stop() is True
    assert_nothing_left(firepool_home, 5)
    assert embedded.stop() is False


def test_a_broker_that_cannot_start_says_why(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = firepool_home / "config.yaml"
    config.write_text(json.dumps({"idle_exit_second": 3}))
    monkeypatch.setenv("FIREPOOL_CONFIG", str(config))
    with pytest.raises(embedded.BrokerStartFailed, match="idle_exit_seconds"):
        embedded.ensure_running()
    assert embedded.find() is None


def test_a_starter_that_is_stuck_does_not_stop_others_for_ever(firepool_home: Path) -> None:
    import fcntl

    lock_path = embedded.connection_path()[: -len(".json")] + ".lock"
    with open(lock_path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(embedded.BrokerStartFailed, match="another process has been starting"):
            embedded.ensure_running(timeout_seconds=0.1)


def test_stop_without_a_broker_is_no_error(firepool_home: Path) -> None:
    assert embedded.stop() is False


def test_importing_needs_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import firepool_broker.embedded;"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] in"
        " ('tornado', 'sqlalchemy', 'msgspec', 'asyncio', 'subprocess', 'http', 'socket')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_process_whose_main_thread_has_ended_still_lives() -> None:
    code = (
        "import ctypes, threading, sys\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = processes.start_time(process.pid)
        assert started is not None
        state = ""
        while state != "Z":
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert processes.is_alive(process.pid, started)
        assert processes.kill(process.pid, started)
        assert processes.wait_for_exit(process.pid, started, 10)


def test_a_broker_of_another_wire_version_hands_over_when_nothing_runs(
    broker: embedded.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WIRE_VERSION", broker.wire + 1)
    with pytest.raises(embedded.BrokerStartFailed, match="another wire version"):
        # the next one is of this release too: one hand-over, and no endless turns
        embedded.ensure_running()
    assert not broker.is_alive()


def test_a_broker_of_another_wire_version_that_is_busy_stays(
    broker: embedded.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Api(broker) as api:
        job = api.submit("import time; time.sleep(600)", attached=False)
        monkeypatch.setattr(embedded, "WIRE_VERSION", broker.wire + 1)
        with pytest.raises(embedded.WireMismatch, match=f"wire version {broker.wire}"):
            embedded.ensure_running()
        assert broker.is_alive()
        api.post(f"/v1/jobs/{job['id']}/cancel")
