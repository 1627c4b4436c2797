"""Cells: text, values and errors in order."""

from __future__ import annotations

from typing import Any


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
