"""What connections of strangers do to a server: nothing that ends a run."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import free_port, loopback, raceme

from raceme.fleet.certificates import make_certificates
from raceme.fleet.serve import StatusPort
from raceme.reporting.dashboard.server import bind, serve
from raceme.reporting.dashboard.source import Watched

RUN = ["--strategy", "fedasync", "--dataset", "digits", "--eval-every", "1000"]
RUN += ["--clients", "2", "--groups", "0.5,0.5"]


def connect(port: int, most: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections, as many as are accepted."""
    made = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(most)]
    for connection in made:
        stack.callback(connection.close)
    return made


def ask(port: int, host: str = "localhost", path: str = "/") -> str:
    """Return the status line of an answer; empty if the connection is closed."""
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
    with StatusPort(f"127.0.0.1:{port}", lambda: b"figures", lambda: (True, {})):
        yield port


@contextmanager
def dashboard(folder: Path) -> Iterator[int]:
    ended = threading.Event()

    async def until() -> None:
        while not ended.is_set():
            await asyncio.sleep(0.02)

    with bind("127.0.0.1", 0) as listening:
        watched = Watched(folder / "run", False)
        thread = threading.Thread(target=serve, args=(listening, watched, "", until))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            thread.join(30)


PORTS = pytest.mark.parametrize("port_of", [status_port, dashboard])


@PORTS
def test_connections_that_drip_are_closed(port_of: type, tmp_path: Path) -> None:
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


@PORTS
def test_connections_beyond_a_limit_are_closed_and_the_others_are_answered_later(
    port_of: type, tmp_path: Path
) -> None:
    with port_of(tmp_path) as port, ExitStack() as stack:
        silent = connect(port, 80, stack)
        assert ask(port) == ""
        assert sum(map(is_closed, silent)) == 16
        time.sleep(11)
        assert all(map(is_closed, silent))
        assert "200" in ask(port, path="/healthz" if port_of is status_port else "/")


def test_a_name_that_was_pointed_here_gets_no_figures() -> None:
    with status_port(Path()) as port:
        assert "200" in ask(port, f"127.0.0.1:{port}", "/metrics")
        assert "400" in ask(port, f"evil.example:{port}", "/metrics")


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
        server.wait_for("Listening at", 240)
        connect(bed.fleet_port, 1100, stack)
        connect(metrics, 100, stack)
        limit = resource.prlimit(server.handle.pid, resource.RLIMIT_NOFILE)[1]
        assert limit == 1024
        taken = len(list(Path(f"/proc/{server.handle.pid}/fd").iterdir()))
        assert taken < 1000
        # Their handshakes are given up, and devices find room.
        for number, name in enumerate(("kitchen", "garden")):
            bed.device(
                *("--root-certificates", str(certs / "ca.crt")),
                *("--key", str(certs / "devices" / name), "--device-id", name),
                *("--node-config", f"partition-id={number} num-partitions=2"),
            )
        assert server.wait(240) == 0
        assert "Traceback" not in server.text()
    assert (tmp_path / "out" / "summary.json").is_file()
