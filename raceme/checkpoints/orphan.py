"""The end of a process that has outlived the one it works for."""

from __future__ import annotations

import logging
import os
import threading
import time

log = logging.getLogger("raceme.checkpoints")

_LOOK_SECONDS = 0.5


def end_with_parent(parent: int, grace: float) -> None:
    """End this process a while after its parent, whatever it waits for.

    A server app is told to stop when its SuperLink dies. But it may be waiting for an answer that
    will never come, deaf to signals, and its folder would be taken for ever. What it has done since
    its last checkpoint is done again.

    Parameters
    ----------
    parent : int
        The process to look at.
    grace : float
        Seconds for an orderly end, should the SuperLink be back by then.
    """
    threading.Thread(target=_watch, args=(parent, grace), daemon=True).start()


def _watch(parent: int, grace: float) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    log.warning("The SuperLink of this run has died: the run ends within %.0f s", grace)
    time.sleep(grace)
    log.error("The run is given up; it can be resumed from its last checkpoint")
    logging.shutdown()
    # Not sys.exit: other threads wait for the SuperLink, and would have to be waited for.
    os._exit(1)
