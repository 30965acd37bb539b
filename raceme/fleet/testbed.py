"""`raceme up`: a server and devices as processes of one machine.

Runs `raceme serve` and `raceme device` processes with their own data, and ends all of them.
"""

from __future__ import annotations

import os
import re
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

import raceme
from raceme.core.config import FEW_DEVICES, TRUST, RunConfig, imported_by, write_toml
from raceme.core.errors import UserError
from raceme.core.options import Value
from raceme.datasets.npz import DATA_FILE
from raceme.records.folder import STORE, SUMMARY, check_new, dated_folder, saved_in
from raceme.reporting.artefacts import missing_line

# -----------------------------------------------------------------------------
# The logs of `raceme up`: all lines in files, the important ones on the terminal.
# -----------------------------------------------------------------------------


FOLDER = "logs"
_STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ([A-Z]+) (.*)")
_ROUTINE = re.compile(r"run \d+: \S.*: done in [\d.]+ s, sent in [\d.]+ s$")


class Logs:
    """Files in a run's folder, one per process, with its output.

    Lines are buffered until the run has begun, which needs an empty folder. A full disk does not
    end the run.

    Parameters
    ----------
    out : Path
        Folder of the run, into which the files go once it exists.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / FOLDER
        self._store = out / STORE
        self._waiting: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Append a line to the log of a process."""
        with self._lock:
            self._waiting.append((name, line))
            if self._store.exists():
                with suppress(OSError):
                    self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.folder.mkdir(exist_ok=True)
        for name, line in waiting:
            path = self.folder / f"{name.replace(' ', '-')}.log"
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def readable(line: str) -> str | None:
    """Return the part of a line to show on the terminal; None for a device's routine lines.

    The server reports every task of a device, too, as an update or evaluation.
    """
    stamped = _STAMPED.fullmatch(line)
    if stamped is None:
        return line
    level, text = stamped.groups()
    if level != "INFO":
        return f"{level}: {text}"
    return None if _ROUTINE.match(text) else text


# -----------------------------------------------------------------------------
# `raceme up`: a server and devices as processes of one machine.
# -----------------------------------------------------------------------------


_SERVER = "serve"
_RACEME = (sys.executable, "-c", "from raceme.cli import main; main()")
_START_SECONDS = 120.0
_GRACE_SECONDS = 15.0
_HURRY_SECONDS = 0.3
_REFUSED = 2
"""Exit code of a command whose settings or files are wrong."""
_INTERRUPTED = 130
"""Exit code of a run that was told to stop."""
_ENDED = "The run ended after "
"""Log line of a server at the end of its run."""
_LEFT = (STORE, "clusters", "accuracy.png", "clusters.png", "devices.png")
"""Files of every run besides its summary."""
_WATCHER = """while read -r id; do ids="$ids $id"; done; kill -TERM $ids; kill -CONT $ids"""
"""Shell script that reads process ids until its input ends, and then ends these processes.

SIGCONT lets stopped processes receive the signal.
"""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Show = Callable[[str, str], None]
"""Receives the name of a process and a line for the terminal."""


@dataclass
class _Process:
    """A process of the testbed, in a session of its own."""

    name: str
    handle: subprocess.Popen[str]
    reader: threading.Thread

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, number)

    def end(self) -> None:
        """Stop the process and its descendants."""
        # Flower's programs start children in sessions of their own.
        children = descendants(self.handle.pid)
        if self.handle.poll() is None:
            self.handle.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.handle.wait(_GRACE_SECONDS)
        self.signal(signal.SIGKILL)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.handle.wait()
        self.reader.join(1.0)


@dataclass
class Testbed:
    """Processes on this machine that end together, even if this process is killed.

    Attributes
    ----------
    home : Path
        A temporary folder: Flower's home, and the configuration of the run.
    show : Show
        Receives every output line of a process.
    """

    home: Path
    show: Show
    stack: ExitStack = field(default_factory=ExitStack)
    _processes: dict[str, _Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Its input ends with this process, even if that is killed.
        self._watcher = subprocess.Popen(
            ["sh", "-c", _WATCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        # Last, as the processes are closed in reverse order.
        self.stack.callback(self._watcher.wait)
        self.stack.callback(self._watcher.kill)

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start a process and return its id; its output goes to the common log."""
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
        assert self._watcher.stdin, "it was started with a pipe"
        print(handle.pid, file=self._watcher.stdin, flush=True)
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
        raise UserError(f"The {name} did not start; see its output above.")

    def wait_for_run(self) -> None:
        """Wait for the end of the run.

        Raises
        ------
        UserError
            A necessary process has ended, or the server has refused to run.
        """
        waited = self._processes[_SERVER]
        while waited.handle.poll() is None:
            for other in self._processes.values():
                if other is not waited and other.handle.poll() is not None:
                    raise UserError(
                        f"{other.name} ended with exit code {other.handle.returncode}; see its "
                        "output above."
                    )
            time.sleep(0.1)
        waited.reader.join(1.0)
        if waited.handle.returncode < 0:
            number = -waited.handle.returncode
            raise UserError(
                f"The server was ended by signal {number} during the run. If there is a "
                "checkpoint, --resume resumes from it."
            )
        if waited.handle.returncode == _REFUSED:
            raise UserError("The server did not run; see its output above.")

    @property
    def has_failed(self) -> bool:
        """Whether the server ended neither by itself nor on request."""
        return self._processes[_SERVER].handle.returncode not in (0, _INTERRUPTED)

    def interrupt_run(self) -> None:
        """Ask the server to write a checkpoint and end, and wait for it."""
        server = self._processes[_SERVER].handle
        if server.poll() is None:
            server.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            server.wait(_GRACE_SECONDS)

    def stop_devices(self) -> None:
        """Send all devices two stop signals, so that they do not wait."""
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
                if text:
                    self.show(name, text)


def prepare(keys: Mapping[str, Value]) -> RunConfig:
    """Check the configuration of a run, and choose the folder for its results.

    Raises
    ------
    UserError
        The configuration is invalid; raised here instead of logged by a device.
    """
    from raceme import datasets
    from raceme.fleet.served_grid import saved_messages
    from raceme.runs import experiment
    from raceme.runs.checkpoints import check_work, read_checkpoint

    config = experiment.resolve(RunConfig.from_mapping({"strategy": FEW_DEVICES, **keys}))
    if config.device_keys:
        raise UserError("The devices of `raceme up` make keys of their own: leave device-keys out.")
    datasets.all_clients(config)
    experiment.check_fleet(config, experiment.build_strategy(config), config.num_clients)
    if config.resume:
        config = config.with_values(out=config.resume)
        # The devices, on this machine, will do the checkpoint's open work: its code must be
        # trusted.
        tree, path = read_checkpoint(Path(config.out), config)
        check_work(saved_messages(tree["grid"]), path, config)
        return config
    if config.out:
        check_new(Path(config.out))
        return config
    out = dated_folder(f"up-{config.short_name}").resolve()
    return config.with_values(out=str(out))


def run_testbed(
    config: RunConfig, show: Show, make: Callable[[Path, Show], Testbed] = Testbed
) -> Path:
    """Run a configuration on processes of this machine, one device per client.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run; `out` is the folder of its results.
    show : Show
        Receives the lines for the terminal; all lines are in ``logs`` in the folder.
    make : Callable
        Makes the testbed, given its folder and the receiver of lines.

    Returns
    -------
    Path
        The folder with the results.

    Raises
    ------
    UserError
        A process does not start, or ends before the run.
    """
    out = Path(config.out)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raceme-up-")))
        logs, is_over = Logs(out), threading.Event()

        def watch(name: str, line: str) -> None:
            logs.write(name, line)
            text = readable(line)
            # The end of the server after the run is expected.
            if text is not None and (name == _SERVER or not is_over.is_set()):
                show(name, text)
            if name == _SERVER and _ENDED in line:
                is_over.set()

        bed = make(home, watch)
        stack.enter_context(bed.stack)
        keys = home / "run.toml"
        named = config.with_values(out=str(out), trust="").to_mapping()
        write_toml(named, keys)
        port = _free_port()
        address = f"127.0.0.1:{port}"
        # No time to reconnect, as a resumed run has new devices. Training waits for all devices,
        # since the order in which they are ready is random.
        serve = f"serve --config {keys} --address {address} --metrics off --reconnect 0"
        wanted = ["--clients-min", str(config.num_clients)]
        # This process has already checked that the code is trusted.
        code = imported_by(named) | ({TRUST: config.trust} if config.trust else {})
        wanted += [word for key, name in code.items() for word in (f"--{key}", name)]
        bed.start(_SERVER, [*_RACEME, *serve.split(), *wanted])
        bed.wait_for_port(port, _SERVER)
        for index in range(config.num_clients):
            node = f"partition-id={index} num-partitions={config.num_clients}"
            if file := named.get(DATA_FILE):
                node += f" {DATA_FILE}='{file}'"
            options = ["--insecure", "--superlink", address, "--node-config", node]
            bed.start(f"device {index}", [*_RACEME, "device", *options])
        try:
            bed.wait_for_run()
        except KeyboardInterrupt:
            show("up", "stopping: results and a checkpoint are written")
            bed.interrupt_run()
        finally:
            bed.stop_devices()
        has_failed = bed.has_failed
    if not (out / SUMMARY).is_file():
        raise UserError(
            f"The run ended without results in {out}; see its output above. "
            "If there is a checkpoint, --resume resumes from it."
        )
    missing = [name for name in _LEFT if not (out / name).exists()]
    if missing:
        raise UserError(missing_line(out, dict.fromkeys(missing, "run.log there says why")))
    if has_failed:
        saved = ", ".join(saved_in(out))
        raise UserError(f"The run is not complete; see its output above. Saved in {out}: {saved}.")
    return out


def _environment(home: Path) -> dict[str, str]:
    package_root = str(Path(raceme.__file__).parent.parent)
    # Users' methods and data are looked up in the current folder.
    paths = [package_root, os.environ.get("PYTHONPATH", ""), os.getcwd()]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def descendants(process_id: int) -> list[int]:
    """Return all descendants of a process; on Linux only."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    family = [process_id]
    for parent in family:
        family.extend(child for child, of in parents.items() if of == parent)
    return family[1:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
