"""Conversion of published recordings to folders, on small generated files and on the real ones."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from benchmarks.convert_data import convert, resized, standardised_windows
from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.training_settings import TrainingSettings
from raceme.datasets.images import MNIST_FILES
from raceme.datasets.source import ClientData, DataShape, Target
from raceme.training import models
from raceme.training.local import evaluate, train
from raceme.training.models import Network, Samples

REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))
DUST = Target("µg/m³", 79.79, 80.82)
MARCH, APRIL = 31 * 24, 30 * 24


def converted(dataset: str, source: Path, out: Path, **given: object) -> RunConfig:
    """Convert files, and return a run on all clients."""
    defaults = {"clients": None, "test_fraction": 0.2, "seed": 0, "hours": 24, "step": 1}
    defaults |= {"period": "season", "length": 80, "origins": "mnist,usps"}
    convert(Namespace(dataset=dataset, source=source, out=out, **(defaults | given)))
    return datasets.with_defaults(RunConfig(dataset="npz-folder", data_root=str(out)))


def write_harbox(root: Path, person: int, windows: dict[str, int]) -> None:
    folder = root / str(person)
    folder.mkdir(parents=True)
    for activity, count in windows.items():
        lines = np.random.default_rng(person).normal(10.0, 5.0, (100 * count, 10))
        lines[:, 0] = 1e6  # a time
        np.savetxt(folder / f"{activity}_train.txt", lines)


def test_harbox_is_standardised_over_its_people(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_harbox(source, 10, {"Walk": 2})
    write_harbox(source, 2, {"Call": 3, "Wave": 1})
    write_harbox(source, 1, {"Hop": 2, "typing": 2})
    config = converted("harbox", source, tmp_path / "out")
    assert (config.clients, config.model, config.lr) == (3, "mlp", 0.01)
    assert datasets.default_target(config) == 0.75
    data = datasets.load(config)
    assert (data.x.shape, data.num_classes) == ((10, 900), 5)
    assert data.users is not None
    # People 1, 2 and 10, in numeric order; classes Call 0, Hop 1, typing 2, Walk 3, Wave 4.
    assert [data.y[own].tolist() for own in data.users] == [[1, 1, 2, 2], [0, 0, 0, 4], [3, 3]]
    axes = data.inputs(np.arange(10)).reshape(-1, 9)
    np.testing.assert_allclose(axes.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(axes.std(axis=0), 1.0, atol=1e-5)
    assert converted("harbox", source, tmp_path / "two", clients=2).clients == 2


def test_standardised_by_hand() -> None:
    # One window of two readings: the first axis holds 1 and 3, mean 2 and deviation 1.
    window = np.zeros((1, 18), np.float32)
    window[0, [0, 9]] = 1.0, 3.0
    scaled = standardised_windows(window)
    assert scaled[0, [0, 9]].tolist() == [-1.0, 1.0]
    assert not scaled[0, 1:9].any()


def test_imu_has_two_groups(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index, person in enumerate(("hsh_1", "hsh_2", "mmw_1")):
        for activity in ("walk", "up", "down"):
            values = np.full((200, 9), index + 0.5)
            np.savetxt(source / f"{person}_{activity}_nor.txt", values, delimiter=",")
    config = converted("imu", source, tmp_path / "out")
    assert datasets.true_groups(config) == (0, 0, 1)
    client = datasets.client_data(config, 2)
    assert client.group == 1
    assert set(client.x_train.ravel()) == {2.5}
    assert len(client.y_train) + len(client.y_test) == 6


def test_a_folder_without_recordings_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no files of imu"):
        converted("imu", tmp_path, tmp_path / "out")


# Fine dust by station: windows, gaps and seasons.


def dust_of(data: ClientData, test: bool = False) -> np.ndarray:
    return (data.y_test if test else data.y_train) * DUST.std + DUST.mean


@pytest.fixture
def stations(tmp_path: Path) -> Path:
    """Two stations whose fine dust counts the hours, with gaps of two and of 40 hours."""
    source = tmp_path / "source"
    source.mkdir()
    for name, first in (("Alpha", 0.0), ("Beta", 5000.0)):
        x = np.full((MARCH + APRIL, 11), 7.0, np.float32)
        x[:, 0] = first + np.arange(MARCH + APRIL)
        x[100:102] = np.nan
        x[200:240] = np.nan
        wind = np.full(MARCH + APRIL, 4, np.uint8)
        wind[:10] = 255
        np.savez(source / f"{name}.npz", x=x, wind_dir=wind)
    return source


def test_a_sample_is_a_window_and_the_hour_after_it(stations: Path, tmp_path: Path) -> None:
    config = converted("beijing-air", stations, tmp_path / "out")
    assert (config.model, config.lr, datasets.default_target(config)) == ("mclr", 0.01, 12.0)
    assert datasets.data_shape(config) == DataShape((13, 24), 0, target=DUST)
    for client, first in ((0, 0.0), (1, 5000.0)):
        data = datasets.client_data(config, client)
        seen = data.x_train[:, 0] * DUST.std + DUST.mean
        np.testing.assert_allclose(seen[50], first + np.arange(50, 74), atol=1e-2)
        assert dust_of(data)[50] == pytest.approx(first + 74, abs=1e-2)
    # East is 4 of 16 directions: sine 1, cosine 0. Missing readings at the start become the mean.
    np.testing.assert_allclose(data.x_train[0, 11, :10], 0.0)
    np.testing.assert_allclose(data.x_train[0, 11:, 10:].T, [[1.0, 0.0]] * 14, atol=1e-6)


def test_gaps_are_filled_for_a_day_and_never_asked_for(stations: Path, tmp_path: Path) -> None:
    config = converted("beijing-air", stations, tmp_path / "out", hours=16)
    data = datasets.client_data(config, 0)
    hours = np.round(np.concatenate([dust_of(data), dust_of(data, test=True)])).astype(int)
    assert not np.isin([100, 101, *range(200, 240)], hours).any()
    assert np.isin([99, 102, 199, 240], hours).all()
    windows = dict(zip(np.round(dust_of(data)).astype(int), data.x_train[:, 0], strict=True))
    # The window covers hours 99 to 114: the reading of hour 99 fills two missing hours.
    filled = windows[115][:4] * DUST.std + DUST.mean
    np.testing.assert_allclose(filled, [99, 99, 99, 102], atol=1e-3)
    # The window covers hours 224 to 239: a day after the last reading the mean fills the gap.
    np.testing.assert_allclose(windows[240], 0.0)


def test_no_hour_of_a_training_sample_is_one_of_a_test_sample(
    stations: Path, tmp_path: Path
) -> None:
    config = converted("beijing-air", stations, tmp_path / "out", hours=20, period="month")
    in_order = config.with_values(drift="in-order")
    trained, tested = set[int](), set[int]()
    for step, (low, high) in enumerate(((0, MARCH), (MARCH, MARCH + APRIL))):
        data = datasets.client_data(in_order, 0, step)
        early, late = (np.round(dust_of(data, test)).astype(int) for test in (False, True))
        assert low <= early.min() < early.max() < late.min() < late.max() < high
        assert len(late) / (len(early) + len(late)) == pytest.approx(0.2, abs=0.02)
        for hours, own in ((trained, early), (tested, late)):
            hours |= {hour for last in own.tolist() for hour in range(last - 20, last + 1)}
    assert not trained & tested


@pytest.mark.parametrize(("period", "steps"), [("month", 2), ("season", 1), ("year", 1)])
def test_periods_are_those_of_the_hour_that_is_asked_for(
    stations: Path, tmp_path: Path, period: str, steps: int
) -> None:
    config = converted("beijing-air", stations, tmp_path / "out", period=period)
    found = datasets.load(config).periods
    assert found is not None
    assert found.max() == steps - 1


# Bearings, gases and spoken digits.


def test_a_client_has_a_stretch_of_every_fault_of_one_machine_at_one_speed(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # Two machines, one at two speeds: ten windows of each fault, whose readings are its number.
    for first, name in ((0, "old_1200rpm"), (100, "old_600rpm"), (200, "new_900rpm")):
        x = np.tile((first + np.arange(70))[:, None], (1, 2048)).astype(np.float16)
        np.savez(source / f"{name}.npz", x=x, y=np.repeat(np.arange(7), 10).astype(np.uint8))
    config = converted("hit-bearing", source, tmp_path / "out", clients=6)
    # By machine, then by speed: new at 900, old at 600 and at 1200, two clients each.
    assert datasets.true_groups(config) == (0, 0, 1, 1, 1, 1)
    for client, first in enumerate((200, 205, 100, 105, 0, 5)):
        data = datasets.client_data(config, client)
        # The last of five windows of each fault is for testing.
        assert np.bincount(data.y_train).tolist() == [4] * 7
        assert np.bincount(data.y_test).tolist() == [1] * 7
        assert data.x_train[:4, 0].tolist() == [first, first + 1, first + 2, first + 3]
        assert data.x_test[0, 0] == first + 4
        assert data.x_train.dtype == np.float32
    assert config.model == "cnn1d"
    with pytest.raises(SystemExit, match="There are 3 recordings: give at least as many"):
        converted("hit-bearing", source, tmp_path / "few", clients=2)


def test_every_client_has_its_share_of_every_batch_and_gas(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for batch, size in enumerate((40, 20, 30)):
        x = np.random.default_rng(batch).normal(size=(size, 128)).astype(np.float32)
        x[:, 0] = 2.0 + 5.0 * batch
        # The conversion accepts missing batches, here the second.
        np.savez(source / f"batch_{1 + 2 * batch:02d}.npz", x=x, y=np.arange(size) % 6)
    data = datasets.load(converted("gas-drift", source, tmp_path / "out", clients=5))
    assert data.periods is not None
    assert data.users is not None
    for own in data.users:
        assert np.bincount(data.periods[own]).tolist() == [8, 4, 6]
        gases = np.bincount(data.y[own], minlength=6)
        assert gases.max() - gases.min() <= 3
    # The first batch has mean 0 and deviation 1; later ones keep their drift.
    first = data.x[data.periods == 0]
    np.testing.assert_allclose(first[:, 1:].mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(first[:, 1:].std(axis=0), 1.0, atol=1e-4)
    # A feature that is constant in the first batch keeps its unit: 2 + 5 · 2 minus the mean 2.
    np.testing.assert_allclose(data.x[data.periods == 2][:, 0], 10.0, atol=1e-4)


def test_the_clients_of_a_speaker_have_its_recordings_in_turn(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # Two speakers with ten takes of each digit: all numbers of recording i are i.
    for first, name in ((0, "anna"), (100, "ben")):
        x = np.broadcast_to((first + np.arange(100.0))[:, None, None], (100, 32, 32))
        y = np.repeat(np.arange(10), 10).astype(np.uint8)
        np.savez(source / f"speaker_{name}.npz", x=x.astype(np.float16), y=y, take=y)
    config = converted("fsdd", source, tmp_path / "out", clients=4)
    assert datasets.true_groups(config) == (0, 0, 1, 1)
    assert config.model == "cnn"
    dataset = datasets.load(config)
    assert dataset.shape.input_shape == (1, 32, 32)
    for client, first in enumerate((0, 1, 100, 101)):
        data = datasets.client_data(config, client)
        x = np.concatenate([data.x_train, data.x_test])[:, 0, 0, 0]
        recordings = np.round(x * dataset.std.ravel() + dataset.mean.ravel())
        assert sorted(recordings.tolist()) == list(range(first, first + 100, 2))
        assert np.bincount(np.concatenate([data.y_train, data.y_test])).tolist() == [5] * 10
    # An uneven number gives the first speaker more clients.
    config = converted("fsdd", source, tmp_path / "three", clients=3)
    assert datasets.true_groups(config) == (0, 0, 1)


# Digits of different origin.


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
def digits(tmp_path: Path) -> Path:
    write_idx(tmp_path / "MNIST" / "raw", 28, 100, (40, 20))
    write_idx(tmp_path / "usps", 16, 200, (20, 10))
    return tmp_path


def test_each_origin_is_the_true_group_of_as_many_clients(digits: Path) -> None:
    config = converted("digits-by-origin", digits, digits / "out", clients=4)
    assert (config.model, config.lr, datasets.default_target(config)) == ("cnn", 0.01, 0.95)
    assert datasets.data_shape(config).input_shape == (1, 28, 28)
    assert datasets.true_groups(config) == (0, 0, 1, 1)
    data = datasets.load(config)
    assert data.users is not None
    assert [len(own) for own in data.users] == [30, 30, 15, 15]
    for client, level in enumerate((100, 100, 200, 200)):
        assert (data.x[data.users[client]] == level).all()
    assert (data.mean, data.std) == (0.1307, 0.3081)


def test_bundled_digits_are_an_origin(digits: Path) -> None:
    given = {"clients": 4, "origins": "mnist,digits"}
    config = converted("digits-by-origin", digits, digits / "out", **given)
    data = datasets.load(config)
    assert data.users is not None
    assert [len(own) for own in data.users] == [30, 30, 899, 898]
    bundled = datasets.load(RunConfig(dataset="digits"))
    own = np.concatenate(data.users[2:])
    assert np.bincount(data.y[own]).tolist() == np.bincount(bundled.y).tolist()
    corners = np.round(255 * bundled.x[:, 0, -1, -1])
    assert corners.max() > 200
    assert sorted(data.x[own, 0, -1, -1]) == sorted(corners)


def test_clients_mix_digits_of_several_origins(digits: Path) -> None:
    config = converted("digits-by-origin", digits, digits / "out", clients=4)
    keys = {"mixture-size-low": 20, "mixture-size-high": 20, "drift": "mixture"}
    data = datasets.client_data(RunConfig.from_mapping({**config.to_mapping(), **keys}), 3)
    dark = data.x_train[:, 0, 0, 0] > (150 / 255 - 0.1307) / 0.3081
    assert data.mixture is not None
    assert dark.mean() == pytest.approx(data.mixture[1])
    assert 0.4 <= data.mixture[1] <= 0.9


def test_small_digits_are_enlarged_bilinearly() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 1, 16, 16), np.uint8)
    wanted = Image.fromarray(image[0, 0]).resize((28, 28), Image.Resampling.BILINEAR)
    enlarged = resized(image, (1, 28, 28))[0, 0].astype(int)
    assert np.abs(enlarged - np.asarray(wanted).astype(int)).max() <= 1
    assert resized(image, (3, 32, 32)).shape == (1, 3, 32, 32)


def test_origins_keep_their_colours(digits: Path) -> None:
    (digits / "SVHN").mkdir()
    x = np.zeros((32, 32, 3, 10), np.uint8)
    x[:, :, 1] = 50
    for name in ("train_32x32.mat", "test_32x32.mat"):
        savemat(digits / "SVHN" / name, {"X": x, "y": np.arange(1, 11)[:, None]})
    for digit in (3, 8):
        (digits / "CCPD" / str(digit)).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (20, 30), (0, 0, 90)).save(digits / "CCPD" / f"{digit}/{number}.png")
    given = {"clients": 3, "origins": "mnist+usps,svhn,ccpd"}
    config = converted("digits-by-origin", digits, digits / "out", **given)
    data = datasets.load(config)
    assert data.users is not None
    assert data.x.shape == (90 + 20 + 8, 3, 32, 32)
    assert data.groups == (0, 1, 2)
    assert (data.mean, data.std) == (0.5, 0.25)
    # SVHN's digit 0 has the label 10.
    assert np.bincount(data.y[data.users[1]]).tolist() == [2] * 10
    assert sorted(data.y[data.users[2]].tolist()) == [3] * 4 + [8] * 4
    at = [own[0] for own in data.users]
    assert data.x[at[1], :, 4, 4].tolist() == [0, 50, 0]
    assert data.x[at[2], :, 4, 4].tolist() == [0, 0, 90]


# Text.


def write_text(path: Path, said: dict[str, str]) -> Path:
    path.mkdir()
    offset = np.cumsum([0, *(len(words) for words in said.values())])
    text = np.frombuffer("".join(said.values()).encode(), np.uint8)
    np.savez(path / "roles.npz", text=text, offset=offset, names=list(said))
    return path


def test_text_becomes_the_next_character_from_those_before(tmp_path: Path) -> None:
    source = write_text(tmp_path / "source", {"A": "abc", "B": "abcdefghij" * 2})
    given = {"length": 3, "step": 2, "test_fraction": 0.5}
    config = converted("shakespeare", source, tmp_path / "out", **given)
    # A is too short for two samples, so it is no client.
    assert (config.clients, config.model, config.lr) == (1, "gru", 0.5)
    data = datasets.client_data(config, 0)
    # abcdefghij|abcdefghij: samples start at 0, 2, 4 and
    # 6, both in the first half and in the test half.
    assert data.x_train.tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]]
    assert data.y_train.tolist() == [3, 5, 7, 9]
    assert data.x_test.tolist() == data.x_train.tolist()
    assert datasets.data_shape(config) == DataShape((3,), 10, 10)
    assert datasets.default_target(config) == 0.4


def test_a_gru_learns_which_character_comes_next(tmp_path: Path) -> None:
    source = write_text(tmp_path / "source", {"A": "abcd" * 300})
    config = converted("shakespeare", source, tmp_path / "out", length=8)
    data, shape = datasets.client_data(config, 0), datasets.data_shape(config)
    network = Network(models.build("gru", shape.input_shape, 4, tokens=shape.tokens))
    torch.set_num_threads(1)
    samples = Samples(data.x_train, data.y_train)
    train(network, samples, TrainingSettings(0.5), np.random.default_rng(0))
    assert evaluate(network, Samples(data.x_test, data.y_test))[0] == 1.0


@pytest.mark.parametrize(
    ("dataset", "folder", "clients", "model", "groups"),
    [
        ("uci-har", "uci_har_by_person", 30, "cnn1d", 0),
        ("fsdd", "fsdd_by_speaker", 24, "cnn", 6),
        ("gas-drift", "gas_drift_batches", 20, "mlp", 0),
        ("hit-bearing", "hit_bearing_by_machine", 24, "cnn1d", 2),
        ("beijing-air", "beijing_air_by_station", 12, "mclr", 0),
    ],
)
def test_the_real_recordings(
    tmp_path: Path, dataset: str, folder: str, clients: int, model: str, groups: int
) -> None:
    if not (REAL / folder).is_dir():
        pytest.skip(f"no {folder}")
    config = converted(dataset, REAL / folder, tmp_path, step=30)
    assert (config.clients, config.model) == (clients, model)
    assert len(set(datasets.true_groups(config)) - {None}) == groups
    x = datasets.client_data(config, 5).x_train
    assert np.isfinite(x).all()
    assert 0.3 < x.std() < 10.0
