"""Data recorded over a long time, and clients that meet them in order: small generated files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError

REAL = Path(os.environ.get("RACEME_TEST_DATA", "../shared/data"))


def config_of(dataset: str, root: Path, **keys: object) -> RunConfig:
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
    config = config_of("gas-drift", tmp_path, clients=5)
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
    config = config_of("gas-drift", tmp_path, clients=5, drift="in-order")
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
    config = config_of("gas-drift", tmp_path, clients=5, drift="in-order", in_order_lag=1)
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
        datasets.true_groups(config_of(dataset, tmp_path, drift="in-order", **keys))


def test_missing_and_foreign_batches_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gas-drift is not under '.*--data-root DIR. Expected: ba"):
        datasets.load(config_of("gas-drift", tmp_path))
    np.savez(tmp_path / "batch_01.npz", x=np.zeros((4, 3)), y=np.zeros(4, int))
    with pytest.raises(UserError, match=r"batch_01.npz holds x of shape \(4, 3\)"):
        datasets.load(config_of("gas-drift", tmp_path))
    np.savez(tmp_path / "batch_01.npz", x=np.zeros((4, 128)))
    with pytest.raises(UserError, match=r"batch_01.npz lacks y"):
        datasets.load(config_of("gas-drift", tmp_path))


@pytest.mark.skipif(not (REAL / "gas_drift_batches").is_dir(), reason="no gas_drift_batches")
def test_the_real_batches() -> None:
    config = datasets.with_defaults(config_of("gas-drift", REAL, drift="in-order"))
    sizes = np.bincount(datasets.load(config).periods)
    assert (config.clients, config.model) == (20, "mlp")
    assert sizes.sum() <= 13_910
    for step in range(len(sizes)):
        data = datasets.client_data(config, 7, step)
        assert abs(len(data.y_train) + len(data.y_test) - sizes[step] / 20) < 1
