"""LEAF's files of numbers and of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.source import DataShape


def write(path: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    path.write_text(json.dumps({"users": list(data), "user_data": data}))


def config_of(root: Path, **keys: Any) -> RunConfig:
    return RunConfig(dataset="leaf", data_root=str(root), **keys)


def test_vectors_by_user_as_in_leafs_synthetic_data(tmp_path: Path) -> None:
    write(
        tmp_path / "data/train/a.json",
        {"u0": ([[1.0, 5.0]], [0.0]), "u1": ([[2.0, 5.0], [6.0, 5.0]], [1.0, 3.0])},
    )
    write(tmp_path / "data/test/a.json", {"u0": ([[9.0, 5.0]], [2.0]), "u1": ([[3.0, 5.0]], [1.0])})
    config = datasets.with_defaults(config_of(tmp_path))
    assert (config.clients, config.model) == (2, "mlp")
    assert datasets.data_shape(config) == DataShape((2,), 4)
    # The user with most samples is first. Of 1, 2 and 6 the mean is 3, the variance 14 / 3.
    data = datasets.client_data(config, 0)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 3], [1])
    expected = (np.array([[2.0], [6.0]]) - 3.0) / np.sqrt(14 / 3)
    np.testing.assert_allclose(data.x_train[:, :1], expected, rtol=1e-6)
    assert not data.x_train[:, 1].any()


def test_text_by_role_as_in_leafs_shakespeare(tmp_path: Path) -> None:
    write(
        tmp_path / "all_data/a.json",
        {"ROMEO": (["abba", "bcab"], ["c", "a"]), "X": (["aaaa"], ["d"])},
    )
    config = datasets.with_defaults(config_of(tmp_path))
    # X has one sample only.
    assert (config.clients, config.model) == (1, "gru")
    assert datasets.data_shape(config) == DataShape((4,), 4, tokens=4)
    data = datasets.client_data(config, 0)
    found = {tuple(x): int(y) for x, y in zip(data.x_train, data.y_train, strict=True)}
    found |= {tuple(x): int(y) for x, y in zip(data.x_test, data.y_test, strict=True)}
    assert found == {(0, 1, 1, 0): 2, (1, 2, 0, 1): 0}


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([[1.0], [2.0]], [0]),
        ([[1.0], [2.0]], [0, -1]),
        ([[1.0], [2.0]], [0, 0.5]),
        ([[1.0], [2.0, 3.0]], [0, 1]),
        ([[1.0], [float("nan")]], [0, 1]),
        (["ab", "abc"], ["a", "b"]),
        (["ab", "cd"], ["a", "bc"]),
        ([["id", "date"], ["a", "b"]], [0, 1]),
        ([1.0, 2.0], [0, 1]),
        (["ab", 3], ["a", "b"]),
    ],
)
def test_what_is_wrong_with_a_user_is_said(tmp_path: Path, x: list[Any], y: list[Any]) -> None:
    write(tmp_path / "train/a.json", {"u": (x, y)})
    with pytest.raises(UserError, match=r"a\.json, user 'u': expected of every user x") as caught:
        datasets.load(config_of(tmp_path, clients=1))
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_the_files_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaf needs the folder with LEAF's files"):
        datasets.load(RunConfig(dataset="leaf", clients=1))
    with pytest.raises(UserError, match=r"leaf is not under .*expected train/\*\.json"):
        datasets.load(config_of(tmp_path, clients=1))
    path = tmp_path / "train/a.json"
    write(path, {"u": ([[1.0], [2.0]], [0, 1]), "v": ([[1.0, 2.0]], [0])})
    with pytest.raises(UserError, match="samples of different shapes"):
        datasets.load(config_of(tmp_path, clients=1))
    write(path, {"u": ([[1.0], [2.0]], [0, 1]), "v": (["a"], ["b"])})
    with pytest.raises(UserError, match="different shapes, or numbers and text"):
        datasets.load(config_of(tmp_path, clients=1))
    write(path, {"u": ([], [])})
    with pytest.raises(UserError, match="hold no samples"):
        datasets.load(config_of(tmp_path, clients=1))
    write(path, {"u": ([[1.0], [2.0]], [0, 1])})
    with pytest.raises(UserError, match=r"Too many clients: 2, but .* only 1 users"):
        datasets.load(config_of(tmp_path, clients=2))
