from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import time
from pathlib import Path

import pytest
from firepool_broker.store.blobs import BlobStore, Upload
from firepool_broker.store.errors import (
    BlobMissing,
    BlobRefused,
    BlobTooLarge,
    DigestMismatch,
    StoreError,
    StoreFull,
)

DATA = os.urandom(300_000)
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", limit_bytes=1_000_000)


def files(blobs_folder: Path) -> list[str]:
    return sorted(path.name for path in blobs_folder.rglob("*") if path.is_file())


async def send(upload: Upload, *pieces: bytes) -> None:
    async with upload:
        for piece in pieces:
            await upload.write(piece)
        await upload.commit()


async def test_an_upload_in_pieces(blobs: BlobStore, tmp_path: Path) -> None:
    assert blobs.path(DIGEST) is None
    async with blobs.upload(DIGEST) as upload:
        for start in range(0, len(DATA), 70_001):
            await upload.write(DATA[start : start + 70_001])
        assert await upload.commit() == len(DATA)
    path = blobs.path(DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o400
    assert blobs.size_bytes(DIGEST) == len(DATA)
    assert files(tmp_path / "blobs") == [DIGEST]


async def test_bytes_are_stored_once(blobs: BlobStore, tmp_path: Path) -> None:
    assert await blobs.add_bytes(DATA) == await blobs.add_bytes(DATA) == DIGEST
    assert files(tmp_path / "blobs") == [DIGEST]


async def test_another_digest_is_refused_and_leaves_nothing(
    blobs: BlobStore, tmp_path: Path
) -> None:
    with pytest.raises(DigestMismatch, match="send them again"):
        await send(blobs.upload("0" * 64), DATA)
    source = tmp_path / "source"
    source.write_bytes(DATA)
    with pytest.raises(DigestMismatch):
        await blobs.add_file("0" * 64, source)
    assert files(tmp_path / "blobs") == []
    assert source.read_bytes() == DATA


async def test_a_truncated_upload_leaves_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    async with blobs.upload(DIGEST) as upload:
        await upload.write(DATA[:1000])
    assert files(tmp_path / "blobs") == []
    assert blobs.path(DIGEST) is None


async def test_too_large_is_refused_while_it_comes(blobs: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(BlobTooLarge, match="limit"):
        await send(blobs.upload(DIGEST, limit_bytes=1000), DATA[:900], DATA[900:])
    source = tmp_path / "source"
    source.write_bytes(DATA)
    with pytest.raises(BlobTooLarge):
        await blobs.add_file(DIGEST, source, limit_bytes=1000)
    assert files(tmp_path / "blobs") == []


async def test_a_file_that_nobody_may_write_is_linked(blobs: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    source.chmod(0o400)
    assert await blobs.add_file(DIGEST, source) == len(DATA)
    path = blobs.path(DIGEST)
    assert path is not None
    assert path.stat().st_ino == source.stat().st_ino
    source.unlink()
    assert path.read_bytes() == DATA
    assert await blobs.add_file(DIGEST, Path("/nowhere")) == len(DATA), "it is there already"


@pytest.mark.parametrize("mode", [0o600, 0o420, 0o402], ids=oct)
async def test_a_file_that_may_be_written_is_copied_and_changes_without_us(
    blobs: BlobStore, tmp_path: Path, mode: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    source.chmod(mode)
    await blobs.add_file(DIGEST, source)
    source.chmod(0o600)
    with source.open("r+b") as file:
        file.write(b"changed")
    path = blobs.path(DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA
    assert not path.stat().st_mode & 0o222


@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/kmsg", "/" + "a" * 5000, "/etc/x\0y"])
async def test_whatever_cannot_be_read_is_refused(blobs: BlobStore, path: str) -> None:
    with pytest.raises((BlobRefused, DigestMismatch)):
        await asyncio.wait_for(blobs.add_file(DIGEST, Path(path)), timeout=5)


async def test_a_file_of_another_file_system_is_copied(blobs: BlobStore) -> None:
    source = Path(f"/dev/shm/firepool-test-{os.getpid()}")
    source.write_bytes(DATA)
    try:
        await blobs.add_file(DIGEST, source)
        path = blobs.path(DIGEST)
        assert path is not None
        assert path.read_bytes() == DATA
    finally:
        source.unlink()


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "link"])
async def test_what_is_no_regular_file_is_refused_at_once(
    blobs: BlobStore, tmp_path: Path, kind: str
) -> None:
    source = tmp_path / kind
    if kind == "folder":
        source.mkdir()
    elif kind == "pipe":
        os.mkfifo(source)
    elif kind == "link":
        (tmp_path / "real").write_bytes(DATA)
        source.symlink_to(tmp_path / "real")
    with pytest.raises(BlobRefused, match=kind):
        await asyncio.wait_for(blobs.add_file(DIGEST, source), timeout=5)
    assert files(tmp_path / "blobs") == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "0" * 63, "", "0" * 64 + "\n"])
async def test_a_name_that_is_no_digest_is_refused(blobs: BlobStore, name: str) -> None:
    for call in (blobs.path, blobs.size_bytes, blobs.upload):
        with pytest.raises(BlobRefused, match="SHA-256"):
            call(name)


async def test_a_full_disk_leaves_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreFull, match="free some"):
            await blobs.add_bytes(DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path / "blobs") == []
    assert await blobs.add_bytes(DATA) == DIGEST


async def test_what_a_killed_broker_left_is_gone_at_the_next_start(
    blobs: BlobStore, tmp_path: Path
) -> None:
    upload = await blobs.upload(DIGEST).__aenter__()
    await upload.write(DATA[:1000])
    assert len(files(tmp_path / "blobs")) == 1
    BlobStore(tmp_path / "blobs")
    assert files(tmp_path / "blobs") == []
    upload.abort()


async def test_two_uploads_of_one_blob_at_once(blobs: BlobStore, tmp_path: Path) -> None:
    await asyncio.gather(*(send(blobs.upload(DIGEST), DATA) for _ in range(2)))
    assert files(tmp_path / "blobs") == [DIGEST]


async def test_unused_and_surplus_blobs_go_least_recently_used_first(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs", total_bytes=2500, retention_seconds=1000.0)
    digests = [await blobs.add_bytes(bytes([i]) * 1000) for i in range(5)]
    now = time.time()
    for age, digest in zip((2000, 2000, 300, 200, 100), digests, strict=True):
        path = blobs.path(digest)
        assert path is not None
        os.utime(path, (now - age, now - age))
    deleted = blobs.sweep(now, keep={digests[0]})
    assert set(deleted) == {digests[1], digests[2]}
    assert set(files(tmp_path / "blobs")) == {digests[0], digests[3], digests[4]}
    with pytest.raises(BlobMissing, match="upload it first"):
        blobs.size_bytes(digests[1])


async def test_use_renews(blobs: BlobStore) -> None:
    digest = await blobs.add_bytes(DATA)
    path = blobs.path(digest)
    assert path is not None
    os.utime(path, (1.0, 1.0))
    blobs.path(digest)
    assert blobs.sweep(time.time(), keep=set()) == []


def test_errors_share_the_stores_base() -> None:
    assert issubclass(DigestMismatch, StoreError)
