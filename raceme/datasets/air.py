"""Beijing Multi-Site Air Quality: the next hour's fine dust at twelve stations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets import npz
from raceme.datasets.archive import read_arrays
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.source import Dataset, DataShape, Indices, Labels, Source, Target

QUANTITIES = (
    *("PM2.5", "PM10", "SO2", "NO2", "CO", "O3"),
    *("TEMP", "PRES", "DEWP", "RAIN", "WSPM"),
)
"""Columns of `x`; the direction of the wind is an array of its own."""
CHANNELS = len(QUANTITIES) + 2
"""Inputs of each hour: the quantities, and the sine and cosine of the wind's direction."""

# Means and deviations of all stations and years, so that a device needs no other's data.
_MEAN = (79.79, 104.60, 15.83, 50.64, 1230.77, 57.37, 13.54, 1010.75, 2.491, 0.0645, 1.730)
_STD = (80.82, 91.77, 21.65, 35.13, 1160.18, 56.66, 11.44, 10.47, 13.79, 0.821, 1.246)
TARGET = Target("µg/m³", mean=_MEAN[0], std=_STD[0])

_DIRECTIONS = 16
_UNKNOWN = 255
_CARRIED = 24
"""Hours for which a last reading stands in for missing ones; from then on it is the mean."""
_START = np.datetime64("2013-03-01T00", "h")
_FOLDERS = ("beijing_air_by_station", "beijing-air", "")
_EXPECTED = (
    f"Expected: an .npz file for each station with x, numbers of shape (hours, {len(QUANTITIES)}), "
    f"NaN where missing ({', '.join(QUANTITIES)}), and wind_dir, 0 to {_DIRECTIONS - 1} clockwise "
    f"from north, {_UNKNOWN} where missing"
)
_MONTHS = {"month": 1, "season": 3, "year": 12}


@dataclass(frozen=True)
class AirOptions:
    """Which hours are samples, and which of them go together in time."""

    air_hours: int = option(24, "hours of readings that the next one is told from", low=16)
    air_step: int = option(3, "hours from one sample to the next", low=1)
    air_period: str = option(
        "season",
        "what the drift in-order goes through: month, season or year",
        among=tuple(_MONTHS),
    )


class BeijingAir(Source):
    """Fine dust (PM2.5) of the next hour at 12 stations, a regression (files under data-root).

    Zhang et al., "Cautionary tales on air-quality improvement in Beijing", Proc. R. Soc. A 473,
    2017.
    """

    default_model = "mclr"
    default_lr = 0.01
    target_accuracy = 12.0
    default_clients = 12
    has_clients = True
    options_type = AirOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return windows of (channels, hours), and the fine dust of the hour after each.

        An input that is missing is the last reading before it, for at most a day, and then the
        mean. A window whose next hour has no reading of fine dust is no sample. Of each period of
        each station the last `test-fraction` is for testing, and no training sample reaches into
        it.
        """
        options: AirOptions = config.read(AirOptions)
        paths = _stations(config)
        if len(paths) < config.num_clients:
            raise UserError(
                f"Too many clients: {config.num_clients}, but there are only {len(paths)} stations "
                f"in {paths[0].parent}. Take fewer clients."
            )
        paths = paths[: config.num_clients]
        arrays = cached("beijing-air", paths, (1,), partial(_read, paths))
        hours, sizes = options.air_hours, arrays["sizes"].tolist()
        # A view: no hour is stored more than once, however many windows it is in.
        windows = np.lib.stride_tricks.sliding_window_view(arrays["x"], hours, axis=0)
        # The window that ends before hour t is sample t - hours; the last has no hour after it.
        y = np.array(arrays["y"][hours:], np.float32)
        periods = np.concatenate([_periods(size, options.air_period) for size in sizes])[hours:]
        users, test_users = [], []
        for start, end in itertools.pairwise(np.cumsum([0, *sizes]).tolist()):
            own = np.arange(start, end - hours, options.air_step)
            own = own[np.isfinite(y[own])]
            train, test = _divided(own, periods, config.test_fraction, hours)
            if not len(train) or not len(test):
                raise UserError(
                    f"A station of {paths[0].parent} has too few hours with readings of fine dust "
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
        """Return the number of stations with files; of all, where files are not needed."""
        return len(_stations(config)) if config.data_root else self.default_clients


def _stations(config: RunConfig) -> list[Path]:
    """Return the files of the stations in the order of their names."""
    found = npz.files_in(config.data_root, _FOLDERS)
    if not found:
        raise UserError(
            f"beijing-air is not under '{config.data_root}': there are no files in {_FOLDERS[0]}/: "
            f"--data-root DIR. {_EXPECTED}."
        )
    return found


def _read(paths: Sequence[Path]) -> Arrays:
    """Read the stations one after another: inputs (hours, channels), and the fine dust."""
    return npz.stacked(map(_station, paths))


def _station(path: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    with npz.explained(path, _EXPECTED):
        arrays = read_arrays(path, ("x", "wind_dir"))
    x, wind = arrays.get("x"), arrays.get("wind_dir")
    if x is None or wind is None or x.dtype.kind != "f" or x.ndim != 2:
        raise UserError(f"{path} lacks x or wind_dir, or holds others. {_EXPECTED}.")
    fits = x.shape[1] == len(QUANTITIES) and wind.shape == x.shape[:1]
    if not fits or wind.dtype.kind not in "iu":
        raise UserError(f"{path}: x is {x.shape} and wind_dir {wind.shape}. {_EXPECTED}.")
    scaled = (x.astype(np.float64) - _MEAN) / _STD
    return _filled(np.column_stack([scaled, _wind(wind)])), scaled[:, 0].astype(np.float32)


def _wind(direction: NDArray[Any]) -> NDArray[np.float64]:
    """Return sine and cosine of directions in sixteenths, NaN where unknown, shape (hours, 2)."""
    angle = np.where(direction < _DIRECTIONS, direction * (2 * np.pi / _DIRECTIONS), np.nan)
    return np.column_stack([np.sin(angle), np.cos(angle)])


def _filled(series: NDArray[np.float64]) -> NDArray[np.float32]:
    """Fill gaps with the last reading before them, for at most a day, and then with the mean, 0."""
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
    """Divide a station's samples: of each period the last are for testing, between gaps.

    A sample is of the hours of its window and of the hour after it: from its number to `hours`
    later. No hour of a training sample is one of a test sample, before it or after it.
    """
    train, test = [], []
    tested_until = -1
    for period in np.unique(periods[own]):
        samples = own[periods[own] == period]
        count = int(np.clip(round(share * len(samples)), 1, max(1, len(samples) - 1)))
        tested = samples[len(samples) - count :]
        apart = (samples + hours < tested[0]) & (samples > tested_until)
        test.append(tested)
        train.append(samples[apart])
        tested_until = int(tested[-1]) + hours
    return np.concatenate(train), np.concatenate(test)
