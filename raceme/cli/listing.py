"""`raceme list`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from raceme.core.config import all_keys
from raceme.core.errors import UserError
from raceme.core.options import Key, Value
from raceme.core.registry import DATASETS, DEVICES, DRIFTS, MODELS, PARTITIONERS, STRATEGIES

_LISTS = {
    "strategies": ("strategy", STRATEGIES),
    "datasets": ("dataset", DATASETS),
    "partitions": ("partition", PARTITIONERS),
    "drifts": ("drift", DRIFTS),
    "models": ("model", MODELS),
    "device profiles": ("devices", DEVICES),
}
"""Each list by its title, with the key that takes one of its names."""


def list_names(
    part: Annotated[
        str,
        typer.Argument(
            metavar="[PART]", help="a list, e.g. datasets; or names and keys with this in them"
        ),
    ] = "",
    keys: Annotated[bool, typer.Option("--keys", help="also list every key of a run")] = False,
) -> None:
    """Show the strategies, datasets, partitions, drifts, models and device profiles."""
    console = Console()
    # A list is also asked for by the key that takes one of its names.
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
        if entries:
            console.print(_table(title, entries, width))
    # Read only if need be: what declares keys has to be imported for them.
    found_keys: dict[str, Key] = {}
    if keys or not width:
        found_keys = {name: key for name, key in all_keys().items() if part in name}
    if keys and found_keys:
        console.print(_keys_table(found_keys))
    elif not width:
        count = len(found_keys)
        keys_that = f"{count} keys that have it" if count > 1 else "a key that has it"
        hint = f" `raceme list {part} --keys` lists {keys_that}." if count else ""
        raise UserError(f"Nothing that there is to choose from has '{part}' in its name.{hint}")


def _table(title: str, entries: dict[str, str], width: int) -> Table:
    table = _empty_table(title)
    table.add_column(no_wrap=True, min_width=width, style="cyan")
    table.add_column()
    for name, summary in entries.items():
        table.add_row(name, escape(summary))
    return table


def _keys_table(keys: Mapping[str, Key]) -> Table:
    """Return keys with what they mean, what reads them, their type, unit and default.

    Two columns, as more of them would be too narrow to read on a terminal of 80.
    """
    table = _empty_table("keys")
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, key in keys.items():
        # That a key with a strategy's name in front is the strategy's goes without saying.
        readers = [] if "." in name else [", ".join(names) for names in key.readers.values()]
        meaning = f"{'; '.join(readers)}: {key.help}" if readers else key.help
        default = "empty" if key.default == "" else _plain(key.default)
        value = " ".join(filter(None, (key.type, key.unit))) + f", default {default}"
        table.add_row(name, Text.assemble(meaning, "\n", (value, "dim")))
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
