"""FeSEM: nearest centres, unweighted means, groups on a grid."""

import numpy as np
import pytest
from clustered import (
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    placed,
    round_of,
    run_on,
    three_groups,
    update,
    with_clients,
)

from raceme.core.clients import Client
from raceme.core.events import ClusterChange
from raceme.strategies import FeSEM, FeSEMParameters
from raceme.strategies.ifca import nearest_centre


def test_nearest_centre_by_hand() -> None:
    # From (1, 1): 1.41 to (0, 0), 1 to (2, 1). From (−3, 0): 3 and 5.1. From (1, 0.5): 1.118 twice.
    vectors = np.array([[1.0, 1.0], [-3.0, 0.0], [1.0, 0.5]], np.float32)
    centres = np.array([[0.0, 0.0], [2.0, 1.0]], np.float32)
    assert nearest_centre(vectors, centres).tolist() == [1, 0, 0]


def test_the_distance_is_the_euclidean_one() -> None:
    # From the origin: 4.24 to (3, 3) and 5 to (0, 5); by single steps it would be 6 and 5.
    centres = np.array([[3.0, 3.0], [0.0, 5.0]], np.float32)
    assert nearest_centre(np.zeros((1, 2), np.float32), centres).tolist() == [0]


def test_the_papers_rounds_by_hand() -> None:
    strategy = with_clients(FeSEM(FeSEMParameters(k=2)), 3)
    # Centres (0, 0), the initial model, and (6, 0).
    strategy.models[1].replace(np.array([6, 0], np.float32))

    def choose() -> list[int]:
        return [
            strategy.clusters.main(client)
            for client in ("c0", "c1", "c2")
            if strategy.request_for(client)
        ]

    # No client has trained: all have the initial model, and start at its nearest centre.
    assert choose() == [0, 0, 0]
    updates = [
        update(strategy, "c0", 2, 0, examples=90),
        update(strategy, "c1", 4, 1),
        update(strategy, "c2", 6, 2),
    ]
    applied = strategy.applied(updates)
    # The mean is unweighted by examples; the later assignment does not change the model.
    assert [one.weight for one in applied] == pytest.approx([1 / 3] * 3)
    assert strategy.models[0].vector.tolist() == [4.0, 1.0]
    assert [strategy.clusters.main(f"c{index}") for index in range(3)] == [0, 0, 0]
    # Before they train again: from (2, 0) 2.24 and 4, from (4, 1) 0 and 2.24, from (6, 2) 2.24
    # to (4, 1) and 2 to (6, 0).
    assert choose() == [0, 0, 1]


def test_rounds_by_hand() -> None:
    strategy = with_clients(FeSEM(FeSEMParameters(k=2, start="k-means++")), 4)
    # Two distant pairs: k-means++ starts with one client of each.
    applied = round_of(strategy, (0, 0), (10, 10), (0, 1), (10, 14))
    of = homes(strategy)
    assert of["c0"] == of["c2"] != of["c1"] == of["c3"]
    assert [a.weight for a in applied] == [0.5] * 4
    first, second = of["c0"], of["c1"]
    assert strategy.models[first].vector.tolist() == [0.0, 0.5]
    assert strategy.models[second].vector.tolist() == [10.0, 12.0]
    # c3 is nearer to the first centre now: it moves there, and the mean changes.
    # The mean does not depend on c2's number of examples.
    updates = [update(strategy, "c0", 0, 0), update(strategy, "c1", 10, 10)]
    updates.append(update(strategy, "c2", 0, 1, examples=90))
    strategy.applied([*updates, update(strategy, "c3", 3, 2)])
    assert strategy.clusters.main("c3") == first
    assert strategy.models[first].vector.tolist() == [1.0, 1.0]
    assert strategy.models[second].vector.tolist() == [10.0, 10.0]
    # A newcomer trains the larger cluster's model, and then joins the nearest centre.
    strategy.on_join(Client("c4", num_examples=10))
    assert strategy.clusters.main("c4") == first
    round_of(strategy, (0, 0), (10, 10), (0, 1), (3, 2), (9, 9))
    assert strategy.clusters.main("c4") == second


def test_there_are_no_more_centres_than_clients_and_absent_ones_come_later() -> None:
    strategy = with_clients(FeSEM(FeSEMParameters(k=5, start="random")), 3)
    round_of(strategy, (0, 0), (4, 4))
    of = homes(strategy)
    assert of.pop("c2") is None
    assert sorted(of.values()) == [1, 2]
    round_of(strategy, (0, 0), (4, 4), (4, 5))
    assert strategy.clusters.main("c2") == strategy.clusters.main("c1")


def test_the_groups_are_found_and_reported() -> None:
    strategy = FeSEM(FeSEMParameters(k=3, start="k-means++"))
    seen = run_on(strategy, three_groups())
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9
    (split,) = placed(seen, ClusterChange.SPLIT)
    assert (split.gone, split.made) == ((0,), (1, 2, 3))
    assert len(split.memberships) == 12


@pytest.mark.parametrize("start", ["models", "random"])
def test_it_can_be_restored(start: str) -> None:
    check_it_can_be_restored(FeSEM, FeSEMParameters(start=start))


@pytest.mark.parametrize("start", ["random", "k-means++"])
def test_the_seed_decides_the_first_centres(start: str) -> None:
    def clusters(seed: int) -> dict[str, int | None]:
        strategy = with_clients(FeSEM(FeSEMParameters(k=3, start=start), seed), 9)
        round_of(strategy, *((float(index), float(index**2)) for index in range(9)))
        return homes(strategy)

    assert clusters(3) == clusters(3)
    assert len({tuple(clusters(seed).values()) for seed in range(6)}) > 1
