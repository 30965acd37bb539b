"""Runs of a comparison on a Ray cluster: the same results, in the same folders."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raceme.experiments.compare import compare, prepare
from raceme.experiments.jobs import Finished, Job, JobProgress, run_on_ray
from raceme.experiments.suites import Suite, of_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs raceme[simulation]"),
]

SETTINGS = {"clients": 6, "workers": "0", "max-updates": 400}


def suite() -> Suite:
    chosen = of_names(["fedasync", "casa"], {"dataset": "digits", **SETTINGS})
    return Suite(chosen.title, chosen.methods, chosen.settings, (0,))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node without CPUs for this process, and one with two for runs."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", made.address)
        made.doomed = made.add_node(num_cpus=2, object_store_memory=100_000_000)
        yield made
        made.shutdown()


@pytest.fixture
def runs(cluster: Any) -> Iterator[Any]:
    from raceme.simulation.ray_cluster import Cluster

    made = Cluster("ray", 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    out = tmp_path_factory.mktemp("plain")
    compare(prepare(suite(), out), 2, Console(file=io.StringIO()))
    return content_of(out)


def content_of(out: Path) -> list[object]:
    """Return all contents of the stores of a comparison's runs."""
    content: list[object] = []
    for path in sorted(out.rglob("run.sqlite")):
        with sqlite3.connect(path) as store:
            tables = store.execute("select name from sqlite_master where type='table'").fetchall()
            content.append(path.relative_to(out))
            content += [store.execute(f"select * from {t}").fetchall() for (t,) in sorted(tables)]
    return content


def test_an_interrupted_comparison_continues_with_its_finished_runs(
    runs: Any, tmp_path: Path, plain: list[object]
) -> None:
    def interrupted(job: Job, news: JobProgress | Finished | None) -> None:
        if isinstance(news, JobProgress):
            raise KeyboardInterrupt

    jobs = prepare(suite(), tmp_path).plain
    with pytest.raises(KeyboardInterrupt):
        run_on_ray(runs, jobs, 2, interrupted)
    assert any(job.can_resume and job.summary() is None for job in jobs)
    compare(prepare(suite(), tmp_path), 2, Console(file=io.StringIO()))
    assert content_of(tmp_path) == plain


def test_runs_are_those_of_this_machine_though_their_node_is_killed(
    cluster: Any, runs: Any, tmp_path: Path, plain: list[object]
) -> None:
    console = Console(file=io.StringIO())

    def run_all(jobs: Any, processes: int, report: Any) -> dict[Job, str]:
        def killing(job: Job, news: JobProgress | Finished | None) -> None:
            report(job, news)
            if isinstance(news, JobProgress) and cluster.doomed is not None:
                doomed, cluster.doomed = cluster.doomed, None
                cluster.remove_node(doomed, allow_graceful=False)
                cluster.add_node(num_cpus=2, object_store_memory=100_000_000)

        return run_on_ray(runs, jobs, processes, killing)

    comparison = compare(prepare(suite(), tmp_path), runs.cpus, console, run_all)
    assert not any(result.errors for result in comparison.results)
    assert content_of(tmp_path) == plain
    assert (tmp_path / "compare.md").exists()


def test_a_run_that_fails_names_its_node(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, _) = prepare(suite(), tmp_path).plain
    ended = []
    broken = Job(job.method, job.seed, job.config.with_values(model="nowhere:model"))
    errors = run_on_ray(runs, [broken], 1, lambda job, news: ended.append(news))
    assert errors[broken].startswith("on node ")
    assert "nowhere" in errors[broken]
