"""One process at a time writes to the folder of a run."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raceme.config.errors import UserError

log = logging.getLogger("raceme.checkpoints")

_PAUSE_SECONDS = 0.2


@contextmanager
def only_writer(run: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep all others from writing to the folder of a run; a process that dies lets go of it.

    Two that resume from one checkpoint would each write its own updates.

    Parameters
    ----------
    run : Path
        The folder.
    patience : float
        Seconds to wait for another that is still at it.

    Raises
    ------
    UserError
        The other one has not ended by then.
    """
    handle = os.open(run, os.O_RDONLY)
    try:
        _lock(handle, run, patience)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, run: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    said = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"Another process is still writing to {run}: wait for its end or stop it, "
                    "then try again."
                ) from None
        except OSError as error:
            # Some network file systems have no locks; a run without one is better than none.
            log.warning("%s cannot be kept from other processes: %s", run, error.strerror)
            return
        if not said:
            said = True
            log.info("Waiting up to %.0f s for the process that still writes to %s", patience, run)
        time.sleep(_PAUSE_SECONDS)
