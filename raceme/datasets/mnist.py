"""MNIST and its drop-in replacement Fashion-MNIST, from torchvision's raw idx files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.cache import cached
from raceme.datasets.source import Dataset, DataShape, Source
from raceme.datasets.torchvision_guard import import_datasets

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The idx files, uncompressed, in ``<data-root>/<folder>/raw``."""


class Mnist(Source):
    """MNIST: 70,000 handwritten digits of 28x28 pixels (files under data-root, or --download)."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95
    default_clients = 100

    name = "mnist"
    folder = "MNIST"
    """Both torchvision's class and the folder that it reads."""
    mean = 0.1307
    std = 0.3081

    def load(self, config: RunConfig) -> Dataset:
        """Return train and test images pooled, shape (70000, 1, 28, 28)."""
        self._check_files(config)
        files = [Path(config.data_root) / self.folder / "raw" / name for name in FILES]
        if all(file.is_file() for file in files):
            # torchvision takes seconds to import, in every process: what it reads is kept.
            arrays = cached(self.name, files, (), lambda: self._read(config))
        else:
            arrays = self._read(config)
        return Dataset(arrays["x"], arrays["y"], num_classes=10, mean=self.mean, std=self.std)

    def _read(self, config: RunConfig) -> dict[str, NDArray[Any]]:
        """Let torchvision read the files, and fetch them first if that is asked for."""
        try:
            torchvision_class = getattr(import_datasets(), self.folder)
            parts = [
                torchvision_class(config.data_root, train=train, download=config.download)
                for train in (True, False)
            ]
        # torchvision asserts, indexes and reshapes its way through a damaged file.
        except (OSError, RuntimeError, ValueError, AssertionError, LookupError) as error:
            raise UserError(self._unusable(config, error)) from error
        x = np.concatenate([part.data.numpy() for part in parts])[:, np.newaxis]
        y = np.concatenate([part.targets.numpy() for part in parts]).astype(np.int64)
        if x.shape[1:] != (1, 28, 28) or len(x) != len(y) or not np.all(y < 10):
            raise UserError(self._unusable(config, f"{x.shape} images and {y.shape} labels"))
        return {"x": x, "y": y}

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading: a server has no need of the files."""
        return DataShape((1, 28, 28), 10)

    def _check_files(self, config: RunConfig) -> None:
        """Raise UserError if files are missing and may not be fetched."""
        if not config.data_root:
            raise UserError(
                f"{self.name} needs the folder that holds {self.folder}/raw/: pass it as "
                f"--data-root DIR. {self._how_to_fetch('DIR')}"
            )
        raw = Path(config.data_root) / self.folder / "raw"
        missing = [name for name in FILES if not (raw / name).is_file()]
        if missing and not config.download:
            raise UserError(
                f"{self.name} is not under {config.data_root}: {raw} must hold "
                f"{', '.join(FILES)} (missing: {', '.join(missing)}). "
                f"{self._how_to_fetch(config.data_root)}"
            )

    def _unusable(self, config: RunConfig, reason: object) -> str:
        raw = Path(config.data_root) / self.folder / "raw"
        doing = "download or read" if config.download else "read"
        what = " ".join(str(reason).split()) or type(reason).__name__
        return (
            f"Could not {doing} {self.name} in {raw}: {what}. Expected there: {', '.join(FILES)}, "
            f"uncompressed. {self._how_to_fetch(config.data_root)}"
        )

    def _how_to_fetch(self, data_root: str) -> str:
        return f"To fetch: raceme run --dataset {self.name} --data-root {data_root} --download"


class FashionMnist(Mnist):
    """Fashion-MNIST: 70,000 images of clothing, 28x28 pixels (under data-root, or --download)."""

    target_accuracy = 0.9

    name = "fashion-mnist"
    folder = "FashionMNIST"
    mean = 0.2860
    std = 0.3530
