"""The person's own modules, beside the notebook or installed as editable, as one package.

A module is the person's own when its file is neither the interpreter's nor in a site-packages
folder. Its whole top-level package travels, and so do the own modules that its source imports,
read from the disk as they are now: an edited file is used by the next cell without a reload.
The archive's bytes depend on nothing but names and contents, so the same code has the same digest
and is uploaded once.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CaptureError

__all__ = ["Package", "ProjectModules", "ProjectTooLarge"]

LIMIT_BYTES = 64 * 1024 * 1024
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}
)
_SKIPPED_SUFFIXES = (".pyc", ".pyo", ".ipynb")
_OWN_PACKAGES = frozenset({"firepool_nb", "firepool_broker", "firepool_podagent"})
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold: contents alone decide


class ProjectTooLarge(CaptureError):
    """A project package is larger than what is sent along with a cell."""


@dataclass(frozen=True)
class Package:
    """A zip archive of the person's own modules.

    Attributes
    ----------
    sha256
        Digest of the archive, in hexadecimal.
    data
        The archive.
    modules
        Top-level names in it.
    """

    sha256: str
    data: bytes
    modules: tuple[str, ...]


class _File(NamedTuple):
    name: str  # in the archive
    path: str
    size_bytes: int
    modified_ns: int


class ProjectModules:
    """Finds and packs the person's own modules; remembers archives and parsed imports."""

    def __init__(self) -> None:
        self._libraries = _library_folders()
        self._archives: dict[tuple[_File, ...], Package] = {}
        self._imports: dict[_File, frozenset[str]] = {}

    def package(self, modules: Iterable[str], folder: str | None = None) -> Package | None:
        """Pack the own ones among some modules, and what they import; None when there are none.

        Parameters
        ----------
        modules
            Absolute module names, dotted or not.
        folder
            A folder whose contents are put at the top of the package too.

        Raises
        ------
        ProjectTooLarge
            When their files are larger than 64 MiB together.
        """
        waiting = {name.partition(".")[0] for name in modules}
        done: set[str] = set()
        files: list[_File] = list(_walk(folder, "")) if folder is not None else []
        for file in files:
            if file.name.endswith(".py"):
                waiting |= self._imports_of(file)
        while waiting:
            name = waiting.pop()
            done.add(name)
            for file in self._files(name):
                files.append(file)
                if file.name.endswith(".py"):
                    waiting |= self._imports_of(file) - done
        if not files:
            return None
        return self._pack(tuple(sorted(set(files))))

    def is_own(self, name: str) -> bool:
        """Tell whether a top-level module is the person's own."""
        return bool(self._locations(name))

    # -- finding ----------------------------------------------------------------------------------

    def _locations(self, name: str) -> list[str]:
        """Files or folders of a top-level module of the person's own."""
        if name in _OWN_PACKAGES or name in sys.builtin_module_names or name == "__main__":
            return []
        if name in sys.stdlib_module_names:
            return []
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if spec is None:
            try:
                spec = importlib.util.find_spec(name)
            except (ImportError, ValueError, AttributeError):
                return []
        if spec is None:
            return []
        if spec.submodule_search_locations is not None:
            folders = [os.path.abspath(p) for p in spec.submodule_search_locations]
            return [p for p in folders if os.path.isdir(p) and not self._is_library(p)]
        origin = spec.origin
        if not origin or not origin.endswith(".py") or not os.path.isfile(origin):
            return []
        path = os.path.abspath(origin)
        return [] if self._is_library(path) else [path]

    def _is_library(self, path: str) -> bool:
        parts = path.split(os.sep)
        if "site-packages" in parts or "dist-packages" in parts:
            return True
        return any(path.startswith(folder) for folder in self._libraries)

    def _files(self, name: str) -> Iterable[_File]:
        for location in self._locations(name):
            if os.path.isdir(location):
                yield from _walk(location, name)
            else:
                yield _file(location, os.path.basename(location))

    def _imports_of(self, file: _File) -> frozenset[str]:
        known = self._imports.get(file)
        if known is None:
            known = self._imports[file] = frozenset(_top_level_imports(file.path))
        return known

    # -- packing ----------------------------------------------------------------------------------

    def _pack(self, files: tuple[_File, ...]) -> Package:
        known = self._archives.get(files)
        if known is not None:
            return known
        total = sum(file.size_bytes for file in files)
        if total > LIMIT_BYTES:
            largest = max(files, key=lambda file: file.size_bytes)
            raise ProjectTooLarge(
                f"your own modules are {total / 2**20:.0f} MiB together, more than the "
                f"{LIMIT_BYTES // 2**20} MiB that travel with a cell; the largest file is "
                f"{largest.path} ({largest.size_bytes / 2**20:.0f} MiB): keep data out of packages"
            )
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for file in files:
                entry = zipfile.ZipInfo(file.name, _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                with open(file.path, "rb") as source:
                    archive.writestr(entry, source.read())
        data = buffer.getvalue()
        modules = tuple(sorted({_top_level_name(file.name) for file in files}))
        package = Package(hashlib.sha256(data).hexdigest(), data, modules)
        if len(self._archives) >= 16:
            self._archives.clear()
        self._archives[files] = package
        return package


def _top_level_name(entry: str) -> str:
    return entry.partition("/")[0].removesuffix(".py")


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib") if k in paths}
    return tuple(os.path.abspath(folder) + os.sep for folder in folders)


def _file(path: str, name: str) -> _File:
    status = os.stat(path)
    return _File(name, path, status.st_size, status.st_mtime_ns)


def _walk(folder: str, prefix: str) -> Iterable[_File]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = entry.name
        inside = f"{prefix}/{name}" if prefix else name
        if name.startswith(".") or name in _SKIPPED_FOLDERS:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, inside)
        elif entry.is_file() and not name.endswith(_SKIPPED_SUFFIXES):
            yield _file(entry.path, inside)


def _top_level_imports(path: str) -> Iterable[str]:
    try:
        with open(path, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return  # Python itself will say so where the module is imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
