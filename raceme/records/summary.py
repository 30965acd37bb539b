"""Summary of a run, collected during the run and written as ``summary.json`` at its end."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

import raceme
from raceme.core import events
from raceme.core.events import (
    ACCURACY,
    Event,
    EventHandler,
    Measure,
    Membership,
    Placement,
    Verdict,
    grouped,
    home,
)
from raceme.core.files import atomic_write
from raceme.flower import installed_flower
from raceme.records.store import plain

# -----------------------------------------------------------------------------
# Convergence of a run's accuracy.
# -----------------------------------------------------------------------------


def convergence_index(accuracies: Sequence[float], measure: Measure = ACCURACY) -> int | None:
    """Return the evaluation from which the accuracy stays near its final value.

    Papers report times to convergence without a rule; this one needs no smoothing and is
    independent of the evaluation interval.

    Parameters
    ----------
    accuracies : Sequence[float]
        Mean client accuracy, or mean absolute error, of each evaluation, in their order.
    measure : Measure
        Measure of the numbers; near means within a point of accuracy, or 1 % of the final error
        (our rule).

    Returns
    -------
    int or None
        Index of the first of the last evaluations that are all near; None if there are none, or
        if the run diverged.
    """
    values = np.asarray(accuracies, np.float64)
    if not values.size or not np.isfinite(values[-1]):
        return None
    # With a tolerance for rounding: 0.95 is within a point of 0.94. NaN is never near.
    away = ~(np.abs(values - values[-1]) <= measure.tolerance(float(values[-1])) + 1e-9)
    return int(np.max(np.flatnonzero(away), initial=-1)) + 1


def unrest(accuracies: Sequence[float], measure: Measure = ACCURACY) -> float | None:
    """Return the mean distance of the accuracy from its best so far.

    0 for a monotonic curve; larger for oscillations, or drops when clients change clusters.

    Parameters
    ----------
    accuracies : Sequence[float]
        Mean client accuracy, or mean absolute error, of each evaluation, in their order.
    measure : Measure
        Measure of the numbers: accuracies, or errors in a unit.

    Returns
    -------
    float or None
        In [0, 1], or of errors in their unit; None if there are no finite accuracies.
    """
    values = np.asarray(accuracies, np.float64)
    values = values[np.isfinite(values)]
    return float(np.mean(measure.shortfall(values))) if values.size else None


# -----------------------------------------------------------------------------
# Accuracy over the steps of a drift.
# -----------------------------------------------------------------------------


class StepAccuracies:
    """The first and last evaluation of each step, as an observer of evaluations."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def observe(self, event: events.Evaluated) -> None:
        """Process an evaluation, whose step is the latest of any client."""
        step = max(event.steps.values(), default=0)
        if step in self._first:
            self._last[step] = float(event.accuracy)
        else:
            self._first[step] = float(event.accuracy)

    def result(self, measure: str = "accuracy") -> dict[str, float | None]:
        """Return the means over the steps for JSON; None without drift.

        Parameters
        ----------
        measure : str
            Name of the measure for the keys: ``"accuracy"`` or ``"mae"``.

        Notes
        -----
        With the key ``eval-steps``, the first evaluation of a step tests models that have not been
        trained on its data (prequential evaluation); step 0 has no such models. The last evaluation
        tests models trained on it. A step that was tested only once has no last evaluation.
        """
        starts = [accuracy for step, accuracy in self._first.items() if step]
        ends = list(self._last.values()) if starts else []
        return {
            f"{measure}_at_step_starts": finite(sum(starts) / len(starts)) if starts else None,
            f"{measure}_at_step_ends": finite(sum(ends) / len(ends)) if ends else None,
        }


# -----------------------------------------------------------------------------
# Summaries of methods' own measures, as declared by their schemas.
# -----------------------------------------------------------------------------


LONG = (30, 50)
"""Percentages above which shares are counted."""


class Measures(EventHandler):
    """Summarises methods' measures, as an observer of the run."""

    def __init__(self) -> None:
        self._last: dict[str, events.Measured] = {}
        self._values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def on_measured(self, event: events.Measured) -> None:
        """Process a measurement."""
        self._last[event.name] = event
        if event.schema.summary in ("mean", "max", "shares"):
            for key, value in event.numbers().items():
                if math.isfinite(value):
                    self._values[event.name][str(key)].append(value)

    def result(self) -> dict[str, Any]:
        """Return the summary of the measures for JSON.

        ``measures`` has title, unit and value of each measure by name. Shares, and measures
        summarised by column, are keys of their own.
        """
        measures, found = {}, dict[str, Any]()
        for name, event in sorted(self._last.items()):
            schema, values = event.schema, self._values[name]
            match schema.summary:
                case "none":
                    continue
                case "column":
                    found[schema.value] = _ordered(event.value)
                    continue
                case "shares":
                    found |= _shares_of(name, [x for own in values.values() for x in own])
                    continue
                case "last":
                    value = _ordered(event.value)
                case kind:
                    numbers = {
                        key: max(own) if kind == "max" else sum(own) / len(own)
                        for key, own in sorted(values.items())
                    }
                    value = numbers if schema.per else numbers.get("")
            measures[name] = {"title": schema.title, "unit": schema.unit, "value": value}
        return {**found, **({"measures": measures} if measures else {})}


def _ordered(value: Any) -> Any:
    """Convert a measured value to JSON, with sorted keys."""
    return plain(dict(sorted(value.items())) if isinstance(value, Mapping) else value)


def _shares_of(name: str, shares: Sequence[float]) -> dict[str, float]:
    """Return the mean of shares, and the frequency of large ones."""
    often = {
        f"{name}_over_{percent}_percent": sum(x > percent / 100 for x in shares) / len(shares)
        for percent in LONG
    }
    return {f"{name}_share_mean": sum(shares) / len(shares), **often}


# -----------------------------------------------------------------------------
# Traffic of a run by phase of the method.
# -----------------------------------------------------------------------------


class Traffic(EventHandler):
    """The traffic of updates and answers, as an observer of the run.

    Attributes
    ----------
    phases : dict[str, dict[str, int]]
        By phase in order of start: ``down`` and ``up``, the bytes of arrays to and from clients,
        and ``messages``, the answered requests.
    """

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, int]] = {}

    def on_update_applied(self, event: events.UpdateApplied | events.AnswerTaken) -> None:
        """Add the bytes and the message of a request to its phase."""
        phase = self.phases.setdefault(event.phase, {"down": 0, "up": 0, "messages": 0})
        phase["down"] += int(event.bytes_down)
        phase["up"] += int(event.bytes_up)
        phase["messages"] += 1

    on_answer_taken = on_update_applied

    def total(self, way: str) -> int:
        """Return the bytes of all phases, ``"down"`` or ``"up"``."""
        return sum(phase[way] for phase in self.phases.values())


# -----------------------------------------------------------------------------
# Forgetting of former tasks, and transfer to future ones.
#
# A task is a step of the data that change. R[t, j] is the accuracy on the test data of step j
# after step t, the mean over the clients that tested it. The numbers that follow from it are
# those of Lopez-Paz and Ranzato, *Gradient Episodic Memory for Continual Learning*, NeurIPS 2017
# (average accuracy, backward and forward transfer), and of Chaudhry et al., *Riemannian Walk for
# Incremental Learning*, ECCV 2018 (forgetting). T is the last step, counted from 0.
# -----------------------------------------------------------------------------


Floats = NDArray[np.float64]


class TaskAccuracies(EventHandler):
    """The matrix R of a run and derived measures, as an observer of the run.

    Repeated tests of a client on a step, e.g. at the end of an extended run, replace earlier ones.

    Attributes
    ----------
    measure : Measure
        Measure of the tests; signs of errors are inverted, so that positive forgetting is bad and
        positive transfer good.
    """

    def __init__(self, tests: Iterable[events.TasksTested] = ()) -> None:
        self.measure: Measure = ACCURACY
        self._scores: defaultdict[int, dict[str, dict[int, events.TaskScore]]] = defaultdict(dict)
        self._clusters: dict[int, int] = {}
        for event in tests:
            self(event)

    def on_tasks_tested(self, event: events.TasksTested) -> None:
        """Process tests."""
        self.measure = event.measure
        self._clusters[event.step] = event.clusters
        self._scores[event.step].update(
            {client: dict(scores) for client, scores in event.per_client.items()}
        )

    @property
    def count(self) -> int:
        """Number of trained steps, T + 1; 0 without tests."""
        return max(self._scores, default=-1) + 1

    @property
    def clusters(self) -> list[int | None]:
        """Number of cluster models after each step; None if not tested."""
        return [self._clusters.get(step) for step in range(self.count)]

    def matrix(self) -> Floats:
        """Return R, shape (T + 1, T + 1), with NaN for untested entries."""
        return self._means("accuracy")

    def untrained(self) -> Floats:
        """Return the accuracy of the model before any training on each step, shape (T + 1,).

        Tested together with R[j − 1, j] by the same clients; NaN for step 0.
        """
        means = self._means("untrained")
        return np.array([math.nan, *np.diagonal(means, 1)])[: self.count]

    def result(self, measure: str = "accuracy") -> dict[str, Any]:
        """Return the matrix and derived measures for JSON.

        Parameters
        ----------
        measure : str
            Name of the measure for the keys: ``"accuracy"`` or ``"mae"``.
        """
        names = (f"average_{measure}", f"current_{measure}")
        if not self.count:
            keys = (f"task_{measure}", *names, *_LEARNT, "clusters_after_steps")
            return dict.fromkeys(keys)
        matrix = self.matrix()
        return {
            f"task_{measure}": [[finite(value) for value in row] for row in matrix],
            names[0]: _mean(matrix[-1]),
            names[1]: _mean(np.diagonal(matrix)),
            **self._learnt(matrix),
            "clusters_after_steps": self.clusters,
        }

    def _learnt(self, matrix: Floats) -> dict[str, float | None]:
        """Return forgetting and transfers of the matrix R."""
        gains = -matrix if self.measure.is_error else matrix
        before = -self.untrained() if self.measure.is_error else self.untrained()
        former, last = gains[:-1, :-1], gains[-1, :-1]
        best = np.fmax.reduce(former, axis=0) if len(former) else np.empty(0)
        learnt = {
            "forgetting": best - last,
            "backward_transfer": last - np.diagonal(former),
            "forward_transfer": np.diagonal(gains, 1) - before[1:],
        }
        return {name: _mean(learnt[name]) for name in _LEARNT}

    def _means(self, quantity: str) -> Floats:
        """Return the mean of a quantity over the clients, after each step and on each one."""
        means = np.full((self.count, self.count), np.nan)
        for after, per_client in self._scores.items():
            tests = (test for scores in per_client.values() for test in scores.items())
            values = ((step, getattr(score, quantity)) for step, score in tests)
            known = ((step, value) for step, value in values if value is not None)
            for step, own in grouped(known).items():
                if step < self.count:
                    means[after, step] = fmean(own)
        return means


_DIVERGED = 10.0
"""A loss this many times that of the untrained models counts as diverged."""
_LEARNT = ("forgetting", "backward_transfer", "forward_transfer")


def _mean(values: Floats) -> float | None:
    """Return the mean of the finite values; None without any."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


# -----------------------------------------------------------------------------
# Single uploads: scores and estimates of mixtures.
#
# The measures of Li and Zhu, "Towards Client Driven Federated Learning": the accuracies of a
# client's uploaded model and of the model returned for it, on the same data, and the divergence of
# the true mixture of these data from the client's cluster weights.
# -----------------------------------------------------------------------------


FLOOR = 1e-12
"""Minimum estimated share, which keeps divergences finite."""


@dataclass
class Upload:
    """An update with scores or a stated mixture.

    Attributes
    ----------
    seq : int
        Sequence number of the update in the run.
    session : int
        Number of its session, from 1.
    before, after : float or None
        Accuracy of the uploaded and the returned model on the test data of the upload; the latter
        is known at the client's next upload.
    mixture : tuple[float, ...]
        True share of each distribution in the data.
    estimate : Mapping[int, float]
        Cluster weights of the client after the update.
    """

    seq: int
    client: str
    session: int
    before: float | None
    after: float | None
    mixture: tuple[float, ...]
    estimate: Mapping[int, float]


class Uploads(EventHandler):
    """Collects the uploads and counts the sessions of a run, as an observer.

    In a session, every online client uploads at least once.

    Parameters
    ----------
    membership : Membership
        Membership of clients, which must process events first.

    Attributes
    ----------
    session_ends : list[int]
        Last update of each session.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rows: list[Upload] = []
        self._latest: dict[str, Upload] = {}
        self._after: dict[str, float] = {}
        # Uploads whose estimate follows with later cluster changes.
        self._open: list[Upload] = []
        self._changed = False
        self._identified = False
        self._online: set[str] = set()
        self._missing: set[str] = set()
        self.session_ends: list[int] = []

    def observe(self, event: Event) -> None:
        """Process an event."""
        if not isinstance(event, events.UpdateApplied | events.ClustersChanged):
            self._close()
        self(event)

    def on_clusters_changed(self, event: events.ClustersChanged) -> None:
        """Record that estimates may have changed."""
        self._changed = bool(self._open)

    def on_client_joined(self, event: events.ClientJoined) -> None:
        """Expect an upload of this client in the session."""
        if event.client not in self._online:
            self._missing.add(event.client)
        self._online.add(event.client)

    def on_client_left(self, event: events.ClientLeft) -> None:
        """Expect no upload of this client."""
        self._online.discard(event.client)
        self._missing.discard(event.client)

    def on_clusters_scored(self, event: events.ClustersScored) -> None:
        """Record that cluster k corresponds to distribution k."""
        self._identified = True

    @property
    def rows(self) -> Sequence[Upload]:
        """The uploads with scores or mixtures, in order."""
        self._close()
        return self._rows

    @property
    def accuracy_before(self) -> float | None:
        """Mean over the clients of the latest accuracy of an upload; None without any."""
        return _mean_of(row.before for row in _last_of_each(self._rows, "before"))

    @property
    def accuracy_after(self) -> float | None:
        """Mean over the clients of the latest accuracy of a returned model; None without any.

        It is measured at a client's next training, so for its last upload but one.
        """
        return _mean_of(self._after.values())

    def matched(self) -> dict[int, int]:
        """Return the distribution of each cluster.

        With tests on the server, cluster k has distribution k; otherwise the assignment minimises
        the divergence over the run. Clusters without a distribution are left out.
        """
        known = self._compared()
        clusters = sorted({cluster for row in known for cluster in row.estimate})
        if self._identified or not known:
            return {cluster: cluster for cluster in clusters}
        return matching(clusters, [(row.mixture, row.estimate) for row in known])

    def unmatched(self) -> list[int]:
        """Return the distributions without a cluster.

        Empty for methods with one cluster per client.
        """
        known = self._mixed()
        return _missing(known, self.matched()) if known else []

    def divergences(self) -> list[tuple[Upload, float]]:
        """Return KL(true ‖ estimated) of every upload with both known.

        Empty for methods with one cluster per client, which estimate no mixture, and if
        distributions are `unmatched`, whose estimates are unknown.
        """
        known = self._mixed()
        of = self.matched() if known else {}
        if _missing(known, of):
            return []
        return [(row, divergence(row.mixture, shares(row.estimate, of, row))) for row in known]

    def _compared(self) -> list[Upload]:
        """Return the uploads with known true and estimated mixtures."""
        return [row for row in self.rows if row.mixture and row.estimate]

    def _mixed(self) -> list[Upload]:
        """Return the uploads with mixtures; none if every client is in a single cluster."""
        known = self._compared()
        return known if any(len(row.estimate) > 1 for row in known) else []

    def result(self) -> dict[str, object]:
        """Return the entries of the summary; None for unknown numbers.

        ``mixture_divergence`` is the mean over the last third of the uploads.
        """
        found = self.divergences()
        late = [value for _, value in found[-math.ceil(len(found) / 3) :]] if found else []
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "mixture_divergence": _mean_of(late),
            "sessions": self._sessions(found) if self._rows else None,
        }

    def curve(self, quantity: str) -> list[tuple[int, float]]:
        """Return the last update of each session, and the session's mean of a quantity, if known.

        Parameters
        ----------
        quantity : str
            ``"before"``, ``"after"`` or ``"divergence"``.
        """
        if quantity == "divergence":
            means = self._mean_divergences(self.divergences())
        else:
            means = self.by_session(quantity)
        points = zip(self.session_ends, means, strict=True)
        return [(end, mean) for end, mean in points if mean is not None]

    def by_session(self, quantity: str) -> list[float | None]:
        """Return the mean of ``"before"`` or ``"after"`` over the clients, in each whole session.

        If a client has several uploads, the last one counts. The mean is None if fewer than nine
        tenths of the clients have the quantity, as in the last session, whose returned models are
        tested later.
        """
        by_session = grouped((row.session, row) for row in self.rows)
        means = []
        for number in range(1, len(self.session_ends) + 1):
            rows = by_session.get(number, [])
            known = [getattr(row, quantity) for row in _last_of_each(rows, quantity)]
            enough = 10 * len(known) >= 9 * len({row.client for row in rows})
            means.append(_mean_of(known) if enough else None)
        return means

    def _sessions(self, divergences: Sequence[tuple[Upload, float]]) -> dict[str, object]:
        return {
            "updates": list(self.session_ends),
            "accuracy_before": self.by_session("before"),
            "accuracy_after": self.by_session("after"),
            "mixture_divergence": self._mean_divergences(divergences),
        }

    def _mean_divergences(self, divergences: Sequence[tuple[Upload, float]]) -> list[float | None]:
        """Return the mean of the uploads of each session."""
        known = grouped((row.session, value) for row, value in divergences)
        return [_mean_of(known.get(n, ())) for n in range(1, len(self.session_ends) + 1)]

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Add an upload with scores or a mixture; end the session after the last missing client."""
        if self._changed:
            self._close()
        client, session = event.client, len(self.session_ends) + 1
        if event.accuracy_after is not None:
            self._after[client] = event.accuracy_after
            if client in self._latest:
                self._latest[client].after = event.accuracy_after
        if event.mixture or event.accuracy_before is not None:
            row = Upload(event.seq, client, session, event.accuracy_before, None, event.mixture, {})
            self._rows.append(row)
            self._latest[client] = row
            self._open.append(row)
        else:
            # The client's next statement about its last upload refers to this one.
            self._latest.pop(client, None)
        self._missing.discard(client)
        if not self._missing:
            self.session_ends.append(event.seq)
            self._missing = set(self._online)

    def _close(self) -> None:
        for row in self._open:
            row.estimate = self._membership.weights.get(row.client, {})
        self._open, self._changed = [], False


def divergence(true: Sequence[float], estimate: Sequence[float]) -> float:
    """Return KL(true ‖ estimate) = Σ p log(p / q) of two mixtures, in nats.

    Parameters
    ----------
    true : Sequence[float]
        Shares p; a share of 0 contributes 0.
    estimate : Sequence[float]
        Shares q of the same distributions, at least 1e-12.
    """
    from scipy.special import rel_entr

    return float(rel_entr(true, np.maximum(estimate, FLOOR)).sum())


def shares(estimate: Mapping[int, float], of: Mapping[int, int], row: Upload) -> list[float]:
    """Return the estimated share of each distribution of an upload.

    Parameters
    ----------
    estimate : Mapping[int, float]
        Weight of each cluster for the client, as the method estimates it.
    of : Mapping[int, int]
        Distribution of each cluster.
    row : Upload
        The upload, whose true mixture determines the number of distributions.
    """
    found = [0.0] * len(row.mixture)
    for cluster, weight in estimate.items():
        position = of.get(cluster)
        if position is not None and position < len(found):
            found[position] += weight
    return found


def matching(
    clusters: Sequence[int], pairs: Sequence[tuple[Sequence[float], Mapping[int, float]]]
) -> dict[int, int]:
    """Return the distribution of each cluster, so that the divergence is least.

    The sum of KL(true ‖ estimated) is Σ_j cost[j, k(j)] plus a constant, with cost[j, k] =
    −Σ p_j log q_k over the uploads: an assignment problem.

    Parameters
    ----------
    clusters : Sequence[int]
        Ids of all clusters that occur in the estimates.
    pairs : Sequence
        True mixture and estimated weights by cluster, of each upload.

    Returns
    -------
    dict[int, int]
        Cluster to distribution, one to one; without clusters that get no distribution.
    """
    count = max(len(true) for true, _ in pairs)
    true = np.array([[*mixture, *[0.0] * (count - len(mixture))] for mixture, _ in pairs])
    weights = np.array([[estimate.get(k, 0.0) for k in clusters] for _, estimate in pairs])
    # A distribution may get no cluster, at the cost of an estimate of 0.
    weights = np.hstack([weights, np.zeros((len(pairs), count))])
    cost = -true.T @ np.log(np.maximum(weights, FLOOR))
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost)
    return {
        clusters[column]: int(row)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        if column < len(clusters)
    }


def _missing(known: Sequence[Upload], of: Mapping[int, int]) -> list[int]:
    """Return the distributions of some uploads that have no cluster."""
    count = max((len(row.mixture) for row in known), default=0)
    return sorted(set(range(count)) - set(of.values()))


def _last_of_each(rows: Iterable[Upload], quantity: str) -> Iterable[Upload]:
    """Return the last upload of each client that has a quantity."""
    return {row.client: row for row in rows if getattr(row, quantity) is not None}.values()


def _mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# -----------------------------------------------------------------------------
# Summary of a run, collected during the run and written as ``summary.json`` at its end.
# -----------------------------------------------------------------------------


def time_to_target(
    evaluations: Iterable[events.Evaluated], target: float | None
) -> dict[str, float | int] | None:
    """Find the first evaluation that counts and is as good as a target.

    Returns
    -------
    dict or None
        ``target``, ``virtual_time`` in seconds and ``updates``; None if the target was never
        reached, or if there is none.
    """
    if target is None:
        return None
    for evaluation in evaluations:
        if evaluation.counts and evaluation.measure.reaches(evaluation.accuracy, target):
            return {
                "target": float(target),
                "virtual_time": float(evaluation.time),
                "updates": int(evaluation.updates),
            }
    return None


_MOST_REASONS, _MOST_TOLD = 1000, 5
"""Maximum numbers of distinct reasons of rejections: counted, and in the summary."""


class RunSummary(EventHandler):
    """The numbers of a run so far, an observer of it.

    Parameters
    ----------
    attackers : Collection[str]
        Attacking clients, if known.

    Attributes
    ----------
    time : float
        Time of the latest event in seconds.
    updates, rejected : int
        Numbers of applied updates, and of unused replies.
    rejections : Counter[str]
        Reasons of the unused replies, with counts.
    refused_claims : int
        Number of times that a node stated an id that is not that of its key.
    accuracy, best_accuracy : float or None
        Mean client accuracy of the latest evaluation, and of the best one that counts; None before
        the first. For a regression, here and below, the mean absolute error.
    worst_tenth : float or None
        Mean of the worst tenth of the clients in the latest evaluation.
    weighted_accuracy, best_weighted_accuracy : float or None
        The same, weighted by the clients' numbers of test examples. As in FlexCFL's paper the best
        one is among the evaluations since every tested client has a cluster, or among all if there
        are none.
    measure : Measure
        Measure of these numbers: accuracy, or error in a unit.
    asked, answered : int or None
        Numbers of clients that were queried in the latest evaluation, and that answered.
    traffic : Traffic
        Bytes of applied updates, and of answers to other work.
    clusters : int
        Number of cluster models now.
    moves : int
        Number of moves of clients to another cluster, without splits and merges.
    device_time : float
        Seconds from sending tasks to their replies, summed over all devices.
    membership : Membership
        Membership of clients in clusters.
    uploads : Uploads
        Scores of uploads and estimates of mixtures.
    cluster_scores : ClustersScored or None
        The latest test of the clusters' models on the server.
    tasks : TaskAccuracies
        Accuracies on the data of each step, after each step.
    measures : Measures
        The method's own measures.
    verdicts : VerdictSummary
        Verdicts on updates, and the accuracy of honest clients.
    compute : float
        Time at work of all clients on applied updates, with transfers, in seconds.
    passes : int or None
        Passes of single samples through a network, if clients state them.
    warnings : list[str]
        Warnings of the run.
    reason : str or None
        Reason of the run's end, in words; None before its end.
    ending : Ending or None
        The kind of end; None before it.
    """

    def __init__(self, attackers: Collection[str] = ()) -> None:
        self.time = 0.0
        self.updates = 0
        self.rejected = 0
        self.rejections: Counter[str] = Counter()
        self.refused_claims = 0
        self.accuracy: float | None = None
        self.best_accuracy: float | None = None
        self.worst_tenth: float | None = None
        self.weighted_accuracy: float | None = None
        self.best_weighted_accuracy: float | None = None
        self._best_of_all: float | None = None
        self._best_of_complete: float | None = None
        self.measure = ACCURACY
        self.asked: int | None = None
        self.answered: int | None = None
        self.traffic = Traffic()
        self.clusters = 0
        self.moves = 0
        self.device_time = 0.0
        self.membership = Membership()
        self.uploads = Uploads(self.membership)
        self.cluster_scores: events.ClustersScored | None = None
        self.tasks = TaskAccuracies()
        self.measures = Measures()
        self.verdicts = VerdictSummary(attackers)
        self.passes: int | None = None
        self.compute = 0.0
        self.has_drifted = False
        self.warnings: list[str] = []
        self.reason: str | None = None
        self.ending: events.Ending | None = None
        self._evaluations: list[events.Evaluated] = []
        self._pure_since: int | None = None
        self._steps = StepAccuracies()

    def observe(self, event: Event) -> list[Placement]:
        """Process an event; return the clients whose clusters or weights changed."""
        self.time = max(self.time, float(event.time))
        placements = self(event)
        self.uploads.observe(event)
        for part in (self.traffic, self.tasks, self.measures, self.verdicts):
            part(event)
        return placements or []

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Count an update and its work."""
        self.updates = int(event.seq)
        self.device_time += float(event.time - event.dispatched_at)
        self.compute += event.time - event.dispatched_at
        if event.passes is not None:
            self.passes = (self.passes or 0) + event.passes

    def on_update_rejected(self, event: events.UpdateRejected) -> None:
        """Count a reply that was not used."""
        self.rejected += 1
        # Limited, as reasons contain numbers: every reply may have a distinct one.
        if event.reason in self.rejections or len(self.rejections) < _MOST_REASONS:
            self.rejections[event.reason] += 1
        self.device_time += float(event.time - event.dispatched_at)

    def on_claim_refused(self, event: events.ClaimRefused) -> None:
        """Count a claim to an id of another key."""
        self.refused_claims += 1

    def on_clusters_scored(self, event: events.ClustersScored) -> None:
        """Store the latest test of the clusters' models."""
        self.cluster_scores = event

    def on_data_changed(self, event: events.DataChanged) -> None:
        """Record that clients' data have changed."""
        self.has_drifted = True

    def on_warned(self, event: events.Warned) -> None:
        """Store a warning."""
        self.warnings.append(event.text)

    def on_run_ended(self, event: events.RunEnded) -> None:
        """Record the time of the end; tasks may have timed out later."""
        self.reason, self.ending, self.time = event.reason, event.ending, float(event.time)

    def purity(self) -> float | None:
        """Return the clusters' current purity; None without known groups."""
        return self.membership.purity()

    def result(
        self,
        *,
        strategy: str,
        dataset: str,
        seed: int,
        wall_time: float,
        target: float | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """Return the summary of the run, ready for JSON.

        Parameters
        ----------
        strategy, dataset, model : str
            Names, as typed by the user.
        seed : int
            Seed of the run, from which all its randomness follows.
        wall_time : float
            Duration of the run on this machine, in seconds.
        target : float, optional
            Target accuracy; for a regression, the target error.
        """
        rate = self.updates / wall_time if wall_time > 0 else None
        name, scored = self.measure.name, self.cluster_scores
        of_clusters = {} if scored is None else scored.accuracies
        accuracies = [point.accuracy for point in self._evaluations]
        converged, index = None, convergence_index(accuracies, self.measure)
        if index is not None:
            reached = self._evaluations[index]
            converged = {"virtual_time": float(reached.time), "updates": int(reached.updates)}
        return {
            "strategy": strategy,
            "dataset": dataset,
            "model": model,
            "seed": int(seed),
            "clients": len(self.membership.groups),
            "reason": self.reason,
            "diverged": self._has_diverged(),
            "ending": None if self.ending is None else self.ending.value,
            "updates": self.updates,
            "virtual_time": self.time,
            "wall_time": float(wall_time),
            "updates_per_second": rate,
            "measure": name,
            "unit": self.measure.unit,
            name: finite(self.accuracy),
            f"best_{name}": finite(self.best_accuracy),
            f"worst_tenth_{name}": finite(self.worst_tenth),
            f"weighted_{name}": finite(self.weighted_accuracy),
            f"best_weighted_{name}": finite(self.best_weighted_accuracy),
            **self._steps.result(name),
            **self.tasks.result(name),
            "clients_asked": self.asked,
            "clients_answered": self.answered,
            "target": target,
            "time_to_target": time_to_target(self._evaluations, target),
            "time_to_convergence": converged,
            "unrest": unrest(accuracies, self.measure),
            "clusters": self.clusters,
            "cluster_sizes": {str(k): size for k, size in self.membership.sizes().items()},
            "moves": self.moves,
            "purity": self.purity(),
            "purity_reached_at_update": self._pure_since,
            "device_time": self.device_time,
            "bytes_up": self.traffic.total("up"),
            "bytes_down": self.traffic.total("down"),
            "bytes_by_phase": {phase: dict(of) for phase, of in self.traffic.phases.items()},
            "rejected_updates": self.rejected,
            "rejections": dict(self.rejections.most_common(_MOST_TOLD)),
            "refused_claims": self.refused_claims,
            **self.uploads.result(),
            "cluster_accuracy": None if scored is None else finite(scored.mean),
            "cluster_accuracies": {str(k): finite(a) for k, a in of_clusters.items()} or None,
            "sample_passes": self.passes,
            **self.measures.result(),
            **self.verdicts.result(target),
            **({"warnings": self.warnings} if self.warnings else {}),
            "versions": {
                "raceme": raceme.__version__,
                "flwr": installed_flower()[1],
                **{package: _version(package) for package in ("torch", "numpy")},
                "python": platform.python_version(),
            },
        }

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Process an evaluation."""
        accuracy, self.measure = float(event.accuracy), event.measure
        self.clusters = int(event.clusters)
        weighted = float(event.weighted_accuracy)
        self.accuracy, self.asked, self.answered = accuracy, int(event.asked), event.answered
        self.weighted_accuracy, self.worst_tenth = weighted, event.worst_tenth
        if event.groups:
            self.membership.observe(event)
            self._look_at_purity()
        if not event.counts:
            return
        self._steps.observe(event)
        # Stored without the clients' results, which may be many.
        self._evaluations.append(replace(event, per_client={}, asked=0, steps={}, groups={}))
        self.best_accuracy = self._better(accuracy, self.best_accuracy)
        self._best_of_all = self._better(weighted, self._best_of_all)
        if all(self.membership.weights.get(client) for client in event.per_client):
            self._best_of_complete = self._better(weighted, self._best_of_complete)
        else:
            # Clients without a cluster are tested with a model that is not trained for them.
            self._best_of_complete = None
        complete = self._best_of_complete
        self.best_weighted_accuracy = self._best_of_all if complete is None else complete

    def _has_diverged(self) -> bool:
        """Whether training diverged: the models are far worse than the untrained ones."""
        # NaN if no loss is reported, e.g. by a user's own app.
        losses = [point.loss for point in self._evaluations]
        if len(losses) < 2 or not math.isfinite(losses[0]):
            return False
        return not math.isfinite(losses[-1]) or losses[-1] > _DIVERGED * losses[0] > 0

    def _better(self, value: float, best: float | None) -> float | None:
        """Return the better value; NaN, which a diverged run may report, is ignored."""
        if math.isnan(value):
            return best
        return value if best is None else self.measure.better(best, value)

    def on_client_joined(self, event: events.ClientJoined) -> None:
        """Record the client's group."""
        self.membership.observe(event)
        self._look_at_purity()

    def on_clusters_changed(self, event: events.ClustersChanged) -> list[Placement]:
        """Count moves and the current clusters."""
        before = self.membership.weights
        if event.change is events.ClusterChange.MOVE:
            # Weights may change without a change of a client's main cluster.
            self.moves += sum(
                home(before.get(client, {})) != home(weights)
                for client, weights in event.memberships.items()
            )
        placements = self.membership.observe(event)
        # An evaluation also counts clusters without events, e.g. without members.
        changed = self.clusters + len(event.made) - len(event.gone)
        self.clusters = max(changed, len(self.membership.existing))
        self._look_at_purity()
        return placements

    def _look_at_purity(self) -> None:
        if self.purity() != 1.0:
            self._pure_since = None
        elif self._pure_since is None:
            self._pure_since = self.updates


def unlearned(summary: Mapping[str, Any]) -> str:
    """Return a remark if a run's models are no better than a constant guess; else empty."""
    measure = events.Measure.of(summary)
    guess, found = summary.get("constant_guess"), summary.get(measure.name)
    if guess is None or found is None or measure.better(found, guess) != guess:
        return ""
    what = "mean" if measure.is_error else "most frequent class"
    return f"no better than always predicting a client's {what}"


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary as indented JSON, atomically."""
    text = json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False)
    with atomic_write(path) as file:
        file.write_text(text + "\n", encoding="utf-8")


def finite(value: float | None) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON does not have."""
    return float(value) if value is not None and math.isfinite(value) else None


def _version(package: str) -> str | None:
    """Return the installed version of a package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -----------------------------------------------------------------------------
# Verdicts on updates, and the accuracy of honest clients.
# -----------------------------------------------------------------------------


class VerdictSummary(EventHandler):
    """Counts of accepted, scaled and refused updates by client, as an observer of the run.

    Parameters
    ----------
    attackers : Collection[str]
        Attacking clients, if known; they do not count for the honest accuracy.
    """

    def __init__(self, attackers: Collection[str] = ()) -> None:
        self.attackers = frozenset(attackers)
        self._counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
        self._excluded: dict[str, bool] = {}
        self._last: float | None = None
        self._worst: float | None = None
        self._measure = ACCURACY
        self._honest: list[events.Evaluated] = []

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Count an update that the method received."""
        self._counts[event.client][Verdict.ACCEPTED] += 1

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Record the mean over the honest clients."""
        if not self.attackers:
            return
        scores = [
            score for name, (_, score, _) in event.per_client.items() if name not in self.attackers
        ]
        self._last, self._measure = fmean(scores) if scores else None, event.measure
        worst = max if event.measure.is_error else min
        self._worst = worst(scores) if scores else None
        if event.counts and scores:
            found = events.Evaluated(
                event.time, event.updates, fmean(scores), math.nan, event.clusters
            )
            self._honest.append(replace(found, measure=event.measure))

    def on_update_judged(self, event: events.UpdateJudged) -> None:
        """Count a verdict on a client's update."""
        counts = self._counts[event.client]
        if event.verdict is Verdict.SCALED:
            # A scaled update is also reported as applied.
            counts[Verdict.SCALED] += 1
            counts[Verdict.ACCEPTED] -= 1
        elif event.verdict.is_withheld:
            counts[Verdict.REFUSED] += 1
        if event.verdict is Verdict.EXCLUDED:
            self._excluded[event.client] = True
        elif event.verdict is Verdict.READMITTED:
            self._excluded.pop(event.client, None)

    def result(self, target: float | None = None) -> dict[str, Any]:
        """Return entries of the run's summary; empty without attacks and verdicts.

        ``verdicts`` has the counts by client, ``excluded_clients`` those excluded at the end,
        ``attackers`` those that attacked, ``honest_accuracy`` the mean accuracy of all others at
        the last evaluation, ``worst_honest_accuracy`` the lowest, and ``honest_time_to_target`` the
        time at which it first reached the target.
        """
        found: dict[str, Any] = {}
        kinds = (Verdict.ACCEPTED, Verdict.SCALED, Verdict.REFUSED)
        if any(counts[kind] for counts in self._counts.values() for kind in kinds[1:]):
            found["verdicts"] = {
                client: {kind.value: counts[kind] for kind in kinds}
                for client, counts in sorted(self._counts.items())
            }
            found["excluded_clients"] = sorted(self._excluded)
        if self._last is not None:
            found["attackers"] = sorted(self.attackers)
            found[f"honest_{self._measure.name}"] = finite(self._last)
            found[f"worst_honest_{self._measure.name}"] = finite(self._worst)
            found["honest_time_to_target"] = time_to_target(self._honest, target)
        return found
