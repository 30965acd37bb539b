"""Bearing faults by machine and speed, on small generated files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError

REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))


def config_of(root: Path, clients: int = 6) -> RunConfig:
    return RunConfig(dataset="hit-bearing", data_root=str(root), clients=clients)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two machines, one at two speeds: ten windows of each fault, whose readings are its number."""
    folder = tmp_path / "hit_bearing_by_machine"
    folder.mkdir()
    for first, name in ((0, "old_1200rpm"), (100, "old_600rpm"), (200, "new_900rpm")):
        numbers = first + np.arange(70)
        x = np.tile(numbers[:, None], (1, 2048)).astype(np.float16)
        np.savez(folder / f"{name}.npz", x=x, y=np.repeat(np.arange(7), 10).astype(np.uint8))
    return tmp_path


def test_a_client_has_a_stretch_of_every_fault_of_one_machine_at_one_speed(root: Path) -> None:
    config = config_of(root)
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


def test_what_is_not_there_or_not_enough_is_one_clear_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hit-bearing is not under '.*--data-root DIR. Expected"):
        datasets.load(config_of(tmp_path / "none"))
    with pytest.raises(UserError, match=r"has 3 machines and speeds.* at least 3 clients, got 2"):
        datasets.load(config_of(root, clients=2))
    with pytest.raises(UserError, match=r"too few windows for 11 clients"):
        datasets.load(config_of(root, clients=33))
    np.savez(root / "hit_bearing_by_machine" / "old_600rpm.npz", x=np.zeros((4, 9)), y=[0] * 4)
    with pytest.raises(UserError, match=r"old_600rpm.npz holds x of shape \(4, 9\)"):
        datasets.load(config_of(root))


@pytest.mark.skipif(not (REAL / "hit_bearing_by_machine").is_dir(), reason="no such data")
def test_the_real_machines() -> None:
    config = datasets.with_clients(RunConfig(dataset="hit-bearing", data_root=str(REAL.resolve())))
    assert np.bincount(np.array(datasets.true_groups(config), int)).tolist() == [12, 12]
    data = datasets.client_data(config, 5)
    assert np.bincount(data.y_train).tolist() == [26] * 7
    assert np.bincount(data.y_test).tolist() == [6] * 7
    assert data.x_train.std() == pytest.approx(1.0, abs=0.2)
