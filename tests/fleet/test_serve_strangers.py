"""Connections of strangers do not end a run."""

from __future__ import annotations

import asyncio
import gc
import io
import resource
import socket
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from processes import free_port, loopback, raceme, wait_until
from serving import APP, fetch, light_device, serving

from raceme.core.signals import StopSignal
from raceme.fleet.certificates import (
    make_certificates,
    make_token,
    read_certificates,
    read_device_key,
    read_token,
)
from raceme.fleet.device import join
from raceme.fleet.serve import StatusPort
from raceme.flower.fleet_client import Endpoint, ObjectPushError
from raceme.flower.fleet_protocol import Signer, generate_keys
from raceme.flower.fleet_server import FleetApi
from raceme.flower.link_state import LinkState
from raceme.flower.messages import identify_process
from raceme.flower.ports import Access
from raceme.reporting.dashboard.server import bind, serve
from raceme.reporting.dashboard.source import Watched

RUN = ["--strategy", "fedasync", "--dataset", "digits", "--eval-every", "1000"]
RUN += ["--clients", "2", "--groups", "0.5,0.5"]
LOCAL = Access("127.0.0.1")


def connect(port: int, most: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections until one is not accepted."""
    made = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(most)]
    for connection in made:
        stack.callback(connection.close)
    return made


def ask(port: int, host: str = "localhost", path: str = "/") -> str:
    """Return the status line of a response; empty if the connection is closed."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            return connection.recv(1000).decode().partition("\r\n")[0]
    except ConnectionError:
        return ""


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@contextmanager
def status_port(_folder: Path) -> Iterator[int]:
    port = free_port()
    with StatusPort(f"127.0.0.1:{port}", lambda _: b"figures", lambda: (True, {})):
        yield port


@contextmanager
def dashboard(folder: Path, access: Access = LOCAL) -> Iterator[int]:
    ended = threading.Event()

    async def until() -> None:
        while not ended.is_set():
            await asyncio.sleep(0.02)

    with bind("127.0.0.1", 0) as listening:
        watched = Watched(folder / "run", False)
        thread = threading.Thread(target=serve, args=(listening, watched, access, until))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            thread.join(30)


PORTS = pytest.mark.parametrize("port_of", [status_port, dashboard])


@PORTS
def test_connections_that_send_too_slowly_are_closed(port_of: type, tmp_path: Path) -> None:
    with port_of(tmp_path) as port, ExitStack() as stack:
        (dripping,) = connect(port, 1, stack)
        dripping.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        end = time.monotonic() + 15
        while not is_closed(dripping) and time.monotonic() < end:
            try:
                dripping.sendall(b"x")
            except ConnectionError:
                break
            time.sleep(0.2)
        assert time.monotonic() < end


@contextmanager
def supernode_port(_folder: Path) -> Iterator[int]:
    port = free_port()
    http = f"127.0.0.1:{port}"
    with FleetApi(LinkState(APP), f"127.0.0.1:{free_port()}", http=http) as api:
        api.start()
        yield port


@pytest.mark.parametrize("port_of", [status_port, dashboard, supernode_port])
def test_a_flood_of_headers_is_cut_off(port_of: type, tmp_path: Path) -> None:
    with port_of(tmp_path) as port, ExitStack() as stack:
        (sender,) = connect(port, 1, stack)
        sender.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        line, sent = b"X-A: " + b"a" * 1000 + b"\r\n", 0
        with suppress(ConnectionError):
            while sent < 64 << 20:
                sender.sendall(line)
                sent += len(line)
        # Some bytes are buffered in both sockets before the sender notices the close.
        assert sent < 64 << 20
        found = "200" if port_of is not supernode_port else "404"
        assert found in ask(port, path="/healthz" if port_of is status_port else "/")


@PORTS
def test_connections_beyond_a_limit_are_closed_and_the_others_are_answered_later(
    port_of: type, tmp_path: Path
) -> None:
    with port_of(tmp_path) as port, ExitStack() as stack:
        silent = connect(port, 80, stack)
        assert ask(port) == ""
        assert sum(map(is_closed, silent)) == 16
        wait_until(lambda: all(map(is_closed, silent)), 15)
        assert "200" in ask(port, path="/healthz" if port_of is status_port else "/")


@contextmanager
def secure_ports(folder: Path) -> Iterator[list[int]]:
    """The three HTTPS ports: metrics, page, and SuperNodes."""
    certs = folder / "certs"
    make_certificates(certs, ["127.0.0.1"], [])
    make_token(certs)
    made = read_certificates(certs)
    access = Access("0.0.0.0", read_token(certs), made.certificate.decode(), made.key.decode())
    figures, supernodes = free_port(), free_port()
    api = FleetApi(LinkState(APP), f"127.0.0.1:{free_port()}", made, http=f"127.0.0.1:{supernodes}")
    with (
        StatusPort(f"0.0.0.0:{figures}", lambda _: b"figures", lambda: (True, {}), certs),
        dashboard(folder, access) as page,
        api,
    ):
        api.start()
        yield [figures, page, supernodes]


def test_handshakes_of_tls_that_do_not_come_are_given_up(tmp_path: Path) -> None:
    with secure_ports(tmp_path) as ports, ExitStack() as stack:
        silent = [connect(port, 1, stack)[0] for port in ports]
        dripping = [connect(port, 1, stack)[0] for port in ports]
        # The header of a TLS record of 16 KiB.
        for connection in dripping:
            connection.sendall(bytes([22, 3, 1, 64, 0]))
        assert not any(map(is_closed, [*silent, *dripping]))
        wait_until(lambda: all(map(is_closed, [*silent, *dripping])), 12)


@PORTS
def test_a_refused_body_is_hardly_read(port_of: type, tmp_path: Path) -> None:
    with port_of(tmp_path) as port, ExitStack() as stack:
        (sender,) = connect(port, 1, stack)
        head = f"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 30}\r\n\r\n"
        sender.sendall(head.encode())
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 28:
                sender.sendall(bytes(1 << 20))
                sent += 1 << 20
        assert sent < 1 << 28


def test_of_nodes_that_register_without_connecting_the_latest_are_kept() -> None:
    state = LinkState(APP)
    online = state.register(b"device")
    assert state.activate(online, 30.0)
    made = []
    for number in range(1100):
        state.make_room()
        made.append(state.register(b"stranger %d" % number))
    assert online in state.nodes
    assert len(state.nodes) == 1001
    assert made[-1] in state.nodes
    assert made[0] not in state.nodes


def test_another_host_name_that_points_to_the_server_gets_no_metrics() -> None:
    with status_port(Path()) as port:
        assert "200" in ask(port, f"127.0.0.1:{port}", "/metrics")
        assert "400" in ask(port, f"evil.example:{port}", "/metrics")


@pytest.mark.slow
def test_a_thousand_silent_connections_leave_a_run_its_files(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["127.0.0.1"], ["kitchen", "garden"])
    metrics = free_port()
    with loopback(tmp_path) as bed, ExitStack() as stack:
        bed.fleet_port = free_port()
        command = raceme("serve", "--address", bed.fleet_address, "--out", "out", *RUN)
        command += ["--certificates", str(certs), "--metrics", f"127.0.0.1:{metrics}"]
        command += ["--max-updates", "6", "--checkpoint-every", "1"]
        server = bed.start("serve", ["bash", "-c", 'ulimit -n 1024; exec "$@"', "bash", *command])
        server.wait_for("Listening on", 240)
        connect(bed.fleet_port, 1100, stack)
        connect(metrics, 100, stack)
        limit = resource.prlimit(server.handle.pid, resource.RLIMIT_NOFILE)[1]
        assert limit == 1024
        taken = len(list(Path(f"/proc/{server.handle.pid}/fd").iterdir()))
        assert taken < 1000
        # Their handshakes time out, and devices can connect.
        for number, name in enumerate(("kitchen", "garden")):
            bed.device(
                *("--root-certificates", str(certs / "ca.crt")),
                *("--key", str(certs / "devices" / name), "--device-id", name),
                *("--node-config", f"partition-id={number} num-partitions=2"),
            )
        assert server.wait(240) == 0
        assert "Traceback" not in server.text()
    assert (tmp_path / "out" / "summary.json").is_file()


def memory(process_id: int) -> int:
    """Return a process's peak memory in bytes."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


BOMB = 256 << 20


@pytest.mark.slow
@pytest.mark.parametrize("call", ["raceme.Fleet/Greet", "flwr.proto.Fleet/ActivateNode"])
def test_a_call_of_a_stranger_takes_no_memory(tmp_path: Path, call: str) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["127.0.0.1"], ["kitchen"])
    with loopback(tmp_path) as bed:
        bed.fleet_port = free_port()
        command = raceme("serve", "--address", bed.fleet_address, "--out", "out", *RUN)
        server = bed.start("serve", [*command, "--certificates", str(certs), "--metrics", "off"])
        server.wait_for("Listening on", 240)
        before = memory(server.handle.pid)
        credentials = grpc.ssl_channel_credentials((certs / "ca.crt").read_bytes())
        options = [("grpc.max_send_message_length", -1)]
        signature = Signer(*generate_keys()).metadata()
        with grpc.secure_channel(bed.fleet_address, credentials, options) as channel:
            for metadata in ([], signature):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(f"/{call}")(
                        bytes(BOMB),
                        metadata=metadata,
                        compression=grpc.Compression.Gzip,
                        timeout=60,
                    )
                assert refused.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        assert memory(server.handle.pid) - before < BOMB / 4
        assert server.handle.poll() is None


def test_a_registered_device_sends_no_more_than_a_reply_has() -> None:
    keys = generate_keys()
    limited = LinkState(APP)
    limited.largest = 1 << 20
    address = f"127.0.0.1:{free_port()}"
    with (
        FleetApi(limited, address, None, lambda: {public_key_to_bytes(keys[1]): "kitchen"}) as api,
        grpc.insecure_channel(address) as channel,
    ):
        api.start()
        call = channel.unary_unary("/raceme.Fleet/Send")
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            with pytest.raises(grpc.RpcError) as refused:
                call(
                    bytes(2 << 20),
                    metadata=Signer(*keys).metadata(),
                    compression=compression,
                    timeout=20,
                )
            assert refused.value.code() in (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNIMPLEMENTED,
            )


def test_one_device_fills_neither_the_disk_nor_the_memory(tmp_path: Path) -> None:
    """Its replies have the maximum size, each with other names of arrays."""
    size, names = 200_000, "n" * 400_000
    with serving(tmp_path) as server, light_device(server) as link:
        server.state.largest = 1 << 20
        sent = [server.push(link.node_id, number) for number in range(30)]
        server.grid.state_dict()
        tracemalloc.start()
        try:
            for number in range(30):
                message = fetch(link)
                identify_process(message.metadata.run_id, link.node_id)
                arrays = ArrayRecord([np.zeros(size // 8, np.float32)] * 2)
                named = {f"{names}{number}{key}": array for key, array in arrays.items()}
                content = RecordDict({"arrays": ArrayRecord(named)})
                link.send(Message(content, reply_to=message), 0.1)
                del message, content, arrays, named
                (reply,) = server.wait(sent[number])
                assert not reply.has_error()
                del reply
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Room for about five replies, whose names and arrays take two megabytes each.
        assert held < 12_000_000
        journal = sum(path.stat().st_size for path in tmp_path.glob("replies-*.bin"))
        assert size < journal <= 4 * server.state.largest + 10_000


def test_objects_of_a_reply_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    keys = generate_keys()
    with serving(tmp_path, registered=lambda: {public_key_to_bytes(keys[1]): "kitchen"}) as server:
        server.state.largest = 3 << 20
        with light_device(server, keys) as link:
            sent = server.push(link.node_id, 1)
            message = fetch(link)
            identify_process(message.metadata.run_id, link.node_id)
            # Each record is an object below the limit; together they exceed it.
            content = RecordDict(
                {f"part {n}": ArrayRecord([np.full(250_000, n, np.float32)]) for n in range(5)}
            )
            with pytest.raises(ObjectPushError):
                link.send(Message(content, reply_to=message), 0.1)
            held = sum(map(len, stored(server.state).values()))
            assert held <= 3 << 20
            # A second reply to the same message is ignored.
            link.send(Message(content, reply_to=message), 0.1)
            assert sum(map(len, stored(server.state).values())) <= 3 << 20
        server.state.forget([sent])


def stored(state: LinkState) -> dict[str, bytes]:
    """Return the contents of all objects in the store."""
    return {key: content or b"" for key, content in state.objects._contents.items()}


def test_an_id_of_five_thousand_digits_is_none(tmp_path: Path) -> None:
    head = f"GET /events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: {'9' * 5000}-1\r\n\r\n"
    with (
        dashboard(tmp_path) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(head.encode())
        assert "200" in connection.recv(1000).decode().partition("\r\n")[0]


@pytest.mark.slow
def test_a_servers_files_and_paths_are_its_own(tmp_path: Path) -> None:
    certs = tmp_path / "secret-place"
    make_certificates(certs, ["127.0.0.1"], ["kitchen"])
    with loopback(tmp_path) as bed:
        bed.fleet_port = free_port()
        command = raceme("serve", "--address", bed.fleet_address, "--out", "out", *RUN)
        command += ["--certificates", str(certs), "--metrics", "off", "--max-updates", "2"]
        command += ["--checkpoint-every", "1"]
        server = bed.start("serve", ["bash", "-c", 'umask 022; exec "$@"', "bash", *command])
        server.wait_for("Listening on", 240)
        endpoint = Endpoint(bed.fleet_address, False, (certs / "ca.crt").read_bytes())
        keys = read_device_key(certs / "devices" / "kitchen")
        with join(endpoint, keys, StopSignal(), register=False) as link:
            received = link.receive(15.0)
            assert received is not None
            bundle = link.bundle(link.run(received[0].metadata.run_id))
        with zipfile.ZipFile(io.BytesIO(bundle)) as app:
            assert not any(b"secret-place" in app.read(name) for name in app.namelist())
            assert any(name.endswith("pyproject.toml") for name in app.namelist())
        bed.device(
            *("--root-certificates", str(certs / "ca.crt")),
            *("--key", str(certs / "devices" / "kitchen"), "--device-id", "kitchen"),
            *("--node-config", "partition-id=0 num-partitions=2"),
        )
        assert server.wait(240) == 0
        assert "SuperNodes of Flower 1.40 and later need --http" in server.text()
    modes = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o077
        for path in (tmp_path / "out").rglob("*")
    }
    assert "out/run.sqlite" in modes
    assert "out/summary.json" in modes
    assert "out/run.log" in modes
    assert not any(modes.values())
