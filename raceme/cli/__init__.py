"""The command line: every command of `raceme`, by name.

A command's module is imported when the command runs; the help of `raceme` itself reads the
commands' docstrings off their source.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from raceme import __version__
from raceme.core.errors import UserError
from raceme.core.installation import check_versions
from raceme.core.registry import STRATEGIES, explained, summary_of

COMMANDS = {
    "run": "raceme.cli.run:run",
    "simulate": "raceme.cli.run:simulate",
    "list": "raceme.cli.keys:list_names",
    "compare": "raceme.cli.experiments:compare",
    "reproduce": "raceme.cli.experiments:reproduce",
    "watch": "raceme.cli.report:watch",
    "report": "raceme.cli.report:report",
    "export": "raceme.cli.report:export",
    "serve": "raceme.cli.fleet:serve",
    "device": "raceme.cli.fleet:device",
    "certs": "raceme.cli.fleet:certs",
    "fleet": "raceme.cli.fleet:fleet",
    "up": "raceme.cli.fleet:up",
}
"""The function of each command, or a group of commands. A function whose first parameter is `keys`
takes the keys of a run; `options` are a dataclass, with a command-line option per field."""

# Click's in older releases of typer, a copy of it in newer ones.
_ClickError: Any = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")

PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}


class _Commands(TyperGroup):
    """The commands by name and summary, imported when run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name) for name in COMMANDS}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import and return the named command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _imported(name), rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with a line per command."""
        for name, command in self.commands.items():
            command.help = summary_of(COMMANDS[name])
        super().format_help(ctx, formatter)


def _imported(name: str) -> Any:
    """Import a command's module, and return the command."""
    check_versions()
    module, attribute = COMMANDS[name].split(":")
    function = getattr(import_module(module), attribute)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    from raceme.cli.keys import SHOWN, KeyCommand, with_keys, with_options

    alone, parameters = typer.Typer(**PLAIN), [*signature(function).parameters]
    if "options" in parameters:
        function = with_options(function)
    if parameters[0] == "keys":
        alone.command(name, cls=KeyCommand)(with_keys(function, SHOWN.get(name)))
    else:
        alone.command(name)(function)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Commands,
    help="Asynchronous, clustered federated learning on Flower.",
    no_args_is_help=True,
    # Click itself suggests commands; typer's copy of it does not.
    suggest_commands=not _ClickError.__module__.startswith("click"),
    **PLAIN,
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


def _one_line(error: Any) -> str:
    """Return the problem of a command line and its remedy in one line."""
    message = " ".join(error.format_message().split())
    context: Any = getattr(error, "ctx", None)
    words = re.findall(r"[\w-]+", message.partition("extra argument")[2])
    name = next((word for word in words if word in STRATEGIES), "")
    if context and (file := re.search(r"\((\S+\.toml)\)", message)):
        return f"{message}. Did you mean `{context.command_path} --config {file[1]}`?"
    if context and name:
        return f"{message}. Did you mean `{context.command_path} --strategy {name}`?"
    end = "" if message.endswith((".", "?")) else "."
    return f"{message}{end}" + (f" See `{context.command_path} --help`." if context else "")


def main() -> None:
    """Run the command line; a user's error is one line on standard error, exit code 2."""
    keep_output()
    try:
        raise SystemExit(app(prog_name="raceme", standalone_mode=False))
    except _ClickError as error:
        # A command without arguments shows its help.
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            print(f"raceme: {_one_line(error)}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except MemoryError as error:
        reason = " ".join(str(error).split()) or "for what was asked"
        print(f"raceme: This machine has too little memory: {reason}.", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        said = explained(error)
        if not isinstance(said, UserError):
            raise
        print(f"raceme: {said}", file=sys.stderr)
        raise SystemExit(2) from None


# -----------------------------------------------------------------------------
# Output whose failures do not end a command.
# -----------------------------------------------------------------------------


_STANDARD = (("stdin", 0), ("stdout", 1), ("stderr", 2))
_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors that mean that the reader is gone, e.g. `head` has ended or the terminal is closed. They
are not reported."""


def keep_output() -> None:
    """Make writing to standard output and error never raise.

    Characters missing in the terminal's encoding are replaced. After a failed write, further output
    is dropped, with one line on standard error unless the reader is gone.
    """
    for name, number in _STANDARD:
        _keep_open(number)
        stream = getattr(sys, name)
        # Captured output, as in tests, has no or another file.
        if number and (stream is None or _file_of(stream) == number):
            setattr(sys, name, _lasting(stream, number))


class _Lasting(io.FileIO):
    """A file that drops what it cannot write."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self._number = number
        self._lost = False

    def write(self, data: Any, /) -> int:
        """Write or drop; always return the full size."""
        whole = memoryview(data).nbytes
        rest = memoryview(data).cast("B")
        while rest and not self._lost:
            try:
                # Another process may have made the terminal non-blocking.
                while (written := super().write(rest)) is None:
                    select.select([], [self._number], [])
                rest = rest[written:]
            except OSError as error:
                self._lost = True
                self._report(error)
        return whole

    def _report(self, error: OSError) -> None:
        if self._number != 2 and error.errno not in _CLOSED:
            with suppress(OSError):
                os.write(2, f"raceme: no more output is shown: {error.strerror}.\n".encode())


def _lasting(stream: Any, number: int) -> io.TextIOWrapper:
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()
    raw = _Lasting(number)
    # Unbuffered: a second buffer would refuse writes of signal handlers.
    return io.TextIOWrapper(
        raw,
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace" if number == 2 else "replace",
        line_buffering=number == 2 or raw.isatty(),
        write_through=bool(getattr(stream, "write_through", False)),
    )


def _keep_open(number: int) -> None:
    """Reopen a closed standard file, whose number the next opened file would take."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def _file_of(stream: Any) -> int | None:
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return number if isinstance(number, int) else None
