"""EMNIST letters a to j, from the idx files of Cohen et al. 2017."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.source import Dataset, DataShape, Source
from raceme.datasets.usps import read_idx

FILES = tuple(
    f"emnist-letters-{part}-{kind}-ubyte"
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
)
_FOLDERS = ("EMNIST/raw", "emnist", "")
_SIDE, _LETTERS = 28, 10


class Emnist(Source):
    """EMNIST: the handwritten letters a to j, 28x28 pixels (idx files under data-root)."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95

    def load(self, config: RunConfig) -> Dataset:
        """Return train and test images of ten letters pooled, shape (N, 1, 28, 28)."""
        root = Path(config.data_root)
        for inner in _FOLDERS:
            files = [root / inner / name for name in FILES]
            if config.data_root and all(file.is_file() for file in files):
                arrays = cached("emnist", files, (1,), partial(_read, files))
                x, y = arrays["x"], np.array(arrays["y"], np.int64)
                mean, std = float(x.mean()) / 255, float(x.std()) / 255
                return Dataset(x, y, num_classes=_LETTERS, mean=mean, std=std)
        raise UserError(
            f"emnist is not under '{config.data_root}': expected EMNIST/raw/ with "
            f"{', '.join(FILES)}, uncompressed: --data-root DIR."
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((1, _SIDE, _SIDE), _LETTERS)


def _read(files: list[Path]) -> Arrays:
    """Read the letters a to j, upright: the files have their images turned over."""
    train_x, train_y, test_x, test_y = (read_idx(file) for file in files)
    x, y = np.concatenate([train_x, test_x]), np.concatenate([train_y, test_y])
    letters = 26
    fits = x.shape[1:] == (_SIDE, _SIDE) and y.shape == (len(x),) and len(y) > 0
    if not fits or not 1 <= y.min() <= y.max() <= letters:
        raise UserError(
            f"{files[0].parent} must hold images of {_SIDE}x{_SIDE} pixels and as many labels from "
            f"1 to {letters}; got {x.shape} and {y.shape}."
        )
    wanted = y <= _LETTERS
    upright = np.ascontiguousarray(x[wanted].transpose(0, 2, 1))
    return {"x": upright[:, np.newaxis], "y": y[wanted] - 1}
