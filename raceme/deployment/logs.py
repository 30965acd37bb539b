"""The logs of `raceme up`: every line in files, and on the terminal those that a person reads."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from pathlib import Path

FOLDER = "logs"
_STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ([A-Z]+) (.*)")
_ROUTINE = re.compile(r"run \d+: \S.*: done in [\d.]+ s, sent in [\d.]+ s$")


class Logs:
    """Files in a run's folder, one per process, with all that it has printed.

    Lines are kept until the folder is the run's: whoever begins a run wants an empty one. A disk
    without room for them ends no run.

    Parameters
    ----------
    out : Path
        The run's folder.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / FOLDER
        self._store = out / "run.sqlite"
        self._waiting: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Append a line to the log of a process."""
        with self._lock:
            self._waiting.append((name, line))
            if self._store.exists():
                with suppress(OSError):
                    self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.folder.mkdir(exist_ok=True)
        for name, line in waiting:
            path = self.folder / f"{name.replace(' ', '-')}.log"
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def readable(line: str) -> str | None:
    """Return what of a line is for a person at a terminal; None for the routine of a device.

    Every task that a device has done is told by the server, too, as an update or an evaluation.
    """
    stamped = _STAMPED.fullmatch(line)
    if stamped is None:
        return line
    level, text = stamped.groups()
    if level != "INFO":
        return f"{level}: {text}"
    return None if _ROUTINE.match(text) else text
