"""The figures of a run, each compared with a value worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from summaries import summarise

import raceme
from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    Ending,
    Evaluated,
    Event,
    Measured,
    Membership,
    RunEnded,
    UpdateApplied,
    UpdateRejected,
)
from raceme.records.summary import RunSummary, time_to_target, write_summary
from raceme.reporting.console import summary_rows
from raceme.strategies.csafl import IDLE

KEYS = {
    *("strategy", "dataset", "seed", "clients", "updates", "virtual_time", "wall_time"),
    *("accuracy", "best_accuracy", "time_to_target", "clusters", "purity"),
    *("bytes_up", "bytes_down", "rejected_updates", "updates_per_second"),
}


def update(seq: int, client: str, cluster: int, time: float = 1.0) -> UpdateApplied:
    return UpdateApplied(seq, time, client, cluster, 0, 0, 0.5, 0.0, 1.0, 100, 10)


def evaluated(
    time: float,
    updates: int,
    accuracy: float,
    clusters: int = 1,
    answered: int = 4,
    asked: int = 4,
    weighted: float = math.nan,
) -> Evaluated:
    scores = {f"c{i}": (0, accuracy, 1.0) for i in range(answered)}
    return Evaluated(
        time, updates, accuracy, 1.0, clusters, scores, asked, weighted_accuracy=weighted
    )


def changed(
    change: ClusterChange,
    clusters: dict[str, int],
    gone: tuple[int, ...] = (),
    made: tuple[int, ...] = (),
) -> ClustersChanged:
    memberships = {client: {cluster: 1.0} for client, cluster in clusters.items()}
    return ClustersChanged(1.0, 0, change, memberships, gone, made)


def assigned(**clusters: int) -> ClustersChanged:
    return changed(ClusterChange.ASSIGN, clusters)


def moved(**clusters: int) -> ClustersChanged:
    return changed(ClusterChange.MOVE, clusters)


def split(parent: int, children: dict[int, tuple[str, ...]]) -> ClustersChanged:
    clusters = {client: child for child, clients in children.items() for client in clients}
    return changed(ClusterChange.SPLIT, clusters, (parent,), tuple(children))


def joined(**groups: int | None) -> list[Event]:
    return [ClientJoined(0.0, client, 0, 10, group) for client, group in groups.items()]


def summary_of(events: list[Event], target: float | None = None) -> dict[str, Any]:
    return summarise(
        events, strategy="casa", dataset="digits", seed=3, wall_time=2.0, target=target
    )


def observed(events: list[Event]) -> RunSummary:
    run = RunSummary()
    for event in events:
        run.observe(event)
    return run


def purity(assignment: Mapping[str, int], groups: Mapping[str, int | None]) -> float | None:
    """Return the purity that a run's observer computes from clusters and true groups."""
    membership = Membership()
    for node, (client, group) in enumerate(groups.items()):
        membership.observe(ClientJoined(0.0, client, node, 10, group))
    for client, cluster in assignment.items():
        change = ClusterChange.ASSIGN
        membership.observe(ClustersChanged(0.0, 0, change, {client: {cluster: 1.0}}))
    return membership.purity()


def test_purity_by_hand() -> None:
    # Cluster 1 has groups 0, 0, 1: two of three agree. Cluster 2 has 1, 1: both. 4 of 5.
    assignment = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}
    groups = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
    assert purity(assignment, groups) == pytest.approx(4 / 5)


def test_purity_of_one_cluster_is_the_share_of_the_largest_group() -> None:
    assert purity(dict.fromkeys("abcde", 0), {"a": 0, "b": 0, "c": 1, "d": 2, "e": 0}) == 3 / 5


def test_purity_of_a_cluster_each_is_one() -> None:
    assert purity({"a": 1, "b": 2, "c": 3}, {"a": 0, "b": 0, "c": 1}) == 1.0


def test_purity_leaves_out_clients_whose_group_is_not_known() -> None:
    # Of a, b and d, whose groups are known, a (or b) and d agree with their clusters.
    assignment = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}
    groups: dict[str, int | None] = {"a": 0, "b": 1, "c": None, "d": 0}
    assert purity(assignment, groups) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("assignment", "groups"),
    [
        ({}, {}),
        ({}, {"a": 0}),
        ({"a": 1}, {}),
        ({"a": 1, "b": 1}, {"a": None, "b": None}),
        ({"a": 1}, {"a": None, "b": 0}),
    ],
)
def test_purity_is_none_if_nothing_is_known(
    assignment: dict[str, int], groups: dict[str, int | None]
) -> None:
    assert purity(assignment, groups) is None


def test_time_to_target_is_the_first_evaluation_at_or_above_it() -> None:
    curve = [
        evaluated(1.0, 10, 0.5),
        evaluated(2.5, 20, 0.8),
        evaluated(4.0, 30, 0.7),
        evaluated(5.0, 40, 0.9),
    ]
    assert time_to_target(curve, 0.8) == {"target": 0.8, "virtual_time": 2.5, "updates": 20}
    assert time_to_target(curve, 0.81) == {"target": 0.81, "virtual_time": 5.0, "updates": 40}
    assert time_to_target(curve, 0.0) == {"target": 0.0, "virtual_time": 1.0, "updates": 10}
    assert time_to_target(curve, 0.95) is None
    assert time_to_target(curve, None) is None
    assert time_to_target([], 0.5) is None
    assert time_to_target([evaluated(1.0, 10, math.nan)], 0.5) is None


RUN: list[Event] = [
    *joined(a=0, b=0, c=1, d=None),
    assigned(a=0, b=0, c=0, d=0),
    update(1, "a", 0, 1.0),
    update(2, "b", 0, 2.0),
    # Three of four clients are fewer than nine tenths:
    # the result counts for neither target nor best.
    evaluated(2.0, 2, 0.95, answered=3, weighted=0.875),
    UpdateRejected(2.5, "c", "not finite", 2.0),
    update(3, "c", 0, 3.0),
    evaluated(3.0, 3, 0.9, weighted=0.625),
    split(0, {1: ("a", "b"), 2: ("c", "d")}),
    update(4, "d", 2, 4.0),
    evaluated(4.0, 4, 0.75, clusters=2, weighted=0.5),
    ClientLeft(4.5, "d"),
    RunEnded(5.0, 4, "reached max-updates", Ending.LIMIT),
]


TASKS = dict.fromkeys(
    (
        *("task_accuracy", "average_accuracy", "current_accuracy", "clusters_after_steps"),
        *("forgetting", "backward_transfer", "forward_transfer"),
    )
)
"""Keys of runs without tests on all tasks."""


@pytest.mark.parametrize(("guess", "is_said"), [(0.75, True), (0.7, False), (None, False)])
def test_models_no_better_than_a_constant_guess_are_said_to_be(
    guess: float | None, is_said: bool
) -> None:
    rows = dict(summary_rows({**summary_of(RUN), "constant_guess": guess}))
    said = "no better than always predicting a client's most frequent class, 0.750"
    assert rows.get("learned") == (said if is_said else None)


def test_the_summary_by_hand() -> None:
    result = summary_of(RUN, target=0.7)
    assert set(result) >= KEYS
    versions = result.pop("versions")
    assert versions["raceme"] == raceme.__version__
    assert set(versions) == {"raceme", "flwr", "torch", "numpy", "python"}
    assert result == {
        "strategy": "casa",
        "dataset": "digits",
        "model": None,
        "seed": 3,
        "clients": 4,
        "reason": "reached max-updates",
        "diverged": False,
        "ending": "limit",
        "updates": 4,
        "virtual_time": 5.0,
        "wall_time": 2.0,
        "updates_per_second": 2.0,
        "measure": "accuracy",
        "unit": None,
        "accuracy": 0.75,
        "best_accuracy": 0.9,
        "worst_tenth_accuracy": 0.75,
        "weighted_accuracy": 0.5,
        "best_weighted_accuracy": 0.625,
        "accuracy_at_step_starts": None,
        "accuracy_at_step_ends": None,
        **TASKS,
        "clients_asked": 4,
        "clients_answered": 4,
        "target": 0.7,
        "time_to_target": {"target": 0.7, "virtual_time": 3.0, "updates": 3},
        "time_to_convergence": {"virtual_time": 4.0, "updates": 4},
        # The two that count are below the best so far by 0 and 0.15.
        "unrest": pytest.approx(0.075),
        "clusters": 2,
        "cluster_sizes": {"1": 2, "2": 2},
        "moves": 0,
        "purity": 1.0,
        "purity_reached_at_update": 3,
        # Updates sent at 0 took 1, 2, 3 and 4 s, the rejected reply half a second.
        "device_time": 10.5,
        "bytes_up": 40,
        "bytes_down": 400,
        "bytes_by_phase": {"train": {"down": 400, "up": 40, "messages": 4}},
        "rejected_updates": 1,
        "rejections": {"not finite": 1},
        "refused_claims": 0,
        "accuracy_before": None,
        "accuracy_after": None,
        "mixture_divergence": None,
        "sessions": None,
        "cluster_accuracy": None,
        "cluster_accuracies": None,
        "sample_passes": None,
    }


def test_moves_are_counted_by_client_and_only_to_another_main_cluster() -> None:
    weights = {"a": {0: 0.6, 1: 0.4}, "b": {0: 0.4, 1: 0.6}}
    events = [
        *joined(a=0, b=0, c=1),
        assigned(a=0, b=0, c=0),
        moved(a=1, b=1),
        split(1, {2: ("a",), 3: ("b",)}),
        moved(a=0),
        moved(b=0),
        # Only b's main cluster differs from the one before.
        ClustersChanged(1.0, 0, ClusterChange.MOVE, weights),
    ]
    assert summary_of(events)["moves"] == 5


def test_shares_of_windows_that_clients_waited() -> None:
    # Shares 0, 0.3, 0.4 and 0.9: their mean is 0.4, two are above 0.3 and one is above 0.5.
    waited = [("a", 1, 0.0, 4.0), ("b", 1, 1.5, 5.0), ("a", 2, 2.0, 5.0), ("b", 2, 4.5, 5.0)]
    result = summary_of(
        [Measured(9.0, 0, IDLE, dict(zip(IDLE.columns, values, strict=True))) for values in waited]
    )
    assert result["idle_share_mean"] == pytest.approx(0.4)
    assert (result["idle_over_30_percent"], result["idle_over_50_percent"]) == (0.5, 0.25)


def test_an_empty_run_has_no_accuracy() -> None:
    result = summary_of([], target=0.5)
    assert set(result) >= KEYS
    unknown = ("accuracy", "best_accuracy", "time_to_target", "purity", "reason")
    unknown += ("ending", "time_to_convergence", "unrest")
    unknown += ("weighted_accuracy", "best_weighted_accuracy")
    assert [result[key] for key in unknown] == [None] * len(unknown)
    zero = ("clients", "updates", "virtual_time", "clusters", "bytes_up", "rejected_updates")
    assert [result[key] for key in zero] == [0] * len(zero)


def test_the_summary_is_correct_after_every_event() -> None:
    run = RunSummary()
    seen = []
    for event in RUN:
        run.observe(event)
        seen.append((run.updates, run.rejected, run.accuracy, run.best_accuracy, run.clusters))
    assert seen == [
        *[(0, 0, None, None, 0)] * 4,
        (0, 0, None, None, 1),
        (1, 0, None, None, 1),
        (2, 0, None, None, 1),
        (2, 0, 0.95, None, 1),
        (2, 1, 0.95, None, 1),
        (3, 1, 0.95, None, 1),
        (3, 1, 0.9, 0.9, 1),
        (3, 1, 0.9, 0.9, 2),
        (4, 1, 0.9, 0.9, 2),
        *[(4, 1, 0.75, 0.9, 2)] * 3,
    ]


def test_a_result_may_be_asked_for_while_the_run_goes_on() -> None:
    run = observed(RUN[:5])
    given: dict[str, Any] = {"strategy": "casa", "dataset": "digits", "seed": 3, "wall_time": 2.0}
    first = run.result(**given)
    assert run.result(**given) == first
    for event in RUN[5:]:
        run.observe(event)
    assert run.result(**given) == summary_of(RUN)


def test_time_does_not_go_back() -> None:
    assert observed([update(1, "a", 0, 7.0), update(2, "b", 0, 6.0)]).time == 7.0


@pytest.mark.parametrize("wall_time", [0.0, -1.0])
def test_without_wall_time_there_is_no_rate(wall_time: float) -> None:
    result = observed(RUN).result(strategy="casa", dataset="digits", seed=0, wall_time=wall_time)
    assert result["updates_per_second"] is None


def test_a_run_that_diverges_has_a_best_accuracy_all_the_same() -> None:
    run = observed([evaluated(1.0, 1, 0.5), evaluated(2.0, 2, math.nan)])
    result = run.result(strategy="casa", dataset="digits", seed=0, wall_time=1.0)
    assert result["accuracy"] is None
    assert result["best_accuracy"] == 0.5


@pytest.mark.parametrize(("answered", "reached"), [(8, False), (9, True), (10, True)])
def test_a_target_counts_if_nine_tenths_answered(answered: int, reached: bool) -> None:
    events: list[Event] = [
        evaluated(1.0, 1, 0.9, answered=answered, asked=10),
        evaluated(2.0, 2, 0.5, answered=10, asked=10),
    ]
    result = summary_of(events, target=0.8)
    assert (result["time_to_target"] is not None) == reached
    assert result["best_accuracy"] == (0.9 if reached else 0.5)


def test_an_update_moves_nobody() -> None:
    events = [*joined(a=0, b=1), assigned(a=0, b=0), split(0, {1: ("a",), 2: ("b",)})]
    run = observed([*events, update(1, "b", 0)])
    assert run.membership.clusters == {"a": 1, "b": 2}
    assert run.purity() == 1.0


def test_members_of_a_split_that_are_offline_are_in_its_parts() -> None:
    events = [*joined(a=0, b=1), assigned(a=0, b=0), ClientLeft(0.5, "b")]
    result = summary_of([*events, split(0, {1: ("a",), 2: ("b",)})])
    assert (result["clusters"], result["cluster_sizes"]) == (2, {"1": 1, "2": 1})
    assert result["purity"] == 1.0


def test_nobody_is_in_a_cluster_that_was_split() -> None:
    # b is in neither child: its cluster is unknown, as the parent has been split.
    events = [*joined(a=0, b=1), assigned(a=0, b=0), split(0, {1: ("a",), 2: ()})]
    run = observed(events)
    assert run.membership.sizes() == {1: 1}
    assert run.membership.clusters == {"a": 1}
    assert run.clusters == 2


def test_clusters_are_those_that_exist() -> None:
    run = RunSummary()
    counts = []
    for event in (
        assigned(a=0, b=1, c=1),
        # The evaluation reports five models, though events have named only three clusters.
        evaluated(1.0, 1, 0.5, clusters=5),
        moved(a=3),
        changed(ClusterChange.FOUND, {"b": 7}, made=(7,)),
        changed(ClusterChange.FOUND, {}, made=(8,)),
        split(1, {9: ("c",), 10: (), 11: ()}),
        changed(ClusterChange.MERGE, {"a": 12, "c": 12}, gone=(3, 9, 10), made=(12,)),
        changed(ClusterChange.RETIRE, {}, gone=(8,)),
    ):
        run.observe(event)
        counts.append(run.clusters)
    assert counts == [2, 5, 5, 6, 7, 9, 7, 6]
    assert run.membership.sizes() == {7: 1, 12: 2}


def test_a_client_of_several_clusters_counts_where_its_weight_is_largest() -> None:
    weights = {"a": {1: 0.4, 2: 0.6}, "b": {2: 0.5, 1: 0.5}, "c": {2: 1.0}}
    change = ClustersChanged(1.0, 0, ClusterChange.MOVE, weights)
    run = observed([*joined(a=0, b=1, c=0), assigned(a=1, b=1, c=1), change])
    # Among equal weights, the smaller cluster number wins.
    assert run.membership.clusters == {"a": 2, "b": 1, "c": 2}
    assert run.membership.weights == weights
    assert run.purity() == 1.0


def test_weights_that_stay_the_same_are_no_change() -> None:
    membership = observed([*joined(a=0), assigned(a=1)]).membership
    assert membership.observe(moved(a=1)) == []
    assert [placed.home for placed in membership.observe(moved(a=2))] == [2]


def test_a_client_that_moves_changes_the_purity() -> None:
    events = [*joined(a=0, b=1, c=1), split(0, {1: ("a",), 2: ("b", "c")})]
    assert observed(events).purity() == 1.0
    run = observed([*events, moved(b=1)])
    assert run.purity() == pytest.approx(2 / 3)
    assert run.membership.sizes() == {1: 2, 2: 1}


def test_a_client_that_comes_back_with_other_data_changes_the_purity() -> None:
    events = [*joined(a=0, b=0), assigned(a=0, b=0), ClientJoined(2.0, "b", 0, 10, 1, True)]
    assert observed(events).purity() == 0.5


def test_purity_reached_is_when_it_was_reached_for_good() -> None:
    pure = [*joined(a=0, b=1), update(1, "a", 0), split(0, {1: ("a",), 2: ("b",)})]
    impure = [*pure, update(2, "a", 1), moved(b=1)]
    again = [*impure, update(3, "a", 1), moved(b=2), update(4, "a", 1)]
    reached = [summary_of(events)["purity_reached_at_update"] for events in (pure, impure, again)]
    assert reached == [1, None, 3]


@pytest.mark.parametrize("ending", Ending)
def test_the_kind_of_end_is_known_whatever_the_words_are(ending: Ending) -> None:
    run = observed([RunEnded(1.0, 1, "interrupted, and all clients are gone", ending)])
    assert run.ending is ending
    given: dict[str, Any] = {"strategy": "casa", "dataset": "digits", "seed": 0, "wall_time": 1.0}
    assert run.result(**given)["ending"] == ending.value


def test_a_run_that_sends_nothing_has_no_traffic() -> None:
    silent = replace(update(1, "a", 0), bytes_down=0, bytes_up=0)
    result = summary_of([*joined(a=0), assigned(a=0), silent])
    assert (result["bytes_up"], result["bytes_down"], result["updates"]) == (0, 0, 1)


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=2),
        st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)),
        max_size=12,
    )
)
def test_purity_of_a_run_is_that_of_its_assignment(
    clients: dict[str, tuple[int, int | None]],
) -> None:
    groups = {client: group for client, (_, group) in clients.items()}
    assignment = {client: cluster for client, (cluster, _) in clients.items()}
    moves = [assigned(**{client: cluster}) for client, cluster in assignment.items()]
    value = observed([*joined(**groups), *moves]).purity()
    assert value == purity(assignment, groups)
    assert value is None or 0 < value <= 1


def test_the_summary_is_written_as_json(tmp_path: Path) -> None:
    result = summary_of(RUN, target=0.7)
    write_summary(tmp_path / "summary.json", result)
    assert json.loads((tmp_path / "summary.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_that_is_no_json_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="JSON"):
        write_summary(path, {"accuracy": math.nan})
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_the_best_weighted_evaluation_is_one_since_every_client_has_a_cluster() -> None:
    summary = RunSummary()

    def best(time: float, weighted: float) -> float | None:
        summary.observe(evaluated(time, 1, 0.5, answered=2, asked=2, weighted=weighted))
        return summary.best_weighted_accuracy

    # First all clients have the initial model; after the split c1 has no cluster yet.
    summary.observe(assigned(c0=0, c1=0))
    assert best(1.0, 0.1) == 0.1
    summary.observe(changed(ClusterChange.SPLIT, {"c0": 1}, gone=(0,), made=(1, 2)))
    assert best(2.0, 0.9) == 0.9
    summary.observe(assigned(c1=2))
    assert best(3.0, 0.6) == 0.6
    assert best(4.0, 0.7) == best(5.0, 0.65) == 0.7


def test_purity_follows_the_groups_of_data_that_change() -> None:
    summary = RunSummary()
    for client, group in (("a", 0), ("b", 1)):
        summary.observe(ClientJoined(0.0, client, 1, 10, group))
    memberships = {"a": {1: 1.0}, "b": {2: 1.0}}
    change = ClustersChanged(0.0, 0, ClusterChange.SPLIT, memberships, (0,), (1, 2))
    summary.observe(change)
    assert summary.purity() == 1.0
    # The two clients have exchanged their data; then the method moves one of them.
    scores = {"a": (1, 0.5, 1.0), "b": (2, 0.5, 1.0)}
    exchanged = {"a": 1, "b": 0}
    summary.observe(Evaluated(1.0, 5, 0.5, 1.0, 2, scores, 2, groups=exchanged))
    assert summary.purity() == 1.0
    moved = ClustersChanged(2.0, 6, ClusterChange.MOVE, {"a": {2: 1.0}})
    summary.observe(moved)
    assert summary.purity() == 0.5
    summary.observe(Evaluated(3.0, 9, 0.5, 1.0, 2, scores, 2, groups={"a": 0}))
    assert summary.purity() == 1.0


def test_the_accuracy_over_the_steps_of_the_data_by_hand() -> None:
    run = RunSummary()
    seen = [(0.1, 0), (0.8, 0), (0.4, 1), (0.6, 1), (0.7, 1), (0.2, 3)]
    for accuracy, step in seen:
        moved = {"c1": step} if step else {}
        run.observe(replace(evaluated(1.0, 1, accuracy), steps=moved))
    found = run.result(strategy="", dataset="", seed=0, wall_time=1.0)
    # Steps 1 and 3 begin with 0.4 and 0.2; steps 0 and 1 end with 0.8 and 0.7, step 3 has no end.
    assert found["accuracy_at_step_starts"] == pytest.approx(0.3)
    assert found["accuracy_at_step_ends"] == pytest.approx(0.75)


def test_errors_beyond_all_numbers_at_a_steps_start_and_end_are_unknown() -> None:
    run = RunSummary()
    for accuracy, step in [(0.1, 0), (math.inf, 0), (math.inf, 1)]:
        run.observe(replace(evaluated(1.0, 1, accuracy), steps={"c1": step}))
    found = run.result(strategy="", dataset="", seed=0, wall_time=1.0)
    assert found["accuracy_at_step_starts"] is found["accuracy_at_step_ends"] is None
