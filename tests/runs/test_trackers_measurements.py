"""Measurements for trackers, by hand."""

from __future__ import annotations

import math

import pytest

from raceme.core.events import Evaluated, Event, Measure, UpdateApplied, UpdateRejected
from raceme.records.summary import RunSummary
from raceme.runs.trackers import Measurements, final

ERROR = Measure("mean_absolute_error")


def update(seq: int, staleness: int, loss: float) -> UpdateApplied:
    return UpdateApplied(seq, float(seq), "a", 0, 0, staleness, 0.5, 0.0, loss, 100, 10)


def test_an_evaluation_says_what_is_known_since_the_last() -> None:
    summary = RunSummary()
    measurements = Measurements(summary)

    def observe(event: Event) -> None:
        summary.observe(event)
        measurements(event)

    for event in (update(1, 0, 1.0), update(2, 3, 2.0), UpdateRejected(2.5, "b", "why", 0.0)):
        observe(event)
    clients = {f"c{n}": (n % 2, n / 20, 1.0) for n in range(20)}
    found = measurements.of(Evaluated(3.0, 2, 0.475, 1.25, 2, clients, 20))
    assert found == pytest.approx(
        {
            "accuracy": 0.475,
            # The lowest two of twenty: 0 and 0.05.
            "worst_tenth_accuracy": 0.025,
            "loss": 1.25,
            "clusters": 2.0,
            "clients_answered": 20.0,
            "rejected_updates": 1.0,
            "bytes_up": 20.0,
            "bytes_down": 200.0,
            "virtual_time": 3.0,
            "staleness": 1.5,
            "train_loss": 1.5,
            # Even clients: 0, 0.1, … 0.9; odd ones 0.05 more.
            "cluster_0_accuracy": 0.45,
            "cluster_1_accuracy": 0.5,
        }
    )
    observe(update(3, 6, 4.0))
    later = measurements.of(Evaluated(4.0, 3, 0.5, 1.0, 1))
    assert (later["staleness"], later["train_loss"], later["bytes_up"]) == (6.0, 4.0, 30.0)


def test_the_largest_errors_are_the_worst() -> None:
    clients = {f"c{n}": (0, float(n), 1.0) for n in range(10)}
    event = Evaluated(1.0, 1, 4.5, 1.0, 1, clients, 10, measure=ERROR)
    assert Measurements(RunSummary()).of(event)[f"worst_tenth_{ERROR.name}"] == 9.0


def test_values_that_are_not_finite_are_left_out() -> None:
    found = Measurements(RunSummary()).of(Evaluated(1.0, 1, math.nan, math.inf, 1))
    assert "accuracy" not in found
    assert "loss" not in found
    assert final({"a": 1, "b": math.nan, "c": True, "d": "x", "e": None}) == {"a": 1.0}
