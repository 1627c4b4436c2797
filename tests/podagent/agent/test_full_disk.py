"""A disk without room holds a job up; it neither ends it nor costs what it printed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from firepool_podagent import journal, output
from firepool_podagent.journal import AttemptLog, Journal
from firepool_podagent.output import CappedOutput
from firepool_podagent.testing import Agent, until


class Disk:
    """Takes so many bytes more, and writes what fits of a line before it refuses, as disks do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self.write, self.pwrite = self._limited(os.write), self._limited(os.pwrite)
        for module in (journal, output):
            monkeypatch.setattr(module, "os", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _limited(self, write: Callable[..., int]) -> Callable[..., int]:
        def limited(descriptor: int, data: Any, *offset: int) -> int:
            if self.room <= 0 and not self._reserved(descriptor):
                raise OSError(errno.ENOSPC, "no room")
            if self._reserved(descriptor):
                return write(descriptor, data, *offset)
            written = write(descriptor, data[: self.room], *offset)
            self.room -= written
            return written

        return limited

    @staticmethod
    def _reserved(descriptor: int) -> bool:
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == ".reserve"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def text(number: int) -> dict[str, Any]:
    return {"type": "stream", "name": "stdout", "text": f"line {number} {'x' * 50}"}


def read_all(log: AttemptLog) -> list[dict[str, Any]]:
    reader, lines = log.reader(0), []
    while data := reader.read():
        lines += [json.loads(line) for line in data.splitlines()]
    return lines


def outcome(log: AttemptLog) -> dict[str, Any]:
    return {"attempt": log.attempt, "exit_code": 0, "next": log.next, "results": [], "error": None}


def test_no_line_is_torn_and_none_is_lost(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    log = Journal(tmp_path / "j").begin("a:1")
    for number in range(30):
        disk.room = 130  # a line and a half
        log.append(text(number))
        log.append(text(number))
        assert log.pressed
        for path in log.folder.glob("*.ndjson"):
            assert path.read_bytes()[-1:] in (b"", b"\n")
        with pytest.raises(OSError, match="No space"):
            log.finish(outcome(log))
        disk.room = 1 << 20
        assert log.retry()
    log.finish(outcome(log))
    assert [m["n"] for m in read_all(log)] == list(range(60))
    assert Journal(tmp_path / "j").attempts["a:1"].outcome == log.outcome


def test_the_reserve_takes_the_end_and_what_waits(tmp_path: Path, disk: Disk) -> None:
    book = Journal(tmp_path / "j")
    log = book.begin("a:1")
    log.append(text(0))
    disk.room = 0
    for number in range(1, 50):
        log.append(text(number))
    assert log.finish_in_reserve(outcome(log), cut=False)
    log.report_reset({"attempt": "a:1", "clean": True})
    assert [m["n"] for m in read_all(log)] == list(range(50))
    again = Journal(tmp_path / "j").attempts["a:1"]
    assert again.outcome == log.outcome
    assert [m["n"] for m in read_all(again)] == list(range(50))
    disk.room = 1 << 30
    book.begin("b:1").finish(outcome(log))


def test_what_the_reserve_cannot_hold_is_told(tmp_path: Path, disk: Disk) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    disk.room = 0
    for number in range(40):
        log.append({**text(number), "text": "x" * 50_000})
    large = {"name": "x", "data": "y" * 900_000, "error": None}
    ending = {**outcome(log), "results": [large]}
    assert not log.finish_in_reserve(ending, cut=False)
    assert log.finish_in_reserve(ending, cut=True)
    found = read_all(log)
    assert [m["n"] for m in found] == list(range(len(found)))
    assert "messages of output were lost" in found[-1]["text"]
    assert log.outcome is not None
    assert log.outcome["next"] == len(found)
    assert log.outcome["results"][0]["data"] is None
    assert "disk is full" in log.outcome["results"][0]["error"]


def test_a_tail_without_room_waits_too(tmp_path: Path, disk: Disk) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    capped = CappedOutput(log, 6000, tmp_path)
    for number in range(45):
        disk.room = 50 if number % 3 else 1 << 20
        if capped.retry():
            assert not capped.pressed
        capped.emit(text(number))
    assert capped.pressed
    disk.room = 1 << 20
    assert capped.retry()
    assert capped.close() == 0
    assert [m["text"] for m in read_all(log)] == [text(number)["text"] for number in range(45)]


@pytest.fixture
def small_disk(short_dir: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = short_dir / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no room, for a while."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    try:
        yield
    finally:
        filler.unlink()


@pytest.mark.root
def test_a_job_waits_for_room_and_loses_nothing(
    small_disk: Path, start_agent: Callable[..., Agent]
) -> None:
    pod = start_agent("disk/pod", isolation="process")
    assert pod.run("print(1)").text() == "1\n"
    code = "import time\nfor i in range(150): print('line', i, 'x' * 200); time.sleep(0.01)"
    attempt = pod.start_attempt(code)
    time.sleep(0.5)
    with filled(small_disk):
        time.sleep(1)
        assert pod.call("GET", f"/v1/attempts/{attempt}")["state"] == "running"
    done = pod.finish(attempt)
    assert [int(line.split()[1]) for line in done.text().splitlines()] == list(range(150))
    assert done.error_class is None
    assert pod.run("print(2)").text() == "2\n"


@pytest.mark.root
def test_a_job_on_a_full_disk_can_be_killed_and_has_an_outcome(
    small_disk: Path, start_agent: Callable[..., Agent]
) -> None:
    pod = start_agent("disk/pod", isolation="process")
    pod.run("print(1)")
    attempt = pod.start_attempt("import itertools\nfor i in itertools.count(): print(i, 'x' * 200)")
    time.sleep(0.3)
    with filled(small_disk):
        time.sleep(0.5)
        started = time.monotonic()
        pod.signal(attempt, "kill")
        until(lambda: pod.call("GET", f"/v1/attempts/{attempt}")["outcome"], 8, "no outcome")
        assert time.monotonic() - started < 6
        done = pod.finish(attempt)
        assert done.error_class == "Cancelled"
    assert "Traceback" not in (pod.directory / "agent.log").read_text()
