"""Fielding: nearest centres, the trigger for clustering again, and k-means by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import homes, round_of, with_clients
from test_feddrift import Bench

from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.messages import LABEL_COUNTS
from raceme.core.requests import Answer, InFlight
from raceme.core.scheduling import SelectionContext
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
    # Centres are 2 apart; with a reach of a quarter the bound is 0.5, half of it in each direction.
    then = {0: np.array([1.0, 0.0]), 1: np.array([0.0, 1.0])}
    now = {0: np.array([1.0 - moved, moved]), 1: then[1]}
    assert moved_too_far(then, now, 0.25) is far
    # Centres at a distance of 1, not of 2: the bound is 0.12 each way.
    near = {0: np.array([0.75, 0.25]), 1: np.array([0.25, 0.75])}
    assert moved_too_far(near, near | {0: np.array([0.61, 0.39])}, 0.24)
    assert not moved_too_far(near, near | {0: np.array([0.64, 0.36])}, 0.24)
    # A single one: a quarter of 2.
    assert moved_too_far({0: then[0]}, {0: now[0]}, 0.25) is far
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
    centres = dict(method.state.centres)
    assert [own.tolist() for own in centres.values()] == [[0.95, 0.05], [0.05, 0.95]]
    take_counts(method, "c1", 0, 10)
    method._place()
    assert method.state.centres == centres
    assert [method.clusters.main(f"c{i}") for i in range(4)] == [first, second, second, second]
    # Moving a client does not change the models.
    assert method.models[first].vector.tolist() == [1.0, 0.0]
    # A tenth of the samples has come and a tenth gone: with 0.3 no drift.
    settled = four_clients(tolerance=0.3, reach=0.0)
    centres = dict(settled.state.centres)
    take_counts(settled, "c0", 9, 1)
    settled._place()
    assert not settled.state.cold
    # No client moves, so that the centres are not even compared.
    assert settled.state.centres == centres


def test_all_are_clustered_again_from_the_means_of_former_models() -> None:
    method = four_clients(reach=0.1)
    # Now c0 and c2, and c1 and c3, are alike: each new cluster has a client of each former one.
    take_counts(method, "c1", 0, 10)
    take_counts(method, "c2", 10, 0)
    method._place()
    main = method.clusters.main
    assert main("c0") == main("c2") != main("c1") == main("c3")
    assert len(method.models) == 2
    for model in method.models.values():
        assert model.vector.tolist() == [0.5, 0.5]


def test_shares_are_of_each_clients_own_samples() -> None:
    method = with_clients(Fielding(), 3)
    assert method._shares() == {}
    method.state.counts = {"c0": [30, 10], "c1": [1, 1], "c2": [1, 1, 1]}
    # c2 counts another number of labels than most.
    shares = {client: own.tolist() for client, own in method._shares().items()}
    assert shares == {"c0": [0.75, 0.25], "c1": [0.5, 0.5]}


def test_a_new_cluster_starts_from_the_former_models_by_clients() -> None:
    method = four_clients()
    first, second = method.clusters.main("c0"), method.clusters.main("c3")
    own = dict.fromkeys(("c0", "c1", "c2"), np.array([1.0, 0.0])) | {"c3": np.array([0.0, 1.0])}
    method._cluster(own)
    assert homes(method) == {"c0": first, "c1": first, "c2": first, "c3": second}
    # Two clients come from (1, 0), one from (0, 1).
    assert method.models[first].vector.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert method.models[second].vector.tolist() == [0, 1]


def test_clients_are_placed_when_all_have_answered() -> None:
    made = Bench(Fielding(), 4)
    asked = made.hand_out()
    assert {work.kind for work in asked} == {LABEL_COUNTS}
    tasks = [made.open_task(work) for work in asked]
    assert made.hand_out() == []
    for task, counts in zip(tasks, [(10, 0), (9, 1), (0, 10), (1, 9)], strict=True):
        assert made.method.state.centres == {}
        take_counts(made.method, task.client, *counts)
        made.method.close_task(task)
        made.method.scheduling.lost(task, 0.0)
        made.idle.add(task.client)
    # As long as new clients may come, no round begins.
    context = SelectionContext(0.0, made.method.progress.fleet, made.idle, made.method.rng, True)
    made.method.requests(context)
    assert made.method.state.centres == {}
    assert {work.kind for work in made.hand_out()} == {"train"}
    centres = [own.tolist() for own in made.method.state.centres.values()]
    assert centres == [[0.95, 0.05], [0.05, 0.95]]


@pytest.mark.parametrize("reacts", [True, False])
def test_clients_follow_their_data(tmp_path: Path, reacts: bool) -> None:
    """With a tolerance of all samples there is never a drift, and clients keep their clusters."""
    keys: dict[str, Any] = {"strategy": "fielding", "clients": 20, "max-updates": 160, "workers": 0}
    keys |= {"drift": "swap-all", "swap-chance": 1.0, "drift-at": "80 updates"}
    keys |= {} if reacts else {"fielding.tolerance": 2.0, "fielding.reach": 9.0}
    summary = simulate(RunConfig.from_mapping(keys | {"out": str(tmp_path / "run")})).summary
    assert (summary["purity"] == 1.0) is reacts
