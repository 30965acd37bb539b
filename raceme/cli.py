"""The command line: `raceme run`, `raceme compare`, `raceme list` and others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raceme import __version__
from raceme.command_keys import KeyCommand, with_keys
from raceme.comparison import commands as comparison_commands
from raceme.config import RunConfig, Value, all_keys
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


def run(keys: Mapping[str, Value]) -> None:
    """Run a method on virtual time, and leave a table, plots and all numbers.

    Keys come from --config, then the options, then --set; the later one wins. With --resume they
    are those of the earlier run.
    """
    from raceme.checkpoints import StopRequest
    from raceme.experiment import simulate
    from raceme.reporting.console import RunProgress, print_summary

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


app.command(cls=KeyCommand)(with_keys(run))


@app.command("list")
def list_names(
    keys: Annotated[bool, typer.Option("--keys", help="also list every key of a run")] = False,
) -> None:
    """Show the strategies, datasets, partitions, drifts, models and device profiles."""
    from raceme.registry import DATASETS, DRIFTS, MODELS, PARTITIONERS, STRATEGIES
    from raceme.simulation import devices

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
        console.print(_keys_table())


def _table(title: str, entries: dict[str, str], width: int) -> Table:
    table = _empty_table(title)
    table.add_column(no_wrap=True, min_width=width, style="cyan")
    table.add_column()
    for name, summary in entries.items():
        table.add_row(name, escape(summary))
    return table


def _keys_table() -> Table:
    """Return every key with its type, its unit, its default, and who reads it."""
    table = _empty_table("keys")
    table.show_header = True
    table.add_column("key", no_wrap=True, style="cyan")
    for head in ("type", "unit", "default", "meaning"):
        table.add_column(head, overflow="fold")
    for name, key in all_keys().items():
        # That a key with a strategy's name in front is the strategy's goes without saying.
        readers = [] if "." in name else [", ".join(names) for names in key.readers.values()]
        meaning = f"{'; '.join(readers)}: {key.help}" if readers else key.help
        default = "empty" if key.default == "" else _plain(key.default)
        table.add_row(name, *map(escape, (key.type, key.unit, default, meaning)))
    return table


def _plain(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _empty_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2),
        show_header=False,
    )


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
    # What becomes of checkpoints, and defaults that did not fit, are the person's business: rare.
    for name in ("raceme.checkpoints", "raceme.defaults"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [logging.StreamHandler(sys.stderr)]


def main() -> None:
    """Run the command line; what the user got wrong is one line on standard error, exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"raceme: {error}", file=sys.stderr)
        raise SystemExit(2) from None
