"""The surroundings of a job: environment, working directory, import path, threads, limits.

Everything a fresh process would have for itself and a fork inherits from its template is renewed
here, between the start frame and the first instruction of user code.
"""

from __future__ import annotations

import functools
import importlib.util
import locale
import os
import random
import resource
import signal
import sys
import tempfile
import time
from typing import Any

from firepool_podagent.interpreter import pickling, threadpools

_OOM_SCORE = 800
_INLINE_BACKEND = "module://matplotlib_inline.backend_inline"


def prepare_template() -> None:
    """Find out what holds for every job of this environment; runs in the template."""
    pickling.prepare()
    _can_plot_inline()
    threadpools.discover()
    importlib.invalidate_caches()  # imports importlib.metadata, which takes as long as a cell


def prepare_parked() -> None:
    """Do what does not depend on the attempt; runs before the job parks."""
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # An interrupt that comes with the start frame waits until the job can take it.
    signal.pthread_sigmask(signal.SIG_SETMASK, (signal.SIGINT,))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # When memory runs out it is the job that goes, never the agent.
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(str(_OOM_SCORE))
    except OSError:  # not permitted here; the agent's own watch of memory remains
        pass
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # no core files among the person's own
    random.seed()
    tempfile.tempdir = None
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        module = sys.modules["multiprocessing.process"]
        module.current_process()._config["authkey"] = module.AuthenticationString(os.urandom(32))


def enter(spec: dict[str, Any]) -> None:
    """Give this process the environment, working directory and import path of ``spec``."""
    set_environment({**spec["env"], **spec.get("protected_env", {})})
    os.chdir(spec.get("cwd") or spec["session_dir"])
    _set_import_path(spec)
    _let_children_see(spec["paths"])
    threadpools.restore()
    sys.argv = [""]


def set_environment(variables: dict[str, str]) -> None:
    """Make the environment exactly ``variables``, and tell the parts that read it early."""
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    time.tzset()
    try:
        locale.setlocale(locale.LC_CTYPE, "")
    except locale.Error:  # a locale that this machine does not have: text stays UTF-8
        locale.setlocale(locale.LC_CTYPE, "C")
    _set_plot_backend()


def _set_plot_backend() -> None:
    backend = os.environ.get("MPLBACKEND")
    if backend in (None, "", "inline", _INLINE_BACKEND):
        backend = _INLINE_BACKEND if _can_plot_inline() else "agg"
        os.environ["MPLBACKEND"] = backend
    if "matplotlib" in sys.modules:  # preloaded: it read the template's environment
        # Unchecked: the check looks through every installed distribution for backends, and a name
        # that is wrong is reported when the first figure is made.
        dict.__setitem__(sys.modules["matplotlib"].rcParams, "backend", backend)


@functools.cache
def _can_plot_inline() -> bool:
    return "IPython" in sys.modules and importlib.util.find_spec("matplotlib_inline") is not None


def import_path(spec: dict[str, Any]) -> list[str]:
    """Return ``sys.path`` of a job.

    Overlays come first, then the package, then what ``PYTHONPATH`` of the job names, then the
    interpreter's own. The working directory stands where IPython puts it: after the standard
    library and before the installed packages.
    """
    paths = spec["paths"]
    front = [*paths.get("overlays", ())]
    if paths.get("package"):
        front.append(paths["package"])
    front += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = [entry for entry in sys.path if entry not in ("", *front)]
    installed = (
        index
        for index, entry in enumerate(own)
        if os.path.basename(entry) in ("site-packages", "dist-packages")
    )
    own.insert(next(installed, len(own)), "")
    extra = (spec.get("environment") or {}).get("path") or ()
    return list(dict.fromkeys((*front, *own, *extra)))


def _let_children_see(paths: dict[str, Any]) -> None:
    """Let interpreters and scripts that the job starts find what the job itself finds."""
    overlays = [*paths.get("overlays", ())]
    front = overlays + ([paths["package"]] if paths.get("package") else [])
    _put_first("PYTHONPATH", front)
    _put_first("PATH", [os.path.join(folder, "bin") for folder in overlays])


def _put_first(variable: str, folders: list[str]) -> None:
    if folders:
        rest = os.environ.get(variable)
        os.environ[variable] = os.pathsep.join([*folders, rest] if rest else folders)


def add_overlay(path: str) -> None:
    """Put an overlay that was filled just now before everything else."""
    if path not in sys.path:
        sys.path.insert(0, path)
        _let_children_see({"overlays": [path]})
    importlib.invalidate_caches()


def _set_import_path(spec: dict[str, Any]) -> None:
    sys.path[:] = import_path(spec)
    importlib.invalidate_caches()
