"""Samples of stacked clients: they stay where they are until a client has others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raceme.simulation.vectorised import SampleStore
from raceme.training.models import Samples


def samples(count: int, value: float) -> Samples:
    return Samples(np.full((count, 2), value, np.float32), np.full(count, int(value)))


def held(store: SampleStore, name: str, count: int) -> list[float]:
    """What the store has at a client's place: the values of its inputs and its labels."""
    indices = torch.arange(count) + store.offset(name)
    x, y = store.select(indices)
    assert x.shape == (count, 2)
    assert x[:, 0].tolist() == y.tolist()
    return y.tolist()


@pytest.mark.parametrize("other", [2, 5, 1], ids=["as many", "more", "fewer"])
def test_a_clients_other_samples_replace_its_former_ones(other: int) -> None:
    store = SampleStore(torch.device("cpu"))
    store.hold({"a": samples(3, 1), "b": samples(2, 2)})
    store.hold({"c": samples(4, 3)})
    store.hold({"b": samples(other, 7), "d": samples(1, 4)})
    assert held(store, "a", 3) == [1] * 3
    assert held(store, "b", other) == [7] * other
    assert held(store, "c", 4) == [3] * 4
    assert held(store, "d", 1) == [4]


def test_nothing_piles_up_when_data_change_again_and_again() -> None:
    store = SampleStore(torch.device("cpu"))
    for step in range(20):
        store.hold({"a": samples(2 + step % 3, step), "b": samples(5, step)})
        assert held(store, "b", 5) == [step] * 5
        assert store.offset("b") == 2 + step % 3
