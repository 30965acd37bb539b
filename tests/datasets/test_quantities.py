"""Labels of .npz files that are a quantity: scaled as files say, and told from classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.source import DataShape, Target
from raceme.runs import experiment

CELSIUS = {"unit": "°C", "y_mean": 20.0, "y_std": 10.0}


def write(path: Path, temperatures: object = (20.0, 35.0, 10.0), **more: object) -> Path:
    """Write a device's file, of which each temperature is one of a sample to train and to test."""
    y = np.asarray(temperatures)
    x = np.ones((len(y), 2), np.float32)
    np.savez(path, **{"x_train": x, "y_train": y, "x_test": x, "y_test": y, **more})  # type: ignore[arg-type]
    return path


def device(path: Path, **keys: object) -> RunConfig:
    return RunConfig(dataset="npz", clients=1, options={"data-file": str(path)}, **keys)  # type: ignore[arg-type]


def folder(root: Path, **keys: object) -> RunConfig:
    return RunConfig(dataset="npz-folder", data_root=str(root), **keys)  # type: ignore[arg-type]


# A device's own file.


def test_a_quantity_is_scaled_as_its_file_says(tmp_path: Path) -> None:
    run = device(write(tmp_path / "a.npz", **CELSIUS))
    target = Target("°C", 20.0, 10.0)
    assert datasets.data_shape(run) == DataShape((2,), 0, target=target)
    own = datasets.client_data(run, 0)
    assert own.y_train.dtype == np.float32
    assert own.y_train.tolist() == own.y_test.tolist() == [0.0, 1.5, -1.0]


def test_whole_numbers_with_a_unit_are_a_quantity_as_it_is(tmp_path: Path) -> None:
    run = device(write(tmp_path / "a.npz", [3, -7], unit=""))
    assert datasets.data_shape(run).target == Target("", 0.0, 1.0)
    assert datasets.client_data(run, 0).y_train.tolist() == [3.0, -7.0]


def test_whole_numbers_without_one_are_classes(tmp_path: Path) -> None:
    run = device(write(tmp_path / "a.npz", [3, 0]))
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
def test_what_is_wrong_with_a_quantity(
    tmp_path: Path, arrays: dict[str, object], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        datasets.load(device(write(tmp_path / "a.npz", **arrays)))


def test_files_of_one_model_say_the_same(tmp_path: Path) -> None:
    write(tmp_path / "d0.npz", **CELSIUS)
    write(tmp_path / "d1.npz", **{**CELSIUS, "y_std": 5.0})
    run = device(tmp_path / "d{client}.npz").with_values(clients=2)
    told = r"d0\.npz must describe their labels alike.* y_mean 20, y_std 5 and unit '°C', .* 10\."
    with pytest.raises(UserError, match=told):
        datasets.load(run)
    write(tmp_path / "d1.npz", [1, 2])
    datasets.forget()
    with pytest.raises(UserError, match="their labels alike: classes and unit '°C'"):
        datasets.load(run)


# A folder of files.


def test_a_folder_s_quantity_is_scaled_by_what_is_for_training(tmp_path: Path) -> None:
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
    # Again, now from the cache; and as the files say where they do.
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
    write(tmp_path / "a.npz", [7.0, 7.0], unit="K")
    assert datasets.data_shape(folder(tmp_path)).target == Target("K", 7.0, 1.0)
    assert datasets.client_data(folder(tmp_path), 0).y_test.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dataset", ["fsdd", "characters"])
def test_datasets_of_classes_refuse_a_quantity(tmp_path: Path, dataset: str) -> None:
    x = np.zeros((4, 1, 28, 28) if dataset == "characters" else (4, 32, 32), np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(4.0), unit="K")
    with pytest.raises(UserError, match=r"holds no (characters|spectra)"):
        datasets.load(RunConfig(dataset=dataset, data_root=str(tmp_path), clients=1))


# What a server has.


def proxy(path: Path, **more: object) -> None:
    x, y = np.ones((5, 2), np.float32), np.array([10.0, 20.0, 30.0, 40.0, 25.0])
    np.savez(path, **{"x": x, "y": y, "x_train": x, "y_train": y, **CELSIUS, **more})  # type: ignore[arg-type]


def test_a_server_s_own_samples_are_scaled_alike(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    for name in ("a", "b"):
        proxy(tmp_path / "sets" / f"{name}.npz")
    server = RunConfig(dataset="npz", clients=1, proxy=str(tmp_path / "sets"), pretrain=2)
    assert datasets.data_shape(server) == DataShape((2,), 0, target=Target("°C", 20.0, 10.0))
    assert datasets.proxy_sets(server).proxies[1].y.tolist() == [-1.0, 0.0, 1.0, 2.0, 0.5]
    assert datasets.pretraining(server)[0].y.tolist() == [-1.0, 0.0]
    clients = device(write(tmp_path / "d.npz", unit="°C", y_mean=0.0, y_std=1.0))
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
    run = device(write(tmp_path / "a.npz", **arrays))
    assert experiment.resolve(run).target_accuracy == target
    assert experiment.resolve(run.with_values(target_accuracy=3.0)).target_accuracy == 3.0
    classes = device(write(tmp_path / "b.npz", [0, 1]))
    assert experiment.resolve(classes).target_accuracy == 0.9
    # 123.4 / 4 with two figures.
    long = device(write(tmp_path / "c.npz", unit="K", y_mean=0.0, y_std=123.4))
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
    # 80 W is the error of a model that knows nothing; above 1 it is no accuracy.
    for name in ("mae", "accuracy_before", "accuracy_after", "cluster_accuracy"):
        assert 1 < summary[name] < 40
