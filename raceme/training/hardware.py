"""What a machine says about itself: processors, memory, torch."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from pathlib import Path

_MIB = 1024 * 1024
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_SHARE = Path("/sys/fs/cgroup/cpu.max")


def describe() -> dict[str, str | int]:
    """Return the number of processors, the memory in MiB, and torch's version.

    A container's share counts, where it has one.
    """
    return {
        "cpu-count": processors(),
        "memory-mib": _memory() // _MIB,
        "torch-version": _torch_version(),
    }


@cache
def _torch_version() -> str:
    """Look it up once: a thousand simulated clients ask, and a look-up takes milliseconds."""
    return metadata.version("torch")


def processors() -> int:
    """Return the number of cores that this process may keep busy, a container's if it is in one."""
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    else:
        there = os.cpu_count() or 1
    try:
        # "150000 100000": microseconds of computing in so many; "max" where there is no limit.
        quota, period = map(int, _CONTAINER_SHARE.read_text().split())
    except (OSError, ValueError):
        return there
    return max(1, min(there, quota // period)) if period else there


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
