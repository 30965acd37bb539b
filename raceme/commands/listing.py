"""`raceme list`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raceme.config import Value, all_keys


def list_names(
    keys: Annotated[bool, typer.Option("--keys", help="also list every key of a run")] = False,
) -> None:
    """Show the strategies, datasets, partitions, drifts, models and device profiles."""
    from raceme.config.registry import DATASETS, DRIFTS, MODELS, PARTITIONERS, STRATEGIES
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
