"""Checkpoints: the whole state of a run in files, so that it survives the end of its process."""

from raceme.checkpoints.files import DamagedError, read_tree, write_tree
from raceme.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from raceme.checkpoints.keeper import Keeper, Restored, Schedule, can_resume, restore, resumed
from raceme.checkpoints.orphan import end_with_parent
from raceme.checkpoints.stop import StopRequest, interrupted_by_signals
from raceme.checkpoints.writer import only_writer

__all__ = [
    "CHECKPOINTS",
    "CheckpointFolder",
    "DamagedError",
    "Keeper",
    "Restored",
    "Schedule",
    "StopRequest",
    "can_resume",
    "end_with_parent",
    "interrupted_by_signals",
    "only_writer",
    "read_tree",
    "restore",
    "resumed",
    "write_tree",
]
