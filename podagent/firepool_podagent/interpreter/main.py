"""Entry of the interpreter side: a script, run by the session's interpreter.

The session's environment need not have ``firepool_podagent`` installed (or has another version of
it), so the package is loaded from where this file lies, and this file's folder is taken off
``sys.path`` before anything else is imported: a job must not find our modules by accident.

Usage: ``python main.py`` (a template, control socket on fd 3), or
``python main.py --job CHANNEL_FD FRAME_FD`` (one job that could not use the template's process).
"""

from __future__ import annotations

import sys

if sys.path and __file__.startswith(sys.path[0] + "/"):  # absent under -P and PYTHONSAFEPATH
    del sys.path[0]

import importlib.util
import os

PACKAGE = "firepool_podagent"
CONTROL_FD = 3


def _load_package() -> None:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(root, "__init__.py"), submodule_search_locations=[root]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"{root} is not a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def _main(arguments: list[str]) -> None:
    _load_package()
    if arguments[:1] == ["--job"]:
        from firepool_podagent.interpreter import job

        job.run_fresh(int(arguments[1]), int(arguments[2]))
    # Libraries size their thread pools when they are imported, and a process with threads cannot be
    # forked. The job gets its own environment and the libraries are told their real numbers then.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    from firepool_podagent.interpreter import template

    template.serve(CONTROL_FD)


if __name__ == "__main__":
    _main(sys.argv[1:])
