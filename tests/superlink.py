"""Flower's own processes on loopback, started and stopped by a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(home: Path) -> dict[str, str]:
    """Return an environment in which Flower keeps its files in a folder of the test's own."""
    return {
        **os.environ,
        "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


@contextmanager
def process(arguments: Sequence[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background; at the end, stop it and all that it started."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            arguments,
            cwd=REPOSITORY,
            env=environment(home),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield started
        finally:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(started.pid, signum)
                    started.wait(timeout=10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


def wait_for_port(port: int, seconds: float = 60.0) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port}")


def connect(home: Path, name: str, port: int) -> None:
    """Tell `flwr` where a SuperLink is, under a name."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{name}"\n\n'
        f'[superlink.{name}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )


@contextmanager
def superlink(home: Path, folder: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Run a SuperLink; yield the ports of its HTTP API and of its gRPC Fleet API."""
    http, fleet = free_ports(2)
    command = [
        str(_BIN / "flower-superlink"),
        "--insecure",
        "--fleet-api-type",
        "grpc-rere",
        "--fleet-api-address",
        f"127.0.0.1:{fleet}",
        "--port",
        str(http),
        *options,
    ]
    with process(command, home, folder / "superlink.log"):
        wait_for_port(http)
        wait_for_port(fleet)
        connect(home, "test", http)
        yield http, fleet


@contextmanager
def supernode(home: Path, folder: Path, fleet: int, partition: int, of: int) -> Iterator[None]:
    """Run a stock SuperNode that holds one partition."""
    (port,) = free_ports(1)
    command = [
        str(_BIN / "flower-supernode"),
        "--insecure",
        "--superlink",
        f"127.0.0.1:{fleet}",
        "--port",
        str(port),
        "--node-config",
        f"partition-id={partition} num-partitions={of}",
    ]
    with process(command, home, folder / f"supernode-{partition}.log"):
        yield


def flwr_run(home: Path, run_config: str, *options: str, seconds: float = 240.0) -> str:
    """Run `flwr run . --stream` in the repository; return what it prints."""
    finished = subprocess.run(
        [str(_BIN / "flwr"), "run", ".", "--stream", "--run-config", run_config, *options],
        cwd=REPOSITORY,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return finished.stdout + finished.stderr
