"""`raceme serve` as a real process, with devices on loopback."""

from __future__ import annotations

import json
import logging
import re
import signal
import sqlite3
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from processes import Loopback, Process, free_port, loopback, raceme, wait_until
from prometheus_client.parser import text_string_to_metric_families

from raceme.cli.fleet import ServerArguments, serve
from raceme.core.errors import UserError
from raceme.records.control import command
from raceme.records.folder import CONTROL
from raceme.runs.checkpoints import CHECKPOINTS

RUN = ["--strategy", "fedasync", "--dataset", "digits", "--eval-every", "1000"]
RUN += ["--clients", "2", "--groups", "0.5,0.5"]


def start_server(bed: Loopback, *options: str) -> Process:
    """Start a server; a second one uses the same port."""
    bed.fleet_port = bed.fleet_port or free_port()
    bed.http_port = bed.http_port or free_port()
    places = ("--address", bed.fleet_address, "--http", bed.http_address)
    return bed.start("serve", raceme("serve", *places, "--out", "out", *RUN, *options))


def stop(server: Process, number: int = signal.SIGTERM) -> int:
    """Stop a server, and wait until its plots are drawn."""
    server.handle.send_signal(number)
    return server.wait(240)


def start_device(bed: Loopback, number: int, *options: str) -> Process:
    return bed.device(
        *(options or ("--insecure",)),
        *("--node-config", f"partition-id={number} num-partitions=2"),
    )


def query(out: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(out / "run.sqlite")) as connection:
        return connection.execute(sql).fetchall()


def updates(out: Path) -> list[tuple[int, str]]:
    return query(out, "SELECT seq, client FROM updates ORDER BY seq")


def are_applied_once(out: Path, count: int) -> None:
    """Assert that updates have no gaps, and that no task has two."""
    assert [seq for seq, _ in updates(out)] == list(range(1, count + 1))
    different = "SELECT count(DISTINCT client || dispatched_at) FROM updates"
    assert query(out, different) == [(count,)]


def is_of(line: dict[str, Any], event: str) -> bool:
    return line.get("event") == event


@pytest.mark.slow
def test_the_same_command_resumes_after_ctrl_c_and_after_a_kill(tmp_path: Path) -> None:
    out = tmp_path / "out"
    metrics = f"127.0.0.1:{free_port()}"
    # More updates than fast devices make during the restart and the queries.
    limit = 300
    options = ("--max-updates", str(limit), "--checkpoint-every", "1", "--clients-min", "2")
    options += ("--metrics", metrics)
    with loopback(tmp_path) as bed:
        server = start_server(bed, *options)
        devices = [start_device(bed, 0)]
        devices.append(start_device(bed, 1, "--insecure", "--log-format", "json"))
        server.wait_for(r"update +4 ", 240)
        assert stop(server, signal.SIGINT) == 130
        assert (out / "summary.json").is_file()
        assert "To resume: the same command again" in server.text()
        assert re.search(r"wall time +[\d.]+ s since the first device, ", server.text())
        assert "virtual time" not in server.text()
        assert any((out / CHECKPOINTS).iterdir())
        server = start_server(bed, *options)
        server.wait_for(r"update +\d+ ", 240)
        # Metrics for a monitor, with the names that devices reported to the previous process.
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as page:
            families = text_string_to_metric_families(page.read().decode())
            samples = [sample for family in families for sample in family.samples]
        found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
        assert found["raceme_devices_online",] == 2
        assert 0 < found["raceme_updates_total",] < limit
        assert found["raceme_staleness_count",] == found["raceme_updates_total",]
        assert found["raceme_clusters",] == 1
        for name in ("client-0", "client-1"):
            assert 0 <= found["raceme_device_silence_seconds", name] < 60
        with urllib.request.urlopen(f"http://{metrics}/healthz", timeout=60) as answer:
            assert json.load(answer)["devices_online"] == 2
        # Commands for an operator, who needs access to the server's files.
        assert (out / CONTROL).stat().st_mode & 0o777 == 0o600
        told = command(out, "status")
        assert (told["status"], told["devices_online"], told["clusters"]) == ("ok", 2, 1)
        devices_told = command(out, "devices")
        assert {row["device"] for row in devices_told} == {"client-0", "client-1"}
        assert command(out, "show", device="client-1")["samples"] > 100
        with pytest.raises(UserError, match=r"'clint-1'\. Did you mean 'client-"):
            command(out, "show", device="clint-1")
        server.handle.kill()
        server.wait()
        with pytest.raises(UserError, match="No server runs in"):
            command(out, "status")
        server = start_server(bed, *options, "--log-format", "json")
        assert server.wait(240) == 0
        told = [json.loads(line) for line in server.text().splitlines()]
        requested = {(line["device"], line["request"]) for line in told if is_of(line, "Requested")}
        applied = [line for line in told if is_of(line, "UpdateApplied")]
        assert applied
        for line in applied:
            assert (line["device"], line["request"]) in requested
            assert line["cluster"] == 0
        assert len({line["request"] for line in applied}) == len(applied)
        told = [json.loads(line) for line in devices[1].text().splitlines()]
        assert {line["device"] for line in told} == {"client-1"}
        done = {line["request"] for line in told if "train task" in line["message"]}
        assert {line["request"] for line in applied if line["device"] == "client-1"} <= done
        # The devices kept their nodes, and were not even greeted again.
        for device in devices:
            assert device.text().count("query: done") == 1
        are_applied_once(out, limit)
        # The first device that is back after a kill may do all the remaining work: check both.
        assert json.loads((out / "summary.json").read_text())["clients"] == 2
        assert json.loads((out / "summary.json").read_text())["updates"] == limit
        over = start_server(bed, *options)
        assert over.wait(240) == 0
        assert "is complete" in over.text()
        assert not (out / CONTROL).exists()
        servers = [process for process in bed.processes if process.name == "serve"]
        assert not any("Traceback" in server.text() for server in servers)


@pytest.mark.slow
def test_a_port_or_a_folder_that_another_has_is_refused_in_one_line(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        server = start_server(bed, "--max-updates", "10")
        server.wait_for("Listening on", 240)
        same_port = start_server(bed, "--out", "other")
        bed.fleet_port = bed.http_port = 0
        same_folder = start_server(bed, "--max-updates", "10")
        assert same_port.wait(240) == 2
        assert same_folder.wait(240) == 2
        assert stop(server) == 130
    assert "SuperNodes of Flower 1.40 and later connect to 127.0.0.1:" in server.text()
    (line,) = same_port.text().splitlines()
    assert "another process has the port" in line
    assert "--address" in line
    line = same_folder.text().splitlines()[-1]
    assert "Another process is still writing to" in line
    assert "Traceback" not in same_folder.text()


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({}, {"address": "nowhere"}, "expected HOST:PORT"),
        ({}, {"metrics": "9093"}, "expected HOST:PORT, e.g. --metrics"),
        ({}, {"any_device": True}, "leave out --any-device"),
        ({}, {"certificates": Path("missing")}, "raceme certs"),
        ({"out": ""}, {}, "e.g. --out runs/lab"),
        ({"strategy": "none"}, {}, "'none'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_done(
    tmp_path: Path, keys: dict[str, str], options: dict[str, Any], said: str
) -> None:
    before = {"strategy": "fedasync", "dataset": "digits", "out": str(tmp_path / "out")}
    with pytest.raises(UserError, match=said):
        serve({**before, **keys}, ServerArguments(**options))
    assert not (tmp_path / "out").exists()


def test_a_dashboard_beside_lines_of_json_is_told_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object, **__: object) -> None:
        raise UserError("This is enough.")

    monkeypatch.setattr("raceme.fleet.serve.serve", end)
    monkeypatch.setattr("raceme.cli.fleet.show_log", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "setLevel", lambda _: None)
    keys: dict[str, Any] = {"strategy": "fedasync", "dataset": "digits", "out": str(tmp_path)}
    page: dict[str, Any] = {"watch": True, "watch_address": "127.0.0.1:0"}
    for log_format in ("json", "text"):
        with pytest.raises(UserError, match="enough"):
            serve(keys, ServerArguments(log_format=log_format), **page)
        told = capsys.readouterr()
        quiet, other = (told.out, told.err) if log_format == "json" else (told.err, told.out)
        assert "Dashboard: http://127.0.0.1:" in other
        assert "http" not in quiet


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_devices_and_a_stock_supernode_work_side_by_side_and_survive_kills(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = ("--clients", "3", "--groups", "0.4,0.6", "--clients-min", "3", "--checkpoint-every", "1")

    def start(number: int) -> Process:
        own = f"partition-id={number} num-partitions=3"
        return bed.device("--insecure", "--node-config", own)

    with loopback(tmp_path) as bed:
        server = start_server(bed, *run, "--max-updates", "100000")
        devices = [start(number) for number in range(2)]
        bed.supernode(2, 3)
        # A SuperNode starts a process that imports torch for each message.
        server.wait_for(r"update +\d+  client-2 ", 600)
        server.handle.kill()
        devices[0].handle.kill()
        server.wait()
        devices[0].wait()
        server = start_server(bed, *run, "--max-updates", "100000")
        # The SuperNode reconnects; a replacement of the killed device is accepted when the server
        # has noticed its absence.
        server.wait_for(r"update +\d+  client-2 ", 600)
        devices[0] = start(0)
        server.wait_for(r"update +\d+  client-0 ", 300)
        server.wait_for(r"update +\d+  client-1 ", 300)
        assert stop(server) == 130
    count = len(updates(out))
    are_applied_once(out, count)
    again = set(re.findall(r"update +\d+  (\S+) ", server.text()))
    assert again == {"client-0", "client-1", "client-2"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tls_and_registered_keys_keep_everybody_else_out(tmp_path: Path) -> None:
    certs = tmp_path / "certs"

    def make(folder: Path, *devices: str) -> None:
        named = [option for device in devices for option in ("--device", device)]
        command = raceme("certs", "--host", "127.0.0.1", "--out", str(folder), *named)
        assert bed.start("certs", command).wait() == 0

    with loopback(tmp_path) as bed:
        make(certs, "kitchen")
        make(tmp_path / "other", "stranger")
        server = start_server(bed, "--certificates", str(certs), "--max-updates", "100000")
        server.wait_for("Listening on", 240)
        trust = ("--root-certificates", f"{certs}/ca.crt")
        foreign_key = start_device(bed, 1, *trust, "--key", f"{tmp_path}/other/devices/stranger")
        no_key = start_device(bed, 1, *trust)
        foreign_server = start_device(
            *(bed, 1, "--root-certificates", f"{tmp_path}/other/ca.crt"),
            *("--key", f"{certs}/devices/kitchen"),
        )
        foreign_key.wait_for("not accepted")
        assert no_key.wait() == 2
        assert "takes only devices with a registered key" in no_key.text()
        assert foreign_server.wait() == 2
        named = ("--device-id", "kitchen", "--key", f"{certs}/devices/kitchen")
        kitchen = start_device(bed, 0, *trust, *named)
        server.wait_for(r"update +3 ", 240)
        # A new key is known at once. Devices of the last
        # checkpoint keep their nodes through a crash.
        make(certs, "garden")
        named = ("--device-id", "garden", "--key", f"{certs}/devices/garden")
        garden = start_device(bed, 1, *trust, *named)
        garden.wait_for("online at")
        server.handle.kill()
        server.wait()
        server = start_server(bed, "--certificates", str(certs), "--max-updates", "100000")
        server.wait_for(r"update.* kitchen ", 240)
        server.wait_for(r"update.* garden ", 240)
        assert stop(server) == 130
        assert kitchen.text().count("online at") == 1
        assert foreign_key.stop() == 0
    out = tmp_path / "out"
    are_applied_once(out, len(updates(out)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keys_are_revoked_and_rotated_while_the_server_runs(tmp_path: Path) -> None:
    certs, names = tmp_path / "certs", ("kitchen", "garden")

    def change(*options: str) -> None:
        assert bed.start("certs", raceme("certs", "--out", str(certs), *options)).wait() == 0

    with loopback(tmp_path) as bed:
        change("--host", "127.0.0.1", "--device", "kitchen", "--device", "garden")
        server = start_server(bed, "--certificates", str(certs), "--max-updates", "100000")
        server.wait_for("Listening on", 240)
        kitchen, garden = (
            start_device(
                *(bed, number, "--root-certificates", f"{certs}/ca.crt", "--device-id", name),
                *("--key", f"{certs}/devices/{name}"),
            )
            for number, name in enumerate(names)
        )
        for name in names:
            server.wait_for(rf"update.* {name} ", 240)
        change("--device", "garden", "--revoke")
        begun = time.monotonic()
        server.wait_for("Key of garden: revoked")
        garden.wait_for("does not know this node any more", 20)
        assert time.monotonic() < begun + 10
        change("--device", "kitchen", "--rotate")
        server.wait_for("Key of kitchen: rotated")
        # The device reads its new key from the file, and continues as the same client.
        wait_until(lambda: kitchen.text().count("online at") == 2, 60, kitchen.describe)
        count = len(updates(tmp_path / "out"))
        server.wait_for(rf"update +{count + 3} .* kitchen ", 60)
        assert "online at" not in garden.text().partition("any more")[2]
        assert stop(server) == 130
        assert not any("Traceback" in process.text() for process in bed.processes)
    out = tmp_path / "out"
    told = query(out, "SELECT client, change FROM key_changes ORDER BY event")
    assert told == [("garden", "revoked"), ("kitchen", "rotated")]
    kinds = query(out, "SELECT kind FROM client_events WHERE client = 'kitchen' ORDER BY event")
    assert kinds == [("joined",), ("left",), ("returned",)]
    assert not query(out, "SELECT * FROM refused_claims")
    are_applied_once(out, len(updates(out)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_devices_with_a_label_take_part(tmp_path: Path) -> None:
    certs, names = tmp_path / "certs", ("kitchen", "garden", "hall")
    stated = ("", " labels='room=garden'", " labels='room=kitchen,floor=1'")
    metrics = f"127.0.0.1:{free_port()}"

    def change(*options: str) -> None:
        assert bed.start("certs", raceme("certs", "--out", str(certs), *options)).wait() == 0

    with loopback(tmp_path) as bed:
        change("--host", "127.0.0.1", *(f"--device={name}" for name in names))
        change("--device", "kitchen", "--label", "room=kitchen")
        options = ("--certificates", str(certs), "--where", "room=kitchen", "--metrics", metrics)
        server = start_server(bed, *options, "--max-updates", "100000")
        server.wait_for("Listening on", 240)
        _, garden, _ = (
            bed.device(
                *("--root-certificates", f"{certs}/ca.crt", "--key", f"{certs}/devices/{name}"),
                *("--device-id", name),
                *("--node-config", f"partition-id={number % 2} num-partitions=2{labels}"),
            )
            for number, (name, labels) in enumerate(zip(names, stated, strict=True))
        )
        server.wait_for("garden takes no part: it is not room=kitchen", 240)
        garden.wait_for("no work: the run takes clients with room=kitchen only", 60)
        for name in ("kitchen", "hall"):
            server.wait_for(rf"update.* {name} ", 240)
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as page:
            text = page.read().decode()
        assert 'device="hall",label_floor="1",label_room="kitchen"' in text
        assert 'device="kitchen",label_floor="",label_room="kitchen"' in text
        assert stop(server) == 130
    out = tmp_path / "out"
    assert {client for _, client in updates(out)} == {"kitchen", "hall"}
    labels = query(out, "SELECT DISTINCT client, labels FROM client_events WHERE kind = 'joined'")
    assert sorted(labels) == [("hall", "room=kitchen,floor=1"), ("kitchen", "room=kitchen")]


@pytest.mark.smoke
def test_a_run_that_has_ended_is_extended_without_repeating_an_update(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with loopback(tmp_path) as bed:
        server = start_server(bed, "--max-updates", "8")
        start_device(bed, 0)
        assert server.wait(240) == 0
        done = updates(out)
        assert len(done) == 8
        server = start_server(bed, "--max-updates", "12")
        assert server.wait(240) == 0
        assert "evaluated at 0 updates" not in server.text()
    assert len(updates(out)) == 12
    assert updates(out)[:8] == done
    are_applied_once(out, 12)


@pytest.mark.slow
def test_a_kill_undoes_little_by_default(tmp_path: Path) -> None:
    checkpoints = tmp_path / "out" / CHECKPOINTS
    with loopback(tmp_path) as bed:
        server = start_server(bed, "--max-updates", "1000000")
        start_device(bed, 0)
        server.wait_for(r"update +1 ", 240)
        begun = time.monotonic()
        while len(list(checkpoints.glob("*.safetensors"))) < 2:
            assert time.monotonic() < begun + 30, "no second checkpoint"
            time.sleep(0.5)
        server.handle.kill()
