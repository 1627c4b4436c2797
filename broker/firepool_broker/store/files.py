"""File errors as the store's own: full, unavailable, with the path and the fix."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from firepool_broker.store.errors import StoreFull, StoreUnavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise ``StoreFull`` or ``StoreUnavailable`` instead of an ``OSError``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"no space left for {path}: free some, then try again ({error.strerror})"
            ) from error
        raise StoreUnavailable(f"{path} cannot be used: {error.strerror}") from error
