"""Human activity from motion sensors, a client for each person.

HARBox and IMU are the two datasets of Ouyang et al., "ClusterFL: a similarity-aware federated
learning system for human activity recognition", 2021, in the folders in which they are published.
UCI HAR is taken from .npz files, as any other is by ``npz-folder``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.npz_folder import NpzFolder
from raceme.datasets.source import Dataset, DataShape, Source

WINDOW = 100
"""Readings in a window of HARBox and IMU."""
AXES = 9
"""Three axes each of accelerometer, gyroscope and magnetometer."""

_WHERE = "https://github.com/xmouyang/FL-Datasets-for-HAR"
_Window = NDArray[np.float32]


@dataclass(frozen=True)
class Person:
    """Where one person's windows lie.

    Attributes
    ----------
    name : str
        As in the names of the files.
    files : Mapping[int, Path]
        The file with the windows of each activity.
    group : int or None
        True group, where the dataset has groups.
    """

    name: str
    files: Mapping[int, Path]
    group: int | None = None


class UciHar(NpzFolder):
    """UCI HAR: 6 activities of 30 people with a phone at the waist (.npz files under data-root).

    Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones",
    ESANN 2013.
    """

    default_model = "cnn1d"
    inner = ("uci_har_by_person", "uci-har")


class HarBox(Source):
    """HARBox: 5 activities of up to 120 people, from their own phones (files under data-root)."""

    default_model = "mlp"
    default_lr = 0.01
    target_accuracy = 0.75
    default_clients = 120
    has_clients = True

    activities = ("Call", "Hop", "typing", "Walk", "Wave")
    folders = ("large_scale_HARBox", "HARBox", "harbox")

    def load(self, config: RunConfig) -> Dataset:
        """Return the windows of the first people, by number, shape (N, 900).

        Our reading, as the papers say nothing of it: each axis of the sensors is brought to mean 0
        and deviation 1 over all people, because their units differ by two orders of magnitude.
        """
        people = _first(self._people(_folder(config, "harbox", self.folders)), config, "harbox")
        arrays = _cached("harbox", people, _harbox_windows)
        return _dataset(standardised(arrays["x"]), arrays, people, len(self.activities))

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((WINDOW * AXES,), len(self.activities))

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of people with files; of all, where files are not needed."""
        if not config.data_root:
            return self.default_clients
        return len(self._people(_folder(config, "harbox", self.folders)))

    def _people(self, root: Path) -> list[Person]:
        """Find ``<number>/<activity>_train.txt``."""
        found = []
        numbered = [path for path in root.iterdir() if path.name.isdigit() and path.is_dir()]
        for folder in sorted(numbered, key=lambda path: int(path.name)):
            paths = {i: folder / f"{name}_train.txt" for i, name in enumerate(self.activities)}
            files = {i: path for i, path in paths.items() if path.is_file()}
            if files:
                found.append(Person(folder.name, files))
        return found


class Imu(Source):
    """IMU: 3 activities of 7 people in 2 groups, from ClusterFL (files under data-root)."""

    default_model = "mlp"
    default_lr = 0.01
    target_accuracy = 0.8
    default_clients = 7
    has_clients = True

    activities = ("walk", "up", "down")
    folders = ("imu_data_7", "IMU", "imu")

    def load(self, config: RunConfig) -> Dataset:
        """Return the windows, which are normalised as published, shape (N, 900).

        People whose files begin with the same letters were recorded at one place: a true group.
        """
        people = _first(self._people(_folder(config, "imu", self.folders)), config, "imu")
        arrays = _cached("imu", people, _imu_windows)
        return _dataset(arrays["x"], arrays, people, len(self.activities))

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((WINDOW * AXES,), len(self.activities))

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of people with files; of all, where files are not needed."""
        if not config.data_root:
            return self.default_clients
        return len(self._people(_folder(config, "imu", self.folders)))

    def _people(self, root: Path) -> list[Person]:
        """Find ``<letters>_<number>_<activity>_nor.txt``."""
        pattern = re.compile(rf"(([a-z]+)_?\d+)_({'|'.join(self.activities)})(_nor)?\.txt", re.I)
        files: dict[str, dict[int, Path]] = {}
        places: dict[str, str] = {}
        for path in sorted(root.iterdir()):
            match = pattern.fullmatch(path.name)
            if match:
                name, place, activity = match[1], match[2], match[3].lower()
                files.setdefault(name, {})[self.activities.index(activity)] = path
                places[name] = place
        order = sorted(set(places.values()))
        return [Person(name, files[name], order.index(places[name])) for name in sorted(files)]


def standardised(x: NDArray[Any]) -> _Window:
    """Bring each axis of the sensors to mean 0 and deviation 1.

    Parameters
    ----------
    x : NDArray
        Windows, shape (N, readings x axes), the axes of a reading side by side.
    """
    readings = np.asarray(x, np.float32).reshape(len(x), -1, AXES)
    mean = readings.mean(axis=(0, 1), dtype=np.float64)
    deviation = readings.std(axis=(0, 1), dtype=np.float64)
    # An axis that never moves is left at zero.
    scaled = (readings - mean) / np.where(deviation > 0, deviation, 1.0)
    standard: _Window = scaled.reshape(x.shape).astype(np.float32)
    return standard


def _folder(config: RunConfig, name: str, candidates: Sequence[str]) -> Path:
    """Return the first folder of these under data-root, or data-root if it is one of them."""
    if not config.data_root:
        raise UserError(f"{name} needs the folder with its files: --data-root DIR (see {_WHERE}).")
    root = Path(config.data_root)
    found = [root / inner for inner in candidates if (root / inner).is_dir()]
    if root.name in candidates and root.is_dir():
        found.append(root)
    if not found:
        wanted = " or ".join(f"{inner}/" for inner in candidates)
        raise UserError(f"{name} is not under {root}: expected {wanted} there, from {_WHERE}.")
    return found[0]


def _first(people: Sequence[Person], config: RunConfig, name: str) -> Sequence[Person]:
    if len(people) < config.num_clients:
        raise UserError(
            f"Too many clients: {config.num_clients}, but {name} has only {len(people)} people "
            f"with files under {config.data_root}. Take clients={max(1, len(people))}."
        )
    return people[: config.num_clients]


def _cached(name: str, people: Sequence[Person], windows: Callable[[Path], _Window]) -> Arrays:
    """Read the text files of all these people, which takes long, or find that in the cache."""

    def read() -> Arrays:
        x, y, person = [], [], []
        for number, who in enumerate(people):
            for label, path in who.files.items():
                values = windows(path)
                x.append(values)
                y.append(np.full(len(values), label))
                person.append(np.full(len(values), number))
        return {
            "x": np.concatenate(x),
            "y": np.concatenate(y).astype(np.int64),
            "person": np.concatenate(person).astype(np.int64),
        }

    return cached(name, [path for who in people for path in who.files.values()], (), read)


def _dataset(
    x: NDArray[Any], arrays: Arrays, people: Sequence[Person], num_classes: int
) -> Dataset:
    users = tuple(np.flatnonzero(arrays["person"] == number) for number in range(len(people)))
    for who, own in zip(people, users, strict=True):
        if len(own) < 2:
            raise UserError(f"'{who.name}' has only {len(own)} windows: at least 2 are needed.")
    return Dataset(
        x=x,
        y=np.array(arrays["y"], np.int64),
        num_classes=num_classes,
        users=users,
        groups=tuple(who.group for who in people),
    )


def _harbox_windows(path: Path) -> _Window:
    """Read lines of ten numbers, the first of them a time; 100 lines are a window."""
    values = _numbers(path, None)
    if values.shape[1] != AXES + 1 or len(values) % WINDOW:
        raise UserError(
            f"{path} must hold {AXES + 1} numbers per line and a multiple of {WINDOW} lines, got "
            f"{values.shape[1]} and {len(values)}."
        )
    windows: _Window = values[:, 1:].reshape(-1, WINDOW * AXES).astype(np.float32)
    return windows


def _imu_windows(path: Path) -> _Window:
    """Read numbers separated by commas; 900 of them are a window."""
    values = _numbers(path, ",")
    if values.size % (WINDOW * AXES):
        raise UserError(f"{path} must hold a multiple of {WINDOW * AXES} numbers: {values.size}.")
    return values.reshape(-1, WINDOW * AXES).astype(np.float32)


def _numbers(path: Path, delimiter: str | None) -> NDArray[np.float64]:
    try:
        values = np.loadtxt(path, delimiter=delimiter, ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path} as numbers: {error}.") from None
    if values.size == 0 or not np.isfinite(values).all():
        raise UserError(f"{path} is empty, or holds numbers that are not finite.")
    return values
