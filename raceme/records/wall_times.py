"""When evaluations were on this machine's clock: ``wall-times.csv``.

The run store knows virtual time only, so that two runs with one seed have the same contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from raceme.protocol.events import Evaluated, Event
from raceme.records.files import atomic_write

FILE_NAME = "wall-times.csv"
_HEAD = "time,seconds"


class WallTimes:
    """The writer of ``wall-times.csv``, an observer of the run: a line per evaluation.

    A disk without room for it ends no run.

    Parameters
    ----------
    folder : Path
        The folder of the run.
    wall_time : Callable
        Returns the seconds that the run has taken.
    after : float, optional
        The run resumes at this virtual time: later lines of the file are dropped.
    """

    def __init__(
        self, folder: Path, wall_time: Callable[[], float], after: float | None = None
    ) -> None:
        self._path, self._wall_time = folder / FILE_NAME, wall_time
        kept = [] if after is None else [row for row in read_wall_times(folder) if row[0] <= after]
        with suppress(OSError), atomic_write(self._path) as path:
            path.write_text("".join(f"{line}\n" for line in (_HEAD, *_lines(kept))))

    def observe(self, event: Event) -> None:
        """Write the line of an evaluation; other events are none of its."""
        if isinstance(event, Evaluated):
            with suppress(OSError), self._path.open("a") as file:
                file.writelines(f"{line}\n" for line in _lines([(event.time, self._wall_time())]))


def read_wall_times(folder: Path) -> list[tuple[float, float]]:
    """Read the time and the seconds on the wall of each evaluation; nothing if there is no file.

    A line that is not whole, or is something else, ends what is read: the run may be writing it.
    """
    rows: list[tuple[float, float]] = []
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return rows
    for line in text.splitlines(keepends=True)[1:]:
        try:
            time, seconds = map(float, line.split(","))
        except ValueError:
            break
        if not line.endswith("\n"):
            break
        rows.append((time, seconds))
    return rows


def _lines(rows: Iterable[tuple[float, float]]) -> Iterable[str]:
    return (f"{float(time)!r},{seconds:.3f}" for time, seconds in rows)
