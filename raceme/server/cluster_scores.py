"""Clusters' models tested on the server, each on a test set of its own distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from raceme.clustering.model import Model
from raceme.protocol.events import ClustersScored, Evaluated, Event
from raceme.protocol.messages import Vector
from raceme.server.interface import Questions


class ClusterTests(Protocol):
    """Test sets that the server has, one for each distribution."""

    @property
    def tests(self) -> int:
        """How many there are."""
        ...

    def accuracy(self, vector: Vector, k: int) -> float:
        """Return the accuracy of a model on the test set of distribution k.

        Parameters
        ----------
        vector : Vector
            The model, shape (d,).
        k : int
            Which distribution, from 0.
        """
        ...


def score_clusters(
    models: Mapping[int, Model], tests: ClusterTests, time: float, updates: int
) -> ClustersScored | None:
    """Test each cluster's model on the test set of its own distribution.

    Parameters
    ----------
    models : Mapping[int, Model]
        The models by cluster; cluster k is taken to be of distribution k. Those beyond the last
        distribution are not tested.
    tests : ClusterTests
        The server's test sets.
    time, updates : float, int
        The moment of the models.

    Returns
    -------
    ClustersScored or None
        The report; None if there is no model to test.
    """
    accuracies = {
        cluster: float(tests.accuracy(model.vector, cluster))
        for cluster, model in sorted(models.items())
        if cluster < tests.tests
    }
    return ClustersScored(time, updates, accuracies) if accuracies else None


def scores_beside(
    event: Event, method: Questions, tests: ClusterTests | None
) -> Iterator[ClustersScored]:
    """Test the clusters' models beside an evaluation, where the server has tests of them.

    Parameters
    ----------
    event : Event
        What has just been reported.
    method : Questions
        Whose models, if its clusters are of known distributions.
    tests : ClusterTests or None
        The server's test sets.
    """
    if tests is not None and method.by_distribution and isinstance(event, Evaluated):
        scores = score_clusters(method.served, tests, event.time, event.updates)
        if scores is not None:
            yield scores
