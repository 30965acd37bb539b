"""Datasets of sensors: human activity, air quality, bearings, gases and spoken digits.

HARBox and IMU are the two datasets of Ouyang et al., "ClusterFL: a similarity-aware federated
learning system for human activity recognition", 2021, in the folders in which they are published.
UCI HAR is taken from .npz files, as any other is by ``npz-folder``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.options import option
from raceme.datasets import npz, source
from raceme.datasets.npz import NpzFolder, recording, standardised
from raceme.datasets.source import (
    Arrays,
    Dataset,
    DataShape,
    Indices,
    Labels,
    Source,
    Target,
    cached,
)

_Key = tuple[Any, ...]


class Recordings(Source, ABC):
    """A dataset of files whose names say what is in them.

    Attributes
    ----------
    name : str
        Name in the registry of datasets, also in error messages.
    folders : tuple[str, ...]
        Folders under data-root, in the order in which they are searched.
    pattern : str
        Pattern of the files' names.
    wanted, expected : str
        Required content of data-root and of the files, for error messages.
    """

    has_clients = True

    name: str
    folders: tuple[str, ...]
    pattern: str
    wanted: str
    expected = ""

    @staticmethod
    def _key(path: Path) -> _Key | None:
        """Return what a file's name says, by which files are ordered; None for a foreign file."""
        return (path.name,)

    @abstractmethod
    def _read(self, path: Path, key: _Key) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a file's inputs and labels."""

    def _files(self, config: RunConfig) -> dict[_Key, Path]:
        """Return the files in order, by key."""

        def find(folder: Path) -> dict[_Key, Path]:
            named = ((self._key(path), path) for path in folder.glob(self.pattern))
            return dict(sorted((key, path) for key, path in named if key is not None))

        hint = f"Expected: {self.expected}." if self.expected else ""
        return source.find_under(config, self.name, self.folders, find, self.wanted, hint)

    def _arrays(self, files: Mapping[_Key, Path]) -> Arrays:
        """Return the concatenated inputs and labels of files, and the number of each."""
        paths = list(files.values())
        return cached(
            self.name,
            paths,
            (3,),
            lambda: npz.stacked(self._read(files[key], key) for key in files),
        )


# -----------------------------------------------------------------------------
# Human activity.
# -----------------------------------------------------------------------------


HAR_WINDOW = 100
"""Readings in a window of HARBox and IMU."""
AXES = 9
"""Three axes each of accelerometer, gyroscope and magnetometer."""

_WHERE = "from https://github.com/xmouyang/FL-Datasets-for-HAR"
_Window = NDArray[np.float32]


class UciHar(NpzFolder):
    """UCI HAR: 6 activities of 30 people, recorded by a phone at the waist (data-root).

    Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones",
    ESANN 2013.
    """

    default_model = "cnn1d"
    inner = ("uci_har_by_person", "uci-har")


class _Activities(Recordings):
    """Windows of motion, in one text file per person and activity: the key of a file."""

    default_model = "mlp"
    default_lr = 0.01

    activities: tuple[str, ...]
    delimiter: str | None = None
    first_column = 0
    """Column from which on a line has readings; a time may precede them."""

    def load(self, config: RunConfig) -> Dataset:
        """Return the windows of the first people, shape (N, 900)."""
        files = self._files(config)
        people = list(dict.fromkeys(person for person, _ in files))
        source.check_clients(
            config,
            len(people),
            f"{self.name} has only {len(people)} people with files under {config.data_root}. Take "
            f"clients={len(people)}.",
        )
        groups, people = self._groups(people), people[: config.num_clients]
        files = {key: path for key, path in files.items() if key[0] in people}
        # Text files take long to read.
        arrays = self._arrays(files)
        owner = np.repeat([people.index(person) for person, _ in files], arrays["sizes"])
        users = tuple(np.flatnonzero(owner == number) for number in range(len(people)))
        for person, own in zip(people, users, strict=True):
            if len(own) < 2:
                raise UserError(f"'{person}' has only {len(own)} windows: at least 2 are needed.")
        return Dataset(
            x=arrays["x"],
            y=np.array(arrays["y"], np.int64),
            num_classes=len(self.activities),
            users=users,
            groups=groups[: len(people)],
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((HAR_WINDOW * AXES,), len(self.activities))

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of people with files, or of all if files are not needed."""
        if not config.data_root:
            return self.default_clients
        return len({person for person, _ in self._files(config)})

    def _groups(self, people: Sequence[Any]) -> tuple[int | None, ...]:
        """Return the true groups of all people."""
        return (None,) * len(people)

    def _read(self, path: Path, key: _Key) -> tuple[_Window, Indices]:
        """Read numbers, 900 of which are a window."""
        values = _numbers(path, self.delimiter)[:, self.first_column :]
        if values.size % (HAR_WINDOW * AXES) or (self.first_column and values.shape[1] != AXES):
            layout = f" in {AXES} columns after a time" if self.first_column else ""
            raise UserError(
                f"{path} must hold a multiple of {HAR_WINDOW * AXES} numbers{layout}, got shape "
                f"{values.shape}."
            )
        windows = values.reshape(-1, HAR_WINDOW * AXES).astype(np.float32)
        return windows, np.full(len(windows), key[1])


class HarBox(_Activities):
    """HARBox: 5 activities of up to 120 people, recorded by their own phones (data-root).

    Each axis is standardised over all people (our reading; the papers do not state it), because
    units differ by two orders of magnitude.
    """

    target_accuracy = 0.75
    default_clients = 120

    name = "harbox"
    activities = ("Call", "Hop", "typing", "Walk", "Wave")
    folders = ("large_scale_HARBox", "HARBox", "harbox", "")
    pattern = "*/*_train.txt"
    first_column = 1
    wanted = f"large_scale_HARBox/ with <number>/<activity>_train.txt, {_WHERE}"

    def load(self, config: RunConfig) -> Dataset:
        """Return the standardised windows of the first people."""
        dataset = super().load(config)
        return replace(dataset, x=standardised_windows(dataset.x))

    @staticmethod
    def _key(path: Path) -> _Key | None:
        person, activity = path.parent.name, path.name.removesuffix("_train.txt")
        known = person.isdigit() and activity in HarBox.activities
        return (int(person), HarBox.activities.index(activity)) if known else None


class Imu(_Activities):
    """IMU: 3 activities of 7 people in 2 groups, from ClusterFL (data-root).

    The windows are normalised as published. People whose file names begin with the same letters
    were recorded at one place, a true group.
    """

    target_accuracy = 0.8
    default_clients = 7

    name = "imu"
    activities = ("walk", "up", "down")
    folders = ("imu_data_7", "IMU", "imu", "")
    pattern = "*.txt"
    delimiter = ","
    wanted = f"imu_data_7/ with <letters>_<number>_<activity>_nor.txt, {_WHERE}"

    @staticmethod
    def _key(path: Path) -> _Key | None:
        pattern = rf"([a-z]+_?\d+)_({'|'.join(Imu.activities)})(_nor)?\.txt"
        match = re.fullmatch(pattern, path.name, re.I)
        return match and (match[1], Imu.activities.index(match[2].lower()))

    def _groups(self, people: Sequence[Any]) -> tuple[int | None, ...]:
        places = [re.split(r"_|\d", person)[0] for person in people]
        return tuple(sorted(set(places)).index(place) for place in places)


def standardised_windows(x: NDArray[Any]) -> _Window:
    """Standardise each axis of the sensors.

    Parameters
    ----------
    x : NDArray
        Windows, shape (N, readings x axes), the axes of a reading side by side.
    """
    readings = np.asarray(x, np.float32).reshape(len(x), -1, AXES)
    mean = readings.mean(axis=(0, 1), dtype=np.float64)
    deviation = readings.std(axis=(0, 1), dtype=np.float64)
    # Constant axes become zero.
    scaled = (readings - mean) / np.where(deviation > 0, deviation, 1.0)
    standard: _Window = scaled.reshape(x.shape).astype(np.float32)
    return standard


def _numbers(path: Path, delimiter: str | None) -> NDArray[np.float64]:
    try:
        values = np.loadtxt(path, delimiter=delimiter, ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path} as numbers: {error}.") from None
    if values.size == 0 or not np.isfinite(values).all():
        raise UserError(f"{path} is empty, or holds numbers that are not finite.")
    return values


# -----------------------------------------------------------------------------
# Beijing Multi-Site Air Quality: the next hour's fine dust at twelve stations.
# -----------------------------------------------------------------------------


_POLLUTANTS = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3")
_WEATHER = ("TEMP", "PRES", "DEWP", "RAIN", "WSPM")
QUANTITIES = _POLLUTANTS + _WEATHER
"""Columns of `x`; the direction of the wind is an array of its own."""
CHANNELS = len(QUANTITIES) + 2
"""Inputs of each hour: the quantities, and the sine and cosine of the wind's direction."""

# Means and deviations of all stations and years, for devices with one station's data.
_MEAN = (79.79, 104.60, 15.83, 50.64, 1230.77, 57.37, 13.54, 1010.75, 2.491, 0.0645, 1.730)
_STD = (80.82, 91.77, 21.65, 35.13, 1160.18, 56.66, 11.44, 10.47, 13.79, 0.821, 1.246)
TARGET = Target("µg/m³", mean=_MEAN[0], std=_STD[0])

_DIRECTIONS = 16
_UNKNOWN = 255
_CARRIED = 24
"""Hours for which the last reading replaces missing ones; later the mean does."""
_START = np.datetime64("2013-03-01T00", "h")
_EXPECTED = (
    f"an .npz file for each station with x, numbers of shape (hours, {len(QUANTITIES)}), "
    f"NaN where missing ({', '.join(QUANTITIES)}), and wind_dir, 0 to {_DIRECTIONS - 1} clockwise "
    f"from north, {_UNKNOWN} where missing"
)
_MONTHS = {"month": 1, "season": 3, "year": 12}


@dataclass(frozen=True)
class AirOptions:
    """Options of windows and periods."""

    air_hours: int = option(24, "hours of readings in an input window", low=16)
    air_step: int = option(3, "hours between the starts of two samples", low=1)
    air_period: str = option(
        "season",
        "period of the drift in-order: month, season or year",
        among=tuple(_MONTHS),
    )


class BeijingAir(Recordings):
    """Beijing air quality: regression of the next hour's PM2.5 at 12 stations (data-root).

    Zhang et al., "Cautionary tales on air-quality improvement in Beijing", Proc. R. Soc. A 473,
    2017.
    """

    default_model = "mclr"
    default_lr = 0.01
    target_accuracy = 12.0
    default_clients = 12
    options_type = AirOptions

    name = "beijing-air"
    folders = ("beijing_air_by_station", "beijing-air", "")
    pattern = "*.npz"
    wanted = "beijing_air_by_station/ with a file for each station"
    expected = _EXPECTED

    def load(self, config: RunConfig) -> Dataset:
        """Return windows of (channels, hours), and the fine dust of the hour after each.

        A missing input is replaced by the last reading for at most a day, then by the mean. Windows
        whose next hour has no PM2.5 reading are dropped. The last `test-fraction` of each period
        and station is for testing, without overlap with training samples.
        """
        options: AirOptions = config.read(AirOptions)
        stations = self._files(config)
        where = next(iter(stations.values())).parent
        there = f"there are only {len(stations)} stations in {where}. Take fewer clients."
        source.check_clients(config, len(stations), there)
        arrays = self._arrays(dict(list(stations.items())[: config.num_clients]))
        hours, sizes = options.air_hours, arrays["sizes"].tolist()
        # A view, which stores each hour once.
        windows = np.lib.stride_tricks.sliding_window_view(arrays["x"], hours, axis=0)
        # The window that ends before hour t is sample t - hours; the last has no target.
        y = np.array(arrays["y"][hours:], np.float32)
        periods = np.concatenate([_periods(size, options.air_period) for size in sizes])[hours:]
        users, test_users = [], []
        for station in source.spans(sizes):
            own = station[: len(station) - hours : options.air_step]
            own = own[np.isfinite(y[own])]
            train, test = _divided(own, periods, config.test_fraction, hours)
            if not len(train) or not len(test):
                raise UserError(
                    f"A station of {where} has too few hours with readings of fine dust "
                    f"for windows of {hours} hours."
                )
            users.append(train)
            test_users.append(test)
        return Dataset(
            windows[: len(y)],
            y,
            num_classes=0,
            users=tuple(users),
            test_users=tuple(test_users),
            periods=periods,
            target=TARGET,
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        hours = config.read(AirOptions).air_hours
        return DataShape((CHANNELS, hours), num_classes=0, target=TARGET)

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of stations with files, or of all if files are not needed."""
        return len(self._files(config)) if config.data_root else self.default_clients

    def _read(self, path: Path, key: _Key) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        arrays = npz.arrays_of(path, ("x", "wind_dir"), f"Expected: {_EXPECTED}")
        x, wind = arrays["x"], arrays["wind_dir"]
        fits = x.dtype.kind == "f" and x.ndim == 2 and x.shape[1] == len(QUANTITIES)
        if not fits or wind.shape != x.shape[:1] or wind.dtype.kind not in "iu":
            raise UserError(
                f"{path}: x is {x.dtype} of shape {x.shape}, wind_dir {wind.dtype} of {wind.shape}."
                f" Expected: {_EXPECTED}."
            )
        scaled = (x.astype(np.float64) - _MEAN) / _STD
        return _filled(np.column_stack([scaled, _wind(wind)])), scaled[:, 0].astype(np.float32)


def _wind(direction: NDArray[Any]) -> NDArray[np.float64]:
    """Return sine and cosine of directions in sixteenths, NaN where unknown, shape (hours, 2)."""
    angle = np.where(direction < _DIRECTIONS, direction * (2 * np.pi / _DIRECTIONS), np.nan)
    return np.column_stack([np.sin(angle), np.cos(angle)])


def _filled(series: NDArray[np.float64]) -> NDArray[np.float32]:
    """Fill gaps with the last reading for at most a day, then with the mean, 0."""
    rows = np.arange(len(series))[:, np.newaxis]
    last = np.maximum.accumulate(np.where(np.isfinite(series), rows, -1), axis=0)
    carried = np.take_along_axis(series, np.maximum(last, 0), axis=0)
    known = (last >= 0) & (rows - last <= _CARRIED)
    return np.where(known, carried, 0.0).astype(np.float32)


def _periods(hours: int, period: str) -> Indices:
    """Return the period of each hour from the first of March 2013 on, counted from 0.

    Seasons are those of meteorology, which begin with a month: March to May is spring. Years
    begin with March too.
    """
    months = (_START + np.arange(hours)).astype("datetime64[M]") - _START.astype("datetime64[M]")
    numbers: Indices = months.astype(np.int64) // _MONTHS[period]
    return numbers


def _divided(own: Indices, periods: Labels, share: float, hours: int) -> tuple[Indices, Indices]:
    """Split a station's samples: the last of each period are for testing, between gaps.

    A sample covers its window and the next hour. Training and test samples share no hour.
    """
    train, test = [], []
    tested_until = -1
    for period in np.unique(periods[own]):
        samples = own[periods[own] == period]
        _, tested = source.with_tail(samples, share)
        apart = (samples + hours < tested[0]) & (samples > tested_until)
        test.append(tested)
        train.append(samples[apart])
        tested_until = int(tested[-1]) + hours
    return np.concatenate(train), np.concatenate(test)


# -----------------------------------------------------------------------------
# HIT bearings: vibration of rolling bearings on two test rigs at three speeds.
# -----------------------------------------------------------------------------


BEARING_WINDOW = 2048
"""Readings in a window, at 51.2 kHz."""
FAULTS = 7


class HitBearing(Recordings):
    """HIT bearing faults: 7 conditions from vibration, 2 machines at 3 speeds (data-root).

    Harbin Institute of Technology, sensing and measurement laboratory.
    """

    default_model = "cnn1d"
    default_clients = 24
    fixed_shape = DataShape((BEARING_WINDOW,), FAULTS)

    name = "hit-bearing"
    folders = ("hit_bearing_by_machine", "hit-bearing", "")
    pattern = "*_*rpm.npz"
    wanted = "hit_bearing_by_machine/ with such files"
    expected = (
        "<machine>_<speed>rpm.npz for each machine and speed, each with x, numbers of shape "
        f"(windows, {BEARING_WINDOW}) in the order of time, and y, whole numbers from 0 to "
        f"{FAULTS - 1}"
    )

    def load(self, config: RunConfig) -> Dataset:
        """Return the windows; a client has a segment of one machine's recordings at one speed.

        Recordings already have mean 0 and deviation 1. A client's last windows of each fault are
        for testing, since neighbours are similar.
        """
        files = self._files(config)
        what = f"hit-bearing has {len(files)} machines and speeds"
        sharers = source.shared_out(config, len(files), what)
        arrays = self._arrays(files)
        y = np.array(arrays["y"], np.int64)
        machines = sorted({machine for machine, _ in files})
        users: list[Indices] = []
        test_users: list[Indices] = []
        groups: list[int] = []
        positions = source.spans(arrays["sizes"].tolist())
        for key, clients, own in zip(files, sharers, positions, strict=True):
            for part in range(len(clients)):
                train, test = _stretch(own, y, part, len(clients), config.test_fraction)
                if not len(train):
                    raise UserError(
                        f"{files[key]} has too few windows for {len(clients)} clients: take fewer."
                    )
                users.append(train)
                test_users.append(test)
                groups.append(machines.index(key[0]))
        return Dataset(
            arrays["x"],
            y,
            num_classes=FAULTS,
            users=tuple(users),
            test_users=tuple(test_users),
            groups=tuple(groups),
        )

    @staticmethod
    def _key(path: Path) -> _Key | None:
        match = re.fullmatch(r"(.+)_(\d+)rpm", path.stem)
        return match and (match[1], int(match[2]))

    def _read(self, path: Path, key: _Key) -> tuple[NDArray[Any], Indices]:
        # Windows stay in half precision.
        return recording(path, (BEARING_WINDOW,), FAULTS, np.float16, self.expected)


def _stretch(
    own: Indices, y: Indices, part: int, parts: int, share: float
) -> tuple[Indices, Indices]:
    """Return one part of a file, a segment per fault, as training and test samples."""
    train, test = [], []
    for fault in np.unique(y[own]):
        kept, tested = source.with_tail(np.array_split(own[y[own] == fault], parts)[part], share)
        train.append(kept)
        test.append(tested)
    return np.concatenate(train), np.concatenate(test)


# -----------------------------------------------------------------------------
# Gas Sensor Array Drift: six gases measured over three years by ageing sensors.
# -----------------------------------------------------------------------------


FEATURES = 128
"""Eight features of each of sixteen sensors."""
GASES = 6


class GasDrift(Recordings):
    """Gas sensor drift: 6 gases in up to 10 batches over 36 months (data-root).

    Vergara et al., "Chemical gas sensor drift compensation using classifier ensembles", Sensors and
    Actuators B 166, 2012.
    """

    default_model = "mlp"
    default_clients = 20
    fixed_shape = DataShape((FEATURES,), GASES)

    name = "gas-drift"
    folders = ("gas_drift_batches", "gas-drift", "")
    pattern = "batch_*.npz"
    wanted = "gas_drift_batches/batch_01.npz"
    expected = (
        "batch_01.npz, batch_02.npz, … in the order of time, each with x, numbers of shape "
        f"(samples, {FEATURES}), and y, whole numbers from 0 to {GASES - 1}"
    )

    def load(self, config: RunConfig) -> Dataset:
        """Return all batches, each shared by all clients; shape (N, 128).

        Features are standardised over the first batch only: later batches are unknown at
        installation, and their drift is preserved.
        """
        # Any of the batches may be missing.
        arrays = self._arrays(self._files(config))
        x, sizes = arrays["x"], arrays["sizes"]
        batch = np.repeat(np.arange(len(sizes)), sizes)
        y = np.array(arrays["y"], np.int64)
        first = x[batch == 0].astype(np.float64)
        std = first.std(axis=0)
        return Dataset(
            x,
            y,
            num_classes=GASES,
            mean=first.mean(axis=0).astype(np.float32),
            std=np.where(std > 0, std, 1.0).astype(np.float32),
            users=_dealt(y, batch, config),
            periods=batch,
        )

    def _read(self, path: Path, key: _Key) -> tuple[NDArray[Any], Indices]:
        return recording(path, (FEATURES,), GASES, np.float32, self.expected)


def _dealt(y: Indices, batch: Indices, config: RunConfig) -> tuple[Indices, ...]:
    """Divide every batch, and each gas in it, equally among the clients."""
    rng = source.generator(config.seed, "gas-drift")
    order = rng.permutation(len(y))
    # Sorted by batch and gas, shuffled within, and dealt in turn.
    order = order[np.lexsort((y[order], batch[order]))]
    return tuple(
        np.sort(order[client :: config.num_clients]) for client in range(config.num_clients)
    )


# -----------------------------------------------------------------------------
# Free Spoken Digit Dataset: ten digits by a few speakers.
# -----------------------------------------------------------------------------


_WINDOW_AXES = 3


class Fsdd(NpzFolder):
    """FSDD: log-mel spectra of spoken digits, several clients per speaker (data-root).

    Jackson, "Free Spoken Digit Dataset", https://github.com/Jakobovski/free-spoken-digit-dataset.
    """

    default_model = "cnn"
    default_clients = 24
    inner = ("fsdd_by_speaker", "fsdd")

    def load(self, config: RunConfig) -> Dataset:
        """Return the recordings as images of one channel; the speaker is a client's true group.

        Clients are divided evenly among the speakers, in order; a speaker's clients get its
        recordings in turn, with equal numbers of every digit.
        """
        whole = self._unscaled(config, None)
        assert whole.users is not None
        if whole.target or whole.x.ndim != _WINDOW_AXES or whole.test_users is not None:
            raise UserError(
                f"{config.data_root} holds no spectra of speakers: expected x of shape "
                "(recordings, bands, times). Take dataset npz-folder for other data."
            )
        speakers = len(whole.users)
        held = f"fsdd has {speakers} speakers"
        sharers = source.shared_out(config, speakers, held)
        parts = [
            (own[number :: len(clients)], speaker)
            for speaker, (own, clients) in enumerate(zip(whole.users, sharers, strict=True))
            for number in range(len(clients))
        ]
        if min(len(own) for own, _ in parts) < 2:
            raise UserError(
                f"fsdd has too few recordings for {config.num_clients} clients: take fewer."
            )
        return standardised(
            replace(
                whole,
                x=whole.x[:, np.newaxis],
                users=tuple(own for own, _ in parts),
                groups=tuple(speaker for _, speaker in parts),
            )
        )

    def count_clients(self, config: RunConfig) -> int:
        """Return the default number of clients."""
        return self.default_clients
