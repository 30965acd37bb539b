"""The numbers of a run: gathered during the run, written as ``summary.json`` at its end."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import raceme
from raceme.protocol.events import (
    AnswerTaken,
    ClaimRefused,
    ClientIdled,
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    ClustersScored,
    Ending,
    Evaluated,
    Event,
    RunEnded,
    SupportChanged,
    TasksTested,
    UpdateApplied,
    UpdateRejected,
)
from raceme.protocol.measure import ACCURACY, Measure
from raceme.records.convergence import convergence_index, unrest
from raceme.records.files import atomic_write
from raceme.records.idle import IdleShares
from raceme.records.membership import Membership, home, purity
from raceme.records.steps import StepAccuracies
from raceme.records.tasks import TaskAccuracies
from raceme.records.traffic import Traffic
from raceme.records.uploads import Uploads

__all__ = ["Evaluation", "RunSummary", "purity", "summarise", "time_to_target", "write_summary"]


class Evaluation(Protocol):
    """What the search for a target needs to know of an evaluation."""

    @property
    def time(self) -> float:
        """When, in seconds."""
        ...

    @property
    def updates(self) -> int:
        """Updates applied by then."""
        ...

    @property
    def accuracy(self) -> float:
        """Mean accuracy over the clients, or of a regression the mean absolute error."""
        ...

    @property
    def measure(self) -> Measure:
        """Which of the two."""
        ...

    @property
    def counts(self) -> bool:
        """Whether enough of the clients answered."""
        ...


@dataclass(frozen=True)
class _Point:
    """An evaluation that counts, without its clients."""

    time: float
    updates: int
    accuracy: float
    counts: bool = True
    measure: Measure = ACCURACY


def time_to_target(
    evaluations: Iterable[Evaluation], target: float | None
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


class RunSummary:
    """The numbers of a run so far, an observer of it.

    Attributes
    ----------
    time : float
        Time of the latest event in seconds.
    updates, rejected : int
        Updates applied, and replies that were not used.
    refused_claims : int
        How often a node stated an id that is not that of its key.
    accuracy, best_accuracy : float or None
        Mean client accuracy of the latest evaluation, and of the best one that counts; None
        before the first. Of a regression, here and below, the mean absolute error.
    weighted_accuracy, best_weighted_accuracy : float or None
        The same, weighted by the clients' numbers of test examples.
    measure : Measure
        What these are.
    asked, answered : int or None
        Clients that were asked in the latest evaluation, and of them those that answered.
    traffic : Traffic
        Bytes of the updates applied, and of the answers to other work.
    clusters : int
        Number of cluster models now.
    moves : int
        How often a client went to another cluster on its own, no cluster being split or merged.
    idle : IdleShares
        How much of windows clients spent waiting.
    membership : Membership
        Which client is in which clusters.
    uploads : Uploads
        How good uploads were, and how well mixtures were estimated.
    cluster_scores : ClustersScored or None
        The latest test of the clusters' models on the server.
    tasks : TaskAccuracies
        How accurate models are on the data of each step, after each step.
    supporters : Mapping[int, tuple[int, ...]] or None
        Clusters to those that support them now; None where no method says so.
    passes : int or None
        Passes of single samples through a network, where clients state them.
    reason : str or None
        Why the run ended, in words; None before its end.
    ending : Ending or None
        The kind of end; None before it.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.updates = 0
        self.rejected = 0
        self.refused_claims = 0
        self.accuracy: float | None = None
        self.best_accuracy: float | None = None
        self.weighted_accuracy: float | None = None
        self.best_weighted_accuracy: float | None = None
        self.measure = ACCURACY
        self.asked: int | None = None
        self.answered: int | None = None
        self.traffic = Traffic()
        self.clusters = 0
        self.moves = 0
        self.idle = IdleShares()
        self.membership = Membership()
        self.uploads = Uploads(self.membership)
        self.cluster_scores: ClustersScored | None = None
        self.tasks = TaskAccuracies()
        self.supporters: Mapping[int, tuple[int, ...]] | None = None
        self.passes: int | None = None
        self.reason: str | None = None
        self.ending: Ending | None = None
        self._evaluations: list[_Point] = []
        self._pure_since: int | None = None
        self._steps = StepAccuracies()

    def observe(self, event: Event) -> None:
        """Take note of an event."""
        self.time = max(self.time, float(event.time))
        if isinstance(event, UpdateApplied):
            self.updates = int(event.seq)
            self.traffic.observe(event)
            if event.passes is not None:
                self.passes = (self.passes or 0) + event.passes
        elif isinstance(event, Evaluated):
            self._observe_evaluation(event)
        elif isinstance(event, AnswerTaken):
            self.traffic.observe(event)
        elif isinstance(event, UpdateRejected):
            self.rejected += 1
        elif isinstance(event, ClaimRefused):
            self.refused_claims += 1
        elif isinstance(event, RunEnded):
            # Tasks that nobody was left to answer may have been given up later than this.
            self.reason, self.ending, self.time = event.reason, event.ending, float(event.time)
        elif isinstance(event, ClientIdled):
            self.idle.observe(event)
        elif isinstance(event, ClustersScored):
            self.cluster_scores = event
        elif isinstance(event, TasksTested):
            self.tasks.observe(event)
        elif isinstance(event, SupportChanged):
            self.supporters = event.supporters
        elif isinstance(event, ClustersChanged | ClientJoined):
            self._observe_clusters(event)
        self.uploads.observe(event)

    def purity(self) -> float | None:
        """Return the clusters' purity now; None if no true groups are known."""
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
            Names, as the user typed them.
        seed : int
            Seed of everything random.
        wall_time : float
            Seconds that the run took on this machine.
        target : float, optional
            Target accuracy, or of a regression the target error.
        """
        rate = self.updates / wall_time if wall_time > 0 else None
        return {
            "strategy": strategy,
            "dataset": dataset,
            "model": model,
            "seed": int(seed),
            "clients": len(self.membership.groups),
            "reason": self.reason,
            "ending": None if self.ending is None else self.ending.value,
            "updates": self.updates,
            "virtual_time": self.time,
            "wall_time": float(wall_time),
            "updates_per_second": rate,
            "measure": self.measure.name,
            "unit": self.measure.unit,
            **self._scores(),
            **self._steps.result(self.measure.name),
            **self.tasks.result(self.measure.name),
            "clients_asked": self.asked,
            "clients_answered": self.answered,
            "target": target,
            "time_to_target": time_to_target(self._evaluations, target),
            "time_to_convergence": self._time_to_convergence(),
            "unrest": unrest([point.accuracy for point in self._evaluations], self.measure),
            "clusters": self.clusters,
            "cluster_sizes": {str(k): size for k, size in self.membership.sizes().items()},
            "supporters": self._supporters(),
            "moves": self.moves,
            "purity": self.purity(),
            "purity_reached_at_update": self._pure_since,
            "bytes_up": self.traffic.up,
            "bytes_down": self.traffic.down,
            "bytes_by_phase": self.traffic.result(),
            "rejected_updates": self.rejected,
            "refused_claims": self.refused_claims,
            **self.idle.result(),
            **self.uploads.result(),
            **self._cluster_result(),
            "sample_passes": self.passes,
            "versions": {
                "raceme": raceme.__version__,
                "flwr": _version("flwr"),
                "torch": _version("torch"),
                "numpy": _version("numpy"),
                "python": platform.python_version(),
            },
        }

    def _cluster_result(self) -> dict[str, Any]:
        if self.cluster_scores is None:
            return dict.fromkeys(("cluster_accuracy", "cluster_accuracies"))
        found = self.cluster_scores
        return {
            "cluster_accuracy": _finite(found.mean),
            "cluster_accuracies": {str(k): _finite(a) for k, a in found.accuracies.items()},
        }

    def _supporters(self) -> dict[str, list[int]] | None:
        if self.supporters is None:
            return None
        return {str(k): [int(s) for s in of] for k, of in sorted(self.supporters.items())}

    def _scores(self) -> dict[str, float | None]:
        """Return the measure by its name; a run that was not evaluated has accuracies of None."""
        name = self.measure.name
        return {
            name: _finite(self.accuracy),
            f"best_{name}": _finite(self.best_accuracy),
            f"weighted_{name}": _finite(self.weighted_accuracy),
            f"best_weighted_{name}": _finite(self.best_weighted_accuracy),
        }

    def _time_to_convergence(self) -> dict[str, float | int] | None:
        index = convergence_index([point.accuracy for point in self._evaluations], self.measure)
        if index is None:
            return None
        reached = self._evaluations[index]
        return {"virtual_time": reached.time, "updates": reached.updates}

    def _observe_evaluation(self, event: Evaluated) -> None:
        accuracy, self.measure = float(event.accuracy), event.measure
        self.clusters = int(event.clusters)
        weighted = float(event.weighted_accuracy)
        self.accuracy, self.asked, self.answered = accuracy, int(event.asked), event.answered
        self.weighted_accuracy = weighted
        if event.groups:
            self.membership.observe(event)
            self._look_at_purity()
        if not event.counts:
            return
        self._steps.observe(event)
        self._evaluations.append(
            _Point(float(event.time), int(event.updates), accuracy, measure=event.measure)
        )
        self.best_accuracy = self._better(accuracy, self.best_accuracy)
        self.best_weighted_accuracy = self._better(weighted, self.best_weighted_accuracy)

    def _better(self, value: float, best: float | None) -> float | None:
        """Return the better one; NaN, which a run that diverged may give, is no value."""
        if math.isnan(value):
            return best
        return value if best is None else self.measure.better(best, value)

    def _observe_clusters(self, event: ClustersChanged | ClientJoined) -> None:
        before = self.membership.weights
        if isinstance(event, ClustersChanged) and event.change is ClusterChange.MOVE:
            # Weights may change without a client's main cluster becoming another.
            self.moves += sum(
                home(before.get(client, {})) != home(weights)
                for client, weights in event.memberships.items()
            )
        self.membership.observe(event)
        if isinstance(event, ClustersChanged):
            # An evaluation counts clusters too that no event has named, e.g. without members.
            changed = self.clusters + len(event.made) - len(event.gone)
            self.clusters = max(changed, len(self.membership.existing))
        self._look_at_purity()

    def _look_at_purity(self) -> None:
        if self.purity() != 1.0:
            self._pure_since = None
        elif self._pure_since is None:
            self._pure_since = self.updates


def summarise(
    events: Iterable[Event],
    *,
    strategy: str,
    dataset: str,
    seed: int,
    wall_time: float,
    target: float | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Summarise a run from its events, e.g. those of a run store.

    See :meth:`RunSummary.result` for the other parameters.
    """
    run = RunSummary()
    for event in events:
        run.observe(event)
    return run.result(
        strategy=strategy,
        dataset=dataset,
        seed=seed,
        wall_time=wall_time,
        target=target,
        model=model,
    )


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary as indented JSON, atomically."""
    text = json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False)
    with atomic_write(path) as file:
        file.write_text(text + "\n", encoding="utf-8")


def _finite(value: float | None) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _version(package: str) -> str | None:
    """Return the installed version of a package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
