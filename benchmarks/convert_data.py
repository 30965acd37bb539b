"""Convert data of published experiments to folders for ``--dataset npz-folder``.

``python benchmarks/convert_data.py harbox data/large_scale_HARBox data/harbox`` reads the files
of the second argument and writes an .npz file per client, and ``dataset.toml``, into the third.
docs/research/datasets.md describes the sources and their files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.io import loadmat
from torch.nn.functional import interpolate

from raceme.core.config import RunConfig
from raceme.datasets.images import Mnist, Usps, images, read_tree
from raceme.datasets.source import Digits, generator

PERIOD = "period"
UNCHANGED = "mean = 0.0\nstd = 1.0\n"
"""Lines of ``dataset.toml`` for inputs that are used as they are."""

_Array = NDArray[Any]

HAR_WINDOW = 100
"""Readings in a window of HARBox and IMU."""
AXES = 9
"""Three axes each of accelerometer, gyroscope and magnetometer."""
HARBOX = ("Call", "Hop", "typing", "Walk", "Wave")
IMU = ("walk", "up", "down")

# Means and deviations of all stations and years: PM2.5, PM10, SO2, NO2, CO, O3, TEMP, PRES, DEWP,
# RAIN, WSPM.
_MEAN = (79.79, 104.60, 15.83, 50.64, 1230.77, 57.37, 13.54, 1010.75, 2.491, 0.0645, 1.730)
_STD = (80.82, 91.77, 21.65, 35.13, 1160.18, 56.66, 11.44, 10.47, 13.79, 0.821, 1.246)
_DIRECTIONS = 16
_CARRIED = 24
"""Hours for which the last reading replaces missing ones; after that the mean does."""
_START = np.datetime64("2013-03-01T00", "h")
MONTHS = {"month": 1, "season": 3, "year": 12}


_Client = dict[str, _Array]
"""The arrays of a file."""


# -----------------------------------------------------------------------------
# Human activity: HARBox and IMU (Ouyang et al., ClusterFL, 2021), UCI HAR (Anguita et al., 2013).
# -----------------------------------------------------------------------------


def harbox(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield the first people, in the order of their numbers, each axis standardised over them."""
    files = {
        (int(path.parent.name), HARBOX.index(activity)): path
        for path in root.glob("*/*_train.txt")
        if path.parent.name.isdigit()
        and (activity := path.name.removesuffix("_train.txt")) in HARBOX
    }
    people = sorted({person for person, _ in files})[: arguments.clients]
    keys = sorted(key for key in files if key[0] in people)
    # The first column is a time.
    windows = [_windows(np.loadtxt(files[key], ndmin=2)[:, 1:]) for key in keys]
    x = standardised_windows(np.concatenate(windows))
    owner = np.repeat([person for person, _ in keys], [len(own) for own in windows])
    y = np.repeat([activity for _, activity in keys], [len(own) for own in windows])
    for person in people:
        own = owner == person
        yield {"x": x[own], "y": y[own], "num_classes": _one(5)}


def imu(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield all people; their files' names begin with their place, the true group."""
    pattern = rf"([a-z]+_?\d+)_({'|'.join(IMU)})(_nor)?\.txt"
    files = {
        (match[1], IMU.index(match[2].lower())): path
        for path in root.glob("*.txt")
        if (match := re.fullmatch(pattern, path.name, re.IGNORECASE))
    }
    place_of = {person: re.split(r"_|\d", person)[0] for person, _ in files}
    places = sorted(set(place_of.values()))
    for person in sorted(place_of):
        keys = sorted(key for key in files if key[0] == person)
        windows = [_windows(np.loadtxt(files[key], delimiter=",", ndmin=2)) for key in keys]
        y = np.repeat([activity for _, activity in keys], [len(own) for own in windows])
        group = _one(places.index(place_of[person]))
        yield {"x": np.concatenate(windows), "y": y, "num_classes": _one(3), "group": group}


def _windows(readings: _Array) -> NDArray[np.float32]:
    return readings.reshape(-1, HAR_WINDOW * AXES).astype(np.float32)


def uci_har(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield the people of UCI HAR, with their windows, labels and test samples as they are."""
    for path in sorted(root.glob("*.npz")):
        with np.load(path) as file:
            yield {name: file[name] for name in ("x", "y", "heldout")}


def standardised_windows(x: _Array) -> NDArray[np.float32]:
    """Standardise each axis of windows of shape (N, readings x axes); constant axes become zero."""
    readings = np.asarray(x, np.float32).reshape(len(x), -1, AXES)
    mean = readings.mean(axis=(0, 1), dtype=np.float64)
    deviation = readings.std(axis=(0, 1), dtype=np.float64)
    scaled = (readings - mean) / np.where(deviation > 0, deviation, 1.0)
    return np.asarray(scaled.reshape(x.shape), np.float32)


# -----------------------------------------------------------------------------
# Beijing Multi-Site Air Quality: the next hour's fine dust (Zhang et al., 2017).
# -----------------------------------------------------------------------------


def air(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield each station's windows of (channels, hours), with the fine dust of the following hour.

    A missing input is the last reading for at most a day, then the mean. Windows whose next hour
    has no reading are left out. The last samples of each period are for testing.
    """
    hours = arguments.hours
    for path in sorted(root.glob("*.npz")):
        with np.load(path) as file:
            readings, wind = file["x"], file["wind_dir"]
        scaled = (readings.astype(np.float64) - _MEAN) / _STD
        angle = np.where(wind < _DIRECTIONS, wind * (2 * np.pi / _DIRECTIONS), np.nan)
        inputs = filled(np.column_stack([scaled, np.sin(angle), np.cos(angle)]))
        # The window that ends before hour t is sample t - hours; the last has no next hour.
        windows = np.lib.stride_tricks.sliding_window_view(inputs, hours, axis=0)[:-1]
        dust, period = readings[hours:, 0], periods(len(readings), arguments.period)[hours:]
        own = np.arange(len(dust))[:: arguments.step or 3]
        own = own[np.isfinite(dust[own])]
        train, test = divided(own, period, arguments.test_fraction, hours)
        arrays = _with_test(windows, dust, train, test)
        arrays |= {PERIOD: period[np.concatenate([train, test])], "unit": np.array("µg/m³")}
        yield arrays | {"y_mean": _one(_MEAN[0]), "y_std": _one(_STD[0])}


def filled(series: NDArray[np.float64]) -> NDArray[np.float32]:
    """Fill gaps with the last reading for at most a day, then with the mean, 0."""
    rows = np.arange(len(series))[:, np.newaxis]
    last = np.maximum.accumulate(np.where(np.isfinite(series), rows, -1), axis=0)
    carried = np.take_along_axis(series, np.maximum(last, 0), axis=0)
    known = (last >= 0) & (rows - last <= _CARRIED)
    return np.where(known, carried, 0.0).astype(np.float32)


def periods(hours: int, period: str) -> NDArray[np.int64]:
    """Return the period of each hour from the first of March 2013 on, counted from 0.

    Seasons and years begin with March.
    """
    months = (_START + np.arange(hours)).astype("datetime64[M]") - _START.astype("datetime64[M]")
    return np.asarray(months.astype(np.int64) // MONTHS[period], np.int64)


def divided(
    own: NDArray[np.int64], period: NDArray[np.int64], share: float, hours: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split a station's samples: the last of each period are for testing, between gaps.

    A sample covers its window and the next hour. Training and test samples share no hour.
    """
    train, test = [], []
    tested_until = -1
    for number in np.unique(period[own]):
        samples = own[period[own] == number]
        _, tested = _with_tail(samples, share)
        apart = (samples + hours < tested[0]) & (samples > tested_until)
        test.append(tested)
        train.append(samples[apart])
        tested_until = int(tested[-1]) + hours
    return np.concatenate(train), np.concatenate(test)


# -----------------------------------------------------------------------------
# HIT bearings, Gas Sensor Array Drift, Free Spoken Digit Dataset, Shakespeare.
# -----------------------------------------------------------------------------


def bearings(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield clients with a segment of every fault of one machine, the true group, at one speed.

    A client's last windows of each fault are for testing, since neighbours are similar.
    """
    found = {
        (match[1], int(match[2])): path
        for path in root.glob("*_*rpm.npz")
        if (match := re.fullmatch(r"(.+)_(\d+)rpm", path.stem))
    }
    machines = sorted({machine for machine, _ in found})
    for key, parts in zip(sorted(found), _parts(arguments.clients, len(found)), strict=True):
        with np.load(found[key]) as file:
            x, y = file["x"].astype(np.float16), file["y"].astype(np.int64)
        for part in range(parts):
            faults = [np.array_split(np.flatnonzero(y == f), parts)[part] for f in np.unique(y)]
            halves = [_with_tail(own, arguments.test_fraction) for own in faults]
            train, test = (np.concatenate(half) for half in zip(*halves, strict=True))
            arrays = _with_test(x, y, train, test) | {"group": _one(machines.index(key[0]))}
            yield arrays | {"num_classes": _one(7)}


def gas(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield clients with an equal, stratified share of each batch; a batch is a period.

    Features are standardised over the first batch only: later batches are unknown at installation,
    and their drift is preserved.
    """
    batches = []
    for path in sorted(root.glob("batch_*.npz")):
        with np.load(path) as file:
            batches.append((file["x"].astype(np.float32), file["y"].astype(np.int64)))
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    batch = np.repeat(np.arange(len(batches)), [len(part) for _, part in batches])
    first = x[batch == 0].astype(np.float64)
    std = first.std(axis=0)
    std = np.where(std > 0, std, 1.0).astype(np.float32)
    x = (x - first.mean(axis=0).astype(np.float32)) / std
    order = generator(arguments.seed, "gas-drift").permutation(len(y))
    # Sorted by batch and gas, shuffled within, and dealt in turn.
    order = order[np.lexsort((y[order], batch[order]))]
    for client in range(arguments.clients):
        own = np.sort(order[client :: arguments.clients])
        yield {"x": x[own], "y": y[own], PERIOD: batch[own], "num_classes": _one(6)}


def spoken(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield clients with recordings of one speaker, the true group, in turn; images of spectra."""
    paths = sorted(root.glob("*.npz"))
    for speaker, parts in enumerate(_parts(arguments.clients, len(paths))):
        with np.load(paths[speaker]) as file:
            x, y = file["x"][:, np.newaxis], file["y"]
        for part in range(parts):
            own = slice(part, None, parts)
            yield {"x": x[own], "y": y[own], "group": _one(speaker), "num_classes": _one(10)}


def shakespeare(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield the roles with the most text: each character with those before it, as numbers.

    The last share of a role's text is for testing, without overlap. Every character that occurs is
    a class.
    """
    (path,) = root.glob("*.npz")
    with np.load(path) as file:
        text, offset = file["text"], file["offset"].astype(np.int64)
    codes, symbols = np.unique(text, return_inverse=True)
    symbols, length = symbols.astype(np.uint8), arguments.length
    windows = np.lib.stride_tricks.sliding_window_view(symbols, length)
    count = 0
    for role in np.argsort(-np.diff(offset), kind="stable"):
        first, size = offset[role], int(offset[role + 1] - offset[role])
        cut = int(size * (1.0 - arguments.test_fraction))
        train = first + np.arange(0, cut - length, arguments.step or length)
        test = first + np.arange(cut, size - length, arguments.step or length)
        if len(train) and len(test) and count < arguments.clients:
            own, count = np.concatenate([train, test]), count + 1
            heldout = np.repeat([False, True], [len(train), len(test)])
            arrays = {"x": windows[own], "y": symbols[own + length], "heldout": heldout}
            yield arrays | {"num_classes": _one(len(codes))}


# -----------------------------------------------------------------------------
# Digits of different origin: Li and Zhu, "Towards Client Driven Federated Learning" (CDFL), mix the
# digits of MNIST and USPS, of SVHN's house numbers, and of CCPD's number plates.
# -----------------------------------------------------------------------------


_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
"""Shapes of the images: MNIST's, or the paper's if any origin has colours."""
_COLOURED = {"svhn", "ccpd"}


def by_origin(root: Path, arguments: argparse.Namespace) -> Iterator[_Client]:
    """Yield clients of each origin, a true group; groups have equal numbers of clients.

    A client has a random part of its group's samples; the origins of a group mix by size.
    """
    groups = _origins(arguments)
    shape = _COLOUR if _is_coloured(arguments) else _GREY
    rng = generator(arguments.seed, "digits-by-origin")
    for group, parts in enumerate(_parts(arguments.clients, len(groups))):
        sets = [_digits(name, root) for name in groups[group]]
        x = np.concatenate([resized(images, shape) for images, _ in sets])
        y = np.concatenate([labels for _, labels in sets])
        for part in np.array_split(rng.permutation(len(y)), parts):
            own = np.sort(part)
            yield {"x": x[own], "y": y[own], "group": _one(group), "num_classes": _one(10)}


def _origins(arguments: argparse.Namespace) -> list[list[str]]:
    """Return the groups: separated by commas, the sets of a group joined by +."""
    return [part.split("+") for part in arguments.origins.split(",")]


def _is_coloured(arguments: argparse.Namespace) -> bool:
    return any(name in _COLOURED for group in _origins(arguments) for name in group)


def _digits(name: str, root: Path) -> tuple[_Array, _Array]:
    """Return the images and the labels of an origin."""
    if name == "svhn":
        files = [loadmat(root / "SVHN" / f"{part}_32x32.mat") for part in ("train", "test")]
        # (height, width, channels, samples); the digit 0 has the label 10.
        x = np.concatenate([np.moveaxis(file["X"], (3, 2), (0, 1)) for file in files])
        return x, np.concatenate([file["y"].ravel() for file in files]).astype(np.int64) % 10
    if name == "ccpd":
        tree = read_tree(root / "CCPD")
        return images(tree, _COLOUR[1]), np.array([int(of) for of in tree.classes])[tree.labels]
    if name == "digits":
        data = Digits().load(RunConfig())
        return np.round(255 * data.x).astype(np.uint8), data.y
    known = {"mnist": Mnist, "usps": Usps}[name]
    data = known().load(RunConfig(dataset=name, data_root=str(root)))
    return np.asarray(data.x, np.uint8), data.y


def resized(x: _Array, shape: tuple[int, ...]) -> _Array:
    """Resize images bilinearly to a shape at least as large; copy grey to all channels."""
    channels, side = shape[0], shape[1]
    if x.shape[2] != side:
        small = torch.from_numpy(np.asarray(x, np.float32))
        x = interpolate(small, (side, side), mode="bilinear").round().to(torch.uint8).numpy()
    return x if x.shape[1] == channels else np.repeat(x, channels, axis=1)


def _parts(clients: int, groups: int) -> list[int]:
    """Return the number of clients of each group: as equal as possible, the rest first."""
    if clients < groups:
        raise SystemExit(f"There are {groups} recordings: give at least as many --clients.")
    return [len(part) for part in np.array_split(np.arange(clients), groups)]


def _with_tail(own: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split off a share of samples at the end, with at least one sample in each part."""
    count = int(np.clip(round(share * len(own)), 1, max(1, len(own) - 1)))
    return own[: len(own) - count], own[len(own) - count :]


def _with_test(x: _Array, y: _Array, train: _Array, test: _Array) -> dict[str, _Array]:
    own = np.concatenate([train, test])
    heldout = np.repeat([False, True], [len(train), len(test)])
    return {"x": np.ascontiguousarray(x[own]), "y": y[own], "heldout": heldout}


def _one(value: float) -> _Array:
    return np.array(value)


class Source(NamedTuple):
    """A conversion: the clients, their default number, and the content of ``dataset.toml``."""

    clients_of: Callable[[Path, argparse.Namespace], Iterator[_Client]]
    clients: int
    description: str = UNCHANGED


def _described(model: str, target: float) -> str:
    return f'model = "{model}"\nlr = 0.01\ntarget-accuracy = {target}\n'


SOURCES = {
    "harbox": Source(harbox, 120, _described("mlp", 0.75) + UNCHANGED),
    "imu": Source(imu, 7, _described("mlp", 0.8) + UNCHANGED),
    "uci-har": Source(uci_har, 30, ""),
    "beijing-air": Source(air, 12, _described("mclr", 12.0) + UNCHANGED),
    "hit-bearing": Source(bearings, 24),
    "gas-drift": Source(gas, 20),
    "shakespeare": Source(shakespeare, 100, "lr = 0.5\ntarget-accuracy = 0.4\n"),
    "fsdd": Source(spoken, 24, 'model = "cnn"\nlr = 0.05\n'),
    "digits-by-origin": Source(by_origin, 40, _described("cnn", 0.95)),
}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", choices=SOURCES)
    parser.add_argument("source", type=Path, help="folder of the published files")
    parser.add_argument("out", type=Path, help="folder for a file per client")
    parser.add_argument("--clients", type=int, help="number of clients, the dataset's by default")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0, help="seed of the assignment to clients")
    parser.add_argument(
        "--origins", default="mnist,usps", help="sets of the groups; + joins several"
    )
    parser.add_argument("--hours", type=int, default=24, help="beijing-air: hours of a window")
    parser.add_argument(
        "--length", type=int, default=80, help="shakespeare: characters of a sample"
    )
    parser.add_argument("--step", type=int, help="hours (3) or characters (80) between samples")
    parser.add_argument("--period", choices=MONTHS, default="season", help="beijing-air: periods")
    arguments = parser.parse_args()
    convert(arguments)


def convert(arguments: argparse.Namespace) -> None:
    """Write an .npz file per client and ``dataset.toml``."""
    source = SOURCES[arguments.dataset]
    arguments.clients = arguments.clients or source.clients
    arguments.out.mkdir(parents=True, exist_ok=True)
    count = 0
    for arrays in source.clients_of(arguments.source, arguments):
        np.savez_compressed(arguments.out / f"client-{count}.npz", **arrays)
        count += 1
    if not count:
        raise SystemExit(f"{arguments.source} has no files of {arguments.dataset}.")
    text = source.description
    if arguments.dataset == "digits-by-origin":
        mean, std = (0.5, 0.25) if _is_coloured(arguments) else (Mnist.mean, Mnist.std)
        text += f"mean = {mean}\nstd = {std}\n"
    if text:
        (arguments.out / "dataset.toml").write_text(text, encoding="utf-8")
    print(f"{count} clients in {arguments.out}")


if __name__ == "__main__":
    main()
