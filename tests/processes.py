"""Real processes on loopback: a SuperLink, devices, `flwr run`; all stopped at the end."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from raceme.flower import installed_flower

Found = TypeVar("Found")

FLOWER = tuple(map(int, installed_flower()[1].split(".")[:2]))
ROOT = Path(__file__).resolve().parent.parent
_RACEME = [sys.executable, "-c", "from raceme.cli import main; main()"]


@dataclass
class Process:
    """A child process and its output so far."""

    name: str
    handle: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))

    def wait_for(self, pattern: str, seconds: float = 90.0) -> re.Match[str]:
        """Wait until a pattern occurs in the output."""
        found = wait_until(
            lambda: re.search(pattern, self.text()) or self._ended(pattern), seconds, self.describe
        )
        assert isinstance(found, re.Match)
        return found

    def _ended(self, pattern: str) -> re.Match[str] | None:
        if self.handle.poll() is None:
            return None
        found = re.search(pattern, self.text())
        assert found, f"{self.name} ended with {self.handle.returncode}:\n{self.text()}"
        return found

    def describe(self) -> str:
        return f"{self.name} wrote:\n{self.text()[-4000:]}"

    def wait(self, seconds: float = 60.0) -> int:
        try:
            return self.handle.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.describe()}") from None

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.handle.send_signal(number)
        return self.wait(20)

    def end(self) -> None:
        """Stop the process and everything that it started."""
        if self.handle.poll() is None:
            self.handle.terminate()
            try:
                self.handle.wait(10)
            except subprocess.TimeoutExpired:
                self.handle.kill()
                self.handle.wait()
        # Other processes of its process group, if it started its own session.
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)


@dataclass
class Loopback:
    """Processes with a common home folder, stopped together."""

    home: Path
    stack: ExitStack
    processes: list[Process] = field(default_factory=list)
    http_port: int = 0
    fleet_port: int = 0
    paths: tuple[str, ...] = ()

    @property
    def fleet_address(self) -> str:
        """Address for devices, of `raceme serve` or of a SuperLink of the installed Flower."""
        return f"127.0.0.1:{self.fleet_port}"

    @property
    def http_address(self) -> str:
        """Address of the same API over HTTP."""
        return f"127.0.0.1:{self.http_port}"

    def start(self, name: str, command: Sequence[str]) -> Process:
        log = self.home / f"{name}-{len(self.processes)}.log"
        with log.open("wb") as output:
            handle = subprocess.Popen(
                as_in_a_terminal(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.home,
                env=self.environment(),
                start_new_session=True,
            )
        process = Process(name, handle, log)
        self.processes.append(process)
        self.stack.callback(process.end)
        return process

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *self.paths]),
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(self.home / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }

    def superlink(self, *options: str, secure: bool = False) -> Process:
        """Start a SuperLink; a second one uses the same ports."""
        self.http_port = self.http_port or free_port()
        command = ["flower-superlink", "--port", str(self.http_port)]
        if FLOWER < (1, 40):
            self.fleet_port = self.fleet_port or free_port()
            command += ["--fleet-api-type", "grpc-rere", "--fleet-api-address", self.fleet_address]
        else:
            # A single port for all APIs, over HTTP.
            self.fleet_port = self.http_port
        self._write_connection(secure)
        process = self.start("superlink", [*command, *(options or ("--insecure",))])
        if "--simulation" not in options:
            wait_until(lambda: _listens(self.fleet_port), 90, process.describe)
        wait_until(lambda: _listens(self.http_port), 90, process.describe)
        return process

    def secure_superlink(self, *devices: str) -> Path:
        """Start a SuperLink with TLS that knows no device yet; return the folder of the keys."""
        folder = self.home / "certs"
        named = [option for device in devices for option in ("--device", device)]
        make = raceme("certs", "--host", "127.0.0.1", "--out", str(folder), *named)
        assert self.start("certs", make).wait() == 0
        self.superlink(
            *("--ssl-ca-certfile", f"{folder}/ca.crt"),
            *("--ssl-certfile", f"{folder}/server.crt"),
            *("--ssl-keyfile", f"{folder}/server.key"),
            "--enable-supernode-auth",
            secure=True,
        )
        return folder

    def register(self, device: str) -> None:
        """Register a device whose key is in the folder of the keys."""
        key = f"{self.home}/certs/devices/{device}.pub"
        assert self.flwr("supernode", "register", key, "here").wait() == 0

    def _write_connection(self, secure: bool) -> None:
        trust = f'root-certificates = "{self.home}/certs/ca.crt"' if secure else "insecure = true"
        config = self.home / "flwr" / "config.toml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.http_port}"\n{trust}\n'
        )

    def device(self, *options: str) -> Process:
        return self.start("device", raceme("device", "--superlink", self.fleet_address, *options))

    def supernode(self, partition: int, of: int) -> Process:
        """Start one of Flower's own SuperNodes with one partition of the data."""
        address = self.fleet_address if FLOWER < (1, 40) else self.http_address
        command = ["flower-supernode", "--insecure", "--superlink", address]
        command += ["--port", str(free_port())]
        command += ["--node-config", f"partition-id={partition} num-partitions={of}"]
        return self.start("supernode", command)

    def flwr(self, *arguments: str) -> Process:
        return self.start("flwr", ["flwr", *arguments])


@contextmanager
def loopback(home: Path) -> Iterator[Loopback]:
    """Yield a place to start processes, which all end with the block."""
    with ExitStack() as stack:
        yield Loopback(home, stack)


_HEARING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def as_in_a_terminal(command: Sequence[str]) -> list[str]:
    """Make a command react to Ctrl-C, which background processes of a script ignore.

    A Python process resets the signal and then executes the command. A `preexec_fn` in a fork of
    this process could hang where gRPC is in use.
    """
    return [sys.executable, "-I", "-S", "-c", _HEARING, *command]


def raceme(*arguments: str) -> list[str]:
    return [*_RACEME, *arguments]


def wait_until(
    condition: Callable[[], Found | None], seconds: float, describe: Callable[[], str] = str
) -> Found:
    """Poll a condition, such as the progress of another process."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s; {describe()}")


_PORTS = iter(random.Random(os.getpid()).sample(range(10_000, 32_000), 22_000))
"""Ports below the ephemeral range, in an order that differs between test processes."""


def resident_memory(process_id: int) -> int:
    """Return the resident memory of a process in bytes (Linux)."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """Return a port that nothing listens on and that no later connection uses."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
