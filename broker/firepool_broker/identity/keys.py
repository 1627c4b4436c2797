"""The broker's own secret, from which the keys of its pods are derived.

It lies beside the database, readable by its owner only, and is as old as the first start: a pod
keeps its key for as long as it lives, over any number of brokers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from firepool_broker.durable import write_durably

__all__ = ["PodKeys", "load_secret"]

_BYTES = 32


def load_secret(path: str) -> bytes:
    """Read the secret, making it the first time.

    Raises
    ------
    OSError
        When it cannot be read or made.
    ValueError
        When the file holds something else.
    """
    try:
        with open(path, "rb") as file:
            found = file.read()
    except FileNotFoundError:
        made = secrets.token_bytes(_BYTES)
        write_durably(path, made)
        return made
    if len(found) != _BYTES:
        raise ValueError(
            f"{path} does not hold the broker's secret ({len(found)} bytes, not {_BYTES}): no pod"
            " can be reached with it; `firepool stop` ends the pods, then remove the file"
        )
    return found


class PodKeys:
    """Derives the key of each pod.

    Parameters
    ----------
    secret
        The broker's secret.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __call__(self, uid: str) -> bytes:
        """Return the key of the pod with this uid, 32 bytes."""
        return hmac.digest(self._secret, uid.encode(), hashlib.sha256)
