"""OCFL: temperature and parts by hand, the time of the split, newcomers."""

import numpy as np
import pytest
from clustered import (
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    round_of,
    run_on,
    step,
    three_groups,
    with_clients,
)

from raceme.core.clients import Client
from raceme.strategies import OCFL, FedAvg, OCFLParameters
from raceme.strategies.cfl import density_parts, temperature


def test_the_temperature_by_hand() -> None:
    # p = 2: √((1 + 4 + 1) · 2 / (3 · 2)) / 2 = √2 / 2. p = 1: 8 / 6 / 2 = 2/3.
    distances = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
    assert temperature(distances, 2.0) == pytest.approx(0.7071068)
    assert temperature(distances, 1.0) == pytest.approx(2 / 3)
    assert temperature(2.0 * (1 - np.eye(4)), 3.0) == pytest.approx(1.0)


def test_parts_by_density() -> None:
    # Two pairs at distance 0.1, about 1 apart; the fifth client is 1 from all others, and noise.
    distances = np.ones((5, 5)) - np.eye(5)
    distances[0, 1] = distances[1, 0] = distances[2, 3] = distances[3, 2] = 0.1
    assert density_parts(["a", "b", "c", "d", "e"], distances, 2) == [["a", "b"], ["c", "d"]]
    assert density_parts(["a", "b"], distances[:2, :2], 2) == []


ROUND = [(1.0, 0.0), (1.0, 0.1), (0.0, 1.0), (0.1, 1.0)]


def test_the_division_waits_until_updates_cease_to_diverge() -> None:
    method = with_clients(OCFL(), 4)
    # Updates are alike first, then diverge more and more, and finally less.
    for spread in (0.1, 0.5, 1.0):
        at = method.models[0].vector
        round_of(method, *((at[0] + 1.0, at[1] + spread * y) for y in (-1.0, -0.9, 0.9, 1.0)))
        assert set(homes(method).values()) == {0}
    at = method.models[0].vector
    round_of(method, *((at[0] + 1.0, at[1] + 0.9 * y) for y in (-1.0, -0.9, 0.9, 1.0)))
    assert homes(method) == {"c0": 1, "c1": 1, "c2": 2, "c3": 2}
    assert method.models[1].vector.tolist() == pytest.approx([4.0, -0.9 * 0.95])
    # Clusters are split only once.
    round_of(method, *ROUND)
    assert len(method.models) == 2
    # A newcomer's update equals those of the second cluster.
    method.on_join(Client("c4", num_examples=10))
    main = method.models[method.clusters.main("c4")].vector
    step(method, "c4", *(main + method.state.deltas["c2"]))
    assert homes(method)["c4"] == 2


def test_groups_on_a_grid() -> None:
    method = OCFL(OCFLParameters(least_members=3))
    seen = run_on(method, three_groups())
    assert found(method) == [4, 4, 4]
    assert last_accuracy(seen) > last_accuracy(run_on(FedAvg(), three_groups()))


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(OCFL)
