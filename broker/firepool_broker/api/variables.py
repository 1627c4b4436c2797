"""Which environment variables a job may set, and which belong to the loader, the GPU or us.

Two uses, one list: a submit that names a protected variable is refused; a session's captured
environment simply goes without them, since the person did not choose them for the job.
"""

from __future__ import annotations

from collections.abc import Mapping

_PROTECTED_PREFIXES = (
    "LD_",
    "DYLD_",
    "CUDA_DEVICE_",
    "FIREPOOL_",
    "PET_",
    "TORCHELASTIC_",
    "NVIDIA_DRIVER_",
)
_PROTECTED = frozenset(
    {
        # what Python reads before the first instruction of the job
        "PYTHONBREAKPOINT",
        "PYTHONCASEOK",
        "PYTHONEXECUTABLE",
        "PYTHONHOME",
        "PYTHONINSPECT",
        "PYTHONPATH",
        "PYTHONPLATLIBDIR",
        "PYTHONPYCACHEPREFIX",
        "PYTHONSTARTUP",
        "PYTHONUSERBASE",
        "PYTHONWARNINGS",
        "PYTHON_FROZEN_MODULES",
        # which devices a container sees
        "NVIDIA_VISIBLE_DEVICES",
        # rank and rendezvous, set for each attempt
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "RANK",
        "RAY_ADDRESS",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)


def is_protected(name: str) -> bool:
    """Tell whether only the broker and the agent set this variable."""
    return name in _PROTECTED or name.startswith(_PROTECTED_PREFIXES)


def strip_protected(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a captured environment without what could affect loader, agent or GPU limits."""
    return {name: value for name, value in variables.items() if not is_protected(name)}


def fault(name: str, value: str) -> str | None:
    """Return why a variable cannot be set, ``None`` when it can."""
    if not name:
        return "a variable needs a name"
    if "=" in name or "\0" in name:
        return f"variable {name!r} cannot have '=' or NUL in its name"
    if "\0" in value:
        return f"variable {name!r} cannot have NUL in its value"
    if is_protected(name):
        return f"variable {name!r} is set by Firepool-nb and cannot be changed; leave it out"
    return None
