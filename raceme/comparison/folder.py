"""The folder of a comparison: only what is its own is written over, and one process works in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raceme.checkpoints import only_writer
from raceme.config.errors import UserError
from raceme.records.folder import foreign, make_folder

RESULTS = "compare.json"
"""The first of its tables to be written: where it is, the folder is a comparison's."""
_RUNS = ("seed-", "validation-")
"""Beginnings of the names of runs' folders."""
_ORPHAN_SECONDS = 30.0
"""A run whose comparison was killed notices it, writes a checkpoint and ends within so long."""


def check_own(out: Path, methods: set[str]) -> None:
    """Find out whether a folder is new, or one of a comparison.

    Parameters
    ----------
    out : Path
        The folder.
    methods : set[str]
        Names in it that stand for methods; what is in these is looked at with the runs.

    Raises
    ------
    UserError
        There is something in it that no comparison has written.
    """
    try:
        entries = sorted(out.iterdir()) if out.exists() else []
    except OSError as error:
        raise UserError(f"{out} cannot be used: {error.strerror}; give another --out.") from None
    if any(entry.name == RESULTS for entry in entries):
        return
    strange = [e.name for e in entries if e.name not in methods and not _is_ours(e)]
    if strange:
        raise UserError(
            f"{out} holds {strange[0]}, which is of no comparison: choose a new folder with --out."
        )


@contextmanager
def only_comparison(out: Path) -> Iterator[None]:
    """Make the folder if need be, and keep other comparisons out of it meanwhile.

    Raises
    ------
    UserError
        Another one is at work there, or the folder cannot be made.
    """
    make_folder(out)
    with only_writer(out):
        yield


def remove_run(folder: Path) -> None:
    """Remove what a killed run has left, once nobody writes to it any more.

    Raises
    ------
    UserError
        Something in it is of no run, somebody goes on writing to it, or it cannot be removed.
    """
    with only_writer(folder, _ORPHAN_SECONDS):
        try:
            strange = folder.name if folder.is_symlink() else foreign(folder)
            if strange:
                raise UserError(
                    f"{folder} is in the way and is not removed, for {strange} in it is of no run: "
                    "move that away, or choose another folder with --out."
                )
            shutil.rmtree(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be removed: {error.strerror}.") from None


def wait_for_end(folder: Path) -> None:
    """Wait until nobody writes to the folder of a run.

    Raises
    ------
    UserError
        Somebody goes on.
    """
    with only_writer(folder, _ORPHAN_SECONDS):
        pass


def _is_ours(entry: Path) -> bool:
    """Return whether a file or folder can be of a comparison that was never finished."""
    if not entry.is_dir():
        return entry.name.startswith(".") and entry.name.endswith(".partial")
    return all(run.name.startswith(_RUNS) and run.is_dir() for run in entry.iterdir())
