"""What travels with a cell: the names it reads, by value, and the person's own modules.

`capture` decides everything before anything is sent: what is missing, what cannot travel, what is
too large. It names the variable, its type, its size and the way that leads to the culprit.
"""

from __future__ import annotations

import base64
import builtins
import json
import linecache
import types
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CaptureError, MissingName, NotPicklable, ValueTooLarge
from .culprits import describe_type, exceeds, find_culprit, quick_size_bytes
from .names import CellNames, Use, analyse
from .pickling import LimitedBuffer, LimitExceeded, NotebookPickler, RefusedObject
from .project import Package, ProjectModules
from .transfer import Spool, Spooled, encode

__all__ = ["Capture", "Limits", "capture", "normalise"]

_MODULE_ATTRIBUTES = frozenset(
    [
        "__name__",
        "__doc__",
        "__package__",
        "__loader__",
        "__spec__",
        "__builtins__",
        "__builtin__",
        "__file__",
        "__annotations__",
        "__debug__",
        "__import__",
        "__build_class__",
        "__path__",
        "__session__",
    ]
)
# The pod takes an input of this name as the sources of functions and binds nothing.
_SOURCES = "__firepool_sources__"
_SOURCES_BYTES = 2**20
_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), tuple, frozenset, range)
# Methods of arrays and frames that share a name with a list's or a set's and return a new object.
_RETURN_NEW = frozenset({"add", "append", "remove", "discard", "partition_", "insert_"})
_ARRAY_LIBRARIES = frozenset({"numpy", "pandas", "torch", "polars", "pyarrow", "jax", "cupy"})


@dataclass(frozen=True)
class Limits:
    """How much travels, in bytes."""

    implicit_bytes: int = 16 * 2**20
    note_bytes: int = 4 * 2**20
    explicit_bytes: int = 2 * 2**30


@dataclass
class Capture:
    """What a cell takes along.

    Attributes
    ----------
    names
        Names that travel, explicit ones included.
    namespace
        One cloudpickle of a dict of the small ones; None when there are none.
    spooled
        Explicit values, encoded one by one.
    package
        The person's own modules.
    notes
        Lines a person should see.
    changed_only_there
        Names that the cell changes and does not bring back.
    bound
        Names that the cell binds.
    ends_with_value
        Whether the cell has a value: that of its last expression.
    imported
        Names that the cell binds by importing, with the statement that does.
    sources
        Source text of the functions that travel, by the name their tracebacks show.
    """

    names: list[str] = field(default_factory=list)
    namespace: bytes | None = None
    spooled: list[Spooled] = field(default_factory=list)
    package: Package | None = None
    notes: list[str] = field(default_factory=list)
    changed_only_there: list[str] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    ends_with_value: bool = False
    imported: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def inputs(self) -> list[dict[str, Any]]:
        """Describe everything but the package as inputs of a job."""
        described = [value.request_input() for value in self.spooled]
        if self.sources:
            data = base64.b64encode(json.dumps(self.sources).encode()).decode()
            described.insert(0, {"kind": "value", "name": _SOURCES, "format": "json", "data": data})
        namespace = self.namespace_input()
        return described if namespace is None else [namespace, *described]

    def namespace_input(self) -> dict[str, Any] | None:
        """Describe the small names as one input of a job."""
        if self.namespace is None:
            return None
        return {
            "kind": "namespace",
            "format": "cloudpickle",
            "names": [n for n in self.names if n not in {s.name for s in self.spooled}],
            "data": base64.b64encode(self.namespace).decode(),
        }


def normalise(names: Sequence[str]) -> list[str]:
    """Spell names as Python does (NFKC), once each.

    Raises
    ------
    CaptureError
        When one of them is no name at all.
    """
    result: list[str] = []
    for name in names:
        spelled = unicodedata.normalize("NFKC", name.strip())
        if not spelled.isidentifier():
            raise CaptureError(f"{name!r} is not the name of a variable")
        if spelled not in result:
            result.append(spelled)
    return result


def capture(
    source: str,
    namespace: dict[str, Any],
    *,
    hidden: Collection[str] = (),
    push: Sequence[str] = (),
    pull: Sequence[str] = (),
    implicit: bool = True,
    remote_names: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    project: ProjectModules | None = None,
    folder: str | None = None,
    spool: Spool | None = None,
    first_line: int = 1,
    label: Callable[[str], str] = str,
) -> Capture:
    """Collect what a cell takes along.

    Parameters
    ----------
    source
        The cell's code.
    namespace
        The notebook's namespace.
    hidden
        Names of the namespace that belong to the shell and never travel.
    push, pull
        Names asked for in and out.
    implicit
        Whether the names the cell reads travel by themselves.
    remote_names
        Names that only earlier remote cells defined, with how, and what to do about it.
    limits
        How much may travel.
    project
        Finds the person's own modules; None sends none.
    folder
        A folder whose contents go into the package too.
    spool
        Where large explicit values are written.
    first_line
        Line of the notebook's cell that the code starts on, for messages.
    label
        Names a file of code as tracebacks in the pod should show it.

    Raises
    ------
    MissingName
        When a name exists nowhere.
    NotPicklable
        When a value cannot travel.
    ValueTooLarge
        When a value is larger than its limit.
    """
    collector = _Collector(namespace, frozenset(hidden), limits or Limits(), first_line, label)
    result, found = collector.collect(
        source, normalise(push), normalise(pull), implicit, remote_names or {}, spool or Spool()
    )
    if project is not None:
        modules = collector.modules | found.imports
        if modules or folder is not None:
            result.package = project.package(modules, folder)
    return result


class _Collector:
    def __init__(
        self,
        namespace: dict[str, Any],
        hidden: frozenset[str],
        limits: Limits,
        first_line: int,
        label: Callable[[str], str],
    ) -> None:
        self._namespace = namespace
        self._hidden = hidden
        self._limits = limits
        self._first_line = first_line
        self._label = label
        self._files: dict[str, str] = {}
        self.modules: set[str] = set()
        self._uses: dict[str, Use] = {}

    def collect(
        self,
        source: str,
        push: list[str],
        pull: list[str],
        implicit: bool,
        remote_names: Mapping[str, str],
        spool: Spool,
    ) -> tuple[Capture, CellNames]:
        result = Capture()
        try:
            found = analyse(source)
        except (SyntaxError, ValueError, RecursionError):
            found = CellNames()  # the pod's own message for it is the right one
        result.bound = found.bound
        result.ends_with_value = found.ends_with_value
        result.imported = {n: s for n, s in found.imported.items() if n in found.bound}
        self._uses = found.reads
        for name in push:
            if name not in self._namespace:
                raise self._missing(name, f"-i {name}", remote_names)
        wanted = self._wanted(found, remote_names) if implicit else []
        explicit = {name: self._namespace[name] for name in push}
        small = {n: self._namespace[n] for n in wanted if n not in explicit}
        result.namespace, names = self._pickle_small(small, result.notes)
        result.names = [*names, *explicit]
        self._encode_explicit(explicit, result, spool)
        result.sources = _sources(self._files)
        travelling = set(result.names) - set(pull)
        result.changed_only_there = sorted(
            name
            for name in travelling & found.changed.keys()
            if self._really_changes(name, found.changed[name])
        )
        return result, found

    # -- which names --------------------------------------------------------------------------

    def _wanted(self, found: CellNames, remote_names: Mapping[str, str]) -> list[str]:
        names = []
        for name, use in found.reads.items():
            if name in self._hidden or name in _MODULE_ATTRIBUTES:
                continue
            if name in self._namespace:
                names.append(name)
            elif use.certain and not hasattr(builtins, name):
                raise self._missing(name, self._where(use), remote_names)
        return names

    def _missing(self, name: str, where: str, remote_names: Mapping[str, str]) -> MissingName:
        how = remote_names.get(name)
        if how is not None:
            return MissingName(f"{name!r} ({where}) {how}", name)
        return MissingName(f"name {name!r} is not defined ({where}); nothing was sent", name)

    def _where(self, use: Use) -> str:
        line = f"line {use.line + self._first_line - 1}"
        return f"{line}, in {'/'.join(use.scopes)}" if use.scopes else line

    def _really_changes(self, name: str, ways: set[str]) -> bool:
        value = self._namespace.get(name)
        if "binding" in ways:
            return not isinstance(value, types.ModuleType)
        if isinstance(value, (types.ModuleType, type, types.FunctionType, *_IMMUTABLE)):
            return False
        library = type(value).__module__.partition(".")[0]
        if library in _ARRAY_LIBRARIES:
            ways = ways - _RETURN_NEW
        if library != "torch":
            ways = {way for way in ways if not way.endswith("_")}
        return bool(ways)

    # -- pickling -----------------------------------------------------------------------------

    def _write(self, file: Any, value: object) -> None:
        pickler = NotebookPickler(file, self._namespace, self._hidden, self._label)
        pickler.dump(value)
        self.modules |= pickler.modules
        self._files |= pickler.files

    def _fails(self, value: object) -> bool:
        try:
            self._write(LimitedBuffer(self._limits.implicit_bytes, keep=False), value)
        except LimitExceeded:
            return False
        except Exception:  # noqa: BLE001 - reductions are user code and may raise anything
            return True
        return False

    def _pickle_small(
        self, values: dict[str, Any], notes: list[str]
    ) -> tuple[bytes | None, list[str]]:
        limit = self._limits.implicit_bytes
        while values:
            for name, value in values.items():
                size = quick_size_bytes(value)
                if size is not None and size > limit:
                    raise self._too_large(name, value, size)
            buffer = LimitedBuffer(limit)
            try:
                self._write(buffer, values)
            except LimitExceeded:
                raise self._largest(values) from None
            except Exception as error:  # noqa: BLE001 - reductions are user code
                dropped = self._blame(values, error)
                values = {n: v for n, v in values.items() if n != dropped}
                continue
            if buffer.size_bytes >= self._limits.note_bytes:
                notes.extend(self._size_notes(values))
            return buffer.value(), list(values)
        return None, []

    def _blame(self, values: dict[str, Any], error: Exception) -> str:
        """Name the variable that cannot travel; one that is only perhaps read is left here."""
        for name, value in values.items():
            if not self._fails(value):
                continue
            if not self._uses[name].certain:
                return name
            raise self._not_picklable(name, value, error) from None
        raise NotPicklable(f"these names cannot travel together: {error}") from None

    def _not_picklable(self, name: str, value: object, error: Exception | None) -> NotPicklable:
        path, culprit = find_culprit(value, self._fails, self._namespace)
        use = self._uses.get(name)
        reason = _reason(self._write, culprit, error)
        text = f"{name!r} ({describe_type(value)}) cannot travel"
        if path:
            text += f": {'/'.join([name, *path])} is a {describe_type(culprit)}"
        text += f": {reason}"
        if use is not None and use.scopes:
            text += f"; it is reached through {'/'.join(use.scopes)} ({self._line(use)})"
        elif use is not None:
            text += f" ({self._line(use)})"
        return NotPicklable(text)

    def _line(self, use: Use) -> str:
        return f"line {use.line + self._first_line - 1}"

    # -- sizes ----------------------------------------------------------------------------------

    def _too_large(self, name: str, value: object, size_bytes: int | None) -> ValueTooLarge:
        limit = self._limits.implicit_bytes
        size = f"{mebibytes(size_bytes)}" if size_bytes else f"more than {mebibytes(limit)}"
        return ValueTooLarge(
            f"{name!r} ({describe_type(value)}, {size}) is larger than the {mebibytes(limit)} "
            f"that travel unasked; send it with -i {name}, or load it in the cell"
        )

    def _largest(self, values: dict[str, Any]) -> ValueTooLarge:
        limit = self._limits.implicit_bytes
        sizes: list[tuple[int, str]] = []
        for name, value in values.items():
            if exceeds(self._write, value, limit):
                path, culprit = find_culprit(
                    value, lambda part: exceeds(self._write, part, limit), self._namespace
                )
                if path:
                    size = quick_size_bytes(culprit)
                    shown = mebibytes(size) if size else f"more than {mebibytes(limit)}"
                    return ValueTooLarge(
                        f"{name!r} ({describe_type(value)}) is larger than the "
                        f"{mebibytes(limit)} that travel unasked: {'/'.join([name, *path])} is "
                        f"a {describe_type(culprit)} of {shown}; send {name} with -i {name}, "
                        "or load it in the cell"
                    )
                return self._too_large(name, value, quick_size_bytes(value))
            counter = LimitedBuffer(limit, keep=False)
            self._write(counter, value)
            sizes.append((counter.size_bytes, name))
        sizes.sort(reverse=True)
        total = sum(size for size, _ in sizes)
        named = ", ".join(
            f"{name!r} ({describe_type(values[name])}, {mebibytes(size)})"
            for size, name in sizes[:3]
        )
        return ValueTooLarge(
            f"the names this cell reads are {mebibytes(total)} together, more than the "
            f"{mebibytes(limit)} that travel unasked; largest: {named}; send them with "
            f"-i {sizes[0][1]}"
        )

    def _size_notes(self, values: dict[str, Any]) -> list[str]:
        notes = []
        for name, value in values.items():
            counter = LimitedBuffer(self._limits.implicit_bytes, keep=False)
            self._write(counter, value)
            if counter.size_bytes >= self._limits.note_bytes:
                size = mebibytes(counter.size_bytes)
                notes.append(f"{name} ({describe_type(value)}, {size}) travels with this cell")
        return notes

    def _encode_explicit(self, values: dict[str, Any], result: Capture, spool: Spool) -> None:
        limit = self._limits.explicit_bytes
        for name, value in values.items():
            size = quick_size_bytes(value)
            try:
                if size is not None and size > limit:
                    raise LimitExceeded(limit)
                spooled = encode(name, value, limit_bytes=limit, spool=spool, pickle_to=self._write)
            except LimitExceeded:
                shown = mebibytes(size) if size else f"more than {mebibytes(limit)}"
                raise ValueTooLarge(
                    f"{name!r} ({describe_type(value)}, {shown}) is larger than the "
                    f"{mebibytes(limit)} that -i sends; write it to a file instead"
                ) from None
            except Exception as error:  # noqa: BLE001 - reductions are user code
                raise self._not_picklable(name, value, error) from None
            result.spooled.append(spooled)


def _sources(files: dict[str, str]) -> dict[str, str]:
    """Read the sources of functions that travel: the pod's tracebacks show their lines."""
    sources: dict[str, str] = {}
    room = _SOURCES_BYTES
    for path, shown in files.items():
        text = "".join(linecache.getlines(path))
        room -= len(text)
        if text and room >= 0:
            sources[shown] = text
    return sources


def _reason(write: Any, culprit: object, error: Exception | None) -> str:
    try:
        write(LimitedBuffer(2**62, keep=False), culprit)
    except RefusedObject as refused:
        return refused.reason
    except Exception as raised:  # noqa: BLE001 - reductions are user code
        error = raised
    return str(error) or type(error).__name__


def mebibytes(size_bytes: int | None) -> str:
    """Write a size for people."""
    if size_bytes is None:
        return "of unknown size"
    if size_bytes < 2**20:
        return f"{size_bytes / 1024:.1f} KiB"
    return f"{size_bytes / 2**20:.1f} MiB"
