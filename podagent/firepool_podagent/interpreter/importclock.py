"""How long a job's imports took, and which installed modules its own code asked for.

Python calls ``importlib._bootstrap._find_and_load`` for a module that is not loaded yet, and only
then; wrapping that one function costs nothing for imports that are already satisfied.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any

from firepool_podagent.interpreter import preload

bootstrap: Any = importlib._bootstrap

# Compiled under the file name of importlib's own frames: Python removes these from the tracebacks
# of failing imports, so the wrapper does not show there either.
_WRAPPER = """
def _find_and_load(name, import_):
    clock.enter(name)
    try:
        return original(name, import_)
    finally:
        clock.leave()
"""


class ImportClock:
    """Measures imports of the main thread between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._main = threading.get_ident()
        self._stack: list[str] = []
        self._asked: list[tuple[str, str | None]] = []
        self._began = 0.0
        self._original: Any = None

    def start(self) -> None:
        """Begin to measure."""
        self._original = bootstrap._find_and_load
        names: dict[str, Any] = {"clock": self, "original": self._original}
        exec(compile(_WRAPPER, "<frozen importlib._bootstrap>", "exec", dont_inherit=True), names)
        bootstrap._find_and_load = names["_find_and_load"]

    def stop(self) -> None:
        """Put the original function back."""
        if self._original is not None:
            bootstrap._find_and_load = self._original
            self._original = None

    def enter(self, name: str) -> None:
        """Note that the import of ``name`` begins."""
        if threading.get_ident() == self._main:
            if not self._stack:
                self._began = time.perf_counter()
            self._asked.append((name, self._stack[-1] if self._stack else None))
            self._stack.append(name)

    def leave(self) -> None:
        """Note that the innermost import ended."""
        if threading.get_ident() == self._main and self._stack:
            self._stack.pop()
            if not self._stack:
                self.seconds += time.perf_counter() - self._began

    def installed(self) -> list[str]:
        """Return the installed modules that the job's own code imported, in order.

        What they import in turn comes with them and is not listed; what project code imports is.
        """
        folders = preload.library_folders()

        def is_installed(name: str) -> bool:
            location = preload.origin(sys.modules.get(name))
            return location is not None and location.startswith(folders)

        names = [
            name
            for name, importer in self._asked
            if name in sys.modules
            and is_installed(name)
            and (importer is None or not is_installed(importer))
        ]
        return list(dict.fromkeys(names))
