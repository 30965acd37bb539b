"""`raceme up`: a SuperLink, devices and a run on one machine, for trying things out.

Everything is real but for the distances: stock SuperLink, `raceme device` processes with their own
data, the run started as `flwr run` starts it. Nothing outlives it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

import raceme
from raceme.config import RunConfig, Value
from raceme.config.errors import UserError
from raceme.config.reading import absolute
from raceme.deployment.shaping import CpuShare, Place, Shape, check, places, shapes_of
from raceme.records.folder import check_new
from raceme.reporting.artefacts import missing_line

_START_SECONDS = 60.0
_GRACE_SECONDS = 15.0
_HURRY_SECONDS = 0.3
_MISSING_SECONDS = 10.0
"""After the end of the server app the run ends within so many seconds, or not at all."""
_NOISE = "[uvicorn.access]"
"""Marks the lines that the SuperLink prints for each of its requests, a dozen per update."""
_GREETED = "query: done"
"""What a device says when it has answered a greeting."""
_LEFT = ("run.sqlite", "clusters", "accuracy.png", "clusters.png", "devices.png", "similarity.png")
"""What every run leaves beside its summary."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Show = Callable[[str, str], None]
"""Is given every line of the log, with the name of the process that wrote it."""


@dataclass
class _Process:
    """A process of the testbed, in a session of its own."""

    name: str
    handle: subprocess.Popen[str]
    reader: threading.Thread

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, number)

    def end(self) -> None:
        """Stop the process and everything that it started."""
        # Flower's programs start others in sessions of their own.
        children = descendants(self.handle.pid)
        if self.handle.poll() is None:
            self.handle.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.handle.wait(_GRACE_SECONDS)
        self.signal(signal.SIGKILL)
        for child in children:
            _send(child, signal.SIGKILL)
        self.handle.wait()
        self.reader.join(1.0)


@dataclass
class Testbed:
    """Processes on this machine that stop together.

    Attributes
    ----------
    home : Path
        A temporary folder: Flower's home, and the app that is run.
    show : Show
        Is given every line of the log.
    """

    home: Path
    show: Show
    stack: ExitStack = field(default_factory=ExitStack)
    _processes: dict[str, _Process] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start a process and return its id; what it prints goes to the common log."""
        handle = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self.home,
            env=_environment(self.home),
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(name, handle), daemon=True)
        process = self._processes[name] = _Process(name, handle, reader)
        self.stack.callback(process.end)
        reader.start()
        return handle.pid

    def wait_for_port(self, port: int, name: str) -> None:
        """Wait until a process listens."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._processes[name].handle.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise UserError(f"The {name} did not start; what it printed is above.")

    def wait_for_run(self) -> None:
        """Wait for the end of the run.

        Raises
        ------
        UserError
            Something has ended without which there will be none.
        """
        waited = self._processes["run"]
        seen_at, looked_at = math.inf, 0.0
        while waited.handle.poll() is None:
            now = time.monotonic()
            if now > looked_at + 1.0:
                looked_at = now
                # The SuperLink takes minutes to miss a server app that was killed.
                if self._server_app() is not None:
                    seen_at = now
                elif now > seen_at + _MISSING_SECONDS:
                    raise UserError("The server app ended in the middle of the run.")
            for other in self._processes.values():
                if other is not waited and other.handle.poll() is not None:
                    raise UserError(
                        f"{other.name} ended with exit code {other.handle.returncode}; what it "
                        "printed is above."
                    )
            time.sleep(0.1)
        waited.reader.join(1.0)

    def _server_app(self) -> int | None:
        """Return the process id of the server app, if it runs."""
        for child in descendants(self._processes["superlink"].handle.pid):
            if "flwr-serverapp" in _command_line(child):
                return child
        return None

    def interrupt_run(self) -> None:
        """Let the server app write a checkpoint and end, and wait for that a while."""
        server_app = self._server_app()
        if server_app is None:
            return
        _send(server_app, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._processes["run"].handle.wait(_GRACE_SECONDS)

    def stop_devices(self) -> None:
        """Tell all devices to stop, twice: then they do not wait for anything."""
        devices = [p for name, p in self._processes.items() if name.startswith("device")]
        for process in [*devices, None, *devices]:
            if process is None:
                time.sleep(_HURRY_SECONDS)
            elif process.handle.poll() is None:
                process.handle.terminate()

    def _read(self, name: str, handle: subprocess.Popen[str]) -> None:
        assert handle.stdout, "it was started with a pipe"
        with closing(handle.stdout) as lines:
            for line in lines:
                text = _COLOUR.sub("", line.rstrip())
                if text and _NOISE not in text:
                    self.show(name, text)


def prepare(keys: Mapping[str, Value]) -> RunConfig:
    """Check the configuration of a run, and choose the folder for its results.

    Raises
    ------
    UserError
        It cannot work; said here, not in the log of a device.
    """
    from raceme import datasets, experiment

    config = experiment.resolve(RunConfig.from_mapping(keys))
    if config.device_keys:
        raise UserError("The devices of `raceme up` make keys of their own: leave device-keys out.")
    datasets.all_clients(config)
    experiment.build_strategy(config)
    if config.resume:
        return config.with_values(out=config.resume)
    if config.out:
        out = absolute(config.out)
        check_new(out)
        return config.with_values(out=str(out))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return config.with_values(
        out=str(Path("runs").resolve() / f"{stamp}-up-{config.strategy}-{config.dataset}")
    )


def shapes_from(config: RunConfig, profile: str, delay: float, loss: float) -> list[Shape]:
    """Return what each device has of the machine, by the name of a device profile.

    Raises
    ------
    UserError
        There is no such profile, or this machine or user cannot shape devices.
    """
    from raceme.simulation import fleet

    check(config.num_clients)
    return shapes_of(fleet(profile, config.num_clients, config.seed), delay, loss)


def run_testbed(config: RunConfig, show: Show, shapes: Sequence[Shape] | None = None) -> Path:
    """Run a configuration on processes of this machine, one device per client.

    Parameters
    ----------
    config : RunConfig
        What to run; `out` is where the results go.
    show : Show
        Is given every line of the log.
    shapes : Sequence[Shape], optional
        What each device has of the machine; they share it evenly if not given.

    Returns
    -------
    Path
        The folder with the results.

    Raises
    ------
    UserError
        Something does not start, or ends before the run does.
    """
    out = Path(config.out).expanduser().resolve()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raceme-up-")))
        rooms: list[Place | None] = [None] * config.num_clients
        if shapes is not None:
            rooms = list(stack.enter_context(places(shapes)))
        waiting: dict[str, CpuShare] = {}

        def watch(name: str, line: str) -> None:
            show(name, line)
            # A profile says how long tasks take. Programs and data have been loaded by the time
            # that a device has answered its greeting.
            if name in waiting and _GREETED in line:
                waiting.pop(name).start()

        bed = Testbed(home, watch)
        stack.enter_context(bed.stack)
        http_port, fleet_port = _free_ports(2)
        write_connection(home, http_port)
        app = write_app(home / "app", config.with_values(out=str(out)).to_mapping())
        address = "127.0.0.1" if shapes is None else "0.0.0.0"
        bed.start(
            "superlink",
            [
                _program("flower-superlink"),
                *("--insecure", "--fleet-api-type", "grpc-rere", "--port", str(http_port)),
                *("--fleet-api-address", f"{address}:{fleet_port}"),
            ],
        )
        bed.wait_for_port(fleet_port, "superlink")
        bed.wait_for_port(http_port, "superlink")
        for index, room in enumerate(rooms):
            command = _device(index, config.num_clients, room.host if room else address, fleet_port)
            process_id = bed.start(f"device {index}", room.command(command) if room else command)
            if shapes is not None:
                share = waiting[f"device {index}"] = CpuShare(process_id, shapes[index].cpu)
                stack.callback(share.close)
        bed.start("run", [_program("flwr"), "run", str(app), "--stream"])
        try:
            bed.wait_for_run()
        except KeyboardInterrupt:
            show("up", "stopping: results and a checkpoint are written")
            bed.interrupt_run()
        finally:
            bed.stop_devices()
    if not (out / "summary.json").is_file():
        raise UserError(
            f"The run ended without results in {out}; what it printed is above. "
            "If there is a checkpoint, --resume resumes from it."
        )
    missing = [name for name in _LEFT if not (out / name).exists()]
    if missing:
        raise UserError(missing_line(out, dict.fromkeys(missing, "run.log there says why")))
    return out


def write_app(folder: Path, keys: Mapping[str, Value]) -> Path:
    """Write this package as a Flower app with its own configuration, to be run from a folder."""
    source = Path(raceme.__file__).parent
    shutil.copytree(source, folder / "raceme", ignore=shutil.ignore_patterns("__pycache__"))
    tree: dict[str, object] = {}
    for name, value in keys.items():
        table, _, option = name.rpartition(".")
        inner = tree.setdefault(table, {}) if table else tree
        assert isinstance(inner, dict), "tables hold hyper-parameters only"
        inner[option] = value
    project = {
        "project": {
            "name": "raceme",
            "version": raceme.__version__,
            "description": "Asynchronous, clustered federated learning on Flower",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "raceme",
                    "components": {
                        "serverapp": "raceme.server_app:app",
                        "clientapp": "raceme.client_app:app",
                    },
                    "config": tree,
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return folder


def write_connection(home: Path, port: int) -> None:
    """Tell Flower's command line which SuperLink to use."""
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    text = tomli_w.dumps({"superlink": {"default": "up", "up": connection}})
    (home / "flwr").mkdir()
    (home / "flwr" / "config.toml").write_text(text, encoding="utf-8")


def _device(index: int, clients: int, host: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-c", "from raceme.cli import main; main()", "device", "--insecure"),
        *("--superlink", f"{host}:{port}"),
        *("--node-config", f"partition-id={index} num-partitions={clients}"),
    ]


def _environment(home: Path) -> dict[str, str]:
    package_root = str(Path(raceme.__file__).parent.parent)
    paths = [package_root, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        # Flower starts its own programs by name.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
    }


def _program(name: str) -> str:
    found = shutil.which(name, path=_environment(Path())["PATH"])
    if found is None:
        raise UserError(f"Flower's program '{name}' is not installed beside {sys.executable}.")
    return found


def descendants(process_id: int) -> list[int]:
    """Return all processes that a process has started, and those that they have; on Linux only."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    family = [process_id]
    for parent in family:
        family.extend(child for child, of in parents.items() if of == parent)
    return family[1:]


def _command_line(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _send(process_id: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, number)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
