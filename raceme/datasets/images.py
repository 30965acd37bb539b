"""Datasets of images: MNIST's relatives in idx files, folders of images, digits by origin."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, os_errors_as_user_errors
from raceme.core.files import ReadingError, check_memory, check_regular
from raceme.core.options import option
from raceme.datasets import source
from raceme.datasets.source import (
    Arrays,
    Dataset,
    DataShape,
    Indices,
    Source,
    cached,
    import_datasets,
)

_Images = NDArray[np.uint8]

_DAMAGED = (OSError, RuntimeError, ValueError, AssertionError, LookupError)
"""Exceptions of torchvision for a damaged file."""


class ImageSource(Source):
    """A dataset of images, whose files torchvision may fetch and read.

    Attributes
    ----------
    name : str
        Name in the registry of datasets, also in error messages.
    torchvision : str
        torchvision class that fetches and reads the files, if any.
    """

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95

    name = ""
    torchvision = ""

    def _how_to_fetch(self, config: RunConfig) -> str:
        """Return the end of error messages; empty if the files cannot be fetched."""
        if not self.torchvision:
            return ""
        root = config.data_root or "DIR"
        return f"To fetch: raceme run --dataset {self.name} --data-root {root} --download"

    def _from_torchvision(self, config: RunConfig, folder: Path) -> list[Any]:
        """Read the two parts of a dataset by torchvision; fetch them if requested."""
        torchvision_class = getattr(import_datasets(), self.torchvision)
        try:
            return [
                torchvision_class(config.data_root, train=train, download=config.download)
                for train in (True, False)
            ]
        except _DAMAGED as error:
            doing = "download or read" if config.download else "read"
            raise self._unusable(doing, folder, error, config) from error

    def _unusable(self, doing: str, folder: Path, reason: object, config: RunConfig) -> UserError:
        what = " ".join(str(reason).split()).rstrip(".") or type(reason).__name__
        end = f"{self._expected} {self._how_to_fetch(config)}".strip()
        return UserError(f"Could not {doing} {self.name} in {folder}: {what}. {end}")

    @property
    def _expected(self) -> str:
        """Required content of a folder, for error messages."""
        return ""


# -----------------------------------------------------------------------------
# Images and labels in four idx files.
# -----------------------------------------------------------------------------


MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The idx files, uncompressed."""
_BYTES = 0x08
"""Code of unsigned bytes in the header of an idx file."""


class IdxImages(ImageSource):
    """Images and labels in four idx files.

    Attributes
    ----------
    folders : tuple[str, ...]
        Folders under data-root that may hold the files.
    mean, std : float
        Mean and deviation of the pixels, from 0 to 1.
    classes : tuple[str, ...]
        Names of the classes.
    """

    fixed_shape: DataShape
    folders: tuple[str, ...]
    mean: float
    std: float
    classes: tuple[str, ...] = ()

    def load(self, config: RunConfig) -> Dataset:
        """Return train and test images pooled, shape (N, 1, side, side)."""
        files = self._found(config)
        arrays = cached(self.name, files, (1,), lambda: self._read(files, config))
        y = np.array(arrays["y"], np.int64)
        return Dataset(
            arrays["x"], y, num_classes=10, mean=self.mean, std=self.std, labels=self.classes
        )

    def _found(self, config: RunConfig) -> list[Path]:
        """Return the files; fetch missing ones if requested."""
        find, folder = source.all_of(MNIST_FILES), Path(config.data_root) / self.folders[0]
        if self.torchvision and config.download and not find(folder):
            self._from_torchvision(config, folder)
        missing = [name for name in MNIST_FILES if not (folder / name).is_file()]
        some = f" (missing: {', '.join(missing)})" if len(missing) < len(MNIST_FILES) else ""
        expected = f"{folder}/ with {', '.join(MNIST_FILES)}, uncompressed{some}"
        hint = self._how_to_fetch(config)
        return source.find_under(config, self.name, self.folders, find, expected, hint)

    def _read(self, files: Sequence[Path], config: RunConfig) -> Arrays:
        try:
            train_x, train_y, test_x, test_y = (read_idx(file) for file in files)
            x, y = np.concatenate([train_x, test_x]), np.concatenate([train_y, test_y])
        except (UserError, ValueError) as error:
            raise self._unusable("read", files[0].parent, error, config) from error
        side, highest = self.fixed_shape.input_shape[1], self.fixed_shape.num_classes - 1
        fits = x.shape[1:] == (side, side) and y.shape == (len(x),) and len(y) > 0
        if not fits or y.max() > highest:
            what = (
                f"expected images of {side}x{side} pixels and as many labels from 0 to "
                f"{highest}, got {x.shape} and {y.shape}"
            )
            raise self._unusable("read", files[0].parent, what, config)
        return {"x": x[:, np.newaxis], "y": y}

    @property
    def _expected(self) -> str:
        return f"Expected there: {', '.join(MNIST_FILES)}, uncompressed."


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes: two zeros, the type, the number of axes, their sizes, the data.

    Raises
    ------
    UserError
        The file cannot be read, or is no idx file.
    """
    with os_errors_as_user_errors(f"Cannot read {path}"):
        content = path.read_bytes()
    axes = content[3] if len(content) > 3 else 0
    if content[:3] != bytes([0, 0, _BYTES]) or len(content) < 4 + 4 * axes:
        raise UserError(f"{path} is not an idx file of bytes.")
    shape = tuple(np.frombuffer(content, ">u4", axes, 4).tolist())
    data = np.frombuffer(content, np.uint8, -1, 4 + 4 * axes)
    if data.size != math.prod(shape):
        raise UserError(
            f"{path} is truncated: its header states {shape}, its data are {data.size}."
        )
    return data.reshape(shape)


class Mnist(IdxImages):
    """MNIST: 70,000 handwritten digits, 28x28 pixels (data-root, or --download)."""

    default_clients = 100
    fixed_shape = DataShape((1, 28, 28), 10)

    name = "mnist"
    folders = ("MNIST/raw",)
    torchvision = "MNIST"
    mean = 0.1307
    std = 0.3081


class FashionMnist(Mnist):
    """Fashion-MNIST: 70,000 images of clothing, 28x28 pixels (data-root, or --download)."""

    target_accuracy = 0.9

    name = "fashion-mnist"
    folders = ("FashionMNIST/raw",)
    torchvision = "FashionMNIST"
    mean = 0.2860
    std = 0.3530
    classes = (
        "T-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )


class Usps(IdxImages):
    """USPS: 9,298 handwritten digits, 16x16 pixels (data-root)."""

    fixed_shape = DataShape((1, 16, 16), 10)

    name = "usps"
    folders = ("usps", "USPS", "USPS/raw", "")
    mean = 0.2573
    std = 0.3864


# -----------------------------------------------------------------------------
# Any folder of images, one folder per class; decoded once, then read from the cache.
# -----------------------------------------------------------------------------


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
"""Files with other endings are left out."""

_MOST_PIXELS = 1 << 26
"""Maximum of one image, 8,192 by 8,192: small files can claim billions."""
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, LookupError, OverflowError, MemoryError)
"""Exceptions of Pillow for a damaged file or a file that is no image."""
_PARTS = ("train", "test")
_EXPECTED = (
    "Expected: DIR/train/<class>/*.jpg and DIR/test/<class>/*.jpg, or DIR/<class>/*.jpg "
    f"(endings {', '.join(SUFFIXES)}), with at least two classes"
)


class Tree(NamedTuple):
    """The images of a folder.

    Attributes
    ----------
    files : tuple[Path, ...]
        All images, by part, class and name.
    labels : Indices
        Class of each, shape (N,).
    classes : tuple[str, ...]
        Names of the classes, in alphabetical order.
    """

    files: tuple[Path, ...]
    labels: Indices
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ImageFolderOptions:
    """Options of image folders."""

    image_size: int = option(0, "height and width (0: unchanged)", unit="px", low=0, high=8192)


class ImageFolder(ImageSource):
    """Images in one folder per class (data-root, with train/ and test/ or undivided)."""

    target_accuracy = 0.8
    options_type = ImageFolderOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return all images, of train/ and test/ together, shape (N, 3, height, width)."""
        if not config.data_root:
            raise UserError(
                f"image-folder needs the folder with the images: --data-root DIR. {_EXPECTED}."
            )
        tree = read_tree(Path(config.data_root))
        x = images(tree, config.read(ImageFolderOptions).image_size)
        # Typical mean and deviation of photographs, the same for all channels.
        classes = tree.classes
        return Dataset(x, tree.labels, len(classes), mean=0.5, std=0.25, labels=classes)


def read_tree(root: Path) -> Tree:
    """Find the images of a folder and their classes.

    Raises
    ------
    UserError
        There is no such folder, or its layout is wrong.
    """
    parts = [root / part for part in _PARTS if (root / part).is_dir()]
    found = [_by_class(part) for part in parts or [root]]
    classes = sorted({name for part in found for name in part})
    if len(classes) < 2:
        raise UserError(f"There are no images by class in {root}. {_EXPECTED}.")
    files = [(path, name) for part in found for name in sorted(part) for path in part[name]]
    labels = np.array([classes.index(name) for _, name in files], np.int64)
    return Tree(tuple(path for path, _ in files), labels, tuple(classes))


def images(tree: Tree, size: int = 0) -> NDArray[np.uint8]:
    """Return the images of a tree as RGB, shape (N, 3, height, width).

    Parameters
    ----------
    tree : Tree
        The images and their classes.
    size : int
        Height and width to resize to; 0 for no change.

    Raises
    ------
    UserError
        A file is not an image, or the images differ in size and `size` is 0.
    """
    arrays = cached("images", tree.files, (size,), lambda: {"x": _decoded(tree.files, size)})
    return np.asarray(arrays["x"], np.uint8)


def _by_class(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Return the images in each folder of a folder, sorted by name, if there are any."""
    with os_errors_as_user_errors(f"Cannot read {folder}", f". {_EXPECTED}."):
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
        listed = {
            path.name: [
                path / name for name in sorted(os.listdir(path)) if name.lower().endswith(SUFFIXES)
            ]
            for path in inner
        }
    return {name: files for name, files in listed.items() if files}


def _decoded(files: Sequence[Path], size: int) -> NDArray[np.uint8]:
    first = _decode(files[0], size)
    check_memory(2 * len(files) * first.size, f"All {len(files)} images, each like {files[0]},")
    pixels = np.empty((len(files), 3, *first.shape[:2]), np.uint8)
    for index, file in enumerate(files):
        image = _decode(file, size)
        if image.shape != first.shape:
            raise UserError(
                f"{file} has {image.shape[1]}x{image.shape[0]} pixels, {files[0]} has "
                f"{first.shape[1]}x{first.shape[0]}: set image-size, e.g. --set image-size=32."
            )
        pixels[index] = np.moveaxis(image, -1, 0)
    return pixels


def _decode(file: Path, size: int) -> NDArray[np.uint8]:
    """Return one image, shape (height, width, 3)."""
    try:
        check_regular(file)
        with warnings.catch_warnings():
            # Check the size before decoding.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ReadingError(
                        f"it has {image.width}x{image.height} pixels, more than {_MOST_PIXELS:,}"
                    )
                colours = image.convert("RGB")
        if size and colours.size != (size, size):
            colours = colours.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(colours, np.uint8)
    except (ReadingError, Image.DecompressionBombError, *_UNREADABLE) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"Cannot read the image {file}: {reason}.") from None


# -----------------------------------------------------------------------------
# CIFAR-10, from torchvision's files or as a folder of images.
# -----------------------------------------------------------------------------


BATCHES = "cifar-10-batches-py"
"""The folder of torchvision's files under data-root."""
IMAGES = "CIFAR10-images"
"""The folder of images under data-root: train/<class>/*.jpg and test/<class>/*.jpg."""

_MEAN = 0.4734
_STD = 0.2516


class Cifar10(ImageSource):
    """CIFAR-10: 60,000 photographs, 32x32 pixels (data-root, or --download)."""

    target_accuracy = 0.8
    default_clients = 100
    fixed_shape = DataShape((3, 32, 32), 10)

    name = "cifar10"
    torchvision = "CIFAR10"

    def load(self, config: RunConfig) -> Dataset:
        """Return train and test images pooled, shape (60000, 3, 32, 32).

        Mean and deviation are those of all three channels together.
        """
        root = Path(config.data_root)
        if not (config.data_root and config.download):
            source.find_under(
                config,
                self.name,
                (BATCHES, IMAGES),
                source.existing,
                f"{BATCHES}/ or {IMAGES}/, torchvision's files or {{train,test}}/<class>/*.jpg",
                self._how_to_fetch(config),
            )
        if (root / BATCHES).is_dir() or not (root / IMAGES).is_dir():
            # It compares checksums before it unpickles.
            parts = self._from_torchvision(config, root / BATCHES)
            x = np.concatenate([np.moveaxis(part.data, -1, 1) for part in parts])
            y = np.concatenate([np.asarray(part.targets, np.int64) for part in parts])
            x, labels = np.ascontiguousarray(x), tuple(parts[0].classes)
            return Dataset(x, y, num_classes=10, mean=_MEAN, std=_STD, labels=labels)
        tree = read_tree(root / IMAGES)
        x = images(tree)
        if x.shape[1:] != (3, 32, 32) or len(tree.classes) != 10:
            raise UserError(
                f"{root / IMAGES} must hold images of 32x32 pixels in 10 classes, got "
                f"{x.shape[3]}x{x.shape[2]} in {len(tree.classes)}; other images: image-folder."
            )
        return Dataset(x, tree.labels, 10, mean=_MEAN, std=_STD, labels=tree.classes)
