"""``/v1/blobs`` and ``/v1/packages``: content-addressed bytes, streamed or handed over by file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from tornado.iostream import StreamClosedError
from tornado.web import stream_request_body

from firepool_broker.api import errors, types
from firepool_broker.api.handlers import Handler, Parts
from firepool_broker.api.operations import Operation, Parameter
from firepool_broker.store.blobs import Upload
from firepool_broker.store.errors import BlobTooLarge

_FILE = "Firepool-File"
_ACCEPT_FILE = "Firepool-Accept-File"
_CHUNK_BYTES = 256 * 1024
_BY_FILE = Parameter(
    _FILE,
    "string",
    "Absolute path of a file on the broker's machine, instead of a body (Unix socket only).",
    place="header",
)
_PUT = Operation(
    summary="Store bytes under their SHA-256.",
    upload=True,
    answer=types.BlobView,
    status=201,
    also=((200, "The bytes were stored before."),),
    parameters=(_BY_FILE,),
)
_HEAD = Operation(summary="Ask whether the bytes are stored.", content_type="")


@stream_request_body
class Blob(Handler):
    """One blob."""

    OPERATIONS: ClassVar = {
        "PUT": _PUT,
        "HEAD": _HEAD,
        "GET": Operation(
            summary="Fetch the bytes.",
            content_type="application/octet-stream",
            parameters=(
                Parameter(
                    _ACCEPT_FILE,
                    "string",
                    "1: answer with a `Firepool-File` path instead of the bytes.",
                    place="header",
                ),
            ),
        ),
    }

    def initialize(self, parts: Parts) -> None:
        """Take what the handler works with."""
        super().initialize(parts)
        self._upload: Upload | None = None
        self._writing = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    @property
    def limit_bytes(self) -> int:
        """Bytes that one upload may have."""
        return self.parts.blobs.limit_bytes

    async def prepare(self) -> None:
        """Open the upload before the body comes."""
        await super().prepare()
        if self._finished or self.request.method != "PUT":
            return
        if self.request.headers.get(_FILE) is not None:
            return
        limit = self.limit_bytes
        length = self.request.headers.get("Content-Length", "0")
        if length.isdigit() and int(length) > limit:
            self.fail(BlobTooLarge(f"larger than {limit} bytes, the limit of an upload"))
            return
        connection = self.request.connection
        if connection is not None:
            connection.set_max_body_size(limit + _CHUNK_BYTES)  # type: ignore[attr-defined]
        try:
            upload = self.parts.blobs.upload(self.path_kwargs["sha256"], limit_bytes=limit)
            self._upload = await upload.__aenter__()
        except Exception as error:  # noqa: BLE001 - turned into an answer
            self.fail(error)

    async def data_received(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        async with self._writing:
            if self._upload is None or self._finished:
                return
            try:
                await self._upload.write(chunk)
            except Exception as error:  # noqa: BLE001 - turned into an answer
                self._upload.abort()
                self.fail(error)

    async def put(self, sha256: str) -> None:
        """Finish an upload, or take a file."""
        source = self.request.headers.get(_FILE)
        blobs = self.parts.blobs
        known = blobs.path(sha256) is not None
        if source is not None:
            if not self.parts.same_machine:
                raise errors.Forbidden(
                    "files can be named through the broker's own socket only; send the bytes",
                    field=_FILE,
                )
            if not source.startswith("/"):
                raise errors.Invalid(f"{_FILE} must be an absolute path", field=_FILE)
            size = await blobs.add_file(sha256, Path(source), limit_bytes=self.limit_bytes)
        else:
            assert self._upload is not None  # prepare opened it or answered
            size = await self._upload.commit()
        self.answer(types.BlobView(sha256=sha256, size_bytes=size), 200 if known else 201)

    async def head(self, sha256: str) -> None:
        """Tell whether the bytes are stored."""
        self.set_header("Content-Length", str(self.parts.blobs.size_bytes(sha256)))
        self.set_header("Content-Type", "application/octet-stream")
        self.parts.blobs.path(sha256)  # asked for: counts as used
        self.finish()

    async def get(self, sha256: str) -> None:
        """Send the bytes, or say where they are."""
        size = self.parts.blobs.size_bytes(sha256)
        path = self.parts.blobs.path(sha256)
        if path is None:
            raise errors.NotFound(f"there is no blob {sha256}")
        self.set_header("Content-Type", "application/octet-stream")
        if self.request.headers.get(_ACCEPT_FILE) == "1" and self.parts.same_machine:
            self.set_header(_FILE, str(path))
            self.finish()
            return
        self.set_header("Content-Length", str(size))
        with path.open("rb") as file:
            try:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    self.write(chunk)
                    await self.flush()
            except StreamClosedError:
                return
        self.finish()

    def on_finish(self) -> None:
        """Leave nothing of an upload that was not committed."""
        if self._upload is not None:
            self._upload.abort()

    def on_connection_close(self) -> None:
        """Drop an upload whose client has gone."""
        super().on_connection_close()
        self._ending = asyncio.ensure_future(self._abort())

    async def _abort(self) -> None:
        async with self._writing:  # a write in a thread still uses the file
            if self._upload is not None:
                self._upload.abort()


@stream_request_body
class Package(Blob):
    """One package: a blob with a lower limit, never read back."""

    OPERATIONS: ClassVar = {"PUT": _PUT, "HEAD": _HEAD}

    @property
    def limit_bytes(self) -> int:
        """Bytes that one package may have."""
        return self.parts.package_limit_bytes
