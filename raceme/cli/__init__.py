"""The command line: every command of `raceme`, by name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from raceme import __version__
from raceme.cli import experiments as compare
from raceme.cli import experiments as reproduce
from raceme.cli import experiments as suites
from raceme.cli import fleet as certs
from raceme.cli import fleet as device
from raceme.cli import fleet as serve
from raceme.cli import fleet as up
from raceme.cli import report, run
from raceme.cli import report as listing
from raceme.cli import report as watch
from raceme.cli import run as simulate
from raceme.cli.keys import KeyCommand, with_keys
from raceme.core.errors import UserError
from raceme.core.registry import explained
from raceme.reporting.console import keep_output

app = typer.Typer(
    help="Asynchronous, clustered federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    # Click does so by itself: both together say it twice.
    suggest_commands=False,
    pretty_exceptions_enable=False,
)
app.command(cls=KeyCommand)(with_keys(run.run))
app.command()(simulate.simulate)
app.command("list")(listing.list_names)
app.command(cls=KeyCommand)(with_keys(compare.compare, compare.SHOWN))
app.command(cls=KeyCommand)(with_keys(reproduce.reproduce, suites.SHARED))
app.command()(watch.watch)
app.command()(report.report)
app.command(cls=KeyCommand)(with_keys(serve.serve, serve.SERVE_SHOWN))
app.command()(device.device)
app.command()(certs.certs)
app.command(cls=KeyCommand)(with_keys(up.up, up.UP_SHOWN))


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


def main() -> None:
    """Run the command line; what the user got wrong is one line on standard error, exit code 2."""
    keep_output()
    try:
        _call()
    except UserError as error:
        print(f"raceme: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except MemoryError as error:
        reason = " ".join(str(error).split()) or "for what was asked"
        print(f"raceme: This machine has too little memory: {reason}.", file=sys.stderr)
        raise SystemExit(1) from None


def _call() -> None:
    try:
        app()
    except ModuleNotFoundError as error:
        raise explained(error) from None
