"""What all tables of a run store share: rows on their way in, and what older formats lack."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from raceme.protocol.events import Event

Rows = defaultdict[str, list[tuple[Any, ...]]]
"""Rows that are not written yet, by table."""

Numbered = Iterator[tuple[int, Event]]
"""Events with their numbers."""


def number_of(value: float | None) -> float:
    """Return a number, or NaN where SQLite stored NULL for it."""
    return math.nan if value is None else value


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns that a table has: older formats have fewer, or no such table."""
    return {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
