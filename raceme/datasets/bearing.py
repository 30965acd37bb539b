"""HIT bearings: vibration of rolling bearings on two test rigs at three speeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets import npz
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.source import Dataset, DataShape, Indices, Source

WINDOW = 2048
"""Readings in a window, at 51.2 kHz."""
FAULTS = 7

_FOLDERS = ("hit_bearing_by_machine", "hit-bearing", "")
_NAME = re.compile(r"(?P<machine>.+)_(?P<speed>\d+)rpm")
_EXPECTED = (
    f"Expected: <machine>_<speed>rpm.npz for each machine and speed, each with x, numbers of shape "
    f"(windows, {WINDOW}) in the order of time, and y, whole numbers from 0 to {FAULTS - 1}"
)


class HitBearing(Source):
    """Bearing faults: 7 conditions by vibration, 2 machines at 3 speeds (files under data-root).

    Harbin Institute of Technology, sensing and measurement laboratory.
    """

    default_model = "cnn1d"
    default_lr = 0.05
    target_accuracy = 0.9
    default_clients = 24
    has_clients = True

    def load(self, config: RunConfig) -> Dataset:
        """Return the windows; a client has a stretch of one machine's recordings at one speed.

        The windows are taken as they are: each recording has mean 0 and deviation 1. Of each fault
        of a client the last windows are for testing, since neighbours are alike.
        """
        files = _files(config)
        if config.num_clients < len(files):
            raise UserError(
                f"hit-bearing has {len(files)} machines and speeds, of which each is at least one "
                f"client: take at least {len(files)} clients, got {config.num_clients}."
            )
        paths = [path for path, _ in files]
        arrays = cached("hit-bearing", paths, (1,), partial(_read, paths))
        y = np.array(arrays["y"], np.int64)
        machines = sorted({machine for _, machine in files})
        sharers = np.array_split(np.arange(config.num_clients), len(files))
        ends = np.cumsum(arrays["sizes"])
        users: list[Indices] = []
        test_users: list[Indices] = []
        groups: list[int] = []
        for (path, machine), clients, end, size in zip(
            files, sharers, ends, arrays["sizes"], strict=True
        ):
            own = np.arange(end - size, end)
            for part in range(len(clients)):
                train, test = _stretch(own, y, part, len(clients), config.test_fraction)
                if not len(train):
                    raise UserError(
                        f"{path} has too few windows for {len(clients)} clients: take fewer."
                    )
                users.append(train)
                test_users.append(test)
                groups.append(machines.index(machine))
        return Dataset(
            arrays["x"],
            y,
            num_classes=FAULTS,
            users=tuple(users),
            test_users=tuple(test_users),
            groups=tuple(groups),
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((WINDOW,), FAULTS)


def _files(config: RunConfig) -> list[tuple[Path, str]]:
    """Return the files, by machine and then by speed, and the machine of each."""
    named = [
        (match["machine"], int(match["speed"]), path)
        for path in npz.files_in(config.data_root, _FOLDERS, "*rpm.npz")
        if (match := _NAME.fullmatch(path.stem))
    ]
    if not named:
        raise UserError(
            f"hit-bearing is not under '{config.data_root}': there is no {_FOLDERS[0]}/ with such "
            f"files: --data-root DIR. {_EXPECTED}."
        )
    return [(path, machine) for machine, _, path in sorted(named)]


def _read(paths: Sequence[Path]) -> Arrays:
    """Read all files; windows are kept in half precision, as they are stored."""
    parts = (npz.labelled(path, (WINDOW,), FAULTS, _EXPECTED) for path in paths)
    return npz.stacked((x.astype(np.float16), y) for x, y in parts)


def _stretch(
    own: Indices, y: Indices, part: int, parts: int, share: float
) -> tuple[Indices, Indices]:
    """Return one part of a file, a stretch of each fault: what it begins and what it ends with."""
    train, test = [], []
    for fault in np.unique(y[own]):
        stretch = np.array_split(own[y[own] == fault], parts)[part]
        count = int(np.clip(round(share * len(stretch)), 1, max(1, len(stretch) - 1)))
        train.append(stretch[: len(stretch) - count])
        test.append(stretch[len(stretch) - count :])
    return np.concatenate(train), np.concatenate(test)
