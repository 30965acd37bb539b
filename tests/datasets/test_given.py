"""Arrays, tensors and torch Datasets that a script or a notebook gives as ``data=``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.npz import keep
from raceme.datasets.source import Dataset

X = np.arange(24, dtype=np.float64).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 2])
PAIR = (X, Y)
FOUR = (X[:4], Y[:4], X[4:], Y[4:])


def given(data: Any, **values: Any) -> RunConfig:
    keys = {"dataset": "arrays", "data-fingerprint": keep(data), **values}
    return datasets.with_defaults(RunConfig.from_mapping(keys))


@pytest.mark.parametrize(
    "data",
    [
        [FOUR, FOUR],
        {"anna": FOUR, "ben": FOUR},
        (tuple(map(torch.tensor, FOUR)) for _ in range(2)),
        [[part.tolist() for part in FOUR]] * 2,
        [(TensorDataset(*map(torch.tensor, FOUR[:2])), TensorDataset(*map(torch.tensor, FOUR[2:])))]
        * 2,
        [{"x": X, "y": Y, "heldout": np.arange(6) > 3}] * 2,
    ],
)
def test_every_form_gives_the_same_samples_which_are_not_scaled(data: Any) -> None:
    config = given(data)
    clients = datasets.all_clients(config)
    assert len(clients) == 2
    for client in clients:
        assert client.x_train.dtype == np.float32
        np.testing.assert_array_equal(client.x_train, X[:4])
        np.testing.assert_array_equal(client.y_test, Y[4:])
    assert datasets.data_shape(config).num_classes == 3


def test_a_dataset_of_pairs_is_split_and_groups_and_quantities_are_taken() -> None:
    config = given([TensorDataset(torch.tensor(X), torch.tensor(Y))])
    (client,) = datasets.all_clients(config)
    assert sorted([*client.y_train, *client.y_test]) == sorted(Y)
    rooms = [{"x": X, "y": X[:, 0], "unit": "°C", "group": room} for room in (0, 1)]
    config = given(rooms)
    assert datasets.true_groups(config) == (0, 1)
    target = datasets.data_shape(config).target
    assert target is not None
    assert target.unit == "°C"


def test_labels_may_be_true_and_false() -> None:
    (client,) = datasets.all_clients(given([(X, Y > 0)]))
    assert client.y_train.dtype == np.int64
    assert sorted([*client.y_train, *client.y_test]) == [0, 0, 1, 1, 1, 1]


def test_the_fingerprint_is_of_the_content() -> None:
    assert keep([PAIR]) == keep([(torch.tensor(X), Y)])
    assert len({keep([PAIR]), keep([PAIR, PAIR]), keep([(X + 1, Y)]), keep([(X, Y[::-1])])}) == 4


def test_clients_of_a_mapping_keep_their_names() -> None:
    config = given({"anna": PAIR, "ben": PAIR, 7: PAIR}, clients=2)
    assert datasets.client_names(config) == ("anna", "ben")
    assert datasets.client_name(config, 1) == "ben"
    assert datasets.client_names(given([PAIR, PAIR])) == ()
    assert datasets.client_name(given([PAIR, PAIR]), 1) == "client-1"


def cloud(config: RunConfig) -> Dataset:
    """Draws from numpy's global generator, without a seed."""
    y = np.arange(20) % 2
    return Dataset(np.random.rand(20, 3).astype(np.float32), y, num_classes=2)


def test_what_a_dataset_draws_without_a_seed_is_that_of_the_run() -> None:
    found = []
    for seed in (0, 1, 0):
        config = RunConfig(dataset=f"{__name__}:cloud", partition="iid", clients=2, seed=seed)
        datasets.forget()
        np.random.rand()
        found.append(datasets.client_data(config, 0).x_train)
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])


def test_what_is_not_in_the_cache_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = keep([PAIR])
    monkeypatch.setenv("RACEME_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="lacks it: run that script again"):
        datasets.with_clients(
            RunConfig.from_mapping({"dataset": "arrays", "data-fingerprint": fingerprint})
        )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "data holds no clients"),
        ({7: PAIR, "7": PAIR}, "data has two clients of the name '7'"),
        (3, "data must be a list or a mapping .* got an object of type int"),
        (PAIR, r"data\[0\] must be .* got an object of type ndarray"),
        ([PAIR, (X, Y, X)], r"data\[1\] must be .* got an object of type tuple"),
        ([PAIR, (X[:, :3], Y)], r"different shapes: \(3,\), \(4,\) \(in data\[1\], data\[0\]\)"),
        ([PAIR, (X[:5], Y)], r"data\[1\]: y must hold whole numbers, shape \(5,\)"),
        ({"anna": (X[:0], Y[:0])}, r"data\['anna'\]: x must hold .* at least one sample"),
        ([(np.where(X > 9, np.nan, X), Y)], r"data\[0\]: x must be finite"),
        ([PAIR, (X, Y / 2)], r"data\[1\]: y must hold whole numbers.*needs its unit"),
        ([PAIR, {"x": X, "y": Y / 2, "unit": "m"}], r"must describe their labels alike"),
        ([(X, Y - 1)], "labels from 0,"),
        ([(X, np.array(list("abcabc")))], "y must hold whole numbers"),
        ([PAIR, FOUR], "Some clients in data have test samples"),
        ([{"x": X, "labels": Y}], r"data\[0\] has labels\. Expected"),
        ([{"x": X}], r"data\[0\] lacks y\. Expected"),
        ([([[1.0, 2.0], [3.0]], [0, 1])], r"data\[0\]: x is no array"),
        ([torch.utils.data.Subset(TensorDataset(torch.tensor(X)), [0, 1])], "Dataset of pairs"),
        ([TensorDataset(torch.zeros(0, 4), torch.zeros(0))], r"data\[0\]: x must hold numbers"),
    ],
)
def test_bad_data_are_one_line(data: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        keep(data)
    assert "\n" not in str(raised.value)


def test_more_clients_than_were_given_are_refused() -> None:
    with pytest.raises(UserError, match="Too many clients: 3, but data holds 2"):
        datasets.all_clients(given([PAIR, PAIR], clients=3))
    assert len(datasets.all_clients(given([PAIR, PAIR], clients=1))) == 1
