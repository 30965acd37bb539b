"""Data in .npz files, in a folder of them, and given as arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.images import read_idx
from raceme.datasets.source import Dataset, DataShape, Target, suited
from raceme.runs import experiment
from raceme.training import models

REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))


def folder(root: Path, **keys: object) -> RunConfig:
    return RunConfig(dataset="npz-folder", data_root=str(root), **keys)  # type: ignore[arg-type]


def write(root: Path, name: str, count: int = 6, shape: tuple[int, ...] = (3,), **more: object):
    rng = np.random.default_rng(count)
    arrays = {"x": rng.normal(3.0, 2.0, (count, *shape)), "y": np.arange(count) % 3}
    np.savez(root / f"{name}.npz", **(arrays | more))


# Folders.


def test_every_file_is_a_client_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    for person, count in ((10, 5), (2, 10)):
        write(tmp_path, f"person-{person}", count)
    config = datasets.with_defaults(folder(tmp_path))
    assert (config.clients, config.model) == (2, "mlp")
    assert datasets.client_names(config) == ("person-2", "person-10")
    data = datasets.client_data(config, 0)
    # Files are in numeric order, 2 before 10; four fifths of ten samples are for training.
    assert (len(data.y_train), len(data.y_test)) == (8, 2)
    assert datasets.data_shape(config) == DataShape((3,), 3)
    assert len(datasets.all_clients(folder(tmp_path, clients=1))) == 1
    with pytest.raises(UserError, match=r"Too many clients: 3, .* only 2 \.npz files"):
        datasets.load(folder(tmp_path, clients=3))


def test_a_constant_guess_is_each_clients_own(tmp_path: Path) -> None:
    held = np.array([0, 0, 0, 0, 1, 1], bool)
    # The guess is right for one of two test samples, and for both.
    write(tmp_path, "1", y=np.array([2, 2, 2, 0, 2, 1]), heldout=held)
    write(tmp_path, "2", y=np.array([0, 1, 0, 0, 0, 0]), heldout=held)
    assert datasets.constant_guess(datasets.with_defaults(folder(tmp_path))) == (0.5 + 1.0) / 2


def test_the_constant_guess_of_a_quantity_is_the_mean(tmp_path: Path) -> None:
    held = np.array([0, 0, 0, 0, 1, 1], bool)
    # Means 2.5 and 10: absolute errors 1.5 and 0.5, and 0 and 2.
    write(tmp_path, "1", y=np.array([1.0, 2.0, 3.0, 4.0, 4.0, 3.0]), heldout=held, unit="m")
    write(tmp_path, "2", y=np.array([9.0, 11.0, 10.0, 10.0, 10.0, 12.0]), heldout=held, unit="m")
    assert datasets.constant_guess(datasets.with_defaults(folder(tmp_path))) == pytest.approx(1.0)


def test_a_file_without_a_clients_name_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "Anna Müller")
    write(tmp_path, "Ben\u00a0Meier")
    with pytest.raises(UserError, match=r"The client 'Ben\\xa0Meier' needs another name"):
        datasets.load(folder(tmp_path, clients=2))


def test_only_held_out_samples_are_tested(tmp_path: Path) -> None:
    held = np.array([False, True, False, False, True, False])
    write(tmp_path, "1", heldout=held)
    data = datasets.client_data(folder(tmp_path), 0)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 2, 0, 2], [1, 1])


def test_files_may_hold_the_four_arrays_of_a_devices_own_file(tmp_path: Path) -> None:
    parts = {"x_train": np.ones((3, 6)), "y_train": [0, 1, 2]}
    np.savez(tmp_path / "1.npz", **parts, x_test=np.zeros((2, 6)), y_test=[1, 1])
    data = datasets.client_data(folder(tmp_path), 0)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1, 2], [1, 1])
    write(tmp_path, "2", shape=(6,))
    with pytest.raises(UserError, match=r"have test samples .* and others have not"):
        datasets.load(folder(tmp_path))


def test_windows_are_normalised_by_channel_over_training_samples(tmp_path: Path) -> None:
    # Two channels of four readings: the second is constant, and a hundred times larger.
    x = np.zeros((4, 2, 4), np.float16)
    x[:, 0] = [[[1, 3, 1, 3]], [[1, 3, 1, 3]], [[9, 9, 9, 9]], [[1, 3, 1, 3]]][0]
    x[:, 1] = 200.0
    x[2, 0] = 9.0
    held = np.array([False, False, True, False])
    np.savez(tmp_path / "1.npz", x=x, y=[0, 1, 1, 0], heldout=held)
    data = datasets.client_data(folder(tmp_path), 0)
    # The training samples have mean 2 and deviation 1, so that 9 becomes 7.
    assert data.x_train.dtype == np.float32
    assert data.x_train[0].tolist() == [[-1.0, 1.0, -1.0, 1.0], [0.0] * 4]
    assert data.x_test[0, 0].tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 5), 1), ((5, 2), 2), ((4, 4), 1), ((3, 8, 8), 1), ((7,), 1)]
)
def test_the_axis_of_the_channels_is_recognised(
    tmp_path: Path, shape: tuple[int, ...], axis: int
) -> None:
    write(tmp_path, "1", 200, shape, heldout=np.arange(200) > 149)
    data = datasets.client_data(folder(tmp_path), 0)
    rest = tuple(i for i in range(data.x_train.ndim) if i != axis)
    np.testing.assert_allclose(data.x_train.mean(axis=rest), 0.0, atol=1e-5)
    np.testing.assert_allclose(data.x_train.std(axis=rest), 1.0, atol=1e-5)


def test_bytes_are_images_and_whole_numbers_in_a_row_are_text(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(tmp_path, "1", 6, x=rng.integers(0, 256, (6, 12, 12), dtype=np.uint8))
    config = datasets.with_defaults(folder(tmp_path))
    assert (config.model, datasets.data_shape(config).input_shape) == ("cnn", (1, 12, 12))
    (tmp_path / "text").mkdir()
    write(tmp_path / "text", "1", 6, x=rng.integers(0, 30, (6, 12)), y=np.full(6, 40))
    config = datasets.with_defaults(folder(tmp_path / "text"))
    # Labels may be tokens too: the vocabulary covers the largest of both.
    assert config.model == "gru"
    assert datasets.data_shape(config) == DataShape((12,), 41, 41)
    data = datasets.client_data(config, 0)
    assert np.array_equal(data.x_train, np.round(data.x_train))
    assert data.x_train.max() > 1


def test_groups_are_stated_or_told_from_the_names(tmp_path: Path) -> None:
    for name in ("lab_1", "field_1", "lab_2", "field_02"):
        write(tmp_path, name)
    assert datasets.true_groups(folder(tmp_path)) == (0, 0, 1, 1)
    stated = tmp_path / "stated"
    stated.mkdir()
    for number, name in enumerate(("lab_1", "field_1", "lab_2", "field_02")):
        write(stated, name, group=np.array(number % 2 + 5))
    assert datasets.true_groups(folder(stated)) == (6, 6, 5, 5)
    alike = tmp_path / "alike"
    alike.mkdir()
    for name in ("person_1", "person_2"):
        write(alike, name)
    assert datasets.true_groups(folder(alike)) == (None, None)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.full((2, 3), np.nan)}, "must be finite"),
        ({"x": np.zeros(6)}, "must hold numbers"),
        ({"y": np.zeros(6)}, "whole numbers"),
        ({"y": np.zeros(5, int)}, r"shape \(6,\)"),
        ({"heldout": np.zeros(6)}, "heldout must hold one bool for each of 6"),
        ({"heldout": np.zeros(6, bool)}, "at least one sample for training and one for test"),
        ({"group": np.array(-1)}, "group must be one whole number"),
        ({"num_classes": np.array(2)}, "num_classes must be one whole number, at least 3"),
    ],
)
def test_mistakes_in_a_file_are_reported(
    tmp_path: Path, arrays: dict[str, object], message: str
) -> None:
    write(tmp_path, "7", **arrays)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as caught:
        datasets.load(folder(tmp_path))
    assert "7.npz" in str(caught.value)


def test_mistakes_in_a_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="npz-folder needs the folder"):
        datasets.load(RunConfig(dataset="npz-folder"))
    with pytest.raises(UserError, match=r"no .npz files in .*Expected in each file"):
        datasets.load(folder(tmp_path))
    write(tmp_path, "1")
    write(tmp_path, "2", shape=(4,))
    with pytest.raises(UserError, match=r"different shapes: \(3,\), \(4,\)"):
        datasets.load(folder(tmp_path))
    np.savez(tmp_path / "1.npz", x=np.ones((3, 2)))
    with pytest.raises(UserError, match=r"1.npz lacks y. Expected"):
        datasets.load(folder(tmp_path, clients=1))


# Suitable models.


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        (DataShape((9, 128), 6), "cnn1d"),
        (DataShape((128, 9), 6), "cnn1d"),
        (DataShape((2048,), 7), "cnn1d"),
        (DataShape((128,), 6), "mlp"),
        (DataShape((1, 28, 28), 62), "cnn"),
        (DataShape((3, 3, 3), 2), "mlp"),
        (DataShape((80,), 77, tokens=77), "gru"),
    ],
)
def test_the_default_model_fits(shape: DataShape, model: str) -> None:
    name, lr = suited(shape)
    assert (name, lr > 0) == (model, True)
    models.build(name, shape.input_shape, shape.num_classes, tokens=shape.tokens)


# USPS.


def test_usps_files_of_16_by_16_pixels_are_read(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    for name, count in (("train", 60), ("t10k", 20)):
        images = np.full((count, 16, 16), count, np.uint8)
        for kind, axes, values in (("images", 3, images), ("labels", 1, np.arange(count) % 10)):
            head = bytes([0, 0, 8, axes]) + np.array(values.shape, ">u4").tobytes()
            body = np.asarray(values, np.uint8).tobytes()
            (tmp_path / "usps" / f"{name}-{kind}-idx{axes}-ubyte").write_bytes(head + body)
    data = datasets.load(RunConfig(dataset="usps", data_root=str(tmp_path)))
    assert (data.x.shape, data.x[0].max(), data.x[-1].max()) == ((80, 1, 16, 16), 60, 20)
    path = tmp_path / "usps" / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is truncated"):
        read_idx(path)
    path.write_bytes(b"no idx")
    with pytest.raises(UserError, match="not an idx file"):
        read_idx(path)
    with pytest.raises(UserError, match="usps is not under"):
        datasets.load(RunConfig(dataset="usps", data_root=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="usps needs the folder with its files: --data-root DIR"):
        datasets.load(RunConfig(dataset="usps"))


# Settings in dataset.toml.


def test_a_description_has_the_defaults_of_runs(tmp_path: Path) -> None:
    write(tmp_path, "1", shape=(13, 24))
    assert datasets.with_defaults(folder(tmp_path)).model == "cnn1d"
    (tmp_path / "dataset.toml").write_text('model = "mclr"\nlr = 0.02\ntarget-accuracy = 0.7\n')
    config = datasets.with_defaults(folder(tmp_path))
    assert (config.model, config.lr, datasets.default_target(config)) == ("mclr", 0.02, 0.7)
    config = datasets.with_defaults(folder(tmp_path, model="mlp", lr=0.3))
    assert (config.model, config.lr) == ("mlp", 0.3)


def test_inputs_are_used_as_they_are_where_the_description_says_so(tmp_path: Path) -> None:
    x = np.arange(6.0).reshape(6, 1)
    write(tmp_path, "1", x=x, heldout=np.arange(6) > 3)
    assert datasets.client_data(folder(tmp_path), 0).x_train.mean() == pytest.approx(0.0)
    (tmp_path / "dataset.toml").write_text("mean = 0.0\nstd = 1.0\n")
    datasets.forget()
    assert datasets.client_data(folder(tmp_path), 0).x_train.ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 'mlp'", r"Unknown key of .*dataset.toml 'modle'. Did you mean 'model'"),
        ("mean = 1.0", r"dataset.toml has mean alone: mean and std are given together"),
        ("lr = -1.0", r"lr in .*dataset.toml must be greater than 0, got -1"),
        ("model = 'os:system'", r"Unknown model in .*dataset.toml 'os:system'"),
        ("model", r"The description .*dataset.toml is not valid TOML"),
    ],
)
def test_a_wrong_description_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "1")
    (tmp_path / "dataset.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        datasets.with_defaults(folder(tmp_path))


def test_a_folder_below_data_root(tmp_path: Path) -> None:
    (tmp_path / "people").mkdir()
    write(tmp_path / "people", "anna")
    config = RunConfig.from_mapping(
        {"dataset": "npz-folder", "data-root": str(tmp_path), "data-folder": "people"}
    )
    assert datasets.client_names(config) == ("anna",)


def test_periods_are_whole_numbers_of_all_samples_of_all_files(tmp_path: Path) -> None:
    write(tmp_path, "1", period=np.arange(6) // 2)
    found = datasets.load(folder(tmp_path, clients=1)).periods
    assert found is not None
    assert found.tolist() == [0, 0, 1, 1, 2, 2]
    write(tmp_path, "2")
    with pytest.raises(UserError, match="have a period of each sample and others have not"):
        datasets.load(folder(tmp_path, clients=2))
    write(tmp_path, "2", period=np.arange(5))
    with pytest.raises(UserError, match=r"2.npz: period must hold whole numbers, shape \(6,\)"):
        datasets.load(folder(tmp_path, clients=2))


# Real files.


@pytest.mark.parametrize(
    ("name", "clients", "model", "shape", "groups"),
    [
        ("uci_har_by_person", 30, "cnn1d", DataShape((9, 128), 6), 0),
        ("unipen_by_writer", 248, "cnn", DataShape((1, 28, 28), 62), 15),
        ("omniglot_small_by_drawer", 160, "cnn", DataShape((1, 28, 28), 47), 8),
        ("fsdd_by_speaker", 6, "cnn1d", DataShape((32, 32), 10), 0),
        ("gas_drift_batches", 8, "mlp", DataShape((128,), 6), 0),
        ("hit_bearing_by_machine", 6, "cnn1d", DataShape((2048,), 7), 2),
    ],
)
def test_real_folders(name: str, clients: int, model: str, shape: DataShape, groups: int) -> None:
    if not (REAL / name).is_dir():
        pytest.skip(f"no {name}")
    config = datasets.with_defaults(folder(REAL / name))
    assert (config.clients, config.model, datasets.data_shape(config)) == (clients, model, shape)
    assert len(set(datasets.true_groups(config)) - {None}) == groups
    x = datasets.client_data(config, 0).x_train
    assert x.dtype == np.float32
    assert abs(x.mean()) < 1.0
    assert 0.3 < x.std() < 3.0


# Labels of .npz files that are quantities: their scaling, and the distinction from classes.


CELSIUS = {"unit": "°C", "y_mean": 20.0, "y_std": 10.0}


def write_quantity(path: Path, temperatures: object = (20.0, 35.0, 10.0), **more: object) -> Path:
    """Write a device's file with one training and one test sample for each temperature."""
    y = np.asarray(temperatures)
    x = np.ones((len(y), 2), np.float32)
    np.savez(path, **{"x_train": x, "y_train": y, "x_test": x, "y_test": y, **more})  # type: ignore[arg-type]
    return path


def device(path: Path, **keys: object) -> RunConfig:
    return RunConfig(dataset="npz", clients=1, options={"data-file": str(path)}, **keys)  # type: ignore[arg-type]


# A device's own file.


def test_a_quantity_is_scaled_as_its_file_says(tmp_path: Path) -> None:
    run = device(write_quantity(tmp_path / "a.npz", **CELSIUS))
    target = Target("°C", 20.0, 10.0)
    assert datasets.data_shape(run) == DataShape((2,), 0, target=target)
    own = datasets.client_data(run, 0)
    assert own.y_train.dtype == np.float32
    assert own.y_train.tolist() == own.y_test.tolist() == [0.0, 1.5, -1.0]


def test_whole_numbers_with_a_unit_are_a_quantity_as_it_is(tmp_path: Path) -> None:
    run = device(write_quantity(tmp_path / "a.npz", [3, -7], unit=""))
    assert datasets.data_shape(run).target == Target("", 0.0, 1.0)
    assert datasets.client_data(run, 0).y_train.tolist() == [3.0, -7.0]


def test_whole_numbers_without_one_are_classes(tmp_path: Path) -> None:
    run = device(write_quantity(tmp_path / "a.npz", [3, 0]))
    assert datasets.data_shape(run) == DataShape((2,), 4)
    assert datasets.client_data(run, 0).y_train.dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({}, r"a\.npz: y_train must hold whole numbers, .* A quantity needs its unit, a text"),
        ({"y_mean": 0.0, "y_std": 1.0}, "has y_mean and y_std, .* but no unit"),
        ({"unit": 5}, "unit must be one text of at most 24 characters, such as '°C'; got '5'"),
        ({"unit": "x" * 25}, "unit must be one text"),
        ({"unit": "a\x1b[31m"}, "unit must be one text"),
        ({"unit": ["a", "b"]}, "unit must be one text"),
        ({"unit": "K", "y_std": 1.0}, "has y_std alone: y_mean and y_std must be given together"),
        ({**CELSIUS, "y_std": 0.0}, "y_std must be above 0, got 0"),
        ({**CELSIUS, "y_std": np.nan}, "y_std must be one finite number"),
        ({**CELSIUS, "y_mean": np.zeros(2)}, "y_mean must be one finite number"),
        ({**CELSIUS, "y_mean": 1e300}, "y_mean must be one finite number"),
        ({**CELSIUS, "num_classes": 3}, "has num_classes and unit: labels are either classes or"),
        ({**CELSIUS, "y_std": 1e-40}, r"labels are too many y_std .1e-40. from y_mean"),
        ({**CELSIUS, "y_test": np.array([1.0, np.nan, 2.0])}, "y_test must be finite"),
        ({**CELSIUS, "y_test": np.array([1.0, 1e300, 2.0])}, "y_test must be finite"),
        ({**CELSIUS, "y_test": np.ones(2)}, r"y_test must hold numbers, shape \(3,\)"),
        ({**CELSIUS, "y_test": np.array(["a"] * 3)}, "y_test must hold numbers"),
    ],
)
def test_mistakes_in_a_quantity_are_reported(
    tmp_path: Path, arrays: dict[str, object], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        datasets.load(device(write_quantity(tmp_path / "a.npz", **arrays)))


def test_files_of_one_model_must_agree(tmp_path: Path) -> None:
    write_quantity(tmp_path / "d0.npz", **CELSIUS)
    write_quantity(tmp_path / "d1.npz", **{**CELSIUS, "y_std": 5.0})
    run = device(tmp_path / "d{client}.npz").with_values(clients=2)
    told = r"d0\.npz must describe their labels alike.* y_mean 20, y_std 5 and unit '°C', .* 10\."
    with pytest.raises(UserError, match=told):
        datasets.load(run)
    write_quantity(tmp_path / "d1.npz", [1, 2])
    datasets.forget()
    with pytest.raises(UserError, match="their labels alike: classes and unit '°C'"):
        datasets.load(run)


# A folder of files.


def test_a_quantity_is_scaled_by_the_training_samples_of_all_files(tmp_path: Path) -> None:
    x = np.arange(8.0).reshape(4, 2)
    held = np.array([False, False, True, True])
    for name, first in (("a", 1.0), ("b", 3.0)):
        y = np.array([first, first, 100.0, -100.0])
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, heldout=held, unit="mm")
    run = folder(tmp_path)
    # 1, 1, 3, 3: mean 2, deviation 1.
    assert datasets.data_shape(run) == DataShape((2,), 0, target=Target("mm", 2.0, 1.0))
    own = datasets.client_data(run, 0)
    assert own.y_train.tolist() == [-1.0, -1.0]
    assert own.y_test.tolist() == [98.0, -102.0]
    # The same from the cache; then with the scaling that the files state.
    datasets.forget()
    assert datasets.data_shape(run).target == Target("mm", 2.0, 1.0)
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.ones(4), unit="mm", y_mean=5.0, y_std=2.0)
    datasets.forget()
    assert datasets.data_shape(run).target == Target("mm", 5.0, 2.0)
    assert datasets.client_data(run, 1).y_test.tolist() == [-2.0]


def test_a_folder_takes_the_four_arrays_of_a_device_and_a_quantity_that_never_changes(
    tmp_path: Path,
) -> None:
    write_quantity(tmp_path / "a.npz", [7.0, 7.0], unit="K")
    assert datasets.data_shape(folder(tmp_path)).target == Target("K", 7.0, 1.0)
    assert datasets.client_data(folder(tmp_path), 0).y_test.tolist() == [0.0, 0.0]


def test_characters_are_no_quantity(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 1, 28, 28)), y=np.arange(4.0), unit="K")
    with pytest.raises(UserError, match=r"holds no characters"):
        datasets.load(RunConfig(dataset="characters", data_root=str(tmp_path), clients=1))


@pytest.mark.parametrize("partition", ["label-groups", "dirichlet", "classes"])
def test_quantities_are_not_dealt_by_label(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((40, 3), np.float32)
    y = np.linspace(0, 1, 40, dtype=np.float32)
    whole = Dataset(x, y, num_classes=0, target=Target("K"))
    monkeypatch.setattr(datasets, "_load", lambda config: whole)
    monkeypatch.setattr(datasets, "_data_shape", lambda config: whole.shape)
    config = RunConfig(dataset="digits", clients=4, partition=partition)
    with pytest.raises(UserError, match=f"partition {partition} needs classes, and the labels"):
        datasets.true_groups(config)
    assert datasets.true_groups(config.with_values(partition="iid")) == (None,) * 4
    datasets._deal.cache_clear()
    datasets._drift.cache_clear()


@pytest.mark.parametrize("model", ["mlp", "mclr", "gru", "lstm", "cnn1d", "mlp128"])
def test_models_of_a_quantity_have_one_output(tmp_path: Path, model: str) -> None:
    write(tmp_path, "1", shape=(13, 24), unit="K")
    *_, bias = models.initial_arrays(folder(tmp_path, clients=1, model=model)).values()
    assert bias.shape == (1,)


# The server's samples.


def proxy(path: Path, **more: object) -> None:
    x, y = np.ones((5, 2), np.float32), np.array([10.0, 20.0, 30.0, 40.0, 25.0])
    np.savez(path, **{"x": x, "y": y, "x_train": x, "y_train": y, **CELSIUS, **more})  # type: ignore[arg-type]


def test_a_servers_own_samples_have_the_same_scale(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    for name in ("a", "b"):
        proxy(tmp_path / "sets" / f"{name}.npz")
    server = RunConfig(dataset="npz", clients=1, proxy=str(tmp_path / "sets"), pretrain=2)
    assert datasets.data_shape(server) == DataShape((2,), 0, target=Target("°C", 20.0, 10.0))
    assert datasets.proxy_sets(server).proxies[1].y.tolist() == [-1.0, 0.0, 1.0, 2.0, 0.5]
    assert datasets.pretraining(server)[0].y.tolist() == [-1.0, 0.0]
    clients = device(write_quantity(tmp_path / "d.npz", unit="°C", y_mean=0.0, y_std=1.0))
    told = r"describe labels as the clients' data do, unit '°C', y_mean 0, y_std 1; got unit '°C'"
    with pytest.raises(UserError, match=told):
        datasets.proxy_sets(clients.with_values(proxy=server.proxy))
    proxy(tmp_path / "sets" / "b.npz", unit="K")
    datasets.forget()
    with pytest.raises(UserError, match=r"b\.npz and .*a\.npz must describe their labels alike"):
        datasets.proxy_sets(server)


# Runs.


@pytest.mark.parametrize(("arrays", "target"), [(CELSIUS, 2.5), ({"unit": ""}, 0.25)])
def test_a_run_is_timed_to_a_quarter_of_the_deviation(
    tmp_path: Path, arrays: dict[str, object], target: float
) -> None:
    run = device(write_quantity(tmp_path / "a.npz", **arrays))
    assert experiment.resolve(run).target_accuracy == target
    assert experiment.resolve(run.with_values(target_accuracy=3.0)).target_accuracy == 3.0
    classes = device(write_quantity(tmp_path / "b.npz", [0, 1]))
    assert experiment.resolve(classes).target_accuracy == 0.9
    # 123.4 / 4, rounded to two digits.
    long = device(write_quantity(tmp_path / "c.npz", unit="K", y_mean=0.0, y_std=123.4))
    assert experiment.resolve(long).target_accuracy == 31.0


def test_cdfl_on_devices_that_measure_a_quantity(tmp_path: Path) -> None:
    rng, watts = np.random.default_rng(0), {"unit": "W", "y_mean": 200.0, "y_std": 100.0}

    def samples(group: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, 3)).astype(np.float32)
        return x, 200 + 100 * (x[:, 0] if group == 0 else -x[:, 1])

    (tmp_path / "sets").mkdir()
    for group in (0, 1):
        (x, y), (x_test, y_test) = samples(group, 80), samples(group, 80)
        own = {"x": x, "y": y, "x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
        np.savez(tmp_path / "sets" / f"{group}.npz", **own, **watts)  # type: ignore[arg-type]
    for number in range(4):
        (x, y), (x_test, y_test) = samples(number % 2, 40), samples(number % 2, 40)
        own = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
        np.savez(tmp_path / f"d{number}.npz", **own, **watts)  # type: ignore[arg-type]
    outcome = experiment.simulate(
        RunConfig(
            dataset="npz",
            strategy="cdfl",
            proxy=str(tmp_path / "sets"),
            pretrain=80,
            pretrain_epochs=20,
            max_updates=24,
            eval_every=8,
            workers="0",
            out=str(tmp_path / "run"),
            options={"data-file": str(tmp_path / "d{client}.npz"), "score-uploads": True},
        )
    )
    summary = outcome.summary
    assert (summary["measure"], summary["unit"], summary["target"]) == ("mae", "W", 25.0)
    # A constant guess has an error of 80 W; values above 1 show that these are not accuracies.
    for name in ("mae", "accuracy_before", "accuracy_after", "cluster_accuracy"):
        assert 1 < summary[name] < 40
