"""A process that does runs of a comparison, one after another, until it is told to stop."""

from __future__ import annotations

import logging
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from raceme.comparison.jobs import ERROR
from raceme.config import RunConfig, Value
from raceme.errors import UserError
from raceme.events import Evaluated, Event, UpdateApplied

_REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    updates: int
    time: float
    accuracy: float | None


@dataclass(frozen=True)
class Finished:
    """A run has ended.

    Attributes
    ----------
    error : str or None
        Why it failed, in one line; None if it did not.
    """

    error: str | None


def serve(connection: Connection[Any, Any]) -> None:
    """Run each configuration that comes, and send :class:`Progress` and then :class:`Finished`."""
    # Ctrl-C reaches all processes of a terminal; the comparison ends its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Flower sets its logger up when it is imported, so that comes first.
    import_module("flwr.serverapp")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False
    try:
        while True:
            connection.send(_run(connection.recv(), connection))
    except (EOFError, OSError):
        return


def _run(keys: Mapping[str, Value], connection: Connection[Any, Any]) -> Finished:
    from raceme.experiment import simulate

    config = RunConfig.from_mapping(keys)
    last = time.monotonic()
    accuracy: float | None = None

    def observe(event: Event) -> None:
        nonlocal last, accuracy
        if isinstance(event, Evaluated):
            accuracy = event.accuracy
        elif isinstance(event, UpdateApplied) and time.monotonic() - last > _REPORT_SECONDS:
            last = time.monotonic()
            connection.send(Progress(event.seq, event.time, accuracy))

    try:
        simulate(config, observe)
    except Exception as error:
        folder = Path(config.out)
        # The run may have failed because nothing can be written there.
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return Finished(kind + (" ".join(str(error).split()) or "no reason given"))
    return Finished(None)
