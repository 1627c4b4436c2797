"""Blobs and packages: files named by the SHA-256 of what they hold.

The contract: a file under its final name is complete, synced and has the digest of its name;
everything else lies in ``incoming/`` and is gone after a failure or the next start. What is used
is touched, so that retention counts from the last use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from firepool_broker.store.errors import (
    BlobMissing,
    BlobRefused,
    BlobTooLarge,
    DigestMismatch,
)
from firepool_broker.store.files import translated

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1024 * 1024
_SHARED_BYTES = 1024 * 1024 * 1024
# below this, hashing and writing take less time than handing them to a thread
_INLINE_BYTES = 64 * 1024


class BlobStore:
    """All blobs and packages under one folder.

    Parameters
    ----------
    directory
        The folder; created (mode 0700) when missing.
    limit_bytes
        Bytes of one blob.
    total_bytes
        Bytes of all blobs together that a sweep leaves; the least recently used go first.
    retention_seconds
        How long an unused blob is kept.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limit_bytes: int = 2 * 1024**3,
        total_bytes: int = 20 * 1024**3,
        retention_seconds: float = 7 * 86400.0,
    ) -> None:
        self._directory = directory
        self._incoming = directory / "incoming"
        self._total_bytes = total_bytes
        self._retention_seconds = retention_seconds
        self.limit_bytes = limit_bytes
        with translated(directory):
            self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._incoming.iterdir():  # uploads that a killed broker did not finish
                left.unlink()

    def path(self, sha256: str) -> Path | None:
        """Return the file of a blob and count it as used; ``None`` when there is none."""
        path = self._path(sha256)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def size_bytes(self, sha256: str) -> int:
        """Return the size of a blob; raises ``BlobMissing``."""
        try:
            return self._path(sha256).stat().st_size
        except FileNotFoundError:
            raise BlobMissing(f"there is no blob {sha256}; upload it first") from None

    def upload(self, sha256: str, *, limit_bytes: int | None = None) -> Upload:
        """Begin to take a blob piece by piece; use it as an asynchronous context manager."""
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return Upload(self._path(sha256), self._temporary(), sha256, limit)

    async def add_bytes(self, data: bytes) -> str:
        """Store bytes; returns their SHA-256."""
        sha256 = hashlib.sha256(data).hexdigest()
        if self.path(sha256) is None:
            async with self.upload(sha256) as upload:
                await upload.write(data)
                await upload.commit()
        return sha256

    async def add_file(self, sha256: str, source: Path, *, limit_bytes: int | None = None) -> int:
        """Take a file of this machine; returns its size in bytes.

        One that nobody may write is hard-linked. Any other is copied (by sharing its blocks where
        the file system can), for a link would change with it.

        Raises
        ------
        BlobRefused
            It is not a regular file, cannot be read, or changes while it is read.
        BlobTooLarge, DigestMismatch
            As they say.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        path = self._path(sha256)
        if self.path(sha256) is not None:
            return path.stat().st_size
        return await asyncio.to_thread(_take, source, path, self._temporary(), sha256, limit)

    def sweep(self, now: float, keep: Collection[str]) -> list[str]:
        """Delete what is unused for too long or too much in total; returns the digests.

        Blocking; run it in a thread. ``keep`` are the digests that unfinished jobs name.
        """
        found: list[tuple[float, int, Path]] = []
        with translated(self._directory):
            for folder in self._directory.iterdir():
                if folder == self._incoming:
                    continue
                for path in folder.iterdir():
                    if path.name not in keep:
                        state = path.stat()
                        found.append((state.st_mtime, state.st_size, path))
            found.sort(reverse=True)  # most recently used first
            total = 0
            deleted: list[str] = []
            for used_at, size, path in found:
                total += size
                if total > self._total_bytes or now - used_at > self._retention_seconds:
                    path.unlink(missing_ok=True)
                    deleted.append(path.name)
        return deleted

    def _path(self, sha256: str) -> Path:
        if _DIGEST.fullmatch(sha256) is None:
            raise BlobRefused(f"{sha256!r} is not a SHA-256 in lower-case hexadecimal digits")
        return self._directory / sha256[:2] / sha256

    def _temporary(self) -> Path:
        return self._incoming / secrets.token_hex(16)


class Upload:
    """A blob that arrives piece by piece; without ``commit`` nothing of it stays.

    Parameters
    ----------
    path, temporary
        The final and the temporary file.
    sha256
        The digest it must have.
    limit_bytes
        Bytes it may have.
    """

    def __init__(self, path: Path, temporary: Path, sha256: str, limit_bytes: int) -> None:
        self._path = path
        self._temporary = temporary
        self._expected = sha256
        self._limit_bytes = limit_bytes
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.size_bytes = 0
        """Bytes taken so far."""

    async def __aenter__(self) -> Upload:
        with translated(self._temporary):
            descriptor = os.open(
                self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400
            )
            self._file = os.fdopen(descriptor, "wb", buffering=0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    async def write(self, chunk: bytes) -> None:
        """Take a piece; raises ``BlobTooLarge`` or ``StoreFull``."""
        self.size_bytes += len(chunk)
        if self.size_bytes > self._limit_bytes:
            raise BlobTooLarge(f"larger than {self._limit_bytes} bytes, the limit of an upload")
        if len(chunk) > _INLINE_BYTES:
            await asyncio.to_thread(self._write, chunk)
        else:
            self._write(chunk)

    async def commit(self) -> int:
        """Check the digest and give the blob its name; returns its size in bytes."""
        got = self._digest.hexdigest()
        if got != self._expected:
            raise DigestMismatch(
                f"the {self.size_bytes} bytes that came have the SHA-256 {got}, not "
                f"{self._expected}; send them again"
            )
        await asyncio.to_thread(self._publish)
        return self.size_bytes

    def abort(self) -> None:
        """Leave nothing behind (nothing to do after ``commit``)."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)

    def _write(self, chunk: bytes) -> None:
        file = self._opened()
        self._digest.update(chunk)
        with translated(self._temporary):
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]

    def _publish(self) -> None:
        file = self._opened()
        with translated(self._path):
            os.fdatasync(file.fileno())
            file.close()
            _rename(self._temporary, self._path)
        self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the upload is over")
        return self._file


def _take(source: Path, path: Path, temporary: Path, sha256: str, limit_bytes: int) -> int:
    """Link or copy a file that has the right digest; returns its size in bytes."""
    try:
        # without NONBLOCK a pipe would be waited for; a link could lead anywhere
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: NUL in its name
        raise _unreadable(source, error) from error
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise BlobRefused(f"{source} is not a regular file")
        if before.st_size > limit_bytes:
            raise BlobTooLarge(f"{source} is larger than {limit_bytes} bytes")
        _check(descriptor, source, sha256, limit_bytes)
        try:
            with translated(temporary):
                if not _linked(source, temporary, before):
                    _copy(descriptor, temporary, sha256, source)
                after = os.stat(temporary)
                if os.fstat(descriptor).st_mtime_ns != before.st_mtime_ns:
                    raise BlobRefused(f"{source} changed while it was read")
                with temporary.open("rb") as file:
                    os.fdatasync(file.fileno())
                _rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return after.st_size
    finally:
        os.close(descriptor)


def _unreadable(source: Path, error: Exception) -> BlobRefused:
    reason = getattr(error, "strerror", None) or str(error)
    return BlobRefused(f"{source} cannot be read: {reason}")


def _linked(source: Path, temporary: Path, opened: os.stat_result) -> bool:
    """Hard-link a file that nobody may write; ``False`` when it has to be copied.

    The system may refuse, and the name may lead elsewhere by now.
    """
    if opened.st_mode & 0o222:
        return False
    try:
        os.link(source, temporary, follow_symlinks=False)
    except OSError:
        return False  # another file system, or a file that is not ours to link
    now = os.stat(temporary, follow_symlinks=False)
    if (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
        temporary.unlink()
        return False
    return True


def _copy(descriptor: int, temporary: Path, sha256: str, source: Path) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    try:
        _share(descriptor, target)
        while chunk := _read(descriptor, source):
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]
        _check(target, source, sha256)  # what came, not what was there when it was looked at
    finally:
        os.close(target)


def _share(descriptor: int, target: int) -> None:
    """Let the system copy what it can: it shares blocks, or at least copies within the kernel."""
    # another kind of file system or system: what is left is read and written
    with contextlib.suppress(OSError, AttributeError):
        while os.copy_file_range(descriptor, target, _SHARED_BYTES):
            continue


def _read(descriptor: int, source: Path) -> bytes:
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except OSError as error:
        raise _unreadable(source, error) from error


def _check(descriptor: int, source: Path, sha256: str, limit_bytes: int | None = None) -> None:
    digest = hashlib.sha256()
    offset = 0
    try:
        while chunk := os.pread(descriptor, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
            if limit_bytes is not None and offset > limit_bytes:
                raise BlobTooLarge(f"{source} is larger than {limit_bytes} bytes")
    except OSError as error:
        raise _unreadable(source, error) from error
    if digest.hexdigest() != sha256:
        raise DigestMismatch(f"{source} has the SHA-256 {digest.hexdigest()}, not {sha256}")


def _rename(temporary: Path, path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
