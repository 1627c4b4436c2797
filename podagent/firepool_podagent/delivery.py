"""Packages and blobs that the broker hands over: content-addressed files of the pod.

A file is known by its digest, is written beside its place and renamed once the digest was verified.
Blobs are an attempt's inputs and go with it; packages stay while the pod serves the same session,
so that its next job finds them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from firepool_podagent import wire
from firepool_podagent.removal import Removal

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LIMITS = {"packages": wire.PACKAGE_LIMIT_BYTES, "blobs": wire.BLOB_LIMIT_BYTES}
_COPY_BYTES = 1 << 20


class Deliveries:
    """The files in ``packages`` and ``blobs`` of the pod's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._owner: tuple[Any, ...] | None = None
        self._counter = 0

    def place(self, kind: str, sha256: str) -> Path:
        """Where a file lies, or would.

        Raises
        ------
        Refused
            The digest is none.
        """
        if not _DIGEST.match(sha256):
            raise wire.Refused("BadRequest", f"{sha256!r} is no SHA-256 in lower-case hex")
        return self._directory / kind / sha256

    def blob(self, sha256: str) -> Path:
        """Where a blob lies."""
        return self.place("blobs", sha256)

    def require(self, blobs: Iterable[str], package: str | None) -> None:
        """Refuse an attempt whose inputs were not delivered, naming them."""
        wanted = [("blobs", sha256) for sha256 in blobs]
        if package is not None:
            wanted.append(("packages", package))
        for kind, sha256 in wanted:
            if not self.place(kind, sha256).exists():
                raise wire.Refused("Missing", f"{kind[:-1]} {sha256} was not delivered", sha256)

    async def receive(
        self, kind: str, sha256: str, length: int, chunks: AsyncIterator[bytes]
    ) -> bool:
        """Take a file from a request's body; True when it is new."""
        target = self.place(kind, sha256)
        if length > _LIMITS[kind]:
            raise wire.Refused("TooLarge", f"more than {_LIMITS[kind] >> 20} MiB")
        new = not target.exists()
        found = hashlib.sha256()
        temporary = self._temporary(target)
        try:
            with open(temporary, "wb") as file:
                async for piece in chunks:
                    found.update(piece)
                    file.write(piece)
            self._settle(temporary, target, found.hexdigest())
        finally:
            temporary.unlink(missing_ok=True)
        return new

    def linking(self, kind: str, sha256: str, source: str) -> Callable[[], bool]:
        """Work that takes a file of the same machine; it reads the whole file, so not in the loop.

        A hard link only of a file that nobody may write, so that a job cannot change the original
        through its other name by mistake; a copy otherwise.
        """
        target = self.place(kind, sha256)
        temporary = self._temporary(target)

        def link() -> bool:
            new = not target.exists()
            try:
                try:
                    if os.stat(source).st_mode & 0o222:
                        raise PermissionError("somebody may write it")
                    os.link(source, temporary, follow_symlinks=False)
                except OSError:  # another disk, or not ours to link
                    shutil.copyfile(source, temporary)
                found = hashlib.sha256()
                with open(temporary, "rb", buffering=0) as file:
                    while piece := file.read(_COPY_BYTES):
                        found.update(piece)
                self._settle(temporary, target, found.hexdigest())
            finally:
                temporary.unlink(missing_ok=True)
            return new

        return link

    def _temporary(self, target: Path) -> Path:
        self._counter += 1
        return target.with_name(f".{target.name}-{self._counter}")

    @staticmethod
    def _settle(temporary: Path, target: Path, found: str) -> None:
        if found != target.name:
            raise wire.Refused(
                "DigestMismatch", f"the content has the digest {found}, not {target.name}"
            )
        temporary.rename(target)

    def belong_to(self, spec: dict[str, Any]) -> None:
        """Remove what other sessions left, before a job starts that is not theirs."""
        owner = (
            spec.get("protected_env", {}).get("FIREPOOL_CALLER"),
            spec.get("session_dir"),
        )
        if self._owner is not None and self._owner != owner:
            wanted = {spec.get("package")}
            for path in (self._directory / "packages").iterdir():
                if path.name not in wanted:
                    path.unlink()
        self._owner = owner

    def forget_blobs(self) -> list[str]:
        """Remove the inputs of the attempt that ended; returns what could not be removed."""
        failures = []
        for path in (self._directory / "blobs").iterdir():
            removal = Removal(path)
            removal.run()
            failures += [f"cannot remove {failure}" for failure in removal.failures]
        return failures

    def extraction(self, sha256: str, target: Path) -> Callable[[], None]:
        """Work that unpacks a package into a new folder."""
        archive = self.place("packages", sha256)

        def extract() -> None:
            from firepool_podagent.packages import extract as unpack

            unpack(archive, target)

        return extract
