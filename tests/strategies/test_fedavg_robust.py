"""Flower's robust strategies in Raceme's loop: outliers, and reports."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from runs import devices, of

from raceme.core import events
from raceme.core.errors import UserError
from raceme.strategies import (
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedTrimmedAvgParameters,
    Krum,
    KrumParameters,
    Method,
    MultiKrum,
    MultiKrumParameters,
)

HONEST = [2.0, 2.3, 2.4, 2.5, 3.0]
TARGETS = [np.full(8, value) for value in (*HONEST, 20.0)]
"""Five clients that agree, and one whose models are far longer."""


def round_of(strategy: Method) -> tuple[float, dict[str, float]]:
    """Return the model's (equal) weights after one round, and the share of each client."""
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(TARGETS, step=1.0), devices(*[1.0] * len(TARGETS)))
    strategy.check(len(TARGETS))
    strategy.run(grid, MODEL, len(TARGETS), observe=seen.append)
    vector = strategy.models[0].vector
    assert np.ptp(vector) == 0.0
    return float(vector[0]), {e.client: e.weight for e in of(events.UpdateApplied, seen)}


def test_the_mean_follows_the_outlier() -> None:
    assert round_of(FedAvg())[0] > 5


def test_the_median_of_each_weight() -> None:
    value, shares = round_of(FedMedian())
    assert value == pytest.approx(2.45)
    assert shares == pytest.approx(dict.fromkeys(shares, 1 / 6))


def test_the_mean_without_the_extremes() -> None:
    # A fifth of six clients is one, cut off at each end.
    value, shares = round_of(FedTrimmedAvg())
    assert value == pytest.approx((2.3 + 2.4 + 2.5 + 3.0) / 4)
    assert shares == pytest.approx(dict.fromkeys(shares, 1 / 6))
    assert round_of(FedTrimmedAvg(FedTrimmedAvgParameters(beta=0.4)))[0] == pytest.approx(2.45)


def test_krum_takes_the_update_nearest_to_others_and_reports_which() -> None:
    value, shares = round_of(Krum(KrumParameters(num_malicious_nodes=1)))
    # Squared distances to the three nearest: 0.09 + 0.01 + 0.04, the least of all.
    assert value == pytest.approx(2.3)
    assert {client for client, share in shares.items() if share} == {"c1"}
    assert shares["c1"] == 1.0


def test_multi_krum_averages_all_but_the_attackers_by_their_examples() -> None:
    value, shares = round_of(MultiKrum(MultiKrumParameters(num_malicious_nodes=1)))
    # Client i has 10 + i examples.
    weights = np.arange(10, 15)
    assert value == pytest.approx(weights @ HONEST / weights.sum())
    assert shares["c5"] == 0.0
    assert [shares[f"c{i}"] for i in range(5)] == pytest.approx(weights / weights.sum())


def test_multi_krum_chooses_as_many_as_are_wanted() -> None:
    options = MultiKrumParameters(num_malicious_nodes=1, num_nodes_to_select=2)
    assert sum(share > 0 for share in round_of(MultiKrum(options))[1].values()) == 2


def test_more_attackers_than_can_be_outvoted_are_an_error() -> None:
    MultiKrum(MultiKrumParameters(num_malicious_nodes=3)).check(9)
    with pytest.raises(
        UserError, match=r"3 attackers need .* at least 9 clients, and these have 8"
    ):
        MultiKrum(MultiKrumParameters(num_malicious_nodes=3)).check(8)
    with pytest.raises(
        UserError, match=r"1 attackers need .* at least 5 clients, and these have 4"
    ):
        Krum(KrumParameters(num_malicious_nodes=1, fraction=0.5)).check(8)
    with pytest.raises(UserError, match="0 attackers need rounds of at least 3 clients"):
        Krum().check(2)
    with pytest.raises(UserError, match="these have 1: take more clients or a larger fraction"):
        Krum(KrumParameters(fraction=0.05)).check(8)
