"""The map of the clients while a run goes on: snapshots with its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from raceme.core.clusters import Model, blended
from raceme.core.config import RunConfig
from raceme.core.embedding import ClientEmbedding, Sketch
from raceme.core.events import ClustersScored, Evaluated, Event, RunEnded
from raceme.core.messages import ModelSpec, Vector
from raceme.core.strategy import Method
from raceme.records import record as trace
from raceme.records.positions import PositionsFile, positions_of_rows
from raceme.records.record import Communication, TraceFile
from raceme.runs.trackers import Tracking


class ClientMap:
    """An observer of a run that writes where the clients lie, by how alike their models are.

    Every method has one, also those that compare no clients. It changes nothing of the run.

    Parameters
    ----------
    method : Method
        Whose clients.
    spec : ModelSpec
        Of its models.
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

    def observe(self, event: Event) -> None:
        """Write a snapshot with most evaluations, and at the end; other events are none of its."""
        if isinstance(event, Evaluated):
            self._is_missing = not self._file.wants(event.updates)
            if not self._is_missing:
                self._write(event)
        elif isinstance(event, RunEnded):
            if self._is_missing:
                self._write(event)
            self._file.bring_back(event.updates)

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
        The server's test sets.
    """
    if tests is not None and isinstance(event, Evaluated) and method.needs.by_distribution():
        scores = score_clusters(method.served, tests, event.time, event.updates)
        if scores is not None:
            yield scores


# -----------------------------------------------------------------------------
# What each client uses, for those who want the models that accuracies were measured with.
# -----------------------------------------------------------------------------


def models_in_use(method: Method) -> Iterator[tuple[str, Vector]]:
    """Yield the clients that are online, and the model that each would be tested with now.

    That is its cluster's, of several clusters Σ_k α_k w_k, or one that the method has for it alone.
    One model at a time is made: a fleet's may be more than fits into memory.

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


# -----------------------------------------------------------------------------
# What a run tells others beside its store: trackers, and the file with a line per event.
# -----------------------------------------------------------------------------


class Beside:
    """The trackers and the trace of a run, if it has any; a context manager around the run.

    Parameters
    ----------
    config : RunConfig
        A resolved configuration.
    out : Path
        The run's folder.
    communication : Communication, optional
        How long transfers take, where that is known beforehand.
    """

    def __init__(
        self, config: RunConfig, out: Path, communication: Communication | None = None
    ) -> None:
        self._config, self._out, self._communication = config, out, communication
        self._open = ExitStack()
        self._trace: TraceFile | None = None
        self._tracking: Tracking | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    @property
    def failures(self) -> dict[str, str]:
        """Who was left behind, and why."""
        failed = dict(self._tracking.failures) if self._tracking else {}
        if self._trace is not None and self._trace.failure:
            failed[trace.FILE] = self._trace.failure
        return failed

    def begin(self, events: int = 0, updates: int | None = None) -> None:
        """Open what the configuration asks for.

        Parameters
        ----------
        events, updates : int, int or None
            Of a resumed run: how many events it goes on from, and how many updates.

        Raises
        ------
        UserError
            The trace cannot be written.
        """
        if self._config.trace:
            file = TraceFile(self._out, self._communication, events)
            self._trace = self._open.enter_context(file)
        if self._config.track:
            self._tracking = self._open.enter_context(Tracking(self._config, self._out, updates))

    def recall(self, event: Event) -> None:
        """Take note of an event from before a run was resumed."""
        if self._tracking is not None:
            self._tracking.recall(event)

    def observe(self, event: Event) -> None:
        """Tell of an event."""
        if self._trace is not None:
            self._trace.observe(event)
        if self._tracking is not None:
            self._tracking.observe(event)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Hand over what a run that has ended has left."""
        if self._tracking is not None:
            self._tracking.end(summary, self._out)
