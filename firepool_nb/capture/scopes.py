"""What the bodies of functions read and change of the names around them.

`functions_uses` resolves every name inside a function by Python's own scope rules (parameters,
assignments, ``global``, ``nonlocal``, class bodies that their methods do not see, comprehensions)
and returns those that reach the module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "GlobalUse",
    "assigned_names",
    "changed_by_call",
    "functions_uses",
    "mangle",
    "root_name",
]

# Methods that change the object they are called on, by the usual meaning of their names.
_CHANGING_METHODS = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "extendleft",
        "fill",
        "fit",
        "insert",
        "intersection_update",
        "itemset",
        "load_state_dict",
        "partial_fit",
        "partition",
        "pop",
        "popitem",
        "popleft",
        "put",
        "remove",
        "reverse",
        "rotate",
        "setdefault",
        "setfield",
        "shuffle",
        "sort",
        "symmetric_difference_update",
        "update",
    ]
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class GlobalUse:
    """One use of a module's name from inside a function.

    ``kind`` is ``read``, ``bind`` (through ``global``), ``change`` (in place), ``import`` (a
    module is imported) or ``dynamic`` (the code can read and bind what nobody can see); ``way`` is
    how something is changed.
    """

    kind: Literal["read", "bind", "change", "import", "dynamic"]
    name: str
    line: int
    scopes: tuple[str, ...]
    certain: bool = True
    way: str = ""


def mangle(name: str, class_name: str | None) -> str:
    """Spell a private name as the compiler does inside a class."""
    if class_name is None or not name.startswith("__") or name.endswith("__") or "." in name:
        return name
    stripped = class_name.lstrip("_")
    return f"_{stripped}{name}" if stripped else name


def assigned_names(target: ast.expr) -> Iterator[str]:
    """Names that an assignment target binds."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def functions_uses(node: _Function, name: str, scopes: tuple[str, ...] = ()) -> list[GlobalUse]:
    """List how a function's body uses the names of its module, nested functions included."""
    visitor = _Body(scopes)
    visitor.function(node, name)
    return visitor.uses


def changed_by_call(node: ast.Call) -> tuple[str, str] | None:
    """Name the variable that a method call changes in place, and the method that does it."""
    function = node.func
    if not isinstance(function, ast.Attribute):
        return None
    in_place = any(
        k.arg == "inplace" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in node.keywords
    )
    torch_style = function.attr.endswith("_") and not function.attr.startswith("_")
    if not (in_place or torch_style or function.attr in _CHANGING_METHODS):
        return None
    root = root_name(function.value)
    if root is None:
        return None
    return root.id, "inplace" if in_place else function.attr


def root_name(node: ast.expr) -> ast.Name | None:
    """Find the name at the root of ``name.part[0].part``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node if isinstance(node, ast.Name) else None


@dataclass
class _Scope:
    kind: Literal["function", "class", "comprehension"]
    local: set[str]
    declared_global: set[str]
    class_name: str | None = None


class _Bindings(ast.NodeVisitor):
    """Collects the names that a function or class body binds, without entering other scopes."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.declared_global: set[str] = set()
        self.declared_nonlocal: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)

    def visit_Global(self, node: ast.Global) -> None:
        self.declared_global.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.declared_nonlocal.update(node.names)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.bound.add(node.name)
        for expression in [*node.decorator_list, *node.args.defaults]:
            self.visit(expression)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self.bound.add(alias.asname or alias.name.partition(".")[0])

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.bound.add(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self.bound.add(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.bound.add(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.bound.add(node.rest)
        self.generic_visit(node)

    def visit_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        for inner in ast.walk(node):  # only a walrus leaves a comprehension
            if isinstance(inner, ast.NamedExpr):
                self.bound.add(inner.target.id)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815


class _Body(ast.NodeVisitor):
    def __init__(self, path: tuple[str, ...]) -> None:
        self.uses: list[GlobalUse] = []
        self._path = path
        self._scopes: list[_Scope] = []
        self._doubtful = 0
        if path:  # methods mangle private names with the class around them
            self._scopes.append(_Scope("class", set(), set(), path[-1]))

    # -- scopes -----------------------------------------------------------------------------------

    def function(self, node: _Function, name: str) -> None:
        """Enter a function whose defaults and decorators were visited outside."""
        bindings = _Bindings()
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        for statement in body:
            bindings.visit(statement)
        parameters = node.args
        every = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
        local = {a.arg for a in [*every, parameters.vararg, parameters.kwarg] if a is not None}
        local |= {p.name for p in getattr(node, "type_params", [])}
        local |= bindings.bound - bindings.declared_global - bindings.declared_nonlocal
        path, self._path = self._path, (*self._path, name)
        doubtful, self._doubtful = self._doubtful, 0
        if doubtful:
            self._doubtful = 1
        self._scopes.append(_Scope("function", local, bindings.declared_global))
        for statement in body:
            self.visit(statement)
        self._scopes.pop()
        self._path, self._doubtful = path, doubtful

    def _outside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]:
            self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._outside(node)
        self._store(node.name, node.lineno)
        self.function(node, node.name)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._outside(node)
        self.function(node, "<lambda>")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for expression in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
            self.visit(expression)
        self._store(node.name, node.lineno)
        bindings = _Bindings()
        for statement in node.body:
            bindings.visit(statement)
        path, self._path = self._path, (*self._path, node.name)
        local = bindings.bound - bindings.declared_global
        self._scopes.append(_Scope("class", local, bindings.declared_global, node.name))
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()
        self._path = path

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node.generators, [node.elt])

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node.generators, [node.key, node.value])

    def _comprehension(self, generators: list[ast.comprehension], results: list[ast.expr]) -> None:
        self.visit(generators[0].iter)
        targets = {n for g in generators for n in assigned_names(g.target)}
        self._scopes.append(_Scope("comprehension", targets, set()))
        for index, generator in enumerate(generators):
            if index:
                self.visit(generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for result in results:
            self.visit(result)
        self._scopes.pop()

    # -- names ------------------------------------------------------------------------------------

    def _spell(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if scope.class_name is not None:
                return mangle(name, scope.class_name)
        return name

    def _is_global(self, name: str, storing: bool) -> bool:
        innermost = True
        for scope in reversed(self._scopes):
            if scope.kind == "comprehension":
                if not storing and name in scope.local:
                    return False
                continue
            if name in scope.declared_global:
                return True
            if name in scope.local and (scope.kind == "function" or innermost):
                return False
            innermost = False
        return True

    def _use(
        self, kind: Literal["read", "bind", "change"], name: str, line: int, way: str = ""
    ) -> None:
        use = GlobalUse(kind, self._spell(name), line, self._path, not self._doubtful, way)
        self.uses.append(use)

    def _store(self, name: str, line: int) -> None:
        if self._is_global(name, storing=True):
            self._use("bind", name, line)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            if self._is_global(node.id, storing=False):
                self._use("read", node.id, node.lineno)
        elif not any(s.kind == "comprehension" and node.id in s.local for s in self._scopes):
            self._store(node.id, node.lineno)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.uses.append(GlobalUse("import", alias.name, node.lineno, self._path))
            self._store(alias.asname or alias.name.partition(".")[0], node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module and not node.level:
                for name in (node.module, f"{node.module}.{alias.name}"):
                    self.uses.append(GlobalUse("import", name, node.lineno, self._path))
            self._store(alias.asname or alias.name, node.lineno)

    # -- changes in place -----------------------------------------------------------------------

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and self._is_global(node.target.id, storing=True):
            self._use("read", node.target.id, node.lineno)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # annotations of local variables are not evaluated
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def _part_change(self, node: ast.Attribute | ast.Subscript) -> None:
        root = root_name(node)
        stored = root is not None and not isinstance(node.ctx, ast.Load)
        if root is not None and stored and self._is_global(root.id, storing=False):
            self._use("change", root.id, node.lineno, "part")
        self.generic_visit(node)

    visit_Attribute = visit_Subscript = _part_change  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        changed = changed_by_call(node)
        if changed is not None and self._is_global(changed[0], storing=False):
            self._use("change", changed[0], node.lineno, changed[1])
        if isinstance(node.func, ast.Name) and node.func.id == "exec":
            self.uses.append(GlobalUse("dynamic", "exec", node.lineno, self._path))
        self.generic_visit(node)

    # -- parts that need not run ------------------------------------------------------------------

    def _perhaps(self, *parts: list[ast.stmt] | list[ast.expr]) -> None:
        self._doubtful += 1
        for part in parts:
            for node in part:
                self.visit(node)
        self._doubtful -= 1

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._perhaps(node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._perhaps([node.body, node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._perhaps(node.values[1:])

    def visit_Try(self, node: ast.Try) -> None:
        self._perhaps(node.body)
        for handler in node.handlers:
            self._perhaps([handler.type] if handler.type else [], handler.body)
        self._perhaps(node.orelse)
        for statement in node.finalbody:
            self.visit(statement)

    visit_TryStar = visit_Try  # noqa: N815
