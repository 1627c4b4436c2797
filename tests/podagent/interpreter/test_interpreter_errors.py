"""Exceptions: how they are shown, what the notebook gets of them, and the job's exit."""

from __future__ import annotations

import os
import pickle
import re
import sys
import time
import types
import urllib.error
from typing import Any


def test_the_traceback_has_the_notebooks_lines_and_none_of_ours(template: Any) -> None:
    done = template.run("def f():\n    raise ValueError('no')\n\nf()", line_offset=3)
    assert done.error["class"] == "NonZeroExit"
    assert done.error["message"] == "ValueError: no"
    assert done.exit_code == 1
    text = done.traceback
    assert "Cell In[3], line 7" in text
    assert re.search(r"-+> 5 +raise ValueError\('no'\)", text)
    assert "firepool" not in text
    assert "interactiveshell" not in text
    assert done.error["traceback"] == done.of("error")[0]["traceback"]
    assert isinstance(done.exception(), ValueError)


def test_lines_are_right_below_magics_blank_lines_and_await(template: Any) -> None:
    assert "line 5" in template.run("\n\n1/0", line_offset=2).traceback
    assert "line 4" in template.run("%%time\n\n1/0", line_offset=1).traceback
    assert "line 4" in template.run("x = 1\nawait nothing", line_offset=2).traceback
    syntax = template.run("x = 1\nx = = 2", line_offset=2)
    assert "line 4" in syntax.traceback
    assert syntax.error["ename"] == "SyntaxError"
    assert "x = = 2" in syntax.traceback


CUSTOM = """
import threading
class ApiError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.lock = threading.Lock()
raise ApiError(404, detail="no such run")
"""


def test_an_exception_with_other_arguments_and_a_lock(template: Any) -> None:
    done = template.run(CUSTOM)
    assert done.error["ename"] == "ApiError"
    assert "404: no such run" in done.error["evalue"]
    assert "raise ApiError(404" in done.traceback
    error = done.exception()
    assert type(error).__name__ == "ApiError"
    assert str(error) == "404: no such run"
    assert error.code == 404  # type: ignore[union-attr]
    assert not hasattr(error, "lock")


def test_library_exceptions_with_odd_constructors(template: Any) -> None:
    done = template.run(
        "import urllib.error\nraise urllib.error.HTTPError('u', 500, 'boom', None, None)"
    )
    error = done.exception()
    assert done.error["ename"] == "HTTPError"
    assert "boom" in done.error["evalue"]
    assert error is None or (isinstance(error, urllib.error.HTTPError) and error.code == 500)
    for code in (
        "b'\\xff'.decode()",
        "open('/nonexistent')",
        "import subprocess; subprocess.run(['false'], check=True)",
        "import json; json.loads('{')",
        "import nosuchmodule",
        "{}['k']",
        "1 .nope",
    ):
        done = template.run(code)
        error = done.exception()
        assert error is not None, code
        assert type(error).__name__ == done.error["ename"]
        assert str(error) == done.error["evalue"]
    assert template.run("open('/nonexistent')").exception().errno == 2


def test_causes_are_shown_and_travel(template: Any) -> None:
    done = template.run("try: 1/0\nexcept ZeroDivisionError as e: raise KeyError('outer') from e")
    assert "division by zero" in done.traceback
    assert "outer" in done.traceback
    error = done.exception()
    assert isinstance(error, KeyError)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_an_exception_whose_text_raises(template: Any) -> None:
    done = template.run(
        "class Bad(Exception):\n    def __str__(self): raise RuntimeError('inner')\nraise Bad"
    )
    assert done.error["ename"] == "Bad"
    assert "RuntimeError" in done.error["evalue"]
    assert done.of("error")[0]["traceback"]


def test_groups_notes_and_recursion(template: Any) -> None:
    if sys.version_info >= (3, 11):
        done = template.run("raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])")
        assert "ValueError: a" in done.traceback
        assert "TypeError: b" in done.traceback
        noted = template.run("e = ValueError('x'); e.add_note('the note'); raise e")
        assert "the note" in noted.traceback
    done = template.run("def f(): return f()\nf()")
    assert done.error["ename"] == "RecursionError"


def test_classes_of_outcome(template: Any) -> None:
    assert template.run("raise MemoryError").error["class"] == "OOM"
    for code, exit_code in (
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('told why')", 1),
    ):
        done = template.run("print('before')\n" + code)
        assert done.exit_code == exit_code
        assert os.waitstatus_to_exitcode(done.status) == exit_code
        assert done.stdout == "before\n"
        assert done.stderr == ""
        assert bool(done.of("error")) == bool(exit_code)
    assert "told why" in template.run("raise SystemExit('told why')").error["evalue"]


def test_a_traceback_that_user_code_shows_is_text(template: Any) -> None:
    done = template.run("try: 1/0\nexcept Exception: get_ipython().showtraceback()\nprint('on')")
    assert done.exit_code == 0
    assert "ZeroDivisionError" in done.stderr
    assert not done.of("error")


def test_interrupt_stops_python_and_shell_commands(template: Any) -> None:
    for code in (
        "print('go')\nimport time\ntime.sleep(60)",
        "print('go')\nimport asyncio\nawait asyncio.sleep(60)",
        "print('go')\n!sleep 60",
        "print('go')\nwhile True: pass",
        "print('go')\nimport threading, time\n"
        "threading.Thread(target=time.sleep, args=(2,)).start()",
    ):
        job = template.park().start(code)
        job.wait_text("go")
        time.sleep(0.05)
        began = time.monotonic()
        job.interrupt()
        done = job.finish()
        assert time.monotonic() - began < 4, code
        assert done.error["class"] == "Interrupted", code
        assert done.error["ename"] == "KeyboardInterrupt"
        assert isinstance(done.exception(), KeyboardInterrupt)
        assert done.exit_code == 130


def test_swallowed_interrupts_are_the_codes_own_business(template: Any) -> None:
    job = template.park().start(
        "import time\ntry:\n    print('go'); time.sleep(60)\n"
        "except KeyboardInterrupt: print('ignored')\n"
        "print('went on')"
    )
    job.wait_text("go")
    job.interrupt()
    done = job.finish()
    assert done.exit_code == 0
    assert done.stdout == "go\nignored\nwent on\n"


def test_an_interrupt_during_the_start_is_not_lost(template: Any) -> None:
    for _ in range(5):
        job = template.park().start("import time\ntime.sleep(20)")
        job.interrupt()
        done = job.finish()
        assert done.error["class"] == "Interrupted"


def test_a_crash_leaves_what_was_printed(template: Any) -> None:
    done = template.run("print('start')\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.end is None
    assert done.stdout == "start\n"
    assert os.WTERMSIG(done.status) == 9
    segfault = template.run("print('start')\nimport ctypes\nctypes.string_at(0)")
    assert "Segmentation fault" in segfault.stderr
    assert segfault.stdout == "start\n"


def test_exceptions_of_notebook_classes_are_the_notebooks_own(
    template: Any, harness: Any, notebook: types.ModuleType
) -> None:
    exec(
        "class Mine(Exception):\n    def __init__(self, a, b): super().__init__(a)",
        notebook.__dict__,
    )
    done = template.run("raise Mine(1, 2)", inputs=[harness.namespace_input(Mine=notebook.Mine)])
    error = done.exception()
    assert type(error) is notebook.Mine
    assert pickle.loads(pickle.dumps(error.args)) == (1,)
