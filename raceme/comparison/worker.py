"""A process that does runs of a comparison, one after another, until it is told to stop."""

from __future__ import annotations

import logging
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from raceme.checkpoints import CHECKPOINTS, StopRequest
from raceme.comparison.jobs import SUMMARY
from raceme.config import RunConfig, Value
from raceme.config.errors import UserError
from raceme.protocol.events import Evaluated, Event, UpdateApplied
from raceme.records.folder import ERROR

_REPORT_SECONDS = 0.2
_CHECKPOINT_SECONDS = 60.0
"""From one checkpoint of a run to the next, if nothing else is asked for."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    updates: int
    time: float
    score: str


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
    """Run each configuration that comes, and send :class:`Progress` and then :class:`Finished`.

    If its folder exists, a run of it is half-done there and is resumed. SIGTERM ends the run with a
    checkpoint, and so does the end of the process that listens.
    """
    # These reach all processes of a terminal; the comparison ends its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Flower sets its logger up when it is imported, so that comes first.
    import_module("flwr.serverapp")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False
    try:
        while True:
            connection.send(run_one(connection.recv(), connection.send))
    # The second SIGTERM interrupts.
    except (EOFError, OSError, KeyboardInterrupt):
        return


def run_one(keys: Mapping[str, Value], tell: Callable[[Progress], None]) -> Finished:
    """Run a configuration; if its folder exists, a run of it is half-done there and is resumed.

    Parameters
    ----------
    keys : Mapping[str, Value]
        The configuration.
    tell : Callable
        Is told how far the run is. OSError from it ends the run, with a checkpoint.
    """
    from raceme.experiment import simulate
    from raceme.reporting.artefacts import missing_line

    config = RunConfig.from_mapping(keys)
    folder = Path(config.out)
    # Unless somebody wants checkpoints, they are for the case that this process is killed.
    passing = not config.checkpoint_every and config.checkpoint_seconds is None
    if passing:
        config = config.with_values(checkpoint_seconds=_CHECKPOINT_SECONDS)
    if folder.exists():
        config = config.with_values(resume=config.out)
        (folder / ERROR).unlink(missing_ok=True)
    last = time.monotonic()
    score = alone = ""

    def observe(event: Event) -> None:
        nonlocal last, score, alone
        if isinstance(event, Evaluated):
            score = f"{event.measure.word} {event.measure.shown(event.accuracy)}"
        elif isinstance(event, UpdateApplied) and time.monotonic() - last > _REPORT_SECONDS:
            last = time.monotonic()
            try:
                tell(Progress(event.seq, event.time, score))
            except OSError:
                alone = "its comparison has ended"

    try:
        with StopRequest(signal.SIGTERM) as told:
            outcome = simulate(config, observe, stop=lambda: told() or alone)
    except UserError as error:
        # It says all. Nothing is written: it may be that the folder is another process's.
        return Finished(" ".join(str(error).split()))
    except Exception as error:
        # The run may have failed because nothing can be written there.
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        reason = " ".join(str(error).split()) or "no reason given"
        return Finished(f"{type(error).__name__}: {reason}")
    if outcome.unwritten:
        # Not finished, then: the next time it goes on from its last checkpoint.
        (folder / SUMMARY).unlink(missing_ok=True)
        return Finished(missing_line(outcome.out, outcome.unwritten))
    if not outcome.complete:
        return Finished(f"it ended early: {outcome.summary['reason']}")
    if passing:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return Finished(None)
