"""What users' ClientApps measure, found by name and averaged by weight."""

from __future__ import annotations

import math

import pytest
from flwr.app import MetricRecord, RecordDict

from raceme.core.drop_in import (
    accuracy_name,
    examples_of,
    loss_name,
    mean_of_replies,
    shown,
    train_loss_name,
    weight_of,
)


@pytest.mark.parametrize(
    ("names", "accuracy", "loss"),
    [
        (["accuracy", "loss"], "accuracy", "loss"),
        (["eval_loss", "eval_acc", "num-examples"], "eval_acc", "eval_loss"),
        (["testAccuracy", "testLoss"], "testAccuracy", "testLoss"),
        (["val-acc", "val-loss"], "val-acc", "val-loss"),
        (["top1_accuracy", "test_accuracy"], "test_accuracy", None),
        (["top5_acc", "top1_acc"], "top5_acc", None),
        (["test_accuracy", "accuracy"], "accuracy", None),
        (["train_accuracy", "train_loss"], None, None),
        (["Accuracy", "cross_entropy_loss"], "Accuracy", "cross_entropy_loss"),
        (["f1", "rmse", "accelerations", "lossless"], None, None),
        (["accuracy_per_class_count", "num-examples"], None, None),
        ([], None, None),
    ],
)
def test_accuracy_and_loss_by_name(
    names: list[str], accuracy: str | None, loss: str | None
) -> None:
    metrics = dict.fromkeys(names, 0.5)
    assert accuracy_name(metrics) == accuracy
    assert loss_name(metrics) == loss


def test_a_list_is_no_accuracy() -> None:
    assert accuracy_name({"accuracy": [0.5, 0.6], "eval_accuracy": 0.5}) == "eval_accuracy"


def test_the_loss_of_the_training() -> None:
    assert train_loss_name({"loss": 1.0, "train_loss": 2.0}) == "train_loss"
    assert train_loss_name({"accuracy": 1.0, "loss": 2.0}) == "loss"
    assert train_loss_name({"accuracy": 1.0}) is None


def reply(**metrics: float | list[float]) -> RecordDict:
    return RecordDict({"metrics": MetricRecord(dict(metrics))})


def test_means_by_weight() -> None:
    replies = [
        reply(n=1, loss=1.0, both=[1.0, 2.0], odd=1.0),
        reply(n=3, loss=2.0, both=[5.0, 6.0]),
    ]
    assert mean_of_replies(replies, "n") == {"loss": 1.75, "both": [4.0, 5.0]}
    # Flower's own mean divides by 0 here.
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
