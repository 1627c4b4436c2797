"""The Jupyter server part: Jupyter's users reach the broker at ``<base URL>firepool/``.

Installing the package enables it. It forwards to the machine's own broker (or to the remote one
that ``FIREPOOL_URL`` names) under Jupyter's authentication and authorization, and starts the
machine's own broker when asked.
"""

from __future__ import annotations

from typing import Any

__all__ = ["_jupyter_server_extension_points"]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Tell Jupyter server what to load."""
    from firepool_nb.server.extension import FirepoolServer

    return [{"module": "firepool_nb.server", "app": FirepoolServer}]
