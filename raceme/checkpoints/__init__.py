"""Checkpoints: the whole state of a run in files, so that it survives the end of its process."""

from raceme.checkpoints.files import DamagedError, read_tree, write_tree
from raceme.checkpoints.folder import CheckpointFolder
from raceme.checkpoints.keeper import Keeper, Restored, Schedule, restore
from raceme.checkpoints.stop import StopRequest

__all__ = [
    "CheckpointFolder",
    "DamagedError",
    "Keeper",
    "Restored",
    "Schedule",
    "StopRequest",
    "read_tree",
    "restore",
    "write_tree",
]
