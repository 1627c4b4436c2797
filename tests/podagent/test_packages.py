"""Packages: everything that an archive may be refused for, and that nothing is left behind."""

from __future__ import annotations

import io
import os
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from firepool_podagent import packages
from firepool_podagent.packages import PackageInvalidError, extract

HONEST = ("pkg/__init__.py", b"VALUE = 1\n")


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def make(path: Path, *entries: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as package:
        for name, data in (HONEST, *entries):
            package.writestr(name, data)
    return path


def with_mode(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system = 3
    entry.external_attr = mode << 16
    return entry


def raw_name(path: Path, placeholder: bytes, name: bytes) -> Path:
    """Put a name into an archive that zipfile itself would not write."""
    assert len(placeholder) == len(name)
    make(path, (placeholder.decode(), b"x"))
    path.write_bytes(path.read_bytes().replace(placeholder, name))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../up.py",
        "/abs.py",
        "a/../../up.py",
        "a/./b.py",
        "a//b.py",
        "..\\up.py",
        "C:\\x.py",
        "C:x.py",
        "..",
        ".",
        "pkg/../pkg/x.py",
        "line\nbreak.py",
        "tab\there.py",
        "pkg/" + "n" * 256,
    ],
)
def test_names_that_lead_elsewhere(tmp_path: Path, cache: Path, name: str) -> None:
    archive = make(tmp_path / "a.zip", (name, b"evil"))
    before = listing(tmp_path)
    with pytest.raises(PackageInvalidError) as refused:
        extract(archive, cache / "out")
    assert refused.value.entry == name
    assert repr(name) in str(refused.value)
    assert listing(tmp_path) == before


def test_a_nul_in_a_name(tmp_path: Path, cache: Path) -> None:
    archive = raw_name(tmp_path / "a.zip", b"okXname.py", b"ok\0name.py")
    with pytest.raises(PackageInvalidError, match="control character"):
        extract(archive, cache / "out")
    assert not listing(cache)


@pytest.mark.parametrize(
    ("entries", "culprit"),
    [
        ([("pkg/link", stat.S_IFLNK | 0o777), ("pkg/link/evil.py", 0o644)], "pkg/link"),
        ([("link", stat.S_IFLNK | 0o777)], "link"),
        ([("fifo", stat.S_IFIFO | 0o644)], "fifo"),
        ([("char", stat.S_IFCHR | 0o644)], "char"),
        ([("block", stat.S_IFBLK | 0o644)], "block"),
        ([("sock", stat.S_IFSOCK | 0o644)], "sock"),
        ([("folder", stat.S_IFDIR | 0o755)], "folder"),
        ([("file/", stat.S_IFREG | 0o755)], "file/"),
        ([("pkg/x.py", 0o644), ("pkg/x.py", 0o644)], "pkg/x.py"),
        ([("pkg/__init__.py/x.py", 0o644)], "pkg/__init__.py/x.py"),
        ([("pkg/x", 0o644), ("pkg/x/", 0o755)], "pkg/x/"),
        ([("pkg/X.py", 0o644), ("pkg/x.py", 0o644)], "pkg/x.py"),
        ([("PKG/x.py", 0o644)], "PKG/x.py"),
        ([("pkg/stra\u00dfe.py", 0o644), ("pkg/strasse.py", 0o644)], "pkg/strasse.py"),
        ([("pkg/\u00e9.py", 0o644), ("pkg/e\u0301.py", 0o644)], "pkg/e\u0301.py"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_kinds_and_collisions(
    tmp_path: Path, cache: Path, entries: list[tuple[str, int]], culprit: str
) -> None:
    archive = make(tmp_path / "a.zip", *((with_mode(*each), b"/tmp") for each in entries))
    before = listing(tmp_path)
    with pytest.raises(PackageInvalidError) as refused:
        extract(archive, cache / "out")
    assert refused.value.entry == culprit
    assert listing(tmp_path) == before


def test_hard_links(tmp_path: Path, cache: Path) -> None:
    for field, body in ((0x000D, b"\0" * 12 + b"target"), (0x756E, b"\0" * 6 + b"\5\0\0\0" + b"t")):
        entry = with_mode("hard", stat.S_IFREG | 0o644)
        entry.extra = struct.pack("<HH", field, len(body)) + body
        archive = make(tmp_path / "a.zip", (entry, b""))
        with pytest.raises(PackageInvalidError, match="hard link") as refused:
            extract(archive, cache / "out")
        assert refused.value.entry == "hard"
    assert not listing(cache)


def test_set_user_id_is_dropped_and_execution_kept(tmp_path: Path, cache: Path) -> None:
    archive = make(
        tmp_path / "a.zip",
        (with_mode("run", stat.S_IFREG | 0o6755), b"#!"),
        (with_mode("secret", stat.S_IFREG | 0o000), b""),
    )
    extract(archive, cache / "out")
    assert stat.S_IMODE((cache / "out/run").stat().st_mode) == 0o755
    assert os.access(cache / "out/secret", os.R_OK)


def test_a_planted_link_is_not_followed(tmp_path: Path, cache: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    archive = make(tmp_path / "a.zip")
    (cache / "out").symlink_to(outside)
    with pytest.raises(FileExistsError):
        extract(archive, cache / "out")
    (cache / "out").unlink()
    (cache / "pkg").symlink_to(outside)
    extract(archive, cache / "out")
    assert not listing(outside)
    assert (cache / "out/pkg/__init__.py").read_bytes() == HONEST[1]


def test_a_link_planted_while_it_is_unpacked_is_not_followed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    archive = make(tmp_path / "a.zip")

    def plant_instead(name: str, *_args: object, dir_fd: int) -> None:
        os.symlink(outside, name, dir_fd=dir_fd)

    monkeypatch.setattr(packages.os, "mkdir", plant_instead)
    monkeypatch.setattr(packages.tempfile, "mkdtemp", lambda **_: str(_made(cache / "partial")))
    with pytest.raises(OSError, match="pkg"):
        extract(archive, cache / "out")
    assert not listing(outside)
    assert not listing(cache)


def _made(folder: Path) -> Path:
    subprocess.run(["mkdir", str(folder)], check=True)
    return folder


def test_bombs_by_header_and_by_what_is_written(tmp_path: Path, cache: Path) -> None:
    archive = tmp_path / "bomb.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(*HONEST)
        with package.open("zeros.bin", "w", force_zip64=True) as target:
            for _ in range(3000):
                target.write(bytes(1_000_000))
    assert archive.stat().st_size < 10_000_000
    with pytest.raises(PackageInvalidError) as refused:
        extract(archive, cache / "out")
    assert refused.value.entry == "zeros.bin"
    assert not listing(cache)


def test_a_bomb_whose_header_lies(tmp_path: Path, cache: Path) -> None:
    archive = tmp_path / "liar.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr("zeros.bin", bytes(5_000_000))
    data = bytearray(archive.read_bytes())
    true_size = struct.pack("<I", 5_000_000)
    for position in _positions(data, true_size):
        data[position : position + 4] = struct.pack("<I", 10)
    archive.write_bytes(data)
    with pytest.raises(PackageInvalidError):
        extract(archive, cache / "out", limit_bytes=1_000_000)
    assert not listing(cache)


def test_what_is_written_is_counted_over_all_entries(tmp_path: Path, cache: Path) -> None:
    archive = make(tmp_path / "a.zip", *((f"f{n}", bytes(1000)) for n in range(10)))
    with pytest.raises(PackageInvalidError) as refused:
        extract(archive, cache / "out", limit_bytes=5_000)
    assert refused.value.entry == "f4"
    assert not listing(cache)


def _positions(data: bytearray, needle: bytes) -> list[int]:
    found = []
    position = data.find(needle)
    while position >= 0:
        found.append(position)
        position = data.find(needle, position + 1)
    return found


def test_truncated_and_damaged_archives(tmp_path: Path, cache: Path) -> None:
    whole = make(tmp_path / "a.zip", ("data.bin", os.urandom(10_000))).read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.zip").write_bytes(whole[:cut])
        with pytest.raises(PackageInvalidError):
            extract(tmp_path / "cut.zip", cache / "out")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    (tmp_path / "cut.zip").write_bytes(damaged)
    with pytest.raises(PackageInvalidError) as refused:
        extract(tmp_path / "cut.zip", cache / "out")
    assert refused.value.entry == "data.bin"
    assert not listing(cache)


def test_too_large_an_archive(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKED_LIMIT_BYTES", 100)
    with pytest.raises(PackageInvalidError, match="limit is 100"):
        extract(make(tmp_path / "a.zip"), cache / "out")


def test_encrypted_entries(tmp_path: Path, cache: Path) -> None:
    archive = make(tmp_path / "a.zip")
    data = bytearray(archive.read_bytes())
    for position in _positions(data, b"PK\1\2"):
        data[position + 8] |= 1
    archive.write_bytes(data)
    with pytest.raises(PackageInvalidError, match="encrypted"):
        extract(archive, cache / "out")


def test_an_honest_archive_imports(tmp_path: Path, cache: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as package:
        package.mkdir("pkg") if sys.version_info >= (3, 11) else package.writestr("pkg/", b"")
        package.writestr("pkg/__init__.py", "from .sub import VALUE\n")
        package.writestr("pkg/sub.py", "VALUE = 7\n")
        package.writestr("pkg/data/\u00fcber.txt", "text")
    archive = tmp_path / "a.zip"
    archive.write_bytes(buffer.getvalue())
    written = extract(archive, cache / "out")
    assert written == len("from .sub import VALUE\n") + len("VALUE = 7\n") + 4
    done = subprocess.run(
        [sys.executable, "-c", "import pkg; print(pkg.VALUE)"],
        cwd=cache / "out",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "7\n"
    assert sorted(os.listdir(cache)) == ["out"]
