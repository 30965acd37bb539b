"""Execution of a run on a Ray cluster: connecting, checking nodes, and actors."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import grpc
from flwr.app import ArrayRecord

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError, one_line
from raceme.core.installation import install_line
from raceme.core.options import Value
from raceme.core.registry import define, definitions
from raceme.core.signals import handled_by
from raceme.simulation.executor import (
    Desk,
    PendingReply,
    PrefetchingExecutor,
    Response,
    Worker,
    WorkerRequest,
    open_desk,
    pack,
)

NAME = "ray"
ADDRESS = "ray://"
"""Prefix of addresses of Ray's client."""

_CONNECT_SECONDS = 20.0
_NODE_SECONDS = 60.0
"""Time limit for a node to report its installation, for which it starts a process."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Keeps a raylet's messages about ended workers out of the run's output.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Turn off Ray's usage reports and output; variables that are set already are kept."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals whose handlers are restored: Ray replaces that of SIGTERM."""


class Cluster:
    """A connection to a Ray cluster.

    An existing connection of this process is used and left open.

    Parameters
    ----------
    workers : str
        ``"ray"``: this machine's cluster, or else a new local one. ``"ray://HEAD:PORT"``: the
        cluster at this address of Ray's client.
    cores : int
        CPUs of a new cluster.

    Raises
    ------
    UserError
        Ray is not installed; there is no cluster; its nodes do not fit.
    """

    def __init__(self, workers: str, cores: int) -> None:
        if find_spec("ray") is None:
            line = install_line("simulation")
            raise UserError(f"--workers {workers}: ray is not installed. Type: {line}")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        self._connected = False
        if ray.is_initialized():
            # The caller's connection: a process can join one cluster only.
            if workers != NAME:
                _check_listens(workers)
        else:
            with handled_by(None, *_SIGNALS):
                _connect(workers, cores)
            self._connected = True
        try:
            self.nodes = _alive()
            check_nodes(self.nodes)
            self.cpus = int(ray.cluster_resources().get("CPU", 0))
            if not self.cpus:
                raise UserError(f"--workers {workers}: the Ray cluster has no CPU for work.")
        except BaseException:
            self.close()
            raise

    def name(self, node_id: str) -> str:
        """Return a node's name for messages; it may have joined after the start of the run."""
        import ray

        if node_id not in self.nodes:
            self.nodes |= {node["NodeID"]: _name(node) for node in ray.nodes()}
        return self.nodes.get(node_id, node_id[:8])

    def close(self) -> None:
        """Leave the cluster if it was joined here, and end it if it was started here."""
        if self._connected:
            import ray

            self._connected = False
            with handled_by(None, *_SIGNALS):
                ray.shutdown()


def _connect(workers: str, cores: int) -> None:
    """Join a cluster, or start one.

    Raises
    ------
    UserError
        There is none at the address, or it cannot be joined or started.
    """
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = os.environ.get("RAY_ADDRESS", "") if workers == NAME else workers
    try:
        if address not in ("", "auto", "local"):
            _check_listens(address)
            ray.init(address=address, **quiet)
            return
        try:
            ray.init(num_cpus=cores, include_dashboard=False, **quiet)
        except ValueError:
            # A cluster of `ray start`, with its own number of CPUs. ``"auto"`` would also join the
            # private cluster of another run, which ends with that run.
            ray.init(**quiet)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = f"cluster at {address}" if address else "cluster of this machine"
        said = f"The Ray {where} cannot be joined or started: {one_line(error)}"
        raise UserError(said) from None


def _check_listens(address: str) -> None:
    """Raise UserError if no Ray server answers at an address; Ray would retry for minutes."""
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        # This needs Ray's own keys.
        return
    with grpc.insecure_channel(address.removeprefix(ADDRESS)) as channel:
        try:
            grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise UserError(
                f"There is no Ray cluster at {address}: no answer within {_CONNECT_SECONDS:g} s. "
                f"`ray start --head` starts one, on port 6379, and on port 10001 for {ADDRESS} "
                "addresses."
            ) from None


def check_nodes(nodes: Mapping[str, str]) -> None:
    """Check that all nodes have this machine's installation.

    Parameters
    ----------
    nodes : Mapping[str, str]
        Name of each node, by Ray's node id.

    Raises
    ------
    UserError
        Some differ; the message names each.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    installed = _installed()
    here = installed()
    asked = ray.remote(num_cpus=0, max_retries=0)(installed)
    answers = {
        node_id: asked.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote()
        for node_id in nodes
    }
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=_NODE_SECONDS)
    wrong, alive = [], _alive()
    for node_id, answer in answers.items():
        try:
            there = ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            wrong.append(f"{nodes[node_id]} did not answer within {_NODE_SECONDS:g} s")
            continue
        except ray.exceptions.RayError as error:
            # A listed node may just have died; it gets no work.
            if node_id in alive:
                wrong.append(f"{nodes[node_id]} cannot be queried ({first_line(error)})")
            continue
        other = ", ".join(
            f"{name} {there[name]}" for name, version in here.items() if there[name] != version
        )
        if other:
            wrong.append(f"{nodes[node_id]} has {other}")
    if wrong:
        own = ", ".join(f"{name} {version}" for name, version in here.items())
        raise UserError(
            "All nodes of the Ray cluster must have the versions of this machine: "
            f"{'; '.join(wrong)}; this machine has {own}."
        )


def first_line(error: BaseException) -> str:
    """Return an error's first line; Ray's have many."""
    text = str(error).strip().partition("\n")[0].rstrip(".:")
    return text or type(error).__name__


def _installed() -> Any:
    """Return a function that reports the installation of the machine that calls it.

    A nested function is sent as code, which matters where Raceme is missing or differs.
    """

    def installed() -> dict[str, str]:
        import hashlib
        import platform
        from importlib import metadata
        from importlib.util import find_spec
        from pathlib import Path

        def version(name: str) -> str:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                return "missing"

        found = {"Python": ".".join(platform.python_version_tuple()[:2])}
        spec = find_spec("raceme")
        if spec is None or not spec.submodule_search_locations:
            found["Raceme"] = "missing"
        else:
            # Two checkouts of the same version may differ.
            digest, folder = hashlib.sha256(), Path(spec.submodule_search_locations[0])
            for path in sorted(folder.rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
            found["Raceme"] = f"{version('raceme')} (sources {digest.hexdigest()[:8]})"
        return found | {name: version(name) for name in ("torch", "numpy", "flwr")}

    return installed


def _alive() -> dict[str, str]:
    """Return the names of the live nodes, by node id."""
    import ray

    return {node["NodeID"]: _name(node) for node in ray.nodes() if node["Alive"]}


def _name(node: Mapping[str, Any]) -> str:
    """Return a node's name: its address, numbered if several share it."""
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"


# -----------------------------------------------------------------------------
# Ray's object store: one copy of arrays that many messages share.
# -----------------------------------------------------------------------------


Key = tuple[int, ...]

_BY_VALUE = 100_000
"""Maximum size in bytes of records sent by value: Ray does not store smaller objects."""
_IDLE = 8
"""Number of unused versions kept for coming messages."""


@dataclass
class _Version:
    """An entry of the store.

    Attributes
    ----------
    reference : ObjectRef
        Ray's reference, which keeps the object in the store.
    data : list[bytes]
        Local arrays; keeping them reserves their ids.
    users : int
        Number of open tasks that refer to it.
    """

    reference: Any
    data: list[bytes]
    users: int = 0


class Versions:
    """Model arrays in Ray's object store, one copy per version.

    A version is identified by its array objects, which its messages share. A node fetches it once
    for all of its actors.
    """

    def __init__(self) -> None:
        self._versions: OrderedDict[Key, _Version] = OrderedDict()
        self.puts = 0

    def hold(self, record: ArrayRecord) -> tuple[Key | None, Any]:
        """Return the value to send for a record, and the key that releases it, if any."""
        data = [array.data for array in record.values()]
        if sum(map(len, data)) < _BY_VALUE:
            return None, data
        key = tuple(map(id, data))
        if key not in self._versions:
            import ray

            self._versions[key] = _Version(ray.put(data), data)
            self.puts += 1
        version = self._versions[key]
        version.users += 1
        self._versions.move_to_end(key)
        return key, version.reference

    def release(self, key: Key) -> None:
        """Release a version at the end of a task."""
        self._versions[key].users -= 1
        idle = [key for key, version in self._versions.items() if not version.users]
        for key in idle[: max(0, len(idle) - _IDLE)]:
            del self._versions[key]

    def clear(self) -> None:
        """Release all versions."""
        self._versions.clear()


# -----------------------------------------------------------------------------
# The actor on a Ray node: answers messages with a ClientApp.
# -----------------------------------------------------------------------------


class Started(NamedTuple):
    """Outcome of an actor's start.

    Attributes
    ----------
    node_id : str
        Ray's id of its node.
    failure : str
        Reason of a failed start; empty on success.
    instructions : str
        CPU capability that torch uses, which can change the last digits of sums.
    data : str
        Fingerprint of the node's data; empty if not requested.
    """

    node_id: str
    failure: str = ""
    instructions: str = ""
    data: str = ""


class RayWorker:
    """An actor, which keeps the ClientApp, its clients and their data between messages."""

    def start(
        self,
        target: str,
        seed: int | None,
        log_level: int,
        path: Sequence[str],
        run: Mapping[str, Value] | None,
        pickled: Mapping[str, bytes],
    ) -> Started:
        """Load the ClientApp.

        Parameters
        ----------
        target, seed, log_level
            See :func:`~raceme.simulation.executor.open_desk`.
        path : Sequence[str]
            The simulator's module search path, added to the actor's.
        run : Mapping[str, Value], optional
            Configuration of a run whose data the actor needs.
        pickled : Mapping[str, bytes]
            See :func:`~raceme.core.registry.define`.
        """
        import ray

        define(pickled)
        node_id = ray.get_runtime_context().get_node_id()
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        try:
            data = "" if run is None else _data_here(RunConfig.from_mapping(run))
        except UserError as error:
            return Started(node_id, f"lacks the data: {error}")
        desk = open_desk(target, seed, log_level)
        if isinstance(desk, str):
            return Started(node_id, f"cannot load the ClientApp {target}: {desk}")
        self._desk: Desk = desk
        torch = sys.modules.get("torch")
        instructions = "" if torch is None else torch.backends.cpu.get_cpu_capability()
        return Started(node_id, "", instructions, data)

    def respond(self, request: WorkerRequest, *data: list[bytes]) -> Response:
        """Answer a request; the data of its arrays follow it, record by record."""
        return self._desk.respond(request, [part for record in data for part in record])


def _data_here(config: RunConfig) -> str:
    """Return the fingerprint of the node's data, without downloading in each actor."""
    found = fingerprint(config.with_values(download=False))
    if config.download:
        # Free the memory: clients load the data themselves.
        datasets.forget()
    return found


def fingerprint(config: RunConfig) -> str:
    """Return a fingerprint of the first client's data.

    Raises
    ------
    UserError
        The data cannot be loaded.
    """
    data = datasets.client_data(config, 0)
    digest = hashlib.sha256()
    for values in (data.x_train, data.y_train, data.x_test, data.y_test):
        digest.update(f"{values.shape} {values.dtype}".encode() + values.tobytes())
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# Actors on a Ray cluster, one per CPU, which keep models and data.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.workers")

_MOST_ACTORS = 1024
_READY_SECONDS = 300.0
"""Time limit for the first actor to be placed and to load app and data."""


@dataclass(eq=False, kw_only=True)
class _Actor(Worker):
    """An actor as the simulator sees it.

    Attributes
    ----------
    actor : ActorHandle
        Ray's handle, by which the actor is called.
    node_id : str
        Ray's id of its node; empty until the actor is ready.
    versions : dict[str, list[Key]]
        Object-store entries of its tasks, by message id.
    """

    actor: Any
    node_id: str = ""
    versions: dict[str, list[Key]] = field(default_factory=dict)


Arrival = tuple[_Actor, Callable[[], "Started | Response"]]
"""An actor and a function that returns its result, or raises if the actor was lost."""


class RayActors(PrefetchingExecutor[_Actor]):
    """An executor of actors on a Ray cluster.

    Lost actors are replaced where CPUs are free.

    Parameters
    ----------
    target, seed
        See :class:`~raceme.simulation.executor.PrefetchingExecutor`.
    workers : str
        Ray cluster to use, ``"ray"`` or ``"ray://HEAD:PORT"``; see :class:`Cluster`.
    cores : int
        CPUs of a cluster that is started here.
    config : RunConfig, optional
        Configuration of a run whose data all nodes need; they are checked to be the same.

    Raises
    ------
    UserError
        There is no such cluster, or its nodes differ.
    """

    never_ready = (
        "Ray's actors ended before they loaded the ClientApp {target}: {how}. --workers 0 starts "
        "none."
    )
    deadly = (
        "{deaths} of Ray's actors died at the same task, the last on node {node}: {job}. The "
        "usual reason is a lack of memory: start nodes with fewer CPUs (ray start --num-cpus). "
        "Ray says: {how}."
    )

    def __init__(
        self,
        target: str,
        workers: str,
        cores: int,
        seed: int | None = None,
        config: RunConfig | None = None,
    ) -> None:
        self._run = None if config is None else config.to_mapping()
        self._data = "" if config is None else fingerprint(config)
        self._versions = Versions()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._instructions = ""
        self._troubled: set[str] = set()
        self._cluster = Cluster(workers, cores)
        count = min(self._cluster.cpus, _MOST_ACTORS)
        super().__init__(target, count, seed)
        try:
            self._workers.extend(self._start() for _ in range(count))
        except BaseException:
            self.close()
            raise

    def _start(self) -> _Actor:
        """Start an actor; Ray places it when a CPU is free."""
        import ray

        made = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(RayWorker)
        worker = _Actor(actor=made.remote())
        level = logging.getLogger("flwr").level
        started = worker.actor.start.remote(
            self._target, self._seed, level, sys.path, self._run, definitions()
        )
        self._expect(worker, started)
        return worker

    def _end_workers(self) -> None:
        """End the actors, and leave the cluster."""
        for worker in self._workers:
            _kill(worker)
        self._versions.clear()
        self._cluster.close()

    def _send(self, worker: _Actor, job: PendingReply) -> bool:
        """Send a task to an actor; it can always take it."""
        content = job.message.content
        held = [self._versions.hold(record) for record in content.array_records.values()]
        request = self._request(worker, job, pack(content).records, None)
        worker.versions[job.message_id] = [key for key, _ in held if key is not None]
        self._begin(worker, job, request)
        data = [data for _, data in held]
        self._expect(worker, worker.actor.respond.remote(request, *data))
        return True

    def _expect(self, worker: _Actor, coming: Any) -> None:
        """Queue an actor's result on completion, from another thread."""
        coming.future().add_done_callback(lambda done: self._arrivals.put((worker, done.result)))

    def _receive(self, wait: bool) -> None:
        """Process results of the actors; with `wait`, at least one."""
        # Waiting for work has no time limit.
        at_work = any(worker.ready for worker in self._workers)
        patience = None if at_work else _READY_SECONDS
        while True:
            try:
                worker, value = self._arrivals.get(block=wait, timeout=patience if wait else None)
            except queue.Empty:
                if not wait:
                    return
                raise UserError(
                    f"No actor of the Ray cluster was ready within {_READY_SECONDS:g} s: all its "
                    "CPUs are taken, or its nodes are gone. `ray status` shows both."
                ) from None
            wait = False
            # Ignore results of actors that were dropped.
            if worker in self._workers:
                self._take(worker, value)

    def _take(self, worker: _Actor, value: Callable[[], Started | Response]) -> None:
        """Process an actor's result or loss."""
        from ray.exceptions import RayError, RayTaskError

        try:
            came = value()
        except RayTaskError:
            # Not explained by the end of an actor.
            raise
        except RayError as error:
            self._lose(worker, first_line(error))
            return
        if isinstance(came, Started):
            self._admit(worker, came)
            return
        self._release(worker, came.message_id)
        assert came.data is not None, "actors share no memory with this process"
        self._finish(worker, came, came.data)

    def _admit(self, worker: _Actor, started: Started) -> None:
        """Record that an actor is ready.

        Raises
        ------
        UserError
            Its start failed.
        """
        name = self._cluster.name(started.node_id)
        if started.failure:
            raise UserError(f"Node {name} of the Ray cluster {started.failure}")
        if started.data != self._data:
            raise UserError(
                f"Node {name} of the Ray cluster has data that differ from this machine's: "
                "folders and files must be the same on all nodes."
            )
        known = self._instructions or started.instructions
        if started.instructions != known:
            log.warning(
                "Node %s computes with %s, others with %s: sums may differ in their last digits.",
                name,
                started.instructions,
                known,
            )
        self._instructions, worker.node_id = known, started.node_id
        self._welcome(worker)

    def _release(self, worker: _Actor, message_id: str) -> None:
        for key in worker.versions.pop(message_id):
            self._versions.release(key)

    def _lose(self, worker: _Actor, how: str) -> None:
        """Handle the loss of an actor."""
        # It may still run but be unreachable.
        _kill(worker)
        for message_id in list(worker.versions):
            self._release(worker, message_id)
        node = self._cluster.name(worker.node_id) if worker.ready else "not known yet"
        if worker.ready and worker.node_id not in self._troubled:
            self._troubled.add(worker.node_id)
            log.warning("Ray lost work on node %s and repeats it elsewhere: %s.", node, how)
        self._replace(worker, how=how, node=node)


def _kill(worker: _Actor) -> None:
    """End an actor, if reachable."""
    import ray

    with suppress(ray.exceptions.RayError, ConnectionError):
        ray.kill(worker.actor)
