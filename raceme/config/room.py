"""Memory: whether there is enough of it, found out before it is taken."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from raceme.config.errors import UserError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def check_room(wanted: int, what: str) -> None:
    """Find out whether something fits into the memory that is free.

    Parameters
    ----------
    wanted : int
        How many bytes it takes.
    what : str
        What takes them, as the beginning of a sentence.

    Raises
    ------
    UserError
        It does not.
    """
    free = free_bytes()
    if wanted > free:
        raise UserError(f"{what} would take {shown(wanted)} of memory, and {shown(free)} are free.")


def free_bytes() -> int:
    """Return how much memory this process may still take, as far as the system tells."""
    sizes = [*_of_machine(), *_of_limits()]
    return min(sizes, default=1 << 62)


def shown(size: int) -> str:
    """Return a number of bytes as a person reads it."""
    value = float(min(size, 10**30))
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} {_UNITS[-1]}"


def _of_machine() -> list[int]:
    """Return what the machine, and the container that this may be in, have left."""
    sizes = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                sizes.append(int(line.split()[1]) << 10)
    except (OSError, ValueError, IndexError):
        # Of macOS, all that there is: better than no bound.
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        if limit != "max":
            sizes.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass
    return sizes


def _of_limits() -> list[int]:
    """Return what limits of this process (`ulimit`, `--memory-limit`) leave."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return []
    size = os.sysconf("SC_PAGE_SIZE")
    sizes = []
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            sizes.append(max(0, limit - int(used) * size))
    return sizes
