"""What a template may import ahead of its jobs.

Only installed packages (below the interpreter's own library folders), never project code: a job
must see its project as it is on disk when it starts. A module that cannot be imported is dropped
and the reason remembered. A module that leaves behind what a fork would copy into every job - a
thread, an open device, project code - or that takes more memory or time than allowed, taints the
template: it cannot be unloaded, so the template ends and a new one starts without it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import site
import sys
import sysconfig
import time
from types import FrameType
from typing import Any

from firepool_podagent.interpreter import process

SECONDS = 10.0
"""How long one preload request may take."""
MEMORY_MIB = 1024
"""How much resident memory a template may have."""


class TaintedError(Exception):
    """A module made this process unfit to be forked."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module}: {reason}")
        self.module = module
        self.reason = reason


class _TooSlowError(BaseException):
    """Raised by the alarm inside an import; not an `Exception`, so that no import swallows it."""


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Return the folders of installed packages and of the standard library, with a final slash."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    # A virtual environment's standard library lies below the base installation.
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folders.update(
        os.path.join(prefix, folder, version)
        for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
        for folder in ("lib", "lib64")
    )
    folders.update(entry for entry in sys.path if entry.endswith(("dist-packages", "lib-dynload")))
    return tuple({os.path.join(path, "") for path in folders if path})


def origin(module: object) -> str | None:
    """Return the file or folder that a module was loaded from, None for built-in ones."""
    spec = getattr(module, "__spec__", None)
    location = getattr(spec, "origin", None)
    if location and location not in ("built-in", "frozen", "namespace"):
        return str(location)
    try:
        return str(next(iter(getattr(module, "__path__", ()))))
    except (StopIteration, TypeError):
        return None


class Preloader:
    """Imports modules and knows what came of it."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.dropped: dict[str, str] = {}
        self._folders = library_folders()

    def report(self) -> dict[str, Any]:
        """Return what the agent is told: modules in place, and modules left out with reasons."""
        return {"preloaded": list(self.loaded), "dropped": dict(self.dropped)}

    def load(self, modules: list[str], *, seconds: float, memory_mib: int) -> None:
        """Import ``modules`` in order.

        Raises
        ------
        TaintedError
            The process must not be forked any more.
        """
        deadline = time.monotonic() + seconds
        for name in modules:
            if name in self.loaded or name in self.dropped:
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self.dropped[name] = f"no time left within {seconds:g} s"
            elif not self._is_installed(name):
                self.dropped[name] = "not an installed package"
            else:
                self._import(name, remaining, memory_mib)

    def _is_installed(self, name: str) -> bool:
        top = name.partition(".")[0]
        module = sys.modules.get(top)
        if module is not None:
            location = origin(module)
            return location is None or location.startswith(self._folders)
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return False
        if spec is None:
            return False
        if spec.origin in ("built-in", "frozen"):
            return True
        locations = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return bool(locations) and all(location.startswith(self._folders) for location in locations)

    def _import(self, name: str, seconds: float, memory_mib: int) -> None:
        before = set(sys.modules)
        previous = signal.signal(signal.SIGALRM, _alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            importlib.import_module(name)
        except _TooSlowError:
            raise TaintedError(name, f"importing it takes more than {seconds:.0f} s") from None
        except BaseException as error:  # noqa: BLE001 - an import may raise anything, SystemExit too
            self.dropped[name] = f"{type(error).__name__}: {error}"[:200]
        else:
            self.loaded.append(name)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        self._verify(name, before, memory_mib)

    def _verify(self, name: str, before: set[str], memory_mib: int) -> None:
        if process.thread_count() != 1:
            raise TaintedError(name, "importing it starts a thread")
        if devices := process.device_files():
            raise TaintedError(name, f"importing it opens {', '.join(sorted(devices))}")
        if (resident := process.resident_mib()) > memory_mib:
            raise TaintedError(name, f"with it the template has {resident} of {memory_mib} MiB")
        for added in set(sys.modules) - before:
            location = origin(sys.modules[added])
            if location is None or not os.path.isabs(location):
                continue
            if not location.startswith(self._folders):
                raise TaintedError(name, f"importing it loads project code: {location}")


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TooSlowError
