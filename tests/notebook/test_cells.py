"""Cells in a real kernel on real pods: what a notebook user sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Jobs = Callable[[], list[dict[str, Any]]]


# -- output --------------------------------------------------------------------------------------


def test_output_arrives_while_the_cell_runs(kernel: Any) -> None:
    ran = kernel.remote(
        "import time\nfor n in range(4):\n    print('line', n)\n    time.sleep(0.3)"
    )
    times = [at for at, kind in ran.arrived if kind == "stream"]
    assert ran.stdout == "line 0\nline 1\nline 2\nline 3\n"
    assert len(times) >= 3
    assert times[-1] - times[0] > 0.6


def test_a_plot_is_one_image(kernel: Any) -> None:
    ran = kernel.remote("import matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.show()")
    images = [o for o in ran.outputs if "image/png" in o.get("data", {})]
    assert len(images) == 1
    assert len(ran.outputs) == 1


def test_a_progress_bar_moves_in_place(kernel: Any) -> None:
    ran = kernel.remote(
        "import time\nfrom tqdm.auto import tqdm\n"
        "for n in tqdm(range(5)):\n    time.sleep(0.1)\nprint('done')"
    )
    assert "5/5" in ran.stderr
    assert ran.stderr.count("\r") >= 2
    assert ran.stdout == "done\n"


def test_displays_update_and_clear(kernel: Any) -> None:
    keep = kernel.remote(
        "from IPython.display import clear_output\nprint('keep')\nclear_output(wait=True)"
    )
    assert keep.stdout == "keep\n"
    new = kernel.remote(
        "from IPython.display import clear_output\n"
        "print('gone')\nclear_output(wait=True)\nprint('new')"
    )
    assert new.stdout == "new\n"
    cell = (
        "from IPython.display import display\nh = display('v0', display_id='mine')\n"
        "for n in range(1, 21):\n    h.update(f'v{n}')"
    )
    first, second = kernel.remote(cell), kernel.remote(cell)
    assert first.texts == second.texts == ["'v20'"]
    assert len(first.outputs) == 1
    assert not first.displays.keys() & second.displays.keys(), "two runs never share a display"


def test_streams_keep_their_order_and_bytes(kernel: Any) -> None:
    ran = kernel.remote(
        "import sys, os\nprint('out')\nprint('err', file=sys.stderr)\n"
        "sys.stdout.flush()\nos.write(1, b'\\xff\\xc3')\nos.write(1, b'\\xa9\\n')\nprint('end')"
    )
    assert ran.stdout == "out\n\ufffdé\nend\n"
    assert ran.stderr == "err\n"


def test_shell_commands_and_magics_work_there(kernel: Any) -> None:
    kernel.ok("word = 'hello'")
    assert kernel.remote("!echo {word} $word").stdout == "hello hello\n"
    timed = kernel.remote("%%time\nx = 3\nprint(word, x)")
    assert timed.stdout.startswith("hello 3\n")
    assert "Wall time" in timed.stdout
    assert "per loop" in kernel.remote("%timeit -n 1 -r 1 len(word)").stdout


def test_await_works_as_in_a_notebook(kernel: Any) -> None:
    base = "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 7\n"
    assert kernel.remote(base + "print(await f())").stdout == "7\n"
    assert kernel.remote(base + "print(asyncio.run(f()))").stdout == "7\n"
    left = kernel.remote(
        "import asyncio\nawait asyncio.sleep(0)\n"
        "t = asyncio.create_task(asyncio.sleep(3600))\nprint('left')"
    )
    assert (left.stdout, left.stderr) == ("left\n", "")
    ran = kernel.remote(base + "print([await f() for _ in range(2)])\nasync def g():\n    yield 1\n"
                        "async for v in g():\n    print(v)")  # fmt: skip
    assert ran.stdout == "[7, 7]\n1\n"


# -- values --------------------------------------------------------------------------------------


def test_the_last_value_is_the_cells_result(kernel: Any) -> None:
    ran = kernel.remote("[1, 2, 3]")
    assert [o["output_type"] for o in ran.outputs] == ["execute_result"]
    assert ran.texts == ["[1, 2, 3]"]
    assert kernel.ok("_ + [4]").texts == ["[1, 2, 3, 4]"]
    assert kernel.remote("5;").outputs == []
    unpicklable = kernel.remote("import threading\nthreading.Lock()")
    assert "lock" in unpicklable.texts[0]
    assert kernel.ok("_").texts != unpicklable.texts


def test_names_travel_in_and_out(kernel: Any) -> None:
    kernel.ok("import threading\nﬁ = 2; w = 8; vals = [1, 2, 3]; hidden = 5\n"
              "sum = lambda xs: 42\nsecret = threading.Lock()")  # fmt: skip
    ran = kernel.remote(
        'print(f"{ﬁ:>{w}}", [v * ﬁ for v in vals], (lambda: sum(vals))())\n'
        'def k(a: "Nope" = w): return a\n'
        'print(k(), eval("len(vals)"))'
    )
    assert ran.stdout == "       2 [2, 4, 6] 42\n8 3\n"
    failed = kernel.run('%%firepool\nexec("print(hidden)")')
    assert failed.status == "error"
    assert failed.error["ename"] == "NameError"
    assert "-i hidden" in failed.traceback
    assert kernel.remote('exec("print(hidden)")', "-i hidden").stdout == "5\n"
    kernel.remote("ﬁ = 10", "-i ﬁ -o ﬁ")
    assert kernel.ok("fi").texts == ["10"]
    kernel.ok("del sum")


def test_functions_see_what_the_remote_cell_binds(kernel: Any) -> None:
    kernel.ok("base = 1\ndef f(x): return x + base")
    assert kernel.remote("base = 100\nprint(f(1))").stdout == "101\n"
    assert kernel.ok("base, f(1)").texts == ["(1, 2)"]


def test_identity_of_classes(kernel: Any) -> None:
    kernel.ok("from enum import Enum\nfrom dataclasses import dataclass\n"
              "class Color(Enum):\n    RED = 1\n"
              "@dataclass\nclass P:\n    x: int\np = P(1)")  # fmt: skip
    cell = (
        'assert isinstance(p, P)\nassert P.__annotations__["x"] is int\n'
        'def g(a: int): pass\nassert g.__annotations__["a"] is int\n'
        "q = P(p.x + 1); c = Color.RED"
    )
    kernel.remote(cell, "-i p -o q,c")
    assert kernel.ok("isinstance(q, P), q == P(2), c is Color.RED").texts == ["(True, True, True)"]
    kernel.ok("@dataclass\nclass P:\n    x: int\n    new: str = 'new'\np = P(1)")
    kernel.remote(cell, "-i p -o q,c")
    assert kernel.ok("type(q) is P, q.new").texts == ["(True, 'new')"]


def test_results_that_cannot_come_cost_the_others_nothing(kernel: Any) -> None:
    ran = kernel.remote("import threading\na = 1\nb = threading.Lock()\nc = 3", "-o a,b,c,nope")
    assert kernel.ok("a, c").texts == ["(1, 3)"]
    assert any(text.startswith("b did not come back") for text in ran.texts)
    assert any(text.startswith("nope did not come back") for text in ran.texts)


def test_arrays_go_there_and_back(kernel: Any) -> None:
    kernel.ok("import numpy as np\nbig = np.arange(3_000_000, dtype='f8')")
    refused = kernel.run("%%firepool\nbig.sum()")
    assert refused.error["ename"] == "ValueTooLarge"
    assert re.search(r"'big' \(numpy.ndarray, 22\.9 MiB\).*-i big", refused.error["evalue"])
    kernel.remote("doubled = big * 2", "-i big -o doubled")
    assert kernel.ok("doubled.shape, float(doubled[-1])").texts == ["((3000000,), 5999998.0)"]


@pytest.mark.stress
def test_two_hundred_megabytes_go_there_and_back(kernel: Any) -> None:
    kernel.ok("import numpy as np\nhuge = np.random.default_rng(0).random(25_000_000)")
    kernel.remote("back = huge + 1", "-i huge -o back", timeout=120)
    assert kernel.ok("bool((back == huge + 1).all())").texts == ["True"]
    kernel.ok("del huge, back")


def test_a_change_in_the_pod_only_is_told(kernel: Any) -> None:
    kernel.ok("df = {'a': 1}")
    ran = kernel.remote("df['b'] = 2")
    assert ran.texts == ["`df` changed in the pod only; add `-o df`"]
    assert kernel.remote("df['b'] = 2", "-o df").texts == []
    assert kernel.ok("df").texts == ["{'a': 1, 'b': 2}"]


# -- errors ----------------------------------------------------------------------------------------


def test_one_remote_traceback_in_the_cells_own_lines(kernel: Any) -> None:
    kernel.ok("def broken(x):\n    return 1 / x")
    failed = kernel.run("%%firepool\nprint('before')\n\nbroken(0)")
    assert failed.status == "error"
    assert failed.error["ename"] == "ZeroDivisionError"
    assert failed.stdout == "before\n"
    text = failed.traceback
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert re.search(r"Cell In\[\d+\], line 4", text)
    assert "----> 4 broken(0)" in text
    assert "return 1 / x" in text, "functions of the notebook show their lines"
    assert "firepool" not in text


def test_errors_are_caught_as_what_they_are(kernel: Any) -> None:
    ran = kernel.ok(
        "from firepool_nb import RemoteError\n"
        "try:\n    get_ipython().run_cell_magic('firepool', '', 'int(\"x\")')\n"
        "except ValueError as error:\n"
        "    print(isinstance(error, RemoteError), error)"
    )
    assert ran.stdout == "True invalid literal for int() with base 10: 'x'\n"


@pytest.mark.parametrize(
    ("source", "ename", "texts"),
    [
        ("raise ApiError(404, detail='no such run')", "ApiError", ["404: no such run"]),
        ("import urllib.error\nraise urllib.error.HTTPError('u', 500, 'boom', None, None)",
         "HTTPError", ["500: boom"]),
        ("try:\n    raise KeyError('first')\nexcept KeyError as e:\n"
         "    raise ValueError('second') from e", "ValueError", ["first", "second"]),
        ("class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute",
         "Mute", []),
    ],
    ids=["locks", "http", "cause", "mute"],
)  # fmt: skip
def test_exceptions_that_cannot_be_rebuilt(
    kernel: Any, source: str, ename: str, texts: list[str]
) -> None:
    kernel.ok(
        "class ApiError(Exception):\n    def __init__(self, code, *, detail):\n"
        "        super().__init__(f'{code}: {detail}')\n        self.code = code\n"
        "        self.lock = __import__('threading').Lock()"
    )
    failed = kernel.run(f"%%firepool\n{source}")
    assert failed.error["ename"] == ename
    for text in texts:
        assert text in failed.traceback
    assert source.splitlines()[-1].strip() in failed.traceback
    assert "PicklingError" not in failed.traceback
    assert "missing" not in failed.traceback


@pytest.mark.parametrize(
    ("source", "ename", "words"),
    [
        ("print(missing_name)", "MissingName", "'missing_name' is not defined (line 2)"),
        (
            "def f():\n    def g(): return guard\n    return g\nf()",
            "NotPicklable",
            "'guard' (lock)",
        ),
        ("print(len(table))", "ValueTooLarge", "'table' (bytes, 95.4 MiB)"),
        ("print(list(rows))", "NotPicklable", "'rows' (generator)"),
        ("fh.write('x')", "NotPicklable", "'fh' (TextIOWrapper)"),
    ],
)
def test_what_cannot_travel_is_refused_before_sending(
    kernel: Any, jobs: Jobs, source: str, ename: str, words: str
) -> None:
    kernel.ok("import threading\nguard = threading.Lock(); table = bytes(100_000_000)\n"
              "rows = (n for n in range(3)); fh = open('x.txt', 'w')")  # fmt: skip
    before = len(jobs())
    failed = kernel.run(f"%%firepool\n{source}")
    assert failed.error["ename"] == ename
    assert words in failed.error["evalue"]
    assert len(jobs()) == before
    assert kernel.ok("list(rows)").texts == ["[0, 1, 2]"]
    kernel.ok("fh.close(); del table")


def test_a_name_that_only_a_remote_cell_has(kernel: Any) -> None:
    ran = kernel.remote("only_there = 3")
    assert ran.status == "ok"
    failed = kernel.run("%%firepool\nonly_there + 1")
    assert re.search(r"only in the pod, by In\[\d+\].*-o only_there", failed.error["evalue"])


def test_wrong_options_and_what_is_not_there_yet(kernel: Any, jobs: Jobs) -> None:
    before = len(jobs())
    wrong = kernel.run("%%firepool --skuu cpu\nprint('here?')")
    assert wrong.status == "error"
    assert "did you mean --sku?" in wrong.stderr
    for option in ("--live", "--pods 2", "--image sha256:1", "--secret KEY"):
        refused = kernel.run(f"%%firepool {option}\nprint('here?')")
        assert refused.error["ename"] == "NotAvailable"
        assert "here?" not in refused.stdout
    unknown = kernel.run("%%firepool --sku no-such-pool\nprint('here?')")
    assert unknown.status == "error"
    assert "no-such-pool" in unknown.error["evalue"]
    assert len(jobs()) == before


# -- files and modules -------------------------------------------------------------------------


def test_relative_paths_work_as_in_the_kernel(kernel: Any, shared_folder: Path) -> None:
    (shared_folder / "data").mkdir()
    (shared_folder / "data" / "x.csv").write_text("a,b\n1,2\n")
    ran = kernel.remote("import pandas as pd\nprint(pd.read_csv('data/x.csv').a.sum())")
    assert ran.stdout == "1\n"


def test_a_module_beside_the_notebook_is_used_as_it_is_now(
    kernel: Any, shared_folder: Path
) -> None:
    module = shared_folder / "fp_beside.py"
    module.write_text("def answer(): return 1\n")
    kernel.ok("from fp_beside import answer\nimport fp_beside")
    assert kernel.remote("print(answer(), fp_beside.answer())").stdout == "1 1\n"
    module.write_text("def answer(): return 2\n")
    assert kernel.remote("print(answer(), fp_beside.answer())").stdout == "2 2\n"
    assert kernel.remote("from fp_beside import answer as a\nprint(a())").stdout == "2\n"


def test_the_kernels_environment_is_the_jobs(kernel: Any, shared_folder: Path) -> None:
    kernel.ok("import os\nos.environ['FP_COLOUR'] = 'blue'")
    assert kernel.remote("import os\nprint(os.environ['FP_COLOUR'])").stdout == "blue\n"
    (shared_folder / "below").mkdir()
    kernel.ok("os.chdir('below')")
    assert kernel.remote("import os\nprint(os.path.basename(os.getcwd()))").stdout == "below\n"
    kernel.ok("os.chdir('..')")
    ran = kernel.remote("import os\nprint(os.environ['FP_ONE'])", "--env FP_ONE='a b'")
    assert ran.stdout == "a b\n"
    forbidden = kernel.run("%%firepool --env LD_PRELOAD=x\n1")
    assert "LD_PRELOAD" in forbidden.error["evalue"]


# -- jobs ----------------------------------------------------------------------------------------


def test_a_job_without_waiting(kernel: Any) -> None:
    ran = kernel.ok("%%firepool -a --job later -o y\nprint('working')\ny = 6 * 7\ny")
    assert "Job" in ran.texts[0]
    assert ran.stdout == ""
    assert kernel.ok("later.result(30)").texts == ["{'y': 42}"]
    assert kernel.ok("print(later.logs(), later.state, later.path)").stdout.startswith("working\n")
    assert kernel.ok("later.start_latency_seconds > 0").texts == ["True"]
    assert kernel.ok("await later").texts == ["{'y': 42}"]
    replayed = kernel.ok("%firepool result later")
    assert replayed.stdout == "working\n"
    assert kernel.ok("y").texts == ["42"]
    logs = kernel.ok("%firepool logs later")
    assert logs.stdout == "working\n"


def test_two_jobs_of_one_cell_id_keep_their_output_apart(kernel: Any) -> None:
    kernel.ok(
        "%%firepool -a --job one\nimport threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(1), print('A-late'))).start()\nprint('A-main')"
    )
    kernel.ok("%%firepool -a --job two\nimport time\ntime.sleep(0.5)\nprint('B')\n1/0")
    kernel.ok("one.wait(30); two.wait(30)")
    assert kernel.ok("print(one.logs())").stdout == "A-main\nA-late\n\n"
    assert kernel.ok("print(two.logs())").stdout == "B\n\n"
    assert kernel.ok("type(two.exception()).__name__").texts == ["'ZeroDivisionError'"]
    failed = kernel.run("two.result()")
    assert failed.error["ename"] == "ZeroDivisionError"


def test_commands_answer(kernel: Any) -> None:
    assert "isolation:" in kernel.ok("%firepool status").stdout
    assert "cpu-small *" in kernel.ok("%firepool pools").stdout
    assert "succeeded" in kernel.ok("%firepool jobs").stdout
    assert "FAIL" not in kernel.ok("%firepool doctor").stdout
    assert "did you mean status?" in kernel.run("%firepool statsu").stderr
    for later in ("put a b", "get a", "ls", "usage", "extend"):
        assert "not available" in kernel.run(f"%firepool {later}").stderr


def test_cancelling_and_releasing(kernel: Any) -> None:
    kernel.ok("%%firepool -a --job slow\nimport time\ntime.sleep(600)")
    kernel.ok("%firepool cancel slow")
    assert kernel.ok("slow.wait(30), slow.state").texts == ["(True, 'CANCELLED')"]
    assert "add -f" in kernel.run("%firepool release another-session").stderr
    kernel.remote("1")
    assert kernel.ok("%firepool release").stdout.startswith("released ")


def test_on_sends_unmarked_cells(kernel: Any) -> None:
    here = kernel.ok("import os; print(os.getpid())").stdout
    kernel.ok("%firepool on")
    try:
        there = kernel.ok("import os; print(os.getpid())").stdout
        assert there != here
        failed = kernel.run("x = 1\nx / 0")
        assert "line 2" in failed.traceback
        assert kernel.ok("%firepool status").stdout.count("unmarked cells run on a pod") == 1
    finally:
        kernel.ok("%firepool off")
    assert kernel.ok("import os; print(os.getpid())").stdout == here
    assert "did you mean --sku?" in kernel.run("%firepool on --skuu x").stderr


def test_the_default_sku_is_a_setting(kernel: Any, jobs: Jobs) -> None:
    kernel.ok("%config FirepoolMagics.default_sku = 'cpu'")
    kernel.remote("1")
    assert jobs()[0]["sku"] == "cpu"
    kernel.ok("%config FirepoolMagics.default_sku = ''")


def test_loading_twice_does_nothing_more(kernel: Any) -> None:
    kernel.ok("%load_ext firepool_nb")
    kernel.ok("%reload_ext firepool_nb")
    assert kernel.remote("print(1)").stdout == "1\n"
