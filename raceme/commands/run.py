"""`raceme run`: a method on virtual time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from raceme.commands.watch import ADDRESS, Address, Watch, watched
from raceme.config import RunConfig, Value


def run(keys: Mapping[str, Value], watch: Watch = False, watch_address: Address = ADDRESS) -> None:
    """Run a method on virtual time, and leave a table, plots and all numbers.

    Keys come from --config, then the options, then --set; the later one wins. With --resume they
    are those of the earlier run.
    """
    from raceme.checkpoints import StopRequest
    from raceme.commands.ending import end_with
    from raceme.experiment import resolve, simulate
    from raceme.records.folder import new_folder
    from raceme.reporting.console import RunProgress

    settings = resolve(RunConfig.from_mapping(keys))

    _quiet_flower()
    if watch and not (settings.out or settings.resume):
        # Whoever watches has to know where it will be.
        settings = settings.with_values(out=str(new_folder(settings)))
    with watched(watch, Path(settings.resume or settings.out), watch_address):
        with StopRequest() as stop, RunProgress(max_updates=settings.planned_updates) as progress:
            outcome = simulate(settings, progress.observe, stop=stop)
        end_with(outcome)


def _quiet_flower() -> None:
    """Keep Flower's and Raceme's log lines off the progress display; a run logs to a file."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False
    logging.getLogger("raceme").addHandler(logging.NullHandler())
    # What becomes of checkpoints, defaults that did not fit, and machines that were lost are the
    # person's business: rare.
    for name in ("raceme.checkpoints", "raceme.defaults", "raceme.workers"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [logging.StreamHandler(sys.stderr)]
