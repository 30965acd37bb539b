"""USPS: handwritten digits of postal codes, in idx files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.mnist import FILES
from raceme.datasets.source import Dataset, DataShape, Source

_SIDE = 16
_BYTES = 0x08
"""The code of unsigned bytes in an idx file's head."""
_FOLDERS = ("usps", "USPS", "USPS/raw", "")


class Usps(Source):
    """USPS: 9,298 handwritten digits of 16x16 pixels (idx files under data-root)."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95

    def load(self, config: RunConfig) -> Dataset:
        """Return train and test images pooled, shape (9298, 1, 16, 16)."""
        root = Path(config.data_root)
        for inner in _FOLDERS:
            files = [root / inner / name for name in FILES]
            if config.data_root and all(file.is_file() for file in files):
                arrays = cached("usps", files, (1,), partial(_read, files))
                y = np.array(arrays["y"], np.int64)
                return Dataset(arrays["x"], y, num_classes=10, mean=0.2573, std=0.3864)
        raise UserError(
            f"usps is not under '{config.data_root}': expected usps/ with {', '.join(FILES)}, "
            "uncompressed: --data-root DIR."
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((1, _SIDE, _SIDE), 10)


def _read(files: list[Path]) -> Arrays:
    train_x, train_y, test_x, test_y = (read_idx(file) for file in files)
    x, y = np.concatenate([train_x, test_x]), np.concatenate([train_y, test_y])
    if x.shape[1:] != (_SIDE, _SIDE) or y.shape != (len(x),) or y.max() >= 10:
        raise UserError(
            f"{files[0].parent} must hold images of {_SIDE}x{_SIDE} pixels and as many labels from "
            f"0 to 9; got {x.shape} and {y.shape}."
        )
    return {"x": x[:, np.newaxis], "y": y}


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes: two zeros, the type, the number of axes, their sizes, the data.

    Raises
    ------
    UserError
        It cannot be read, or is none.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None
    if len(content) < 4 or content[:3] != bytes([0, 0, _BYTES]):
        raise UserError(f"{path} is not an idx file of bytes.")
    axes = content[3]
    shape = tuple(np.frombuffer(content, ">u4", axes, 4).tolist())
    data = np.frombuffer(content, np.uint8, -1, 4 + 4 * axes)
    if data.size != np.prod(shape):
        raise UserError(f"{path} is cut short: its head says {shape}, its data are {data.size}.")
    return data.reshape(shape)
