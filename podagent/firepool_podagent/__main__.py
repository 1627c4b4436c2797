"""Entry of the pod agent: ``python -I -S <folder or zipapp> --config-fd 3``.

Reads its configuration from an inherited descriptor (the key stands in no argument, environment or
file), opens its socket, and starts in the strongest isolation that works. Exits with status 0 when
the agent serves.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _find_package() -> Path:
    """Make ``firepool_podagent`` importable however this file was started."""
    here = Path(os.path.abspath(__file__)).parent
    if __package__:
        return here
    # Started as a folder, Python puts the folder itself first: our modules would be top-level ones.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != str(here)]
    sys.path.insert(0, str(here.parent))
    return here


def _readable_package(here: Path, directory: Path) -> Path:
    """Folder of the package that other interpreters can read, also when this runs from a zipapp."""
    if (here / "supervisor.py").is_file():
        return here
    import zipfile

    archive = next(parent for parent in here.parents if parent.is_file())
    target = directory / "code"
    with zipfile.ZipFile(archive) as packed:
        for name in packed.namelist():
            if name.startswith("firepool_podagent/"):
                packed.extract(name, target)
    return target / "firepool_podagent"


def main(arguments: list[str]) -> None:
    """Start the agent.

    Parameters
    ----------
    arguments : list of str
        ``--config-fd N``.
    """
    if len(arguments) != 2 or arguments[0] != "--config-fd":
        sys.exit("usage: firepool_podagent --config-fd N")
    # asyncio takes TLS along when it can be imported; the agent has no use for it.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    here = _find_package()
    with open(int(arguments[1]), "rb") as file:
        config: dict[str, Any] = json.loads(file.read())
    directory = Path(config["directory"])
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chdir("/")

    from firepool_podagent import agent, isolation

    package = _readable_package(here, directory)
    listening = agent.listen(config)
    always = [str(directory), str(package.parent), sys.prefix, sys.base_prefix, *sys.path]
    always += [os.path.dirname(sys.executable), os.path.realpath(sys.executable)]
    facts = {key: config.get(key) for key in ("uid", "name", "revision", "listen")}
    isolation.start(
        config.get("isolation") or "auto",
        directory,
        [path for path in always if path],
        facts,
        lambda mode, view, ready: agent.serve(config, listening, package, mode, view, ready),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
