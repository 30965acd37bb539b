"""The tables of a run's page: effects of drift, and costs."""

from __future__ import annotations

from raceme.core.events import (
    ClientJoined,
    DataChanged,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
)
from raceme.records.record import RunRecord
from raceme.reporting.run_page import costs_table, drifts_table, steps_table


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
        # The mean of 0.75 and 1, which is reached again at 4 s.
        ("3.00", "3", "all clients", "1", "0.875", "0.250", "1.0"),
        # For b alone, whose accuracy does not recover.
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
        # For steps 0, 1 and 2: updates, tests, and their mean.
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

    joined = [ClientJoined(0.0, name, 0, 10, None) for name in "abc"]
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
