"""`raceme device` as real processes, against Flower's own SuperLink on loopback."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from bundles import IDLE_CLIENT, write_app
from processes import ROOT, Loopback, Process, free_port, loopback, raceme, wait_until

WORK = "train task"
DIGITS = "strategy='fedasync' groups='0.5,0.5' eval-every=10 "


def start_digits_device(bed: Loopback, number: int) -> Process:
    return bed.device(
        *("--insecure", "--device-id", f"board-{number}"),
        *("--node-config", f"partition-id={number} num-partitions=2"),
    )


def client_events(out: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(out / "run.sqlite")) as connection:
        rows = connection.execute("SELECT client, kind FROM client_events ORDER BY event")
        return [(str(client), str(kind)) for client, kind in rows]


@pytest.mark.slow
def test_one_of_two_devices_with_one_id_is_refused_until_the_other_leaves(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        bed.superlink()
        both = [start_digits_device(bed, 0) for _ in range(2)]
        for device in both:
            device.wait_for("online at")
        settings = DIGITS + f"max-updates=30 local-epochs=5 out='{tmp_path}/out'"
        run = bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        run.wait_for("'board-0' is already online")
        wait_until(lambda: any(WORK in device.text() for device in both), 90)
        # The other one was queried for its id, and got no work.
        ((_, worker), (worked, other)) = sorted(
            ((WORK in device.text(), device) for device in both), key=lambda pair: not pair[0]
        )
        assert not worked
        assert worker.stop() == 0
        other.wait_for(WORK)
        run.wait_for("Results are in", 120)
        assert run.wait() == 0
        assert other.stop() == 0
    kinds = ["joined", "left", "returned"]
    assert client_events(tmp_path / "out") == [("board-0", kind) for kind in kinds]


@pytest.mark.slow
def test_tls_and_registered_keys_keep_everybody_else_out(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with loopback(tmp_path) as bed:
        certificates = bed.secure_superlink("kitchen", "stranger")
        bed.register("kitchen")
        make = raceme("certs", "--host", "127.0.0.1", "--out", str(other))
        assert bed.start("certs", make).wait() == 0
        authority = ("--root-certificates", f"{certificates}/ca.crt")
        key = ("--key", f"{certificates}/devices/kitchen")

        no_key = bed.device(*authority)
        wrong_key = bed.device(*authority, "--key", f"{certificates}/devices/stranger")
        wrong_authority = bed.device("--root-certificates", f"{other}/ca.crt", *key)
        plain = bed.device("--insecure")
        right = bed.device(*authority, *key)

        right.wait_for("online at")
        assert no_key.wait() == 2
        assert "takes only devices with a registered key" in no_key.text()
        assert wrong_authority.wait() == 2
        assert "is not the expected SuperLink" in wrong_authority.text()
        wrong_key.wait_for("not accepted: this key is not registered")
        plain.wait_for("perhaps it requires TLS")

        # A refused device that keeps retrying still stops at once.
        assert [each.stop() for each in (right, wrong_key, plain)] == [0, 0, 0]
        assert all("online at" not in each.text() for each in (no_key, wrong_key, plain))
        private = (certificates / "devices" / "kitchen").read_text().splitlines()[1]
        assert all(private not in process.text() for process in bed.processes)


@pytest.mark.slow
def test_a_device_that_has_just_been_registered_is_online_at_once(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        folder = bed.secure_superlink("kitchen")
        options = ("--root-certificates", f"{folder}/ca.crt", "--key", f"{folder}/devices/kitchen")
        early = bed.device(*options)
        early.wait_for("not accepted: this key is not registered")
        bed.register("kitchen")
        early.wait_for("online at")
        assert "joining again" not in early.text()
        # A second process with the same key gets another reason.
        second = bed.device(*options)
        second.wait_for("not accepted: an earlier process of this device, or another one")
        assert [each.stop() for each in (second, early)] == [0, 0]


@pytest.mark.slow
def test_a_device_joins_again_when_the_superlink_has_forgotten_it(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        superlink = bed.superlink()
        device = bed.device("--insecure", "--device-id", "kitchen")
        device.wait_for("online at")
        superlink.end()
        device.wait_for("cannot be reached, trying again")
        bed.superlink()
        device.wait_for(r"(?s)does not know this node.*online at", 60)
        assert device.stop() == 0


@pytest.mark.slow
def test_a_task_in_work_is_returned_when_the_device_is_stopped(tmp_path: Path) -> None:
    endless = "    print('AT WORK', flush=True)\n    __import__('time').sleep(600)\n    return"
    app = write_app(tmp_path / "app", IDLE_CLIENT.replace("    return", endless))
    with loopback(tmp_path) as bed:
        bed.superlink()
        device = bed.device("--insecure", "--device-id", "kitchen", "--grace", "0.2")
        device.wait_for("online at")
        run = bed.flwr("run", str(app), "here", "--stream")
        device.wait_for("AT WORK")
        assert device.stop() == 0
        assert "answered with an error: the device is shutting down" in device.text()
        run.wait_for("REPLY the device is shutting down")


@pytest.mark.slow
def test_a_device_that_was_killed_comes_back_with_its_key(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        certificates = bed.secure_superlink("kitchen")
        bed.register("kitchen")
        options = (
            *("--root-certificates", f"{certificates}/ca.crt"),
            *("--key", f"{certificates}/devices/kitchen", "--device-id", "kitchen"),
            *("--node-config", "partition-id=0 num-partitions=2"),
        )
        killed = bed.device(*options)
        settings = DIGITS + f"max-updates=100000 max-time=150 local-epochs=50 out='{tmp_path}/out'"
        run = bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        killed.wait_for(r"train task \d+: done")
        killed.handle.kill()
        back = bed.device(*options)
        back.wait_for("not accepted")
        back.wait_for(r"train task \d+: done", 120)
        run.wait_for("Results are in", 200)
    assert client_events(tmp_path / "out") == [
        ("kitchen", "joined"),
        ("kitchen", "left"),
        ("kitchen", "returned"),
    ]


@pytest.mark.slow
def test_a_device_that_was_killed_comes_back_without_a_key(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        bed.superlink()
        killed = start_digits_device(bed, 0)
        settings = DIGITS + f"max-updates=100000 max-time=120 local-epochs=50 out='{tmp_path}/out'"
        run = bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        killed.wait_for(r"train task \d+: done")
        killed.handle.kill()
        back = start_digits_device(bed, 0)
        # It is refused as long as its previous process
        # counts as online, and greeted again afterwards.
        run.wait_for("'board-0' is already online")
        back.wait_for(r"train task \d+: done", 100)
        run.wait_for("Results are in", 200)
    assert client_events(tmp_path / "out") == [
        ("board-0", "joined"),
        ("board-0", "left"),
        ("board-0", "returned"),
    ]


@pytest.mark.slow
def test_stock_supernodes_and_devices_work_side_by_side(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app", server=TWO_NODES)
    with loopback(tmp_path) as bed:
        bed.superlink()
        device = bed.device("--insecure", "--device-id", "kitchen")
        stock = ["flower-supernode", "--insecure", "--superlink", bed.fleet_address]
        bed.start("supernode", [*stock, "--port", str(free_port())])
        device.wait_for("online at")
        run = bed.flwr("run", str(app), "here", "--stream")
        run.wait_for(r"(?s)REPLY fine.*REPLY fine", 90)
        assert "train: done" in device.text()


TWO_NODES = """
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(messages):
        print("REPLY", reply.error.reason if reply.has_error() else "fine", flush=True)
"""
