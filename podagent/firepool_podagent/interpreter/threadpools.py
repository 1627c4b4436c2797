"""Thread counts of numerical libraries that were preloaded with one thread each.

They read ``OMP_NUM_THREADS`` and its kin when they are loaded, so changing the variable afterwards
does nothing: each is told through its own call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

_SETTERS = {
    "openblas": (
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"),
        (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ),
    ),
    "libgomp": (("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    "libomp": (("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    "libiomp": (("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    "libmkl_rt": (("MKL_NUM_THREADS", "OMP_NUM_THREADS"), ("MKL_Set_Num_Threads",)),
    "libblis": (("BLIS_NUM_THREADS", "OMP_NUM_THREADS"), ("bli_thread_set_num_threads",)),
}
_HANDLES: list[tuple[ctypes.CDLL, tuple[str, ...], str]] = []


def discover() -> None:
    """Find the loaded libraries; called before parking, since it reads the whole memory map."""
    _HANDLES.clear()
    for path in _mapped_libraries():
        name = os.path.basename(path)
        for key, (variables, functions) in _SETTERS.items():
            if key in name:
                library = ctypes.CDLL(path)
                function = next((each for each in functions if hasattr(library, each)), None)
                if function is not None:
                    _HANDLES.append((library, variables, function))
                break


def restore() -> None:
    """Give the libraries found by `discover` the number of threads of this job's environment."""
    for library, variables, function in _HANDLES:
        getattr(library, function)(_wanted(variables))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(_wanted(("OMP_NUM_THREADS", "MKL_NUM_THREADS")))


def _wanted(variables: tuple[str, ...]) -> int:
    for variable in variables:
        value = os.environ.get(variable, "").partition(",")[0]
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))


def _mapped_libraries() -> Iterator[str]:
    seen = set()
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            start = line.find(b"/")
            if start < 0 or b".so" not in line:
                continue
            path = os.fsdecode(line[start:].rstrip())
            if path not in seen:
                seen.add(path)
                yield path
