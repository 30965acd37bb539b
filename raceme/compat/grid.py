"""The ServerApp's side of Flower's message exchange."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid

_FIRST_PAUSE_SECONDS = 0.02
_UPLOAD_SECONDS = 60.0
"""Longest wait for the rest of a reply, during which no other is taken."""


def hasten_replies() -> None:
    """Look soon again for the rest of a reply that is still on its way.

    A reply is announced before its arrays have arrived. Flower's grid, which finds them missing,
    waits a whole second, and all other replies with it. If its client has died meanwhile it would
    wait for three minutes.
    """
    http_grid.__dict__["pull_objects"] = partial(
        pull_objects, initial_backoff=_FIRST_PAUSE_SECONDS, max_time=_UPLOAD_SECONDS
    )


def told_parent(arguments: Sequence[str] | None = None) -> int | None:
    """Return the process that Flower's own one for server apps is told to look at; None elsewhere.

    Parameters
    ----------
    arguments : Sequence[str], optional
        A command line; that of this process if not given.
    """
    words = list(sys.argv if arguments is None else arguments)
    if "--parent-pid" not in words[:-1] or "serverapp" not in words[0]:
        return None
    return int(words[words.index("--parent-pid") + 1])
