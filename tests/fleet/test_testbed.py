"""`raceme up`: real processes on this machine, which all end with it, also when it is killed."""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT, Loopback, Process, loopback, raceme, wait_until
from typer.testing import CliRunner

from benchmarks.shaped_devices import Shape, check, netem, places, shapes_of
from raceme.cli import app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.fleet.testbed import Logs, descendants, readable
from raceme.records.record import read_run
from raceme.records.store import read_events
from raceme.runs.experiment import simulate
from raceme.simulation import Device

SLOW = pytest.mark.slow
KEYS = ["--clients", "2", "--set", "groups=0.5,0.5", "--set", "eval-every=10"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Loopback]:
    with loopback(tmp_path) as opened:
        yield opened


def up(place: Loopback, *options: str) -> Process:
    return place.start("up", raceme("up", *options))


def family(process: Process) -> dict[int, str]:
    """Return the processes that a testbed has started, by id."""
    found = {}
    for child in descendants(process.handle.pid):
        try:
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def all_gone(processes: dict[int, str]) -> bool:
    # A zombie, without a command line, counts as gone.
    return not any(
        Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/cmdline").read_bytes()
        for child in processes
    )


def test_a_run_from_start_to_end_with_the_times_of_each_task(
    place: Loopback, tmp_path: Path
) -> None:
    # At 0.05 s per update, one device may start seconds before the other. FedAsync measures no
    # similarities, so there is no figure of them.
    limit = ["--strategy", "fedasync", "--max-updates", "150"]
    bed = up(place, *KEYS, *limit, "--out", str(tmp_path / "out"))
    bed.wait_for(r"serve +\| update +3 ", 120)
    processes = family(bed)
    # The server and two devices.
    assert len(processes) >= 3
    assert bed.wait(60) == 0, bed.describe()
    assert "device 1  | " in bed.text()
    assert f"Results, plots and models: {tmp_path / 'out'}" in bed.text()
    # Routine messages of devices are only in their log files.
    assert "train task" not in bed.text()
    logs = {path.name: path.read_text() for path in (tmp_path / "out" / "logs").iterdir()}
    assert sorted(logs) == ["device-0.log", "device-1.log", "serve.log"]
    assert "train task" in logs["device-1.log"]
    assert "update  150" in logs["serve.log"]
    assert all_gone(processes)
    updates = [e for e in read_events(tmp_path / "out") if type(e).__name__ == "UpdateApplied"]
    assert len(updates) == 150
    for update in updates:
        assert update.started_at is not None
        assert update.finished_at is not None
        # All processes share one clock, which may be corrected during the run.
        slack = 0.1
        assert update.dispatched_at - slack < update.started_at < update.finished_at
        assert update.finished_at < update.time + slack

    keys = {"clients": 2, "groups": "0.5,0.5", "devices": f"trace:{tmp_path / 'out'}"}
    limits = {"max-updates": 150, "workers": "0", "out": str(tmp_path / "replayed")}
    simulate(RunConfig.from_mapping({**keys, **limits, "strategy": "fedasync"}))
    then, now = read_run(tmp_path / "out").updates, read_run(tmp_path / "replayed").updates
    # The order of simultaneous replies of different clients is not recorded.
    for client in set(then.client):
        wanted = then.time[then.client == client]
        assert list(now.time[now.client == client]) == pytest.approx(list(wanted), abs=0.01)
    assert len(now.client) == len(then.client)


@SLOW
def test_a_server_that_is_killed_is_gone_on_with_and_applies_no_update_twice(
    place: Loopback, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    saving = ["--set", "checkpoint-every=5", "--max-updates", "300", "--out", str(out)]
    bed = up(place, *KEYS, *saving)
    bed.wait_for(r"serve +\| update +12 ", 120)
    (server,) = (child for child, line in family(bed).items() if " serve " in line)
    os.kill(server, signal.SIGKILL)
    assert bed.wait(60) == 2, bed.describe()
    assert "The server was ended by signal 9 during the run" in bed.text()
    assert not (out / "summary.json").exists()

    again = up(place, "--clients", "2", "--resume", str(out), "--max-updates", "30")
    assert again.wait(90) == 0, again.describe()
    assert "Resuming from" in again.text()
    record = read_run(out)
    assert list(record.updates.seq) == list(range(1, 31))
    assert sorted(record.summary.membership.groups) == ["client-0", "client-1"]
    times = list(record.updates.time)
    assert times == sorted(times)
    # No two updates of a client answer the same task.
    tasks = {
        (str(c), float(t))
        for c, t in zip(record.updates.client, record.updates.dispatched_at, strict=True)
    }
    assert len(tasks) == 30


@SLOW
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_leaves_a_checkpoint(
    number: signal.Signals, place: Loopback, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    bed = up(place, *KEYS, "--max-updates", "5000", "--out", str(out))
    bed.wait_for(r"serve +\| update +4 ", 120)
    processes = family(bed)
    bed.handle.send_signal(number)
    assert bed.wait(60) == 0, bed.describe()
    assert all_gone(processes)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reason"] == "interrupted by SIGTERM"
    assert list((out / "checkpoint").iterdir())


@SLOW
def test_a_killed_testbed_ends_its_processes_with_a_checkpoint(
    place: Loopback, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    bed = up(place, *KEYS, "--max-updates", "5000", "--out", str(out))
    bed.wait_for(r"serve +\| update +4 ", 120)
    processes = family(bed)
    bed.handle.kill()
    wait_until(lambda: all_gone(processes), 60)
    assert json.loads((out / "summary.json").read_text())["reason"] == "interrupted by SIGTERM"
    assert list((out / "checkpoint").iterdir())


@pytest.mark.slow
def test_a_full_disk_is_no_success(place: Loopback, tmp_path: Path) -> None:
    bed = up(place, *KEYS, "--max-updates", "5000", "--out", str(tmp_path / "out"))
    bed.wait_for(r"serve +\| update +4 ", 120)
    (server,) = (child for child, line in family(bed).items() if " serve " in line)
    # Limits the size of files, like a full disk.
    resource.prlimit(server, resource.RLIMIT_FSIZE, (2000, 2000))
    assert bed.wait(120) == 2, bed.describe()
    assert "run.sqlite can no longer be written" in bed.text()
    assert "Results without" in bed.text()
    assert "Results, plots and models" not in bed.text()


@pytest.mark.slow
def test_a_server_that_refuses_to_resume_is_no_success(place: Loopback, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert up(place, *KEYS, "--max-updates", "4", "--out", str(out)).wait(120) == 0
    other = up(place, *KEYS, "--max-updates", "8", "--set", "lr=0.3", "--resume", str(out))
    assert other.wait(120) == 2
    assert "it belongs to another run: lr is" in other.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "cassa.gamma=1"], "Unknown key 'cassa.gamma'"),
        (["--set", "dataset=digit"], "Unknown dataset 'digit'"),
        (["--attack", "sign-flip"], "attack is for simulated clients"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["up", *KEYS, *options])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert not result.output


# Device profiles.


def test_a_profile_becomes_shares_of_a_core_and_bandwidths() -> None:
    devices = [
        Device(seconds_per_round=1.0),
        Device(seconds_per_round=5.0, bandwidth_up=125_000.0),
    ]
    fast, slow = shapes_of(devices, delay=200.0, loss=5.0)
    assert (fast.cpu, slow.cpu) == (1.0, 0.2)
    assert netem(fast, fast.up) == ["delay", "200ms", "loss", "5%"]
    assert netem(slow, slow.up) == ["delay", "200ms", "loss", "5%", "rate", "1000000bit"]
    assert netem(Shape(), 0.0) == []


def test_shaping_without_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="need root: use sudo"):
        check(2)


def can_shape(*terms: str) -> bool:
    try:
        with places([Shape(delay=1.0)] if terms else [Shape()]):
            return True
    except UserError:
        return False


@SLOW
def test_devices_in_namespaces_with_a_share_of_the_cpu(place: Loopback, tmp_path: Path) -> None:
    if not can_shape():
        pytest.skip("needs root and iproute2")
    out = tmp_path / "out"
    network = ["--delay", "20", "--loss", "1"] if can_shape("delay") else []
    script = [sys.executable, str(ROOT / "benchmarks" / "shaped_devices.py"), "--clients", "2"]
    keys = ["groups=0.5,0.5", "eval-every=10", "max-updates=10"]
    options = ["--out", str(out), "--shape", "slow30x5", *network, *keys]
    bed = place.start("shaped", [*script, *options])
    assert bed.wait(120) == 0, bed.describe()
    assert len(read_run(out).updates.seq) == 10
    wait_until(lambda: not list(Path("/run/netns").glob(f"rc{bed.handle.pid}*")), 5)


STAMP = "2026-11-23 13:54:28,605"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"{STAMP} INFO online at 127.0.0.1:9092 as node 5", "online at 127.0.0.1:9092 as node 5"),
        (f"{STAMP} INFO run 12: train task 3: done in 0.12 s, sent in 0.01 s", None),
        (f"{STAMP} INFO run 12: query: done in 8.33 s, sent in 0.01 s", None),
        (f"{STAMP} WARNING cannot be reached", "WARNING: cannot be reached"),
        (f"{STAMP} ERROR no data", "ERROR: no data"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("update    1  client-0  cluster 0", "update    1  client-0  cluster 0"),
    ],
)
def test_routine_is_left_out_and_trouble_is_not(line: str, shown: str | None) -> None:
    assert readable(line) == shown


def test_files_have_every_line_once_the_folder_is_the_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    logs = Logs(out)
    logs.write("serve", "first")
    assert not out.exists()
    out.mkdir()
    (out / "run.sqlite").touch()
    logs.write("device 0", "second")
    logs.write("serve", "third")
    found = {path.name: path.read_text() for path in (out / "logs").iterdir()}
    assert found == {"serve.log": "first\nthird\n", "device-0.log": "second\n"}
