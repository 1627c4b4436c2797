"""Durations as people write them on command lines."""

from __future__ import annotations

import argparse
import re

__all__ = ["seconds"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Read a duration such as ``90``, ``10m`` or ``1.5h``; bare numbers are seconds.

    Raises
    ------
    argparse.ArgumentTypeError
        When the text is no duration above zero.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90, 10m or 1.5h")
    return float(match[1]) * _UNITS[match[2] or "s"]
