"""Where a page's data come from: the folder of a run, read as it fills."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raceme.config import read_toml
from raceme.config.errors import UserError
from raceme.config.reading import ReadingError, parse_json, read_text
from raceme.dashboard.columns import Columns
from raceme.records.following import StoreFollower
from raceme.records.likeness import flattened, positions
from raceme.records.positions import SCALE, PositionsReader, Snapshot, steps_of
from raceme.records.similarity import FILE_NAME as SIMILARITY
from raceme.records.similarity import read_similarity
from raceme.records.wall_times import FILE_NAME as WALL_TIMES
from raceme.records.wall_times import read_wall_times

CONFIG, SUMMARY = "config.toml", "summary.json"


class RunSource:
    """The folder of a run as pieces of JSON, each of which adds to those before.

    Parameters
    ----------
    folder : Path
        What `raceme run` writes; it may not have begun.
    most_scores : int
        Clients' own accuracies that are told at most, about: 8 MB of numbers by default. Of more,
        every second evaluation tells them, then every third, and so on.
    most_positions : int
        Positions on the map that are told at most, about, in the same way.

    Attributes
    ----------
    pieces : list[str]
        All of them so far.
    generation : int
        Another one whenever the pieces are others: the run has begun anew, or the dashboard has.
    trouble : str
        Why the folder cannot be read now; empty if it can.
    """

    def __init__(
        self, folder: Path, most_scores: int = 2_000_000, most_positions: int = 1_000_000
    ) -> None:
        self.folder = folder
        self.pieces: list[str] = []
        self.generation = new_generation()
        self.trouble = ""
        self._follower = StoreFollower(folder)
        self._most_scores, self._most_positions = most_scores, most_positions
        self._begin()

    def _begin(self) -> None:
        """Forget all that was read."""
        self._columns = Columns(self._most_scores)
        self._stamps: dict[str, tuple[int, int]] = {}
        self._walls = 0
        self._positions = PositionsReader(self.folder)
        self._placed: dict[str, int] = {}
        self._flat: dict[str, Sequence[float]] = {}
        self._snapshots, self._told_positions = 0, 0

    def poll(self) -> bool:
        """Read what has come; return whether there is more already.

        A folder that cannot be read is said in `trouble` and tried again the next time.
        """
        try:
            self._tell_files()
            reading = self._follower.read()
        except UserError as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        if reading.restarted:
            self.generation, self.pieces = new_generation(), []
            self._begin()
            self._tell_files()
        for event in reading.events:
            self._columns.observe(event)
        self._tell(self._columns.take())
        return reading.more

    def read_all(self) -> None:
        """Read until there is no more.

        Raises
        ------
        UserError
            The folder cannot be read.
        """
        while self.poll():
            pass
        if self.trouble:
            raise UserError(self.trouble)

    def _tell(self, piece: Mapping[str, Any]) -> None:
        if piece:
            self.pieces.append(as_json(piece))

    def _tell_files(self) -> None:
        """Tell what stands beside the store, whenever it is new."""
        if self._is_new(CONFIG):
            config = read_toml(self.folder / CONFIG)
            names = ("strategy", "dataset", "seed", "max-updates", "max-time", "target-accuracy")
            told = {name: config.get(name) for name in names}
            self._tell({"run": {"name": self.folder.name, **told}})
        if self._is_new(SUMMARY):
            try:
                self._tell({"summary": parse_json(read_text(self.folder / SUMMARY))})
            except ReadingError as error:
                raise UserError(f"{self.folder / SUMMARY} is damaged: {error}.") from None
        for snapshot in self._positions.read():
            self._snapshots += 1
            stride = 1 + self._told_positions // self._most_positions
            if (self._snapshots - 1) % stride == 0:
                self._tell_snapshot(snapshot, lasting=False)
        if self._is_new(SIMILARITY) and not self._snapshots:
            self._tell_similarity()
        if self._is_new(WALL_TIMES):
            rows = read_wall_times(self.folder)[self._walls :]
            if rows:
                self._walls += len(rows)
                times, walls = (list(column) for column in zip(*rows, strict=True))
                self._tell({"walls": {"time": times, "wall": walls}})

    def _tell_similarity(self) -> None:
        """Tell where clients lie by what the method found of their similarity in the end."""
        found = read_similarity(self.folder)
        if found is not None and len(found.clients):
            points = steps_of(positions(found.matrix))
            self._tell_snapshot(Snapshot(self._columns.now, found.clients, points), lasting=True)

    def _tell_snapshot(self, snapshot: Snapshot, *, lasting: bool) -> None:
        """Tell where clients lie from a time on, or at all times."""
        new = [client for client in snapshot.clients if client not in self._placed]
        self._placed |= {name: len(self._placed) + index for index, name in enumerate(new)}
        self._told_positions += len(snapshot.clients)
        flat = flattened(snapshot.points / SCALE, snapshot.clients, self._flat)
        self._flat.update(zip(snapshot.clients, flat.tolist(), strict=True))
        frame = {
            "time": snapshot.time,
            "lasting": lasting,
            "new": new,
            "clients": [self._placed[client] for client in snapshot.clients],
            "points": base64.b64encode(steps_of(flat).tobytes()).decode(),
        }
        self._tell({"frame": frame})

    def _is_new(self, name: str) -> bool:
        try:
            status = (self.folder / name).stat()
        except OSError:
            return False
        stamp = status.st_mtime_ns, status.st_size
        if self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        return True


def as_json(piece: Mapping[str, Any]) -> str:
    """Return a piece as compact JSON on one line."""
    return json.dumps(piece, separators=(",", ":"), allow_nan=False)


def new_generation() -> int:
    """Return a number that is no other's: a browser that comes back may have seen other pieces."""
    return secrets.randbits(48)
