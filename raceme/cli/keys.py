"""Keys of a run as options of a command, with their type, unit and meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from raceme.core.config import (
    FEW_DEVICES,
    all_keys,
    check_key,
    check_keys_trusted,
    check_names,
    general_keys,
    keys_of,
    keys_to_resume,
    parse_assignment,
    read_toml,
)
from raceme.core.errors import UserError
from raceme.core.options import AUTO, Key, Value, as_typed, key_of, shown_type
from raceme.core.registry import DATASETS, DEVICES, DRIFTS, MODELS, PARTITIONERS, STRATEGIES

_CONFIG = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file of keys")]
_SET = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="any key of `raceme list --keys`; --groups 0.5,0.5 is short for --set groups=0.5,0.5, "
        "--augment for --set augment=true",
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
        "trust",
        *_COMPARED,
        *_LIMITS,
    ),
    "reproduce": (*_COMPARED, *_LIMITS),
    "serve": ("strategy", "dataset", "model", "max-updates", "seed", "trust", "out"),
    "up": ("strategy", "dataset", "max-updates", "seed", "resume", "trust", "out"),
}
"""Keys shown in the help of a command; `raceme run` shows all."""
_FIRST = (
    "strategy",
    "dataset",
    "clients",
    "partition",
    "drift",
    "devices",
    "max-updates",
    "max-time",
    "target-accuracy",
    "seed",
    "workers",
    "resume",
    "trust",
    "out",
)
"""Keys shown first in the help of `raceme run`, with --config and --set; others are grouped."""
_GROUPS = {
    "Data": "data-root download test-fraction validation-fraction validation-share proxy pretrain "
    "pretrain-epochs",
    "Fleet": "concurrency task-timeout device precision vectorised device-keys labels where",
    "Method": "model lr batch-size local-epochs local-steps optimizer momentum weight-decay "
    "weight-decay-on augment batch-norm attack",
    "Limits": "max-rounds max-compute stop-at-target eval-every eval-rounds eval-steps "
    "eval-clients",
    "Output": "checkpoint-every checkpoint-seconds track client-models",
}
_OWN_HELP = {
    (
        "serve",
        "out",
    ): "folder for results and checkpoints, required; the same folder resumes the run",
}
"""Meanings of keys that differ from `raceme run`, by command."""


_BOOLEAN, _BOOLEANS = "true|false", ("true", "false", AUTO)


class KeyCommand(TyperCommand):
    """A command that takes every key of a run as an option.

    Other options are keys of a strategy, dataset or partition: ``--groups 0.5,0.5`` means ``--set
    groups=0.5,0.5``, so that none needs to be imported or listed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line after converting key options to --set."""
        named = {
            name for item in self.get_params(ctx) for name in (*item.opts, *item.secondary_opts)
        }
        if "--seeds" in named:
            args = _with_listed_seeds(args)
        for place, word in enumerate(args):
            name, _, value = word.partition("=")
            # The names of arguments have no hyphens in front.
            if name.startswith("--") and name not in named and name.removeprefix("--") in named:
                typed = (value or " ".join(args[place + 1 : place + 2])).replace(",", " ")
                raise UserError(f"{name} is no option: type `{ctx.command_path} {typed}`.")
        return super().parse_args(ctx, as_assignments(args, named))


def _with_listed_seeds(arguments: Sequence[str]) -> list[str]:
    """Join seeds of several words: ``--seeds 0 1 2`` becomes ``--seeds 0,1,2``."""
    joined: list[str] = []
    for word in arguments:
        if re.fullmatch(r"\d+(\.\.\d+)?", word) and joined[-2:-1] == ["--seeds"]:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


def as_assignments(arguments: Sequence[str], named: Iterable[str]) -> list[str]:
    """Convert options that a command does not declare to ``--set name=value``.

    A boolean key alone means true; it leaves the next word, such as a method, unless that is a
    value. An empty word is one.

    Parameters
    ----------
    arguments : Sequence[str]
        The command line after the command's name.
    named : Iterable[str]
        The command's own options, e.g. ``"--out"``. Unknown ones without a value are unchanged too.

    Raises
    ------
    UserError
        A key has no value and is not a boolean.
    """
    own = set(named)
    switches = {
        f"--{key}" for key, item in general_keys().items() if shown_type(item).startswith(_BOOLEAN)
    }
    turned: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        name, equals, value = argument.partition("=")
        if argument == "--":
            return [*turned, *arguments[position - 1 :]]
        # --no-augment is short for --augment=false.
        if (switch := name.replace("--no-", "--", 1)) != name and switch in switches:
            name, equals, value = switch, "=", "false"
        is_switch = name in switches
        following = arguments[position] if position < len(arguments) else "--"
        is_alone = not equals and following.startswith("--")
        if is_alone and not is_switch:
            is_switch = _stands_alone(name, own)
        if not name.startswith("--") or (name in own and not is_switch):
            turned.append(argument)
            continue
        if not equals:
            if not is_alone and (not is_switch or following.lower() in ("", *_BOOLEANS)):
                value = following
                position += 1
            elif is_switch or "." in name:
                value = "true"
            else:
                turned.append(argument)
                continue
        key = name.removeprefix("--")
        turned += [f"{name}={value}"] if name in own else ["--set", f"{key}={value}"]
    return turned


def _stands_alone(name: str, own: Collection[str]) -> bool:
    """Return whether a word without a value is a boolean key that is not one of every run.

    Raises
    ------
    UserError
        It is the option of a key that takes a value.
    """
    key = name.removeprefix("--")
    if key == name or "." in key:
        return False
    if key in general_keys():
        is_boolean = False
    elif name not in own and (found := all_keys().get(key)) is not None:
        # Looked up late, as keys of datasets and others are in modules that take time to import.
        is_boolean = found.type.startswith(_BOOLEAN)
    else:
        return False
    if not is_boolean:
        raise UserError(f"{name} needs a value: `raceme list {key} --keys` says which.")
    return True


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of the dataclass that a command takes as `options`.

    The fields are declared by :func:`~raceme.core.options.option`. Those of texts in a tuple may be
    repeated, and one whose default is ``...`` is required.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    declared = parameters["options"].annotation
    types = get_type_hints(declared)
    several = {item.name for item in fields(declared) if item.default == ()}
    made = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if item.name in several else item.default,
            annotation=Annotated[
                list[str] | None if item.name in several else types[item.name],
                typer.Option(
                    f"--{key_of(item.name)}",
                    metavar=item.metadata["unit"] or None,
                    help=item.metadata["help"],
                    min=item.metadata["low"],
                    max=item.metadata["high"],
                ),
            ],
        )
        for item in fields(declared)
    ]

    def wrapped(*keys: Mapping[str, Value], **values: Any) -> None:
        given = {item.name: values.pop(item.name) for item in fields(declared)}
        given |= {name: tuple(given[name] or ()) for name in several}
        command(*keys, options=declared(**given), **values)

    own, at = list(parameters.values()), list(parameters).index("options")
    return _as_command(wrapped, command, [*own[:at], *made, *own[at + 1 :]])


def _as_command(
    wrapped: Callable[..., None],
    command: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Give a function the name and help of a command, and parameters that typer reads."""
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in keyword}
    return wrapped


def with_keys(
    command: Callable[..., None], names: Sequence[str] | None = None
) -> Callable[..., None]:
    """Add options for keys of a run, --config and --set to a command, which gets one mapping.

    Keys come from the folder of --resume, if any, then --config, options, and --set; later ones
    take precedence. Code that the first two name needs trust. Register with ``cls=KeyCommand``.

    Parameters
    ----------
    command : Callable
        Function of the mapping and its own options.
    names : Sequence[str], optional
        Keys shown in the command's help; by default those of every run.
    """
    groups: dict[str, str] = {}
    if names is None:
        groups = {name: group for group, inside in _GROUPS.items() for name in inside.split()}
        # Keys of features need no entry here.
        placed = {*_FIRST, *groups}
        groups |= {name: "Features" for name in general_keys() if name not in placed}
        names = [*_FIRST, *groups]
    shown = {name: general_keys()[name] for name in names}

    def wrapped(**values: Any) -> None:
        config, assignments = values.pop("config"), values.pop("assignments")
        given = {name: values.pop(item.name) for name, item in shown.items()}
        typed = {name: value for name, value in given.items() if value is not None}
        typed.update(parse_assignment(text) for text in assignments or [])
        from_file = read_toml(config, pipe=True) if config else {}
        if config:
            check_keys_trusted(config, from_file, typed)
        keys = keys_to_resume(given.get("resume"), typed) | from_file | typed
        # Report typing errors before slow imports.
        check_names(keys)
        try:
            command(keys, **values)
        except UserError as error:
            raise (_located(error, config, from_file) if config else error) from error.__cause__

    options = _key_options(command.__name__, shown, groups)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    if groups:
        # A command's own options precede its keys, or follow them if grouped.
        own = [p.replace(annotation=_grouped(p.annotation)) for p in own]
    return _as_command(wrapped, command, [*options, *own] if groups else [*own, *options])


def _key_options(
    command: str, shown: Mapping[str, Field[Any]], groups: Mapping[str, str]
) -> list[inspect.Parameter]:
    """Return the options of a command for keys, --config and --set."""
    defaults: dict[str, Any] = {}
    if command in ("serve", "up"):
        # The default for real devices, which are usually few.
        defaults["strategy"] = FEW_DEVICES
    if command == "reproduce":
        # Set by the suite.
        defaults = dict.fromkeys(shown)
    options = {
        item.name: _option(
            name,
            item,
            _OWN_HELP.get((command, name), item.metadata.get("help", "")),
            groups.get(name),
            defaults.get(name, item.default),
        )
        for name, item in shown.items()
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=None, annotation=annotation)
        for name, annotation in {**options, "config": _CONFIG, "assignments": _SET}.items()
    ]


def _located(error: UserError, path: Path, keys: Mapping[str, Value]) -> UserError:
    """Return an error with the file and line of its key."""
    for name, value in keys.items():
        try:
            check_key(name, value)
        except UserError as found:
            if str(found) == str(error):
                # A key in a table has no table name on its line.
                last = name.rpartition(".")[2]
                lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
                pattern = rf"[\s\"']*([\w-]+\.)?{re.escape(last)}[\s\"']*="
                line = next((n for n, text in enumerate(lines, 1) if re.match(pattern, text)), 0)
                return UserError(f"{path}{f', line {line}' if line else ''}: {error}")
    return error


def _option(name: str, item: Any, about: str, group: str | None, default: Any) -> Any:
    """Make the option of a key: text, which is checked in one place."""
    # Defaults of false and 0 are not shown: most switches are off, and the help explains 0.
    is_shown = default not in (None, "", "none") and default is not False
    if is_shown and (default or "0:" not in about):
        about += f" (default: {as_typed(default)})"
    common: Any = {"help": about, "show_default": False, "rich_help_panel": group}
    shown = shown_type(item, with_unit=True)
    return Annotated[str | None, typer.Option(f"--{name}", metavar=shown, **common)]


def _grouped(annotation: Any) -> Any:
    """Return an option shown in the output group."""
    option = copy(annotation.__metadata__[0])
    option.rich_help_panel = "Output"
    return Annotated[annotation.__origin__, option]


# -----------------------------------------------------------------------------
# `raceme list`.
# -----------------------------------------------------------------------------


_FLAGSHIPS = {"casa", "casa-plus", "cdfl", "csafl", "faacl", "flexcfl", "panicle"}
_ABLATIONS = {"casa-c", "casa-d", "cfl-async", "faacl-async", "feddrift-async", "feddrift-eager"}
_ABLATIONS |= {"fedsoft-async", "flexcfl-async", "g-fedavg", "ga-fedavg", "icfl-async"}
_ABLATIONS |= {"ifca-async", "nog-fedavg", "r-fedavg", "t-fedavg", "ta-fedavg"}
"""Ablations, and asynchronous variants without a paper of their own."""
_LISTS = {
    "strategies": ("strategy", STRATEGIES),
    "datasets": ("dataset", DATASETS),
    "partitions": ("partition", PARTITIONERS),
    "drifts": ("drift", DRIFTS),
    "models": ("model", MODELS),
    "device profiles": ("devices", DEVICES),
}
"""Lists by title, with the key of their names."""


def list_names(
    part: Annotated[
        str,
        typer.Argument(metavar="[PART]", help="a list, e.g. datasets; or part of a name or a key"),
    ] = "",
    keys: Annotated[
        bool,
        typer.Option(
            "--keys",
            help="also list every key of a run, or those with PART in name or text",
        ),
    ] = False,
) -> None:
    """List the strategies, datasets, partitions, drifts, models and device profiles."""
    console = Console()
    # A list is also selected by its key.
    found = {
        title: {
            name: text
            for name, text in sorted(registry.summaries().items())
            if part in name or part in (title, key)
        }
        for title, (key, registry) in _LISTS.items()
    }
    width = max((len(name) for entries in found.values() for name in entries), default=0)
    for title, entries in found.items():
        parts = {title: entries} if title != "strategies" else _strategies(entries)
        for heading, part_entries in parts.items():
            if part_entries:
                console.print(_table(heading, part_entries, width))
    # Read on demand only, since it imports the declaring modules.
    found_keys: dict[str, Key] = {}
    if keys or not width:
        every = all_keys()
        found_keys = {name: key for name, key in every.items() if part in name}
        if keys and not found_keys:
            # Other keys may mention the word in their meaning.
            found_keys = {name: key for name, key in every.items() if part in key.help.lower()}
    elif chosen := {key: part for key, registry in _LISTS.values() if registry.is_own(part)}:
        found_keys = {
            name: key
            for name, key in keys_of(chosen).items()
            if any(part in names for names in key.readers.values())
        }
    if found_keys and (keys or width):
        console.print(_keys_table(found_keys))
    elif not width:
        count = len(found_keys)
        keys_that = f"{count} keys that have it" if count > 1 else "a key that has it"
        hint = f" `raceme list {part} --keys` lists {keys_that}." if count else ""
        owners = " Settings of a device's owner, such as privacy, are not keys of a run: see "
        rest = f"{owners}docs/security.md." if keys else ""
        raise UserError(f"No match for '{part}'.{hint or ' `raceme list` lists all names.'}{rest}")


def _strategies(entries: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Divide strategies into flagships and installed ones, published baselines, and ablations."""
    parts: dict[str, dict[str, str]] = {
        "strategies": {},
        "strategies: published baselines": {},
        "strategies: ablations and variants": {},
    }
    main, published, ablations = parts.values()
    first = _FLAGSHIPS | {entry.name for entry in entry_points(group=STRATEGIES.group)}
    for name, text in entries.items():
        part = main if name in first else ablations if name in _ABLATIONS else published
        part[name] = text
    return parts


def _table(title: str, entries: dict[str, str], width: int) -> Table:
    table = _empty_table(title)
    table.add_column(no_wrap=True, min_width=width, style="cyan")
    table.add_column()
    for name, summary in entries.items():
        table.add_row(name, escape(summary))
    return table


def _keys_table(keys: Mapping[str, Key]) -> Table:
    """Return keys with meaning, reader, type, unit and default.

    Two columns, to be readable in 80 characters.
    """
    table = _empty_table("keys")
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, key in keys.items():
        # A strategy's prefix already names the reader.
        readers = [] if "." in name else [", ".join(names) for names in key.readers.values()]
        meaning = f"{'; '.join(readers)}: {key.help}" if readers else key.help
        default = "empty" if key.default == "" else as_typed(key.default)
        value = " ".join(filter(None, (key.type, key.unit))) + f", default {default}"
        table.add_row(name, Text.assemble(meaning, "\n", (value, "dim")))
    return table


def _empty_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2),
        show_header=False,
    )
