"""Traces: the times of an earlier run, played again on virtual time."""

from pathlib import Path
from typing import Any

import pytest

from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.records.record import RunRecord, read_run
from raceme.records.store import RunStore, read_events
from raceme.runs.experiment import simulate
from raceme.simulation.devices import TaskRecord, TracedDevice, Workload, traced_fleet

CHURN = """
[device]
seconds-per-round = [1.0, 4.0]
jitter = 0.4
drop = 0.1

[[group]]
clients = [1]
online = [[2.5, 9.0], [12.0, 1000.0]]

[[group]]
clients = [2]
mean-online = 15.0
mean-offline = 2.0
"""
KEYS = {"clients": 5, "groups": "0.5,0.5", "max-updates": 60, "workers": "0", "task-timeout": 10}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on devices of which everything is random: it stands for one on real devices."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "churn.toml").write_text(CHURN)
    return play(folder / "out", str(folder / "churn.toml"), strategy="fedasync", seed=5)


def play(out: Path, devices: str, **keys: Any) -> Path:
    mapping = {**KEYS, **keys, "devices": devices, "out": str(out)}
    simulate(RunConfig.from_mapping(mapping))
    return out


def arrivals(record: RunRecord) -> list[tuple[str, float]]:
    """Who replied when, useful or not, to the microsecond."""
    rows = [
        (float(time), str(client))
        for kind in (record.updates, record.rejections)
        for time, client in zip(kind.time, kind.client, strict=True)
    ]
    return [(client, round(time, 6)) for time, client in sorted(rows)]


def test_replies_arrive_in_the_recorded_order_and_at_the_recorded_times(
    recorded: Path, tmp_path: Path
) -> None:
    # Another method and seed, other models: the same times.
    replayed = play(tmp_path / "out", f"trace:{recorded}", strategy="casa", seed=1)
    then, now = read_run(recorded), read_run(replayed)
    assert len(then.rejections.time) > 2
    assert arrivals(now) == arrivals(then)
    assert list(now.updates.client) == list(then.updates.client)
    assert list(now.updates.train_loss) != list(then.updates.train_loss)


def test_a_longer_run_begins_again_with_the_first_recorded_task(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {"client-0": [1.0, 2.0, 4.0], "client-1": [5.0]})
    out = play(tmp_path / "out", f"trace:{folder}", clients=2, **{"max-updates": 10})
    updates = read_run(out).updates
    mine = updates.time[updates.client == "client-0"]
    assert list(mine[:7]) == [1.0, 3.0, 7.0, 8.0, 10.0, 14.0, 15.0]


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        # Each goes on when the server has handed out its next task, 0.125 or 0.25 s later.
        ({"client-0": [0.0, 1.125], "client-1": [0.0, 1.75]}, {0: [1.0, 1.125], 1: [1.5, 1.25]}),
        # Both wait for the slower one.
        ({"client-0": [0.0, 1.75], "client-1": [0.0, 1.75]}, {0: [1.0, 1.0], 1: [1.5, 1.0]}),
    ],
    ids=["at once", "in rounds"],
)
def test_what_the_server_took_is_of_the_rhythm_and_waiting_for_others_is_not(
    tmp_path: Path, sent: dict[str, list[float]], seconds: dict[int, list[float]]
) -> None:
    """Without staleness, as of clients that have a cluster each."""
    first = {"client-0": 1.0, "client-1": 1.5}
    tasks = [(client, at[0], at[0] + first[client]) for client, at in sent.items()]
    tasks += [(client, at[1], at[1] + 1.0) for client, at in sent.items()]
    with RunStore(tmp_path) as store:
        for client in sent:
            store.observe(events.ClientJoined(0.0, client, 1, 10, None))
        for number, task in enumerate(sorted(tasks, key=lambda task: task[2])):
            store.observe(update(number + 1, *task))
    devices, _ = traced_fleet(str(tmp_path), 2)
    for number, wanted in seconds.items():
        tasks = devices[number].tasks  # type: ignore[attr-defined]
        assert [task.seconds for task in tasks[:2]] == wanted


def test_the_mean_duration_is_that_of_the_recorded_tasks() -> None:
    device = TracedDevice(tasks=(TaskRecord(1.0), TaskRecord(3.0, "lost")))
    assert device.mean_duration(Workload(examples=10)) == 2.0


def test_devices_keep_the_names_that_they_had(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {"kitchen": [1.0], "attic": [2.0]})
    devices, names = traced_fleet(str(folder), 2)
    assert names == ["attic", "kitchen"]
    assert [device.tasks[0].seconds for device in devices] == [2.0, 1.0]  # type: ignore[attr-defined]
    out = play(tmp_path / "out", f"trace:{folder}", clients=2, **{"max-updates": 3})
    assert {client.client for client in read_run(out).clients} == {"attic", "kitchen"}


def test_a_device_is_there_when_it_was_there(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for event in (
            events.ClientJoined(0.0, "client-0", 1, 10, None),
            events.ClientJoined(0.5, "client-1", 2, 10, None),
            update(1, "client-0", 0.0, 1.0),
            events.ClientLeft(2.0, "client-0"),
            update(2, "client-1", 0.5, 3.0),
            events.ClientJoined(4.0, "client-0", 3, 10, None, returned=True),
        ):
            store.observe(event)
    (first, second), _ = traced_fleet(str(tmp_path), 2)
    assert first.online == ((0.0, 2.0), (4.0, float("inf")))
    assert second.online == ((0.5, float("inf")),)


def record(folder: Path, seconds: dict[str, list[float]]) -> Path:
    """Write a run store of clients that were there from the start."""
    with RunStore(folder) as store:
        number = 0
        for client, durations in seconds.items():
            store.observe(events.ClientJoined(0.0, client, 1, 10, None))
            time = 0.0
            for duration in durations:
                number += 1
                store.observe(update(number, client, time, time + duration))
                time += duration
    return folder


def update(number: int, client: str, sent: float, returned: float) -> events.UpdateApplied:
    return events.UpdateApplied(number, returned, client, 0, 0, 0, 0.5, sent, 0.1, 1, 1)


# Mistakes.


@pytest.mark.parametrize(
    ("seconds", "clients", "message"),
    [
        ({}, 2, "has no updates: there are no times to replay"),
        ({"client-0": [1.0], "client-1": [1.0]}, 3, r"use --clients 2"),
        ({"client-0": [1.0], "client-7": [1.0]}, 1, r"2 clients \(client-0, client-7\), this one"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    seconds: dict[str, list[float]], clients: int, message: str, tmp_path: Path
) -> None:
    folder = record(tmp_path / "run", seconds)
    with pytest.raises(UserError, match=message):
        traced_fleet(str(folder), clients)


def test_a_trace_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run store"):
        traced_fleet(str(tmp_path), 2)
    with pytest.raises(UserError, match="needs the folder of a run"):
        traced_fleet("", 2)
    with pytest.raises(UserError, match="There is no run store"):
        play(tmp_path / "out", f"trace:{tmp_path}")


def test_on_virtual_time_no_clock_of_a_machine_is_asked(recorded: Path) -> None:
    updates = [event for event in read_events(recorded) if isinstance(event, events.UpdateApplied)]
    assert len(updates) == 60
    assert all(update.started_at is None and update.finished_at is None for update in updates)
