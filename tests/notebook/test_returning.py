"""What comes back from a pod becomes the notebook's own again.

A pod is a process with nothing of the notebook in it: `POD` loads what was sent, runs a line and
sends values back with the pod agent's own pickler.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from firepool_nb.capture import returning
from firepool_nb.capture.cell import capture

POD = """
import base64, io, sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
from firepool_podagent.interpreter import inputs, pickling
sent = {"kind": "namespace", "format": "cloudpickle", "data": sys.argv[1]}
inputs.bind([sent], {}, vars(main))
exec(compile(sys.argv[2], "<cell>", "exec", dont_inherit=True), vars(main))
print(base64.b64encode(pickling.dumps(vars(main)["out"])).decode())
"""

NOTEBOOK = """
from enum import Enum
from dataclasses import dataclass
class Color(Enum):
    RED = 1
    BLUE = 2
@dataclass
class P:
    x: int
    def double(self): return P(self.x * factor)
class ApiError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
factor = 2
p = P(1)
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(NOTEBOOK, "<notebook>", "exec", dont_inherit=True), vars(module))
    return vars(module)


def round_trip(cell: str, notebook: dict[str, Any]) -> Any:
    captured = capture(cell, notebook)
    assert captured.namespace is not None
    sent = base64.b64encode(captured.namespace).decode()
    done = subprocess.run(
        [sys.executable, "-c", POD, sent, cell], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return returning.loads(base64.b64decode(done.stdout), notebook)


def test_instances_are_of_the_notebooks_own_class(notebook: dict[str, Any]) -> None:
    q = round_trip("out = P(p.x + 1)", notebook)
    assert type(q) is notebook["P"]
    assert q == notebook["P"](2)


def test_enum_members_are_the_notebooks_own(notebook: dict[str, Any]) -> None:
    assert round_trip("out = Color.RED", notebook) is notebook["Color"].RED
    assert round_trip("out = {Color.BLUE: [Color.RED]}", notebook) == {
        notebook["Color"].BLUE: [notebook["Color"].RED]
    }


def test_the_class_is_not_changed_by_what_returns(notebook: dict[str, Any]) -> None:
    own = notebook["P"]
    double = own.double
    round_trip("P.double = lambda self: 'pod'\nout = P(3)", notebook)
    assert own.double is double
    assert own(2).double() == own(4)


def test_a_redefined_class_is_the_new_one_everywhere(notebook: dict[str, Any]) -> None:
    round_trip("out = P(p.x)", notebook)
    exec("@dataclass\nclass P:\n    x: int\n    y: int = 7\np = P(1)", notebook)
    q = round_trip("out = P(p.x, p.y + 1)", notebook)
    assert type(q) is notebook["P"]
    assert q.y == 8


def test_annotations_are_evaluated_as_in_the_notebook(notebook: dict[str, Any]) -> None:
    cell = (
        "assert P.__annotations__['x'] is int\n"
        "def g(a: int): pass\n"
        "assert g.__annotations__['a'] is int\n"
        "out = p"
    )
    assert round_trip(cell, notebook) == notebook["p"]


def test_functions_come_home_to_the_notebooks_globals(notebook: dict[str, Any]) -> None:
    function = round_trip(
        "def scale(v): return v * factor\nfactor = factor + 3\nout = scale", notebook
    )
    assert function.__globals__ is notebook
    assert notebook["factor"] == 2, "a name of the notebook is never overwritten"
    assert function(3) == 6


def test_exceptions_whose_init_takes_other_arguments(notebook: dict[str, Any]) -> None:
    error = round_trip("out = ApiError(404, detail='no such run')", notebook)
    assert type(error) is notebook["ApiError"]
    assert str(error) == "404: no such run"
    assert error.code == 404


def test_classes_made_in_the_pod_arrive_as_they_are(notebook: dict[str, Any]) -> None:
    value = round_trip("class Fresh:\n    y = p.x\nout = Fresh()", notebook)
    assert type(value).__name__ == "Fresh"
    assert value.y == 1
