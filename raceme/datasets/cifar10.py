"""CIFAR-10, from torchvision's files or as a folder of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.image_folder import images, read_tree
from raceme.datasets.source import Dataset, DataShape, Source
from raceme.datasets.torchvision_guard import import_datasets

BATCHES = "cifar-10-batches-py"
"""The folder of torchvision's files under data-root."""
IMAGES = "CIFAR10-images"
"""The folder of images under data-root: train/<class>/*.jpg and test/<class>/*.jpg."""

_SHAPE = DataShape((3, 32, 32), 10)
_MEAN = 0.4734
_STD = 0.2516


class Cifar10(Source):
    """CIFAR-10: 60,000 photographs of 32x32 pixels (files under data-root, or --download)."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.8
    default_clients = 100

    def load(self, config: RunConfig) -> Dataset:
        """Return train and test images pooled, shape (60000, 3, 32, 32).

        Mean and deviation are those of all three channels together.
        """
        if not config.data_root:
            raise UserError(
                f"cifar10 needs the folder that holds {BATCHES}/ or {IMAGES}/: pass it as "
                f"--data-root DIR. {_how_to_fetch('DIR')}"
            )
        root = Path(config.data_root)
        if (root / BATCHES).is_dir() or not (root / IMAGES).is_dir():
            return self._from_torchvision(config)
        tree = read_tree(root / IMAGES)
        x = images(tree)
        if x.shape[1:] != _SHAPE.input_shape or len(tree.classes) != _SHAPE.num_classes:
            raise UserError(
                f"{root / IMAGES} must hold images of 32x32 pixels in 10 classes, got "
                f"{x.shape[3]}x{x.shape[2]} in {len(tree.classes)}; other images: image-folder."
            )
        return Dataset(x, tree.labels, num_classes=10, mean=_MEAN, std=_STD)

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return _SHAPE

    def _from_torchvision(self, config: RunConfig) -> Dataset:
        folder = Path(config.data_root) / BATCHES
        if not folder.is_dir() and not config.download:
            raise UserError(
                f"cifar10 is not under {config.data_root}: expected {BATCHES}/ (torchvision's "
                f"files) or {IMAGES}/{{train,test}}/<class>/*.jpg. "
                f"{_how_to_fetch(config.data_root)}"
            )
        try:
            torchvision_class = import_datasets().CIFAR10
            parts = [
                torchvision_class(config.data_root, train=train, download=config.download)
                for train in (True, False)
            ]
        # torchvision compares checksums before it unpickles; it raises many things on its way.
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"Could not read cifar10 in {folder}: {reason.rstrip('.')}. "
                f"{_how_to_fetch(config.data_root)}"
            ) from error
        x = np.concatenate([np.moveaxis(part.data, -1, 1) for part in parts])
        y = np.concatenate([np.asarray(part.targets, np.int64) for part in parts])
        return Dataset(np.ascontiguousarray(x), y, num_classes=10, mean=_MEAN, std=_STD)


def _how_to_fetch(data_root: str) -> str:
    return f"To fetch: raceme run --dataset cifar10 --data-root {data_root} --download"
