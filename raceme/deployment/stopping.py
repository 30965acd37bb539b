"""A stop flag that is safe to set in a signal handler."""

from __future__ import annotations

import os
import select


class StopSignal:
    """Tells all threads to stop; unlike ``threading.Event`` it may be set by a signal handler.

    A handler runs between any two instructions of the main thread, which may just then hold the
    lock of the event that the handler wants to set.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()

    def set(self) -> None:
        """Tell everybody."""
        if not self._is_set:
            self._is_set = True
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Return whether it is time to stop."""
        return self._is_set

    def wait_or(self, file: int) -> bool:
        """Wait for it, or until there is something to read; return whether it is time to stop."""
        if not self._is_set:
            select.select([self._reader, file], [], [])
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait for it, at most this long; return whether it is time to stop."""
        if not self._is_set and seconds > 0:
            # The byte stays in the pipe: it wakes every later wait as well.
            select.select([self._reader], [], [], seconds)
        return self._is_set
