"""EMNIST: ten of its letters, upright, from idx files made here."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError


def write(folder: Path, labels: dict[str, list[int]]) -> None:
    """Write images that are 0 but for one pixel, row 3 and column 5 as they are to be seen."""
    folder.mkdir(parents=True)
    for part, own in labels.items():
        images = np.zeros((len(own), 28, 28), np.uint8)
        images[:, 5, 3] = np.arange(len(own)) + 1
        for kind, values in (("images-idx3", images), ("labels-idx1", np.array(own, np.uint8))):
            head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            (folder / f"emnist-letters-{part}-{kind}-ubyte").write_bytes(head + values.tobytes())


@pytest.mark.parametrize("inner", ["EMNIST/raw", "emnist", ""])
def test_the_letters_a_to_j_are_read_upright(tmp_path: Path, inner: str) -> None:
    root = tmp_path / "root"
    write(root / inner, {"train": [1, 10, 11, 26], "test": [5, 12]})
    data = datasets.load(RunConfig(dataset="emnist", data_root=str(root)))
    assert data.y.tolist() == [0, 9, 4]
    assert data.x[:, 0, 3, 5].tolist() == [1, 2, 1]
    assert data.x.sum() == 4
    assert data.shape == datasets.data_shape(RunConfig(dataset="emnist", clients=2))


def test_files_that_are_missing_or_of_something_else_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="emnist is not under"):
        datasets.load(RunConfig(dataset="emnist", data_root=str(tmp_path)))
    write(tmp_path / "emnist", {"train": [0, 1], "test": [1]})
    with pytest.raises(UserError, match="labels from 1 to 26"):
        datasets.load(RunConfig(dataset="emnist", data_root=str(tmp_path)))
