"""A run's checkpoints: numbered files, of which the latest two are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raceme.checkpoints.files import DamagedError, read_tree, write_tree
from raceme.config.errors import UserError

log = logging.getLogger("raceme.checkpoints")

CHECKPOINTS = "checkpoint"
"""Name of the folder in that of the run."""
_KEPT = 2
_SUFFIX = ".safetensors"

Check = Callable[[Any, Mapping[str, str]], str]
"""Returns why a checkpoint cannot be used here; nothing if it can."""


class CheckpointFolder:
    """The checkpoints of one run.

    Parameters
    ----------
    run : Path
        The run's folder; the checkpoints lie in ``checkpoint`` in it.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / CHECKPOINTS
        self._good: list[int] = []

    def save(self, tree: Any, note: Mapping[str, str]) -> Path:
        """Write the next checkpoint, and drop those before the last two."""
        number = max(self._numbers(), default=0) + 1
        path = self._file(number)
        write_tree(path, tree, note)
        self._good = [*self._good, number][-_KEPT:]
        for old in self._numbers():
            if old not in self._good:
                # What somebody else has put there may be no file; it is in nobody's way.
                with suppress(OSError):
                    self._file(old).unlink(missing_ok=True)
        return path

    def load(self, check: Check) -> tuple[Any, Path]:
        """Read the newest checkpoint that can be used; say so if it is not the newest.

        Parameters
        ----------
        check : Check
            Refuses checkpoints of something else.

        Raises
        ------
        UserError
            None can be used.
        """
        refused: list[str] = []
        for number in reversed(self._numbers()):
            path = self._file(number)
            try:
                tree, note = read_tree(path)
                reason = check(tree, note)
            except (DamagedError, UserError) as error:
                reason = f"it is damaged ({error})"
            if not reason:
                if refused:
                    log.warning("%s The one before it is used: %s.", " ".join(refused), path.name)
                self._good = [number]
                return tree, path
            refused.append(f"The checkpoint {path} cannot be used: {reason}.")
        if refused:
            raise UserError(f"{' '.join(refused)} There is no other to resume from.")
        raise UserError(
            f"There is no checkpoint in {self.path}: resume from the folder of a run that was "
            "started with checkpoint-every or checkpoint-seconds, or start anew."
        )

    def _numbers(self) -> list[int]:
        """Return the numbers of the checkpoints that are there, in order."""
        stems = [path.stem for path in self.path.glob(f"*{_SUFFIX}")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _file(self, number: int) -> Path:
        return self.path / f"{number:08d}{_SUFFIX}"
