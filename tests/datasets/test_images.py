"""Datasets of images, on small generated files."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import rotate

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.registry import PARTITIONERS
from raceme.datasets.partition import rotated
from raceme.datasets.source import DataShape, cache_folder, cached, import_datasets
from raceme.training import models


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_folder(root: Path, parts: tuple[str, ...] = ("train", "test"), each: int = 6) -> None:
    """Write images whose red channel is the class and whose green channel is the number."""
    for part in parts:
        for label, name in enumerate(("ant", "bee")):
            for index in range(each):
                write_image(root / part / name / f"{index}.png", (100 * label, index, 0))


def folder_config(root: Path, **values: object) -> RunConfig:
    keys = {"dataset": "image-folder", "clients": 2, "partition": "iid", **values}
    return RunConfig(data_root=str(root)).with_values(**keys)


@pytest.mark.parametrize("parts", [("train", "test"), ("",)])
def test_an_image_folder_is_read(tmp_path: Path, parts: tuple[str, ...]) -> None:
    write_folder(tmp_path / "images", parts, each=6)
    (tmp_path / "images" / parts[0] / "ant" / "notes.txt").write_text("no image")
    data = datasets.load(folder_config(tmp_path / "images"))
    assert data.x.shape == (12 * len(parts), 3, 8, 8)
    assert data.x.dtype == np.uint8
    assert (data.num_classes, data.y.sum()) == (2, 6 * len(parts))
    np.testing.assert_array_equal(data.x[:, 0, 0, 0], 100 * data.y)
    # 100 / 255, less the mean 0.5, over the deviation 0.25.
    assert data.inputs(np.flatnonzero(data.y == 1)[:1])[0, 0, 0, 0] == pytest.approx(
        (100 / 255 - 0.5) / 0.25
    )


def test_images_are_decoded_once_and_again_when_they_change(tmp_path: Path) -> None:
    write_folder(tmp_path / "images")
    config = folder_config(tmp_path / "images")
    first = datasets.load(config).x
    (entry,) = cache_folder().iterdir()
    stamp = (entry / "x.npy").stat().st_mtime_ns
    datasets._load.cache_clear()
    np.testing.assert_array_equal(datasets.load(config).x, first)
    assert (entry / "x.npy").stat().st_mtime_ns == stamp
    changed = tmp_path / "images" / "train" / "ant" / "0.png"
    write_image(changed, (7, 7, 7))
    os.utime(changed, (1, 1))
    datasets._load.cache_clear()
    assert datasets.load(config).x[0, 0, 0, 0] == 7
    assert len(list(cache_folder().iterdir())) == 2


def test_a_damaged_or_unwritable_cache_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def build() -> dict[str, np.ndarray]:
        made.append(1)
        return {"x": np.arange(3)}

    cached("numbers", [], (), build)
    (entry,) = cache_folder().iterdir()
    (entry / "x.npy").write_bytes(b"nonsense")
    np.testing.assert_array_equal(cached("numbers", [], (), build)["x"], np.arange(3))
    assert len(made) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RACEME_CACHE", str(tmp_path / "file"))
    np.testing.assert_array_equal(cached("numbers", [], (), build)["x"], np.arange(3))


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_image(tmp_path / "train" / "ant" / "large.jpg", (0, 0, 0), (20, 10))
    with pytest.raises(UserError, match=r"large.jpg has 20x10 pixels, .* set image-size"):
        datasets.load(folder_config(tmp_path))
    assert datasets.load(folder_config(tmp_path, image_size=6)).x.shape == (25, 3, 6, 6)


def test_mistakes_in_an_image_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data-root DIR"):
        datasets.load(RunConfig(dataset="image-folder"))
    with pytest.raises(UserError, match=r"Cannot read .*nowhere"):
        datasets.load(folder_config(tmp_path / "nowhere"))
    write_image(tmp_path / "one" / "ant" / "0.png", (0, 0, 0))
    with pytest.raises(UserError, match=r"no images by class .* at least two classes"):
        datasets.load(folder_config(tmp_path / "one"))
    write_folder(tmp_path / "two")
    (tmp_path / "two" / "train" / "ant" / "0.png").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"Cannot read the image .*0.png"):
        datasets.load(folder_config(tmp_path / "two"))


def test_cifar10_is_read_from_torchvisions_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchvision_class = import_datasets().CIFAR10
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    sums = {}
    for number, name in enumerate(["data_batch_1", "test_batch", "batches.meta"]):
        content = {"data": np.full((10, 3072), number, np.uint8), "labels": list(range(10))}
        content["label_names"] = [str(label) for label in range(10)]
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    # Replaces torchvision's checksums by those of these smaller files.
    monkeypatch.setattr(torchvision_class, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(torchvision_class, "test_list", [["test_batch", sums["test_batch"]]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]}
    monkeypatch.setattr(torchvision_class, "meta", meta)
    config = RunConfig(dataset="cifar10", data_root=str(tmp_path), clients=2)
    data = datasets.load(config)
    assert data.x.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal(data.y, [*range(10), *range(10)])
    np.testing.assert_array_equal(data.x[:, 0, 0, 0], [0] * 10 + [1] * 10)
    (folder / "data_batch_1").write_bytes(b"nonsense")
    datasets._load.cache_clear()
    with pytest.raises(UserError, match=r"Could not read cifar10 .* To fetch: raceme run"):
        datasets.load(config)


def test_cifar10_is_read_from_image_files(tmp_path: Path) -> None:
    for label in range(10):
        write_image(
            tmp_path / "CIFAR10-images/train" / f"{label}" / "a.png", (label, 0, 0), (32, 32)
        )
        write_image(
            tmp_path / "CIFAR10-images/test" / f"{label}" / "b.png", (label, 0, 0), (32, 32)
        )
    data = datasets.load(RunConfig(dataset="cifar10", data_root=str(tmp_path), clients=2))
    np.testing.assert_array_equal(data.y, [*range(10), *range(10)])
    np.testing.assert_array_equal(data.x[:, 0, 5, 5], data.y)


def test_missing_cifar10_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cifar-10-batches-py/ or CIFAR10-images/"):
        datasets.load(RunConfig(dataset="cifar10"))
    with pytest.raises(UserError, match="--download"):
        datasets.load(RunConfig(dataset="cifar10", data_root=str(tmp_path)))


REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "CIFAR10-images").is_dir(), reason="CIFAR-10 is not here")
def test_the_real_cifar10() -> None:
    config = RunConfig(dataset="cifar10", data_root=str(REAL), clients=100)
    data = datasets.load(config)
    np.testing.assert_array_equal(np.bincount(data.y), [6000] * 10)
    client = datasets.client_data(config, 0)
    assert set(client.y_train) <= {0, 1}
    assert abs(float(client.x_train.mean())) < 0.5
    assert 0.7 < float(client.x_train.std()) < 1.3


def write_leaf(path: Path, users: dict[str, list[int]]) -> None:
    """Write a file as LEAF does; the pixels of a sample hold a hundredth of its label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    user_data = {
        name: {"x": [[label / 100] * 784 for label in labels], "y": labels}
        for name, labels in users.items()
    }
    sizes = [len(labels) for labels in users.values()]
    path.write_text(
        json.dumps({"users": list(users), "num_samples": sizes, "user_data": user_data})
    )


def femnist_config(root: Path, clients: int) -> RunConfig:
    return RunConfig(dataset="femnist", data_root=str(root), clients=clients)


def test_femnist_takes_the_writers_with_the_most_samples(tmp_path: Path) -> None:
    write_leaf(tmp_path / "data/train/a.json", {"f0": [1, 2], "f1": [3] * 5})
    write_leaf(tmp_path / "data/train/b.json", {"f2": [4] * 3})
    write_leaf(tmp_path / "data/test/a.json", {"f0": [1], "f1": [3], "f2": [4, 61]})
    data = datasets.load(femnist_config(tmp_path, 2))
    assert (data.num_classes, data.x.shape[1:]) == (62, (1, 28, 28))
    assert data.users is not None
    assert data.test_users is not None
    # f1 has 6 samples, f2 has 5.
    assert [data.y[own].tolist() for own in data.users] == [[3] * 5, [4] * 3]
    assert [data.y[own].tolist() for own in data.test_users] == [[3], [4, 61]]
    assert data.x[data.test_users[1][1], 0, 0, 0] == round(0.61 * 255)
    client = datasets.client_data(femnist_config(tmp_path, 2), 1)
    assert client.y_test.tolist() == [4, 61]
    assert client.group is None


def test_femnist_without_a_test_part_is_divided(tmp_path: Path) -> None:
    write_leaf(tmp_path / "all_data/a.json", {"f0": [1] * 10, "f1": [2] * 5})
    client = datasets.client_data(femnist_config(tmp_path, 2), 0)
    assert (len(client.y_train), len(client.y_test)) == (8, 2)


def test_mistakes_in_femnist_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not under .*preprocess.sh"):
        datasets.load(femnist_config(tmp_path, 2))
    path = tmp_path / "train" / "a.json"
    write_leaf(path, {"f0": [1, 2], "f1": [3]})
    with pytest.raises(UserError, match=r"Too many clients: 2, but .* only 1 writers"):
        datasets.load(femnist_config(tmp_path, 2))
    for text, message in (
        ("{", "Cannot read .* as JSON"),
        ("{}", "no 'user_data'"),
        ('{"user_data": {"f0": {"x": [[1, 2]], "y": [0]}}}', "writer 'f0': expected x with 784"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            datasets.load(femnist_config(tmp_path, 1))
    write_leaf(path, {"f0": [62, 1]})
    with pytest.raises(UserError, match="labels from 0 to 61"):
        datasets.load(femnist_config(tmp_path, 1))


def test_femnist_may_be_limited_to_some_characters(tmp_path: Path) -> None:
    # 36 is a, 45 is j.
    write_leaf(tmp_path / "all_data/a.json", {"f0": [1] * 9 + [36], "f1": [45, 36, 40, 61]})
    keys = {"dataset": "femnist", "data-root": str(tmp_path), "characters": "a-j"}
    config = RunConfig.from_mapping(keys)
    assert datasets.data_shape(config) == DataShape((1, 28, 28), 10)
    # f0 has a single sample of these characters.
    config = datasets.with_clients(config)
    assert config.clients == 1
    client = datasets.client_data(config, 0)
    assert sorted([*client.y_train, *client.y_test]) == [0, 4, 9]


def digits(**values: object) -> RunConfig:
    return RunConfig(dataset="digits", clients=10).with_values(**values)


def test_rotation_groups_turn_what_iid_clients_have() -> None:
    turned, upright = digits(partition="rotation-groups"), digits(partition="iid")
    # Shares 0.2, 0.2, 0.3, 0.3 of ten clients; K = 4 groups, turned by 0, 90, 180 and 270 degrees.
    assert datasets.true_groups(turned) == (0, 0, 1, 1, 2, 2, 2, 3, 3, 3)
    for client, quarters in ((0, 0), (2, 1), (4, 2), (9, 3)):
        ours, plain = datasets.client_data(turned, client), datasets.client_data(upright, client)
        np.testing.assert_array_equal(ours.y_train, plain.y_train)
        for part in ("x_train", "x_test"):
            wanted = np.rot90(getattr(plain, part), quarters, axes=(2, 3))
            np.testing.assert_array_equal(getattr(ours, part), wanted)


def test_angles_between_the_right_ones_turn_the_same_way() -> None:
    image = np.zeros((1, 1, 9, 9), np.float32)
    image[0, 0, 4, 8] = 1.0  # at the right; 45 degrees anticlockwise is up and to the right
    assert rotated(image, 90)[0, 0, 0, 4] == 1.0
    turned = rotated(image, 45)[0, 0]
    row, column = np.unravel_index(np.argmax(turned), turned.shape)
    assert row < 4 < column


def test_other_angles_are_bilinear_and_bring_blank_corners_into_view() -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, 2, 9, 8)).astype(np.float32)
    blank = np.array([[[-0.5]], [[2.0]]], np.float32)
    for degrees in (60.0, 120.0, 300.0, -17.0):
        wanted = [
            rotate(images[:, channel], degrees, (1, 2), False, None, 1, "grid-constant", value)
            for channel, value in enumerate(blank.ravel().tolist())
        ]
        turned = rotated(images, degrees, blank)
        assert turned.dtype == np.float32
        np.testing.assert_allclose(turned, np.stack(wanted, axis=1), atol=1e-5)
    # A rotation by a right angle moves whole pixels, so that `blank` does not matter.
    np.testing.assert_array_equal(
        rotated(images[..., :8, :], 90.0, blank), np.rot90(images[..., :8, :], axes=(2, 3))
    )


def test_corners_that_come_into_view_are_black(tmp_path: Path) -> None:
    write_folder(tmp_path, each=8)
    keys = {"partition": "rotation-groups", "groups": "3", "clients": 3}
    turned = datasets.client_data(folder_config(tmp_path, **keys), 1)
    # Less the mean 0.5 and over the deviation 0.25, a byte of 0 is -2.
    np.testing.assert_allclose(turned.x_train[:, :, 0, 0], -2.0, atol=1e-6)
    assert turned.group == 1


def test_noise_grows_from_group_to_group() -> None:
    noisy, plain = digits(partition="noise-groups", noise_std=0.6), digits(partition="iid")
    for client, level in ((0, 0.0), (2, 0.2), (4, 0.4), (9, 0.6)):
        ours, without = datasets.client_data(noisy, client), datasets.client_data(plain, client)
        assert float((ours.x_train - without.x_train).std()) == pytest.approx(level, rel=0.05)
        assert float((ours.x_test - without.x_test).std()) == pytest.approx(level, rel=0.1)
    again = datasets.client_data(noisy, 9).x_train
    np.testing.assert_array_equal(again, datasets.client_data(noisy, 9).x_train)
    assert not np.array_equal(again[:5], datasets.client_data(noisy, 9).x_test[:5])


def test_rotation_needs_images() -> None:
    config = RunConfig(dataset="synthetic", partition="rotation-groups")
    from raceme.datasets.partition import skew

    with pytest.raises(UserError, match="turns images, and synthetic has inputs of shape"):
        skew(np.zeros((2, 5), np.float32), config, 1, 0, "train")
    deal, labels = PARTITIONERS["rotation-groups"], np.arange(100) % 10
    with pytest.raises(UserError, match="is not even one"):
        deal(labels, config.with_values(clients=3), np.random.default_rng(0))


@pytest.mark.parametrize(("name", "shape"), [("cifar10", (3, 32, 32)), ("femnist", (1, 28, 28))])
def test_the_default_network_fits(name: str, shape: tuple[int, ...]) -> None:
    config = RunConfig(dataset=name)
    assert datasets.data_shape(config).input_shape == shape
    assert datasets.with_defaults(config).model == "cnn"
    models.initial_arrays(config)


# Generated idx files.


def test_idx_files_that_are_missing_or_of_something_else_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="usps is not under"):
        datasets.load(RunConfig(dataset="usps", data_root=str(tmp_path)))
    for part in ("train", "t10k"):
        for kind, values in (
            ("images-idx3", np.zeros((2, 16, 16), np.uint8)),
            ("labels-idx1", np.array([1, 10], np.uint8)),
        ):
            head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(head + values.tobytes())
    with pytest.raises(UserError, match="labels from 0 to 9"):
        datasets.load(RunConfig(dataset="usps", data_root=str(tmp_path)))
