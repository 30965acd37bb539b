"""Uploads, sessions and divergences, each compared with a value worked out by hand."""

from __future__ import annotations

import math

import pytest
from summaries import summarise

from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    ClustersScored,
    Evaluated,
    Event,
    UpdateApplied,
)
from raceme.records.record import RunRecord
from raceme.records.summary import Uploads, divergence, matching


def joined(*clients: str) -> list[Event]:
    return [ClientJoined(0.0, client, 0, 10, None) for client in clients]


def upload(
    seq: int,
    client: str,
    before: float | None = None,
    after: float | None = None,
    mixture: tuple[float, ...] = (),
    passes: int | None = None,
) -> UpdateApplied:
    return UpdateApplied(
        *(seq, float(seq), client, 0, 0, 0, 0.5, 0.0, 1.0, 10, 10),
        accuracy_before=before,
        accuracy_after=after,
        mixture=mixture,
        passes=passes,
    )


def weights(**clients: dict[int, float]) -> ClustersChanged:
    return ClustersChanged(1.0, 1, ClusterChange.MOVE, clients)


def of(*events: Event) -> Uploads:
    return RunRecord.of(events).summary.uploads


def test_divergence_by_hand() -> None:
    # .5 log(.5/.25) + .5 log(.5/.75) = .5 log 2 - .5 log 1.5.
    assert divergence((0.5, 0.5), (0.25, 0.75)) == pytest.approx(0.5 * math.log(2 / 1.5))
    assert divergence((0.3, 0.7), (0.3, 0.7)) == 0
    # A true share of 0 contributes 0, and an estimated share is at least 1e-12.
    assert divergence((1.0, 0.0), (0.5, 0.5)) == pytest.approx(math.log(2))
    assert divergence((0.5, 0.5), (1.0, 0.0)) == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * math.log(0.5e12)
    )


def test_a_session_ends_when_all_who_are_online_have_uploaded() -> None:
    rows = of(
        *joined("a", "b"),
        *(upload(1, "a", 0.1), upload(2, "a", 0.2), upload(3, "b", 0.4)),
        *(upload(4, "b", 0.6), *joined("c"), upload(5, "a", 0.8), upload(6, "c", 1.0)),
        *(upload(7, "a", 0.5), ClientLeft(7.5, "b"), upload(8, "c", 0.5)),
        upload(9, "a", 0.3),
    )
    assert rows.session_ends == [3, 6, 8]
    assert [row.session for row in rows.rows] == [1, 1, 1, 2, 2, 2, 3, 3, 4]
    # a uploads twice in the first session; the last upload counts.
    assert rows.by_session("before") == pytest.approx([0.3, 0.8, 0.5])
    # At the end each client's last upload counts: a .3, b .6, c .5.
    assert rows.accuracy_before == pytest.approx((0.3 + 0.6 + 0.5) / 3)


def test_a_clients_scores_belong_to_its_previous_upload() -> None:
    rows = of(
        *joined("a", "b"),
        *(upload(1, "a", 0.1), upload(2, "b", 0.2)),
        *(upload(3, "a", 0.3, after=0.5), upload(4, "b", 0.4, after=0.7)),
    )
    assert [(row.before, row.after) for row in rows.rows] == [
        (0.1, 0.5),
        (0.2, 0.7),
        (0.3, None),
        (0.4, None),
    ]
    assert rows.by_session("after") == [pytest.approx(0.6), None]
    assert rows.accuracy_after == pytest.approx(0.6)


def test_scores_for_an_unscored_upload_are_given_to_no_other() -> None:
    rows = of(*joined("a"), upload(1, "a", 0.1), upload(2, "a"), upload(3, "a", 0.3, after=0.5))
    assert [row.after for row in rows.rows] == [None, None]
    assert rows.accuracy_after == 0.5


def test_an_estimated_mixture_follows_from_the_changes_after_an_update() -> None:
    true = (0.5, 0.5)
    rows = of(
        *joined("a", "b"),
        weights(a={0: 1.0}, b={0: 0.5, 1: 0.5}),
        # Two updates at once, as in a round: the changes of both follow.
        *(upload(1, "a", mixture=true), upload(2, "b", mixture=true)),
        *(weights(a={0: 0.25, 1: 0.75}), weights(b={0: 0.75, 1: 0.25})),
        # One update changes nothing; another client is moved later, by an update of b.
        *(upload(3, "b", mixture=true), Evaluated(3.0, 3, 0.5, 1.0, 2)),
        *(weights(b={0: 1.0}), upload(4, "a", mixture=true)),
    )
    assert [dict(row.estimate) for row in rows.rows] == [
        {0: 0.25, 1: 0.75},
        {0: 0.75, 1: 0.25},
        {0: 0.75, 1: 0.25},
        {0: 0.25, 1: 0.75},
    ]
    assert [value for _, value in rows.divergences()] == [
        pytest.approx(0.5 * math.log(2 / 1.5))
    ] * 4


def test_later_updates_do_not_change_an_estimated_mixture() -> None:
    first, later = {0: 0.25, 1: 0.75}, {0: 0.5, 1: 0.5}
    rows = of(
        *joined("a", "b"),
        *(upload(1, "a", mixture=(0.5, 0.5)), weights(a=first)),
        *(upload(2, "b", mixture=(0.5, 0.5)), weights(a=later, b=first)),
    )
    assert [dict(row.estimate) for row in rows.rows] == [first, first]


def test_clusters_are_matched_with_distributions_so_that_the_divergence_is_least() -> None:
    pairs = [((0.9, 0.1), {4: 0.2, 7: 0.8}), ((0.3, 0.7), {4: 0.6, 7: 0.4})]
    assert matching([4, 7], pairs) == {7: 0, 4: 1}
    # Three distributions, two clusters: the distribution with the smallest share has none.
    assert matching([0, 1], [((0.1, 0.5, 0.4), {0: 0.5, 1: 0.5})]).keys() == {0, 1}
    assert set(matching([0, 1], [((0.1, 0.5, 0.4), {0: 0.5, 1: 0.5})]).values()) == {1, 2}
    # Three clusters, two distributions: one cluster has no distribution.
    assert matching([0, 1, 2], [((0.5, 0.5), {0: 0.4, 1: 0.0, 2: 0.6})]).keys() == {0, 2}


def test_clusters_with_test_sets_of_their_own_are_not_matched() -> None:
    # The method swaps the two distributions: with matching, the result would look correct.
    wrong = [*joined("a"), upload(1, "a", mixture=(0.9, 0.1)), weights(a={0: 0.1, 1: 0.9})]
    ((_, matched),) = of(*wrong).divergences()
    assert matched == pytest.approx(0)
    ((_, known),) = of(*wrong, ClustersScored(1.0, 1, {0: 0.5, 1: 0.5})).divergences()
    assert known == pytest.approx(0.9 * math.log(9) - 0.1 * math.log(9))


def test_a_method_of_single_clusters_estimates_no_mixture() -> None:
    single = [*joined("a"), upload(1, "a", mixture=(0.5, 0.5)), weights(a={1: 1.0})]
    assert of(*single).divergences() == []


@pytest.mark.parametrize("scored", [False, True])
def test_fewer_clusters_than_distributions_tell_no_divergence(scored: bool) -> None:
    fewer = [*joined("a"), upload(1, "a", mixture=(0.1, 0.5, 0.4)), weights(a={0: 0.5, 1: 0.5})]
    rows = of(*fewer, *([ClustersScored(1.0, 1, {0: 0.5, 1: 0.5})] if scored else []))
    # Scored clusters have the first two distributions, others the likeliest two.
    assert rows.unmatched() == ([2] if scored else [0])
    assert rows.divergences() == []
    assert rows.result()["mixture_divergence"] is None


def test_the_summary_of_scored_uploads_by_hand() -> None:
    half, estimate = (0.5, 0.5), {0: 0.25, 1: 0.75}
    events = [
        *joined("a", "b"),
        *(weights(a={0: 0.5, 1: 0.5}, b={0: 0.5, 1: 0.5}), upload(1, "a", 0.25, None, half, 30)),
        *(upload(2, "b", 0.75, None, half, 60), Evaluated(2.0, 2, 0.5, 1.0, 2)),
        *(ClustersScored(2.0, 2, {0: 0.5, 1: 0.75}), weights(a=estimate)),
        *(upload(3, "a", 0.5, 0.375, half, 90), ClustersScored(3.0, 3, {0: 0.25, 1: 1.0})),
    ]
    summary = summarise(events, strategy="cdfl", dataset="digits", seed=0, wall_time=1.0)
    late = 0.5 * math.log(2 / 1.5)
    assert {name: summary[name] for name in EMPTY} == {
        "accuracy_before": 0.625,
        "accuracy_after": 0.375,
        "cluster_accuracy": 0.625,
        "cluster_accuracies": {"0": 0.25, "1": 1.0},
        # The last of three uploads.
        "mixture_divergence": pytest.approx(late),
        "sample_passes": 180,
        "sessions": {
            "updates": [2],
            "accuracy_before": [0.5],
            # Known for only one of two clients.
            "accuracy_after": [None],
            "mixture_divergence": [0.0],
        },
    }


EMPTY = {
    *("accuracy_before", "accuracy_after", "cluster_accuracy", "cluster_accuracies"),
    *("mixture_divergence", "sample_passes", "sessions"),
}


def test_a_run_that_scores_nothing_has_none_of_these_numbers() -> None:
    events = [*joined("a"), upload(1, "a"), upload(2, "a")]
    summary = summarise(events, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
    assert {name: summary[name] for name in EMPTY} == dict.fromkeys(EMPTY)
