"""FedAsync: the paper's choices, and those of CASA's baselines."""

from __future__ import annotations

import pytest
from clustered import at_version, update, with_clients

from raceme.strategies import FedAsync
from raceme.strategies.fedasync import mix_by_staleness


def test_a_fresh_update_may_have_a_staleness_of_one() -> None:
    made = with_clients(FedAsync(alpha=0.5, decay="polynomial", a=1.0, first_staleness=1), 1)
    late = update(made, "c0", 8, 0)
    # s(0 + 1) = 1 / 2, of α = 0.5: a quarter of 8.
    (outcome,) = made.applied([update(made, "c0", 8, 0)])
    assert (outcome.staleness, outcome.weight) == (0, 0.25)
    assert made.models[0].vector.tolist() == [2.0, 0.0]
    at_version(made, 2)
    # s(2 + 1) = 1 / 4: 2 + (8 − 2) / 8.
    (outcome,) = made.applied([late])
    assert (outcome.staleness, outcome.weight) == (2, 0.125)
    assert made.models[0].vector.tolist() == [2.75, 0.0]


def test_an_update_of_a_cluster_is_mixed_in_by_its_staleness() -> None:
    made = with_clients(FedAsync(alpha=0.5, decay="polynomial", a=1.0), 1)
    made.clusters.split(0, [["c0"]])
    outcome = mix_by_staleness(made, update(made, "c0", 8, 0), cluster=1, staleness=3)
    # s(3) = 1 / 4, of α = 0.5: an eighth of 8.
    assert (outcome.cluster, outcome.staleness, outcome.weight) == (1, 3, 0.125)
    assert made.models[1].vector.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("rho", "settings"), [(0.0, {}), (0.05, {"proximal-mu": 0.05})])
def test_the_proximal_term_of_clients(rho: float, settings: dict[str, float]) -> None:
    request = FedAsync(rho=rho).request_for("c0")
    assert (request.client, request.settings) == ("c0", settings)
