"""Parts of methods of several families: the first models of clusters, and their continuation."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from fleets import MODEL

from raceme.core.clusters import Clusters, Model
from raceme.core.messages import ModelSpec
from raceme.strategies import (
    CDFL,
    CFLGP,
    CSAFL,
    IFCA,
    FedRC,
    FedSoft,
    FedSoftAsync,
    FeSEM,
    FlexCFL,
    FlexCFLAsync,
    IFCAAsync,
)
from raceme.strategies.shared import kept_homes, redrawn, regroup

NORMALIZED = ModelSpec(("weight", "running_var"), ((3,), (1,)), ("float32", "float32"))


def test_other_starts_have_the_same_numbers_array_by_array() -> None:
    spec = ModelSpec.of(MODEL)
    vector = np.arange(8, dtype=np.float32)
    drawn = redrawn(vector, spec, np.random.default_rng(0))
    assert not np.array_equal(drawn, vector)
    assert sorted(drawn[:4]) == [0, 1, 2, 3]
    assert sorted(drawn[4:]) == [4, 5, 6, 7]
    assert vector.tolist() == list(range(8))


@pytest.mark.parametrize("method", [IFCA, IFCAAsync, FeSEM, FedSoft, FedSoftAsync, FedRC])
def test_a_start_at_zero_gives_different_models(method: Any) -> None:
    def starts(seed: int) -> list[list[float]]:
        made = method(k=3, seed=seed)
        made._spec = NORMALIZED
        made.initialize(np.array([0, 0, 0, 1], np.float32))
        return [model.vector.tolist() for model in made.models.values()]

    first = starts(1)
    assert first[0] == [0.0, 0.0, 0.0, 1.0]
    assert len({tuple(one) for one in first}) == 3
    # Noise is small and on weights only: a negative variance would make a model unusable.
    assert all(one[3] == 1.0 and max(map(abs, one[:3])) < 0.1 for one in first)
    assert starts(1) == first
    assert starts(2) != first


@pytest.mark.parametrize("prepared", [0, 3])
@pytest.mark.parametrize(
    "method",
    [IFCA, IFCAAsync, FeSEM, FedSoft, FedSoftAsync, FedRC, CFLGP, CSAFL, FlexCFL, FlexCFLAsync],
)
def test_k_is_4_unless_pretrained_models_state_it(
    method: Any, prepared: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raceme.run")
    made = method()
    made._spec = ModelSpec(("weights",), ((2,),), ("float32",))
    is_stated = prepared and made.needs.pretrained
    made.starts = [np.full(2, k, np.float32) for k in range(prepared)] if is_stated else []
    made.initialize(np.array([1, 2], np.float32))
    reason = "groups" if "groups" in vars(made.parameters) else "k"
    count, reason = (prepared, "pre-trained models") if is_stated else (4, reason)
    assert caplog.messages == [f"{method.__name__} takes K = {count} ({reason})."]


def test_k_of_cdfl_is_that_of_proxy_sets(caplog: pytest.LogCaptureFixture) -> None:
    class Probe:
        sets = 5

    caplog.set_level(logging.INFO, "raceme.run")
    made = CDFL()
    made.probe = Probe()  # type: ignore[assignment]
    made.initialize(np.zeros(2, np.float32))
    assert len(made.models) == 5
    assert caplog.messages == ["CDFL takes K = 5 (proxy sets)."]


def test_most_clients_keep_their_cluster() -> None:
    clients = ["c0", "c1", "c2", "c3", "c4", "c5"]
    homes = {"c0": 5, "c1": 7, "c2": 7, "c3": 7, "c4": 5}
    # Common clients of 0 with 5 and 7: 1 and 1; of 1: 1 and 2. 1 + 2 stay, not 1 + 1; c5 is new.
    kept = kept_homes(clients, np.array([0, 0, 1, 1, 1, 2]), homes)
    assert kept == {0: 5, 1: 7}


def test_a_cluster_of_an_offline_client_is_kept() -> None:
    clusters = Clusters({0: Model(np.zeros(2, np.float32))})
    for client in ("c0", "c1", "away"):
        clusters.join(client)
    first, _, third = clusters.split(0, [["c0"], ["c1"], ["away"]])
    clusters.leave("away")
    regroup(clusters, ["c0", "c1"], np.array([0, 0]))
    # c1 joins c0; its own cluster is empty.
    assert clusters.main("c0") == clusters.main("c1") == first
    assert list(clusters.models) == [first, third]
