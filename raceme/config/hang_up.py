"""Whether a process ends with its terminal."""

from __future__ import annotations

import signal


def heeds_hang_up() -> bool:
    """Return whether the end of its terminal ends this process: ``nohup`` has it ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
