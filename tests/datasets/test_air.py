"""Fine dust by station: windows, gaps and seasons, on small generated files."""

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
from raceme.datasets.sensors import TARGET
from raceme.datasets.source import Dataset, DataShape
from raceme.training import models

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
