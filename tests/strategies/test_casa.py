"""CASA step by step: short sequences of updates traced by hand, splits, newcomers."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from clustered import at_version, found, homes, placed, run_on
from fleets import MODEL, grid_of, pulled_app

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.events import ClusterChange, Measured
from raceme.core.requests import InFlight, Update
from raceme.simulation import Device
from raceme.strategies import CASA, CASAParameters, Plan
from raceme.strategies.casa.buffers import comparable
from raceme.strategies.casa.strategy import GAP, SPLITS, CASAState


def casa_with(clients: int, size: int = 2, **parameters: float | str | bool) -> CASA:
    """CASA with a model of zeros (two by default), and clients that have all been sent it."""
    strategy = CASA(CASAParameters(**parameters))  # type: ignore[arg-type]
    strategy.initialize(np.zeros(size, np.float32))
    for index in range(clients):
        strategy.on_join(Client(f"c{index}", num_examples=10 * (index + 1)))
        strategy.on_sent(task(f"c{index}"))
    return strategy


def task(client: str, version: int = 0, cluster: int = 0, updates: int = 0) -> InFlight:
    return InFlight(0, client, cluster, version, updates, sent_at=0.0, bytes_down=0)


def update(client: str, values: Sequence[float], version: int = 0, examples: int = 10) -> Update:
    return Update(task(client, version), np.array(values, np.float32), examples, 0.0)


def test_changes_are_compared_by_hand() -> None:
    bases = {"0/0": np.array([1, 1], np.float32), "0/1": np.array([5, 1], np.float32)}
    first, second = update("c0", (2.0, 1.0)), update("c1", (8.0, 5.0), version=1)
    found: dict[str, float] = {}
    for compare in ("weights", "changes"):
        strategy = casa_with(2, compare=compare)
        strategy.bases.vectors.update(bases)
        assert strategy.needs.bases == (compare == "changes")
        for each in (first, second):
            strategy.applied([each])
        found[compare] = strategy.state.similarity[0, 1]
    # Changes (1, 0) and (3, 4): 3/5. Weights: (2 · 8 + 1 · 5) / sqrt(5 · 89).
    assert found["changes"] == pytest.approx(0.6)
    assert found["weights"] == pytest.approx(21 / math.sqrt(445))
    assert CASAParameters().compare == "weights"


def test_three_updates_by_hand() -> None:
    strategy = casa_with(3)
    # |C| = 3: α_c = 2 Ω(t) / log2(6) = 0.773706 Ω(t), and r_c = 3 (2 − Ω(t)) > 3.
    # Ω(t) = 0.970815^(t / 1000): Ω(1) = 0.99997038, Ω(2) = 0.99994076, Ω(3) = 0.99991114.
    first = strategy.applied([update("c0", (1.0, 0.0))])[0]
    assert first.staleness == 0
    assert first.weight == pytest.approx(0.773683, abs=1e-6)
    model = strategy.models[0]
    assert model.version == 1
    assert model.vector.tolist() == pytest.approx([0.773683, 0.0], abs=1e-6)
    # c0's model is now in the buffers of c1 and c2. c1 returns (3, 4): cos = 3/5.
    second = strategy.applied([update("c1", (3.0, 4.0))])[0]
    assert second.staleness == 1
    assert second.weight == pytest.approx(0.773660, abs=1e-6)
    # 0.77366 · (3, 4) + 0.22634 · (0.773683, 0) = (2.496096, 3.094640).
    assert model.vector.tolist() == pytest.approx([2.496096, 3.094640], abs=1e-5)
    # Compared buffers are cleared: buf_1 held the model of c0.
    assert strategy.state.buffers.owners(1).tolist() == []
    names, similarity = strategy.similarity()
    assert names == ["c0", "c1", "c2"]
    assert similarity[0, 1] == similarity[1, 0] == pytest.approx(0.6)
    assert np.isnan(similarity[0, 2])
    # c2 has the models of both; (0, 2) has cosines 0 and 4/5 with them.
    strategy.applied([update("c2", (0.0, 2.0))])
    _, similarity = strategy.similarity()
    assert similarity[2].tolist() == pytest.approx([0.0, 0.8, 1.0])


def test_staleness_beyond_the_bound_is_damped() -> None:
    strategy = casa_with(1, gamma=1.0)
    # |C| = 1: α_c = 2 Ω / log2(4) = Ω(t), r_c = 2 − Ω(t) = 1.0000…; version 16 makes τ = 16.
    at_version(strategy, 16)
    applied = strategy.applied([update("c0", (1.0, 1.0), version=0)])[0]
    assert applied.staleness == 16
    assert applied.weight == pytest.approx(0.99997038 / 4, abs=1e-7)


def test_global_staleness_counts_all_updates() -> None:
    strategy = casa_with(2, staleness_unit="global")
    strategy.progress.updates = 7
    assert strategy.applied([update("c0", (1.0, 0.0))])[0].staleness == 7


def test_constant_decay_is_the_ablation_casa_d() -> None:
    strategy = casa_with(2, bi_level=False, constant_alpha=0.3)
    at_version(strategy, 1000)
    assert strategy.applied([update("c0", (1.0, 0.0))])[0].weight == 0.3


def test_recurring_models_are_not_buffered_twice() -> None:
    strategy = casa_with(3)
    strategy.applied([update("c0", (1.0, 0.0))])
    strategy.applied([update("c0", (0.0, 1.0), version=1)])
    # c1's buffer still holds c0's first model: cos((1, 0), (1, 0)) = 1.
    strategy.applied([update("c1", (1.0, 0.0))])
    assert strategy.similarity()[1][0, 1] == pytest.approx(1.0)


def test_models_from_too_far_apart_are_not_compared() -> None:
    strategy = casa_with(2, gap_range=5.0)
    at_version(strategy, 5)
    strategy.on_sent(task("c1", version=5))
    strategy.applied([update("c0", (1.0, 0.0), version=0)])
    strategy.applied([update("c1", (1.0, 0.0), version=5)])
    # |0 − 5| ≥ 5: redundant, in both directions.
    assert np.isnan(strategy.similarity()[1][0, 1])
    strategy.on_sent(task("c1", version=4))
    strategy.applied([update("c0", (1.0, 0.0), version=0)])
    strategy.applied([update("c1", (1.0, 0.0), version=4)])
    assert strategy.similarity()[1][0, 1] == pytest.approx(1.0)


def test_with_global_staleness_starts_are_distinguished_by_all_updates() -> None:
    def compared(first: InFlight, second: InFlight) -> bool:
        strategy = casa_with(2, gap_range=5.0, staleness_unit="global")
        at_version(strategy, 40)
        strategy.progress.updates = 45
        for one in (first, second):
            strategy.on_sent(one)
        for one in (first, second):
            strategy.applied([Update(one, np.ones(2, np.float32), 10, 0.0)])
        return not np.isnan(strategy.similarity()[1][0, 1])

    # Distant versions at the same time, as in a new cluster; then the same version at times that
    # are five updates apart.
    assert compared(task("c0", version=0, updates=40), task("c1", version=40, updates=44))
    assert not compared(task("c0", version=7, updates=40), task("c1", version=7, updates=45))


def feed_two_groups(strategy: CASA) -> None:
    """Let six clients in two groups (0, 1, 2 and 3, 4, 5) update until every pair is compared."""
    for _ in range(2):
        for client in range(6):
            angle = 0.1 * (client % 3) + (0.0 if client < 3 else 1.2)
            strategy.applied([update(f"c{client}", (np.cos(angle), np.sin(angle)))])


def test_the_weight_of_an_update_is_that_of_its_own_cluster() -> None:
    strategy = casa_with(6, gap_range=1000.0)
    for _ in range(2):
        for client in range(6):
            angle = 0.1 * client if client < 4 else 1.2 + 0.1 * client
            strategy.applied([update(f"c{client}", (np.cos(angle), np.sin(angle)))])
    own = homes(strategy)
    assert sorted(Counter(own.values()).values()) == [2, 4]
    # The 13th and 14th update: Ω(13) = 0.99961504, Ω(14) = 0.99958543. α_c = 2 Ω / log2(|C| + 3):
    # log2(5) = 2.321928 of the cluster of two, log2(7) = 2.807355 of that of four.
    for client, weight in (("c5", 2 * 0.99961504 / 2.321928), ("c0", 2 * 0.99958543 / 2.807355)):
        k = own[client]
        late = Update(task(client, strategy.models[k].version, k), np.ones(2, np.float32), 10, 0.0)
        assert strategy.applied([late])[0].weight == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize(
    ("missing_pairs", "parts"),
    [
        ("wait", [["c0", "c1", "c2"]]),
        # c0 and c1 alone have no eigengap, which requires three clients.
        ("leave-out", [["c0", "c1", "c2"]]),
        # A = ((1, 1, 0), (1, 1, 0), (0, 0, 1)): the eigenvalues of L are 0, 0, 1, so that R = 2,
        # and the gap of 1 is above α_c = 2 / log2(6) = 0.77.
        ("zero", [["c0", "c1"], ["c2"]]),
    ],
)
def test_a_pair_that_is_not_compared_yet_is_waited_for_or_zero(
    missing_pairs: str, parts: list[list[str]]
) -> None:
    strategy = casa_with(3, missing_pairs=missing_pairs)
    strategy.applied([update("c0", (1.0, 0.0))])
    strategy.applied([update("c1", (1.0, 0.0))])
    clusters = homes(strategy)
    grouped = {k: [c for c, home in clusters.items() if home == k] for k in clusters.values()}
    assert sorted(grouped.values()) == parts


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        ({"missing_pairs": "wait"}, 1),
        # Twelve updates of seven clients: 1.71 per client.
        ({"missing_pairs": "leave-out", "patience": 1.8}, 1),
        ({"missing_pairs": "leave-out", "patience": 1.7}, 2),
    ],
)
def test_clients_that_are_not_compared_yet_need_not_hold_up_a_split(
    parameters: dict[str, float | str], count: int
) -> None:
    """Six clients in two groups are compared; a slow one has sent nothing yet."""
    strategy = casa_with(7, gap_range=1000.0, **parameters)
    seen: list[events.Event] = []
    strategy.clusters.report_to(seen.append)
    feed_two_groups(strategy)
    assert len(strategy.models) == count
    # Gap and threshold are those of the six: α_c = 2 Ω(12) / log2(6 + 3).
    bounds = [split.threshold for split in placed(seen, ClusterChange.SPLIT)]
    assert bounds == pytest.approx([2 * (math.e / 2.8) ** 0.012 / math.log2(9)] * (count - 1))
    # The slow client joins the first of two equally large parts.
    own = homes(strategy)
    assert own["c6"] == own["c0"]


def test_clients_with_most_unknown_pairs_are_left_out_first() -> None:
    computed = np.eye(6, dtype=bool)
    for a, b in [(1, 2), (1, 3), (2, 3), (3, 5)]:
        computed[a, b] = computed[b, a] = True
    # Client 5 lacks two pairs, clients 1 and 2 lack one each: without 5 all pairs are known.
    assert comparable(np.array([1, 2, 3, 5]), computed).tolist() == [1, 2, 3]


def test_a_client_is_left_out_once() -> None:
    computed = np.ones((5, 5), dtype=bool)
    for a, b in [(0, 1), (0, 2), (3, 4)]:
        computed[a, b] = computed[b, a] = False
    # Client 0 lacks two pairs. Without it only (3, 4) is unknown, and the first of the two leaves.
    assert comparable(np.arange(5), computed).tolist() == [1, 2, 4]


def test_a_cluster_splits_into_its_groups_and_children_inherit() -> None:
    strategy = casa_with(6, gap_range=1000.0)
    seen: list[events.Event] = []
    strategy.clusters.report_to(seen.append)
    feed_two_groups(strategy)
    (split,) = placed(seen, ClusterChange.SPLIT)
    assert split.memberships == {
        **{client: {1: 1.0} for client in ("c0", "c1", "c2")},
        **{client: {2: 1.0} for client in ("c3", "c4", "c5")},
    }
    assert split.score > split.threshold
    assert (split.gone, split.made) == ((0,), (1, 2))
    assert set(strategy.models) == {1, 2}
    # The split comes with the sixth update, after five aggregations into the parent; its own goes
    # into its new cluster, and the second pass brings three more to each.
    assert strategy.models[strategy.clusters.main("c0")].version == 5 + 3
    assert strategy.models[strategy.clusters.main("c5")].version == 5 + 1 + 3


def test_no_split_before_every_pair_is_known_nor_without_clustering() -> None:
    strategy = casa_with(6, gap_range=1000.0)
    for client in range(5):
        strategy.applied([update(f"c{client}", (1.0, float(client)))])
    assert len(strategy.models) == 1
    ablation = casa_with(6, gap_range=1000.0, clustering=False)
    feed_two_groups(ablation)
    assert len(ablation.models) == 1


def feed_one_group(strategy: CASA, rounds: int) -> None:
    """Let ten clients update with models that differ only by noise."""
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for client in range(10):
            strategy.applied([update(f"c{client}", (1.0, *rng.normal(0, 0.01, 50)))])


def test_a_guard_against_noise_keeps_one_group_together_and_divides_two() -> None:
    # With so small an α, any gap is large enough.
    unguarded = casa_with(10, size=51, gap_range=1000.0, alpha0=0.01)
    feed_one_group(unguarded, rounds=4)
    assert len(unguarded.models) > 1
    guarded = casa_with(10, size=51, gap_range=1000.0, alpha0=0.01, noise_guard=2.0)
    feed_one_group(guarded, rounds=20)
    assert len(guarded.models) == 1
    two = casa_with(6, gap_range=1000.0, noise_guard=2.0)
    feed_two_groups(two)
    assert len(two.models) == 2


def test_a_client_that_left_does_not_hold_up_a_split_and_keeps_its_company() -> None:
    strategy = casa_with(8, gap_range=1000.0)
    strategy.applied([update("c6", (np.cos(1.25), np.sin(1.25)))])
    strategy.on_leave("c6")
    strategy.on_leave("c7")
    seen: list[events.Event] = []
    strategy.clusters.report_to(seen.append)
    feed_two_groups(strategy)
    # c6's model was compared with the first group's and is nearest to c3, c4, c5, though the other
    # part is as large and comes first. c7 has not been compared. The report lists both.
    expected = {**dict.fromkeys(("c0", "c1", "c2", "c7"), 1), **dict.fromkeys(("c3", "c4"), 2)}
    expected |= {"c5": 2, "c6": 2}
    assert homes(strategy) == expected
    (split,) = placed(seen, ClusterChange.SPLIT)
    assert split.memberships == {client: {k: 1.0} for client, k in expected.items()}


def test_clients_that_are_away_are_not_given_models_to_compare_with() -> None:
    strategy = casa_with(3)
    strategy.on_leave("c1")
    strategy.applied([update("c0", (1.0, 0.0))])
    assert [strategy.state.buffers.owners(i).tolist() for i in range(3)] == [[], [], [0]]


def test_an_only_member_that_is_taken_for_gone_counts_as_one() -> None:
    strategy = casa_with(1)
    strategy.on_leave("c0")
    # |C| = 1: α_c = 2 Ω(1) / log2(4) = 0.99997. With |C| = 0 it would be 2 / log2(3) = 1.26.
    assert strategy.applied([update("c0", (1.0, 0.0))])[0].weight == pytest.approx(0.99997038)


def test_alpha_is_a_share_whatever_alpha0_is() -> None:
    assert casa_with(1, alpha0=5.0).applied([update("c0", (1.0, 0.0))])[0].weight == 1.0


def test_a_cluster_without_landmarks_counts_its_online_clients() -> None:
    strategy = casa_with(4, exact_up_to=1, clustering=False)
    (landmark,) = strategy.state.clients
    one, two, three = strategy.state.landmarks.others
    strategy.clusters.split(0, [[landmark], [one], [two, three]])
    strategy.restored()
    # Ω(1) = 0.99997038: α_c = 2 Ω / log2(1 + 3) = Ω, then 2 Ω(2) / log2(2 + 3) = 0.86130.
    late = Update(task(one, cluster=2, version=0), np.ones(2, np.float32), 10, 0.0)
    assert strategy.applied([late])[0].weight == pytest.approx(0.99997038)
    late = Update(task(two, cluster=3, version=0), np.ones(2, np.float32), 10, 0.0)
    assert strategy.applied([late])[0].weight == pytest.approx(2 * 0.99994076 / math.log2(5))
    # |C| = 0 counts as 1.
    strategy.on_leave(one)
    late = Update(task(one, cluster=2, version=1), np.ones(2, np.float32), 10, 0.0)
    assert strategy.applied([late])[0].weight == pytest.approx(0.99991114)


def test_a_client_that_replaces_a_landmark_is_compared_with_no_other() -> None:
    state = CASAState(np.zeros(2, np.float32))
    for client in ("c0", "c1"):
        state.add(client)
    state.start[:2] = 7
    state.similarity[:2, :2] = [[1, 0.6], [0.6, 1]]
    state.computed[:2, :2] = True
    state.replace(0, "new")
    assert (state.clients, list(state.landmarks.others)) == (["new", "c1"], ["c0"])
    assert state.similarity[:2, :2].tolist() == [[1, 0], [0, 1]]
    assert state.computed[:2, :2].tolist() == [[True, False], [False, True]]
    assert state.start[:2].tolist() == [0, 7]


def test_the_updates_of_clients_that_are_taken_for_gone_do_not_divide_one_group() -> None:
    strategy, rng = casa_with(5, size=21, gap_range=1000.0), np.random.default_rng(0)

    def send(client: int) -> None:
        strategy.applied([update(f"c{client}", (1.0, *rng.normal(0, 0.01, 20)))])

    for client in range(4):
        send(client)
    strategy.on_leave("c4")
    # c4's buffer has the models of all four, but no
    # buffer has c4's, so these pairs are not missing.
    for client in (4, 0, 4, 1, 2, 3):
        send(client)
        watch = strategy._watch(0)
        assert watch.members.tolist() == [0, 1, 2, 3]
        known = strategy.state.computed[:4, :4]
        assert watch.missing == (16 - np.count_nonzero(known)) // 2
    assert set(strategy.models) == {0}
    _, similarity = strategy.similarity()
    assert not np.isnan(similarity).any()
    assert strategy.clusters.clients(0) == ["c0", "c1", "c2", "c3"]


def test_what_is_known_of_a_client_that_is_away_does_not_stand_for_what_is_missing() -> None:
    strategy = casa_with(4, gap_range=1000.0)
    for client in ("c0", "c1"):
        strategy.applied([update(client, (1.0, 0.0))])
    strategy.on_leave("c3")
    strategy.applied([update("c1", (1.0, 0.0))])
    # (0, 2) and (1, 2) are missing. c3 adds pairs with c0 and c1 only: c2 stays unknown, and its
    # similarities of 0 would split the cluster.
    strategy.applied([update("c3", (1.0, 0.0))])
    assert set(strategy.models) == {0}


def test_a_newcomer_joins_the_cluster_whose_buffered_models_it_resembles() -> None:
    strategy = casa_with(6, gap_range=1000.0)
    feed_two_groups(strategy)
    strategy.on_join(Client("new", num_examples=10))
    cluster = strategy.clusters.main("new")
    assert cluster in strategy.models
    strategy.on_sent(task("new", cluster=cluster))
    strategy.applied([update("c0", (1.0, 0.0))])
    strategy.applied([update("c4", (np.cos(1.3), np.sin(1.3)))])
    strategy.applied([update("new", (np.cos(1.2), np.sin(1.2)))])
    assert strategy.clusters.main("new") == strategy.clusters.main("c4")


def explained(alpha0: float) -> list[Measured]:
    """Let three clients update at 0, 60 and 120 degrees; return what CASA measures."""
    strategy = casa_with(3, alpha0=alpha0, gamma=0.5, kappa=0.0)
    seen: list[Measured] = []
    strategy.report = seen.append  # type: ignore[assignment]
    for _ in range(2):
        for client, degrees in (("c0", 0), ("c1", 60), ("c2", 120)):
            angle = np.deg2rad(degrees)
            strategy.applied([update(client, (np.cos(angle), np.sin(angle)))])
    return seen


def test_one_cluster_explains_itself() -> None:
    seen = explained(alpha0=2.0)
    # Cosines 0.5, 0.5 and −0.5, which counts as 0: D = (1.5, 2, 1.5), L has the eigenvalues 0, 1/3
    # and 5/6. |C| = 3: α_c = 2 / log2(6), and with γ = 0.5 a split needs α_c² = 0.5986.
    gap, splits = [[event for event in seen if event.schema is one] for one in (GAP, SPLITS)]
    assert gap[0].values["gap"] == pytest.approx(0.5)
    assert gap[0].values["needed"] == pytest.approx(4 / math.log2(6) ** 2)
    assert splits[-1].value == (
        "one cluster: the largest gap was 0.5, a split needs 0.6 (gamma, clients)"
    )


def test_a_client_that_was_split_off_alone_is_named() -> None:
    # α_c² = 0.15 is below the gap of 0.5.
    last = [event for event in explained(alpha0=1.0) if event.schema is SPLITS][-1]
    assert last.value == "2 clusters; clients split off alone: 1 (noise-guard)"


def two_clusters(**parameters: float | str) -> CASA:
    """c0 and c1 in cluster 1, c2 in cluster 2; no pair is compared, and no split is possible."""
    strategy = casa_with(3, clustering=False, **parameters)
    strategy.clusters.split(0, [["c0", "c1"], ["c2"]])
    strategy.restored()
    return strategy


def test_a_representative_counts_clients_by_their_data() -> None:
    strategy = two_clusters(gap_range=1000.0)
    for name in ("c0", "c1", "new"):
        strategy.on_join(Client(name, num_examples=10))
    strategy.on_sent(task("new", cluster=1))
    angles = {"c0": 0.0, "c1": np.pi / 2, "c2": 1.2, "new": 0.9}
    for client, angle in angles.items():
        # c0 has more data than at the start.
        examples = 1000 if client == "c0" else 10
        strategy.applied([update(client, (np.cos(angle), np.sin(angle)), examples=examples)])
    # Eq (15): rep_1 is (1000 (1, 0) + 10 (0, 1)) / 1010, at 0.01; rep_2 is at 1.2, 0.3 away. The
    # plain mean of c0 and c1 would be at 0.785, 0.115 away.
    assert strategy.clusters.main("new") == 2


def test_a_newcomers_first_update_counts_as_if_it_had_started_from_its_cluster() -> None:
    strategy = two_clusters()
    at_version(strategy, 100, cluster=1)
    at_version(strategy, 3, cluster=2)
    strategy.on_sent(task("c2", version=3, cluster=2))
    strategy.on_join(Client("new", num_examples=10))
    # The newcomer was sent the larger cluster's model,
    # whose version is meaningless in the other one.
    strategy.on_sent(task("new", version=100, cluster=1))
    strategy.applied([update("c2", (0.0, 1.0), version=3)])
    strategy.on_sent(task("c2", version=4, cluster=2))
    strategy.progress.updates = 12
    late = Update(task("new", 100, 1, updates=9), np.array([0.1, 1.0], np.float32), 10, 0.0)
    # 12 − 9 updates of the whole run, since the version of its present cluster does not apply.
    assert strategy.applied([late])[0].staleness == 3
    assert strategy.clusters.main("new") == 2
    owners = strategy.state.buffers.owners(2).tolist()
    assert [strategy.state.clients[owner] for owner in owners] == ["new"]


def test_without_buffered_models_a_newcomer_is_compared_with_the_clusters_models() -> None:
    strategy = casa_with(6, gap_range=1000.0)
    feed_two_groups(strategy)
    strategy.on_join(Client("new", num_examples=10))
    strategy.on_sent(task("new"))
    # rep_k is w_{g,k}: the model of c0's cluster lies nearer to the first axis.
    strategy.applied([update("new", (1.0, 0.0))])
    assert strategy.clusters.main("new") == strategy.clusters.main("c0")


def test_a_returning_client_is_back_in_its_cluster() -> None:
    strategy = casa_with(6, gap_range=1000.0)
    feed_two_groups(strategy)
    before = strategy.clusters.main("c4")
    strategy.on_leave("c4")
    strategy.on_join(Client("c4", num_examples=10))
    assert strategy.clusters.main("c4") == before


@pytest.mark.parametrize("unit", ["cluster", "global"])
def test_the_budget_goes_to_the_clients_that_have_been_busy_longest(unit: str) -> None:
    strategy = casa_with(3, budget=1, gap_range=1000.0, staleness_unit=unit)
    at_version(strategy, 10)
    strategy.progress.updates = 10
    for client, start in (("c0", 10), ("c1", 6), ("c2", 7)):
        strategy.on_sent(task(client, version=start, updates=start))
    sent = task("c0", version=10, updates=10)
    strategy.applied([Update(sent, np.ones(2, np.float32), 10, 0.0)])
    # r_c = 3 (2 − Ω(1)) = 3.00009. c1: τ = 4, α_c / 2; c2: τ = 3, α_c. With equal α, chance would
    # decide.
    holding = [strategy.state.buffers.owners(j).tolist() for j in range(3)]
    assert holding == [[], [0], []]
    # An offline client compares nothing, so that c2 has the next item.
    strategy.on_leave("c1")
    strategy.applied([Update(sent, np.ones(2, np.float32), 10, 0.0)])
    holding = [strategy.state.buffers.owners(j).tolist() for j in range(3)]
    assert holding == [[], [], [0]]


def test_with_a_small_budget_no_buffer_starves() -> None:
    # 20 items for 20 buffers. If the items with the largest α, and at ties the last clients', were
    # always dropped, some pairs would never be compared, and no cluster would be split.
    rng = np.random.default_rng(0)
    targets = [0.5 + np.eye(4, 8)[i % 4] + 0.05 * rng.normal(size=8) for i in range(20)]
    devices = [Device(seconds_per_round=1.0 if i % 3 else 5.0, jitter=0.2) for i in range(20)]
    strategy = CASA(CASAParameters(budget=20))
    grid = grid_of(pulled_app(targets), devices, groups=[i % 4 for i in range(20)])
    seen = run_on(strategy, grid, 700)
    assert [change.made for change in placed(seen, ClusterChange.SPLIT)] == [(1, 2, 3, 4)]
    assert found(strategy) == [5, 5, 5, 5]


def test_on_a_grid_the_groups_are_found_and_reported() -> None:
    rng = np.random.default_rng(0)
    centres = 0.5 + 3.0 * np.eye(3, 8)
    groups = [index % 3 for index in range(12)]
    targets = [centres[group] + 0.01 * rng.normal(size=8) for group in groups]
    devices = [Device(seconds_per_round=5.0 if index % 4 == 0 else 1.0) for index in range(12)]
    strategy, seen = CASA(), []
    result = strategy.run(
        grid_of(pulled_app(targets), devices, groups),
        MODEL,
        max_updates=400,
        plan=Plan(eval_every=50),
        observe=seen.append,
    )
    clients = strategy.progress.fleet.clients.values()
    found = Counter((strategy.clusters.main(c.client_id), c.group) for c in clients)
    assert sorted(found.values()) == [4, 4, 4]
    assert len(strategy.models) == 3
    last = [event for event in seen if isinstance(event, events.Evaluated)][-1]
    assert last.accuracy > 0.9
    assert set(result.evaluate_metrics_clientapp) == set(range(0, 401, 50))
    assert list(result.arrays) == ["w", "b"]
    assert result.arrays is result.clusters[strategy.clusters.largest()]
    assert set(result.clusters) == set(strategy.models)
    assert result.client_clusters == {c: {k: 1.0} for c, k in homes(strategy).items()}


@pytest.mark.parametrize(
    ("start", "guard", "warned"), [(0.0, 0.0, True), (1.0, 0.0, False), (0.0, 2.0, False)]
)
def test_a_model_that_starts_at_zero_is_warned_of(
    caplog: pytest.LogCaptureFixture, start: float, guard: float, warned: bool
) -> None:
    # Whole models are compared, whose directions are random without a common start.
    casa = CASA(CASAParameters(noise_guard=guard))
    casa.initialize(np.full(2, start, np.float32))
    assert ("initial model is zero" in caplog.text) is warned
