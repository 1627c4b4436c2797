"""Cells in IPython: text, values, displays, await, magics, plots."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest


def test_text_displays_and_value_keep_their_order(template: Any) -> None:
    done = template.run(
        "import sys\nprint('one')\nprint('two', file=sys.stderr)\n"
        "display('three')\nprint('four')\n40 + 2"
    )
    assert [each["type"] for each in done.messages] == [
        "stream",
        "stream",
        "display_data",
        "stream",
        "execute_result",
    ]
    assert done.stdout == "one\nfour\n"
    assert done.stderr == "two\n"
    assert done.of("execute_result")[0]["data"] == {"text/plain": "42"}
    assert done.exit_code == 0
    assert done.status == 0


def test_rich_displays_arrive_unchanged(template: Any) -> None:
    done = template.run(
        "from IPython.display import HTML, Image, JSON\n"
        "display(HTML('<b>x</b>'), metadata={'k': 1})\n"
        "display(JSON({'a': [1]}))\n"
        "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n', format='png'))\n"
        "import pandas as pd; pd.DataFrame({'a': [1]})"
    )
    html, json_, image = done.of("display_data")
    assert html["data"]["text/html"] == "<b>x</b>"
    assert html["metadata"] == {"k": 1}
    assert json_["data"]["application/json"] == {"a": [1]}
    assert base64.b64decode(image["data"]["image/png"]) == b"\x89PNG\r\n\x1a\n"
    assert "<table" in done.of("execute_result")[0]["data"]["text/html"]


def test_display_updates_keep_their_id(template: Any) -> None:
    done = template.run(
        "h = display('v0', display_id=True)\nfor n in range(1, 4): h.update(f'v{n}')"
    )
    first, *updates = [each for each in done.messages if "display" in each["type"]]
    assert first["type"] == "display_data"
    assert [each["type"] for each in updates] == ["update_display_data"] * 3
    assert updates[-1]["data"]["text/plain"] == "'v3'"
    ids = {each["transient"]["display_id"] for each in (first, *updates)}
    assert len(ids) == 1
    assert (
        template.run("h = display(1, display_id=True)").of("display_data")[0]["transient"][
            "display_id"
        ]
        not in ids
    )


def test_clear_output_stands_between_what_it_clears_and_what_follows(template: Any) -> None:
    done = template.run(
        "from IPython.display import clear_output\n"
        "print('gone'); clear_output(wait=True); print('new')"
    )
    assert [each["type"] for each in done.messages] == ["stream", "clear_output", "stream"]
    assert done.of("clear_output")[0]["wait"] is True


@pytest.mark.parametrize("last", ["figure", "display(figure)"])
def test_a_figure_that_never_saw_pyplot_is_an_image(template: Any, last: str) -> None:
    done = template.run(
        "import sys\nfrom matplotlib.figure import Figure\n"
        "figure = Figure()\nfigure.subplots().plot([1, 2])\n"
        f"assert 'matplotlib.pyplot' not in sys.modules\n{last}"
    )
    shown = [*done.of("execute_result"), *done.of("display_data")]
    assert [sorted(each["data"]) for each in shown] == [["image/png", "text/plain"]]


def test_a_cell_has_no_history(template: Any) -> None:
    done = template.run("print([n for n in ('In', 'Out', '_', '__', '_i') if n in globals()])\n1")
    assert done.text("stdout") == "[]\n"


@pytest.mark.parametrize("backend", ["widget", "qt", "notebook"])
def test_other_plot_backends_are_refused_in_one_sentence(template: Any, backend: str) -> None:
    done = template.run(f"%matplotlib {backend}")
    assert f"%matplotlib {backend} needs a kernel" in done.error["message"]
    assert len(done.error["traceback"]) == 1


@pytest.mark.parametrize("code", ["input()", "breakpoint()", "import getpass; getpass.getpass()"])
def test_what_needs_a_keyboard_names_a_way_that_exists(template: Any, code: str) -> None:
    message = template.run(code).error["message"]
    assert "no keyboard" in message
    assert "live" not in message


@pytest.mark.parametrize(
    "ending",
    [
        "plt.show()",
        "fig",
        "display(fig)",
        "None",
        "display(fig); plt.show()",
    ],
)
def test_one_figure_is_one_image(template: Any, ending: str) -> None:
    ending = "" if ending == "display(fig); plt.show()" else ending
    done = template.run(
        f"import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([0, 1])\n{ending}",
        env={**template.park_env(), "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
    )
    assert done.exit_code == 0, done.stderr
    images = [each for each in done.messages if "image/png" in each.get("data", {})]
    assert len(images) == 1
    assert base64.b64decode(images[0]["data"]["image/png"]).startswith(b"\x89PNG")


def test_plots_are_inline_without_a_word_about_the_backend(template: Any) -> None:
    done = template.run(
        "import matplotlib.pyplot as plt\nplt.plot([0, 1]); plt.figure(); plt.plot([1])"
    )
    images = [each for each in done.messages if "image/png" in each.get("data", {})]
    assert len(images) == 2


def test_progress_bars_are_text(template: Any) -> None:
    done = template.run("from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass")
    assert "3/3" in done.stderr
    assert "\r" in done.stderr
    assert not done.of("display_data")


def test_the_shell_is_no_kernel(template: Any) -> None:
    done = template.run(
        "ip = get_ipython()\n"
        "print(hasattr(ip, 'kernel'), 'IPKernelApp' in ip.config, type(ip).__name__)\n"
        "from rich.console import Console\nprint(Console().is_jupyter)"
    )
    assert done.stdout.split()[:2] == ["False", "False"]
    assert "ZMQ" not in done.stdout
    assert done.stdout.split()[-1] == "False"


def test_a_widget_becomes_its_text_with_one_note(template: Any) -> None:
    done = template.run(
        "import ipywidgets\ndisplay(ipywidgets.IntSlider(3))\nipywidgets.IntSlider(4)"
    )
    shown = [*done.of("display_data"), *done.of("execute_result")]
    assert len(shown) == 2
    assert all("IntSlider" in each["data"]["text/plain"] for each in shown)
    assert all("widget-view" not in kind for each in shown for kind in each["data"])
    assert len(done.of("note")) == 1


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (
            "import asyncio\nasync def f():\n    await asyncio.sleep(0.01); return 7\n"
            "print(await f())",
            "7\n",
        ),
        ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", "7\n"),
        (
            "import asyncio\nawait asyncio.sleep(0); asyncio.create_task(asyncio.sleep(3600))\n"
            "print('left')",
            "left\n",
        ),
        (
            "async def a():\n    yield 1\n    yield 2\nasync for x in a(): print(x)\n"
            "print([y async for y in a()])",
            "1\n2\n[1, 2]\n",
        ),
        (
            "from contextlib import asynccontextmanager\n@asynccontextmanager\nasync def c():\n"
            "    yield 5\nasync with c() as v: print(v)",
            "5\n",
        ),
        ("import signal\nprint(signal.signal(signal.SIGUSR1, lambda *a: None))", "0\n"),
    ],
)
def test_await_works_and_no_loop_is_there_without_it(template: Any, code: str, shown: str) -> None:
    began = time.monotonic()
    done = template.run(code)
    assert done.stdout.replace("Handlers.SIG_DFL", "0") == shown
    assert done.stderr == ""
    assert done.exit_code == 0
    assert time.monotonic() - began < 30


def test_no_future_flag_of_ours_reaches_the_cell(template: Any) -> None:
    code = (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def g(a: int): pass\nprint(P.__annotations__['x'] is int, g.__annotations__['a'] is int)"
    )
    assert template.run(code).stdout == "True True\n"


def test_magics_and_shell_commands(template: Any) -> None:
    done = template.run("!echo out; echo err >&2\nx = !echo 1; echo 2\nprint(x, _exit_code)")
    assert done.stdout == "out\n['1', '2'] 0\n"
    assert done.stderr == "err\n"
    timed = template.run("%%time\nprint('in')\n3")
    assert "Wall time" in timed.stdout
    assert timed.of("execute_result")[0]["data"]["text/plain"] == "3"
    bash = template.run("%%bash\necho from bash\necho bad >&2")
    assert bash.stdout == "from bash\n"
    assert bash.stderr == "bad\n"
    assert "loop" in template.run("%timeit -n1 -r1 1+1").stdout
    assert "CPU times" in template.run("%time sum([1])").stdout
    failing = template.run("%%bash\nexit 3")
    assert failing.error["ename"] == "CalledProcessError"
    usage = template.run("%nosuchmagic")
    assert usage.error["ename"] == "UsageError"


def test_a_cell_runs_as_main_and_its_source_is_known(template: Any) -> None:
    done = template.run(
        "import inspect\ndef f():\n    return 1  # here\n"
        "print(__name__, f.__module__, inspect.getsource(f), '__file__' in globals())",
        line_offset=2,
    )
    assert done.stdout == "__main__ __main__ def f():\n    return 1  # here\n False\n"


def test_input_and_debuggers_fail_at_once_with_the_way_out(template: Any) -> None:
    for code in (
        "input('name? ')",
        "import getpass; getpass.getpass()",
        "breakpoint()",
        "import pdb; pdb.set_trace()",
    ):
        done = template.run(code)
        assert "a remote cell has no keyboard" in done.error["message"], code
    assert template.run("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_exit_ends_the_cell(template: Any) -> None:
    done = template.run("print(1)\nexit()\nprint(2)")
    assert (done.stdout, done.exit_code) == ("1\n", 0)
    assert template.run("exit").exit_code == 0
    assert template.run("quit(4)").exit_code == 4


def test_threads_are_waited_for_and_daemons_are_not(template: Any) -> None:
    code = (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('late')), daemon={}).start()\n"
        "print('main')"
    )
    assert template.run(code.format(False)).stdout == "main\nlate\n"
    assert template.run(code.format(True)).stdout == "main\n"


def test_what_a_cell_leaves_open_is_written(template: Any) -> None:
    job = template.park()
    job.run(
        "import gzip, atexit\nf = open('a.txt', 'w'); f.write('unflushed')\n"
        "g = gzip.open('b.gz', 'wt'); g.write('zipped')\n"
        "atexit.register(lambda: open('c.txt', 'w').write('exit'))\n"
        "class D:\n    def __del__(self): open('d.txt', 'w').write('del')\nd = D()"
    )
    cwd = job.folder / "cwd"
    assert (cwd / "a.txt").read_text() == "unflushed"
    import gzip

    assert gzip.decompress((cwd / "b.gz").read_bytes()) == b"zipped"
    assert (cwd / "c.txt").read_text() == "exit"
    assert (cwd / "d.txt").read_text() == "del"


def test_the_namespace_is_the_cells_own(template: Any) -> None:
    template.run("leak = 1; import json; json.leak = 1; import builtins; builtins.leak2 = 1")
    done = template.run(
        "import json\n"
        "print('leak' in globals(), hasattr(json, 'leak'), 'leak2' in dir(__builtins__))"
    )
    assert done.stdout == "False False False\n"
    names = template.run("print(sorted(n for n in dir() if not n.startswith('_')))").stdout
    assert names == "['exit', 'get_ipython', 'open', 'quit']\n"
