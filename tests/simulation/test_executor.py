"""Executors give the same results, even if workers die."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pool_apps
import pytest
import torch
from asking import ask, context_of, message_to
from executors import both, check_cancelling, check_records, check_repeating, check_state
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from processes import wait_until

from raceme import client_app
from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import from_array, to_array
from raceme.flower.messages import CLIENT_APP_RAISED_EXCEPTION
from raceme.runs import experiment
from raceme.simulation import Executor, InProcess, Node, Pool, VirtualGrid, executor_for
from raceme.simulation.devices import Device
from raceme.simulation.executor import _blocked_signals
from raceme.simulation.stacked import Stacked
from raceme.training import models

APP = "raceme.client_app:app"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two workers with the small apps, and very little shared memory."""
    executor = Pool("pool_apps:app", workers=2, slot_bytes=2000)
    yield executor
    executor.close()


# A complete run.


def casa(executor: Executor, kill_at: int | None = None) -> tuple[list[str], list[np.ndarray]]:
    """Run CASA on the digits; return its events and its models."""
    config = experiment.resolve(RunConfig(max_updates=120, workers="0"))
    grid = experiment.build_grid(config)
    grid = VirtualGrid(client_app.app, grid.nodes, config.to_mapping(), executor=executor)
    strategy, seen = experiment.build_strategy(config), []

    def observe(event: events.Event) -> None:
        seen.append(repr(event))
        if len(seen) == kill_at:
            workers = [p for p in multiprocessing.active_children() if p.name == "raceme-worker"]
            os.kill(workers[0].pid, signal.SIGKILL)

    strategy.run(
        grid,
        models.initial_arrays(config),
        max_updates=config.max_updates,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
        observe=observe,
    )
    return seen, [strategy.models[key].vector for key in sorted(strategy.models)]


@pytest.fixture(scope="module")
def plain_run() -> tuple[list[str], list[np.ndarray]]:
    return casa(InProcess(client_app.app))


Run = tuple[list[str], list[np.ndarray]]


def test_a_run_in_a_pool_is_the_run_in_one_process_even_if_a_worker_is_killed(
    plain_run: Run,
) -> None:
    pool = Pool(APP, workers=2)
    try:
        seen, vectors = casa(pool, kill_at=60)
    finally:
        pool.close()
    assert seen == plain_run[0]
    for one, other in zip(plain_run[1], vectors, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_with_stacked_clients_is_the_same_but_for_rounding(plain_run: Run) -> None:
    seen, vectors = casa(Stacked())
    assert [event.split("(")[0] for event in seen] == [e.split("(")[0] for e in plain_run[0]]
    for one, other in zip(plain_run[1], vectors, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4)


# A pool and its messages.


def test_a_pool_passes_all_kinds_of_records_in_order(pool: Pool) -> None:
    check_records(pool)


def test_a_pools_reply_has_the_time_to_live_that_is_left(pool: Pool) -> None:
    _, other = both(pool, 3, "query.double")
    assert 490 < other.metadata.ttl <= 500


@pytest.mark.parametrize("size", [10, 499, 501, 300_000])
def test_arrays_larger_than_the_shared_memory_come_through_too(pool: Pool, size: int) -> None:
    # 2,000 bytes of shared memory hold 499 - 32 numbers and their header; 300,000 do not fit into a
    # pipe at once, and all four messages are in transit at the same time.
    values = np.arange(size, dtype=np.float32)
    record = ArrayRecord({"w": to_array(values)})
    sent = [message_to(1, "query.double", arrays=record) for _ in range(4)]
    for message in sent:
        pool.submit(message, context_of(), due=0.0)
    for message in sent:
        reply = pool.result(message.metadata.message_id)
        np.testing.assert_array_equal(from_array(reply.content["arrays"]["w"]), values * 2)


def test_an_exception_in_a_worker_is_the_same_error_reply(pool: Pool) -> None:
    one, other = both(pool, 1, "query.fail")
    assert other.error.code == one.error.code == CLIENT_APP_RAISED_EXCEPTION
    assert other.error.reason == one.error.reason
    assert other.error.reason.startswith("ValueError: this client cannot\nTraceback")


def test_a_client_keeps_its_state_in_order_of_the_results(pool: Pool) -> None:
    check_state(pool)


def test_a_cancelled_message_has_no_result_and_disturbs_no_other(pool: Pool) -> None:
    check_cancelling(pool)


def test_a_grid_on_a_pool_answers_more_messages_than_it_works_ahead(pool: Pool) -> None:
    nodes = [Node(node, Device(seconds_per_round=1.0)) for node in range(1, 101)]
    grid = VirtualGrid(pool_apps.app, nodes, {"name": "a run"}, executor=pool)
    step = ConfigRecord({"step": 1})
    messages = [
        Message(RecordDict({"config": step}), node, "query.count")
        for node in range(1, 101)
        for _ in range(2)
    ]
    replies = list(grid.send_and_receive(messages))
    assert [reply.content["metrics"]["n"] for reply in replies] == [1, 2] * 100


def test_the_tasks_of_a_worker_that_dies_are_done_again(tmp_path: Path) -> None:
    pool = Pool("pool_apps:app", workers=1)
    check_repeating(pool, tmp_path)
    pool.close()


def test_workers_tidy_up_when_they_end(tmp_path: Path) -> None:
    pool = Pool("pool_apps:app", workers=1)
    config = ConfigRecord({"mark": str(tmp_path / "mark")})
    assert ask(pool, message_to(1, "query.tidy", config=config), context_of()).has_content()
    pool.close()
    # Otherwise the run's output would warn of a leaked semaphore.
    assert (tmp_path / "mark").exists()


def test_a_clientapp_may_start_processes_of_its_own(tmp_path: Path) -> None:
    pool = Pool("pool_apps:app", workers=1)
    config = ConfigRecord({"mark": str(tmp_path / "mark")})
    reply = ask(pool, message_to(1, "query.delegate", config=config), context_of())
    assert reply.has_content(), reply.error
    assert reply.content["start"]["method"] == multiprocessing.get_start_method()
    assert (tmp_path / "mark").exists()
    pool.close()


def test_workers_and_what_forks_them_are_deaf_to_what_a_whole_group_gets(tmp_path: Path) -> None:
    """`timeout` and systemd send SIGTERM to all processes; the run decides about its workers."""
    before = {process.pid for process in multiprocessing.active_children()}
    pool = Pool("pool_apps:app", workers=1)
    (worker,) = {process.pid for process in multiprocessing.active_children()} - before
    assert worker
    forks = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    assert forks not in (0, os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(worker, number)
        os.kill(forks, number)
    # The worker starts only now, and another one can still be forked.
    assert ask(pool, message_to(1, "query.echo"), context_of()).has_content()
    os.kill(worker, signal.SIGTERM)
    config = ConfigRecord({"mark": str(tmp_path / "mark")})
    assert ask(pool, message_to(1, "query.tidy", config=config), context_of()).has_content()
    pool.close()
    assert (tmp_path / "mark").exists()
    other = Pool("pool_apps:app", workers=1)
    assert ask(other, message_to(1, "query.echo"), context_of()).has_content()
    other.close()


def test_a_signal_that_comes_while_a_worker_is_started_is_not_lost() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with _blocked_signals():
            # To this thread, because another thread of the tests' process would take the signal.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert not told
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def in_group(group: int) -> int:
    """Return the number of processes in a process group."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found += int(stat.read_text().rpartition(")")[2].split()[2]) == group
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, 5])
def test_a_run_whose_whole_group_is_told_to_stop_leaves_a_checkpoint(
    processes: int, tmp_path: Path
) -> None:
    """The run, Python's resource tracker, the forking process while it imports, and two workers."""
    out, log = tmp_path / "run", tmp_path / "log"
    command = ["run", "--max-updates", "100000", "--workers", "2", "--out", str(out)]
    with log.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "raceme", *command],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    wait_until(lambda: in_group(run.pid) >= processes, 120)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(120) == 130, log.read_text()
    assert json.loads((out / "summary.json").read_text())["reason"] == "interrupted by SIGTERM"
    assert len(list((out / "checkpoint").iterdir())) == 1
    wait_until(lambda: not in_group(run.pid), 60)


def test_a_task_at_which_workers_die_again_and_again_is_named() -> None:
    pool = Pool("pool_apps:app", workers=1)
    with pytest.raises(UserError, match=r"3 worker processes died \(exit code 7\).*node 5"):
        ask(pool, message_to(5, "query.die"), context_of(5))
    pool.close()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:app", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("pool_apps:no_app", "AttributeError: no_app"),
        ("pool_apps:with_dropout", "must be a flwr.clientapp.ClientApp, got function"),
        ("pool_apps:vanishing", r"ended before they loaded .* \(exit code 3\)"),
    ],
)
def test_a_worker_that_cannot_start_is_the_users_to_know(target: str, reason: str) -> None:
    pool = Pool(target, workers=1)
    with pytest.raises(UserError, match=reason) as caught:
        ask(pool, message_to(1, "query.echo"), context_of())
    assert "--workers 0" in str(caught.value)
    pool.close()


def test_too_little_shared_memory_is_reported_with_the_amount() -> None:
    pool = Pool("pool_apps:app", workers=1, slot_bytes=5 * 10**15)
    record = ArrayRecord({"w": Array(np.zeros(3))})
    with pytest.raises(UserError, match=r"10,000,000,000 MB of shared memory.*--workers 0"):
        ask(pool, message_to(1, "query.echo", arrays=record), context_of())
    pool.close()


def test_workers_end_with_the_process_that_started_them() -> None:
    script = (
        "import os, signal; from raceme.simulation import Pool; "
        "Pool('pool_apps:app', workers=2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    here = str(Path(__file__).parents[1])
    # The workers inherit its standard output, which closes when the last one ends.
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])},
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_script_that_does_not_guard_its_run_can_have_workers(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        "from raceme.core.config import RunConfig\nfrom raceme.runs.experiment import simulate\n"
        f"out = {str(tmp_path / 'run')!r}\n"
        "config = RunConfig(clients=4, max_updates=4, workers='1', out=out)\n"
        "print('updates', simulate(config).summary['updates'])\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "updates 4\n", done.stderr


# The choice of the executor.


def test_auto_starts_no_workers_for_little_work() -> None:
    assert isinstance(executor_for(APP, seconds=lambda: 1.0), InProcess)


def test_the_default_run_is_too_short_for_workers() -> None:
    grid = experiment.build_grid(experiment.resolve(RunConfig()))
    assert isinstance(grid._executor, InProcess)


@pytest.mark.parametrize(("workers", "kind"), [("0", InProcess), (0, InProcess), ("1", Pool)])
def test_the_number_of_workers_can_be_given(workers: str | int, kind: type) -> None:
    executor = executor_for(APP, workers)
    assert type(executor) is kind
    executor.close()


@pytest.mark.parametrize("workers", ["many", "-1", "1.5"])
def test_an_impossible_number_of_workers_is_refused(workers: str) -> None:
    with pytest.raises(UserError, match="workers must be auto, 0 for none, a number"):
        executor_for(APP, workers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_reported() -> None:
    with pytest.raises(UserError, match=r"--device cuda.*finds no CUDA GPU.*--device cpu"):
        executor_for(APP, device="cuda")
