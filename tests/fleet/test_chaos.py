"""One run over gRPC in which every process is killed once: no update is lost or doubled.

`pytest -m slow -s tests/fleet/test_chaos.py` also prints a log of the events.
"""

import os
import re
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

import pytest
from bad_network import BadNetwork, bad_network
from processes import ROOT, Loopback, Process, loopback, raceme, wait_until

from raceme.core.config import RunConfig
from raceme.core.events import ClusterChange, ClustersChanged, Event, UpdateApplied
from raceme.fleet.testbed import descendants
from raceme.records.record import RunRecord, read_run
from raceme.records.store import read_events
from raceme.runs.checkpoints import read_tree
from raceme.runs.experiment import simulate

CLIENTS = 7
KILLED, FAR_AWAY, LEAVING, NEWCOMER = 0, 1, 2, 6
"""Clients 0 to 2 have one label group, 3 to 6 the other. The newcomer starts with the model of the
larger cluster."""
KEYS = {
    "strategy": "casa",
    "dataset": "digits",
    "clients": CLIENTS,
    "groups": "0.43,0.57",
    "local-epochs": 3,
    "batch-size": 1,
    "lr": 0.005,
    "casa.alpha0": 1.6,
    "eval-every": 20,
}
SAVED_EVERY = 10
FURTHER = 120
"""Updates after the last resume: enough for a device to rejoin that waits half a minute for the
rest of a message whose sender was killed."""
FIRST_UPDATE = r"update +(\d+) "


class Fleet:
    """The SuperLink, the devices and the runs of one result folder."""

    def __init__(self, bed: Loopback, out: Path) -> None:
        self.bed, self.out = bed, out
        self.link = self._superlink()

    def _superlink(self) -> Process:
        return self.bed.superlink("--insecure", "--database", str(self.bed.home / "link.db"))

    def device(self, number: int, port: int = 0) -> Process:
        address = f"127.0.0.1:{port or self.bed.fleet_port}"
        node = f"partition-id={number} num-partitions={CLIENTS}"
        command = raceme("device", "--insecure", "--superlink", address, "--node-config", node)
        return self.bed.start(f"device-{number}", command)

    def run(self, max_updates: int, **more: object) -> Process:
        keys = {**KEYS, "checkpoint-every": SAVED_EVERY, "max-updates": max_updates, **more}
        config = " ".join(
            f"{key}='{value}'" if isinstance(value, str | Path) else f"{key}={value}"
            for key, value in keys.items()
        )
        return self.bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", config)

    def server_app(self) -> int:
        """The process in which the strategy runs."""
        (found,) = (child for child in descendants(self.link.handle.pid) if is_server_app(child))
        return found

    def crash(self) -> None:
        """Kill the SuperLink and restart it."""
        self.link.handle.kill()
        self.link.handle.wait()
        self.link = self._superlink()


def is_server_app(process_id: int) -> bool:
    with suppress(OSError):
        return b"flwr-serverapp" in Path(f"/proc/{process_id}/cmdline").read_bytes()
    return False


def cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def applied(run: Process) -> int:
    """Return the number of updates applied so far, from a run's log."""
    numbers = re.findall(FIRST_UPDATE, run.text())
    return int(numbers[-1]) if numbers else 0


def applied_by(run: Process, client: int) -> int:
    return len(re.findall(rf"update +\d+ .*client-{client}\b", run.text()))


def has_worked(run: Process, client: int) -> bool:
    return applied_by(run, client) >= 2


def wait_for_work_in_hand(device: Process) -> None:
    """Wait until a device is in the middle of training."""
    done = len(re.findall("train task", device.text()))
    wait_until(lambda: len(re.findall("train task", device.text())) > done, 60, device.describe)
    before = cpu_seconds(device.handle.pid)
    wait_until(lambda: cpu_seconds(device.handle.pid) > before + 0.1, 60, device.describe)


class Story:
    """A log of the events, printed with ``-s``."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def note(self, what: str, run: Process) -> None:
        seconds = time.monotonic() - self._started
        print(f"{seconds:6.1f} s  update {applied(run):4}  {what}", flush=True)

    def end(self, record: RunRecord, network: BadNetwork) -> None:
        print(
            f"{len(record.updates.seq)} updates, {len(record.rejections.time)} rejected; the bad "
            f"network: {network.segments} segments, {network.lost} times one lost, "
            f"{network.cuts} connections cut"
        )
        for name, count in sorted(Counter(map(str, record.updates.client)).items()):
            print(f"  {name}: {count} updates, cluster {record.assignment()[name]}")
        for reason, count in Counter(map(str, record.rejections.reason)).items():
            print(f"  {count} x {reason}")


def client_events(out: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(out / "run.sqlite")) as connection:
        return set(connection.execute("SELECT client, kind FROM client_events"))


def versions_of(events: Sequence[Event]) -> list[dict[int, int]]:
    """Count the aggregations into each model, and check each update against its model's version.

    The check fails if an update is in a model but not in the store, or the other way round, or in
    one of them twice.
    """
    versions, after = {0: 0}, [{0: 0}]
    first: UpdateApplied | None = None

    def count(event: UpdateApplied, places: bool) -> None:
        # A client that is placed by this update was sent the model of another cluster.
        if not places:
            assert event.base_version + event.staleness == versions[event.cluster], event
        versions[event.cluster] += 1
        after.append(dict(versions))

    for number, event in enumerate(events):
        if isinstance(event, ClustersChanged) and event.change is ClusterChange.SPLIT:
            version = versions.pop(event.gone[0])
            versions.update(dict.fromkeys(event.made, version))
            if first is not None:
                count(first, False)
                first = None
        elif isinstance(event, UpdateApplied):
            # Consequences of an update are reported after it: a split into whose parts the update
            # went, or a placement of its client.
            following = takewhile(lambda e: isinstance(e, ClustersChanged), events[number + 1 :])
            changes = [change for change in following if isinstance(change, ClustersChanged)]
            if event.cluster in versions:
                count(event, any(event.client in change.memberships for change in changes))
            else:
                first = event
    return after


def check_the_store(out: Path) -> None:
    """Check that every accepted update is there exactly once."""
    record = read_run(out)
    updates = record.updates
    assert list(updates.seq) == list(range(1, len(updates.seq) + 1))
    assert list(updates.time) == sorted(updates.time)
    # No two updates answer the same task, by the server's clock and by the devices' clocks.
    for began in (updates.dispatched_at, updates.started_at):
        tasks = Counter(zip(map(str, updates.client), map(float, began), strict=True))
        assert max(tasks.values()) == 1
    versions = versions_of(read_events(out))
    assert len(versions) == len(updates.seq) + 1
    saved = max((out / "checkpoint").iterdir())
    tree, note = read_tree(saved)
    models = tree["strategy"]["clusters"]["models"]
    assert {int(k): model["version"] for k, model in models.items()} == versions[
        int(note["updates"])
    ]


def check_the_clusters(record: RunRecord) -> None:
    """Check that the final clusters are the groups of the data."""
    together: dict[int, set[str]] = {}
    for client, cluster in record.assignment().items():
        together.setdefault(cluster, set()).add(client)
    groups: dict[int | None, set[str]] = {}
    for client, group in record.summary.membership.groups.items():
        groups.setdefault(group, set()).add(client)
    assert len(record.summary.membership.groups) == CLIENTS
    assert sorted(together.values(), key=sorted) == sorted(groups.values(), key=sorted)


@pytest.mark.slow
def test_on_virtual_time_the_groups_are_found_though_one_leaves_and_one_comes_late(
    tmp_path: Path,
) -> None:
    profile = tmp_path / "fleet.toml"
    profile.write_text(
        "[device]\nseconds-per-round = 1.0\njitter = 0.2\n"
        f"[[group]]\nclients = [{LEAVING}]\nonline = [[0, 8]]\n"
        f"[[group]]\nclients = [{NEWCOMER}]\nonline = [[10, 10000]]\n"
    )
    keys = {**KEYS, "devices": str(profile), "max-updates": 100, "task-timeout": 20.0}
    simulate(RunConfig.from_mapping({**keys, "workers": "0", "out": str(tmp_path / "out")}))
    check_the_clusters(read_run(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_dies_once_and_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = Story()
    with loopback(tmp_path) as bed:
        fleet = Fleet(bed, out)
        with bad_network(bed.fleet_port, delay=0.1, loss=0.05, mean_life=20.0) as network:
            devices = {
                number: fleet.device(number, network.port if number == FAR_AWAY else 0)
                for number in range(CLIENTS)
                if number != NEWCOMER
            }
            for device in devices.values():
                device.wait_for("online at", 180)
            first = fleet.run(100_000, out=out)
            first.wait_for("→ clusters", 120)
            told.note("clusters found", first)

            wait_for_work_in_hand(devices[KILLED])
            devices[KILLED].handle.kill()
            told.note("a device killed in the middle of its task, started again", first)
            devices[KILLED] = fleet.device(KILLED)
            assert devices.pop(LEAVING).stop() == 0
            told.note("a device has left for good", first)
            devices[NEWCOMER] = fleet.device(NEWCOMER)
            wait_until(partial(has_worked, first, NEWCOMER), 180, first.describe)
            told.note("a newcomer is at work", first)

            fleet.crash()
            told.note("the SuperLink killed, started again", first)
            second = fleet.run(100_000, resume=out)
            resumed_at = int(second.wait_for(FIRST_UPDATE, 240).group(1))
            told.note(f"gone on with update {resumed_at}", second)
            assert applied(first) + 1 - resumed_at <= SAVED_EVERY
            for number in devices:
                wait_until(partial(has_worked, second, number), 240, second.describe)
            told.note("every device is back", second)

            os.kill(fleet.server_app(), signal.SIGKILL)
            last = applied(second)
            told.note("the server app killed", second)
            third = fleet.run(last + FURTHER, resume=out)
            resumed_at = int(third.wait_for(FIRST_UPDATE, 240).group(1))
            told.note(f"gone on with update {resumed_at}", third)
            assert last + 1 - resumed_at <= SAVED_EVERY
            third.wait_for("Results are in", 240)
            assert third.wait() == 0
            told.note("the end", third)
        assert network.lost > 0
        assert network.cuts > 0
    record = read_run(out)
    told.end(record, network)
    assert record.summary.reason == f"{last + FURTHER} updates were applied"
    check_the_store(out)
    check_the_clusters(record)
    assert (f"client-{KILLED}", "returned") in client_events(out)
    assert (f"client-{LEAVING}", "left") in client_events(out)
    assert {str(client) for client in record.updates.client[record.updates.seq > last]} == {
        f"client-{number}" for number in devices
    }
