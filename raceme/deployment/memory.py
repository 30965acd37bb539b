"""A limit to the memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path

from raceme.config.errors import UserError

_MIB = 1024 * 1024


def limit_memory(mebibytes: int) -> None:
    """Let allocations beyond a limit fail, in this process only.

    The limit counts the process's own data (heap, stacks, private writable mappings), not
    libraries and address space: torch reserves many times more address space than it uses, which
    is why ``RLIMIT_AS`` would be useless. A task that needs more fails with an error reply, and
    the device goes on.

    Parameters
    ----------
    mebibytes : int
        The limit in MiB.

    Raises
    ------
    UserError
        This process needs more already.
    """
    used = data_memory() // _MIB
    if mebibytes <= used:
        raise UserError(
            f"A memory limit of {mebibytes} MiB is too low: the device itself needs {used} MiB "
            "before any training."
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes * _MIB, hard))


def data_memory() -> int:
    """Return the bytes of this process's own data, which the limit counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise UserError("A memory limit needs Linux: this system does not state the memory in use.")
