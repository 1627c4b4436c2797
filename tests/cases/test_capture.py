"""What travels with a cell: identity, names as Python spells them, and the named culprit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from kernels import Kernel

Jobs = Callable[[], list[dict[str, Any]]]

# -- C14 -----------------------------------------------------------------------------------------

CLASSES = (
    "from enum import Enum\nfrom dataclasses import dataclass\n"
    "class Color(Enum):\n    RED = 1\n@dataclass\nclass P:\n    x: int{more}\np = P(1)"
)
THERE = (
    "assert isinstance(p, P)\nassert P.__annotations__['x'] is int\n"
    "def g(a: int): pass\nassert g.__annotations__['a'] is int\n"
    "q = P(p.x + 1); c = Color.RED"
)


def test_classes_are_the_notebooks_own_there_and_back(kernel: Kernel) -> None:
    """C14: isinstance, ``==`` and ``is`` hold on both sides, also after a class was redefined."""
    kernel.ok(CLASSES.format(more=""))
    kernel.remote(THERE, "-i p -o q,c")
    assert kernel.ok("isinstance(q, P), q == P(2), c is Color.RED").texts == ["(True, True, True)"]
    kernel.ok(CLASSES.format(more="\n    label: str = 'new'"))
    kernel.remote(THERE + "\nassert p.label == 'new'", "-i p -o q,c")
    assert kernel.ok("type(q) is P, q == P(2, 'new'), c is Color.RED").texts == [
        "(True, True, True)"
    ]


# -- C16 -----------------------------------------------------------------------------------------

CULPRITS = (
    "import threading; guard = threading.Lock(); table = bytes(600_000_000); "
    "rows = (n for n in range(3)); fh = open('x.txt', 'w')"
)


@pytest.fixture(scope="module")
def culprits(kernel: Kernel) -> Iterator[psutil.Process]:
    kernel.ok(CULPRITS)
    yield psutil.Process(int(kernel.ok("import os; print(os.getpid())").stdout))
    kernel.ok("fh.close(); del table, rows, guard, fh")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def f():\n    def g(): return guard\n    return g\nf()",
            ["'guard'", "lock", "through f/g"],
        ),
        ("print(len(table))", ["'table'", "bytes", "572.2 MiB", "16.0 MiB"]),
        ("print(list(rows))", ["'rows'", "generator"]),
        ("fh.write('x')", ["'fh'", "TextIOWrapper"]),
    ],
    ids=["guard", "table", "rows", "fh"],
)
def test_the_culprit_is_named_before_anything_is_queued(
    kernel: Kernel, jobs: Jobs, culprits: psutil.Process, source: str, words: list[str]
) -> None:
    """C16: refused here within seconds, by name, without a copy, and nothing was used up."""
    kernel.remote("print('the others are no hindrance')")
    before = len(jobs())
    resident = culprits.memory_info().rss
    peak = 0
    began = time.monotonic()
    request = kernel.start(f"%%firepool\n{source}")
    while not kernel.client.shell_channel.msg_ready():
        peak = max(peak, culprits.memory_info().rss)
        assert time.monotonic() - began < 5
        time.sleep(0.005)
    failed = kernel.finish(request)
    assert time.monotonic() - began < 5
    assert peak - resident < 0.2 * 600_000_000
    assert failed.status == "error"
    for word in words:
        assert word in failed.error["evalue"]
    assert len(jobs()) == before
    assert kernel.ok("import inspect; inspect.getgeneratorstate(rows)").texts == ["'GEN_CREATED'"]


# -- C18 -----------------------------------------------------------------------------------------


def test_names_as_python_spells_them(kernel: Kernel) -> None:
    """C18: what is read travels, whatever its spelling; what is not read stays here."""
    kernel.ok(
        "import threading\nﬁ = 2; w = 8; vals = [1, 2, 3]; hidden = 5\n"
        "sum = lambda xs: 42\nsecret = threading.Lock()"
    )
    first = kernel.remote(
        'print(f"{ﬁ:>{w}}", [v * ﬁ for v in vals], (lambda: sum(vals))())\n'
        'def k(a: "Nope" = w): return a\nprint(k(), eval("len(vals)"))\n'
        "print([n for n in ('secret', 'hidden', 'threading', '_i1', '_ii', '_oh') "
        "if n in globals() and globals()[n]])\n"
        "print(len(globals().get('In', [])) < 3, globals().get('Out', {}))"
    )
    assert first.stdout == "       2 [2, 4, 6] 42\n8 3\n[]\nTrue {}\n"
    failed = kernel.run('%%firepool\nexec("print(hidden)")')
    assert failed.error["ename"] == "NameError"
    assert "'hidden'" in failed.error["evalue"]
    assert "-i hidden" in failed.traceback
    assert kernel.remote('exec("print(hidden)")', "-i hidden").stdout == "5\n"
    assert kernel.remote("print(fi)\nﬁ = 10", "-i ﬁ -o ﬁ").stdout == "2\n"
    assert kernel.ok("fi, ﬁ").texts == ["(10, 10)"]
    kernel.ok("del sum")
