"""What the magics say about themselves, and how wrong code and wrong options are shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels import ANSI, Kernel, Ran

from firepool_nb.magics import help as magic_help
from firepool_nb.magics import lines, options


def page(ran: Ran) -> str:
    (payload,) = ran.reply["payload"]
    return ANSI.sub("", payload["data"]["text/plain"])


@pytest.mark.parametrize(
    "cell",
    ["%%firepool --help", "%%firepool -h\n", "%%firepool --sku cpu -h", "%%firepool --help\n1/0"],
)
def test_a_cell_asks_for_help(kernel: Kernel, cell: str) -> None:
    text = kernel.ok(cell).stdout
    for option in options.described():
        assert option.usage.split()[0].strip(",") in text


@pytest.mark.parametrize("line", ["%firepool --help", "%firepool help", "%firepool -h"])
def test_the_line_magic_lists_its_commands(kernel: Kernel, line: str) -> None:
    text = kernel.ok(line).stdout
    for usage, _ in lines.described():
        assert f"%firepool {usage}" in text


@pytest.mark.parametrize("question", ["%%firepool?", "%firepool?"])
def test_a_question_mark_shows_options_and_commands(kernel: Kernel, question: str) -> None:
    text = page(kernel.ok(question))
    assert "--single-use" in text
    assert "%firepool release" in text


def test_every_option_and_command_has_a_text() -> None:
    assert all(option.text not in ("", "None") for option in options.described())
    assert all(text for _, text in lines.described())
    refused = {option.usage.split()[0] for option in options.described() if not option.available}
    assert refused == {"--live", "--pods", "--launcher", "--image", "--secret"}
    assert all(len(line) <= 80 for line in magic_help.docstring().splitlines())


@pytest.mark.parametrize(
    ("options_", "message"),
    [
        ("-o a b", "-o a,b"),
        ("-o a, b, c --sku cpu", "-o a,b,c"),
        ("--push a b", "--push a,b"),
        ("-o a 1+1", "unexpected word '1+1'"),
        ("print(1)", "the code goes below this line"),
    ],
)
def test_names_with_blanks_between_them(kernel: Kernel, options_: str, message: str) -> None:
    assert message in kernel.run(f"%%firepool {options_}\na = 1").stderr


# -- code that is no Python --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "line", "message"),
    [
        ("%%firepool\nx = 1\nif x\n    y", 3, "SyntaxError: expected ':'"),
        ("\n\n%%firepool\nfor i in x:\nprint(i)", 5, "IndentationError: expected an indented"),
        ("%%firepool\nreturn 3", 2, "SyntaxError: 'return' outside function"),
        ("%%firepool\n%time\nx = = 1", 3, "SyntaxError: invalid syntax"),
    ],
)
def test_what_is_no_python_is_shown_as_ipython_shows_it(
    kernel: Kernel, jobs: Callable[[], Any], cell: str, line: int, message: str
) -> None:
    kernel.remote("1")
    before = len(jobs())
    ran = kernel.run(cell)
    number = ran.reply["execution_count"]
    shown = ran.traceback.strip().splitlines()
    assert re.sub(r"\(.*", "", shown[0]).strip() == f"Cell In[{number}], line {line}"
    assert message in shown[-1]
    assert "firepool" not in ran.traceback
    assert ran.error["ename"] == message.partition(":")[0]
    assert len(jobs()) == before


def test_a_syntax_error_that_remote_code_raises_shows_its_own_frames(kernel: Kernel) -> None:
    ran = kernel.run("%%firepool\nexec('if x')")
    assert "exec('if x')" in ran.traceback
    assert "firepool_nb" not in ran.traceback
    local = kernel.run("exec('if x')")  # one of the notebook's own is left to IPython
    assert "exec('if x')" in local.traceback


def test_code_that_python_compiles_is_sent(kernel: Kernel) -> None:
    ran = kernel.remote("import asyncio\nawait asyncio.sleep(0)\nprint('\\d')\n!echo shell\n%pwd")
    assert "shell" in ran.stdout


# -- messages ----------------------------------------------------------------------------------


def test_a_module_of_an_earlier_cell_is_to_be_imported_again(kernel: Kernel) -> None:
    kernel.remote("import json as js\nfrom math import tau as circle\nhere = 1")
    assert "add `import json as js` to this cell" in kernel.run("%%firepool\njs.dumps(1)").traceback
    text = kernel.run("%%firepool\ncircle").traceback
    assert "add `from math import tau as circle` to this cell" in text
    assert "bring it back there with -o here" in kernel.run("%%firepool\nhere").traceback


def test_a_name_that_did_not_come_back(kernel: Kernel) -> None:
    ran = kernel.remote("a = 1", "-o nothere")
    assert "nothere did not come back (the cell did not define 'nothere'); " in ran.texts[-1]
    assert ran.texts[-1].endswith("there is no nothere in this notebook")
    kernel.ok("older = 1")
    ran = kernel.remote("a = 1", "-o older")
    assert ran.texts[-1].endswith("the value that older had in this notebook stays")
    assert kernel.ok("older").texts == ["1"]


def test_gpus_that_are_not_there(kernel: Kernel) -> None:
    for wish in ("--gpu 1", "--gpu h200:2", "--sku gpu"):
        text = kernel.run(f"%%firepool {wish}\n1").traceback
        assert "this machine has no GPU pool; pools: cpu-small, cpu" in text


def test_remote_mode_names_its_pool(kernel: Kernel) -> None:
    try:
        assert kernel.ok("%firepool on").stdout.startswith("unmarked cells run on cpu-small until")
        assert "run on cpu until" in kernel.ok("%firepool on --sku cpu").stdout
        assert "no pool is called 'x'" in kernel.run("%firepool on --sku x").stderr
    finally:
        kernel.ok("%firepool off")


def test_the_default_pool_is_named_once_for_a_kernel(shared_folder: Path) -> None:
    kernel = Kernel(shared_folder).load()
    try:
        first, second = kernel.remote("1"), kernel.remote("2")
        assert sum("the default" in text for text in first.texts) == 1
        assert second.texts == ["2"]
    finally:
        kernel.shut_down()


def test_status_of_a_released_pod_says_nothing_of_a_hold(kernel: Kernel) -> None:
    kernel.remote("1")
    assert "held for 10 min" in kernel.ok("%firepool status").stdout
    kernel.ok("%firepool release")
    assert "held for" not in kernel.ok("%firepool status").stdout


def test_a_figure_of_the_notebook_is_a_picture(kernel: Kernel) -> None:
    kernel.ok("from matplotlib.figure import Figure\nf = Figure()\nf.subplots().plot([1, 2])")
    ran = kernel.remote("f")
    assert "image/png" in ran.outputs[-1]["data"]
