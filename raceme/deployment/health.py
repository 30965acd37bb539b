"""A file that is touched while the SuperLink answers, for a container's health check."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from raceme.config.errors import UserError

_INTERVAL_SECONDS = 5.0


class HealthFile:
    """Keeps a file young: whoever finds it older than two minutes knows that something is wrong.

    Heartbeats count, so that long training does not look like trouble.

    Parameters
    ----------
    path : Path
        The file; made if need be.

    Raises
    ------
    UserError
        It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = float("-inf")
        try:
            # It is removed and made again: a device would be gone.
            if path.exists() and not path.is_file():
                raise UserError(f"The health file '{path}' is no regular file.")
            path.unlink(missing_ok=True)
            path.touch()
            path.unlink()
        except OSError as error:
            raise UserError(
                f"The health file '{path}' cannot be written: {error.strerror}."
            ) from None

    def answered(self) -> None:
        """Note that the SuperLink has answered."""
        now = time.monotonic()
        if now - self._touched_at >= _INTERVAL_SECONDS:
            self._touched_at = now
            # A disk that is full, or a folder that is gone, is no reason to stop training.
            with suppress(OSError):
                self._path.touch()
