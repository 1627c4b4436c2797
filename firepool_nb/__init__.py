"""Firepool-nb: notebook cells on warm pods.

``%load_ext firepool_nb`` gives a notebook ``%%firepool`` and ``%firepool``; programs use `Session`
and `Job`. Everything is loaded at its first use, so that importing the package costs next to
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .errors import FirepoolError, Interrupted, RemoteError
    from .job import Job
    from .session import Session

__all__ = [
    "AsyncClient",
    "Client",
    "FirepoolError",
    "Interrupted",
    "Job",
    "RemoteError",
    "Session",
    "__version__",
    "load_ipython_extension",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "client",
    "Client": "client",
    "FirepoolError": "errors",
    "Interrupted": "errors",
    "Job": "job",
    "RemoteError": "errors",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and begin to warm up; ``%load_ext firepool_nb`` calls this."""
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the kernel's session; ``%unload_ext firepool_nb`` calls this."""
    from .magics import unload

    unload(shell)
