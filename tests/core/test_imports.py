"""The core does no I/O and reads no clock: it may import itself and pure modules only."""

import ast
import re
from pathlib import Path

import firepool_broker.core
import pytest

ROOT = Path(firepool_broker.core.__file__).parent
MODULES = sorted(ROOT.glob("**/*.py"))
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "heapq",
    "math",
    "msgspec",  # Struct alone: two dozen frozen dataclasses cost a broker's start 30 ms
    "random",
    "threading",
    "types",
    "typing",
}
# The tracker's guard, and the injected source of names; nothing else of these two modules.
ONLY = {"threading": {"Lock"}, "random": {"Random"}, "msgspec": {"Struct"}}


def imported(tree: ast.AST) -> list[tuple[str, set[str]]]:
    found: list[tuple[str, set[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.append((node.module or "", {alias.name for alias in node.names}))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_are_pure(path: Path) -> None:
    for module, names in imported(ast.parse(path.read_text())):
        if module.startswith("firepool_broker.core"):
            continue
        assert module in ALLOWED, f"{path.name} imports {module}"
        if module in ONLY:
            assert names <= ONLY[module], f"{path.name} takes {names} of {module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_reads_a_clock_or_opens_anything(path: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "eval", "exec", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


def test_every_state_is_on_the_page() -> None:
    from firepool_broker.core.jobs import JobState
    from firepool_broker.core.pods import PodState
    from firepool_broker.core.queue import Place
    from firepool_broker.core.sessions import SessionState

    page = (Path(__file__).parents[2] / "docs/concepts/states.md").read_text()
    listed = set(re.findall(r"^- \*\*`(\w+)`\*\*", page, re.MULTILINE))
    states = {state.name for kind in (JobState, PodState, SessionState, Place) for state in kind}
    assert listed == states
