"""A table as text: for the terminal and as Markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

_BOLD = re.compile(r"\*\*([^*]+)\*\*")


@dataclass(frozen=True)
class Text:
    """A table as text.

    Attributes
    ----------
    title : str
        What it shows.
    columns : tuple[str, ...]
        Their heads.
    rows : tuple[tuple[str, ...], ...]
        Their cells.
    lines : tuple[str, ...]
        What is said below.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...] = ()

    def rich(self) -> Table:
        """Return it for the terminal."""
        table = Table(
            title=escape(self.title),
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1),
            collapse_padding=True,
            pad_edge=False,
        )
        # Names may wrap between words; a terminal that is too narrow must not lose them.
        words = [word for row in self.rows for word in row[0].split()]
        for index, column in enumerate(self.columns):
            table.add_column(
                column.replace("-", "-\n") if index else column,
                justify="right" if index else "left",
                no_wrap=index > 0,
                min_width=max(map(len, words), default=0) if index == 0 else None,
                style=None if index else "cyan",
            )
        for row in self.rows:
            table.add_row(*(_BOLD.sub(r"[bold]\1[/bold]", escape(cell)) for cell in row))
        return table

    def markdown(self) -> str:
        """Return it as a Markdown table with its title and the lines below it."""
        heads = [column.replace("\n", " ") for column in self.columns]
        ruler = ["---", *("---:" for _ in heads[1:])]
        rows = [" | ".join(cells) for cells in (heads, ruler, *self.rows)]
        table = "\n".join(f"| {row} |" for row in rows)
        below = "".join(f"\n- {line}" for line in self.lines)
        return f"### {self.title}\n\n{table}\n" + (f"{below}\n" if below else "")
