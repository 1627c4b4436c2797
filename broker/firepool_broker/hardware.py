"""What this machine has: cores, memory and cards, for pools that nobody configured."""

from __future__ import annotations

import os
from collections import Counter

__all__ = ["cores", "gpus", "memory_gib"]

_GIB = 1024**3
_CARDS = "/proc/driver/nvidia/gpus"


def cores() -> float:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return float(len(os.sched_getaffinity(0)))
    return float(os.cpu_count() or 1)


def memory_gib() -> float:
    """Return the memory of the machine or of the container it is seen from, in GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        limit = "max"
    if limit.isdigit():
        total = min(total, int(limit))
    return total / _GIB


def gpus() -> dict[str, int]:
    """Count the cards by model, as the driver names them."""
    found: Counter[str] = Counter()
    try:
        cards = os.listdir(_CARDS)
    except OSError:
        return {}
    for card in cards:
        try:
            with open(f"{_CARDS}/{card}/information", encoding="utf-8") as file:
                fields = dict(line.partition(":")[::2] for line in file)
        except OSError:
            continue
        model = fields.get("Model", "").strip().removeprefix("NVIDIA ")
        found[model or "GPU"] += 1
    return dict(found)
