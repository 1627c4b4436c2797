"""Packages that lead elsewhere, through the broker: refused by entry, and nothing is left."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from firepool_broker.testing import Api

SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}
HONEST = ("pkg/__init__.py", b"VALUE = 7\n")
MINUTES = 60


def with_mode(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system = 3
    entry.external_attr = mode << 16
    return entry


def archive(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in (HONEST, *entries):
            file.writestr(name, data)
    return buffer.getvalue()


def bomb() -> bytes:
    """Three gigabytes of zeros in three megabytes."""
    block, times = bytes(100_000_000), 30
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    piece = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    packed = piece * times + packer.flush()
    name, size = b"zeros.bin", len(block) * times
    shared = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(packed), size, len(name), 0)
    local = b"PK\3\4" + shared + name + packed
    central = b"PK\1\2" + struct.pack("<H", 20) + shared + bytes(14) + name
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + b"PK\5\6" + end


def with_nul() -> bytes:
    return archive(("okXname.py", b"x")).replace(b"okXname.py", b"ok\0name.py")


REFUSED = {
    "parent": (archive(("../up.py", b"x")), "../up.py"),
    "absolute": (archive(("/abs.py", b"x")), "/abs.py"),
    "through": (archive(("a/../../up.py", b"x")), "a/../../up.py"),
    "backslash": (archive(("..\\up.py", b"x")), "..\\up.py"),
    "drive": (archive(("C:\\x.py", b"x")), "C:\\x.py"),
    "link-and-file": (
        archive(
            (with_mode("pkg/link", stat.S_IFLNK | 0o777), b"/tmp"),
            ("pkg/link/evil.py", b"x"),
        ),
        "pkg/link",
    ),
    "link": (
        archive((with_mode("link", stat.S_IFLNK | 0o777), b"../../other_user")),
        "link",
    ),
    "fifo": (archive((with_mode("pipe", stat.S_IFIFO | 0o644), b"")), "pipe"),
    "device": (archive((with_mode("dev", stat.S_IFBLK | 0o644), b"")), "dev"),
    "nul": (with_nul(), "ok\0name.py"),
    "newline": (archive(("a\nb.py", b"x")), "a\nb.py"),
    "case": (archive(("PKG/__init__.py", b"x")), "PKG/__init__.py"),
    "bomb": (bomb(), "zeros.bin"),
    "truncated": (archive(("a.py", bytes(5000)))[:-40], None),
}


def upload(api: Api, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    answer = api.http.put(f"/v1/packages/{digest}", content=content)
    assert answer.is_success, answer.text
    return digest


def listing(*folders: Path) -> set[str]:
    found = set()
    for folder in folders:
        for base, names, files in os.walk(folder):
            found.update(os.path.join(base, name) for name in (*names, *files))
    return found


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_every_bad_archive_is_refused_and_leaves_nothing(api: Api, firepool_home: Path) -> None:
    """C28 (1)-(8): one broker, one pod, every bad archive; then the honest one still imports."""
    home = firepool_home / "person"
    home.mkdir()
    api.session("kernel-1", cwd=str(home), env={"PATH": os.environ["PATH"], "HOME": str(home)})
    _, warm = api.run("print(1)", **SESSION)
    outside = (home, firepool_home / "state" / "sessions")
    before = listing(*outside)
    above = {name for name in os.listdir("/tmp") if not name.startswith(("fp", "pytest"))}
    for kind, (content, entry) in REFUSED.items():
        text, job = api.run("print('never')", package=upload(api, content), **SESSION)
        assert (text, job["state"]) == ("", "FAILED"), kind
        assert job["error"]["class"] == "PackageInvalid", (kind, job["error"])
        assert job["retries"] == {"user": 0, "infra": 0}, kind
        if entry is not None:
            assert repr(entry) in job["error"]["message"], (kind, job["error"]["message"])
        assert listing(*outside) == before, kind
    left = [path for path in listing(firepool_home / "state" / "pods") if "zeros" in path]
    assert left == []
    new = {n for n in os.listdir("/tmp") if not n.startswith(("fp", "pytest"))} - above
    assert not {"up.py", "abs.py", "evil.py", "link"} & new
    assert not os.path.exists("/abs.py")
    text, job = api.run("import pkg; print(pkg.VALUE)", package=upload(api, archive()), **SESSION)
    assert (text, job["pods"]) == ("7\n", warm["pods"])


def test_set_user_id_is_dropped(api: Api) -> None:
    """C28 (9): the file is there, the bit is not."""
    api.session("kernel-1")
    content = archive((with_mode("pkg/run", stat.S_IFREG | 0o4755), b"#!/bin/sh\n"))
    code = "import os, pkg; print(oct(os.stat(os.path.dirname(pkg.__file__) + '/run').st_mode))"
    text, job = api.run(code, package=upload(api, content), **SESSION)
    assert text == "0o100755\n", job["error"]


def test_nothing_is_written_through_a_planted_link(api: Api, firepool_home: Path) -> None:
    """C28 (10): a job plants links where packages are unpacked; the next package ignores them."""
    api.session("kernel-1")
    target = firepool_home / "target"
    target.mkdir()
    content = archive()
    code = (
        "import os, pkg\nfolder = os.path.dirname(os.path.dirname(pkg.__file__))\n"
        "os.rename(folder + '/pkg', folder + '/old')\n"
        f"os.symlink({str(target)!r}, folder + '/pkg')\n"
        f"os.rename(folder, folder + '-moved'); os.symlink({str(target)!r}, folder)\nprint('ok')"
    )
    text, job = api.run(code, package=upload(api, content), **SESSION)
    assert text == "ok\n" or job["state"] == "FAILED", job["error"]
    began = time.monotonic()
    text, job = api.run("import pkg; print(pkg.VALUE)", package=upload(api, content), **SESSION)
    assert (text, job["state"]) == ("7\n", "SUCCEEDED"), job["error"]
    assert time.monotonic() - began < MINUTES
    assert os.listdir(target) == []
