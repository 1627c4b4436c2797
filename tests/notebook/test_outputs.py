"""Publishing a job's output in a real IPython shell, and the lines around it."""

from __future__ import annotations

import atexit
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from firepool_nb import reports
from firepool_nb.magics.hints import hint_for
from firepool_nb.magics.place import CellPlace, hidden_names
from firepool_nb.magics.waiting import WaitingLine, has_person
from firepool_nb.outputs import CollectedOutput, Output, ShellOutput, TextOutput


class Published(DisplayPublisher):
    """Keeps what is published."""

    messages: list[tuple[str, Any]]

    def publish(self, data: Any, metadata: Any = None, **rest: Any) -> None:
        kind = "update" if rest.get("update") else "display"
        self.messages.append((kind, {"data": data, "transient": rest.get("transient")}))

    def clear_output(self, wait: bool = False) -> None:
        self.messages.append(("clear", wait))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    config = Config({"HistoryManager": {"enabled": False}})
    made = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path))
    publisher = Published(shell=made)
    publisher.messages = []
    made.display_pub = publisher
    yield made
    made.reset()
    made.atexit_operations()
    atexit.unregister(made.atexit_operations)
    InteractiveShell.clear_instance()


def display(text: str, display_id: str | None = None) -> dict[str, Any]:
    transient = {"display_id": display_id} if display_id else {}
    return {"data": {"text/plain": text}, "metadata": {}, "transient": transient}


def test_streams_go_to_the_shells_streams(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output = ShellOutput(shell, "j-1")
    output.message("stream", {"name": "stdout", "text": "out\n"})
    output.message("stream", {"name": "stderr", "text": "err\n"})
    assert capsys.readouterr() == ("out\n", "err\n")
    assert not output.is_empty


def test_display_ids_are_made_unique_for_each_run(shell: Any) -> None:
    for run in ("j-1", "j-2"):
        output = ShellOutput(shell, run)
        output.message("display_data", display("v0", "mine"))
        output.message("update_display_data", display("v1", "mine"))
    ids = [message["transient"]["display_id"] for _, message in shell.display_pub.messages]
    assert ids == ["mine-j-1", "mine-j-1", "mine-j-2", "mine-j-2"]
    assert [kind for kind, _ in shell.display_pub.messages] == ["display", "update"] * 2


def test_what_clears_is_passed_on(shell: Any) -> None:
    output = ShellOutput(shell, "j-1")
    output.message("clear_output", {"wait": True})
    output.message("clear_output", {"wait": False})
    assert shell.display_pub.messages == [("clear", True), ("clear", False)]


def test_the_line_goes_before_the_first_output_only(shell: Any) -> None:
    gone: list[str] = []
    output = ShellOutput(shell, "j-1", before_first=lambda: gone.append("gone"))
    output.message("status", {"phase": "started"})
    assert gone == []
    output.message("stream", {"name": "stdout", "text": ""})
    output.message("display_data", display("x"))
    assert gone == ["gone"]


def test_a_value_is_shown_once_and_captured_where_it_should_be(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ShellOutput(shell, "j-1")
    output.message("execute_result", display("42"))
    assert capsys.readouterr().out.count("42") == 1
    assert output.has_result
    with capture_output() as captured:
        ShellOutput(shell, "j-2").message("execute_result", display("43"))
    assert captured.outputs[0].data == {"text/plain": "43"}
    assert captured.stdout == ""


def test_errors_are_kept_to_be_raised(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output = ShellOutput(shell, "j-1")
    output.message("error", {"ename": "E", "evalue": "v", "traceback": ["tb"]})
    assert output.raised == {"ename": "E", "evalue": "v", "traceback": ["tb"]}
    assert capsys.readouterr() == ("", "")


def test_unknown_messages_are_no_error(shell: Any) -> None:
    ShellOutput(shell, "j-1").message("something_new", {})
    Output().message("stream", {"name": "stdout", "text": "x"})


def test_text_for_terminals_and_programs() -> None:
    out, err = io.StringIO(), io.StringIO()
    output = TextOutput(out, err, show_errors=True)
    output.message("stream", {"name": "stdout", "text": "a\n"})
    output.message("display_data", display("<Figure>"))
    output.message("execute_result", display("3"))
    output.message("note", {"level": "info", "text": "note"})
    output.message("divider", {"text": "attempt 2"})
    output.message("error", {"ename": "E", "evalue": "v", "traceback": ["\x1b[31mE\x1b[0m: v"]})
    assert out.getvalue() == "a\n<Figure>\n3\n"
    assert err.getvalue() == "note\n--- attempt 2 ---\nE: v\n"
    collected = CollectedOutput()
    collected.message("stream", {"name": "stdout", "text": "gone"})
    collected.message("clear_output", {"wait": False})
    collected.message("stream", {"name": "stderr", "text": "kept"})
    collected.message("display_data", display("d"))
    assert (collected.stdout, collected.stderr) == ("", "kept")
    assert collected.displays == [{"text/plain": "d"}]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_waiting_line_in_a_terminal(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    line = WaitingLine(shell)
    line.show("waiting for a pod")
    line.show("waiting for a pod")
    line.clear()
    line.clear()
    assert terminal.getvalue() == "\r\x1b[2Kwaiting for a pod\r\x1b[2K"


def test_the_waiting_line_where_nobody_looks(shell: Any) -> None:
    assert not has_person(shell)
    line = WaitingLine(shell)
    assert not line.can_show
    line.show("waiting")
    line.clear()
    assert shell.display_pub.messages == []
    assert not WaitingLine(shell, quiet=True).can_show


class FrontEnd:
    """What a shell knows of a kernel with a person in front of it."""

    _allow_stdin = True

    def __init__(self, code: str) -> None:
        self.code = code

    def get_parent(self) -> dict[str, Any]:
        return {"content": {"code": self.code}, "metadata": {"cellId": "c-1"}}


def test_the_waiting_line_in_a_front_end(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "kernel", FrontEnd("%%firepool\nprint(1)"), raising=False)
    line = WaitingLine(shell)
    line.show("first")
    line.show("second")
    line.clear()
    kinds = [kind for kind, _ in shell.display_pub.messages]
    assert kinds == ["display", "update", "clear"], "the cell had shown nothing else"
    shell.display_pub.messages.clear()
    line.nothing_else_shown = False
    line.show("third")
    line.clear()
    kinds = [kind for kind, _ in shell.display_pub.messages]
    assert kinds == ["display", "update"]
    assert shell.display_pub.messages[-1][1]["data"] == {"text/plain": ""}


def test_where_a_cell_stands(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = CellPlace.of(shell, "print(1)\n")
    assert (place.line_offset, place.cell_id) == (1, None)
    code = "\n%%time\n%%firepool -q\n\nprint(1)\n"
    monkeypatch.setattr(shell, "kernel", FrontEnd(code), raising=False)
    place = CellPlace.of(shell, "\nprint(1)\n")
    assert (place.line_offset, place.cell_id) == (3, "c-1")
    assert place.filename == f"<cell In[{shell.execution_count}]>"
    assert CellPlace.of(shell, "print(2)").line_offset == 1


def test_names_of_the_shell_are_hidden_until_they_are_the_persons(shell: Any) -> None:
    shell.user_ns.update(_3=1, _i3="x", _mine=2)
    hidden = hidden_names(shell)
    assert {"In", "Out", "_", "_3", "_i3", "get_ipython"} <= hidden
    assert "_mine" not in hidden
    if "open" in hidden:
        shell.user_ns["open"] = len
        assert "open" not in hidden_names(shell)


@pytest.mark.parametrize(
    ("ename", "evalue", "words"),
    [
        ("NameError", "name 'here' is not defined", "-i here"),
        ("NameError", "name 'there' is not defined", "by In[3]: bring it back there with -o there"),
        ("NameError", "name 'nowhere' is not defined", None),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/etc/hostname'",
         "FIREPOOL_SESSION_DIR (/files)"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/no/such'", None),
        ("ValueError", "name 'here' is not defined", None),
        (None, None, None),
    ],
)  # fmt: skip
def test_hints(ename: str | None, evalue: str | None, words: str | None) -> None:
    hint = hint_for(
        ename,
        evalue,
        {"here": 1},
        {"there": "was defined only in the pod, by In[3]: bring it back there with -o there"},
        "/files",
    )
    assert hint is None if words is None else words in (hint or "")


def test_reports_are_for_people() -> None:
    assert reports.duration(0.0123) == "12 ms"
    assert reports.duration(None) == ""
    assert reports.jobs([]) == "no jobs"
    view = {
        "id": "j-1", "state": "SUCCEEDED", "sku": "cpu", "lease_tag": "t",
        "times": {"submitted": 1.0, "first_instruction": 1.012, "ended": 2.012},
        "acquisition": {"path": "warm", "reason": "held"}, "error": None,
    }  # fmt: skip
    assert reports.jobs([view]).splitlines()[1].split() == [
        "j-1", "succeeded", "t", "cpu", "warm", "12", "ms", "1.0", "s",
    ]  # fmt: skip
