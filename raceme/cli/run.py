"""`raceme run`: a method on virtual time."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raceme.cli.report import ADDRESS, Address, Watch, watched
from raceme.core.config import RunConfig, parse_assignment
from raceme.core.errors import UserError
from raceme.core.options import Value

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
            progress = RunProgress(max_updates=settings.planned_updates)
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
    # Rare lines for the user: checkpoints, unsuitable settings, lost machines.
    for name in ("raceme.checkpoints", "raceme.defaults", "raceme.run", "raceme.workers"):
        logger = logging.getLogger(name)
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


def simulate(
    folder: Annotated[Path, typer.Argument(metavar="APP_DIR", help="folder of a Flower app")],
    clients: Annotated[
        int, typer.Option(metavar="INTEGER", help="simulated SuperNodes", min=1)
    ] = 10,
    devices: Annotated[
        str,
        typer.Option(
            metavar="PROFILE",
            help="device profile (see `raceme list`), TOML file, or trace:FOLDER of a recorded run",
        ),
    ] = "slow30x5",
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KEY=VALUE …'",
            help="run config of the app, as in `flwr run`: pairs, or a TOML file",
        ),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            "--node-config",
            metavar="'KEY=VALUE …'",
            help="pairs for the node config of every client, as in `flower-supernode`",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="method of Raceme that replaces the app's strategy; see `raceme list`",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="with --strategy: a key of it, e.g. casa.gamma=0.2"
        ),
    ] = None,
    workers: Annotated[
        str,
        typer.Option(
            metavar="INTEGER",
            help="worker processes (auto: one per core, 0: none), or ray, ray://HEAD:PORT; same "
            "results",
        ),
    ] = "auto",
    seed: Annotated[
        int,
        typer.Option(
            metavar="INTEGER",
            help="seed of devices, losses, and unseeded draws of the app",
            min=0,
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="folder for results", show_default="runs/<date>-<app>"),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            metavar="INTEGER",
            help="training examples per client, for device profiles with times per sample",
            show_default="what replies state as num-examples",
            min=1,
        ),
    ] = None,
    evaluation_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="duration of an evaluation as a share of a training task's, plus its transfers",
            show_default="they take none",
            min=0,
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="stop at this virtual time", show_default="no limit", min=0
        ),
    ] = None,
    max_wall_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="stop after this time on this machine",
            show_default="no limit",
            min=0,
        ),
    ] = None,
) -> None:
    """Run any Flower app on virtual time: how long it takes on a fleet, and which devices delay it.

    ServerApp and ClientApp are used as they are, whatever the strategy.
    """
    from raceme.reporting.waiting import print_simulation
    from raceme.simulation.apps import Settings, write_results
    from raceme.simulation.apps import simulate as run

    settings = Settings(
        folder=folder,
        clients=clients,
        devices=devices,
        run_config=tuple(run_config or ()),
        node_config=tuple(node_config or ()),
        strategy=strategy,
        parameters=dict(parse_assignment(text) for text in assignments or ()),
        workers=workers,
        seed=seed,
        out=out,
        max_time=math.inf if max_time is None else max_time,
        max_wall_time=math.inf if max_wall_time is None else max_wall_time,
        examples=examples,
        evaluation_share=evaluation_share,
    )
    simulated = run(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    summary, unwritten = write_results(simulated)
    print_simulation(summary, simulated.out)
    if unwritten:
        print(f"raceme: {', '.join(unwritten)} could not be written.", file=sys.stderr)
    end_app_with(simulated.ending, simulated.reason)
    if summary["trains_in_vain"]:
        first = summary["first_failure"]
        print(f"raceme: all training failed. The first failure: {first}", file=sys.stderr)
        raise typer.Exit(1)
