"""Observers of a run: the map of its clients, and tests of its clusters on the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from raceme.core.clusters import Model, blended
from raceme.core.embedding import ClientEmbedding, Sketch
from raceme.core.events import ClustersScored, Evaluated, Event, EventHandler, RunEnded
from raceme.core.messages import ModelSpec, Vector
from raceme.core.strategy import Method
from raceme.records.positions import PositionsFile, positions_of_rows


class ClientMap(EventHandler):
    """Writes where the clients lie, by how alike their models are, with most evaluations.

    Every method has such a map, also those that compare no clients. It changes nothing of the run.

    Parameters
    ----------
    method : Method
        The method whose clients are drawn.
    spec : ModelSpec
        The shapes of its models.
    folder : Path
        The folder of the run.
    after : float, optional
        The run resumes at this time.
    """

    def __init__(
        self, method: Method, spec: ModelSpec, folder: Path, after: float | None = None
    ) -> None:
        self._method, self._file = method, PositionsFile(folder, after)
        self._is_missing = False
        self._embedding = method.embedding = ClientEmbedding(
            Sketch(sum(spec.sizes), spec.trainable)
        )

    def on_evaluated(self, event: Evaluated) -> None:
        """Write a snapshot, unless the last one is recent."""
        self._is_missing = not self._file.wants(event.updates)
        if not self._is_missing:
            self._write(event)

    def on_run_ended(self, event: RunEnded) -> None:
        """Write the snapshot of the end, unless the last evaluation has one."""
        if self._is_missing:
            self._write(event)

    def _write(self, event: Evaluated | RunEnded) -> None:
        method, is_last = self._method, isinstance(event, RunEnded)
        clients, rows = self._embedding.seen_from_the_mean(method.models, method.placement)
        if len(clients) > 2:
            points = positions_of_rows(rows)
            self._file.write(event.time, clients, points, event.updates, is_last)


# -----------------------------------------------------------------------------
# Clusters' models tested on the server, each on a test set of its own distribution.
# -----------------------------------------------------------------------------


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
            The model's weights, shape (d,).
        k : int
            The number of the distribution, from 0.
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
        The server's test sets, one for each distribution.
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
    event: Event, method: Method, tests: ClusterTests | None
) -> Iterator[ClustersScored]:
    """Test the clusters' models beside an evaluation, where the server has tests of them.

    Parameters
    ----------
    event : Event
        What has just been reported.
    method : Method
        Whose models, if its clusters are of known distributions.
    tests : ClusterTests or None
        The server's test sets, one for each distribution.
    """
    if tests is not None and isinstance(event, Evaluated) and method.needs.by_distribution():
        scores = score_clusters(method.served, tests, event.time, event.updates)
        if scores is not None:
            yield scores


# -----------------------------------------------------------------------------
# The model that each client uses: what its accuracy was measured with.
# -----------------------------------------------------------------------------


def models_in_use(method: Method) -> Iterator[tuple[str, Vector]]:
    """Yield each client that is online, with the model that it would be tested with now.

    That is its cluster's, of several clusters Σ_k α_k w_k, or one that the method has for it alone.
    One model at a time is made: those of a fleet may not fit into memory.

    Parameters
    ----------
    method : Method
        A method that has run.

    Yields
    ------
    tuple[str, Vector]
        A client, and its model's weights, shape (d,).
    """
    clients = [client.client_id for client in method.progress.fleet.online()]
    alone = set()
    for client, vector in method.used(clients):
        alone.add(client)
        yield client, vector
    served = method.served
    for client in clients:
        if client not in alone:
            yield client, blended(served, method.placement(client))
