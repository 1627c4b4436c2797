"""Executors without a person (nbclient, papermill, nbconvert): what stays in the file."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def execute(folder: Path, *cells: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in ("%load_ext firepool_nb", *cells)]
    )
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        notebook.metadata["stopped"] = str(error)
    return notebook


def texts(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_an_exception_stops_the_run(shared_home: Path, shared_folder: Path) -> None:
    notebook = execute(shared_folder, "%%firepool\nprint('one')\n1/0", "%%firepool\nprint('never')")
    assert "ZeroDivisionError" in notebook.metadata["stopped"]
    failing, after = notebook.cells[1], notebook.cells[2]
    errors = [output for output in failing.outputs if output.output_type == "error"]
    assert len(errors) == 1
    assert errors[0].ename == "ZeroDivisionError"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(errors[0].traceback))
    assert plain.count("ZeroDivisionError: division by zero") == 1
    assert "line 3" in plain
    assert after.outputs == []


def test_nothing_of_the_waiting_stays(shared_home: Path, shared_folder: Path) -> None:
    notebook = execute(
        shared_folder,
        "%%firepool\n1",  # the default pool is named once
        "%%firepool -a --job busy\nimport time\ntime.sleep(2)\nprint('busy')",
        "%%firepool\nprint('after')",
        "%%firepool\nfrom IPython.display import display\n"
        "h = display('v0', display_id=True)\nfor n in range(1, 21):\n    h.update(f'v{n}')",
        "%%firepool\nfrom IPython.display import clear_output\n"
        "print('gone')\nclear_output(wait=True)\nprint('new')",
    )
    assert "stopped" not in notebook.metadata
    _, _, _, waited, updated, cleared = notebook.cells
    assert [(o.output_type, o.get("text")) for o in waited.outputs] == [("stream", "after\n")]
    assert [o.data["text/plain"] for o in updated.outputs] == ["'v20'"]
    assert texts(cleared) == "new\n"
    assert "firepool-waiting" not in nbformat.writes(notebook)


@pytest.mark.parametrize("magic", ["%%firepool", "%%firepool -q"])
def test_a_usage_error_stops_the_run(shared_home: Path, shared_folder: Path, magic: str) -> None:
    notebook = execute(shared_folder, f"{magic} --skuu x\nprint('here?')", "print('never')")
    assert "did you mean --sku?" in notebook.metadata["stopped"]
    assert notebook.cells[2].outputs == []
