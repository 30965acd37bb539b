"""The command line: `raceme run`, `raceme compare`, `raceme list` and others."""

from __future__ import annotations

import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from raceme import __version__
from raceme.comparison import commands as comparison_commands
from raceme.config import RunConfig, Value, all_keys, parse_assignment, read_toml
from raceme.deployment import commands as deployment_commands
from raceme.errors import UserError
from raceme.reporting import commands as reporting_commands

app = typer.Typer(
    help="Asynchronous, clustered federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
comparison_commands.register(app)
reporting_commands.register(app)
deployment_commands.register(app)

# Not `all_keys()`: it imports the strategies, with scikit-learn, which a device does without.
_DESCRIBED = {
    item.name.replace("_", "-"): item.metadata.get("help", "") for item in fields(RunConfig)
}


def _option(name: str, *flags: str) -> Any:
    """Make the command-line option of a key."""
    return typer.Option(*(flags or (f"--{name}",)), help=_DESCRIBED[name], show_default=False)


@app.command()
def run(
    strategy: Annotated[str | None, _option("strategy")] = None,
    dataset: Annotated[str | None, _option("dataset")] = None,
    data_root: Annotated[str | None, _option("data-root")] = None,
    download: Annotated[bool | None, _option("download", "--download/--no-download")] = None,
    data_file: Annotated[str | None, _option("data-file")] = None,
    model: Annotated[str | None, _option("model")] = None,
    clients: Annotated[str | None, _option("clients")] = None,
    partition: Annotated[str | None, _option("partition")] = None,
    drift: Annotated[str | None, _option("drift")] = None,
    drift_at: Annotated[str | None, _option("drift-at")] = None,
    devices: Annotated[str | None, _option("devices")] = None,
    max_updates: Annotated[str | None, _option("max-updates")] = None,
    max_time: Annotated[str | None, _option("max-time")] = None,
    target_accuracy: Annotated[str | None, _option("target-accuracy")] = None,
    eval_every: Annotated[str | None, _option("eval-every")] = None,
    workers: Annotated[str | None, _option("workers")] = None,
    device: Annotated[str | None, _option("device")] = None,
    seed: Annotated[str | None, _option("seed")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with keys", show_default=False)
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="any key: key=value, e.g. casa.gamma=0.2", show_default=False),
    ] = None,
    checkpoint_every: Annotated[str | None, _option("checkpoint-every")] = None,
    resume: Annotated[str | None, _option("resume")] = None,
    out: Annotated[str | None, _option("out")] = None,
) -> None:
    """Run a method on virtual time, and leave a table, plots and all numbers.

    Keys come from --config, then the options, then --set; the later one wins. With --resume they
    are those of the earlier run.
    """
    from raceme.checkpoints import StopRequest
    from raceme.experiment import simulate
    from raceme.reporting.console import RunProgress, print_summary

    keys: dict[str, Value] = read_toml(Path(resume) / "config.toml") if resume else {}
    keys.update(read_toml(config) if config else {})
    options = {
        "strategy": strategy,
        "dataset": dataset,
        "data-root": data_root,
        "download": download,
        "data-file": data_file,
        "model": model,
        "clients": clients,
        "partition": partition,
        "drift": drift,
        "drift-at": drift_at,
        "devices": devices,
        "max-updates": max_updates,
        "max-time": max_time,
        "target-accuracy": target_accuracy,
        "eval-every": eval_every,
        "workers": workers,
        "device": device,
        "seed": seed,
        "checkpoint-every": checkpoint_every,
        "resume": resume,
        "out": out,
    }
    keys.update({name: value for name, value in options.items() if value is not None})
    keys.update(parse_assignment(text) for text in assignments or [])
    settings = RunConfig.from_mapping(keys)

    _quiet_flower()
    with StopRequest() as stop, RunProgress(max_updates=settings.max_updates) as progress:
        outcome = simulate(settings, progress.observe, stop=stop)
    print_summary(outcome.summary, outcome.out)
    if outcome.unwritten:
        failed = ", ".join(outcome.unwritten)
        print(f"raceme: {failed} could not be written; see run.log there.", file=sys.stderr)
    if outcome.interrupted:
        raise typer.Exit(130)
    if not outcome.complete:
        raise typer.Exit(1)


@app.command("list")
def list_names(
    keys: Annotated[bool, typer.Option("--keys", help="also list every key of a run")] = False,
) -> None:
    """Show the strategies, datasets, partitions, models and device profiles."""
    from raceme.datasets import DATASETS, DRIFTS, PARTITIONERS
    from raceme.models import MODELS
    from raceme.simulation import devices
    from raceme.strategies import STRATEGIES

    sections = {
        "strategies": STRATEGIES.summaries(),
        "datasets": DATASETS.summaries(),
        "partitions": PARTITIONERS.summaries(),
        "drifts": DRIFTS.summaries(),
        "models": MODELS.summaries(),
        "device profiles": devices.summaries(),
    }
    console = Console()
    width = max(len(name) for entries in sections.values() for name in entries)
    for title, entries in sections.items():
        console.print(_table(title, entries, width))
    if keys:
        described = {
            name: f"{help_text} [default: {default if default != '' else 'empty'}]"
            for name, (default, help_text) in all_keys().items()
        }
        console.print(_table("keys", described, max(len(name) for name in described)))


def _table(title: str, entries: dict[str, str], width: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    table.add_column(no_wrap=True, min_width=width, style="cyan")
    table.add_column()
    for name, summary in entries.items():
        table.add_row(name, summary.replace("[", r"\["))
    return table


def _version(value: bool) -> None:
    if value:
        print(f"raceme {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """Asynchronous, clustered federated learning on Flower."""


def _quiet_flower() -> None:
    """Keep Flower's and Raceme's log lines off the progress display; a run logs to a file."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False
    logging.getLogger("raceme").addHandler(logging.NullHandler())
    # What becomes of checkpoints is the person's business, and rare.
    checkpoints = logging.getLogger("raceme.checkpoints")
    checkpoints.setLevel(logging.INFO)
    checkpoints.handlers = [logging.StreamHandler(sys.stderr)]


def main() -> None:
    """Run the command line; what the user got wrong is one line on standard error, exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"raceme: {error}", file=sys.stderr)
        raise SystemExit(2) from None
