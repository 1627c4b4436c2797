"""What travels with a cell, and what is refused in which words."""

from __future__ import annotations

import io
import pickle
import queue
import socket
import sqlite3
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import psutil
import pytest

from firepool_nb.capture.cell import Capture, Limits, capture, normalise
from firepool_nb.capture.transfer import Spool, decode, encode
from firepool_nb.errors import CaptureError, MissingName, NotPicklable, ValueTooLarge


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The namespace of a notebook: what is executed in it belongs to ``__main__``."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return vars(module)


def run(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, "<notebook>", "exec", dont_inherit=True), namespace)


def arrives(captured: Capture) -> dict[str, Any]:
    """What a pod gets, loaded into a ``__main__`` of its own."""
    if captured.namespace is None:
        return {}
    own = sys.modules["__main__"]
    sys.modules["__main__"] = pod = types.ModuleType("__main__")
    try:
        vars(pod).update(pickle.loads(captured.namespace))
    finally:
        sys.modules["__main__"] = own
    return vars(pod)


def test_only_what_the_cell_reads_travels(notebook: dict[str, Any]) -> None:
    run("a = 1\nb = [2]\nimport threading\nsecret = threading.Lock()\nIn = ['x']", notebook)
    captured = capture("print(a, b)", notebook, hidden={"In"})
    assert captured.names == ["a", "b"]
    assert captured.notes == []


def test_shell_names_never_travel_even_through_functions(notebook: dict[str, Any]) -> None:
    run("In = ['x']\n_ = 3\ndef f(): return In, _, get_ipython", notebook)
    notebook["get_ipython"] = threading.Lock()  # as unpicklable as a shell
    hidden = {"In", "_", "get_ipython"}
    captured = capture("f(), In, _", notebook, hidden=hidden)
    assert captured.names == ["f"]
    assert not {"In", "_", "get_ipython"} & arrives(captured).keys()


def test_a_users_own_builtin_wins(notebook: dict[str, Any]) -> None:
    run("sum = lambda xs: 42\nvals = [1, 2, 3]", notebook)
    assert set(capture("(lambda: sum(vals))()", notebook).names) == {"sum", "vals"}


def test_functions_see_the_pods_globals(notebook: dict[str, Any]) -> None:
    run("step = 1\ndef f(x): return helper(x) + step\ndef helper(x): return x * step", notebook)
    pod = arrives(capture("f(2)", notebook))
    assert pod["f"](2) == 3
    pod["step"] = 10  # as the remote cell would bind it
    assert pod["f"](2) == 30
    assert pod["f"].__globals__ is pod["helper"].__globals__ is pod


def test_closures_defaults_and_classes_travel(notebook: dict[str, Any]) -> None:
    run(
        "def outer(k):\n"
        "    def inner(x, y=k): return x + y + k\n"
        "    return inner\n"
        "add = outer(5)\n"
        "class Base:\n    def hello(self): return 'hello ' + name\n"
        "class Child(Base):\n    @classmethod\n    def make(cls): return cls()\n"
        "    @property\n    def up(self): return self.hello().upper()\n"
        "name = 'you'\n",
        notebook,
    )
    pod = arrives(capture("add(1), Child.make().up", notebook))
    assert pod["add"](1) == 11
    assert pod["Child"].make().up == "HELLO YOU"


def test_modules_are_imported_again_only_when_read(notebook: dict[str, Any]) -> None:
    run("import json, zipfile", notebook)
    captured = capture("json.dumps(1)", notebook)
    assert captured.names == ["json"]
    assert captured.namespace is not None
    assert b"zipfile" not in captured.namespace


@pytest.mark.parametrize(
    ("source", "name", "word"),
    [
        ("def f():\n    def g(): return guard\n    return g\nf()", "guard", "lock"),
        ("print(list(rows))", "rows", "generator"),
        ("fh.write('x')", "fh", "TextIOWrapper"),
        ("reader.read()", "reader", "TextIOWrapper"),
        ("sock.send(b'x')", "sock", "socket"),
        ("worker.join()", "worker", "Thread"),
        ("db.execute('x')", "db", "sqlite3.Connection"),
        ("q.get()", "q", "queue.Queue"),
        ("holder['inner'][1]", "holder", "lock"),
        ("call()", "call", "lock"),
        ("wrapped()", "wrapped", "lock"),
    ],
)
def test_what_cannot_travel_is_named(
    notebook: dict[str, Any], tmp_path: Path, source: str, name: str, word: str
) -> None:
    (tmp_path / "x.txt").write_text("text")
    lock = threading.Lock()
    with (
        open(tmp_path / "w.txt", "w") as writing,
        open(tmp_path / "x.txt") as reading,
        socket.socket() as sock,
    ):
        database = sqlite3.connect(":memory:")
        notebook.update(
            guard=lock,
            rows=(n for n in range(3)),
            fh=writing,
            reader=reading,
            sock=sock,
            worker=threading.Thread(target=print),
            db=database,
            q=queue.Queue(),
            holder={"inner": [1, lock]},
        )
        run("def call(): return helper()\ndef helper(): return guard", notebook)
        run("def make():\n    held = guard\n    return lambda: held\nwrapped = make()", notebook)
        try:
            with pytest.raises(NotPicklable) as caught:
                capture(source, notebook, first_line=2)
        finally:
            database.close()
        assert reading.tell() == 0, "nothing was read from the file"
    message = str(caught.value)
    assert repr(name) in message
    assert word in message
    assert list(notebook["rows"]) == [0, 1, 2], "the generator was not advanced"


def test_the_way_to_the_culprit_is_named(notebook: dict[str, Any]) -> None:
    notebook["guard"] = threading.Lock()
    source = "def f():\n    def g(): return guard\n    return g\nf()"
    with pytest.raises(NotPicklable, match=r"'guard' \(lock\).*through f/g \(line 3\)"):
        capture(source, notebook, first_line=2)
    run("def f():\n    def g(): return guard\n    return g\nh = f()", notebook)
    with pytest.raises(NotPicklable, match=r"'h' \(function\).*h/guard is a lock"):
        capture("h()", notebook)
    notebook["holder"] = {"inner": [1, notebook["guard"]]}
    with pytest.raises(NotPicklable, match=r"holder/\['inner'\]/\[1\] is a lock"):
        capture("holder", notebook)


def test_unused_or_uncertain_unpicklables_cause_no_error(notebook: dict[str, Any]) -> None:
    notebook["guard"] = threading.Lock()
    notebook["x"] = 1
    assert capture("x", notebook).names == ["x"]
    assert capture("if x > 5:\n    guard.acquire()\nx", notebook).names == ["x"]


def test_a_huge_value_is_measured_without_a_copy(notebook: dict[str, Any]) -> None:
    notebook["table"] = bytes(bytearray(b"x" * 300_000_000))
    before = psutil.Process().memory_info().rss
    began = time.monotonic()
    with pytest.raises(ValueTooLarge, match=r"'table' \(bytes, 286\.1 MiB\).*16\.0 MiB.*-i table"):
        capture("print(len(table))", notebook)
    assert time.monotonic() - began < 5
    assert psutil.Process().memory_info().rss - before < 50_000_000


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (numpy.zeros(20 * 2**20, dtype="u1"), "numpy.ndarray, 20.0 MiB"),
        (pandas.DataFrame({"a": numpy.zeros(3 * 2**20)}), "24.0 MiB"),
        ({"k": [b"x" * (20 * 2**20)]}, r"table/['k']/[0] is a bytes of 20.0 MiB"),
        (list(range(20_000_000)), "more than 16.0 MiB"),
        ("é" * (20 * 2**20), "str"),
    ],
    ids=["array", "frame", "nested", "list", "text"],
)
def test_sizes_are_told(notebook: dict[str, Any], value: object, word: str) -> None:
    notebook["table"] = value
    began = time.monotonic()
    with pytest.raises(ValueTooLarge) as caught:
        capture("table", notebook)
    assert time.monotonic() - began < 5
    assert "'table'" in str(caught.value)
    assert word in str(caught.value)


def test_many_values_are_too_large_together(notebook: dict[str, Any]) -> None:
    notebook.update(a=b"a" * (9 * 2**20), b=b"b" * (10 * 2**20))
    with pytest.raises(ValueTooLarge, match=r"19\.0 MiB together.*largest: 'b'.*-i b"):
        capture("a, b", notebook)


def test_values_from_four_mebibytes_are_noted(notebook: dict[str, Any]) -> None:
    notebook.update(big=b"x" * (5 * 2**20), small=1)
    captured = capture("big, small", notebook)
    assert captured.notes == ["big (bytes, 5.0 MiB) travels with this cell"]


def test_missing_names_fail_before_anything_is_sent(notebook: dict[str, Any]) -> None:
    with pytest.raises(MissingName, match=r"'missing' is not defined \(line 3, in f\)") as caught:
        capture("\ndef f(): return missing\nf()", notebook, first_line=2)
    assert isinstance(caught.value, NameError)
    assert caught.value.name == "missing"


def test_a_name_of_an_earlier_remote_cell_is_told_apart(notebook: dict[str, Any]) -> None:
    with pytest.raises(MissingName, match=r"'model' \(line 1\) was defined only in the pod"):
        capture("model", notebook, remote_names={"model": "was defined only in the pod"})


def test_names_are_not_sent_without_capture(notebook: dict[str, Any]) -> None:
    notebook["x"] = 1
    captured = capture("x, missing", notebook, implicit=False)
    assert captured.names == []
    assert captured.namespace is None


def test_explicit_names_travel_whatever_the_cell_reads(notebook: dict[str, Any]) -> None:
    notebook["hidden"] = 5
    captured = capture("exec('print(hidden)')", notebook, push=["hidden"])
    assert [value.name for value in captured.spooled] == ["hidden"]
    notebook["fi"] = 2
    assert capture("1", notebook, push=["ﬁ"]).names == ["fi"]
    with pytest.raises(MissingName, match=r"'nope'.*-i nope"):
        capture("1", notebook, push=["nope"])


def test_names_are_normalised_once() -> None:
    assert normalise(["ﬁ", " fi ", "x"]) == ["fi", "x"]
    with pytest.raises(CaptureError, match="'a-b' is not the name of a variable"):
        normalise(["a-b"])


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("df = df + 1", ["df"]),
        ("xs.append(1)", ["xs"]),
        ("xs[0] = 1", ["xs"]),
        ("text.partition(' ')", []),
        ("array.fill(0)", ["array"]),
        ("array.add(1)", []),
        ("json.x = 1", []),
        ("print(xs)", []),
        ("xs = []", []),
    ],
)
def test_changes_in_the_pod_are_told(
    notebook: dict[str, Any], source: str, changed: list[str]
) -> None:
    notebook.update(df=1, xs=[1], text="a b", array=numpy.zeros(3), json=__import__("json"))
    assert capture(source, notebook).changed_only_there == changed
    assert capture(source, notebook, pull=["df", "xs", "array"]).changed_only_there == []


def test_a_cell_that_is_no_python_is_left_to_the_pod(notebook: dict[str, Any]) -> None:
    assert capture("x = = 1", notebook).names == []


# -- single values -------------------------------------------------------------------------------


def pickle_to(file: Any, value: object) -> None:
    pickle.dump(value, file, 5)


@pytest.mark.parametrize(
    "value",
    [
        numpy.arange(12, dtype="f4").reshape(3, 4),
        numpy.arange(12).reshape(3, 4).T,
        numpy.arange(24).reshape(4, 6)[::2, 1::2],
        numpy.array(5),
        numpy.zeros((0, 3)),
        numpy.array(["2020-01-01"], dtype="M8[ns]"),
        numpy.array(["é", "xy"]),
        numpy.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        numpy.array([None, 1], dtype=object),
        numpy.ma.array([1, 2], mask=[0, 1]),
        pandas.DataFrame({"a": [1, 2]}, index=["x", "y"]),
        {"k": (1, 2)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_out_as_they_went_in(tmp_path: Path, value: Any) -> None:
    spooled = encode("v", value, limit_bytes=10**6, spool=Spool(str(tmp_path)), pickle_to=pickle_to)
    assert spooled.data is not None
    back = decode({"name": "v", "format": spooled.format}, spooled.data)
    assert type(back) is type(value)
    if isinstance(value, numpy.ndarray):
        assert back.dtype == value.dtype
        assert numpy.array_equal(numpy.ma.getmaskarray(back), numpy.ma.getmaskarray(value))
        assert back.tolist() == value.tolist()
    elif isinstance(value, pandas.DataFrame):
        pandas.testing.assert_frame_equal(back, value)
    else:
        assert back == value
    assert list(tmp_path.iterdir()) == []


def test_arrow_tables_travel_as_arrow(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.table({"a": [1, 2], "b": ["x", "y"]})
    spooled = encode("t", table, limit_bytes=10**6, spool=Spool(str(tmp_path)), pickle_to=pickle_to)
    assert spooled.format == "arrow"
    assert decode({"name": "t", "format": "arrow"}, spooled.data or b"").equals(table)


def test_large_values_are_written_once(tmp_path: Path) -> None:
    array = numpy.arange(2**20)
    spooled = encode("a", array, limit_bytes=2**30, spool=Spool(str(tmp_path)), pickle_to=pickle_to)
    assert spooled.path is not None
    assert spooled.request_input() == {
        "kind": "value", "name": "a", "format": "npy", "blob": spooled.sha256,
    }  # fmt: skip
    assert numpy.array_equal(decode({"name": "a", "format": "npy"}, spooled.path), array)


def test_an_explicit_value_has_a_limit_and_leaves_no_file(
    notebook: dict[str, Any], tmp_path: Path
) -> None:
    notebook["table"] = list(range(100_000))
    with pytest.raises(ValueTooLarge, match=r"'table' \(list, more than 0\.1 MiB|more than 97"):
        capture(
            "1",
            notebook,
            push=["table"],
            limits=Limits(explicit_bytes=100_000),
            spool=Spool(str(tmp_path)),
        )
    assert list(tmp_path.iterdir()) == []


def test_files_in_memory_are_values(notebook: dict[str, Any]) -> None:
    notebook["text"] = io.StringIO("x")
    assert arrives(capture("text.read()", notebook))["text"].getvalue() == "x"
