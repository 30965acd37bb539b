"""EchoPFL: placement of clients, broadcasts to working clients by hand, groups on a grid."""

import numpy as np
import pytest
from clustered import (
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    run_on,
    step,
    three_groups,
    update,
    with_clients,
)

from raceme.strategies import EchoPFL, EchoPFLParameters, FedAsync


def half(**options: float) -> EchoPFL:
    """Three clients; an update counts for half of the model."""
    return with_clients(EchoPFL(EchoPFLParameters(alpha=0.5, decay="constant", **options)), 3)


def test_a_client_founds_a_cluster_joins_it_and_the_empty_one_goes() -> None:
    method = half(echo=99.0)
    step(method, "c0", 1.0, 0.0)
    # 90° are a cosine of 0, not below it; the model is (0.5, 0).
    step(method, "c1", 0.5, 1.0)
    assert homes(method) == {"c0": 0, "c1": 0, "c2": 0}
    # (−1, −1) against (1, 0) and (0, 1): a cluster of its own, from a copy of (0.5, 0.5).
    step(method, "c2", -0.5, -0.5)
    assert homes(method) == {"c0": 0, "c1": 0, "c2": 1}
    assert method.models[1].vector.tolist() == [0.0, 0.0]
    assert method.models[0].vector.tolist() == [0.5, 0.5]
    # c1's mean becomes (0, 1) + 0.3 (−9, −9 − 1) = (−2.7, −2): nearer to c2's than to c0's.
    step(method, "c1", -8.5, -8.5)
    assert homes(method) == {"c0": 0, "c1": 1, "c2": 1}
    # And c0's (1, 0) + 0.3 (−9 − 1, −9) = (−2, −2.7): the first cluster has no client.
    step(method, "c0", -8.5, -8.5)
    assert set(method.models) == {1}


@pytest.mark.parametrize(("echo", "broadcasts"), [(0.4, 1), (0.5, 0), (0.6, 0)])
def test_a_broadcast_moves_a_client_at_work(echo: float, broadcasts: int) -> None:
    method = half(echo=echo)
    # c1 begins at (0, 0). c0's update (1, 0) moves the model to (0.5, 0): half of its length.
    late = update(method, "c1", 0.0, 1.0, number=7)
    step(method, "c0", 1.0, 0.0)
    assert method.state.broadcasts == broadcasts
    outcome = method.applied([late])[0]
    method.close_task(late.task)
    # With the shift of (0.5, 0) it is (0.5, 1) and
    # fresh; without a broadcast (0, 1), a version late.
    assert outcome.staleness == 1 - broadcasts
    assert method.models[0].vector.tolist() == [0.25 + 0.25 * broadcasts, 0.5]


@pytest.mark.parametrize(("echo", "broadcasts"), [(0.9, 1), (0.95, 0)])
def test_a_broadcast_is_due_by_the_length_of_mean_updates(echo: float, broadcasts: int) -> None:
    method = half(echo=echo)
    update(method, "c1", 0.0, 1.0, number=7)
    step(method, "c0", 1.0, 0.0)
    # c0's updates (1, 0) and (0, 1) have the mean (0.7, 0.3), of length 0.76; the model has moved
    # by (0.5, 0.5), of length 0.71.
    step(method, "c0", 0.5, 1.0)
    assert method.state.broadcasts == broadcasts


def test_a_broadcast_adds_the_change_since_the_client_began() -> None:
    method = half(echo=0.8)
    step(method, "c0", 2.0, 0.0)
    # No client is at work: the last broadcast is that of the start.
    assert method.state.echoes[0].version == 0
    late = update(method, "c1", 1.0, 1.0, number=7)
    # c0's mean is (2, 0) + 0.3 (−1, 0) = (1.7, 0); the model has moved to (1.5, 0) since the start.
    step(method, "c0", 2.0, 0.0)
    assert (method.state.broadcasts, method.state.working) == (1, {"c1": 2})
    # c1 has begun at (1, 0): (1, 1) + (0.5, 0), half of which is mixed in, fresh.
    outcome = method.applied([late])[0]
    assert (outcome.staleness, outcome.weight) == (0, 0.5)
    assert method.models[0].vector.tolist() == [1.5, 0.5]
    # Since then it moves to (1.6, 0.5), by 0.51, less than 0.8 of the mean length of (1.25, 0) and
    # (0, 1).
    update(method, "c1", 1.5, 1.5)
    step(method, "c0", 1.7, 0.5)
    assert method.state.broadcasts == 1


def test_a_cluster_of_offline_clients_stays() -> None:
    method = half(echo=99.0)
    first, second = method.clusters.split(0, [["c0", "c1"], ["c2"]])
    step(method, "c2", 1.0, 0.0)
    method.on_leave("c1")
    step(method, "c0", 1.0, 0.0)
    assert homes(method) == {"c0": second, "c1": first, "c2": second}
    assert set(method.models) == {first, second}


def test_without_a_client_at_work_there_is_no_broadcast() -> None:
    method = half(echo=0.0)
    step(method, "c0", 1.0, 0.0)
    assert (method.state.broadcasts, method.state.echoes[0].version) == (0, 0)


def test_a_broadcast_is_to_the_clients_of_its_cluster() -> None:
    method = half(echo=0.0)
    _, second = method.clusters.split(0, [["c0", "c1"], ["c2"]])
    one, two = update(method, "c1", 0.0, 1.0), update(method, "c2", 0.0, 1.0)
    for count in (1, 2):
        step(method, "c0", count, 0.0)
        assert method.state.broadcasts == count
        assert method.state.working == {"c1": count, "c2": 0}
    assert method.state.echoes[second].version == 0
    # Their work ends without an update.
    method.close_task(one.task)
    assert method.state.working == {"c2": 0}
    method.close_task(two.task)
    assert method.state.working == {}


def test_groups_on_a_grid() -> None:
    method = EchoPFL()
    seen = run_on(method, three_groups())
    assert last_accuracy(seen) > last_accuracy(run_on(FedAsync(), three_groups()))
    assert sum(found(method)) == 12
    assert method.state.broadcasts > 0
    assert not np.isnan(last_accuracy(seen))


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(EchoPFL)
