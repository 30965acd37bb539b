"""What users' ClientApps measure: under any names, with any weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from flwr.app import MetricRecord, RecordDict

Metrics = Mapping[str, object]

_WORDS = re.compile(r"[^a-z0-9]+")
_TESTED = ("eval", "evaluate", "evaluation", "test", "val", "valid", "validation")
_SCALE = 1_000_000
"""What a weight of 1 counts as, where weights are no numbers of examples."""


def accuracy_name(metrics: Metrics) -> str | None:
    """Return the name of the metric that is an accuracy; None if there is none.

    One that is called so alone comes before one that says on what it was measured, and that
    before any other that ends so; one of the training is none.
    """
    return _named(metrics, ("accuracy", "acc"))


def loss_name(metrics: Metrics) -> str | None:
    """Return the name of the metric that is a loss; None if there is none."""
    return _named(metrics, ("loss",))


def train_loss_name(metrics: Metrics) -> str | None:
    """Return the name of the metric that is the loss of the training; None if there is none."""
    for name in metrics:
        if _words(name) in (["train", "loss"], ["training", "loss"]):
            return name
    return _named(metrics, ("loss",))


def _named(metrics: Metrics, wanted: tuple[str, ...]) -> str | None:
    """Return the number whose name ends with a word, the plainest name first."""
    found: dict[int, str] = {}
    for name, value in metrics.items():
        words = _words(name)
        if not isinstance(value, int | float) or words[-1] not in wanted:
            continue
        if any(word in ("train", "training") for word in words):
            continue
        rank = 0 if len(words) == 1 else 1 if words[-2] in _TESTED else 2
        found.setdefault(rank, name)
    return found[min(found)] if found else None


def _words(name: str) -> list[str]:
    """Return the words of a name: ``evalAcc``, ``eval_acc`` and ``eval-acc`` have the same."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in _WORDS.split(apart.lower()) if word] or [""]


def examples_of(weight: float, are_examples: bool) -> int:
    """Return the number of examples that a client counts as having.

    Parameters
    ----------
    weight : float
        What it states: finite, at least 0.
    are_examples : bool
        Whether the weights are numbers of examples. Others may be shares of 1: what counts is how
        they compare.
    """
    scaled = weight if are_examples else weight * _SCALE
    return max(1, round(scaled)) if weight > 0 else 0


def mean_of_replies(contents: Sequence[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return the mean of each metric that all replies have, by weight.

    Where all weights are 0 all replies count alike. Lists are averaged number by number, if they
    are of one length.

    Parameters
    ----------
    contents : Sequence[RecordDict]
        Replies, each with one MetricRecord.
    weighted_by_key : str
        The metric that is the weight, and no part of the result.
    """
    records = [next(iter(content.metric_records.values())) for content in contents]
    weights = [weight_of(record, weighted_by_key) or 0.0 for record in records]
    total = math.fsum(weights)
    if not total:
        weights, total = [1.0] * len(records), float(len(records))
    means = MetricRecord()
    for name, first in records[0].items() if records else ():
        values = [record.get(name) for record in records]
        if name == weighted_by_key:
            continue
        if isinstance(first, list):
            if all(isinstance(value, list) and len(value) == len(first) for value in values):
                columns = zip(*values, strict=True)
                means[name] = [_mean(column, weights, total) for column in columns]
        elif len(numbers := [v for v in values if isinstance(v, int | float)]) == len(values):
            means[name] = _mean(numbers, weights, total)
    return means


def weight_of(metrics: Metrics, weighted_by_key: str) -> float | None:
    """Return the weight that a client states; None if it is no number of at least 0."""
    stated = metrics.get(weighted_by_key)
    if not isinstance(stated, int | float):
        return None
    try:
        weight = float(stated)
    except OverflowError:
        return None
    return weight if math.isfinite(weight) and weight >= 0 else None


def _mean(values: Sequence[float], weights: Sequence[float], total: float) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def shown(metrics: Metrics) -> str:
    """Return metrics for people: ``eval_loss 0.4123, eval_acc 0.8712``."""
    return ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_number(each) for each in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
