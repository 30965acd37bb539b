"""Keys of a run as options of a command, with their type, unit and meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from raceme.core.config import check_names, general_keys, parse_assignment, read_toml
from raceme.core.options import Value, shown_type

_CONFIG = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file with keys", show_default=False),
]
_SET = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="any key, also as an option of its own: --set groups=0.5,0.5 or --groups 0.5,0.5; "
        "see `raceme list --keys`",
        show_default=False,
    ),
]


_COMPARED = ("data-root", "download", "clients", "devices")
_LIMITS = ("max-updates", "max-rounds", "max-time", "eval-every")
SHOWN: Mapping[str, Sequence[str]] = {
    "compare": (
        "dataset",
        "model",
        "partition",
        "target-accuracy",
        "workers",
        *_COMPARED,
        *_LIMITS,
    ),
    "reproduce": (*_COMPARED, *_LIMITS),
    "serve": ("strategy", "dataset", "model", "max-updates", "seed", "out"),
    "up": ("strategy", "dataset", "max-updates", "seed", "resume", "out"),
}
"""Keys of a run that the help of a command shows; that of `raceme run` shows all."""


class KeyCommand(TyperCommand):
    """A command that takes every key of a run as an option.

    Options that the command does not name are keys that a strategy, a dataset or a partition
    declares: ``--groups 0.5,0.5`` stands for ``--set groups=0.5,0.5``. So they need not be
    imported, nor listed, to be understood.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line after the options that are keys were turned into --set."""
        named = {
            name for item in self.get_params(ctx) for name in (*item.opts, *item.secondary_opts)
        }
        return super().parse_args(ctx, as_assignments(args, named))


def as_assignments(arguments: Sequence[str], named: Iterable[str]) -> list[str]:
    """Turn options that a command does not name into ``--set name=value``.

    Parameters
    ----------
    arguments : Sequence[str]
        The command line after the command's name.
    named : Iterable[str]
        The command's own options, e.g. ``"--out"``. An option without a value is left to it too.
    """
    own = set(named)
    turned: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        name, equals, value = argument.partition("=")
        if argument == "--":
            return [*turned, *arguments[position - 1 :]]
        if not name.startswith("--") or name in own:
            turned.append(argument)
            continue
        if not equals:
            if position == len(arguments) or arguments[position].startswith("--"):
                turned.append(argument)
                continue
            value = arguments[position]
            position += 1
        turned += ["--set", f"{name.removeprefix('--')}={value}"]
    return turned


def with_keys(
    command: Callable[..., None], names: Sequence[str] | None = None
) -> Callable[..., None]:
    """Give a command options for keys of a run, --config and --set; it gets them as one mapping.

    Keys come from the folder given with --resume, if there is one, then from --config, then the
    options, then --set; the later one wins. To be registered with ``cls=KeyCommand``.

    Parameters
    ----------
    command : Callable
        Takes the mapping first, and its own options after it.
    names : Sequence[str], optional
        The keys that the command's help shows; by default those that every run has.
    """
    shown = general_keys()
    if names is not None:
        shown = {name: shown[name] for name in names}

    def wrapped(**values: Any) -> None:
        config, assignments = values.pop("config"), values.pop("assignments")
        given = {name: values.pop(item.name) for name, item in shown.items()}
        resume = given.get("resume")
        keys: dict[str, Value] = read_toml(Path(resume) / "config.toml") if resume else {}
        keys.update(read_toml(config, pipe=True) if config else {})
        keys.update({name: value for name, value in given.items() if value is not None})
        keys.update(parse_assignment(text) for text in assignments or [])
        # What is mistyped is said before the imports that the command needs.
        check_names(keys)
        command(keys, **values)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added: Mapping[str, Any] = {
        **{item.name: _option(name, item) for name, item in shown.items()},
        "config": _CONFIG,
        "assignments": _SET,
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in own] + [
        inspect.Parameter(name, keyword, default=None, annotation=annotation)
        for name, annotation in added.items()
    ]
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _option(name: str, item: Any) -> Any:
    """Make the option of a key: text, so that all input is checked in one place; or a flag."""
    about = item.metadata["help"]
    if item.type == "bool":
        flags = typer.Option(f"--{name}/--no-{name}", help=about, show_default=False)
        return Annotated[bool | None, flags]
    shown = shown_type(item, with_unit=True)
    return Annotated[
        str | None, typer.Option(f"--{name}", metavar=shown, help=about, show_default=False)
    ]
