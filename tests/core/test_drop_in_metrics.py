"""Metrics of users' ClientApps: named by keys, and averaged by weight."""

from __future__ import annotations

import math

import pytest
from flwr.app import MetricRecord, RecordDict

from raceme.core.drop_in import (
    examples_of,
    mean_of_replies,
    named,
    shown,
    weight_of,
)


@pytest.mark.parametrize(
    ("key", "found"),
    [("", "accuracy"), ("eval_acc", "eval_acc"), ("top1", None), ("per_class", None)],
)
def test_a_metric_is_named_by_its_key_or_has_a_usual_name(key: str, found: str | None) -> None:
    metrics = {"eval_acc": 0.1, "per_class": [0.5, 0.6], "accuracy": 0.5}
    assert named(metrics, key, ("accuracy", "eval_acc")) == found


def test_a_name_that_only_resembles_a_usual_one_is_none() -> None:
    assert named({"test_accuracy": 0.5, "Accuracy": 0.5}, "", ("accuracy", "eval_acc")) is None


def reply(**metrics: float | list[float]) -> RecordDict:
    return RecordDict({"metrics": MetricRecord(dict(metrics))})


def test_means_by_weight() -> None:
    replies = [
        reply(n=1, loss=1.0, both=[1.0, 2.0], odd=1.0),
        reply(n=3, loss=2.0, both=[5.0, 6.0]),
    ]
    assert mean_of_replies(replies, "n") == {"loss": 1.75, "both": [4.0, 5.0]}
    # Flower's own mean would divide by 0.
    without = [reply(n=0, loss=1.0), reply(n=0, loss=2.0)]
    assert mean_of_replies(without, "n") == {"loss": 1.5}
    assert mean_of_replies([reply(n=1, a=[1.0]), reply(n=1, a=[1.0, 2.0])], "n") == {}


@pytest.mark.parametrize(
    ("stated", "weight"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (0, 0.0),
        (-1, None),
        (math.nan, None),
        ([1], None),
        (10**400, None),
    ],
)
def test_weights(stated: object, weight: float | None) -> None:
    assert weight_of({"n": stated}, "n") == weight


def test_shares_count_by_how_they_compare() -> None:
    assert [examples_of(weight, are_examples=True) for weight in (0.0, 0.2, 7.0)] == [0, 1, 7]
    assert examples_of(0.75, are_examples=False) == 3 * examples_of(0.25, are_examples=False)
    assert examples_of(0.0, are_examples=False) == 0


def test_metrics_for_people() -> None:
    told = shown({"eval_loss": 0.123456, "n": 10, "per_class": [0.5, 1.0]})
    assert told == "eval_loss 0.1235, n 10, per_class [0.5, 1]"
