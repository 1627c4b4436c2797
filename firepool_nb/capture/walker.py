"""Follows the statements of a cell in the order in which they run.

It keeps the names bound so far, on every path (*bound*) or on some (*maybe*), and records
what is read before it is bound; see `names` for the contract.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .found import CellNames, Use
from .magictext import (
    CODE_CELL_MAGICS,
    CODE_LINE_MAGICS,
    HARMLESS_MAGICS,
    code_in,
    expanded_names,
    magic_call,
)
from .scopes import (
    GlobalUse,
    assigned_names,
    changed_by_call,
    functions_uses,
    mangle,
    root_name,
)

__all__ = ["walk"]

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_DYNAMIC_CALLS = frozenset({"exec", "execfile", "globals", "vars", "locals", "setattr"})


def walk(tree: ast.Module) -> CellNames:
    """Follow a whole cell and return what it reads, binds and changes."""
    walker = _Walker()
    walker.cell(tree)
    return walker.found


class _Frame:
    """The names bound so far in the module or in one class body."""

    def __init__(self, scopes: tuple[str, ...] = (), parent: _Frame | None = None) -> None:
        self.bound: set[str] = set()
        self.maybe: set[str] = set()
        self.scopes = scopes
        self.parent = parent

    @property
    def class_name(self) -> str | None:
        return self.scopes[-1] if self.scopes else None


class _Walker(ast.NodeVisitor):
    """Follows the statements of a cell in the order in which they run."""

    def __init__(self) -> None:
        self.found = CellNames()
        self._module = _Frame()
        self._frame = self._module
        self._hidden: list[set[str]] = []  # targets of the comprehensions around an expression
        self._pending: dict[str, list[GlobalUse]] = {}
        self._doubtful = 0
        self._opaque = False
        self._late_annotations = sys.version_info >= (3, 14)
        self._line_shift = 0
        self._class_uses: list[GlobalUse] = []

    # -- the cell as a whole ------------------------------------------------------------------

    def cell(self, tree: ast.Module) -> None:
        self._statements(tree.body)
        self.found.ends_with_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        for name in list(self._pending):
            with self._doubt():  # never called here; perhaps brought back and called later
                self._release(name)

    def _statements(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    @contextmanager
    def _doubt(self) -> Iterator[None]:
        self._doubtful += 1
        try:
            yield
        finally:
            self._doubtful -= 1

    # -- names ----------------------------------------------------------------------------------

    def _read(self, name: str, line: int, scopes: tuple[str, ...] = (), sure: bool = True) -> None:
        if self._frame is not self._module and name in self._frame.bound:
            return
        if name in self._pending:
            self._release(name)
        if name in self._module.bound:
            return
        certain = sure and not (
            self._doubtful
            or self._opaque
            or name in self._module.maybe
            or name in self._frame.maybe
        )
        known = self.found.reads.get(name)
        if known is None or (certain and not known.certain):
            line = line + self._line_shift
            self.found.reads[name] = Use(name, line, scopes or self._frame.scopes, certain)

    def _bind(self, name: str, line: int) -> None:
        frame = self._frame
        name = mangle(name, frame.class_name)
        frame.bound.add(name)
        if frame is self._module:
            self._pending.pop(name, None)
            self.found.bound.add(name)
            self._change(name, "binding")

    def _change(self, name: str, way: str) -> None:
        self.found.changed.setdefault(name, set()).add(way)

    def _release(self, name: str) -> None:
        """Count what the bodies of a function or class read: it is used for the first time."""
        uses = self._pending.pop(name, [])
        frame, self._frame = self._frame, self._module
        try:
            for use in uses:
                self._apply(use)
        finally:
            self._frame = frame

    def _apply(self, use: GlobalUse) -> None:
        if use.kind == "read":
            self._read(use.name, use.line, use.scopes, use.certain)
        elif use.kind == "change":
            self._change(use.name, use.way)
        elif use.kind == "dynamic":
            self._mark_dynamic()
        elif use.kind == "import":
            self.found.imports.add(use.name)
        else:  # "bind": by `global name`
            self.found.bound.add(use.name)
            self._change(use.name, "binding")
            if use.name not in self._module.bound:
                self._module.maybe.add(use.name)

    def _mark_dynamic(self) -> None:
        self.found.dynamic = True
        self._opaque = True

    def visit_Name(self, node: ast.Name) -> None:
        if any(node.id in targets for targets in self._hidden):
            return
        name = mangle(node.id, self._frame.class_name)
        if isinstance(node.ctx, ast.Load):
            self._read(name, node.lineno)
            return
        if isinstance(node.ctx, ast.Del):
            self._read(name, node.lineno)
            if self._frame is self._module:
                self._change(name, "binding")
            self._frame.bound.discard(name)
            self._frame.maybe.add(name)
            return
        self._bind(node.id, node.lineno)

    # -- statements whose order of evaluation is not that of their fields ---------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if (
            len(node.targets) == 1
            and isinstance(target, ast.Name)
            and isinstance(node.value, ast.Lambda)
            and self._frame is self._module
        ):
            # a named lambda is a function: its body runs when it is called
            self._arguments(node.value.args, annotations=False)
            uses = functions_uses(node.value, target.id)
            self._bind(target.id, node.lineno)
            self._defer(target.id, uses)
            return
        self.visit(node.value)
        for target in node.targets:
            self._target(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(mangle(node.target.id, self._frame.class_name), node.lineno)
        self.visit(node.value)
        self._target(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if not self._late_annotations:
            self.visit(node.annotation)
        else:
            with self._doubt():
                self.visit(node.annotation)
        if node.value is not None or not isinstance(node.target, ast.Name):
            self._target(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        hidden, self._hidden = self._hidden, []  # a walrus binds outside the comprehension
        self.visit(node.target)
        self._hidden = hidden

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._target(target)

    def _target(self, target: ast.expr) -> None:
        """Visit what is stored into or deleted; a store into a part changes the whole."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._target(element)
        elif isinstance(target, ast.Starred):
            self._target(target.value)
        else:
            self._note_part_change(target)
            self.visit(target)

    def _note_part_change(self, target: ast.expr) -> None:
        root = root_name(target)
        if root is None or root is target or self._frame is not self._module:
            return
        if root.id not in self._module.bound:
            self._change(root.id, "part")

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        before = set(self._frame.bound)
        self._target(node.target)
        self._statements(node.body)
        self._forget_since(before)
        with self._doubt():
            self._statements(node.orelse)
        self._forget_since(before)

    visit_AsyncFor = visit_For  # noqa: N815 - the name that NodeVisitor looks up

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        before = set(self._frame.bound)
        self._statements(node.body)
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        if not forever:
            self._forget_since(before)
        with self._doubt():
            self._statements(node.orelse)

    def _forget_since(self, before: set[str]) -> None:
        """Names bound since then are bound only perhaps."""
        frame = self._frame
        frame.maybe |= frame.bound - before
        frame.bound = before & frame.bound

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        if _is_main_guard(node.test):
            self._statements(node.body)
            return
        self._branches([node.body, node.orelse])

    def _branches(self, bodies: list[list[ast.stmt]]) -> None:
        """One of several bodies runs: bound afterwards is what each of them binds."""
        frame = self._frame
        before, ends = set(frame.bound), []
        for body in bodies:
            frame.bound = set(before)
            with self._doubt():
                self._statements(body)
            if not _leaves(body):
                ends.append(frame.bound)
        common = set.intersection(*ends) if ends else before
        frame.maybe |= set().union(*ends) - common
        frame.bound = common

    def visit_Try(self, node: ast.Try) -> None:
        frame = self._frame
        before = set(frame.bound)
        if any(_catches_name_error(handler) for handler in node.handlers):
            with self._doubt():
                self._statements(node.body)
        else:
            self._statements(node.body)
        self._statements(node.orelse)
        ends = [] if _leaves(node.body) else [set(frame.bound)]
        reached = set(frame.bound)
        for handler in node.handlers:
            frame.bound = set(before)
            frame.maybe |= reached - before
            with self._doubt():
                if handler.type is not None:
                    self.visit(handler.type)
                if handler.name:
                    self._bind(handler.name, handler.lineno)
                self._statements(handler.body)
            if handler.name:
                frame.bound.discard(handler.name)
            if not _leaves(handler.body):
                ends.append(set(frame.bound))
        common = set.intersection(*ends) if ends else before
        frame.maybe |= set().union(*ends, reached) - common
        frame.bound = common
        self._statements(node.finalbody)

    visit_TryStar = visit_Try  # noqa: N815

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        frame = self._frame
        before, ends, complete = set(frame.bound), [], False
        for case in node.cases:
            frame.bound = set(before)
            with self._doubt():
                self.visit(case.pattern)
                if case.guard is not None:
                    self.visit(case.guard)
                self._statements(case.body)
            if not _leaves(case.body):
                ends.append(frame.bound)
            if case.guard is None and isinstance(case.pattern, ast.MatchAs):
                complete = complete or case.pattern.pattern is None
        if not complete:
            ends.append(before)
        common = set.intersection(*ends) if ends else before
        frame.maybe |= set().union(*ends) - common
        frame.bound = common

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._bind(node.name, node.lineno)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name is not None:
            self._bind(node.name, node.lineno)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._bind(node.rest, node.lineno)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._target(item.optional_vars)
        self._statements(node.body)

    visit_AsyncWith = visit_With  # noqa: N815

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        with self._doubt():
            self.visit(node.body)
            self.visit(node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        with self._doubt():
            for value in node.values[1:]:
                self.visit(value)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.found.imports.add(alias.name)
            name = alias.asname or alias.name.partition(".")[0]
            self.found.imported[name] = ast.unparse(ast.Import([alias]))
            self._bind(name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "__future__":
            self._late_annotations |= any(a.name == "annotations" for a in node.names)
        if node.module and not node.level:
            self.found.imports.add(node.module)
        for alias in node.names:
            if alias.name == "*":
                self._mark_dynamic()
                continue
            if node.module and not node.level:
                self.found.imports.add(f"{node.module}.{alias.name}")
            name = alias.asname or alias.name
            statement = ast.ImportFrom(node.module, [alias], node.level)
            self.found.imported[name] = ast.unparse(statement)
            self._bind(name, node.lineno)

    def visit_TypeAlias(self, node: ast.AST) -> None:
        name = node.name  # type: ignore[attr-defined]  # new in Python 3.12
        self._bind(name.id, name.lineno)  # its value is evaluated lazily

    # -- functions, classes, comprehensions -----------------------------------------------------

    def visit_FunctionDef(self, node: _FunctionNode) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._arguments(node.args, annotations=True)
        if node.returns is not None:
            self._annotation(node.returns)
        uses = functions_uses(node, node.name, self._frame.scopes)
        if self._frame is not self._module:
            self._class_uses.extend(uses)
            self._bind(node.name, node.lineno)
            return
        self._bind(node.name, node.lineno)
        self._defer(node.name, uses)
        if node.decorator_list:
            self._release(node.name)  # a decorator may call it at once

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._arguments(node.args, annotations=False)
        for use in functions_uses(node, "<lambda>", self._frame.scopes):
            if not any(use.name in targets for targets in self._hidden):
                self._apply(use)

    def _defer(self, name: str, uses: list[GlobalUse]) -> None:
        self._pending[name] = uses

    def _arguments(self, arguments: ast.arguments, annotations: bool) -> None:
        for default in [*arguments.defaults, *(d for d in arguments.kw_defaults if d)]:
            self.visit(default)
        if annotations:
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            for argument in [*every, arguments.vararg, arguments.kwarg]:
                if argument is not None and argument.annotation is not None:
                    self._annotation(argument.annotation)

    def _annotation(self, annotation: ast.expr) -> None:
        if self._late_annotations:
            with self._doubt():
                self.visit(annotation)
        else:
            self.visit(annotation)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for expression in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
            self.visit(expression)
        outer, outer_uses = self._frame, self._class_uses
        self._frame, self._class_uses = _Frame((*outer.scopes, node.name), outer), []
        self._statements(node.body)
        uses, self._class_uses = self._class_uses, outer_uses
        self._frame = outer
        self._bind(node.name, node.lineno)
        if outer is not self._module:
            self._class_uses.extend(uses)
            return
        self._defer(node.name, uses)
        if node.decorator_list:
            self._release(node.name)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node.generators, [node.elt])

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node.generators, [node.key, node.value])

    def _comprehension(self, generators: list[ast.comprehension], results: list[ast.expr]) -> None:
        self.visit(generators[0].iter)
        targets = {n for g in generators for n in assigned_names(g.target)}
        self._hidden.append(targets)
        for index, generator in enumerate(generators):
            if index:
                self.visit(generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for result in results:
            self.visit(result)
        self._hidden.pop()

    # -- calls: changes in place, dynamic code, magics --------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        magic = magic_call(node)
        if magic is not None:
            self._magic(*magic)
            return
        self.generic_visit(node)
        function = node.func
        if (
            isinstance(function, ast.Name)
            and function.id in _DYNAMIC_CALLS
            and (function.id == "exec" or not node.args)
        ):
            self._mark_dynamic()
        changed = changed_by_call(node)
        if changed is not None and self._frame is self._module:
            name, way = changed
            if name not in self._module.bound:
                self._change(name, way)

    def _magic(self, method: str, arguments: list[str], line: int) -> None:
        if method in ("system", "getoutput", "getoutput_split"):
            self._shell_text(arguments[0], line)
            return
        name, text = arguments[0], arguments[1] if len(arguments) > 1 else ""
        if method == "run_cell_magic":
            body = arguments[2] if len(arguments) > 2 else ""
            self._shell_text(text, line)
            if name == "capture" and text.split() and not text.split()[-1].startswith("-"):
                self._bind(text.split()[-1], line)
            if name in CODE_CELL_MAGICS:
                if name == "timeit":
                    self._embedded(text, line)
                self._embedded(body, line + 1)
            elif name not in HARMLESS_MAGICS:
                self._mark_dynamic()
            return
        if name in CODE_LINE_MAGICS:
            self._embedded(text, line)
            return
        self._shell_text(text, line)
        if name not in HARMLESS_MAGICS:
            self._opaque = True

    def _embedded(self, text: str, line: int) -> None:
        """Follow the code in the text of a magic."""
        tree = code_in(text)
        if tree is None:
            return
        shift, self._line_shift = self._line_shift, self._line_shift + line - 1
        self._statements(tree.body)
        self._line_shift = shift

    def _shell_text(self, text: str, line: int) -> None:
        with self._doubt():
            for name in expanded_names(text):
                self._read(name, line)


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
    )


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break))


def _catches_name_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        isinstance(node, ast.Name) and node.id in ("NameError", "Exception", "BaseException")
        for node in named
    )
