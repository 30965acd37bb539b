"""Sensor windows by person: HARBox and IMU, on small generated files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.sensors import standardised_windows
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
