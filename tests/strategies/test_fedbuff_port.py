"""PORT: weights, agreement and waiting by hand."""

import pytest
from clustered import at_version, check_it_can_be_restored, step, update, with_clients

from raceme.strategies import PORT, PORTParameters


def test_the_weight_by_hand() -> None:
    options = PORTParameters(bound=10, gamma=3, mu=1)
    assert options.weight(0, 1.0) == 4.0
    # 3 · 10 / 15 and half of 1 − 1/2.
    assert options.weight(5, -0.5) == pytest.approx(2.25)
    assert options.weight(10, -1.0) == pytest.approx(1.5)


def test_three_clients_by_hand() -> None:
    made = with_clients(PORT(PORTParameters(min_clients=2, bound=2, gamma=1, mu=1)), 3)
    one = update(made, "c2", 0, 6, examples=20)
    # Shares of the buffer so far, of weights 10 · (1 + 1) each.
    assert step(made, "c0", 2, 0).weight == 1.0
    assert made.models[0].version == 0
    assert step(made, "c1", 4, 0).weight == 0.5
    # Both fresh: the plain mean.
    assert made.models[0].vector.tolist() == [3, 0]
    at_version(made, 2)
    # Staleness 2, orthogonal to the last step: 20 · (1/2 + 1/2) = 20.
    made.applied([one])
    made.close_task(one.task)
    assert made.state.weight == pytest.approx(20)
    assert step(made, "c0", 3, 3).weight == pytest.approx(0.5)
    # And 10 · (1 + 1) of a fresh one: (20 · (0, 6) + 20 · (0, 3)) / 40.
    assert made.models[0].vector.tolist() == [3, 4.5]


@pytest.mark.parametrize(("staleness", "cos"), [(1, 1.0), (2, -1.0)])
def test_agreement_counts_from_staleness_two_on(staleness: int, cos: float) -> None:
    made = with_clients(PORT(PORTParameters(min_clients=1)), 2)
    step(made, "c0", 1, 0)
    against = update(made, "c1", -1, 0)
    at_version(made, 1 + staleness)
    assert made._agreement(made.received(against), staleness) == pytest.approx(cos)


def test_the_reference_may_be_where_the_client_started() -> None:
    made = with_clients(PORT(PORTParameters(min_clients=1, reference="start")), 2)
    stale = update(made, "c1", 0, 1)
    step(made, "c0", 1, 0)
    step(made, "c0", 1, 2)
    # From (0, 0) to (1, 2): the cosine with (0, 1) is 2 / √5.
    assert made._agreement(made.received(stale), 2) == pytest.approx(2 / 5**0.5)


def test_the_buffer_waits_for_a_client_above_the_bound_only() -> None:
    made = with_clients(PORT(PORTParameters(min_clients=1, bound=2)), 3)
    slow = update(made, "c2", 1, 1)
    for expected in (1, 2, 3, 3):
        step(made, "c0", *(made.models[0].vector + 1))
        assert made.models[0].version == expected
    # When the slow client reports, the step is taken with all collected updates.
    made.applied([slow])
    assert made.models[0].version == 4
    assert made.state.count == 0


def test_a_client_that_is_lost_is_waited_for_no_more() -> None:
    made = with_clients(PORT(PORTParameters(min_clients=1, bound=1)), 3)
    lost = update(made, "c2", 1, 1)
    for _ in range(3):
        step(made, "c0", *(made.models[0].vector + 1))
    assert made.models[0].version == 2
    made.close_task(lost.task)
    step(made, "c0", *(made.models[0].vector + 1))
    assert made.models[0].version == 3


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(PORT)
