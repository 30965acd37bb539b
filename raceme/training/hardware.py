"""What a machine says about itself: processors, memory, torch."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from pathlib import Path

_MIB = 1024 * 1024
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def describe() -> dict[str, str | int]:
    """Return the number of processors, the memory in MiB, and torch's version.

    A container's share counts, where it has one.
    """
    return {
        "cpu-count": _processors(),
        "memory-mib": _memory() // _MIB,
        "torch-version": _torch_version(),
    }


@cache
def _torch_version() -> str:
    """Look it up once: a thousand simulated clients ask, and a look-up takes milliseconds."""
    return metadata.version("torch")


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        # "max" where there is no limit.
        return min(physical, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        return physical


def resident_memory(process_id: int | str = "self") -> int:
    """Return the bytes of memory that a process of this machine occupies (Linux)."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
