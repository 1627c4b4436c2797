"""Which names a cell reads, binds and changes."""

from __future__ import annotations

import builtins
import sys

import pytest

from firepool_nb.capture.names import CellNames, analyse


def reads(source: str) -> set[str]:
    return {name for name in analyse(source).reads if not hasattr(builtins, name)}


def certain(source: str) -> set[str]:
    found = analyse(source).reads.values()
    return {use.name for use in found if use.certain and not hasattr(builtins, use.name)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x + 1", {"x"}),
        ("x = 1\nx + 1", set()),
        ("x = x + 1", {"x"}),
        ("x += 1", {"x"}),
        ("x: int = y", {"y"}),
        ("(y := x) + y", {"x"}),
        ("del x", {"x"}),
        ("x = 1\ndel x\nx", {"x"}),
        ("a, *b = c\nb", {"c"}),
        ("import numpy as np\nnp.zeros(n)", {"n"}),
        ("import os.path\nos.sep", set()),
        ("from m import f as g\ng(v)", {"v"}),
        ("for i in xs:\n    i\ni", {"xs", "i"}),
        ("while go:\n    last = 1", {"go"}),
        ("with open(p) as f:\n    f.read()", {"p"}),
        ("try:\n    a\nexcept E as e:\n    e\nfinally:\n    b", {"a", "E", "b"}),
        ("match v:\n  case {'k': x, **rest}:\n    x, rest\n  case P(y):\n    y", {"v", "P"}),
        ("match v:\n  case 1 | 2:\n    pass\n  case const.X:\n    pass", {"v", "const"}),
        ("global g\ng = h", {"h"}),
        # strings that are code when they run
        ('f"{fill:{width}.{digits}f}"', {"fill", "width", "digits"}),
        ("f'{a!r:>{b}}' f'{c}'", {"a", "b", "c"}),
        ("eval('hidden')", set()),
        # scopes
        ("[v * k for v in vals if v > low]", {"k", "vals", "low"}),
        ("{k: v for k, v in pairs}", {"pairs"}),
        ("[x for row in rows for x in row]", {"rows"}),
        ("[y for x in xs if (y := f(x))]\ny", {"xs", "f"}),
        ("x = 1\n[x for _ in range(3)]", set()),
        ("(lambda a, b=d: a + b + c)(1)", {"c", "d"}),
        ("sorted(xs, key=lambda r: r[col])", {"xs", "col"}),
        ("def f(a, *b, c=d, **e):\n    return a, b, c, e, g\nf()", {"d", "g"}),
        ("def f():\n  x = 1\n  def g():\n    nonlocal x\n    x = y\n  g()\nf()", {"y"}),
        ("def f():\n    global n\n    n += 1\nf()", {"n"}),
        ("def f():\n    return f\nf()", set()),
        ("@deco(arg)\ndef f():\n    return inner", {"deco", "arg", "inner"}),
        ("def f(a: T) -> R: pass", {"T", "R"}),
        ("from __future__ import annotations\ndef f(a: T): pass", {"T"}),
        ("def f():\n    v: T = w\nf()", {"w"}),
        ("class C(Base, metaclass=M):\n  x = x0\n  y = x\n  def m(self): return self.y, z\nC()",
         {"Base", "M", "x0", "z"}),
        ("class C:\n    x = 1\n    def m(self):\n        return x\nC().m()", {"x"}),
        ("class C:\n    x = x", {"x"}),
        ("class C:\n    def m(self):\n        return __private\nC()", {"_C__private"}),
        ("async def f():\n    async for i in source:\n        await i\nawait f()", {"source"}),
        ("[await c for c in cs]", {"cs"}),
        # functions run when they are called
        ("def f():\n    return x\nx = 1\nf()", set()),
        ("def f():\n    return x\nf()\nx = 1", {"x"}),
        ("f = lambda: x\nx = 1\nf()", set()),
        ("def f():\n    return g()\ndef g():\n    return x\nx = 1\nf()", set()),
        # IPython
        ("!echo {name} $other", {"name", "other"}),
        ("out = !ls {folder}\nout", {"folder"}),
        ("%time y = f(x)\ny", {"f", "x"}),
        ("%timeit -n 10 -r 2 f(x)", {"f", "x"}),
        ("%%time\ny = g(x)", {"g", "x"}),
        ("%%capture out\nprint(x)\n", {"x"}),
        ("%%bash\necho $HOME\n", set()),
        ("value?", set()),
        ("%matplotlib inline\nplot(x)", {"plot", "x"}),
    ],
)  # fmt: skip
def test_reads(source: str, expected: set[str]) -> None:
    assert reads(source) == expected


def test_names_are_spelled_as_python_spells_them() -> None:
    assert reads("ﬁ + 1") == {"fi"}
    assert analyse("ﬁ = 1").bound == {"fi"}


@pytest.mark.parametrize(
    "source",
    [
        "if flag():\n    x",
        "flag() and x",
        "x if flag() else 0",
        "try:\n    x\nexcept NameError:\n    pass",
        "try:\n    x\nexcept Exception:\n    pass",
        "from m import *\nx",
        "exec(code())\nx",
        "%run script.py\nx",
        "def never_called():\n    return x",
        "if flag():\n    x = 1\nx",
        "try:\n    x = f()\nexcept OSError:\n    pass\nx",
        "for _ in range(3):\n    x = 1\nx",
        "!echo {x}",
        "def f():\n    if late():\n        return x\nf()",
    ],
)
def test_a_read_that_need_not_happen_is_not_certain(source: str) -> None:
    assert "x" not in certain(source)


@pytest.mark.parametrize(
    "source",
    [
        "x",
        "for i in range(3):\n    x",
        "def f():\n    return x\nf()",
        "[x for _ in range(2)]",
        "(lambda: x)()",
        "if __name__ == '__main__':\n    x",
        "class C:\n    y = x",
        "with open('f') as f:\n    x",
        "%time x",
        "try:\n    x\nexcept OSError:\n    pass",
    ],
)
def test_a_read_that_happens_is_certain(source: str) -> None:
    assert "x" in certain(source)


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("x = 1\nif c:\n    x2 = 2", {"x", "x2"}),
        ("if c:\n    v = 1\nelse:\n    v = 2\nv", {"v"}),
        ("import a.b as c, d.e", {"c", "d"}),
        ("%%time\nt = 1", {"t"}),
        ("%%capture text\npass\n", {"text"}),
        ("def f(): pass\nclass C: pass", {"f", "C"}),
        ("[i for i in range(3)]", set()),
    ],
)
def test_bound(source: str, bound: set[str]) -> None:
    assert analyse(source).bound == bound


@pytest.mark.parametrize(
    ("source", "name", "way"),
    [
        ("df = df.dropna()", "df", "binding"),
        ("df += 1", "df", "binding"),
        ("df['a'] = 1", "df", "part"),
        ("df.loc[0, 'a'] = 1", "df", "part"),
        ("obj.attr.items[0] = 1", "obj", "part"),
        ("del d['k']", "d", "part"),
        ("a, d['k'] = 1, 2", "d", "part"),
        ("xs.append(1)", "xs", "append"),
        ("xs.inner.extend(y)", "xs", "extend"),
        ("df.drop(columns='a', inplace=True)", "df", "inplace"),
        ("t.add_(1)", "t", "add_"),
        ("def f():\n    xs.append(1)\nf()", "xs", "append"),
        ("def f():\n    global n\n    n = 2\nf()", "n", "binding"),
        ("for x in xs: pass", "x", "binding"),
    ],
)
def test_changes(source: str, name: str, way: str) -> None:
    assert way in analyse(source).changed[name]


@pytest.mark.parametrize(
    "source",
    ["xs = []\nxs.append(1)", "def f(xs):\n    xs.append(1)\nf(ys)", "xs.index(1)", "print(xs)"],
)
def test_no_changes(source: str) -> None:
    changed = analyse(source).changed
    assert "xs" not in changed or changed["xs"] == {"binding"}


def test_scopes_say_where_a_name_is_read() -> None:
    found = analyse("def f():\n    def g(): return guard\n    return g\nf()")
    use = found.reads["guard"]
    assert (use.line, use.scopes) == (2, ("f", "g"))


def test_imports_are_listed_wherever_they_stand() -> None:
    found = analyse(
        "import a.b\nfrom c import d\ndef f():\n    import e\n    from g.h import i\nf()"
    )
    assert {"a.b", "c", "c.d", "e", "g.h", "g.h.i"} <= found.imports


def test_what_nobody_can_see_is_said() -> None:
    assert analyse("exec('x = 1')").dynamic
    assert analyse("from m import *").dynamic
    assert not analyse("x = 1").dynamic


def test_broken_cells_raise_what_python_raises() -> None:
    with pytest.raises(SyntaxError):
        analyse("x = = 1")


if sys.version_info >= (3, 12):

    def test_type_parameters_belong_to_their_function() -> None:
        assert reads("def f[T](x: T) -> T:\n    return x\nf(y)") == {"y"}


def test_every_construct_of_the_grammar_is_walked() -> None:
    source = "x = [*a, *b]\nd = {**c, 'k': e}\nf(*g, **h)\ni[j:k:l]\nassert m, n\nraise o from p\n"
    assert reads(source) == set("abcefghijklmnop")


def test_an_empty_cell_reads_nothing() -> None:
    assert analyse("\n# nothing\n") == CellNames()
