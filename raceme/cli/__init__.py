"""The command line: every command of `raceme`, by name.

A command's module is imported when the command runs; the help of `raceme` itself reads the
commands' docstrings off their source.
"""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from raceme import __version__
from raceme.cli.output import keep_output
from raceme.core.errors import UserError
from raceme.core.registry import explained, summary_of

COMMANDS = {
    "run": "raceme.cli.run:run",
    "simulate": "raceme.cli.run:simulate",
    "list": "raceme.cli.listing:list_names",
    "compare": "raceme.cli.experiments:compare",
    "reproduce": "raceme.cli.experiments:reproduce",
    "watch": "raceme.cli.report:watch",
    "report": "raceme.cli.report:report",
    "serve": "raceme.cli.fleet:serve",
    "device": "raceme.cli.fleet:device",
    "certs": "raceme.cli.fleet:certs",
    "up": "raceme.cli.fleet:up",
}
"""The function of each command. One whose first parameter is `keys` takes the keys of a run."""

_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}


class _Commands(TyperGroup):
    """The commands by name and summary; the one that runs is imported then."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name) for name in COMMANDS}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that is named, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _imported(name), rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, in which each command has a line."""
        for name, command in self.commands.items():
            command.help = summary_of(COMMANDS[name])
        super().format_help(ctx, formatter)


def _imported(name: str) -> Any:
    """Import a command's module, and return the command."""
    module, attribute = COMMANDS[name].split(":")
    function = getattr(import_module(module), attribute)
    alone = typer.Typer(**_PLAIN)
    if next(iter(signature(function).parameters)) == "keys":
        from raceme.cli.keys import SHOWN, KeyCommand, with_keys

        alone.command(name, cls=KeyCommand)(with_keys(function, SHOWN.get(name)))
    else:
        alone.command(name)(function)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Commands,
    help="Asynchronous, clustered federated learning on Flower.",
    no_args_is_help=True,
    # Click does so by itself: both together say it twice.
    suggest_commands=False,
    **_PLAIN,
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


def main() -> None:
    """Run the command line; what the user got wrong is one line on standard error, exit code 2."""
    keep_output()
    try:
        app()
    except (UserError, ModuleNotFoundError) as error:
        said = explained(error) if isinstance(error, ModuleNotFoundError) else error
        if not isinstance(said, UserError):
            raise
        print(f"raceme: {said}", file=sys.stderr)
        raise SystemExit(2) from None
    except MemoryError as error:
        reason = " ".join(str(error).split()) or "for what was asked"
        print(f"raceme: This machine has too little memory: {reason}.", file=sys.stderr)
        raise SystemExit(1) from None
