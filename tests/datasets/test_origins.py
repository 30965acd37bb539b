"""Digits of different origin, on small generated files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.images import MNIST_FILES, _shaped

REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))


def config_of(root: Path, clients: int = 4, **keys: object) -> RunConfig:
    given = {"dataset": "digits-by-origin", "data-root": str(root), "clients": clients, **keys}
    return RunConfig.from_mapping({name.replace("_", "-"): value for name, value in given.items()})


def write_idx(folder: Path, side: int, level: int, sizes: tuple[int, int]) -> None:
    """Write digits whose pixels all have one level of grey."""
    folder.mkdir(parents=True)
    for (images, labels), size in zip((MNIST_FILES[:2], MNIST_FILES[2:]), sizes, strict=True):
        x = np.full((size, side, side), level, np.uint8)
        y = (np.arange(size) % 10).astype(np.uint8)
        for name, values in ((images, x), (labels, y)):
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
            (folder / name).write_bytes(head + values.tobytes())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_idx(tmp_path / "MNIST" / "raw", 28, 100, (40, 20))
    write_idx(tmp_path / "usps", 16, 200, (20, 10))
    return tmp_path


def test_each_origin_is_the_true_group_of_as_many_clients(root: Path) -> None:
    config = config_of(root)
    assert datasets.data_shape(config).input_shape == (1, 28, 28)
    assert datasets.true_groups(config) == (0, 0, 1, 1)
    data = datasets.load(config)
    assert data.users is not None
    assert [len(own) for own in data.users] == [30, 30, 15, 15]
    assert sorted(np.concatenate(data.users).tolist()) == list(range(90))
    for client, level in enumerate((100, 100, 200, 200)):
        assert (data.x[data.users[client]] == level).all()


def test_a_mixture_of_origins(root: Path) -> None:
    config = config_of(root, drift="mixture", mixture_size_low=20, mixture_size_high=20)
    data = datasets.client_data(config, 3)
    whole = datasets.load(config)
    dark = np.isclose(data.x_train[:, 0, 0, 0], whole.inputs(np.array([89]))[0, 0, 0, 0])
    assert data.mixture is not None
    assert dark.mean() == pytest.approx(data.mixture[1])
    assert 0.4 <= data.mixture[1] <= 0.9


def test_small_digits_are_enlarged_bilinearly() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 1, 16, 16), np.uint8)
    wanted = Image.fromarray(image[0, 0]).resize((28, 28), Image.Resampling.BILINEAR)
    enlarged = _shaped(image, (1, 28, 28))[0, 0].astype(int)
    assert np.abs(enlarged - np.asarray(wanted).astype(int)).max() <= 1
    assert _shaped(image, (3, 32, 32)).shape == (1, 3, 32, 32)


def test_colours_where_an_origin_has_them(root: Path) -> None:
    (root / "SVHN").mkdir()
    x = np.zeros((32, 32, 3, 10), np.uint8)
    x[:, :, 1] = 50
    for name in ("train_32x32.mat", "test_32x32.mat"):
        savemat(root / "SVHN" / name, {"X": x, "y": np.arange(1, 11)[:, None]})
    for digit in (3, 8):
        (root / "CCPD" / str(digit)).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (20, 30), (0, 0, 90)).save(root / "CCPD" / f"{digit}/{number}.png")
    config = config_of(root, clients=3, origins="mnist+usps,svhn,ccpd")
    data = datasets.load(config)
    assert data.shape == datasets.data_shape(config)
    assert data.x.shape == (90 + 20 + 8, 3, 32, 32)
    assert data.groups == (0, 1, 2)
    # SVHN's digit 0 has the label 10.
    assert data.y[90:100].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert data.y[110:].tolist() == [3] * 4 + [8] * 4
    assert data.x[95, :, 4, 4].tolist() == [0, 50, 0]
    assert data.x[117, :, 4, 4].tolist() == [0, 0, 90]
    assert data.x[0, :, 4, 4].tolist() == [100] * 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"origins": "mnist,emnist"}, r"origins 'mnist,emnist' must name each of mnist, usps"),
        ({"origins": "mnist,mnist"}, r"at most once"),
        ({"origins": "mnist,svhn"}, r"svhn is not under '.*expected SVHN/ with train_32x32.mat"),
        ({"origins": "ccpd"}, r"ccpd is not under '.*expected CCPD/ with images in folders"),
        ({"clients": 1}, r"at least 2 clients, got 1"),
        ({"clients": 40}, r"origin usps has 30 digits, too few for 20 clients"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    root: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        datasets.load(config_of(root, **keys))


@pytest.mark.skipif(not (REAL / "usps").is_dir(), reason="no usps")
def test_the_real_digits() -> None:
    data = datasets.load(config_of(REAL.resolve(), clients=10))
    assert data.users is not None
    assert [len(own) for own in data.users] == [14_000] * 5 + [1860] * 3 + [1859] * 2
