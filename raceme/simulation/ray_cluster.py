"""The Ray cluster that a run's work is spread over: found or started, checked, and left again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import grpc

from raceme.config.errors import UserError

NAME = "ray"
ADDRESS = "ray://"
"""What the address of Ray's own client begins with."""

INSTALL = "python3 -m pip install -e '.[simulation]'"
_CONNECT_SECONDS = 20.0
_NODE_SECONDS = 60.0
"""Time for a node to say what is installed there: it starts a process for it."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # What a raylet says about workers that have ended would stand in the run's output.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Ray tells nobody of the run, and prints nothing; what a person has set stays."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Cluster:
    """A connection to a Ray cluster.

    If this process is connected to one already, that one is used, and stays connected.

    Parameters
    ----------
    workers : str
        ``"ray"``: the cluster that this machine is a node of, or else a new one on this machine
        alone. ``"ray://HEAD:PORT"``: the cluster with this address of Ray's client.
    cores : int
        CPUs of a new cluster.

    Raises
    ------
    UserError
        Ray is not installed; there is no cluster; its nodes do not fit.
    """

    def __init__(self, workers: str, cores: int) -> None:
        if find_spec("ray") is None:
            raise UserError(f"--workers {workers}: ray is not installed. Type: {INSTALL}")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        self._connected = False
        if ray.is_initialized():
            # The caller's own: a process can be in one cluster only.
            if workers != NAME:
                _check_listens(workers)
        else:
            with _own_signal_handlers():
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
        """Return what a node is called in messages; it may have come later than the run began."""
        import ray

        if node_id not in self.nodes:
            self.nodes |= {node["NodeID"]: _name(node) for node in ray.nodes()}
        return self.nodes.get(node_id, node_id[:8])

    def close(self) -> None:
        """Leave the cluster if it was joined here; it ends if it was started here."""
        if self._connected:
            import ray

            self._connected = False
            with _own_signal_handlers():
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
            # `ray start` has started one, whose CPUs are what they are. Not ``"auto"``, which
            # joins whatever somebody else's run has started for itself, and ends with that.
            ray.init(**quiet)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        where = f"cluster at {address}" if address else "cluster of this machine"
        raise UserError(f"The Ray {where} cannot be joined or started: {reason}") from None


def _check_listens(address: str) -> None:
    """Raise UserError if nothing at an address speaks Ray's protocol; Ray would try for minutes."""
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        # Ray's own keys are needed to find out.
        return
    with grpc.insecure_channel(address.removeprefix(ADDRESS)) as channel:
        try:
            grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise UserError(
                f"There is no Ray cluster at {address}: nothing answers there within "
                f"{_CONNECT_SECONDS:g} s. `ray start --head` starts one, on port 6379, and on port "
                f"10001 for {ADDRESS} addresses."
            ) from None


def check_nodes(nodes: Mapping[str, str]) -> None:
    """Check that all nodes have what is installed here.

    Parameters
    ----------
    nodes : Mapping[str, str]
        Names by node id.

    Raises
    ------
    UserError
        Some have not; each is named.
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
            wrong.append(f"{nodes[node_id]} says nothing within {_NODE_SECONDS:g} s")
            continue
        except ray.exceptions.RayError as error:
            # A node that has just died may have been listed; it will get no work.
            if node_id in alive:
                wrong.append(f"{nodes[node_id]} cannot be asked ({first_line(error)})")
            continue
        other = ", ".join(
            f"{name} {there[name]}" for name, version in here.items() if there[name] != version
        )
        if other:
            wrong.append(f"{nodes[node_id]} has {other}")
    if wrong:
        own = ", ".join(f"{name} {version}" for name, version in here.items())
        raise UserError(
            "All nodes of the Ray cluster must have what this machine has, and do not: "
            f"{'; '.join(wrong)}; here there are {own}."
        )


def first_line(error: BaseException) -> str:
    """Return what an error says in one line: Ray's have many."""
    text = str(error).strip().partition("\n")[0].rstrip(".:")
    return text or type(error).__name__


def _installed() -> Any:
    """Return the function that says what is installed where it is called.

    It is made here so that it travels to nodes as code: there Raceme may be missing, or another.
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
            # Two checkouts state the same version, and need not be the same.
            digest, folder = hashlib.sha256(), Path(spec.submodule_search_locations[0])
            for path in sorted(folder.rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
            found["Raceme"] = f"{version('raceme')} (sources {digest.hexdigest()[:8]})"
        return found | {name: version(name) for name in ("torch", "numpy", "flwr")}

    return installed


def _alive() -> dict[str, str]:
    """Return the names of the nodes that are there, by node id."""
    import ray

    return {node["NodeID"]: _name(node) for node in ray.nodes() if node["Alive"]}


def _name(node: Mapping[str, Any]) -> str:
    """Return what a node is called: its address, and which of several with the same one."""
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put signal handlers back afterwards: Ray sets its own for SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
