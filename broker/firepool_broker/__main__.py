"""``python -m firepool_broker serve``: the broker as a process.

Options: ``--embedded`` (this user's own broker on this machine), ``--config FILE``,
``--detach`` (leave the starter at once), ``--ready-fd N`` (say there when it is ready).
"""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> int:
    """Run the broker until it ends; returns its exit status."""
    if "--detach" in arguments:
        # before anything is imported: the starter waits for this process, and its parent must
        # not be left with a dead child when the broker ends
        arguments.remove("--detach")
        if os.fork() > 0:
            os._exit(0)
    from firepool_broker.serve import main as serve

    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
