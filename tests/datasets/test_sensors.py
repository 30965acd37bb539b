"""Datasets of sensors, on small generated files, and on the real ones where they are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.dealt import Dealt
from raceme.datasets.drift import drift_of
from raceme.datasets.partition import Partition
from raceme.datasets.sensors import TARGET, standardised_windows
from raceme.datasets.source import Dataset, DataShape
from raceme.training import models


def config(root: Path, name: str, clients: int) -> RunConfig:
    return RunConfig(dataset=name, data_root=str(root), clients=clients)


def write_harbox(root: Path, person: int, windows: dict[str, int]) -> None:
    folder = root / "large_scale_HARBox" / str(person)
    folder.mkdir(parents=True)
    for activity, count in windows.items():
        lines = np.random.default_rng(person).normal(10.0, 5.0, (100 * count, 10))
        lines[:, 0] = 1e6  # a time
        np.savetxt(folder / f"{activity}_train.txt", lines)


def test_harbox(tmp_path: Path) -> None:
    write_harbox(tmp_path, 10, {"Walk": 2})
    write_harbox(tmp_path, 2, {"Call": 3, "Wave": 1})
    write_harbox(tmp_path, 1, {"Hop": 2, "typing": 2})
    data = datasets.load(config(tmp_path, "harbox", 3))
    assert (data.x.shape, data.num_classes) == ((10, 900), 5)
    assert data.users is not None
    # People 1, 2 and 10, in the order of their numbers; Call 0, Hop 1, typing 2, Walk 3, Wave 4.
    assert [data.y[own].tolist() for own in data.users] == [[1, 1, 2, 2], [0, 0, 0, 4], [3, 3]]
    axes = data.inputs(np.arange(10)).reshape(-1, 9)
    np.testing.assert_allclose(axes.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(axes.std(axis=0), 1.0, atol=1e-5)
    with pytest.raises(UserError, match="Too many clients: 4, but harbox has only 3 people"):
        datasets.load(config(tmp_path, "harbox", 4))


def test_standardised_by_hand() -> None:
    # One window of two readings: the first axis holds 1 and 3, mean 2 and deviation 1.
    window = np.zeros((1, 18), np.float32)
    window[0, [0, 9]] = 1.0, 3.0
    scaled = standardised_windows(window)
    assert scaled[0, [0, 9]].tolist() == [-1.0, 1.0]
    assert not scaled[0, 1:9].any()


def test_imu_has_two_groups(tmp_path: Path) -> None:
    folder = tmp_path / "imu_data_7"
    folder.mkdir()
    for index, person in enumerate(("hsh_1", "hsh_2", "mmw_1")):
        for activity in ("walk", "up", "down"):
            values = np.full((200, 9), index + 0.5)
            np.savetxt(folder / f"{person}_{activity}_nor.txt", values, delimiter=",")
    data = datasets.load(config(tmp_path, "imu", 3))
    assert (data.x.shape, data.num_classes) == ((18, 900), 3)
    assert datasets.true_groups(config(tmp_path, "imu", 3)) == (0, 0, 1)
    client = datasets.client_data(config(tmp_path, "imu", 3), 2)
    assert client.group == 1
    assert set(client.x_train.ravel()) == {2.5}
    assert len(client.y_train) + len(client.y_test) == 6


def test_what_is_wrong_with_sensor_files(tmp_path: Path) -> None:
    for name in ("harbox", "imu"):
        with pytest.raises(UserError, match=f"{name} needs the folder"):
            datasets.load(RunConfig(dataset=name))
    with pytest.raises(UserError, match="harbox is not under"):
        datasets.load(config(tmp_path, "harbox", 1))
    folder = tmp_path / "large_scale_HARBox" / "1"
    folder.mkdir(parents=True)
    np.savetxt(folder / "Walk_train.txt", np.zeros((150, 10)))
    with pytest.raises(
        UserError,
        match=r"in 9 columns after a time, got shape \(150, 9\)",
    ):
        datasets.load(config(tmp_path, "harbox", 1))
    (folder / "Walk_train.txt").write_text("no numbers")
    with pytest.raises(UserError, match="as numbers"):
        datasets.load(config(tmp_path, "harbox", 1))


def test_all_people_are_clients_where_no_number_is_given(tmp_path: Path) -> None:
    for person in (1, 2, 5):
        write_harbox(tmp_path, person, {"Walk": 2})
    found = datasets.with_clients(RunConfig(dataset="harbox", data_root=str(tmp_path)))
    assert found.clients == 3
    assert len(datasets.all_clients(found)) == 3


@pytest.mark.parametrize("name", ["harbox", "imu"])
def test_the_mlp_fits(name: str) -> None:
    assert datasets.with_defaults(RunConfig(dataset=name, clients=1)).model == "mlp"
    models.initial_arrays(RunConfig(dataset=name, clients=1))


# Fine dust by station: windows, gaps and seasons, on small generated files.


REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))
MARCH, APRIL = 31 * 24, 30 * 24


def config_of(root: Path, **keys: object) -> RunConfig:
    given = {"dataset": "beijing-air", "data-root": str(root), "air-step": 1, **keys}
    return RunConfig.from_mapping({name.replace("_", "-"): value for name, value in given.items()})


def write_station(path: Path, hours: int = MARCH + APRIL, first: float = 0.0) -> None:
    """Write a station whose fine dust counts the hours, with a gap of two hours and one of 40."""
    path.parent.mkdir(exist_ok=True)
    x = np.full((hours, 11), 7.0, np.float32)
    x[:, 0] = first + np.arange(hours)
    x[100:102] = np.nan
    x[200:240] = np.nan
    wind = np.full(hours, 4, np.uint8)
    wind[:10] = 255
    np.savez(path, x=x, wind_dir=wind)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_station(tmp_path / "beijing_air_by_station" / "Alpha.npz")
    write_station(tmp_path / "beijing_air_by_station" / "Beta.npz", first=5000.0)
    return tmp_path


def test_a_sample_is_a_window_and_the_hour_after_it(root: Path) -> None:
    config = config_of(root, air_hours=24)
    data = datasets.load(datasets.with_clients(config))
    assert data.shape == DataShape((13, 24), 0, target=TARGET) == datasets.data_shape(config)
    assert data.users is not None
    dust = data.x[50, 0] * TARGET.std + TARGET.mean
    np.testing.assert_allclose(dust, np.arange(50, 74), atol=1e-3)
    assert data.y[50] * TARGET.std + TARGET.mean == pytest.approx(74, abs=1e-3)
    # East is 4 of 16: sine 1, cosine 0; before it was known both are the mean.
    np.testing.assert_allclose(data.x[0, 11, :10], 0.0)
    np.testing.assert_allclose(data.x[0, 11:, 10:].T, [[1.0, 0.0]] * 14, atol=1e-6)
    # No window of one station reaches into the next one.
    assert max(np.concatenate(data.users)[: len(data.users[0])]) + 24 < MARCH + APRIL
    second = data.users[1].min()
    assert data.x[second, 0, 0] * TARGET.std + TARGET.mean == pytest.approx(5000, abs=1e-2)


def test_gaps_are_filled_for_a_day_and_never_asked_for(root: Path) -> None:
    config = datasets.with_clients(config_of(root, air_hours=16))
    data = datasets.load(config)
    assert data.users is not None
    assert data.test_users is not None
    own = np.concatenate([data.users[0], data.test_users[0]])
    # Sample s asks for hour s + 16.
    assert not np.isin([84, 85, *range(184, 224)], own).any()
    assert np.isin([83, 86, 183, 224], own).all()
    dust = data.x[:, 0, 0] * TARGET.std + TARGET.mean
    np.testing.assert_allclose(dust[99:103], [99, 99, 99, 102], atol=1e-3)
    # The last reading, of hour 199, stands for 24 hours, then the mean does.
    np.testing.assert_allclose(dust[[200, 223]], 199, atol=1e-3)
    np.testing.assert_allclose(data.x[224:240, 0, 0], 0.0)
    assert np.isfinite(data.inputs(own)).all()


def test_no_hour_of_a_training_sample_is_one_of_a_test_sample(root: Path) -> None:
    config = datasets.with_clients(config_of(root, air_hours=20, air_period="month"))
    data = datasets.load(config)
    assert data.users is not None
    assert data.test_users is not None
    assert data.periods is not None
    for train, test in zip(data.users, data.test_users, strict=True):
        tested = {hour for sample in test.tolist() for hour in range(sample, sample + 21)}
        trained = {hour for sample in train.tolist() for hour in range(sample, sample + 21)}
        assert not tested & trained
        for month in (0, 1):
            early, late = (own[data.periods[own] == month] for own in (train, test))
            assert early.max() < late.min()
            assert len(late) / (len(early) + len(late)) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(("period", "steps"), [("month", 2), ("season", 1), ("year", 1)])
def test_periods_are_those_of_the_hour_that_is_asked_for(
    root: Path, period: str, steps: int
) -> None:
    data = datasets.load(datasets.with_clients(config_of(root, air_period=period)))
    assert data.periods is not None
    assert data.periods.max() == steps - 1
    if steps > 1:
        assert data.periods[[MARCH - 25, MARCH - 24]].tolist() == [0, 1]


def test_stations_meet_their_months_in_order(root: Path) -> None:
    config = config_of(root, drift="in-order", air_period="month", clients=2)
    march, april = (datasets.client_data(config, 0, step) for step in (0, 1))
    for data, low, high in ((march, 0, MARCH), (april, MARCH, MARCH + APRIL)):
        for y in (data.y_train, data.y_test):
            dust = y * TARGET.std + TARGET.mean
            assert low <= dust.min() < dust.max() < high
        assert data.y_train.dtype == np.float32


def test_what_is_not_there_is_one_clear_line(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UserError, match=r"beijing-air is not under '.*--data-root DIR. Expected:"):
        datasets.load(config_of(tmp_path / "none", clients=2))
    with pytest.raises(UserError, match=r"Too many clients: 3, but there are only 2 stations"):
        datasets.load(config_of(root, clients=3))
    write_station(root / "beijing_air_by_station" / "Alpha.npz", hours=30)
    with pytest.raises(UserError, match=r"too few hours with readings"):
        datasets.load(config_of(root, clients=1))
    np.savez(root / "beijing_air_by_station" / "Alpha.npz", x=np.zeros((5, 3)))
    with pytest.raises(UserError, match=r"Alpha.npz lacks wind_dir"):
        datasets.load(config_of(root, clients=1))


@pytest.mark.parametrize("model", ["mlp", "mclr", "gru", "lstm", "cnn1d", "mlp128"])
def test_models_have_one_output(model: str) -> None:
    arrays = models.initial_arrays(config_of(Path("nowhere"), clients=12, model=model))
    *_, bias = arrays.values()
    assert bias.shape == (1,)


@pytest.mark.parametrize("partition", ["label-groups", "dirichlet", "classes"])
def test_quantities_are_not_dealt_by_label(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((40, 3), np.float32)
    whole = Dataset(x, np.linspace(0, 1, 40, dtype=np.float32), num_classes=0, target=TARGET)
    monkeypatch.setattr(datasets, "_load", lambda config: whole)
    monkeypatch.setattr(datasets, "_data_shape", lambda config: whole.shape)
    config = RunConfig(dataset="digits", clients=4, partition=partition)
    with pytest.raises(UserError, match=f"partition {partition} needs classes, and the labels"):
        datasets.true_groups(config)
    assert datasets.true_groups(config.with_values(partition="iid")) == (None,) * 4
    datasets._deal.cache_clear()
    datasets._drift.cache_clear()


@pytest.mark.parametrize("drift", ["label-shift", "tasks", "swap-part", "concepts"])
def test_drifts_of_classes_need_classes(drift: str) -> None:
    config = RunConfig.from_mapping({"dataset": "beijing-air", "clients": 2, "drift": drift})
    y = np.linspace(0, 1, 20, dtype=np.float32)
    whole = Dataset(np.zeros((20, 3), np.float32), y, num_classes=0, target=TARGET)
    dealt = Dealt(config, whole, Partition((np.arange(10), np.arange(10, 20)), (None, None)))
    with pytest.raises(UserError, match=f"drift {drift} needs classes, and the labels of beijing"):
        drift_of(config, dealt).check()


@pytest.mark.skipif(not (REAL / "beijing_air_by_station").is_dir(), reason="no such data")
def test_the_real_stations() -> None:
    config = datasets.with_clients(config_of(REAL, drift="in-order", air_step=5))
    assert config.clients == 12
    data = datasets.load(config)
    assert data.periods is not None
    assert data.users is not None
    assert data.periods.max() == 15
    dust = data.y[np.concatenate(data.users)]
    assert abs(dust.mean()) < 0.1
    assert dust.std() == pytest.approx(1.0, abs=0.05)
    assert np.isfinite(datasets.client_data(config, 3, 7).x_train).all()


# Bearing faults by machine and speed, on small generated files.


def bearing(machines: Path, clients: int = 6) -> RunConfig:
    return RunConfig(dataset="hit-bearing", data_root=str(machines), clients=clients)


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """Two machines, one at two speeds: ten windows of each fault, whose readings are its number."""
    folder = tmp_path / "hit_bearing_by_machine"
    folder.mkdir()
    for first, name in ((0, "old_1200rpm"), (100, "old_600rpm"), (200, "new_900rpm")):
        numbers = first + np.arange(70)
        x = np.tile(numbers[:, None], (1, 2048)).astype(np.float16)
        np.savez(folder / f"{name}.npz", x=x, y=np.repeat(np.arange(7), 10).astype(np.uint8))
    return tmp_path


def test_a_client_has_a_stretch_of_every_fault_of_one_machine_at_one_speed(
    machines: Path,
) -> None:
    config = bearing(machines)
    # By machine, then by speed: new at 900, old at 600, old at 1200, two clients each.
    assert datasets.true_groups(config) == (0, 0, 1, 1, 1, 1)
    for client, first in enumerate((200, 205, 100, 105, 0, 5)):
        data = datasets.client_data(config, client)
        # Of five windows of each fault the last one is for testing.
        assert np.bincount(data.y_train).tolist() == [4] * 7
        assert np.bincount(data.y_test).tolist() == [1] * 7
        assert data.x_train[:4, 0].tolist() == [first, first + 1, first + 2, first + 3]
        assert data.x_test[0, 0] == first + 4
        assert data.x_train.dtype == np.float32
    assert datasets.with_defaults(config).model == "cnn1d"


def test_missing_or_few_machines_are_one_clear_line(machines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hit-bearing is not under '.*--data-root DIR. Expected"):
        datasets.load(bearing(tmp_path / "none"))
    with pytest.raises(UserError, match=r"has 3 machines and speeds.* at least 3 clients, got 2"):
        datasets.load(bearing(machines, clients=2))
    with pytest.raises(UserError, match=r"too few windows for 11 clients"):
        datasets.load(bearing(machines, clients=33))
    np.savez(machines / "hit_bearing_by_machine" / "old_600rpm.npz", x=np.zeros((4, 9)), y=[0] * 4)
    with pytest.raises(UserError, match=r"old_600rpm.npz holds x of shape \(4, 9\)"):
        datasets.load(bearing(machines))


@pytest.mark.skipif(not (REAL / "hit_bearing_by_machine").is_dir(), reason="no such data")
def test_the_real_machines() -> None:
    config = datasets.with_clients(RunConfig(dataset="hit-bearing", data_root=str(REAL.resolve())))
    assert np.bincount(np.array(datasets.true_groups(config), int)).tolist() == [12, 12]
    data = datasets.client_data(config, 5)
    assert np.bincount(data.y_train).tolist() == [26] * 7
    assert np.bincount(data.y_test).tolist() == [6] * 7
    assert data.x_train.std() == pytest.approx(1.0, abs=0.2)


# Data recorded over a long time, and clients that meet them in order: small generated files.


def gas(dataset: str, root: Path, **keys: object) -> RunConfig:
    given = {"dataset": dataset, "data-root": str(root), **keys}
    return RunConfig.from_mapping({name.replace("_", "-"): value for name, value in given.items()})


def write_batches(folder: Path, sizes: tuple[int, ...] = (40, 20, 30)) -> None:
    """Write batches whose first feature is the batch and whose second is the number of a sample."""
    folder.mkdir()
    for batch, size in enumerate(sizes):
        x = np.random.default_rng(batch).normal(size=(size, 128)).astype(np.float32)
        x[:, 0], x[:, 1] = 2.0 + 5.0 * batch, np.arange(size)
        # Batches are told by their names; a missing one, here the second, is no matter.
        np.savez(folder / f"batch_{1 + 2 * batch:02d}.npz", x=x, y=np.arange(size) % 6)


def test_every_client_has_its_share_of_every_batch_and_gas(tmp_path: Path) -> None:
    write_batches(tmp_path / "gas_drift_batches")
    config = gas("gas-drift", tmp_path, clients=5)
    data = datasets.load(config)
    assert data.periods is not None
    assert data.users is not None
    assert np.bincount(data.periods).tolist() == [40, 20, 30]
    assert sorted(np.concatenate(data.users).tolist()) == list(range(90))
    for own in data.users:
        assert np.bincount(data.periods[own]).tolist() == [8, 4, 6]
        gases = np.bincount(data.y[own], minlength=6)
        assert gases.max() - gases.min() <= 3
    # The first batch has mean 0 and deviation 1, those that follow have what the drift made of it.
    first = data.inputs(np.flatnonzero(data.periods == 0))
    np.testing.assert_allclose(first[:, 1:].mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(first[:, 1:].std(axis=0), 1.0, atol=1e-4)
    # A feature that never changes in it is left in its own unit: 2 + 5 · 2 less 2.
    np.testing.assert_allclose(data.inputs(np.array([89]))[0, 0], 10.0, atol=1e-4)


def test_in_order_a_step_is_a_period_for_training_and_testing_alike(tmp_path: Path) -> None:
    write_batches(tmp_path / "gas_drift_batches")
    config = gas("gas-drift", tmp_path, clients=5, drift="in-order")
    whole = datasets.client_data(config.with_values(drift="none"), 3)
    sizes = []
    for step, batch in ((0, 0), (1, 1), (2, 2), (3, 2), (50, 2)):
        data = datasets.client_data(config, 3, step)
        for part in (data.x_train, data.x_test):
            np.testing.assert_allclose(part[:, 0], 5.0 * batch, atol=1e-4)
        sizes.append(len(data.y_train) + len(data.y_test))
        assert len(data.y_test) >= 1
        trained, tested = ({x.tobytes() for x in part} for part in (data.x_train, data.x_test))
        assert not trained & tested
        # A period whose samples are all for training lends one for testing.
        assert trained <= {x.tobytes() for x in whole.x_train}
        assert data.group is None
    assert sizes == [8, 4, 6, 6, 6]


def test_with_a_lag_clients_are_in_different_periods_which_are_their_groups(tmp_path: Path) -> None:
    write_batches(tmp_path / "gas_drift_batches")
    config = gas("gas-drift", tmp_path, clients=5, drift="in-order", in_order_lag=1)
    # Of five clients the last two are one period behind.
    assert datasets.true_groups(config, 0) == (0, 0, 0, 0, 0)
    assert datasets.true_groups(config, 1) == (1, 1, 1, 0, 0)
    assert datasets.true_groups(config, 2) == (2, 2, 2, 1, 1)
    assert datasets.true_groups(config, 3) == (2, 2, 2, 2, 2)
    assert datasets.client_data(config, 4, 1).group == 0
    np.testing.assert_allclose(datasets.client_data(config, 4, 1).x_train[:, 0], 0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("dataset", "keys", "message"),
    [
        ("digits", {}, "digits has none: take gas-drift"),
        ("gas-drift", {"clients": 15}, r"client \d+ has 1 of period 1, from 0: take fewer"),
        ("gas-drift", {"in_order_lag": 3, "clients": 5}, "the data have 3 periods"),
    ],
)
def test_data_that_cannot_come_in_order(
    tmp_path: Path, dataset: str, keys: dict[str, object], message: str
) -> None:
    write_batches(tmp_path / "gas_drift_batches")
    with pytest.raises(UserError, match=message):
        datasets.true_groups(gas(dataset, tmp_path, drift="in-order", **keys))


def test_missing_and_foreign_batches_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gas-drift is not under '.*--data-root DIR. Expected: ba"):
        datasets.load(gas("gas-drift", tmp_path))
    np.savez(tmp_path / "batch_01.npz", x=np.zeros((4, 3)), y=np.zeros(4, int))
    with pytest.raises(UserError, match=r"batch_01.npz holds x of shape \(4, 3\)"):
        datasets.load(gas("gas-drift", tmp_path))
    np.savez(tmp_path / "batch_01.npz", x=np.zeros((4, 128)))
    with pytest.raises(UserError, match=r"batch_01.npz lacks y"):
        datasets.load(gas("gas-drift", tmp_path))


@pytest.mark.skipif(not (REAL / "gas_drift_batches").is_dir(), reason="no gas_drift_batches")
def test_the_real_batches() -> None:
    config = datasets.with_defaults(gas("gas-drift", REAL, drift="in-order"))
    sizes = np.bincount(datasets.load(config).periods)
    assert (config.clients, config.model) == (20, "mlp")
    assert sizes.sum() <= 13_910
    for step in range(len(sizes)):
        data = datasets.client_data(config, 7, step)
        assert abs(len(data.y_train) + len(data.y_test) - sizes[step] / 20) < 1


# Spoken digits by speaker and UCI HAR by person, on small generated files.


def fsdd(speakers: Path, clients: int | None = None, dataset: str = "fsdd") -> RunConfig:
    config = RunConfig(dataset=dataset, data_root=str(speakers), clients=clients)
    return datasets.with_defaults(config)


@pytest.fixture
def speakers(tmp_path: Path) -> Path:
    """Two speakers, of each digit ten takes: the spectrum of recording i is full of i."""
    folder = tmp_path / "fsdd_by_speaker"
    folder.mkdir()
    for first, name in ((0, "anna"), (100, "ben")):
        x = np.broadcast_to((first + np.arange(100.0))[:, None, None], (100, 32, 32))
        y = np.repeat(np.arange(10), 10).astype(np.uint8)
        np.savez(folder / f"speaker_{name}.npz", x=x.astype(np.float16), y=y, take=y)
    return tmp_path


def test_the_clients_of_a_speaker_have_its_recordings_in_turn(speakers: Path) -> None:
    config = fsdd(speakers, 4)
    assert datasets.true_groups(config) == (0, 0, 1, 1)
    assert config.model == "cnn"
    dataset = datasets.load(config)
    assert dataset.shape.input_shape == (1, 32, 32)
    for client, first in enumerate((0, 1, 100, 101)):
        data = datasets.client_data(config, client)
        x, y = (
            np.concatenate(pair)
            for pair in ((data.x_train, data.x_test), (data.y_train, data.y_test))
        )
        assert (len(data.y_train), np.bincount(y).tolist()) == (40, [5] * 10)
        recordings = np.round(x[:, 0, 0, 0] * dataset.std.ravel() + dataset.mean.ravel())
        assert sorted(recordings.tolist()) == list(range(first, first + 100, 2))
    # One mean and one deviation of all, by what is for training.
    train = np.concatenate([dataset.inputs(own) for own in dataset.users or ()])
    assert (train.mean(), train.std()) == pytest.approx((0, 1), abs=1e-3)


def test_an_uneven_number_gives_the_first_speaker_more_clients(speakers: Path) -> None:
    assert datasets.true_groups(fsdd(speakers, 3)) == (0, 0, 1)
    assert fsdd(speakers).clients == 24


def test_missing_or_few_recordings_are_one_clear_line(speakers: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There are no \.npz files in"):
        datasets.load(fsdd(tmp_path / "none", 4))
    with pytest.raises(UserError, match="has 2 speakers, each with at least one client"):
        datasets.load(fsdd(speakers, 1))
    with pytest.raises(UserError, match="too few recordings for 160 clients"):
        datasets.load(fsdd(speakers, 160))
    np.savez(tmp_path / "numbers.npz", x=np.zeros((4, 9)), y=[0] * 4)
    with pytest.raises(UserError, match="holds no spectra of speakers"):
        datasets.load(fsdd(tmp_path, 2))


def test_people_are_found_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "uci_har_by_person"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in (1, 2):
        x, heldout = rng.normal(size=(8, 9, 128)).astype(np.float16), np.arange(8) % 4 == 0
        np.savez(folder / f"person_{number}.npz", x=x, y=np.arange(8) % 6, heldout=heldout)
    config = fsdd(tmp_path, dataset="uci-har")
    assert (config.clients, config.model, config.lr) == (2, "cnn1d", 0.05)
    assert len(datasets.client_data(config, 1).y_test) == 2


@pytest.mark.skipif(not (REAL / "fsdd_by_speaker").is_dir(), reason="no such data")
def test_the_real_speakers_and_people() -> None:
    config = fsdd(REAL.resolve())
    assert np.bincount(np.array(datasets.true_groups(config), int)).tolist() == [4] * 6
    data = datasets.client_data(config, 5)
    assert (len(data.y_train), len(data.y_test)) == (100, 25)
    assert fsdd(REAL.resolve(), dataset="uci-har").clients == 30
    writers = fsdd(REAL.resolve(), 197, "characters")
    # The collections that writers come from are their groups, by the names of the files.
    assert len(set(datasets.true_groups(writers))) == 15
