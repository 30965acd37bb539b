"""CFL: the criterion on both sides of its bounds, bi-partition, rounds and updates by hand."""

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
from fleets import MODEL

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import cosines
from raceme.core.events import ClusterChange
from raceme.strategies import CFL, CFLAsync, CFLAsyncParameters, CFLParameters, FedAvg
from raceme.strategies.shared import Norms, linkage, norms_of, should_bipartition


def test_norms_by_hand() -> None:
    deltas = np.array([[3.0, 4.0], [0.0, -4.0]], np.float32)
    # Weighted by 1 and 3: (0.75, 1 − 3) = (0.75, −2), norm √(0.5625 + 4) = 2.136001; the norms
    # of the rows are 5 and 4.
    norms = norms_of(deltas, np.array([10, 30]))
    assert norms.mean == pytest.approx(2.136001, abs=1e-6)
    assert norms.largest == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("mean", "largest", "due"),
    [(0.39, 0.71, True), (0.4, 0.71, False), (0.39, 0.7, False), (0.5, 0.6, False)],
)
def test_the_criterion_on_both_sides_of_its_bounds(mean: float, largest: float, due: bool) -> None:
    assert should_bipartition(Norms(mean, largest), eps1=0.4, eps2=0.7) is due


def test_cosines_by_hand() -> None:
    rows = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    assert cosines(rows, rows[:2]).tolist() == [[1.0, 0.6], [0.6, 1.0], [0.0, 0.0]]


def test_complete_linkage_on_four_clients() -> None:
    # 0 and 1 are joined first (0.1), then 2 and 3 (0.2). Single linkage would add 2 to the first
    # pair (0.15); complete linkage uses 0.9, the larger of its two distances.
    distances = np.array(
        [[0.0, 0.1, 0.9, 0.8], [0.1, 0.0, 0.15, 0.7], [0.9, 0.15, 0.0, 0.2], [0.8, 0.7, 0.2, 0.0]]
    )
    assert linkage(distances, 2).tolist() == [0, 0, 1, 1]
    assert linkage(distances[::-1, ::-1], 2).tolist() == [0, 0, 1, 1]
    assert linkage(distances, 4).tolist() == [0, 1, 2, 3]


THREE_WAYS = np.array(
    [[0.0, 0.6, 0.4, 0.7], [0.6, 0.0, 0.3, 0.8], [0.4, 0.3, 0.0, 0.1], [0.7, 0.8, 0.1, 0.0]]
)
"""First 2 and 3 are joined (0.1). Then 0 and 1 are 0.6 apart; their distances to {2, 3} are 0.7 and
0.8 (maximum), 0.4 and 0.3 (minimum), 0.55 and 0.55 (mean)."""


def test_complete_and_single_linkage_differ() -> None:
    # Complete linkage joins 0 and 1, single linkage
    # joins 1 to 2 and 3, average linkage would join 0.
    assert linkage(THREE_WAYS, 2, "complete").tolist() == [0, 0, 1, 1]
    assert linkage(THREE_WAYS, 2).tolist() == [0, 0, 1, 1]
    assert linkage(THREE_WAYS, 2, "single").tolist() == [0, 1, 1, 1]


def test_single_linkage_makes_the_largest_similarity_across_the_parts_smallest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        deltas = rng.normal(size=(6, 3))
        similarity = cosines(deltas, deltas)

        def across(labels: np.ndarray, similarity: np.ndarray = similarity) -> float:
            return float(similarity[np.ix_(labels == 0, labels == 1)].max())

        divisions = [np.array([0, *map(int, f"{code:05b}")]) for code in range(1, 32)]
        best = min(across(labels) for labels in divisions)
        assert across(linkage(1.0 - similarity, 2, "single")) == pytest.approx(best)


def after_a_round(before: int = 0, **options: object) -> list[int | None]:
    """Let four clients move at 0, 50, 90 and 120 degrees; return their clusters."""
    parameters = CFLParameters(eps1=9.0, eps2=0.7, **options)  # type: ignore[arg-type]
    strategy = with_clients(CFL(parameters), 4)
    strategy.scheduling.state.number = before + 1
    angles = np.deg2rad([0.0, 50.0, 90.0, 120.0])
    round_of(strategy, *((float(np.cos(a)), float(np.sin(a))) for a in angles))
    return list(homes(strategy).values())


def test_the_options_of_dividing() -> None:
    # 90° and 120° are joined. 50° is 40° from the nearer and 70° from the farther of them, and 50°
    # from 0°.
    assert after_a_round() == [1, 1, 2, 2]
    assert after_a_round(linkage="single") == [1, 2, 2, 2]
    # The wait counts rounds, not updates, as few clients may take part in a round.
    assert after_a_round(before=4, wait_rounds=5) == [0] * 4
    assert after_a_round(before=5, wait_rounds=5) == [1, 1, 2, 2]
    assert after_a_round(least_members=5) == [0] * 4
    assert after_a_round(least_members=4) == [1, 1, 2, 2]
    # The halves are 40° apart: √((1 − cos 40°) / 2) = sin 20° = 0.342.
    assert after_a_round(gamma_max=0.34) == [1, 1, 2, 2]
    assert after_a_round(gamma_max=0.35) == [0] * 4


def test_a_round_without_and_one_with_a_split() -> None:
    strategy = with_clients(CFL(CFLParameters(eps1=0.4, eps2=0.7)), 4)
    # The mean (0.5, 0) has a norm above 0.4, so that the round is one of federated averaging.
    applied = round_of(strategy, (1, 0), (1, 0), (0, 1), (0, -1))
    assert [a.weight for a in applied] == [0.25] * 4
    assert strategy.models[0].vector.tolist() == [0.5, 0.0]
    # Deltas (0.5, 0.5) twice and (−0.5, −0.5) twice: mean 0, norms 0.707 > 0.7.
    applied = round_of(strategy, (1, 0.5), (0, -0.5), (1, 0.5), (0, -0.5))
    assert homes(strategy) == {"c0": 1, "c1": 2, "c2": 1, "c3": 2}
    assert [(a.cluster, a.weight) for a in applied] == [(1, 0.5), (2, 0.5), (1, 0.5), (2, 0.5)]
    assert strategy.models[1].vector.tolist() == [1.0, 0.5]
    assert strategy.models[2].vector.tolist() == [0.0, -0.5]
    assert [strategy.models[k].version for k in (1, 2)] == [2, 2]


def test_members_without_a_say_go_where_their_last_update_fits() -> None:
    strategy = with_clients(CFL(CFLParameters(eps1=0.4, eps2=0.7)), 6)
    round_of(strategy, (1, 0), (1, 0), (1, 0), (0, 1), (0, 1))
    strategy.on_leave("c3")
    strategy.on_leave("c5")
    # c0 and c1 move along the first axis, c2 against it, from (0.6, 0.4). c3's last update (0, 1)
    # is orthogonal to both: the first part wins the tie. Unknown c5 goes to the larger part.
    round_of(strategy, (1.4, 0.4), (1.4, 0.4), (-1.0, 0.4))
    assert homes(strategy) == {"c0": 1, "c1": 1, "c2": 2, "c3": 1, "c4": 1, "c5": 1}


def test_members_without_a_say_may_fit_the_smaller_part() -> None:
    strategy = with_clients(CFL(CFLParameters(eps1=0.4, eps2=0.7)), 6)
    # The mean (0.4, 0.2) has the norm 0.447, so the cluster is not stationary.
    round_of(strategy, (1, 0), (1, 0), (1, 0), (-1, 0), (0, 1))
    strategy.on_leave("c3")
    strategy.on_leave("c5")
    # Now c0 and c1 oppose c2; c3's last update was against the first axis like c2's. c4's was
    # orthogonal to all, and c5 has no update.
    seen: list[events.Event] = []
    strategy.clusters.report_to(seen.append)
    round_of(strategy, (1.2, 0.2), (1.2, 0.2), (-1.2, 0.2))
    expected = {"c0": 1, "c1": 1, "c2": 2, "c3": 2, "c4": 1, "c5": 1}
    assert homes(strategy) == expected
    # The report also lists clients that are offline.
    (split,) = placed(seen, ClusterChange.SPLIT)
    assert split.memberships == {client: {k: 1.0} for client, k in expected.items()}


def test_after_a_split_the_updates_to_the_old_cluster_are_forgotten() -> None:
    parameters = CFLAsyncParameters(alpha=0.5, decay="constant", eps1=0.4, eps2=1.0)
    strategy = with_clients(CFLAsync(parameters), 4)
    for client, x in (("c0", 2.0), ("c1", 2.0), ("c2", 2.0)):
        step(strategy, client, *(strategy.models[0].vector + np.array([x, 0])))
    # Deltas (2, 0) three times and (−6, 0): their mean is 0.
    step(strategy, "c3", *(strategy.models[0].vector + np.array([-6, 0])))
    assert [homes(strategy)[f"c{i}"] for i in range(4)] == [1, 1, 1, 2]
    # Without the reset, c0's Δ = (−4, 0) and the (2, 0) that c1 and c2 sent to the old cluster
    # would have mean 0, and split the new cluster.
    step(strategy, "c0", *(strategy.models[1].vector + np.array([-4, 0])))
    assert set(strategy.models) == {1, 2}
    assert list(strategy.state.deltas) == ["c0"]


def test_without_rounds_the_first_division_waits_for_updates_per_client() -> None:
    strategy = with_clients(CFLAsync(CFLAsyncParameters(decay="constant", wait_rounds=2)), 2)
    for updates, x in ((2, 2.0), (3, -2.0)):
        strategy.progress.updates = updates
        step(strategy, f"c{updates - 2}", *(strategy.models[0].vector + np.array([x, 0])))
    assert list(homes(strategy).values()) == [0, 0]
    strategy.progress.updates = 4
    step(strategy, "c0", *(strategy.models[0].vector + np.array([2.0, 0])))
    assert list(homes(strategy).values()) == [1, 2]


def test_a_newcomer_joins_the_cluster_whose_updates_are_like_its_own() -> None:
    strategy = with_clients(CFL(), 4)
    round_of(strategy, (1, 0), (-1, 0), (1, 0), (-1, 0))
    assert set(strategy.models) == {1, 2}
    round_of(strategy, (1, 0.5), (-1, 0.5), (1, 0.5), (-1, -0.5))
    strategy.on_join(Client("c4", num_examples=10))
    assert strategy.clusters.main("c4") == 1
    # c4's model minus the first cluster's (1, 0.5): (−2, −1).
    round_of(strategy, (1, 0.6), (-1.5, 0), (1, 0.6), (-1.5, 0), (-1, -0.5))
    assert strategy.clusters.main("c4") == strategy.clusters.main("c1")


def test_without_splits_it_is_federated_averaging() -> None:
    mean, cfl = FedAvg(), CFL(CFLParameters(eps1=1e-9))
    run_on(mean, three_groups(), 60)
    run_on(cfl, three_groups(), 60)
    assert cfl.models[0].vector == pytest.approx(mean.models[0].vector, abs=1e-6)


def test_a_share_of_the_clients_takes_part_in_a_round() -> None:
    seen = run_on(CFL(CFLParameters(fraction=0.25)), three_groups(), 9)
    clients = [event.client for event in seen if isinstance(event, events.UpdateApplied)]
    assert [len(set(clients[start : start + 3])) for start in (0, 3, 6)] == [3, 3, 3]
    assert len(set(clients)) > 3


def test_async_by_hand() -> None:
    parameters = CFLAsyncParameters(alpha=0.5, decay="constant", eps1=0.4, eps2=1.0)
    strategy = with_clients(CFLAsync(parameters), 2)
    first = step(strategy, "c0", 2.0, 0.0)
    assert (first.cluster, first.staleness, first.weight) == (0, 0, 0.5)
    assert strategy.models[0].vector.tolist() == [1.0, 0.0]
    # c1 returns (−1.1, 0): Δ = (−2.1, 0) from (1, 0), the mean of both (−0.05, 0), below 0.4.
    # With c0's Δ = (2, 0) both norms are above 1: each has a cluster of its own, a copy of (1, 0).
    second = step(strategy, "c1", -1.1, 0.0)
    assert second.cluster == strategy.clusters.main("c1") != strategy.clusters.main("c0")
    assert strategy.models[strategy.clusters.main("c0")].vector.tolist() == [1.0, 0.0]
    assert strategy.models[second.cluster].vector.tolist() == pytest.approx([-0.05, 0.0])
    assert strategy.bases.vectors == {}


def test_async_waits_until_every_member_has_sent_an_update() -> None:
    parameters = CFLAsyncParameters(alpha=0.5, decay="constant")
    strategy = with_clients(CFLAsync(parameters), 3)
    step(strategy, "c0", 2.0, 0.0)
    step(strategy, "c1", -1.1, 0.0)
    assert set(strategy.models) == {0}
    strategy.on_leave("c2")
    step(strategy, "c1", -2.05, 0.0)
    assert len(strategy.models) == 2


@pytest.mark.parametrize(
    "strategy",
    [
        CFL(CFLParameters(eps1=0.3, eps2=0.5)),
        CFLAsync(CFLAsyncParameters(eps1=0.2, eps2=0.5, decay="constant")),
    ],
    ids=["rounds", "async"],
)
def test_the_groups_are_found_and_reported(strategy: CFL | CFLAsync) -> None:
    seen = run_on(strategy, three_groups())
    assert found(strategy) == [4, 4, 4]
    splits = placed(seen, ClusterChange.SPLIT)
    assert len(splits) == 2
    assert all(event.score > event.threshold == 0.5 for event in splits)
    assert last_accuracy(seen) > 0.9
    updates = [event for event in seen if isinstance(event, events.UpdateApplied)]
    size = MODEL.count_bytes()
    assert {(u.bytes_down, u.bytes_up) for u in updates} == {(size, size)}


@pytest.mark.parametrize("method", [CFL, CFLAsync])
def test_it_can_be_restored(method: type[CFL | CFLAsync]) -> None:
    check_it_can_be_restored(method)


def test_the_log_of_a_short_run_shows_the_norms(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="raceme"):
        round_of(with_clients(CFL(), 2), (3, 4), (0, -4))
    assert "cluster 0 after 0 updates: mean norm 1.5000, largest norm 5.0000" in caplog.text
