"""A stop flag that is safe to set in a signal handler."""

from __future__ import annotations

import math
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
            self._poll(file).poll()
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait for it, at most this long; return whether it is time to stop."""
        if not self._is_set and seconds > 0:
            # The byte stays in the pipe: it wakes every later wait as well.
            self._poll().poll(math.ceil(1000 * seconds))
        return self._is_set

    def _poll(self, *files: int) -> select.poll:
        # Unlike select, it takes files of any number: a process may have more than a thousand.
        poll = select.poll()
        for file in (self._reader, *files):
            poll.register(file, select.POLLIN)
        return poll
