"""Gas Sensor Array Drift: six gases measured over three years, while the sensors grow old."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets import npz
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.source import Dataset, DataShape, Indices, Source, generator

FEATURES = 128
"""Eight features of each of sixteen sensors."""
GASES = 6

_FOLDERS = ("gas_drift_batches", "gas-drift", "")
_EXPECTED = (
    f"Expected: batch_01.npz, batch_02.npz, … in the order of time, each with x, numbers of shape "
    f"(samples, {FEATURES}), and y, whole numbers from 0 to {GASES - 1}"
)


class GasDrift(Source):
    """Gas sensors that drift: 6 gases in up to 10 batches over 36 months (files under data-root).

    Vergara et al., "Chemical gas sensor drift compensation using classifier ensembles", Sensors and
    Actuators B 166, 2012.
    """

    default_model = "mlp"
    default_lr = 0.05
    target_accuracy = 0.9
    default_clients = 20
    has_clients = True

    def load(self, config: RunConfig) -> Dataset:
        """Return all batches, of each of which every client has a share; shape (N, 128).

        Each feature is brought to mean 0 and deviation 1 over the first batch: what comes later
        cannot be known when a sensor is put into service, and its drift stays to be seen.
        """
        paths = _files(config)
        arrays = cached("gas-drift", paths, (2,), partial(_read, paths))
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

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((FEATURES,), GASES)


def _files(config: RunConfig) -> list[Path]:
    """Return the batches in their order; which of them are there does not matter."""
    found = npz.files_in(config.data_root, _FOLDERS, "batch_*.npz")
    if not found:
        raise UserError(
            f"gas-drift is not under '{config.data_root}': there is no {_FOLDERS[0]}/batch_01.npz: "
            f"--data-root DIR. {_EXPECTED}."
        )
    return found


def _read(paths: Sequence[Path]) -> Arrays:
    parts = (npz.labelled(path, (FEATURES,), GASES, _EXPECTED) for path in paths)
    return npz.stacked((x.astype(np.float32), y) for x, y in parts)


def _dealt(y: Indices, batch: Indices, config: RunConfig) -> tuple[Indices, ...]:
    """Deal out every batch alike: a client's shares of a batch and of its gases differ by one."""
    rng = generator(config.seed, "gas-drift")
    order = rng.permutation(len(y))
    # Sorted by batch, then by gas, shuffled within both; dealt like cards.
    order = order[np.lexsort((y[order], batch[order]))]
    return tuple(
        np.sort(order[client :: config.num_clients]) for client in range(config.num_clients)
    )
