"""ICFL: the threshold and the running means by hand, moves of clients, groups on a grid."""

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
    step,
    three_groups,
    with_clients,
)

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.events import ClusterChange
from raceme.strategies import ICFL, ICFLAsync, ICFLAsyncParameters, ICFLParameters
from raceme.strategies.icfl import MeanSimilarity, alpha_star


def test_alpha_star_by_hand() -> None:
    # 1 − 0.15 · e^(−4 t / 500): e^0 = 1, e^−2 = 0.135335, e^−4 = 0.018316.
    values = [alpha_star(t, 500, start=0.85, growth=4.0) for t in (0, 250, 500)]
    assert values == pytest.approx([0.85, 0.979700, 0.997253], abs=1e-6)


def test_t_is_a_round_or_a_hundredth_of_an_update() -> None:
    rounds = with_clients(ICFL(ICFLParameters(rounds=500)), 2)
    rounds.scheduling.state.number = 250
    assert rounds.threshold() == pytest.approx(0.979700, abs=1e-6)
    updates = with_clients(ICFLAsync(ICFLAsyncParameters(rounds=500)), 2)
    updates.progress.updates = 24_999
    assert updates.threshold() == pytest.approx(0.979700, abs=1e-6)
    # Without T, the run's length is used: 1,000 updates of 2 clients are 500 rounds.
    own = with_clients(ICFL(), 2)
    own.planned_updates, own.scheduling.state.number = 1000, 250
    assert own.threshold() == pytest.approx(0.979700, abs=1e-6)


def test_t_counts_the_participants_of_a_round() -> None:
    # A quarter of 10 clients are 2: 1,000 updates come in 500 rounds, and α* ends at 1 − 0.15 e^−4.
    strategy = with_clients(ICFL(ICFLParameters(fraction=0.25)), 10)
    strategy.planned_updates, strategy.scheduling.state.number = 1000, 500
    assert strategy.threshold() == pytest.approx(0.997253, abs=1e-6)
    # 0.29 of 100 clients are 29.
    strategy = with_clients(ICFL(ICFLParameters(fraction=0.29)), 100)
    strategy.planned_updates, strategy.scheduling.state.number = 2900, 100
    assert strategy.threshold() == pytest.approx(0.997253, abs=1e-6)


def test_t_of_a_run_in_which_a_share_takes_part() -> None:
    strategy = ICFL(ICFLParameters(fraction=0.25))
    run_on(strategy, three_groups(), 30)
    assert strategy.scheduling.state.number == 10
    assert strategy.threshold() == pytest.approx(0.997253, abs=1e-6)


def test_running_means_by_hand() -> None:
    similarity = MeanSimilarity()
    for client in "abc":
        similarity.add(client)
    similarity.take("ab", "ab", np.array([[1.0, 0.5], [0.5, 1.0]]))
    similarity.take("a", "bc", np.array([[0.9, 0.2]]))
    matrix = similarity.among("abc")
    # a and b: (0.5 + 0.9) / 2; b and c have never been compared.
    assert matrix[0].tolist() == pytest.approx([1.0, 0.7, 0.2])
    assert matrix[:, 0].tolist() == pytest.approx([1.0, 0.7, 0.2])
    assert np.isnan(matrix[1, 2])
    assert np.isnan(matrix[2, 1])
    assert similarity.to_group("a", "abc") == pytest.approx(0.45)
    assert similarity.to_group("b", "bc") is None


def test_a_round_divides_a_cluster_below_the_threshold_only() -> None:
    # Cosines of (1, 0) and (4, 3): 0.8; of both with (0, 1): 0 and 0.6.
    models = ((1.0, 0.0), (4.0, 3.0), (0.0, 1.0))
    held = with_clients(ICFL(ICFLParameters(alpha_start=-0.1, epsilon=0.0)), 3)
    round_of(held, *models)
    assert set(held.models) == {0}
    divided = with_clients(ICFL(ICFLParameters(alpha_start=0.1, epsilon=0.0, moves=False)), 3)
    seen: list[events.Event] = []
    divided.clusters.report_to(seen.append)
    applied = round_of(divided, *models)
    assert homes(divided) == {"c0": 1, "c1": 1, "c2": 2}
    assert [(a.cluster, a.weight) for a in applied] == [(1, 0.5), (1, 0.5), (2, 1.0)]
    assert divided.models[1].vector.tolist() == [2.5, 1.5]
    (split,) = seen
    assert (split.score, split.threshold) == pytest.approx((1.0, 0.9))


def test_two_clients_are_distinguished_and_one_is_never_divided() -> None:
    strategy = with_clients(ICFL(ICFLParameters(alpha_start=0.5, epsilon=0.0)), 2)
    round_of(strategy, (1.0, 0.0), (0.0, 1.0))
    assert homes(strategy) == {"c0": 1, "c1": 2}
    round_of(strategy, (1.0, 1.0), (0.5, 0.5))
    assert set(strategy.models) == {1, 2}


def divided_in_two(**parameters: float | bool) -> ICFL:
    """c0 and c1 move along the first axis, c2 and c3 along the second."""
    options = ICFLParameters(alpha_start=0.5, epsilon=0.0, **parameters)  # type: ignore[arg-type]
    strategy = with_clients(ICFL(options), 4)
    round_of(strategy, (1, 0), (1, 0.1), (0, 1), (0.1, 1))
    assert homes(strategy) == {"c0": 1, "c1": 1, "c2": 2, "c3": 2}
    return strategy


def test_a_newcomer_joins_the_most_similar_cluster_or_founds_one() -> None:
    strategy = divided_in_two()
    strategy.on_join(Client("c4", num_examples=10))
    strategy.on_join(Client("c5", num_examples=10))
    # Both train cluster 1's (1, 0.05): c4 moves like c2 and c3, c5 against all others.
    one, two = (strategy.models[k].vector.copy() for k in (1, 2))
    x, y = np.eye(2)
    round_of(strategy, one + x, one + x, two + y, two + y, one + y, one - x - y)
    assert strategy.clusters.main("c4") == 2
    assert homes(strategy)["c5"] == 3
    assert strategy.models[3].vector == pytest.approx(one - x - y)


def test_members_without_a_say_go_to_those_whom_they_are_most_similar_to() -> None:
    # c0 and c1 move along the first axis, c2 and c3 along the second. c3 leaves before the split;
    # c4 is in the cluster but was never compared.
    strategy = with_clients(ICFL(ICFLParameters(rounds=1, alpha_start=-0.9, epsilon=0.0)), 5)
    round_of(strategy, (1, 0), (1, 0.1), (0, 1), (0.1, 1))
    assert set(strategy.models) == {0}
    for client in ("c3", "c4"):
        strategy.on_leave(client)
    strategy.parameters = ICFLParameters(alpha_start=0.5, epsilon=0.0, moves=False)
    seen: list[events.Event] = []
    strategy.clusters.report_to(seen.append)
    pulls = np.array([[1, 0], [1, 0.1], [0, 1]])
    round_of(strategy, *map(tuple, strategy.models[0].vector + pulls))
    expected = {"c0": 1, "c1": 1, "c2": 2, "c3": 2, "c4": 1}
    assert homes(strategy) == expected
    # The report also lists clients that are offline.
    (split,) = placed(seen, ClusterChange.SPLIT)
    assert split.memberships == {client: {k: 1.0} for client, k in expected.items()}


@pytest.mark.parametrize("moves", [True, False])
def test_a_client_moves_to_a_cluster_that_has_become_nearer(moves: bool) -> None:
    strategy = divided_in_two(moves=moves)
    seen: list[events.Event] = []
    strategy.clusters.report_to(seen.append)
    for _ in range(9):
        one, two = strategy.models[1].vector, strategy.models[2].vector
        pulls = [(1, 0), (1, 0), (0, 1), (1, 0)]
        starts = [one, one, two, strategy.models[strategy.clusters.main("c3")].vector]
        round_of(strategy, *(tuple(w + p) for w, p in zip(starts, pulls, strict=True)))
        if strategy.clusters.main("c3") != 2:
            break
    # Mean cosine with c0 after r rounds: (0.0995 + r − 1) / r.
    assert (strategy.clusters.main("c3") == 1) is moves
    assert bool(placed(seen, ClusterChange.MOVE)) is moves


def test_async_by_hand() -> None:
    parameters = ICFLAsyncParameters(alpha=0.5, decay="constant", alpha_start=0.5, epsilon=0.0)
    strategy = with_clients(ICFLAsync(parameters), 2)
    first = step(strategy, "c0", 2.0, 0.0)
    assert (first.cluster, first.staleness, first.weight) == (0, 0, 0.5)
    # c1 is sent (1, 0) and returns (1, 1): Δ = (0, 1), at right angles to c0's (2, 0).
    second = step(strategy, "c1", 1.0, 1.0)
    assert strategy.similarity()[1].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert strategy.clusters.main("c0") != strategy.clusters.main("c1") == second.cluster
    assert strategy.models[second.cluster].vector.tolist() == [1.0, 0.5]
    # c0's next Δ = (0, 1) is compared with c1's latest: (0 + 1) / 2 on average, not above 0.5.
    step(strategy, "c0", 1.0, 1.0)
    assert strategy.similarity()[1][0, 1] == pytest.approx(0.5)
    assert strategy.clusters.main("c0") != strategy.clusters.main("c1")
    # Once more, 2/3 > 0.5: it moves there, and its own cluster is deleted.
    step(strategy, "c0", 1.0, 1.5)
    assert strategy.clusters.main("c0") == strategy.clusters.main("c1")
    assert len(strategy.models) == 1


@pytest.mark.parametrize(
    "strategy",
    [
        ICFL(ICFLParameters(alpha_start=0.5, epsilon=0.0)),
        ICFLAsync(ICFLAsyncParameters(alpha_start=0.5, epsilon=0.0)),
    ],
    ids=["rounds", "async"],
)
def test_the_groups_are_found_and_reported(strategy: ICFL | ICFLAsync) -> None:
    seen = run_on(strategy, three_groups(), 120)
    assert found(strategy) == [4, 4, 4]
    splits = placed(seen, ClusterChange.SPLIT)
    assert len(splits) >= 2
    assert all(event.score > event.threshold for event in splits)
    assert last_accuracy(seen) > 0.8


@pytest.mark.parametrize("method", [ICFL, ICFLAsync])
def test_it_can_be_restored(method: type[ICFL | ICFLAsync]) -> None:
    # T is set, because by default it is the length of the run, which differs.
    check_it_can_be_restored(method, method.parameters_type(rounds=10))
