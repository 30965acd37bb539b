"""The data file that belongs to one device, which its owner may replace at any time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DATA_FILE = "data-file"

Stamp = tuple[int, int, int]
"""What tells one state of a file from another: time of change in ns, size in bytes, number."""


def stamp_of(node: Mapping[str, object]) -> Stamp | None:
    """Return the present state of a device's own data file.

    Parameters
    ----------
    node : Mapping
        The node config; its ``data-file`` may hold ``{client}`` for its ``partition-id``.

    Returns
    -------
    Stamp or None
        None if the device has no file of its own, or it is not there just now.
    """
    name = node.get(DATA_FILE)
    if not isinstance(name, str):
        return None
    path = Path(name.replace("{client}", str(node.get("partition-id", 0))))
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
