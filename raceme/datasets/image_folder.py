"""Any folder of images, one folder per class; decoded once, then read from the cache."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.config.reading import ReadingError, check_regular
from raceme.config.room import check_room
from raceme.datasets.cache import cached
from raceme.datasets.source import Dataset, Indices, Source

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
"""Files with other endings are left out."""

_MOST_PIXELS = 1 << 26
"""Of one image: 8,192 by 8,192. A file of some kB can say that it has billions."""
_UNREADABLE = (
    *(OSError, ReadingError, UnidentifiedImageError, Image.DecompressionBombError),
    *(ValueError, SyntaxError, EOFError, LookupError, OverflowError, MemoryError),
)
"""What Pillow raises for what is damaged, and no image."""
_PARTS = ("train", "test")
_EXPECTED = (
    "Expected: DIR/train/<class>/*.jpg and DIR/test/<class>/*.jpg, or DIR/<class>/*.jpg "
    f"(endings {', '.join(SUFFIXES)}), with at least two classes"
)


@dataclass(frozen=True)
class Tree:
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
    """What is done with the images."""

    image_size: int = option(0, "height and width (0: as they are)", unit="px", low=0, high=8192)


class ImageFolder(Source):
    """Images in folders named after their class, in data-root (train/ and test/, or one tree)."""

    default_model = "cnn"
    default_lr = 0.01
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
        # Near the mean and deviation of photographs; one pair serves all channels.
        return Dataset(x, tree.labels, num_classes=len(tree.classes), mean=0.5, std=0.25)


def read_tree(root: Path) -> Tree:
    """Find the images of a folder and their classes.

    Raises
    ------
    UserError
        There is no such folder, or it is not laid out as it should be.
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
        Which ones.
    size : int
        Height and width that they are brought to; 0 leaves them as they are.

    Raises
    ------
    UserError
        A file is not an image, or the images differ in size and `size` is 0.
    """
    arrays = cached("images", tree.files, (size,), lambda: {"x": _decoded(tree.files, size)})
    return np.asarray(arrays["x"], np.uint8)


def _by_class(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Return the images in each folder of a folder, sorted by name, if there are any."""
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
        listed = {
            path.name: [
                path / name for name in sorted(os.listdir(path)) if name.lower().endswith(SUFFIXES)
            ]
            for path in inner
        }
    except OSError as error:
        raise UserError(f"Cannot read {folder}: {error.strerror}. {_EXPECTED}.") from None
    return {name: files for name, files in listed.items() if files}


def _decoded(files: Sequence[Path], size: int) -> NDArray[np.uint8]:
    first = _decode(files[0], size)
    check_room(2 * len(files) * first.size, f"All {len(files)} images, each like {files[0]},")
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
            # The bound is ours: nothing is decoded before the size is known.
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
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"Cannot read the image {file}: {reason}.") from None
