"""A user's function that returns a dataset: what cannot be used is said at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.source import Dataset, Loaded

X = np.zeros((6, 2), np.float32)
Y = np.array([0, 1, 2, 0, 1, 2], np.int64)
HALVES = (np.arange(3), np.arange(3, 6))
GOOD = Dataset(X, Y, 3, users=HALVES, test_users=HALVES, groups=(0, 1))


def load(dataset: Dataset, clients: int = 2) -> Dataset:
    return Loaded("own:data", lambda config: dataset).load(RunConfig(clients=clients))


def test_arrays_that_fit_are_used_and_their_clients_counted() -> None:
    assert load(GOOD) is GOOD
    assert Loaded("own:data", lambda config: GOOD).count_clients(RunConfig()) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": X.tolist()}, "numpy arrays, got list and ndarray"),
        ({"y": Y[:5]}, "x has 6 samples and y 5"),
        ({"y": Y.astype(np.int32)}, "dtype int64 .* got int32"),
        ({"num_classes": 2}, "from 0 to 1, got 0 to 2"),
        ({"y": Y - 1}, "from 0 to 2, got -1 to 1"),
        ({"x": np.where(X == 0, np.nan, X)}, "not finite"),
        ({"groups": (0,)}, "groups has 1 entries for 2 clients"),
        ({"test_users": HALVES[:1]}, "test_users has 1 entries for 2 clients"),
        ({"users": (np.arange(3), np.arange(3, 7))}, "samples 3 to 6, of 6"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"own:data.*{said}"):
        load(dataclasses.replace(GOOD, **changes))


def test_a_partition_of_data_that_come_with_clients_is_refused() -> None:
    source = Loaded("own:data", lambda config: GOOD)
    with pytest.raises(UserError, match="partition is not read with dataset own:data"):
        source.load(RunConfig(clients=2, partition="iid"))
    others = dataclasses.replace(GOOD, users=None, test_users=None, groups=None)
    assert Loaded("own:data", lambda config: others).load(RunConfig(clients=2, partition="iid"))


def test_more_clients_than_the_data_have_are_refused() -> None:
    with pytest.raises(UserError, match="has 2 clients, and clients is 3"):
        load(GOOD, clients=3)
