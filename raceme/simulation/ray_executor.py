"""Actors on a Ray cluster that do simulated clients' work, ahead of when it is needed."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.simulation.ahead import MOST_DEATHS, QUEUED, Task, WorkingAhead
from raceme.simulation.ray_cluster import Cluster, first_line
from raceme.simulation.ray_versions import Key, Versions
from raceme.simulation.ray_worker import RayWorker, Started, fingerprint
from raceme.simulation.transfer import Node, Response, node_of, pack, request_of

log = logging.getLogger("raceme.workers")

_MOST_ACTORS = 1024
_READY_SECONDS = 300.0
"""Time for the cluster to have room for any actor at all, and for that to load app and data."""


@dataclass(eq=False)
class _Worker:
    """An actor as the simulator sees it.

    Attributes
    ----------
    node_id : str
        Ray's id of the node that it is on; empty until it is ready.
    tasks : dict[str, Task]
        What it has to do, by message id, in its order.
    versions : dict[str, list[Key]]
        What its tasks hold of the object store, by message id.
    nodes : dict[int, Node]
        The clients that it knows.
    """

    actor: Any
    node_id: str = ""
    tasks: dict[str, Task] = field(default_factory=dict)
    versions: dict[str, list[Key]] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Arrival:
    """Something has come from an actor: its start, or the reply to a message."""

    worker: _Worker
    message_id: str | None
    value: Callable[[], Any]


class RayActors(WorkingAhead):
    """An executor of actors on a Ray cluster, one per CPU, that keep models and data.

    Replies are those of :class:`~raceme.simulation.executor.InProcess`: an actor that is lost, with
    its node or alone, is replaced where there is room, and what it had to do is done again.

    Parameters
    ----------
    target : str
        The ClientApp, as ``module:attribute``; every actor imports it.
    workers : str
        Which cluster; see :class:`~raceme.simulation.ray_cluster.Cluster`.
    cores : int
        CPUs of a cluster that is started here.
    seed : int, optional
        See :func:`~raceme.simulation.executor.answer`.
    config : RunConfig, optional
        Of a run whose data all nodes need; it is checked that they have the same.

    Raises
    ------
    UserError
        There is no such cluster, or its nodes do not fit.
    """

    def __init__(
        self,
        target: str,
        workers: str,
        cores: int,
        seed: int | None = None,
        config: RunConfig | None = None,
    ) -> None:
        self._target, self._seed = target, seed
        self._run = None if config is None else config.to_mapping()
        self._data = "" if config is None else fingerprint(config)
        self._versions = Versions()
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._failed_starts = 0
        self._instructions = ""
        self._troubled: set[str] = set()
        self._workers: list[_Worker] = []
        self._cluster = Cluster(workers, cores)
        count = min(self._cluster.cpus, _MOST_ACTORS)
        super().__init__(count)
        try:
            self._workers.extend(self._start() for _ in range(count))
        except BaseException:
            self.close()
            raise

    def _end_workers(self) -> None:
        """End the actors, and leave the cluster."""
        for worker in self._workers:
            _kill(worker)
        self._workers = []
        self._versions.clear()
        self._cluster.close()

    # Handing work out.

    def _at_work(self) -> int:
        return sum(len(worker.tasks) for worker in self._workers)

    def _give(self, task: Task) -> bool:
        """Give a task to an actor that has room; return False if none has."""
        free = [w for w in self._workers if w.node_id and len(w.tasks) < QUEUED]
        if not free:
            return False
        worker = min(free, key=lambda worker: len(worker.tasks))
        message, context = task.message, task.context
        held = [
            self._versions.hold(record)
            for record in message.content.values()
            if isinstance(record, ArrayRecord)
        ]
        node = node_of(context)
        known = worker.nodes.get(context.node_id) == node
        content = pack(message.content).records
        request = request_of(message, context, content, None, None if known else node)
        worker.nodes[context.node_id] = node
        worker.tasks[task.message_id] = task
        worker.versions[task.message_id] = [key for key, _ in held if key is not None]
        self._begin(task)
        reply = worker.actor.respond.remote(request, *(data for _, data in held))
        self._expect(worker, task.message_id, reply)
        return True

    def _expect(self, worker: _Worker, message_id: str | None, reply: Any) -> None:
        """Let what an actor returns be taken in when it is there; another thread says so."""
        reply.future().add_done_callback(
            lambda done: self._arrivals.put(_Arrival(worker, message_id, done.result))
        )

    # Taking results in.

    def _receive(self, wait: bool) -> None:
        """Take in what has come from the actors; with `wait`, at least one thing.

        Raises
        ------
        UserError
            Actors cannot start, or die again and again at the same task.
        """
        while True:
            try:
                arrival = self._arrivals.get(timeout=self._patience()) if wait else None
                arrival = arrival or self._arrivals.get_nowait()
            except queue.Empty:
                if not wait:
                    return
                raise UserError(
                    f"No actor of the Ray cluster was ready within {_READY_SECONDS:g} s: all its "
                    "CPUs are taken, or its nodes are gone. `ray status` shows both."
                ) from None
            wait = False
            # One that is not there any more is done with, whatever still comes from it.
            if arrival.worker in self._workers:
                self._take(arrival)

    def _patience(self) -> float | None:
        """Return how long to wait for something: for work as long as it takes."""
        return None if any(worker.node_id for worker in self._workers) else _READY_SECONDS

    def _take(self, arrival: _Arrival) -> None:
        """Take in what has come from an actor, or that it is lost."""
        from ray.exceptions import RayError, RayTaskError

        worker = arrival.worker
        try:
            value = arrival.value()
        except RayTaskError:
            # Nothing that an actor's end explains.
            raise
        except RayError as error:
            self._replace(worker, first_line(error))
            return
        if arrival.message_id is None:
            self._welcome(worker, value)
            return
        response: Response = value
        task = worker.tasks.pop(arrival.message_id)
        self._release(worker, arrival.message_id)
        assert response.data is not None, "actors share no memory with this process"
        self._finish(task, response, response.data)

    def _welcome(self, worker: _Worker, started: Started) -> None:
        """Take in that an actor is ready.

        Raises
        ------
        UserError
            It never will be.
        """
        name = self._cluster.name(started.node_id)
        if started.failure:
            raise UserError(f"Node {name} of the Ray cluster {started.failure}")
        if started.data != self._data:
            raise UserError(
                f"Node {name} of the Ray cluster has other data than this machine: the folders "
                "and files must hold the same everywhere."
            )
        known = self._instructions or started.instructions
        if started.instructions != known:
            log.warning(
                "Node %s computes with %s, others with %s: sums may differ in their last digits.",
                *(name, started.instructions, known),
            )
        self._instructions = known
        worker.node_id, self._failed_starts = started.node_id, 0

    def _release(self, worker: _Worker, message_id: str) -> None:
        for key in worker.versions.pop(message_id):
            self._versions.release(key)

    # Actors' lives.

    def _start(self) -> _Worker:
        """Start an actor; Ray places it where a CPU is free, now or later."""
        import ray

        made = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(RayWorker)
        worker = _Worker(made.remote())
        level = logging.getLogger("flwr").level
        told = self._target, self._seed, level, sys.path, self._run
        self._expect(worker, None, worker.actor.start.remote(*told))
        return worker

    def _replace(self, worker: _Worker, how: str) -> None:
        """Start an actor in the place of one that is lost, and let its tasks wait again."""
        index = self._workers.index(worker)
        del self._workers[index]
        # It may be there still, and only not be reached.
        _kill(worker)
        for message_id in list(worker.versions):
            self._release(worker, message_id)
        if not worker.node_id:
            self._failed_starts += 1
        if self._failed_starts >= MOST_DEATHS:
            raise UserError(
                f"Ray's actors end before they have loaded the ClientApp {self._target}: {how}. "
                "With --workers 0 there are none."
            )
        name = self._cluster.name(worker.node_id) if worker.node_id else "not known yet"
        if worker.node_id and worker.node_id not in self._troubled:
            self._troubled.add(worker.node_id)
            log.warning(
                "Ray has lost work on node %s, which is done again elsewhere: %s.", name, how
            )
        fatal = self._redo(worker.tasks.values())
        if fatal is not None:
            raise UserError(
                f"{fatal.deaths} of Ray's actors died at the same task, the last on node {name}: "
                f"{fatal}. As a rule memory ran out: start nodes with fewer CPUs (ray start "
                f"--num-cpus). Ray says: {how}."
            )
        self._workers.insert(index, self._start())


def _kill(worker: _Worker) -> None:
    """End an actor, if it can be reached."""
    import ray

    with suppress(ray.exceptions.RayError, ConnectionError):
        ray.kill(worker.actor)
