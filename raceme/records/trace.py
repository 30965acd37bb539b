"""A run's events as JSON lines, for other programs: the file ``trace.jsonl`` of ``trace=true``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from raceme.config.errors import UserError
from raceme.protocol.events import Event, UpdateApplied
from raceme.protocol.measure import Measure
from raceme.records.files import atomic_write

FILE = "trace.jsonl"

Communication = Callable[[str, int, int], float]
"""Client id, bytes down and bytes up to the seconds that their transfer takes."""

_LONG = ("per_client", "steps", "groups")
"""What is said of every client at once: `run.sqlite` has it, and a line stays a line."""

log = logging.getLogger("raceme")


class TraceFile:
    """Writes a line for each event; an observer of a run, and a context manager around it.

    A full disk does not end a run: the file ends there, and `failure` says why.

    Parameters
    ----------
    folder : Path
        The run's folder.
    communication : Callable, optional
        How long transfers take, where that is known beforehand: on virtual time. Real devices say
        when they computed; the rest of a task's time is communication there.
    after : int
        Number of events of a resumed run; lines of later ones are dropped.

    Raises
    ------
    UserError
        The file cannot be written.
    """

    def __init__(
        self, folder: Path, communication: Communication | None = None, after: int = 0
    ) -> None:
        self.failure = ""
        self._communication, self._number = communication, after
        path = folder / FILE
        try:
            if after and path.is_file():
                _cut(path, after)
            self._file: TextIO = path.open("a" if after else "w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"Cannot write {path}: {error.strerror}.") from None

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as failed:
            self._fail(failed)

    def observe(self, event: Event) -> None:
        """Write the line of an event."""
        self._number += 1
        if self.failure:
            return
        line = {"number": self._number, **line_of(event, self._communication)}
        try:
            self._file.write(f"{json.dumps(line, ensure_ascii=True)}\n")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = error.strerror or str(error)
        log.error("%s is not written any more: %s", FILE, self.failure)


def line_of(event: Event, communication: Communication | None = None) -> dict[str, Any]:
    """Return what a line says of an event.

    Parameters
    ----------
    event : Event
        Any event.
    communication : Callable, optional
        How long transfers take, where that is known beforehand.

    Returns
    -------
    dict[str, Any]
        The event's kind and its fields; numbers that are not finite are null. Of an update also
        ``start`` and ``done``, in seconds of the run, and how many of the seconds between were
        ``compute`` and ``communication``, where that is known.
    """
    line: dict[str, Any] = {"event": type(event).__name__}
    for item in fields(event):
        if item.name not in _LONG:
            line[item.name] = _plain(getattr(event, item.name))
    if isinstance(event, UpdateApplied):
        compute, transfer = _spent(event, communication)
        line |= {
            "start": _plain(event.dispatched_at),
            "done": _plain(event.time),
            "compute": compute,
            "communication": transfer,
        }
    return line


def _spent(
    event: UpdateApplied, communication: Communication | None
) -> tuple[float | None, float | None]:
    """Return the seconds of a task that were computation and communication; None if unknown."""
    whole = event.time - event.dispatched_at
    if event.started_at is not None and event.finished_at is not None:
        compute = min(max(event.finished_at - event.started_at, 0.0), whole)
        return compute, whole - compute
    if communication is None:
        return None, None
    transfer = min(communication(event.client, event.bytes_down, event.bytes_up), whole)
    return whole - transfer, transfer


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Measure):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


def _cut(path: Path, after: int) -> None:
    """Keep the lines up to an event; a last line that is half written goes, too."""
    with (
        path.open(encoding="utf-8") as lines,
        atomic_write(path) as kept,
        kept.open("w", encoding="utf-8") as file,
    ):
        for line in lines:
            try:
                number = json.loads(line)["number"]
            except (ValueError, KeyError, TypeError):
                break
            if number > after:
                break
            file.write(line)
