"""Clusters: every change and its report, invalid placements, ids, merged models."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.clusters import Clusters, Model, blended
from raceme.core.events import ClusterChange, ClustersChanged


def model(*values: float, version: int = 0) -> Model:
    return Model(np.array(values, np.float32), version)


def with_clients(models: int, **placements: int | Mapping[int, float]) -> Clusters:
    """Clusters 0, 1, … with the models (0), (1), …, and these clients."""
    clusters = Clusters({cluster: model(cluster) for cluster in range(models)})
    for client, placement in placements.items():
        clusters.join(client)
        clusters.assign(client, placement)
    return clusters


def reports_of(clusters: Clusters) -> list[ClustersChanged]:
    seen: list[ClustersChanged] = []
    clusters.report_to(seen.append)
    return seen


def report(
    change: ClusterChange,
    memberships: Mapping[str, Mapping[int, float]],
    gone: tuple[int, ...] = (),
    made: tuple[int, ...] = (),
    score: float = math.nan,
    threshold: float = math.nan,
) -> ClustersChanged:
    return ClustersChanged(0.0, 0, change, memberships, gone, made, score, threshold)


# Changes of clusters.


def test_a_new_client_joins_the_only_cluster_and_none_of_several() -> None:
    one, two = with_clients(1), with_clients(2)
    seen = reports_of(one)
    one.join("a")
    two.join("a")
    assert (one.members, two.members) == ({"a": {0: 1.0}}, {"a": {}})
    assert (one.is_placed("a"), two.is_placed("a")) == (True, False)
    assert seen == [report(ClusterChange.ASSIGN, {"a": {0: 1.0}})]
    # The client leaves and comes back.
    one.leave("a")
    assert one.clients(0) == []
    assert one.clients(0, online_only=False) == ["a"]
    one.join("a")
    assert one.clients(0) == ["a"]
    assert len(seen) == 1


def test_clients_are_assigned_and_moved() -> None:
    clusters = with_clients(3)
    clusters.join("a")
    seen = reports_of(clusters)
    clusters.assign("a", 1)
    clusters.assign("a", {0: 0.25, 2: 0.75})
    clusters.assign("a", {0: 0.25, 2: 0.75})
    assert clusters.of("a") == {0: 0.25, 2: 0.75}
    assert clusters.main("a") == 2
    # The third assignment changes nothing, and is not reported.
    assert seen == [
        report(ClusterChange.ASSIGN, {"a": {1: 1.0}}),
        report(ClusterChange.MOVE, {"a": {0: 0.25, 2: 0.75}}),
    ]


def test_a_report_is_not_changed_by_what_happens_later() -> None:
    clusters = with_clients(2)
    seen = reports_of(clusters)
    clusters.assign("a", {0: 0.5, 1: 0.5})
    clusters.members["a"].clear()
    assert seen[0].memberships == {"a": {0: 0.5, 1: 0.5}}


def test_the_first_of_equally_weighted_clusters_is_the_main_one() -> None:
    assert with_clients(2, a={1: 0.5, 0: 0.5}).main("a") == 1


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (7, "there is no cluster 7"),
        ({0: 0.5, 7: 0.5}, "there is no cluster 7"),
        ({0: 0.5, 1: 0.4}, "must sum to 1, got 0.9"),
        ({0: 0.5, 1: 0.6}, "must sum to 1, got 1.1"),
        ({}, "must sum to 1, got 0"),
        ({0: 1.0, 1: 0.0}, "weight of cluster 1 must be positive, got 0"),
        ({0: 1.5, 1: -0.5}, "weight of cluster 1 must be positive, got -0.5"),
        ({0: math.nan}, "weight of cluster 0 must be positive, got nan"),
        ({0: math.inf}, "must sum to 1, got inf"),
    ],
)
def test_an_invalid_placement_is_refused_and_changes_nothing(
    placement: int | Mapping[int, float], message: str
) -> None:
    clusters = with_clients(2, a=1)
    seen = reports_of(clusters)
    for client in ("a", "new"):
        with pytest.raises(ValueError, match=message):
            clusters.assign(client, placement)
    assert clusters.members == {"a": {1: 1.0}}
    assert seen == []


def test_weights_may_be_off_by_rounding() -> None:
    assert with_clients(3, a={0: 0.1, 1: 0.2, 2: 0.7}).of("a") == {0: 0.1, 1: 0.2, 2: 0.7}


def test_an_unplaced_client_is_served_by_the_largest_cluster() -> None:
    clusters = with_clients(2, a=0, b=0, c=1, d=1, e=1)
    clusters.join("f")
    seen = reports_of(clusters)
    clusters.unassign(["a", "c", "f"])
    assert seen == [report(ClusterChange.MOVE, {"a": {}, "c": {}})]
    assert [clusters.main(client) for client in "abcdef"] == [1, 0, 1, 1, 1, 1]
    assert clusters.of("a") == {1: 1.0}
    clusters.unassign(["a"])
    assert len(seen) == 1


def test_sizes_count_weights() -> None:
    # 1.8 in the first cluster, 1.2 in the second, which has more clients.
    assert with_clients(2, a={0: 0.9, 1: 0.1}, b={0: 0.9, 1: 0.1}, c=1).largest() == 0
    assert with_clients(2, a={0: 0.6, 1: 0.4}, b={0: 0.6, 1: 0.4}, c=1).largest() == 1
    assert with_clients(2, a=0, b=1).largest() == 0


def test_the_largest_cluster_follows_every_change() -> None:
    clusters = with_clients(3, a=0, b=1, c=1, d=1, e=2, f=2)
    assert clusters.largest() == 1
    clusters.leave("b")
    clusters.leave("c")
    assert clusters.largest() == 2
    clusters.join("b")
    assert clusters.largest() == 1
    clusters.assign("d", 0)
    assert clusters.largest() == 0
    clusters.unassign(["a"])
    assert clusters.largest() == 2
    # a, c, e and f move to cluster 3; online are b in 1, d in 0, and all of cluster 3 except c.
    assert clusters.found(model(5.0), ["a", "c", "e", "f"]) == clusters.largest() == 3
    children = clusters.split(3, [["a"], ["c", "e", "f"]])
    assert clusters.largest() == children[1]
    # The merged cluster has a, b and d, the other one e and f.
    assert clusters.merge([0, 1, children[0]]) == clusters.largest()


def test_a_new_cluster_starts_from_the_given_model() -> None:
    clusters = with_clients(2, a=0, b=1)
    seen = reports_of(clusters)
    assert clusters.found(model(9), ["b", "new"]) == 2
    assert clusters.found(model(8)) == 3
    assert clusters.members == {"a": {0: 1.0}, "b": {2: 1.0}, "new": {2: 1.0}}
    assert clusters.clients(2) == ["b", "new"]
    assert seen == [
        report(ClusterChange.FOUND, {"b": {2: 1.0}, "new": {2: 1.0}}, made=(2,)),
        report(ClusterChange.FOUND, {}, made=(3,)),
    ]


def test_a_split_creates_clusters_from_the_model_of_their_parent() -> None:
    clusters = with_clients(2, a=0, b={0: 0.25, 1: 0.75}, c=1, d=0, e=0)
    clusters.models[0].replace(np.array([5.0], np.float32))
    clusters.leave("d")
    seen = reports_of(clusters)
    assert clusters.split(0, [["a", "d"], ["b"]], score=0.4, threshold=0.3) == [2, 3]
    # A share of the parent becomes the same share of a child; e is in neither list.
    placed = {"a": {2: 1.0}, "d": {2: 1.0}, "b": {3: 0.25, 1: 0.75}, "e": {}}
    assert seen == [report(ClusterChange.SPLIT, placed, (0,), (2, 3), 0.4, 0.3)]
    assert clusters.members == {**placed, "c": {1: 1.0}}
    assert clusters.clients(2, online_only=False) == ["a", "d"]
    # Both children start with their parent's model and version, and change independently.
    assert [(clusters.models[k].vector.tolist(), clusters.models[k].version) for k in (2, 3)] == [
        ([5.0], 1)
    ] * 2
    clusters.models[2].replace(np.array([6.0], np.float32))
    assert clusters.models[3].vector.tolist() == [5.0]
    assert set(clusters.models) == {1, 2, 3}


def test_merging_takes_the_mean_by_members() -> None:
    clusters = with_clients(3, a=0, b=0, c=0, d=1, e={1: 0.5, 2: 0.5})
    clusters.models[0].replace(np.array([2.0], np.float32))
    clusters.models[0].replace(np.array([0.0], np.float32))
    seen = reports_of(clusters)
    assert clusters.merge([0, 1], score=0.1, threshold=0.2) == 3
    # 3 members' weight at 0, 1.5 at 1: 1.5 / 4.5. The later of versions 2 and 0, and a change.
    assert clusters.models[3].vector.tolist() == pytest.approx([1 / 3])
    assert clusters.models[3].version == 3
    assert set(clusters.models) == {2, 3}
    moved = {**{client: {3: 1.0} for client in "abcd"}, "e": {2: 0.5, 3: 0.5}}
    assert seen == [report(ClusterChange.MERGE, moved, (0, 1), (3,), 0.1, 0.2)]
    assert clusters.members == moved


def test_merging_adds_the_weights_of_a_client_of_both() -> None:
    clusters = with_clients(3, a={0: 0.2, 1: 0.3, 2: 0.5})
    clusters.merge([0, 1])
    assert clusters.members["a"] == {2: 0.5, 3: 0.5}


def test_merging_with_a_model_or_without_members() -> None:
    clusters = with_clients(4, a=0)
    assert clusters.models[clusters.merge([0, 1], model(7))].vector.tolist() == [7.0]
    # Without members, all models have the same weight.
    assert clusters.models[clusters.merge([2, 3])].vector.tolist() == [2.5]


@pytest.mark.parametrize("sources", [[], [0], [0, 0], [0, 7], [7, 8]])
def test_a_merge_needs_two_clusters(sources: list[int]) -> None:
    clusters = with_clients(2, a=0)
    seen = reports_of(clusters)
    with pytest.raises(ValueError, match="a merge needs at least two clusters that exist"):
        clusters.merge(sources)
    assert set(clusters.models) == {0, 1}
    assert seen == []


def test_a_retired_cluster_leaves_the_others_unchanged() -> None:
    clusters = with_clients(3, a=0, b={0: 0.9, 1: 0.1})
    seen = reports_of(clusters)
    with pytest.raises(ValueError, match="cluster 1 has members and cannot be retired"):
        clusters.retire(1)
    clusters.retire(2)
    assert seen == [report(ClusterChange.RETIRE, {}, gone=(2,))]
    last = with_clients(1)
    with pytest.raises(ValueError, match="cluster 0 is the last one"):
        last.retire(0)
    assert set(last.models) == {0}


def test_ids_are_never_used_twice() -> None:
    clusters = with_clients(2)
    clusters.retire(1)
    assert clusters.found(model(0)) == 2
    clusters.retire(2)
    assert clusters.found(model(0)) == 3
    assert clusters.split(3, [[], []]) == [4, 5]
    assert clusters.merge([4, 5]) == 6
    # Clusters that a method makes itself count as well.
    assert Clusters({0: model(0), 7: model(0)}).found(model(0)) == 8


def test_the_model_that_serves_a_client_of_several_clusters() -> None:
    models = {0: model(1.0, 0.0), 1: model(0.0, 4.0), 2: model(9.0, 9.0)}
    assert blended(models, {0: 0.5, 1: 0.25}).tolist() == [0.5, 1.0]


# Invariants under random sequences of changes.

VERBS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "leave", "assign", "unassign", "found", "split", "merge", "retire"]
        ),
        st.integers(0, 2**32 - 1),
    ),
    max_size=30,
)


def change_by(clusters: Clusters, verb: str, rng: np.random.Generator) -> None:
    """Apply a valid change of one kind."""
    clients, models = [f"c{index}" for index in range(6)], list(clusters.models)
    client, cluster = str(rng.choice(clients)), int(rng.choice(models))
    members = clusters.clients(cluster, online_only=False)
    if verb in ("join", "leave"):
        getattr(clusters, verb)(client)
    elif verb == "assign":
        chosen = rng.permutation(models)[: int(rng.integers(1, len(models) + 1))]
        weights = rng.dirichlet(np.ones(len(chosen))) + 1e-9
        shares = weights / weights.sum()
        clusters.assign(client, {int(k): float(w) for k, w in zip(chosen, shares, strict=True)})
    elif verb == "unassign":
        clusters.unassign([client])
    elif verb == "found":
        clusters.found(model(0), list(rng.choice(clients, int(rng.integers(3)), replace=False)))
    elif verb == "split":
        clusters.split(cluster, [members[::3], members[1::3]])
    elif verb == "merge" and len(models) > 1:
        clusters.merge(models[:2])
    elif verb == "retire" and not members and len(models) > 1:
        clusters.retire(cluster)


@given(VERBS)
def test_memberships_are_of_clusters_that_exist_sum_to_one_and_follow_from_the_reports(
    verbs: list[tuple[str, int]],
) -> None:
    clusters = with_clients(1)
    seen = reports_of(clusters)
    members: dict[str, Mapping[int, float]] = {}
    existing, ever = {0}, {0}
    for verb, seed in verbs:
        before = len(seen)
        change_by(clusters, verb, np.random.default_rng(seed))
        assert len(seen) <= before + 1
        for change in seen[before:]:
            assert not ever & set(change.made)
            members |= change.memberships
            existing = existing - set(change.gone) | set(change.made)
            ever |= set(change.made)
        assert set(clusters.models) == existing
        for client, weights in clusters.members.items():
            assert set(weights) <= existing
            assert not weights or sum(weights.values()) == pytest.approx(1.0)
            assert members.get(client, {}) == weights
            assert clusters.main(client) in existing


VERBS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "move", "split", "merge"]), st.integers(0, 7)),
    max_size=25,
)


@given(VERBS)
def test_clusters_count_their_clients(verbs: list[tuple[str, int]]) -> None:
    clusters = Clusters({0: Model(np.zeros(1, np.float32)), 1: Model(np.ones(1, np.float32))})
    for verb, number in verbs:
        names, client = list(clusters.models), f"c{number}"
        if verb == "join":
            clusters.join(client)
        elif verb == "leave" and client in clusters.members:
            clusters.leave(client)
        elif verb == "move":
            clusters.assign(client, names[number % len(names)])
        elif verb == "split":
            parent = names[number % len(names)]
            members = clusters.clients(parent, online_only=False)
            clusters.split(parent, [members[::2], members[1::2]])
        elif verb == "merge" and len(names) > 1:
            clusters.merge(names[:2])
        for cluster in clusters.models:
            assert clusters.size(cluster) == len(clusters.clients(cluster))
            everyone = clusters.clients(cluster, online_only=False)
            assert clusters.size(cluster, online_only=False) == len(everyone)
        sizes = {k: len(clusters.clients(k)) for k in clusters.models}
        assert clusters.largest() == max(sizes, key=lambda k: sizes[k])


def test_no_state_remains_of_clusters_that_were_given_up() -> None:
    clusters = Clusters({0: Model(np.zeros(1, np.float32))})
    clusters.join("c0")

    def sizes() -> dict[str, int]:
        return {name: len(part) for name, part in vars(clusters).items() if isinstance(part, dict)}

    before = sizes()
    for _ in range(3):
        founded = clusters.found(Model(np.zeros(1, np.float32)), ["c0"])
        clusters.assign("c0", 0)
        clusters.retire(founded)
    assert sizes() == before
