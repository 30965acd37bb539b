"""Ray tasks give the same results as one process, even if processes die."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from asking import ask, context_of, message_to
from executors import both, check_cancelling, check_records, check_repeating, check_state
from flwr.app import ArrayRecord

from raceme.core.errors import UserError
from raceme.core.messages import from_array, to_array
from raceme.simulation import executor_for

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs raceme[simulation]")


@pytest.fixture(scope="module")
def tasks() -> Iterator[object]:
    """A local Ray cluster with one CPU, and the small apps."""
    from raceme.simulation.ray_cluster import RayTasks

    executor = RayTasks("pool_apps:app", "ray", cores=1)
    yield executor
    executor.close()


@pytest.mark.slow
def test_tasks_pass_all_kinds_of_records_in_order(tasks) -> None:
    check_records(tasks)


def test_a_version_of_a_model_is_put_into_the_store_once(tasks) -> None:
    first, second = (np.full(100_000, value, np.float32) for value in (1, 2))
    before = tasks._stored.cache_info().misses
    for values in (first, second):
        record = ArrayRecord({"w": to_array(values)})
        sent = [message_to(node, "query.double", arrays=record) for node in (1, 2, 3)]
        for message in sent:
            tasks.submit(message, context_of(message.metadata.dst_node_id), due=0.0)
        for message in sent:
            reply = tasks.result(message.metadata.message_id)
            np.testing.assert_array_equal(from_array(reply.content["arrays"]["w"]), values * 2)
    assert tasks._stored.cache_info().misses - before == 2


def test_versions_that_no_task_has_are_not_kept_for_ever(tasks) -> None:
    for value in range(12):
        record = ArrayRecord({"w": to_array(np.full(30_000, value, np.float32))})
        ask(tasks, message_to(1, "query.double", arrays=record), context_of())
    assert tasks._stored.cache_info().currsize == 8


def test_an_exception_in_a_task_is_the_same_error_reply(tasks) -> None:
    one, other = both(tasks, 1, "query.fail")
    assert other.error.code == one.error.code
    assert other.error.reason == one.error.reason


def test_a_client_keeps_its_state_in_order_of_the_results(tasks) -> None:
    check_state(tasks)


def test_a_cancelled_message_has_no_result_and_disturbs_no_other(tasks) -> None:
    check_cancelling(tasks)


def test_the_task_of_a_process_that_dies_is_done_again_and_that_is_reported(
    tasks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_repeating(tasks, tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "raceme.workers"]
    assert "and repeats it on another node: The worker died unexpectedly" in line


@pytest.mark.slow
def test_a_task_at_which_processes_die_again_and_again_is_named(tasks) -> None:
    message = message_to(5, "query.die")
    with pytest.raises(
        UserError, match=r"3 of Ray's processes died at the same task.* on node 5\."
    ):
        ask(tasks, message, context_of(5))
    tasks.cancel(message.metadata.message_id)


def test_a_port_at_which_no_ray_listens_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raceme.simulation.ray_cluster._CONNECT_SECONDS", 0.5)
    said = r"no Ray cluster at ray://127\.0\.0\.1:1: .*within 0\.5 s"
    with pytest.raises(UserError, match=said):
        executor_for("pool_apps:app", "ray://127.0.0.1:1")


def test_ray_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raceme.simulation.ray_cluster.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ray is not installed. Type: .*pip install"):
        executor_for("pool_apps:app", "ray")


def test_a_cluster_without_a_gpu_is_reported() -> None:
    with pytest.raises(UserError, match=r"no GPUs\. Give --device cpu"):
        executor_for("pool_apps:app", "ray", device="cuda")
