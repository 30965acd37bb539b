"""How a simulation ends before the ServerApp does."""

from __future__ import annotations


class Halted(BaseException):
    """The ServerApp is ended: it would never return, or a limit is reached.

    It is no `Exception`, so that an app that catches those is ended too.
    """
