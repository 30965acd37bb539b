"""Online devices, and replacement of a killed one."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from grpc import RpcError
from processes import Process, free_port, loopback, raceme, wait_until
from serving import Server, answer, fetch, light_device, number_of, round_trip, serving
from test_serve import are_applied_once, start_server, updates

from raceme import __version__
from raceme.core.errors import UserError
from raceme.flower import fleet_client, fleet_protocol, link_state
from raceme.flower.fleet_protocol import Signatures, Signer, generate_keys
from raceme.flower.messages import NODE_UNAVAILABLE
from raceme.records.control import command

KEYS = generate_keys()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, registered=lambda: {public_key_to_bytes(KEYS[1]): "a"}) as opened:
        yield opened


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_process_with_the_key_takes_the_place_of_an_earlier_one_at_once(
    server: Server, transport: str
) -> None:
    with ExitStack() as stack:
        former = stack.enter_context(light_device(server, KEYS, transport))
        node = former.node_id
        key = server.push(node, 1)
        message = fetch(former)
        server.grid.wait([], 0.0)
        assert list(server.grid.get_node_ids()) == [node]
        own = stack.enter_context(light_device(server, KEYS, transport))
        assert own.node_id == node
        # The node is missing once, so that the strategy gives up the tasks of the former process.
        assert list(server.grid.get_node_ids()) == []
        wait_until(server.grid._has_fleet_changed, 5)
        assert list(server.grid.get_node_ids()) == [node]
        (reply,) = server.wait(key)
        assert reply.error.code == NODE_UNAVAILABLE
        again = server.push(node, 2)
        # The former process, if it still runs, can neither receive nor send, and does not rejoin.
        with pytest.raises(UserError, match="another process with this device's key"):
            answer(former, message)
        with pytest.raises(UserError, match="another process with this device's key"):
            former.receive()
        answer(own, fetch(own))
        assert number_of(server.wait(again)[0]) == 2
        assert not server.state.heads
        # Its leaving does not take the node offline.
        former._calls.leaving = True
        with pytest.raises(RpcError, match="another process with this device's key"):
            former._invoke("DeactivateNode", DeactivateNodeRequest(node_id=node))
        assert server.state.online() == [node]


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("bound", ["", "garden"])
def test_a_process_with_the_key_and_another_id_takes_no_place(
    tmp_path: Path, bound: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    registered = {public_key_to_bytes(KEYS[1]): "garden"}
    with serving(tmp_path, registered=lambda: registered, holder=lambda _key: bound) as server:
        with light_device(server, KEYS, transport, "garden") as garden:
            second = light_device(server, KEYS, transport, "kitchen")
            with pytest.raises(UserError, match="states the id 'kitchen'") as refused, second:
                pass
            assert "garden" in str(refused.value)
            assert "A node is refused: It states the id 'kitchen'" in caplog.text
            round_trip(server, garden, 1)
            # A process with the device's own id may replace it.
            with light_device(server, KEYS, transport, "garden") as again:
                round_trip(server, again, 2)
        # Without a list of keys, ids are trusted.
        late = light_device(server, KEYS, transport, "kitchen")
        with pytest.raises(UserError) if bound else late:
            if bound:
                late.__enter__()


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_device_is_told_the_id_of_its_key(server: Server, transport: str) -> None:
    with light_device(server, KEYS, transport) as link:
        assert link.server is not None
        assert link.server.device == "a"


def test_a_supernode_of_flowers_waits_until_the_former_is_gone(server: Server) -> None:
    with light_device(server, KEYS) as link:
        assert not server.state.activate(link.node_id, 30.0)
        round_trip(server, link, 1)
    assert server.state.activate(link.node_id, 30.0)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_silent_device_is_offline_soon_and_its_work_is_lost_later(
    server: Server, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(link_state, "LIVE_SECONDS", 0.4)
    monkeypatch.setattr(link_state, "_WORK_SECONDS", 60.0)
    monkeypatch.setattr(fleet_client, "_BEAT_SECONDS", {True: 0.1})
    with light_device(server, KEYS, transport) as link:
        first, second = (server.push(link.node_id, number) for number in (1, 2))
        message = fetch(link)
        # Repeated heartbeats keep it online for longer than one of them does.
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert server.state.online() == [link.node_id]
            time.sleep(0.05)
        # The network fails for a while.
        monkeypatch.setattr(fleet_client, "_beat", lambda *_: False)
        beat = server.state.beat
        monkeypatch.setattr(server.state, "beat", lambda *_: False)
        wait_until(lambda: not server.state.online(), 5)
        server.state._checked_at = 0.0
        assert server.grid.pull_messages([first, second]) == []
        monkeypatch.setattr(server.state, "beat", beat)
        wait_until(server.state.online, 5)
        answer(link, message)
        assert number_of(server.wait(first)[0]) == 1
        # Now the device stays offline.
        monkeypatch.setattr(server.state, "beat", lambda *_: False)
        wait_until(lambda: not server.state.online(), 5)
        monkeypatch.setattr(link_state, "_WORK_SECONDS", 0.0)
        server.state._checked_at = 0.0
        (reply,) = server.wait(second)
        assert reply.error.code == NODE_UNAVAILABLE


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_by_an_hour_costs_no_device_and_no_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    with light_device(server, KEYS) as link:
        at_work, waiting = (server.push(link.node_id, number, ttl=600.0) for number in (1, 2))
        message = fetch(link)
        # Only the server's clock: gRPC measures its deadlines on the same clock.
        moved = {**vars(time), "time": lambda: time.time() + jump}
        monkeypatch.setattr(link_state, "time", SimpleNamespace(**moved))
        assert server.state.online() == [link.node_id]
        assert f"set {'forward' if jump > 0 else 'back'} by 3600 s" in caplog.text
        answer(link, message)
        assert number_of(server.wait(at_work)[0]) == 1
        answer(link, fetch(link))
        assert number_of(server.wait(waiting)[0]) == 2
        later = server.push(link.node_id, 3, ttl=2 * 3600.0)
        answer(link, fetch(link))
        assert number_of(server.wait(later)[0]) == 3


def health(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answered:
        count = json.load(answered)["devices_online"]
    assert isinstance(count, int)
    return count


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_device_that_is_killed_is_missed_in_15_s_and_takes_its_place_at_once(
    tmp_path: Path, transport: str
) -> None:
    certs, out, port = tmp_path / "certs", tmp_path / "out", free_port()
    with loopback(tmp_path) as bed:
        names = ("kitchen", "garden", "cellar")
        named = [option for name in names for option in ("--device", name)]
        make = raceme("certs", "--host", "127.0.0.1", "--out", str(certs), *named)
        assert bed.start("certs", make).wait() == 0

        def start(number: int) -> Process:
            options = ("--root-certificates", f"{certs}/ca.crt", "--transport", transport)
            name = names[number]
            key = ("--device-id", name, "--key", f"{certs}/devices/{name}")
            place = bed.http_address if transport == "http" else bed.fleet_address
            data = ("--node-config", f"partition-id={number} num-partitions=3")
            device = raceme("device", "--superlink", place, *options, *key, *data)
            return bed.start("device", device)

        options = ("--certificates", str(certs), "--metrics", f"127.0.0.1:{port}")
        keys = ("--clients", "3", "--max-updates", "100000", "--local-epochs", "20")
        server = start_server(bed, *options, *keys)
        server.wait_for("Listening on", 240)
        devices = [start(number) for number in range(3)]
        wait_until(lambda: health(port) == 3, 120, server.describe)
        devices[0].wait_for(r"train task \d+: done", 120)

        devices[0].handle.kill()
        killed = time.monotonic()
        wait_until(lambda: health(port) == 2, 30, server.describe)
        missed = time.monotonic() - killed

        # A device that vanishes without closing its connections.
        devices[1].handle.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: health(port) == 1, 30, server.describe)
        vanished = time.monotonic() - stopped
        devices[1].handle.send_signal(signal.SIGCONT)
        wait_until(lambda: health(port) == 2, 30, server.describe)

        devices[0] = start(0)
        devices[0].wait_for("online at", 60)
        wait_until(lambda: health(port) == 3, 5, server.describe)
        devices[0].wait_for(r"train task \d+: done", 60)

        told = {row["device"]: row for row in command(out, "devices")}
        assert {row["version"] for row in told.values()} == {__version__}
        assert told["garden"]["silent_seconds"] < 10

        # A device that is killed during a task, and restarted at once.
        devices[2].handle.kill()
        back = time.monotonic()
        devices[2] = start(2)
        devices[2].wait_for("online at", 60)
        returned = time.monotonic() - back
        done = len(updates(out))
        wait_until(lambda: "cellar" in {name for _, name in updates(out)[done:]}, 60)
        assert not re.search("not accepted|joining again", devices[0].text() + devices[2].text())
        server.handle.send_signal(signal.SIGTERM)
        assert server.wait(240) == 130
    print(f"{transport}: missed {missed:.1f} s, vanished {vanished:.1f} s, back {returned:.1f} s")
    assert max(missed, vanished) <= 15.0
    are_applied_once(out, len(updates(out)))


def test_heartbeats_and_calls_of_two_threads_are_signed_as_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_protocol, "_REUSED_SECONDS", 0.0)
    before = sys.getswitchinterval()
    signer, said = Signer(*KEYS), deque[dict[str, object]]()

    def sign() -> None:
        for _ in range(200):
            said.append(dict(signer.metadata()))

    try:
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=sign) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for metadata in said:
        Signatures().caller(metadata)
