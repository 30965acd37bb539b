"""Execution of work on a Ray cluster: connecting, checking nodes, and tasks."""

from __future__ import annotations

import hashlib
import heapq
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from flwr.app import Context, Message

import raceme
from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError, one_line
from raceme.core.installation import install_line
from raceme.core.options import Value
from raceme.core.registry import define, definitions
from raceme.core.signals import handled_by
from raceme.simulation.executor import (
    MOST_DEATHS,
    Desk,
    PendingReply,
    Response,
    WorkerRequest,
    most_ahead,
    open_desk,
    pack,
    received,
    response_of,
    unpack,
)

NAME = "ray"
ADDRESS = "ray://"
"""Prefix of addresses of Ray's client."""

_CONNECT_SECONDS = 20.0
_NODE_SECONDS = 300.0
"""Time limit for a node's report, for which it starts a process and loads data."""
_PROCESSOR = "processor"
"""Capability of a processor that torch uses, which can change the last digits of sums."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Keeps a raylet's messages about ended workers out of the run's output.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Turn off Ray's usage reports and output; existing variables are kept."""
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
    config : RunConfig, optional
        Configuration of a run whose data all nodes need; they are checked to be the same.

    Raises
    ------
    UserError
        Ray is not installed; there is no cluster; its nodes do not fit.
    """

    def __init__(self, workers: str, cores: int, config: RunConfig | None = None) -> None:
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
            check_nodes(self.nodes, config)
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


def check_nodes(nodes: Mapping[str, str], config: RunConfig | None = None) -> None:
    """Check that all nodes have this machine's installation, and data; warn of other processors.

    Parameters
    ----------
    nodes : Mapping[str, str]
        Name of each node, by Ray's node id.
    config : RunConfig, optional
        Configuration of a run whose data all nodes need.

    Raises
    ------
    UserError
        Some nodes differ; the message names them.
    """
    here = _report(None if config is None else config.to_mapping())
    # Nothing is downloaded there.
    keys = None if config is None else config.with_values(download=False).to_mapping()
    wrong, processors = [], {here.pop(_PROCESSOR, ""): "this machine"}
    for name, there in _ask(nodes, _report, keys, list(sys.path), definitions()).items():
        if isinstance(there, str):
            wrong.append(f"{name} {there}")
            continue
        processors.setdefault(there.pop(_PROCESSOR, ""), name)
        other = ", ".join(f"{what} {there[what]}" for what in here if there[what] != here[what])
        if other:
            wrong.append(f"{name} has {other}")
    if wrong:
        own = ", ".join(f"{what} {version}" for what, version in here.items())
        raise UserError(
            "All nodes of the Ray cluster must have the versions and data of this machine: "
            f"{'; '.join(wrong)}; this machine has {own}."
        )
    if len(processors) > 1:
        shown = ", ".join(f"{name} with {kind}" for kind, name in processors.items())
        log.warning("Nodes compute differently (%s): sums may differ in their last digits.", shown)


def _ask(nodes: Mapping[str, str], function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return a function's result on each node, by name; a text for nodes that cannot be called."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = ray.remote(num_cpus=0, max_retries=0)(function)
    coming = {
        node_id: asked.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(*arguments)
        for node_id in nodes
    }
    ray.wait(list(coming.values()), num_returns=len(coming), timeout=_NODE_SECONDS)
    answers, alive = {}, _alive()
    for node_id, answer in coming.items():
        try:
            answers[nodes[node_id]] = ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            answers[nodes[node_id]] = f"did not answer within {_NODE_SECONDS:g} s"
        except ray.exceptions.RayError as error:
            # A listed node may just have died; it gets no work.
            if node_id in alive:
                answers[nodes[node_id]] = f"cannot be queried ({first_line(error)})"
    return answers


def _prepare(path: Sequence[str], pickled: Mapping[str, bytes]) -> None:
    """Make the simulator's modules importable in the calling process."""
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    define(pickled)


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


def first_line(error: BaseException) -> str:
    """Return an error's first line; Ray's have many."""
    # The exception of the task, without Ray's own text.
    error = getattr(error, "cause", None) or error
    text = str(error).strip().partition("\n")[0].rstrip(".:")
    return text or type(error).__name__


def _report(
    keys: Mapping[str, Value] | None,
    path: Sequence[str] = (),
    pickled: Mapping[str, bytes] | None = None,
) -> dict[str, str]:
    """Return a description of the calling machine: versions, and the fingerprint of a run's data.

    The sources of Raceme have a digest, as two checkouts of the same version may differ.
    """
    _prepare(path, pickled or {})
    digest, folder = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    found = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Raceme": f"{raceme.__version__} (sources {digest.hexdigest()[:8]})",
        **{name: metadata.version(name) for name in ("torch", "numpy", "flwr")},
    }
    if keys is not None:
        import torch

        try:
            found["data"] = fingerprint(RunConfig.from_mapping(keys))[:8]
        except UserError as error:
            found["data"] = f"missing ({str(error).rstrip('.')})"
        found[_PROCESSOR] = torch.backends.cpu.get_cpu_capability()
    return found


def _alive() -> dict[str, str]:
    """Return the names of the live nodes, by node id."""
    import ray

    return {node["NodeID"]: _name(node) for node in ray.nodes() if node["Alive"]}


def _name(node: Mapping[str, Any]) -> str:
    """Return a node's name: its address, numbered if several share it."""
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"


# -----------------------------------------------------------------------------
# An executor of tasks on a Ray cluster. Its processes keep ClientApp and data between tasks.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.workers")

_BY_VALUE = 100_000
"""Maximum size in bytes of arrays sent by value: Ray does not store smaller objects."""
_KEPT = 8
"""Number of models kept in Ray's object store for coming messages."""
_READY_SECONDS = 300.0
"""Time limit for the first task to be done, which imports the app and loads data."""


@dataclass(eq=False)
class _Task(PendingReply):
    """A message whose reply is computed on the cluster once it has a reference."""

    reference: Any = None


class RayTasks:
    """An executor of tasks on a Ray cluster, one per CPU at a time, in order of due time.

    A lost task is repeated.

    Parameters
    ----------
    target, seed
        See :class:`~raceme.simulation.executor.Pool`.
    workers : str
        Ray cluster to use, ``"ray"`` or ``"ray://HEAD:PORT"``; see :class:`Cluster`.
    cores : int
        CPUs of a cluster that is started here.
    config : RunConfig, optional
        Configuration of a run whose data all nodes need.

    Raises
    ------
    UserError
        There is no such cluster, or its nodes differ.
    """

    def __init__(
        self,
        target: str,
        workers: str,
        cores: int,
        seed: int | None = None,
        config: RunConfig | None = None,
    ) -> None:
        self._cluster = Cluster(workers, cores, config)
        import ray

        self._task = ray.remote(num_cpus=1, max_retries=0)(_respond)
        # Equal arrays are one object, which a node fetches once for all of its processes.
        self._stored = lru_cache(_KEPT)(ray.put)
        level = logging.getLogger("flwr").level
        self._app = ray.put((target, seed, level, list(sys.path), definitions()))
        self._jobs: dict[str, _Task] = {}
        self._waiting: list[tuple[float, int, str]] = []
        self._begun: set[str] = set()
        self._order = 0
        self._bound = most_ahead(self._cluster.cpus)
        self._patience: float | None = _READY_SECONDS

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Submit a message, and start its work unless enough is done in advance."""
        self._order += 1
        job = _Task(message, context, due, self._order)
        self._jobs[job.message_id] = job
        heapq.heappush(self._waiting, (due, job.order, job.message_id))
        self._start_waiting()

    def result(self, message_id: str) -> Message:
        """Return the reply to a submitted message; wait for it if necessary.

        Raises
        ------
        UserError
            The ClientApp cannot be loaded, no CPU is free, or the task is lost repeatedly.
        """
        job = self._jobs[message_id]
        response = None
        while response is None:
            # Work on an outdated client state is repeated.
            if job.reference is None or job.state is not job.context.state:
                self._start(job)
            response = self._response(job)
        self.cancel(message_id)
        self._start_waiting()
        if response.state is not None:
            job.context.state = unpack(response.state)
        return job.reply(response, response.data or [])

    def cancel(self, message_id: str) -> None:
        """Drop a submitted message; the result of work in progress is discarded."""
        self._jobs.pop(message_id, None)
        self._begun.discard(message_id)

    def close(self) -> None:
        """Drop unfinished work, and leave the cluster."""
        import ray

        for job in self._jobs.values():
            if job.reference is not None:
                ray.cancel(job.reference, force=True)
        self._jobs, self._waiting, self._begun = {}, [], set()
        self._stored.cache_clear()
        self._cluster.close()

    def _start_waiting(self) -> None:
        """Start waiting tasks, within the bound on results held in advance."""
        while self._waiting and len(self._begun) < self._bound:
            job = self._jobs.get(heapq.heappop(self._waiting)[2])
            if job is not None and job.message_id not in self._begun:
                self._start(job)

    def _start(self, job: _Task) -> None:
        """Start a task; Ray places it when a CPU is free."""
        data = []
        for record in job.message.content.array_records.values():
            own = tuple(array.data for array in record.values())
            data.append(own if sum(map(len, own)) < _BY_VALUE else self._stored(own))
        request = job.request(pack(job.message.content).records)
        self._begun.add(job.message_id)
        job.reference = self._task.remote(self._app, request, *data)

    def _response(self, job: _Task) -> Response | None:
        """Wait for the response to a task; None if it was lost, and is to be started again."""
        import ray

        try:
            response: Response | str = ray.get(job.reference, timeout=self._patience)
        except ray.exceptions.RayTaskError:
            # Errors other than the end of a process are raised.
            raise
        except ray.exceptions.GetTimeoutError:
            raise UserError(
                f"No task of the Ray cluster was done within {_READY_SECONDS:g} s: all its CPUs "
                "are taken, or its nodes are gone. `ray status` shows both."
            ) from None
        except ray.exceptions.RayError as error:
            how = first_line(error)
            job.deaths, job.reference = job.deaths + 1, None
            if job.deaths >= MOST_DEATHS:
                raise UserError(
                    f"{job.deaths} of Ray's processes died at the same task: {job}. The usual "
                    "reason is a lack of memory: start nodes with fewer CPUs (ray start "
                    f"--num-cpus). Ray says: {how}."
                ) from None
            log.warning("Ray lost work and repeats it on another node: %s.", how)
            return None
        if isinstance(response, str):
            raise UserError(f"Ray's processes cannot load the ClientApp: {response}")
        self._patience = None
        return response


# -----------------------------------------------------------------------------
# An executor of actors on a Ray cluster that stack their clients' work.
# -----------------------------------------------------------------------------


class RayStacks:
    """An executor of actors on a Ray cluster, each of which works for many clients together.

    An actor has a GPU or a CPU of its own. It always works for the same clients, and keeps their
    samples. Results equal those of one :class:`~raceme.simulation.stacked.Stacked` to float
    tolerance, for any number of actors. An actor that dies is restarted, and repeats its work.

    Parameters
    ----------
    workers, cores, config
        See :class:`RayTasks`.
    device, precision : str
        See :class:`~raceme.simulation.stacked.Stacked`.
    actors : int, optional
        Number of actors; by default one per GPU, or per CPU, of the cluster.

    Raises
    ------
    UserError
        There is no such cluster, its nodes differ, or it has no GPU.
    """

    def __init__(
        self,
        workers: str,
        cores: int,
        device: str = "cpu",
        precision: str = "float32",
        config: RunConfig | None = None,
        actors: int | None = None,
    ) -> None:
        self._cluster = Cluster(workers, cores, config)
        import ray

        kind = "CPU" if device == "cpu" else "GPU"
        available = int(ray.cluster_resources().get(kind, 0))
        if not available:
            self._cluster.close()
            raise UserError(
                f"--device {device} --workers {workers}: the nodes of the Ray cluster have no "
                "GPUs. Give --device cpu, or start nodes on machines with GPUs."
            )
        own = {"num_cpus": 1} if kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        lives = {"max_restarts": MOST_DEATHS - 1, "max_task_retries": MOST_DEATHS - 1}
        actor = ray.remote(**own, **lives)(_StackActor)
        level = logging.getLogger("flwr").level
        given = device, precision, level, list(sys.path), definitions()
        self._actors = [actor.remote(*given) for _ in range(actors or available)]
        self._jobs: dict[str, PendingReply] = {}
        self._responses: dict[str, Response] = {}
        self._batches: dict[int, tuple[int, int]] = {}

    @property
    def mean_batch(self) -> float:
        """Mean number of clients whose training was computed at once."""
        counts, clients = map(sum, zip((0, 0), *self._batches.values(), strict=True))
        return clients / counts if counts else 0.0

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Keep the message until a reply is needed."""
        self._jobs[message.metadata.message_id] = PendingReply(message, context, due)

    def result(self, message_id: str) -> Message:
        """Return a reply, and do all pending work with it.

        Raises
        ------
        UserError
            A GPU's memory does not suffice for one client, or an actor dies repeatedly.
        """
        job = self._jobs[message_id]
        if message_id not in self._responses or job.state is not job.context.state:
            # Work on an outdated state of its client is repeated.
            self._responses.pop(message_id, None)
            self._work(job)
        response = self._responses[message_id]
        self.cancel(message_id)
        if response.state is not None:
            job.context.state = unpack(response.state)
        return job.reply(response, response.data or [])

    def cancel(self, message_id: str) -> None:
        """Drop the message and its reply."""
        self._jobs.pop(message_id, None)
        self._responses.pop(message_id, None)

    def close(self) -> None:
        """Drop unfinished work, end the actors, and leave the cluster."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._jobs, self._responses = [], {}, {}
        self._cluster.close()

    def _work(self, first: PendingReply) -> None:
        """Do the work of a message together with all other pending work, on all actors."""
        from raceme.simulation.stacked.executor import most_together

        chosen = sorted(
            (job for key, job in self._jobs.items() if key not in self._responses),
            key=lambda job: (job is not first, job.due),
        )
        most = most_together(first.message) * len(self._actors)
        parts: dict[int, list[WorkerRequest]] = {}
        for job in chosen[:most]:
            request = job.request(*pack(job.message.content))
            parts.setdefault(job.context.node_id % len(self._actors), []).append(request)
        coming = {number: self._actors[number].work.remote(part) for number, part in parts.items()}
        for number, reference in coming.items():
            responses, self._batches[number] = self._responses_of(reference)
            self._responses |= {response.message_id: response for response in responses}

    def _responses_of(self, reference: Any) -> tuple[list[Response], tuple[int, int]]:
        """Wait for an actor's responses; return them, and its numbers of batches and clients."""
        import ray

        try:
            done: tuple[list[Response], tuple[int, int]] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise
        except ray.exceptions.RayError as error:
            raise UserError(
                f"A process of the Ray cluster that trains stacked clients died {MOST_DEATHS} "
                f"times. The usual reason is a lack of memory. Ray says: {first_line(error)}."
            ) from None
        return done


class _StackActor:
    """Answers requests for many clients together, in a process of a Ray cluster."""

    def __init__(
        self,
        device: str,
        precision: str,
        log_level: int,
        path: Sequence[str],
        pickled: Mapping[str, bytes],
    ) -> None:
        _prepare(path, pickled)
        logging.getLogger("flwr").setLevel(log_level)
        from raceme.simulation.stacked import Stacked

        self._stacked = Stacked(device, precision=precision)

    def work(self, requests: Sequence[WorkerRequest]) -> tuple[list[Response], tuple[int, int]]:
        """Answer requests; return responses, and numbers of batches and of clients so far."""
        own = [(request, *received(request, request.data or [])) for request in requests]
        for order, (_, message, context) in enumerate(own):
            self._stacked.submit(message, context, order)
        responses = []
        for request, message, context in own:
            reply = self._stacked.result(message.metadata.message_id)
            responses.append(response_of(request, reply, context))
        return responses, (self._stacked.batches.count, self._stacked.batches.clients)


# -----------------------------------------------------------------------------
# The processes of tasks.
# -----------------------------------------------------------------------------


@cache
def _desk(target: str, seed: int | None, log_level: int) -> Desk | str:
    """Return the desk of the calling process, which keeps it."""
    return open_desk(target, seed, log_level)


def _respond(
    app: tuple[str, int | None, int, Sequence[str], Mapping[str, bytes]],
    request: WorkerRequest,
    *data: Sequence[bytes],
) -> Response | str:
    """Answer a request on the calling node; the data of its arrays follow it, record by record."""
    target, seed, log_level, path, pickled = app
    _prepare(path, pickled)
    desk = _desk(target, seed, log_level)
    if isinstance(desk, str):
        return desk
    return desk.respond(request, [part for record in data for part in record])
