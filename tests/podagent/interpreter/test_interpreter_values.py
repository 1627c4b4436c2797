"""Inputs and results, calls, and the identity of the notebook's classes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pandas
import pyarrow
import pytest

LARGE = 200_000_000 // 8 if os.environ.get("FIREPOOL_STRESS") else 1_000_000


def results(done: Any) -> dict[str, Any]:
    return {each["name"]: each for each in done.end["results"]}


@pytest.mark.parametrize(
    ("expression", "form"),
    [
        ("None", "json"),
        ("{'a': [1, 2.5, True, None, 'é']}", "json"),
        ("2**70", "cloudpickle"),
        ("float('inf')", "cloudpickle"),
        ("(1, 2)", "cloudpickle"),
        ("{1: 2}", "cloudpickle"),
        ("'\\ud800'", "cloudpickle"),
        ("{1, 2}", "cloudpickle"),
        ("b'x'", "cloudpickle"),
        ("__import__('numpy').arange(6).reshape(2, 3)", "npy"),
        ("__import__('numpy').asfortranarray([[1., 2.], [3., 4.]])", "npy"),
        ("__import__('numpy').array(['a', None], dtype=object)", "cloudpickle"),
        ("__import__('numpy').array([(1, 2.)], dtype=[('a', 'i4'), ('b', 'f8')])", "cloudpickle"),
        ("__import__('numpy').float32(1.5)", "cloudpickle"),
        ("__import__('datetime').date(2026, 1, 2)", "cloudpickle"),
        ("__import__('pyarrow').table({'a': [1, None]})", "arrow"),
    ],
)
def test_what_comes_back_is_what_was_there(
    template: Any, harness: Any, expression: str, form: str
) -> None:
    done = template.run(f"x = {expression}", outputs=["x"])
    result = results(done)["x"]
    assert result["error"] is None
    assert result["format"] == form
    value = harness.loaded(result)
    expected = eval(expression)
    assert type(value) is type(expected)
    if isinstance(expected, numpy.ndarray):
        assert value.dtype == expected.dtype
        assert value.flags.f_contiguous == expected.flags.f_contiguous
        numpy.testing.assert_array_equal(value, expected)
    else:
        assert value == expected


def test_frames_keep_index_types_and_attributes(template: Any, harness: Any) -> None:
    code = (
        "import pandas as pd\n"
        "df = pd.DataFrame({'c': pd.Categorical(['a', 'b']), "
        "'d': pd.to_datetime(['2026-01-01', None])},"
        " index=pd.MultiIndex.from_tuples([(1, 'x'), (2, 'y')], names=['n', None]))\n"
        "df.attrs['k'] = 1"
    )
    scope: dict[str, Any] = {}
    exec(code, scope)
    value = harness.loaded(results(template.run(code, outputs=["df"]))["df"])
    pandas.testing.assert_frame_equal(value, scope["df"])
    assert value.attrs == {"k": 1}


def test_one_name_that_cannot_travel_costs_no_other(template: Any, harness: Any) -> None:
    code = (
        "import threading\na = 1\nlock = threading.Lock()\n"
        "class E:\n    def __reduce__(self): raise RuntimeError('mine')\ne = E()\nz = 'z'"
    )
    found = results(template.run(code, outputs=["a", "lock", "missing", "e", "z"]))
    assert harness.loaded(found["a"]) == 1
    assert harness.loaded(found["z"]) == "z"
    assert "lock" in found["lock"]["error"]
    assert "missing" in found["missing"]["error"]
    assert found["e"]["error"] == "RuntimeError: mine"


def test_a_failed_cell_hands_back_nothing(template: Any) -> None:
    done = template.run("a = 1\n1/0", outputs=["a"])
    assert done.end["results"] == []


def test_the_last_value_travels_only_when_small_and_able(template: Any, harness: Any) -> None:
    assert harness.loaded(results(template.run("6 * 7", outputs=["_"]))["_"]) == 42
    assert template.run("'x' * 100_000", outputs=["_"]).end["results"] == []
    assert template.run("import threading; threading.Lock()", outputs=["_"]).end["results"] == []
    assert template.run("x = 1", outputs=["_"]).end["results"] == []


def test_large_values_go_through_files_without_copies(
    template: Any, harness: Any, tmp_path: Path
) -> None:
    array = numpy.random.default_rng(1).standard_normal(LARGE)
    data = {}
    for form in ("npy", "cloudpickle"):
        buffer = io.BytesIO()
        if form == "npy":
            numpy.save(buffer, array)
        else:
            cloudpickle.dump({"pickled": array}, buffer, protocol=5)
        digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
        path = tmp_path / form
        path.write_bytes(buffer.getbuffer())
        data[form] = (digest, str(path))
    job = template.park()
    done = job.run(
        "import resource\npickled *= 2\narray = array + 1\npickled = {'inside': pickled}\n"
        "del array\narray = pickled['inside']\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss",
        inputs=[
            {"name": "array", "kind": "value", "format": "npy", "blob": data["npy"][0]},
            {
                "names": ["p"],
                "kind": "namespace",
                "format": "cloudpickle",
                "blob": data["cloudpickle"][0],
            },
        ],
        paths={"blobs": dict(data.values())},
        outputs=["array", "pickled", "peak"],
    )
    found = results(done)
    assert done.exit_code == 0, done.traceback
    assert found["array"]["data"] is None
    numpy.testing.assert_array_equal(harness.loaded(found["array"], job.folder), array * 2)
    inside = harness.loaded(found["pickled"], job.folder)["inside"]
    numpy.testing.assert_array_equal(inside, array * 2)
    assert sorted(os.listdir(job.folder / "results")) == sorted(
        {found["array"]["sha256"], found["pickled"]["sha256"]}
    )


def test_inputs_of_every_format(template: Any, harness: Any) -> None:
    def inline(data: bytes) -> str:
        return base64.b64encode(data).decode()

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.arange(3))
    table = pyarrow.table({"a": [1, 2]})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    done = template.run(
        "print(j, n.sum(), t.to_pydict(), v, a, b)",
        inputs=[
            {"name": "j", "kind": "value", "format": "json", "data": inline(b'{"k": 1}')},
            {"name": "n", "kind": "value", "format": "npy", "data": inline(buffer.getvalue())},
            {"name": "t", "kind": "value", "format": "arrow", "data": inline(sink.getvalue())},
            harness.value_input("v", {3}),
            harness.namespace_input(a=1, b="two"),
        ],
    )
    assert done.stdout == "{'k': 1} 3 {'a': [1, 2]} {3} 1 two\n"


def test_an_input_that_cannot_be_rebuilt_is_named(template: Any) -> None:
    done = template.run(
        "print(1)",
        inputs=[{"name": "broken", "kind": "value", "format": "cloudpickle", "data": "AAAA"}],
    )
    assert "broken" in done.error["message"]
    assert done.stdout == ""
    assert not [each for each in done.unordered if each["phase"] == "started"]


NOTEBOOK = """
from enum import Enum
from dataclasses import dataclass
class Color(Enum):
    RED = 1
@dataclass
class P:
    x: int
    def double(self): return helper(self.x)
def helper(n): return n * 2
class Outer:
    class Inner: pass
p = P(1)
"""

REMOTE = """
assert isinstance(p, P)
assert P.__annotations__["x"] is int
def g(a: int): pass
assert g.__annotations__["a"] is int
q = P(p.x + 1); c = Color.RED
both = [P, Color, Outer.Inner(), {c: q}]
class New:
    def __init__(self, p): self.p = p
new = New(q)
d = q.double()
"""


def test_classes_of_the_notebook_keep_their_identity(
    template: Any, harness: Any, notebook: types.ModuleType
) -> None:
    exec(compile(NOTEBOOK, "<notebook>", "exec", dont_inherit=True), notebook.__dict__)
    names = {name: notebook.__dict__[name] for name in ("p", "P", "Color", "Outer")}
    double = notebook.P.double
    done = template.run(
        REMOTE,
        inputs=[harness.namespace_input(**names)],
        outputs=["q", "c", "both", "new", "d"],
    )
    assert done.exit_code == 0, done.traceback
    found = {name: harness.loaded(each) for name, each in results(done).items()}
    assert isinstance(found["q"], notebook.P)
    assert found["q"] == notebook.P(2)
    assert found["c"] is notebook.Color.RED
    assert found["both"][:2] == [notebook.P, notebook.Color]
    assert isinstance(found["both"][2], notebook.Outer.Inner)
    assert found["new"].p == notebook.P(2)
    assert found["d"] == 4
    assert notebook.P.double is double  # the class itself was not touched


def test_a_class_that_the_cell_defines_anew_is_the_cells(
    template: Any, harness: Any, notebook: types.ModuleType
) -> None:
    exec(compile(NOTEBOOK, "<notebook>", "exec", dont_inherit=True), notebook.__dict__)
    done = template.run(
        "class P:\n    y = 5\nq = P()",
        inputs=[harness.namespace_input(P=notebook.P)],
        outputs=["q"],
    )
    q = harness.loaded(results(done)["q"])
    assert q.y == 5
    assert not isinstance(q, notebook.P)


def test_calls(template: Any, harness: Any, notebook: types.ModuleType) -> None:
    exec(
        "def add(a, *, b): print('adding'); return a + b\n"
        "async def later(): return 1\n"
        "def bad(): raise ValueError('bad')",
        notebook.__dict__,
    )
    done = template.run(kind="call", inputs=[harness.call_input(notebook.add, 1, b=2)])
    assert done.stdout == "adding\n"
    assert harness.loaded(results(done)["return"]) == 3
    assert done.unordered[0]["phase"] == "started"
    later = template.run(kind="call", inputs=[harness.call_input(notebook.later)])
    assert harness.loaded(results(later)["return"]) == 1
    assert later.stderr == ""
    failed = template.run(kind="call", inputs=[harness.call_input(notebook.bad)])
    assert failed.error["message"] == "ValueError: bad"
    lock = template.run(kind="call", inputs=[harness.call_input(__import__("threading").Lock)])
    assert "lock" in results(lock)["return"]["error"]


def test_sources_of_notebook_functions_show_in_tracebacks(template: Any, harness: Any) -> None:
    text = "def bad():\n    raise ValueError('bad')  # the line\n"
    sources = base64.b64encode(json.dumps({"<dynamic-code>": text}).encode()).decode()
    module = types.ModuleType("__main__")
    exec(compile(text, "<ipython-input-7>", "exec", dont_inherit=True), module.__dict__)
    done = template.run(
        kind="call",
        inputs=[
            {"name": "__firepool_sources__", "kind": "value", "format": "json", "data": sources},
            harness.call_input(module.bad),
        ],
    )
    assert "2     raise ValueError('bad')" in done.traceback


def test_imports_are_timed_and_learned(template: Any) -> None:
    done = template.run("import colorsys, tomllib\nimport jinja2\nimport jinja2.sandbox")
    assert done.end["imports_seconds"] > 0
    assert "jinja2" in done.end["imported"]
    assert "jinja2.sandbox" in done.end["imported"]
    assert not [name for name in done.end["imported"] if name.startswith("markupsafe")]
    missing = template.run("import nosuchmodule")
    assert "importclock" not in missing.traceback
    assert missing.end["imported"] == []
