"""The handwritten digits that scikit-learn bundles: 1,797 images of 8x8 pixels."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from raceme.config import RunConfig
from raceme.datasets.source import Dataset, DataShape, Source

_BRIGHTEST = 16.0
_MEAN = 0.3053
_STD = 0.3760


class Digits(Source):
    """1,797 handwritten digits of 8x8 pixels, bundled with scikit-learn: no download."""

    default_model = "mlp"
    default_lr = 0.2
    target_accuracy = 0.95

    def load(self, config: RunConfig) -> Dataset:
        """Return the images, shape (1797, 1, 8, 8), from 0 to 1 before they are normalised."""
        images, labels = load_digits(return_X_y=True)
        x = (images / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
        return Dataset(x, labels.astype(np.int64), num_classes=10, mean=_MEAN, std=_STD)

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((1, 8, 8), 10)
