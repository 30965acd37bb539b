"""A Ray cluster of several nodes on one machine: lost, different and empty nodes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import as_in_a_terminal, free_port, wait_until

from raceme import client_app, datasets
from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.runs import experiment
from raceme.simulation import Executor, InProcess, VirtualGrid, executor_for
from raceme.training import models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs raceme[simulation]"),
]

APP = "raceme.client_app:app"
RACEME = [sys.executable, "-c", "from raceme.cli import main; main()"]
STORE = 100_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of one node; `ray` is its address, also for the processes of a test."""
    from ray.cluster_utils import Cluster

    port = free_port()
    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": STORE,
        "ray_client_server_port": port,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args=head)
        made.client_address = f"ray://127.0.0.1:{port}"
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


@pytest.fixture
def added(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Add nodes for one test."""
    nodes = []

    def add(**settings: Any) -> Any:
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=STORE, **settings))
        return nodes[-1]

    yield add
    for node in nodes:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


def run_of(
    strategy: str, executor: Executor, kill: Callable[[], None] = lambda: None
) -> tuple[list[str], dict[int, bytes]]:
    """Run a method on the digits; return its events and its models."""
    config = RunConfig(strategy=strategy, max_updates=120, clients=12, workers="0")
    config = experiment.resolve(config)
    grid = experiment.build_grid(config)
    grid = VirtualGrid(client_app.app, grid.nodes, config.to_mapping(), executor=executor)
    method, seen = experiment.build_strategy(config), []

    def observe(event: events.Event) -> None:
        seen.append(repr(event))
        if len(seen) == 40:
            kill()

    method.run(
        grid,
        models.initial_arrays(config),
        max_updates=config.max_updates,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
        observe=observe,
    )
    return seen, {key: model.vector.tobytes() for key, model in method.models.items()}


@pytest.mark.parametrize("strategy", ["casa", "ifca", "fedsoft"])
def test_a_run_on_three_nodes_is_the_run_in_one_process_though_one_is_killed(
    cluster: Any,
    added: Callable[..., Any],
    strategy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """IFCA sends several models to each client, and FedSoft's clients keep their own model."""
    plain = run_of(strategy, InProcess(client_app.app))
    _, doomed = added(), added()
    executor = executor_for(APP, "ray")
    try:
        spread = run_of(strategy, executor, lambda: cluster.remove_node(doomed, False))
    finally:
        executor.close()
    assert spread == plain
    lines = [r.getMessage() for r in caplog.records if r.name == "raceme.workers"]
    assert all("Ray lost work" in line for line in lines)


def test_another_runs_own_cluster_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster of the other run ends with that run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    other = (
        "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False, "
        "log_to_driver=False); print(ray.get_runtime_context().get_node_id(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        node_id = process.stdout.readline().strip()
        executor = executor_for(APP, "ray")
        try:
            assert len(node_id) == 56
            assert node_id not in executor._cluster.nodes
        finally:
            executor.close()
            process.communicate("\n")


def test_a_node_with_other_versions_is_named(added: Callable[..., Any], tmp_path: Path) -> None:
    other = tmp_path / "torch-1.2.3.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    added()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    node = added(env_vars={"PYTHONPATH": path})
    with pytest.raises(UserError) as caught:
        executor_for(APP, "ray")
    said = (
        f"data of this machine: {node.node_ip_address} ({node.node_id[:8]}) has torch 1.2.3; this"
    )
    assert said in str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Two clients' files."""
    rng = np.random.default_rng(0)
    for client in range(2):
        x, y = rng.random((40, 8), np.float32), rng.integers(0, 2, 40)
        arrays = {"x_train": x, "y_train": y, "x_test": x[:9], "y_test": y[:9]}
        np.savez(tmp_path / f"device-{client}.npz", **arrays)
    return str(tmp_path / "device-{client}.npz")


def loaded(files: str) -> RunConfig:
    """Return a configuration whose data are in this process's cache."""
    keys = {"dataset": "npz", "clients": 2, "max-updates": 4, "data-file": files}
    config = experiment.resolve(RunConfig.from_mapping(keys))
    datasets.client_data(config, 0)
    return config


def test_a_node_without_the_data_is_named_with_the_place(
    added: Callable[..., Any], files: str, tmp_path: Path
) -> None:
    config = loaded(files)
    (tmp_path / "device-0.npz").unlink()
    with pytest.raises(UserError, match=r"has data missing \(.*device-0\.npz"):
        executor_for(APP, "ray", config=config)


def test_a_node_with_other_data_is_named(
    added: Callable[..., Any], files: str, tmp_path: Path
) -> None:
    config = loaded(files)
    (tmp_path / "device-1.npz").replace(tmp_path / "device-0.npz")
    with pytest.raises(UserError, match=r"has data \w{8}; this machine has .* data \w{8}\."):
        executor_for(APP, "ray", config=config)


# The command line.


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        as_in_a_terminal([*RACEME, "run", "--clients", "12", *arguments]),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def content_of(folder: Path) -> list[object]:
    """Return all contents of a run's store."""
    with sqlite3.connect(folder / "run.sqlite") as store:
        tables = store.execute("select name from sqlite_master where type='table'").fetchall()
        return [store.execute(f"select * from {name}").fetchall() for (name,) in sorted(tables)]


@pytest.mark.parametrize("way", ["client", "local"])
def test_ctrl_c_ends_in_order_and_the_run_goes_on_in_one_process(
    cluster: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster.client_address if way == "client" else "ray"
    if way == "local":
        monkeypatch.setenv("RAY_ADDRESS", "local")
    with command(tmp_path, "--max-updates", "100000", "--workers", workers, "--out", "out") as run:
        assert run.stdout is not None
        seen = []
        for line in run.stdout:
            seen.append(line)
            if line.startswith("evaluated at 12 updates"):
                break
        # Like a terminal, to all processes of the group.
        os.killpg(run.pid, signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(120) == 130, "".join(seen) + rest
    # No message of Ray, and no traceback.
    assert "Traceback" not in rest
    assert "ray" not in "".join(seen) + rest.lower()
    updates = str(updates_of(tmp_path / "out") + 30)
    with command(tmp_path, "--resume", "out", "--workers", "0", "--max-updates", updates) as again:
        assert again.wait(240) == 0, again.stdout.read()
    with command(tmp_path, "--max-updates", updates, "--workers", "0", "--out", "plain") as plain:
        assert plain.wait(240) == 0, plain.stdout.read()
    assert content_of(tmp_path / "out") == content_of(tmp_path / "plain")


def updates_of(folder: Path) -> int:
    """Return the number of updates in a run's store."""
    with sqlite3.connect(folder / "run.sqlite") as store:
        return int(store.execute("select count(*) from updates").fetchone()[0])


def test_processes_are_gone_when_a_run_has_ended(
    cluster: Any, added: Callable[..., Any], tmp_path: Path
) -> None:
    import ray

    with command(
        tmp_path, "--max-updates", "24", "--workers", cluster.client_address, "--out", "out"
    ) as run:
        assert run.wait(240) == 0, run.stdout.read()
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    try:
        wait_until(lambda: ray.available_resources().get("CPU", 0) == 1.0, 60)
    finally:
        ray.shutdown()
