"""`raceme run`: a method on virtual time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raceme.cli.report import ADDRESS, Address, Watch, watched
from raceme.core.config import RunConfig, parse_assignment
from raceme.core.errors import UserError
from raceme.core.options import Value, option

PAIRS = "'KEY=VALUE …'"

if TYPE_CHECKING:
    from raceme.runs.experiment import RunOutcome
    from raceme.simulation.apps import AppEnding


def run(keys: Mapping[str, Value], watch: Watch = False, watch_address: Address = ADDRESS) -> None:
    """Run a method on virtual time; write a summary, plots, models and every event.

    Keys come from --config, then the options, then --set; the later one wins.

    With --resume they are those of the earlier run.
    """
    # Report typing errors before slow imports.
    config = RunConfig.from_mapping(keys)

    from raceme.core.signals import StopRequest
    from raceme.records.folder import new_folder
    from raceme.reporting.console import RunProgress
    from raceme.runs.experiment import resolve, simulate

    settings = resolve(config)

    _quiet_flower()
    made: Path | None = None
    if watch and not (settings.out or settings.resume):
        # The dashboard needs the folder in advance.
        made = new_folder("", settings.short_name)
        settings = settings.with_values(out=str(made))
    try:
        with watched(watch, Path(settings.resume or settings.out), watch_address):
            progress = RunProgress(max_updates=settings.expected_updates)
            with StopRequest() as stop, progress:
                outcome = simulate(settings, progress.observe, stop=stop)
            end_with(outcome)
    except UserError:
        if made:
            # Left if it has content.
            with suppress(OSError):
                made.rmdir()
        raise


def _quiet_flower() -> None:
    """Keep Flower's and Raceme's log lines off the progress display; runs log to a file."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False
    logging.getLogger("raceme").addHandler(logging.NullHandler())
    # Rare lines for the user: checkpoints, unsuitable settings, imported code, lost machines.
    for name in ("checkpoints", "defaults", "run", "trust", "workers"):
        logger = logging.getLogger(f"raceme.{name}")
        logger.setLevel(logging.INFO)
        logger.handlers = [_Lines()]


class _Lines(logging.Handler):
    """Prints to the current standard error: on a terminal, above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        print(self.format(record), file=sys.stderr)


# -----------------------------------------------------------------------------
# The end of a command with a run.
# -----------------------------------------------------------------------------


def end_with(outcome: RunOutcome, *, silent: bool = False) -> None:
    """Print the result of a run, unless that is to be silent.

    Raises
    ------
    typer.Exit
        Exit code 130 after an interruption, 1 for other incomplete results.
    """
    from raceme.reporting.artefacts import missing_line
    from raceme.reporting.console import print_summary

    if not silent:
        print_summary(outcome.summary, outcome.out, missing=outcome.unwritten)
    if outcome.unwritten:
        print(f"raceme: {missing_line(outcome.out, outcome.unwritten)}", file=sys.stderr)
        raise typer.Exit(1)
    if outcome.interrupted:
        raise typer.Exit(130)
    if not outcome.complete:
        raise typer.Exit(1)


def end_app_with(ending: AppEnding, reason: str) -> None:
    """End a command by the ending of a Flower app; nothing if it returned."""
    if ending == "interrupted":
        raise typer.Exit(130)
    if ending != "returned":
        print(f"raceme: {reason}.", file=sys.stderr)
        raise typer.Exit(1)


# -----------------------------------------------------------------------------
# `raceme simulate`: any Flower app on virtual time.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulation:
    """Options of `raceme simulate`; see :class:`~raceme.simulation.apps.Settings`."""

    clients: int = option(10, "simulated SuperNodes", low=1)
    devices: str = option(
        "slow30x5",
        "device profile (see `raceme list`), TOML file, or trace:FOLDER of a recorded run",
        unit="PROFILE",
    )
    run_config: tuple[str, ...] = option(
        (), "run config of the app, as in `flwr run`: pairs, or a TOML file", unit=PAIRS
    )
    node_config: tuple[str, ...] = option(
        (), "pairs for the node config of every client, as in `flower-supernode`", unit=PAIRS
    )
    strategy: str | None = option(
        None, "method of Raceme that replaces the app's strategy; see `raceme list`", unit="NAME"
    )
    workers: str = option(
        "auto",
        "worker processes (auto: one per core, 0: none), or ray, ray://HEAD:PORT; same results",
        unit="INTEGER",
    )
    seed: int = option(0, "seed of devices, losses, and unseeded draws of the app", low=0)
    out: Path | None = option(None, "folder for results; default: runs/<date>-<app>", unit="FOLDER")
    examples: int | None = option(
        None,
        "training examples per client, for device profiles with times per sample; default: what "
        "replies state as num-examples",
        low=1,
    )
    evaluation_share: float | None = option(
        None,
        "duration of an evaluation as a share of a training task's, plus its transfers; default: "
        "none",
        unit="SHARE",
        low=0,
    )
    max_time: float | None = option(None, "stop at this virtual time", unit="SECONDS", low=0)


def simulate(
    folder: Annotated[Path, typer.Argument(metavar="APP_DIR", help="folder of a Flower app")],
    options: Simulation,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="with --strategy: a key of it, e.g. casa.gamma=0.2"
        ),
    ] = None,
) -> None:
    """Run any Flower app on virtual time: how long it takes on a fleet, and which devices delay it.

    ServerApp and ClientApp are used as they are, whatever the strategy.
    """
    from raceme.reporting.waiting import print_simulation
    from raceme.simulation.apps import Settings, write_results
    from raceme.simulation.apps import simulate as run

    parameters = dict(parse_assignment(text) for text in assignments or ())
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = Settings(folder, parameters=parameters, **given)
    simulated = run(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    summary, unwritten = write_results(simulated)
    print_simulation(summary, simulated.out)
    if unwritten:
        print(f"raceme: {', '.join(unwritten)} could not be written.", file=sys.stderr)
    end_app_with(simulated.ending, simulated.reason)
    if summary["all_training_failed"]:
        first = summary["first_failure"]
        print(f"raceme: all training failed. The first failure: {first}", file=sys.stderr)
        raise typer.Exit(1)
