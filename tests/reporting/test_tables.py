"""The tables of a run's page: who was where, what changed, and what drift did."""

from __future__ import annotations

from raceme.core.events import (
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    DataChanged,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
)
from raceme.records.record import RunRecord
from raceme.reporting.run_page import (
    changes_table,
    clients_table,
    costs_table,
    drifts_table,
    final_clusters,
    moves_table,
    steps_table,
)


def placed(
    time: float,
    change: ClusterChange,
    weights: dict[str, dict[int, float]],
    gone: tuple[int, ...] = (),
    made: tuple[int, ...] = (),
    score: float = 0.5,
) -> ClustersChanged:
    return ClustersChanged(time, int(time), change, weights, gone, made, score, 0.25)


CHANGES: list[Event] = [
    *(ClientJoined(0.0, name, 0, 10, group) for name, group in zip("abc", (0, 0, 1), strict=True)),
    placed(0.0, ClusterChange.FOUND, {"a": {0: 1.0}, "b": {0: 1.0}, "c": {0: 1.0}}, made=(0,)),
    placed(1.0, ClusterChange.SPLIT, {"a": {1: 1.0}, "b": {1: 1.0}, "c": {2: 1.0}}, (0,), (1, 2)),
    placed(2.0, ClusterChange.MOVE, {"b": {1: 0.4, 2: 0.6}}),
    placed(3.0, ClusterChange.MOVE, {"b": {1: 0.3, 2: 0.7}, "a": {2: 1.0}}),
    placed(4.0, ClusterChange.RETIRE, {}, gone=(1,), score=float("nan")),
    placed(5.0, ClusterChange.FOUND, {}, made=(3,)),
    RunEnded(6.0, 6, "so"),
]


def test_each_change_of_the_clusters_has_its_row_but_for_the_beginning() -> None:
    table = changes_table(RunRecord.of(CHANGES))
    assert table is not None
    assert table.title == "3 changes of the clusters"
    assert table.rows == (
        ("1.00", "1", "split", "0", "1 (2), 2 (1)", "0.500", "0.250"),
        ("4.00", "4", "retire", "1", "–", "–", "0.250"),
        ("5.00", "5", "found", "–", "3 (0)", "0.500", "0.250"),
    )


def test_moves_are_counted_by_client() -> None:
    table = moves_table(RunRecord.of(CHANGES))
    assert table is not None
    assert table.rows == (("b", "2"), ("a", "1"))
    assert moves_table(RunRecord.of(CHANGES[:5])) is None


def test_members_are_listed_where_their_weight_is_largest() -> None:
    found = final_clusters(RunRecord.of(CHANGES[:7]))
    assert found is not None
    assert [(m.cluster, m.clients, m.counts, m.weight) for m in found.clusters] == [
        (1, (), (0, 0), 0.3),
        (2, ("a", "b", "c"), (2, 1), 2.7),
    ]
    assert (found.shared, found.without) == (1, 0)


def test_groups_that_change_with_the_data_are_those_of_the_last_evaluation() -> None:
    # Until then a and b are of group 0, c of group 1.
    tested = Evaluated(5.5, 5, 0.5, 1.0, 2, {}, groups={"a": 1, "c": 0})
    record = RunRecord.of([*CHANGES[:7], tested, RunEnded(6.0, 6, "so")])
    assert record.groups == {"a": 1, "b": 0, "c": 0}
    found = final_clusters(RunRecord.of([*CHANGES[:5], tested]))
    assert found is not None
    assert [(m.cluster, m.clients, m.counts) for m in found.clusters] == [
        (1, ("a", "b"), (1, 1)),
        (2, ("c",), (1, 0)),
    ]
    assert {row[0]: row[1] for row in clients_table(record).rows} == {"a": "1", "b": "0", "c": "0"}


def test_a_run_with_one_cluster_has_no_members_to_list() -> None:
    assert final_clusters(RunRecord.of(CHANGES[:4])) is None
    assert changes_table(RunRecord.of(CHANGES[:4])) is None


def test_a_client_of_several_clusters_is_shown_with_its_weights() -> None:
    rows = {row[0]: row[2] for row in clients_table(RunRecord.of(CHANGES[:7])).rows}
    assert rows == {"a": "2", "b": "2 (0.70), 1 (0.30)", "c": "2"}


def evaluated(time: float, accuracy: dict[str, float], step: int | dict[str, int] = 0) -> Evaluated:
    scores = {client: (0, value, 1.0) for client, value in accuracy.items()}
    steps = step if isinstance(step, dict) else dict.fromkeys(accuracy, step)
    return Evaluated(time, int(time), 0.5, 1.0, 1, scores, len(scores), steps)


def update(seq: int, step: int) -> UpdateApplied:
    return UpdateApplied(seq, float(seq), "a", 0, 0, 0, 0.5, 0.0, 1.0, 10, 10, step=step)


DRIFT: list[Event] = [
    evaluated(1.0, {"a": 0.25, "b": 0.5}),
    evaluated(2.0, {"a": 0.75, "b": 1.0}),
    update(1, 0),
    DataChanged(3.0, 3, None, 1),
    evaluated(3.5, {"a": 0.25, "b": 0.25}, 1),
    update(2, 1),
    update(3, 1),
    evaluated(4.0, {"a": 0.75, "b": 1.0}, 1),
    DataChanged(5.0, 5, "b", 2),
    evaluated(6.0, {"a": 1.0, "b": 0.5}, {"a": 1, "b": 2}),
    RunEnded(7.0, 7, "so"),
]


def test_accuracy_before_and_after_each_drift() -> None:
    table = drifts_table(RunRecord.of(DRIFT))
    assert table is not None
    assert table.rows == (
        # The mean of 0.75 and 1; the same again at 4 s.
        ("3.00", "3", "all clients", "1", "0.875", "0.250", "1.0"),
        # Of b alone, which is not back.
        ("5.00", "5", "1 client", "2", "1.000", "0.500", "not"),
    )


def test_a_drift_is_not_overcome_after_the_next_one() -> None:
    events = [*DRIFT[:5], DataChanged(3.75, 3, None, 2), evaluated(4.0, {"a": 1.0, "b": 1.0}, 2)]
    table = drifts_table(RunRecord.of(events))
    assert table is not None
    assert table.rows[0][-1] == "not"


def test_a_drift_without_evaluations_has_dashes() -> None:
    table = drifts_table(RunRecord.of([DataChanged(3.0, 3, None, 1)]))
    assert table is not None
    assert table.rows == (("3.00", "3", "all clients", "1", "–", "–", "–"),)


def test_more_drifts_than_a_table_shows_are_told_by_step() -> None:
    many = [DataChanged(float(time), 0, "a", time) for time in range(1, 60)]
    record = RunRecord.of([*many, *DRIFT])
    assert drifts_table(record) is None
    table = steps_table(record)
    assert table is not None
    assert table.rows == (
        # Steps 0, 1 and 2: updates on it, tests on it, and their mean.
        ("0", "1", "4", "0.625"),
        ("1", "2", "5", "0.650"),
        ("2", "0", "1", "0.500"),
    )


def test_data_that_never_change_have_no_tables() -> None:
    record = RunRecord.of(DRIFT[:3])
    assert drifts_table(record) is None
    assert steps_table(record) is None


def test_costs_are_summed_up_by_device_and_for_all() -> None:
    def update(seq: int, client: str, seconds: float | None) -> UpdateApplied:
        return UpdateApplied(
            *(seq, float(seq), client, 0, 0, 0, 1.0, 0.0, 0.5, 100, 10 * seq),
            cpu_seconds=seconds,
        )

    joined = CHANGES[:3]
    told = [update(1, "a", 1.5), update(2, "b", 0.25), update(3, "a", 0.5)]
    table = costs_table(RunRecord.of([*joined, *told]))
    assert table is not None
    assert table.rows == (
        ("a", "2", "2.0", "200", "40"),
        ("b", "1", "0.2", "100", "20"),
        ("c", "0", "–", "0", "0"),
        ("all", "3", "2.2", "300", "60"),
    )
    assert costs_table(RunRecord.of([*joined, update(1, "a", None)])) is None
