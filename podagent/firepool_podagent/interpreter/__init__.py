"""The interpreter side of an attempt: what runs under the session's own Python.

One *template* process per environment imports what jobs are likely to need and never runs user
code. It forks a *supervisor*, which forks the *job*: a pristine process that waits ("parked") on
its channel until the agent sends it an attempt. Nothing here is imported by the agent itself except
`template_command`; the code needs the standard library alone and uses IPython, numpy, cloudpickle
and the like only where the session's environment has them.

==============  ==================================================================================
``main``        the script that the agent starts; finds this package without touching ``sys.path``
``template``    the template's loop: preload, fork
``preload``     what may be preloaded, and what disqualifies a module
``job``         a job from its start frame to its end frame
``surroundings``  environment, working directory, import path, limits, threads of the job
``frames``      the channel between job and agent
``streams``     stdout and stderr, and the fences that order them against displays
``shell``       cells in IPython; ``plain`` the same without it
``inputs``, ``results``, ``errors``  values in, values out, exceptions
==============  ==================================================================================
"""

from __future__ import annotations

import os
from typing import Final

STARTUP_VARIABLES: Final = (
    "GLIBC_TUNABLES",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONDEVMODE",
    "PYTHONHASHSEED",
    "PYTHONMALLOC",
    "PYTHONNOUSERSITE",
    "PYTHONOPTIMIZE",
    "PYTHONUSERBASE",
    "PYTHONWARNINGS",
)
"""Variables that are read once, when a process starts.

A template started with the session's values of these serves its jobs; a job with other values
starts an interpreter of its own.
"""


def template_command(executable: str, package_directory: str | None = None) -> list[str]:
    """Return the command line of a template process; its control socket must be its fd 3.

    Parameters
    ----------
    executable
        The session's interpreter.
    package_directory
        Folder of ``firepool_podagent`` as the interpreter can read it; by default where this
        module lies. The agent names another one when it runs from an archive.
    """
    folder = package_directory or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [executable, "-X", "utf8", os.path.join(folder, "interpreter", "main.py")]
