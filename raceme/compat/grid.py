"""The ServerApp's side of Flower's message exchange."""

from __future__ import annotations

from functools import partial

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid

_FIRST_PAUSE_SECONDS = 0.02


def hasten_replies() -> None:
    """Look soon again for the rest of a reply that is still on its way.

    A reply is announced before its arrays have arrived. Flower's grid, which finds them missing,
    waits a whole second, and all other replies with it.
    """
    http_grid.__dict__["pull_objects"] = partial(pull_objects, initial_backoff=_FIRST_PAUSE_SECONDS)
