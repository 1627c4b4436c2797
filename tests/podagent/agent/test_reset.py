"""A reset empties what is the pod's own, proves it, and touches nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from firepool_podagent import ipc
from firepool_podagent.removal import Removal
from firepool_podagent.testing import Agent, environment, until

HERE = Path(__file__).parent
_libc = ctypes.CDLL(None, use_errno=True)


def make_segment(key: int) -> int:
    number = _libc.shmget(key, 4096, 0o1600)
    assert number >= 0, os.strerror(ctypes.get_errno())
    return number


# --- odd trees ---------------------------------------------------------------------------------

ODD_TREE = r"""
import os
os.chdir(os.environ.get("TREE") or os.environ["TMPDIR"])
os.makedirs("ro/a/b"); open("ro/a/b/f", "w").write("x")
os.chmod("ro/a/b/f", 0o444); os.chmod("ro/a/b", 0o555); os.chmod("ro/a", 0)
os.symlink("/etc", "etc_link"); os.symlink("loop", "loop"); os.mkfifo("pipe")
os.symlink(os.environ.get("PRECIOUS", "/etc"), "precious")
open(b"bad\xff name\n", "w").close()
os.mkdir("d" * 255); open("d" * 255 + "/" + "f" * 255, "w").close()
import socket
socket.socket(socket.AF_UNIX).bind("sock")
for n in range(300):
    os.mkdir("d" * 50); os.chdir("d" * 50); open("leaf", "w").close()
"""


def test_a_tree_of_everything_odd(agent: Agent, short_dir: Path) -> None:
    precious = short_dir / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    precious.chmod(0o555)
    spec = agent.spec("")
    done = agent.run(ODD_TREE, env={**spec["env"], "PRECIOUS": str(precious)})
    assert done.error_class is None, done
    assert done.reset["clean"], done.reset
    assert done.reset["seconds"] < 5
    assert (precious / "file").read_text() == "kept"
    assert precious.stat().st_mode & 0o777 == 0o555
    after = agent.run("import os; print(os.listdir(os.environ['TMPDIR']))")
    assert "ro" not in after.text()
    assert "dddd" not in after.text()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become someone else")
def test_the_same_tree_without_being_root(short_dir: Path) -> None:
    short_dir.chmod(0o777)
    script = (
        f"import os, socket, sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom firepool_podagent.removal import Removal\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"os.environ['TREE'] = {str(short_dir / 'trash')!r}; os.mkdir(os.environ['TREE'])\n"
        f"{ODD_TREE}\nos.chdir('/')\n"
        f"r = Removal(Path({str(short_dir / 'trash')!r})); r.run()\n"
        "assert r.failures == [], r.failures\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert not (short_dir / "trash").exists()


def immutable(path: Path, on: bool) -> None:
    subprocess.run(["chattr", "+i" if on else "-i", str(path)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file immutable")
def test_a_file_that_cannot_be_removed_costs_the_pod_and_is_named(agent: Agent) -> None:
    done = agent.run(
        "import os, subprocess\nos.chdir(os.environ['TMPDIR'])\nos.mkdir('deep')\n"
        "open('deep/stays', 'w').close()\n"
        "subprocess.run(['chattr', '+i', 'deep/stays'], check=True)"
    )
    try:
        assert done.error_class is None, done
        assert not done.reset["clean"]
        assert "deep/stays" in done.reset["reason"]
        assert agent.health()["state"] == "unclean"
    finally:
        for path in agent.directory.rglob("stays"):
            immutable(path, False)


def test_removal_refuses_what_is_mounted_and_does_not_leave_its_file_system(
    agent: Agent, short_dir: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    precious = short_dir / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    code = (
        "import os, subprocess\nos.chdir(os.environ['TMPDIR'])\nos.mkdir('m')\n"
        f"subprocess.run(['mount', '--bind', {str(precious)!r}, 'm'], check=True)\n"
        "print(os.listdir('m'))"
    )
    done = agent.run(code, environment=environment(visible=[str(precious)]))
    mounted = [line for line in Path("/proc/mounts").read_text().split() if line.endswith("/m")]
    for point in mounted:
        subprocess.run(["umount", point], check=True)
    assert done.text() == "['file']\n"
    assert (precious / "file").read_text() == "kept"
    # with a view of its own the pod takes the mount away; without, it keeps its hands off
    assert done.reset["clean"] == (agent.facts["isolation"] == "namespaces"), done.reset


def test_ten_thousand_files(agent: Agent) -> None:
    done = agent.run(
        "import os\nos.chdir(os.environ['TMPDIR'])\n"
        "for n in range(100):\n    os.mkdir(str(n))\n"
        "    for m in range(100): open(f'{n}/{m}', 'w').close()"
    )
    assert done.reset["clean"]
    assert not list((agent.directory / "trash").iterdir())


def test_removal_counts_and_names(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "f").touch()
    (tree / "link").symlink_to(tmp_path)
    removal = Removal(tree)
    removal.run()
    assert (removal.removed, removal.failures) == (5, [])
    assert tmp_path.exists()
    gone = Removal(tree)
    gone.run()
    assert gone.failures == []


# --- shared memory and the like ----------------------------------------------------------------

LEAVE_BEHIND = r"""
import ctypes, multiprocessing, os, socket, time
from multiprocessing import shared_memory, resource_tracker
libc = ctypes.CDLL(None)
def serve():
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", {port})); s.listen()
    open("listening", "w").close()
    time.sleep(1000)
multiprocessing.get_context("fork").Process(target=serve, daemon=False).start()
while not os.path.exists("listening"): time.sleep(0.005)
m = shared_memory.SharedMemory(create=True, name="{name}", size=64 << 20)
resource_tracker.unregister(m._name, "shared_memory")
m.buf[0] = 1
print(libc.shmget({key}, 4096, 0o1600) >= 0, libc.semget({key}, 1, 0o1600) >= 0,
      libc.msgget({key}, 0o1600) >= 0)
semaphore = multiprocessing.Semaphore()
os.kill(os.getpid(), 9)
"""

USE_AGAIN = r"""
import os, socket
from multiprocessing import shared_memory
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", {port})); s.listen()
print("bound")
try:
    shared_memory.SharedMemory(create=True, name="{name}", size=1 << 20).unlink()
    print("created")
except FileExistsError:
    print("exists")
print(sorted(os.listdir("/dev/shm")))
print([len(open(f"/proc/sysvipc/{{k}}").read().splitlines()) for k in ("shm", "sem", "msg")])
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_leaked_memory_semaphores_children_and_ports(agent: Agent, port: int) -> None:
    name = f"fp_leak_{port}"
    key = 0x46500000 + port
    values = {"port": port, "name": name, "key": key}
    done = agent.run(LEAVE_BEHIND.format(**values))
    try:
        assert done.error_class == "Signal", done
        assert "SIGKILL" in done.outcome["error"]["message"]
        assert done.text() == "True True True\n"
        assert done.reset["clean"], done.reset
        after = agent.run(USE_AGAIN.format(**values))
        if agent.facts["isolation"] == "namespaces":
            assert done.reset["left"] == []
            assert after.text() == "bound\ncreated\n[]\n[1, 1, 1]\n"
        else:
            # the segment is the job's beyond doubt and goes; the rest is named and stays
            left = " ".join(done.reset["left"])
            assert f"/dev/shm/{name}" in left
            assert f"semaphores with key 0x{key:x}" in left
            assert f"message queue with key 0x{key:x}" in left
            assert not [o for o in ipc.objects() if o.key == key and o.kind == "shm"]
            assert after.text().startswith("bound\nexists\n")
    finally:
        for found in ipc.objects():
            if found.key == key:
                ipc.remove(found)
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def test_message_queues_go(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    if agent.facts["isolation"] != "namespaces":
        pytest.skip("needs namespaces")
    make = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mq_open(b'/left', os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, None) >= 0)"
    )
    for _ in range(2):
        done = agent.run(make)
        assert done.text() == "True\n"
        assert done.reset["clean"]


# --- the canary: nothing of one owner is seen by the next --------------------------------------

CANARY = r"""
import builtins, json, os, signal, socket, subprocess, sys, threading, time
os.environ["CANARY"] = "1"
builtins.canary = json.canary = sys.canary = 1
sys.modules["canary"] = sys
sys.path.insert(0, "/canary")
open("/tmp/canary-{n}", "w").write("secret")
open("/dev/shm/canary-{n}", "w").write("secret")
open(os.path.join(os.environ["TMPDIR"], "canary-{n}"), "w").write("secret")
s = socket.socket(socket.AF_UNIX); s.bind("\0canary-{n}"); s.listen()
subprocess.Popen(["sleep", "4242{n}"], start_new_session=True)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
signal.setitimer(signal.ITIMER_REAL, 1000)
os.umask(0o777)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
canary = 1
"""

LOOK = r"""
import builtins, glob, json, os, signal, socket, sys, threading
found = [name for name in ("CANARY",) if name in os.environ]
found += [m.__name__ for m in (builtins, json, sys) if hasattr(m, "canary")]
found += [n for n in ("canary",) if n in sys.modules or n in globals()]
found += [p for p in sys.path if "canary" in p]
found += glob.glob("/tmp/canary-*") + glob.glob("/dev/shm/canary-*")
found += glob.glob(os.path.join(os.environ["TMPDIR"], "canary*"))
found += [l for l in open("/proc/net/unix") if "canary-{n}" in l]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"4242{n}" in open(f"/proc/{{pid}}/cmdline", "rb").read(): found.append(pid)
    except OSError: pass
if signal.getitimer(signal.ITIMER_REAL)[0]: found.append("timer")
if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN: found.append("handler")
mask = os.umask(0o022)
if mask == 0o777: found.append("umask")
if threading.active_count() > 1: found.append("thread")
print(sorted(set(found)))
"""


def test_canary(agent: Agent) -> None:
    number = os.getpid()
    files = [f"/tmp/canary-{number}", f"/dev/shm/canary-{number}"]
    done = agent.run(CANARY.replace("{n}", str(number)))
    try:
        assert done.error_class is None, done
        seen = agent.run(LOOK.format(n=number), protected_env={"FIREPOOL_CALLER": "someone else"})
        if agent.facts["isolation"] == "namespaces":
            assert seen.text() == "[]\n"
        else:
            assert seen.text() == f"{sorted(files)}\n"
            assert all(any(path in left for left in done.reset["left"]) for path in files)
    finally:
        for path in files:
            Path(path).unlink(missing_ok=True)


# --- bystanders: what is not the pod's survives ------------------------------------------------


@pytest.fixture
def bystanders() -> Iterator[Callable[[], list[str]]]:
    """A stranger's things; calling it names those that are gone."""
    tag = f"stranger-{os.getpid()}"
    files = [Path("/tmp") / tag, Path("/dev/shm") / tag]
    for path in files:
        path.write_text("kept")
    folder = Path("/tmp") / f"{tag}-folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("kept")
    keys = [0x57000000 + os.getpid(), 0x58000000 + os.getpid()]
    make_segment(keys[0])
    _libc.semget(keys[0], 1, 0o1600)
    _libc.msgget(keys[0], 0o1600)
    # one whose creator is gone
    subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL(None).shmget({keys[1]}, 4096, 0o1600)"],
        check=True,
    )
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    mapped = mmap.mmap(os.open(files[1], os.O_RDWR), 4)

    def gone() -> list[str]:
        lost = [str(path) for path in files if path.read_text() != "kept"]
        if (folder / "inner" / "file").read_text() != "kept":
            lost.append(str(folder))
        present = {(found.kind, found.key) for found in ipc.objects()}
        wanted = {(kind, keys[0]) for kind in ("shm", "sem", "msg")} | {("shm", keys[1])}
        lost += [str(each) for each in wanted - present]
        if sleeper.poll() is not None:
            lost.append("a process")
        return lost

    yield gone
    mapped.close()
    sleeper.kill()
    sleeper.wait()
    for found in ipc.objects():
        if found.key in keys:
            ipc.remove(found)
    for path in (*files, folder / "inner" / "file"):
        path.unlink()
    (folder / "inner").rmdir()
    folder.rmdir()


LITTER = r"""
import ctypes, os, subprocess
libc = ctypes.CDLL(None)
open("/tmp/litter-{n}", "w").close(); open("/dev/shm/litter-{n}", "w").close()
open(os.path.join(os.environ["TMPDIR"], "own"), "w").close()
libc.shmget({key}, 4096, 0o1600)
subprocess.Popen(["sleep", "1000"], start_new_session=True, env={{}})
"""


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_bystanders_survive(
    start_agent: Callable[..., Agent],
    bystanders: Callable[[], list[str]],
    isolation: str,
    stress: int,
) -> None:
    agent = start_agent("one", isolation)
    other = start_agent("two", isolation)
    key = 0x59000000 + os.getpid()
    number = os.getpid()
    held = other.start_attempt(
        "import ctypes, os, time\n"
        "open(os.path.join(os.environ['TMPDIR'], 'mine'), 'w').write('kept')\n"
        f"open('/dev/shm/other-{number}', 'w').write('kept')\n"
        f"i = ctypes.CDLL(None).shmget({key + 1}, 4096, 0o1600)\n"
        "print('up', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
        f"print(open(os.path.join(os.environ['TMPDIR'], 'mine')).read(),\n"
        f"      open('/dev/shm/other-{number}').read(),\n"
        f"      ctypes.CDLL(None).shmget({key + 1}, 4096, 0) == i)"
    )
    try:
        for message in other.output(held):
            if message["type"] == "stream":
                break
        for _ in range(stress):
            done = agent.run(LITTER.format(n=number, key=key))
            assert done.error_class is None, done
            assert done.reset["clean"], done.reset
            assert done.reset["escapees"] == 0
            assert bystanders() == []
        (other.session_dir / "go").touch()
        finished = other.finish(held)
        assert finished.text() == "up\nkept kept True\n"
        if isolation == "process":
            assert any(
                "litter" in left
                for left in agent.run(LITTER.format(n=f"{number}-again", key=key)).reset["left"]
            )
            for path in Path("/tmp").glob(f"litter-{number}*"):
                path.unlink()
            for path in Path("/dev/shm").glob(f"litter-{number}*"):
                path.unlink()
    finally:
        Path(f"/dev/shm/other-{number}").unlink(missing_ok=True)
        for found in ipc.objects():
            if found.key in (key, key + 1):
                ipc.remove(found)


def test_what_the_session_keeps_is_kept(agent: Agent) -> None:
    agent.run("open('kept', 'w').write('x'); import os; os.makedirs('a/b')")
    assert agent.run("import os; print(sorted(os.listdir('.')))").text() == "['a', 'kept']\n"


def test_what_a_job_puts_into_the_pods_own_folder_goes(agent: Agent) -> None:
    path = str(agent.directory / "stowaway")
    done = agent.run(f"import os; os.makedirs({path!r}); open({path + '/x'!r}, 'w').close()")
    assert done.reset["clean"]
    assert not Path(path).exists()


# --- the private view --------------------------------------------------------------------------


@pytest.fixture
def private(start_agent: Callable[..., Agent]) -> Agent:
    agent = start_agent()
    if agent.facts["isolation"] != "namespaces":
        pytest.skip("needs namespaces")
    return agent


def test_the_notebooks_folder_and_named_sockets_show_through(
    private: Agent, short_dir: Path
) -> None:
    project = short_dir / "project"
    (project / "data").mkdir(parents=True)
    (project / "data" / "x.csv").write_text("1,2\n")
    (short_dir / "hidden").write_text("not for jobs")
    keys = short_dir / "ssh"
    keys.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(keys / "agent.1"))
        listening.listen()
        spec = private.spec("")
        look = (
            "import os, socket\nprint(open('data/x.csv').read())\n"
            f"print(os.path.exists({str(short_dir / 'hidden')!r}))\n"
            "socket.socket(socket.AF_UNIX).connect(os.environ['SSH_AUTH_SOCK'])\n"
            "open('out.txt', 'w').write('written'); open('/tmp/private', 'w').close()"
        )
        for _ in range(3):
            done = private.run(
                look,
                cwd=str(project),
                env={**spec["env"], "SSH_AUTH_SOCK": str(keys / "agent.1")},
            )
            assert done.text() == "1,2\n\nFalse\n", done
            assert done.reset["clean"], done.reset
            assert (project / "out.txt").read_text() == "written"
    # gone again for a job that does not name it, and the folder itself is unharmed
    path = str(project)
    seen = private.run(f"import os; print(os.path.exists({path!r}))")
    assert seen.text() == "False\n"
    assert (project / "data" / "x.csv").read_text() == "1,2\n"


def test_a_notebook_in_the_temporary_folder_itself_is_told(private: Agent) -> None:
    done = private.run("import os; print(os.getcwd())", cwd="/tmp")
    assert done.text() == "/tmp\n"
    assert any("/tmp is private in a pod" in note for note in done.notes)
    again = private.run("1", cwd="/tmp")
    assert not any("private in a pod" in note for note in again.notes)


def test_mounts_of_a_job_are_undone(private: Agent) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    done = private.run(
        "import os, subprocess\nos.makedirs('/tmp/a/b')\n"
        "subprocess.run('mount -t tmpfs x /tmp/a/b && mount -t tmpfs y /mnt', shell=True,"
        " check=True)\nopen('/mnt/secret', 'w').close()"
    )
    assert done.error_class is None, done
    assert done.reset["clean"], done.reset
    assert private.run("import os; print(os.path.exists('/mnt/secret'))").text() == "False\n"


def test_a_job_sees_only_its_own_processes(private: Agent) -> None:
    done = private.run("import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))")
    assert int(done.text()) < 10
    until(lambda: private.health()["state"] == "idle", 5, "not idle")


def test_what_the_broker_keeps_in_the_folder_stays(agent: Agent) -> None:
    """The broker's own files lie in the pod's folder, and say whose the pod is."""
    kept = [agent.directory / name for name in ("state.json", "annotations", "agent.log")]
    for path in kept:
        path.write_text('{"owner": "somebody"}\n')
    (agent.directory / "left-by-a-job").write_text("x")
    done = agent.run("print(1)")
    assert done.reset["clean"], done
    assert all(path.read_text().startswith('{"owner": "somebody"}') for path in kept)
    assert not (agent.directory / "left-by-a-job").exists()
