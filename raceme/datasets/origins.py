"""Digits of different origin: the same ten classes, as several sets of images show them.

Li and Zhu, "Client-Driven Federated Learning" (CDFL), mix the digits of MNIST and USPS, of SVHN's
house numbers, and of CCPD's number plates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import error as ZlibError  # noqa: N812

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.image_folder import images, read_tree
from raceme.datasets.mnist import Mnist
from raceme.datasets.source import Dataset, DataShape, Indices, Source, generator
from raceme.datasets.usps import Usps

_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
"""Shapes of the images: MNIST's, and where an origin has colours the paper's."""
_SVHN = ("train_32x32.mat", "test_32x32.mat")
_SVHN_FOLDERS = ("SVHN", "svhn", "")
_CCPD_FOLDERS = ("CCPD", "ccpd", "ccpd_digits")
_CLASSES = 10
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, NotImplementedError, ZlibError)
"""What scipy raises for a file that is damaged, or none of Matlab's, or of a later version."""

_Images = NDArray[np.uint8]


@dataclass(frozen=True)
class OriginOptions:
    """Which sets of digits there are."""

    origins: str = option(
        "mnist,usps",
        "sets of digits, each a group: mnist, usps, svhn, ccpd; joined by + they are one group",
    )


class DigitsByOrigin(Source):
    """Digits of MNIST and USPS, or SVHN and CCPD too: a group for each origin (under data-root)."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95
    default_clients = 40
    has_clients = True
    options_type = OriginOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the digits of all origins in one shape; each group has as many clients.

        A client has a random part of its group's samples; the origins that make up a group are
        in it by their sizes.
        """
        groups = _groups(config)
        if config.num_clients < len(groups):
            raise UserError(
                f"digits-by-origin has {len(groups)} groups, of which each is at least one client: "
                f"take at least {len(groups)} clients, got {config.num_clients}."
            )
        shape = self.shape(config).input_shape
        parts = [_READERS[name](config) for names in groups for name in names]
        x = np.concatenate([_shaped(own, shape) for own, _ in parts])
        y = np.concatenate([labels for _, labels in parts])
        sizes = iter([len(labels) for _, labels in parts])
        counts = [sum(next(sizes) for _ in names) for names in groups]
        rng, start = generator(config.seed, "digits-by-origin"), 0
        users: list[Indices] = []
        true: list[int] = []
        sharers = np.array_split(np.arange(config.num_clients), len(groups))
        for group, (count, clients) in enumerate(zip(counts, sharers, strict=True)):
            own = start + rng.permutation(count)
            start += count
            if count < 2 * len(clients):
                raise UserError(
                    f"origin {'+'.join(groups[group])} has {count} digits, too few for "
                    f"{len(clients)} clients: take fewer."
                )
            users.extend(np.sort(part) for part in np.array_split(own, len(clients)))
            true.extend([group] * len(clients))
        mean, std = (Mnist.mean, Mnist.std) if shape == _GREY else (0.5, 0.25)
        return Dataset(x, y, _CLASSES, mean, std, users=tuple(users), groups=tuple(true))

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading: MNIST's, unless an origin has colours."""
        names = {name for group in _groups(config) for name in group}
        return DataShape(_COLOUR if names & {"svhn", "ccpd"} else _GREY, _CLASSES)


def _groups(config: RunConfig) -> list[list[str]]:
    """Read the key ``origins``: groups separated by commas, what is in a group joined by +."""
    text = config.read(OriginOptions).origins
    groups = [[name.strip() for name in part.split("+")] for part in text.lower().split(",")]
    names = [name for group in groups for name in group]
    if len(names) != len(set(names)) or not set(names) <= set(_READERS):
        raise UserError(
            f"origins '{text}' must name each of {', '.join(_READERS)} at most once, e.g. "
            "mnist,usps or mnist+usps,svhn."
        )
    return groups


def _mnist(config: RunConfig) -> tuple[_Images, Indices]:
    data = Mnist().load(config)
    return np.asarray(data.x, np.uint8), data.y


def _usps(config: RunConfig) -> tuple[_Images, Indices]:
    data = Usps().load(config)
    return np.asarray(data.x, np.uint8), data.y


def _svhn(config: RunConfig) -> tuple[_Images, Indices]:
    """Read SVHN's cropped digits, in torchvision's files."""
    root = Path(config.data_root)
    for inner in _SVHN_FOLDERS:
        files = [root / inner / name for name in _SVHN]
        if config.data_root and all(file.is_file() for file in files):
            arrays = cached("svhn", files, (1,), partial(_read_svhn, files))
            return np.asarray(arrays["x"]), np.array(arrays["y"], np.int64)
    raise UserError(
        f"svhn is not under '{config.data_root}': expected SVHN/ with {' and '.join(_SVHN)}, the "
        "cropped digits: --data-root DIR."
    )


def _read_svhn(files: list[Path]) -> Arrays:
    # Imported here because every process that trains would wait for it, and few need it.
    from scipy.io import loadmat

    xs, ys = [], []
    for file in files:
        try:
            content = loadmat(file)
            # (height, width, channels, samples); the digit 0 has the label 10.
            x, y = np.moveaxis(content["X"], (3, 2), (0, 1)), content["y"].ravel() % _CLASSES
        except _UNREADABLE as error:
            raise UserError(f"Cannot read {file} as SVHN's digits: {error}.") from None
        if x.shape[1:] != _COLOUR or x.dtype != np.uint8 or len(x) != len(y):
            raise UserError(
                f"{file} must hold X of shape (32, 32, 3, n) in bytes and n labels y; got "
                f"{content['X'].shape} and {len(y)}."
            )
        xs.append(x)
        ys.append(y.astype(np.int64))
    return {"x": np.concatenate(xs), "y": np.concatenate(ys)}


def _ccpd(config: RunConfig) -> tuple[_Images, Indices]:
    """Read digits cut from number plates: images in folders named 0 to 9."""
    root = Path(config.data_root)
    expected = (
        f"expected {_CCPD_FOLDERS[0]}/ with images in folders named 0 to 9, or train/ and test/ "
        "with such folders, cut from the plates: --data-root DIR"
    )
    for inner in _CCPD_FOLDERS:
        if config.data_root and (root / inner).is_dir():
            tree = read_tree(root / inner)
            if not set(tree.classes) <= set(map(str, range(_CLASSES))):
                named = ", ".join(tree.classes)
                raise UserError(f"{root / inner} has folders {named}: {expected}.")
            digits = np.array([int(name) for name in tree.classes])
            return images(tree, _COLOUR[1]), digits[tree.labels]
    raise UserError(f"ccpd is not under '{config.data_root}': {expected}.")


_READERS: dict[str, Callable[[RunConfig], tuple[_Images, Indices]]] = {
    "mnist": _mnist,
    "usps": _usps,
    "svhn": _svhn,
    "ccpd": _ccpd,
}


def _shaped(x: _Images, shape: tuple[int, ...]) -> _Images:
    """Bring images to a shape at least as large: bilinear, and grey in all channels."""
    channels, side = shape[0], shape[1]
    if x.shape[2] != side:
        # Imported here because it takes seconds, and who reads from the cache does not need it.
        import torch
        from torch.nn.functional import interpolate

        small = torch.from_numpy(np.asarray(x, np.float32))
        x = interpolate(small, (side, side), mode="bilinear").round().to(torch.uint8).numpy()
    return x if x.shape[1] == channels else np.repeat(x, channels, axis=1)
