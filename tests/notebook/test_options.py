"""The options of ``%%firepool``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError

from firepool_nb.magics.options import parse


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {}),
        ("--sku h200", {"sku": "h200"}),
        ("--gpu h200:2 --cpu 8 --memory 64",
         {"shape": {"gpu": "h200:2", "cpu": 8.0, "memory_gib": 64.0}}),
        ("--with 'polars>=1' --with requests", {"requirements": ["polars>=1", "requests"]}),
        ("--env A=1 --env 'B=x y' --env C=", {"env": {"A": "1", "B": "x y", "C": ""}}),
        ("--timeout 10m", {"timeout_seconds": 600.0}),
        ("--timeout 90", {"timeout_seconds": 90.0}),
        ("--timeout 1.5h", {"timeout_seconds": 5400.0}),
        ("--max-retries 2 --queue q --priority 5 --single-use",
         {"max_retries": 2, "queue": "q", "priority": 5, "single_use": True}),
        ("--live", {"live": True}),
        ("--pods 2 --launcher torchrun --image sha256:1 --secret A --secret B",
         {"pods": 2, "launcher": "torchrun", "image": "sha256:1", "secrets": ["A", "B"]}),
    ],
)  # fmt: skip
def test_fields_of_the_request(line: str, fields: dict[str, Any]) -> None:
    assert parse(line).fields == fields


def test_names_and_switches() -> None:
    found = parse("-i a,b --push c -o x, --pull y,z -a --job later -q --no-capture")
    assert (found.push, found.pull) == (["a", "b", "c"], ["x", "y", "z"])
    assert (found.block, found.job_name, found.quiet, found.capture) == (
        False,
        "later",
        True,
        False,
    )
    assert not parse("--noblock").block
    assert not parse("--no-block").block


def test_the_default_sku_gives_way() -> None:
    assert parse("", "h200").fields == {"sku": "h200"}
    assert parse("--sku cpu", "h200").fields == {"sku": "cpu"}
    assert parse("--cpu 2", "h200").fields == {"shape": {"cpu": 2.0}}


def test_requirements_files(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("polars>=1  # fast\n\n# only a comment\nrequests\n--index-url https://x/#y\n")
    found = parse(f"-r {path} --with numpy")
    assert found.fields["requirements"] == [
        "polars>=1", "requests", "--index-url https://x/#y", "numpy",
    ]  # fmt: skip


def test_a_variable_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP_TEST_VALUE", "from here")
    assert parse("--env FP_TEST_VALUE").fields["env"] == {"FP_TEST_VALUE": "from here"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--skuu x", "unknown option --skuu; did you mean --sku?"),
        ("--timeot 3", "did you mean --timeout?"),
        ("--xyzzy", "known:"),
        ("--sku", "expected one argument"),
        ("print(1)", "unexpected word"),
        ("--timeout soon", "not a duration"),
        ("--timeout 0", "not a duration"),
        ("--timeout -5", "--timeout"),
        ("--max-retries many", "--max-retries"),
        ("--launcher mpi", "invalid choice"),
        ("--sku a --cpu 2", "not both"),
        ("-r /nowhere/requirements.txt", "/nowhere/requirements.txt"),
        ("--env FP_NO_SUCH_VARIABLE", "no such variable"),
        ("--package /nowhere", "is no folder"),
        ("--job a-b", "not the name of a variable"),
        ("--with 'open", "No closing quotation"),
        ("--sk h200", "unknown option --sk"),
    ],
)
def test_wrong_options_are_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert words in str(caught.value)
    assert str(caught.value).startswith("%%firepool:")
