"""Packages: zip archives that are unpacked for a job, wholly or not at all.

An archive is hostile until it was checked. Every entry is looked at before the first byte is
written: names that lead out of the folder or mean another file on another system, links, devices,
duplicates, names that differ in case only, or a file where another entry needs a folder are refused
with the entry's name. What is written is counted as it is written, since sizes in headers may lie.
Files are created relative to open folder descriptors and never through a symlink, so a link that
somebody planted beforehand is not followed. When anything fails, nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import tempfile
import unicodedata
import zipfile
import zlib
from typing import IO, Final

PACKED_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""Largest archive."""
UNPACKED_LIMIT_BYTES: Final = 2_000_000_000
"""Most bytes that an archive may become."""
ENTRY_LIMIT: Final = 200_000
"""Most entries in an archive."""
_CHUNK_BYTES = 1 << 20
_PERMISSIONS = 0o777
_METHODS = frozenset(
    {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
)
_ENCRYPTED = 0x1
_UNIX = 3
_NAME_LIMIT_BYTES = 255


class PackageInvalidError(Exception):
    """An archive was refused.

    Attributes
    ----------
    entry
        The name of the entry that it was refused for; None when it is the archive as a whole.
    """

    def __init__(self, message: str, entry: str | None = None) -> None:
        super().__init__(message if entry is None else f"{entry!r}: {message}")
        self.entry = entry


def extract(
    archive: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    limit_bytes: int = UNPACKED_LIMIT_BYTES,
) -> int:
    """Unpack ``archive`` as the new folder ``destination``; return the bytes written.

    The folder appears under its name only when everything is in it.

    Parameters
    ----------
    archive
        Path of a zip file.
    destination
        Path that must not exist yet; its parent must.
    limit_bytes
        Most bytes that may be written.

    Raises
    ------
    PackageInvalidError
        The archive is refused; names the entry. Nothing was left behind.
    FileExistsError
        The destination exists.
    """
    destination = os.path.abspath(os.fspath(destination))
    if os.path.lexists(destination):
        raise FileExistsError(f"{destination} exists already")
    if (size := os.path.getsize(archive)) > PACKED_LIMIT_BYTES:
        raise PackageInvalidError(
            f"the archive has {size} bytes, the limit is {PACKED_LIMIT_BYTES}"
        )
    parent, name = os.path.split(destination)
    partial = tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=parent)
    try:
        with _open(archive) as package:
            entries = check(package)
            root = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                written = _Writer(package, root, limit_bytes).write(entries)
            finally:
                os.close(root)
        os.chmod(partial, 0o755)
        os.rename(partial, destination)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return written


def _open(archive: str | os.PathLike[str]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise PackageInvalidError(f"not a whole zip archive: {error}") from error


def check(package: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive that may be unpacked.

    Raises
    ------
    PackageInvalidError
        Names the first entry that may not.
    """
    entries = package.infolist()
    if len(entries) > ENTRY_LIMIT:
        raise PackageInvalidError(f"{len(entries)} entries, the limit is {ENTRY_LIMIT}")
    seen: dict[str, tuple[str, bool]] = {}
    for entry in entries:
        # zipfile cuts names at a NUL and turns other separators; what stands in the archive counts.
        name = entry.orig_filename
        parts = _checked_parts(name)
        _check_kind(entry, name)
        is_folder = name.endswith("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            folder = is_folder or depth < len(parts)
            known = seen.get(_folded(path))
            if known is None:
                seen[_folded(path)] = (path, folder)
            elif known[0] != path:
                raise PackageInvalidError(f"differs from {known[0]!r} in case only", name)
            elif not (known[1] and folder):
                raise PackageInvalidError("stands in the archive twice", name)
    declared = sum(entry.file_size for entry in entries)
    if declared > UNPACKED_LIMIT_BYTES:
        largest = max(entries, key=lambda entry: entry.file_size)
        raise PackageInvalidError(
            f"the archive becomes {declared} bytes, the limit is {UNPACKED_LIMIT_BYTES}",
            largest.orig_filename,
        )
    return entries


def _folded(path: str) -> str:
    # Two spellings of one name on a file system that folds case or composes characters.
    return unicodedata.normalize("NFC", path).casefold()


def _checked_parts(name: str) -> list[str]:
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise PackageInvalidError("its name has a control character", name)
    if "\\" in name:
        raise PackageInvalidError("its name has a backslash", name)
    if name.startswith("/"):
        raise PackageInvalidError("its name is absolute", name)
    if len(name) > 1 and name[1] == ":" and name[0].isalpha():
        raise PackageInvalidError("its name begins with a drive letter", name)
    parts = name.removesuffix("/").split("/")
    for part in parts:
        if part in ("", ".", ".."):
            raise PackageInvalidError(f"its name has the part {part!r}", name)
        try:
            encoded = part.encode("utf-8")
        except UnicodeEncodeError:
            raise PackageInvalidError("its name is not text", name) from None
        if len(encoded) > _NAME_LIMIT_BYTES:
            raise PackageInvalidError("a part of its name is too long", name)
    return parts


def _check_kind(entry: zipfile.ZipInfo, name: str) -> None:
    if entry.flag_bits & _ENCRYPTED:
        raise PackageInvalidError("is encrypted", name)
    if entry.compress_type not in _METHODS:
        raise PackageInvalidError(f"uses the unknown compression {entry.compress_type}", name)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        raise PackageInvalidError("is a symlink", name)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise PackageInvalidError("is neither a file nor a folder", name)
    if kind and (kind == stat.S_IFDIR) != name.endswith("/"):
        raise PackageInvalidError("its name and its kind disagree", name)
    if _has_link_field(entry.extra):
        raise PackageInvalidError("is a hard link", name)


def _has_link_field(extra: bytes) -> bool:
    """Whether an old Unix field (0x000d) carries the name of a linked file, or 0x756e a link."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        body = extra[position + 4 : position + 4 + size]
        if kind == 0x000D and len(body) > 12:
            return True
        if kind == 0x756E and len(body) >= 10 and struct.unpack_from("<I", body, 6)[0]:
            return True
        position += 4 + size
    return False


class _Writer:
    """Writes checked entries below an open folder."""

    def __init__(self, package: zipfile.ZipFile, root: int, limit_bytes: int) -> None:
        self._package = package
        self._root = root
        self._limit_bytes = limit_bytes
        self._written = 0

    def write(self, entries: list[zipfile.ZipInfo]) -> int:
        """Write them all; return the number of bytes."""
        for entry in entries:
            name = entry.orig_filename
            *folders, last = name.removesuffix("/").split("/")
            if name.endswith("/"):
                folders.append(last)
            folder = self._descend(folders)
            try:
                if not name.endswith("/"):
                    self._write_file(entry, name, folder, last)
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
                raise PackageInvalidError(f"is damaged: {error}", name) from error
            finally:
                os.close(folder)
        return self._written

    def _descend(self, folders: list[str]) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        current = os.dup(self._root)
        try:
            for folder in folders:
                try:
                    os.mkdir(folder, 0o755, dir_fd=current)
                except FileExistsError:
                    pass
                below = os.open(folder, flags, dir_fd=current)
                os.close(current)
                current = below
        except BaseException:
            os.close(current)
            raise
        return current

    def _write_file(self, entry: zipfile.ZipInfo, name: str, folder: int, last: str) -> None:
        # Set-user-id and its like are dropped; what the owner cannot read is of no use to a job.
        mode = (entry.external_attr >> 16) & _PERMISSIONS if entry.create_system == _UNIX else 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(last, flags, 0o600, dir_fd=folder)
        with os.fdopen(fd, "wb") as target:
            with self._package.open(entry) as source:
                self._copy(source, target, name)
            os.fchmod(target.fileno(), (mode or 0o644) | 0o400)

    def _copy(self, source: IO[bytes], target: IO[bytes], name: str) -> None:
        while chunk := source.read(_CHUNK_BYTES):
            self._written += len(chunk)
            if self._written > self._limit_bytes:
                raise PackageInvalidError(
                    f"with it more than {self._limit_bytes} bytes are written", name
                )
            target.write(chunk)
