"""What of this process travels with its session, and what cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firepool_nb import environment
from firepool_nb.errors import WorkingFolderGone


def test_a_variable_that_is_no_text_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OLD_LATIN1", os.fsdecode(b"caf\xe9"))
    monkeypatch.setitem(os.environ, "NEW", "caf\u00e9")
    with pytest.warns(UserWarning, match="not UTF-8: OLD_LATIN1"):
        found = environment.variables()
    assert found["NEW"] == "caf\u00e9"
    assert "OLD_LATIN1" not in found


def test_a_deleted_working_folder_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(WorkingFolderGone, match=r"os\.chdir"):
        environment.describe()
