"""Fielding: nearest centres, the trigger to cluster again, and k-means by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import homes, round_of, with_clients

from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.messages import LABEL_COUNTS
from raceme.core.requests import Answer, InFlight
from raceme.runs.experiment import simulate
from raceme.strategies import Fielding, FieldingParameters
from raceme.strategies.fielding import best_clusters, moved_too_far, nearest_centre


def take_counts(method: Fielding, client: str, *counts: int) -> None:
    task = InFlight(0, client, 0, 0, 0, sent_at=0.0, bytes_down=0, kind=LABEL_COUNTS)
    numbers = {LABEL_COUNTS: np.array(counts)}
    method.on_answer(Answer(task, sum(counts), {}, numbers))


def test_the_nearest_centre_by_hand() -> None:
    # L1: 4 · 0.2 = 0.8 to the first, 2 · 0.35 = 0.7 to the second. (Squared: 0.16 and 0.245.)
    share = np.array([0.25, 0.25, 0.25, 0.25])
    centres = {3: np.array([0.45, 0.45, 0.05, 0.05]), 5: np.array([0.6, -0.1, 0.25, 0.25])}
    assert nearest_centre(share, centres) == 5


@pytest.mark.parametrize(("moved", "far"), [(0.24, False), (0.26, True)])
def test_a_centre_that_has_moved_on_both_sides_of_the_bound(moved: float, far: bool) -> None:
    # Centres at a distance of 2; with a reach of a quarter the bound is 0.5, half of it each way.
    then = {0: np.array([1.0, 0.0]), 1: np.array([0.0, 1.0])}
    now = {0: np.array([1.0 - moved, moved]), 1: then[1]}
    assert moved_too_far(then, now, 0.25) is far
    # A cluster that has lost all clients, whatever the bound.
    assert moved_too_far(then, {0: then[0]}, 9.0)


def test_the_clusters_of_the_highest_silhouette() -> None:
    points = np.array(
        [[1, 0, 0], [0.9, 0.1, 0], [0, 1, 0], [0, 0.9, 0.1], [0, 0, 1], [0.1, 0, 0.9]]
    )
    assert best_clusters(points, 10, 0).tolist() == [0, 0, 1, 1, 2, 2]
    assert len(set(best_clusters(points, 2, 0).tolist())) == 2
    assert best_clusters(np.ones((4, 3)), 10, 0).tolist() == [0] * 4
    assert best_clusters(np.eye(2), 10, 0).tolist() == [0, 0]


def four_clients(**options: float) -> Fielding:
    """Two clients of each of two labels, clustered, with models (1, 0) and (0, 1)."""
    method = with_clients(Fielding(FieldingParameters(**options)), 4)
    method.progress.fleet.clients |= {f"c{i}": Client(f"c{i}", num_examples=10) for i in range(4)}
    for client, counts in enumerate([(10, 0), (9, 1), (0, 10), (1, 9)]):
        take_counts(method, f"c{client}", *counts)
    method._place()
    round_of(method, (1, 0), (1, 0), (0, 1), (0, 1))
    return method


def test_a_drifted_client_moves_alone() -> None:
    method = four_clients(reach=9.0)
    assert homes(method) == {"c0": 0, "c1": 0, "c2": 1, "c3": 1}
    first, second = method.clusters.main("c0"), method.clusters.main("c2")
    take_counts(method, "c1", 0, 10)
    method._place()
    assert [method.clusters.main(f"c{i}") for i in range(4)] == [first, second, second, second]
    # The models are as they were.
    assert method.models[first].vector.tolist() == [1.0, 0.0]
    # A tenth of the samples has come and a tenth gone: with 0.3 no drift.
    settled = four_clients(tolerance=0.3)
    take_counts(settled, "c0", 9, 1)
    settled._place()
    assert not settled.state.cold


def test_all_are_clustered_again_from_the_means_of_former_models() -> None:
    method = four_clients(reach=0.1)
    # Now c0 and c2, c1 and c3 are alike: each new cluster has one client of each former one.
    take_counts(method, "c1", 0, 10)
    take_counts(method, "c2", 10, 0)
    method._place()
    main = method.clusters.main
    assert main("c0") == main("c2") != main("c1") == main("c3")
    assert len(method.models) == 2
    for model in method.models.values():
        assert model.vector.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("reacts", [True, False])
def test_clients_follow_their_data(tmp_path: Path, reacts: bool) -> None:
    """With a tolerance of all samples nothing is a drift, and clients stay where they were."""
    keys: dict[str, Any] = {"strategy": "fielding", "clients": 20, "max-updates": 160, "workers": 0}
    keys |= {"drift": "swap-all", "swap-chance": 1.0, "drift-at": "80 updates"}
    keys |= {} if reacts else {"fielding.tolerance": 2.0, "fielding.reach": 9.0}
    summary = simulate(RunConfig.from_mapping(keys | {"out": str(tmp_path / "run")})).summary
    assert (summary["purity"] == 1.0) is reacts
