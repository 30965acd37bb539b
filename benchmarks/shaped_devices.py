"""`raceme up` with slow devices and networks: a network namespace and a CPU share per device.

    sudo python benchmarks/shaped_devices.py --clients 6 --shape slow30x5 --delay 200 --loss 5 \
        --out runs/shaped max-updates=100 groups=0.5,0.5

A pair of virtual interfaces connects a device's namespace with the host; the kernel's netem slows
down both ends, one per direction. A CPU share makes each device slower than the fastest by the
factor of the device profile: its process is stopped for a part of every tenth of a second. The
limit starts with the device's first answer, when program and data are loaded. Needs root, iproute2
and a kernel with netem; everything is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from raceme.core.config import parse_assignment  # noqa: E402
from raceme.core.errors import UserError  # noqa: E402
from raceme.core.signals import interrupted_by_signals  # noqa: E402
from raceme.fleet.testbed import Show, Testbed, prepare, run_testbed  # noqa: E402
from raceme.simulation import Device, fleet  # noqa: E402
from raceme.simulation.devices import Workload  # noqa: E402

_PERIOD_SECONDS = 0.1
_MOST_DEVICES = 250
_GREETED = "query: done"
"""Log line of a device that has answered the first query."""


@dataclass(frozen=True)
class Shape:
    """Network and CPU limits of a device.

    Attributes
    ----------
    down, up : float
        Bytes per second to and from it; 0 for no limit.
    delay : float
        Additional milliseconds per packet and direction.
    loss : float
        Percentage of lost packets per direction.
    cpu : float
        Share of one core, at most 1.
    """

    down: float = 0.0
    up: float = 0.0
    delay: float = 0.0
    loss: float = 0.0
    cpu: float = 1.0


def shapes_of(devices: Sequence[Device], delay: float, loss: float) -> list[Shape]:
    """Convert simulated devices to shapes: the fastest has a whole core, the others a share."""
    seconds = [device.mean_duration(Workload(examples=1)) for device in devices]
    fastest = min((value for value in seconds if value > 0), default=1.0)
    return [
        Shape(
            down=device.bandwidth_down,
            up=device.bandwidth_up,
            delay=delay,
            loss=loss,
            cpu=min(1.0, fastest / value) if value else 1.0,
        )
        for device, value in zip(devices, seconds, strict=True)
    ]


@dataclass(frozen=True)
class Location:
    """The location of a shaped device.

    Attributes
    ----------
    namespace : str
        Name of its network namespace.
    host : str
        Address at which it reaches the host.
    """

    namespace: str
    host: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def places(shapes: Sequence[Shape]) -> Iterator[list[Location]]:
    """Create a network namespace per shape, and remove it at the end.

    Raises
    ------
    UserError
        Not root, no iproute2, or no kernel support.
    """
    check(len(shapes))
    with ExitStack() as stack:
        yield [_place(index, shape, stack) for index, shape in enumerate(shapes)]


def check(devices: int) -> None:
    """Raise UserError if this machine or user cannot shape devices."""
    if os.geteuid() != 0:
        raise UserError("Network namespaces need root: use sudo.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"The program '{missing[0]}' is missing: install iproute2 (apt-get install iproute2)."
        )
    if devices > _MOST_DEVICES:
        raise UserError(f"{_MOST_DEVICES} devices at most, got {devices}.")


def _place(index: int, shape: Shape, stack: ExitStack) -> Location:
    # Interface names have 15 characters at most.
    name, outside, inside = (f"rc{os.getpid()}{kind}{index}" for kind in "nho")
    host, guest = f"10.213.{index}.1", f"10.213.{index}.2"
    _run("ip", "netns", "add", name)
    # Deleting the namespace removes both ends of the pair.
    stack.callback(_quietly, "ip", "netns", "delete", name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
    stack.callback(_quietly, "ip", "link", "delete", outside)
    _run("ip", "link", "set", inside, "netns", name)
    _run("ip", "address", "add", f"{host}/30", "dev", outside)
    _run("ip", "link", "set", outside, "up")
    within = ("ip", "netns", "exec", name)
    _run(*within, "ip", "address", "add", f"{guest}/30", "dev", inside)
    _run(*within, "ip", "link", "set", inside, "up")
    _run(*within, "ip", "link", "set", "lo", "up")
    for prefix, interface, rate in (((), outside, shape.down), (within, inside, shape.up)):
        terms = netem(shape, rate)
        if terms:
            _run(*prefix, "tc", "qdisc", "add", "dev", interface, "root", "netem", *terms)
    return Location(name, host)


def netem(shape: Shape, rate: float) -> list[str]:
    """Return the arguments of netem for one direction; none if nothing is limited."""
    terms = []
    if shape.delay:
        terms += ["delay", f"{shape.delay:g}ms"]
    if shape.loss:
        terms += ["loss", f"{shape.loss:g}%"]
    if rate:
        terms += ["rate", f"{round(8 * rate)}bit"]
    return terms


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        hint = " (a kernel without netem: modprobe sch_netem)" if "netem" in command else ""
        raise UserError(f"'{' '.join(command)}' failed: {reason}{hint}")


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)


class CpuShare:
    """Limits a process to a share of the time, from `start` to `close`.

    Parameters
    ----------
    process_id : int
        Id of the process, which is stopped and continued by signals.
    share : float
        Share above 0, at most 1; 1 means no limit.
    """

    def __init__(self, process_id: int, share: float) -> None:
        self._process_id = process_id
        self._share = share
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._alternate, daemon=True)

    def start(self) -> None:
        """Start to slow the process down."""
        if self._share < 1:
            self._thread.start()

    def close(self) -> None:
        """Remove the limit."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _alternate(self) -> None:
        # The process has ended.
        with suppress(ProcessLookupError):
            try:
                while not self._stop.wait(_PERIOD_SECONDS * self._share):
                    os.kill(self._process_id, signal.SIGSTOP)
                    self._stop.wait(_PERIOD_SECONDS * (1 - self._share))
                    os.kill(self._process_id, signal.SIGCONT)
            finally:
                os.kill(self._process_id, signal.SIGCONT)


class ShapedTestbed(Testbed):
    """A testbed whose devices are in namespaces of their own, with a share of a core.

    Parameters
    ----------
    home, show : Path, Show
        See :class:`raceme.fleet.testbed.Testbed`.
    shapes : Sequence[Shape]
        Limits of each device.
    """

    def __init__(self, home: Path, show: Show, shapes: Sequence[Shape]) -> None:
        super().__init__(home, self._shown)
        self._show, self._shapes = show, shapes
        self._waiting: dict[str, CpuShare] = {}
        self._places = self.stack.enter_context(places(shapes))

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start the server on all addresses, or a device in its namespace."""
        slowest = max(shape.delay for shape in self._shapes) / 1000
        command = [*command, "--latency", str(max(1.0, slowest))]
        _, is_device, number = name.partition("device ")
        if not is_device:
            return super().start(name, [part.replace("127.0.0.1", "0.0.0.0") for part in command])
        place, shape = self._places[int(number)], self._shapes[int(number)]
        command = [part.replace("127.0.0.1", place.host) for part in command]
        process_id = super().start(name, place.command(command))
        share = self._waiting[name] = CpuShare(process_id, shape.cpu)
        self.stack.callback(share.close)
        return process_id

    def _shown(self, name: str, line: str) -> None:
        if name in self._waiting and _GREETED in line:
            self._waiting.pop(name).start()
        self._show(name, line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--shape", default="uniform", help="a device profile")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds per direction")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of the packets")
    parser.add_argument("--out", default="")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as for `raceme run --set`")
    arguments = parser.parse_args()
    check(arguments.clients)
    keys = dict(map(parse_assignment, arguments.keys))
    config = prepare({**keys, "clients": arguments.clients, "out": arguments.out})
    devices = fleet(arguments.shape, config.num_clients, config.seed)
    shapes = shapes_of(devices, arguments.delay, arguments.loss)

    def show(name: str, line: str) -> None:
        print(f"{name:10} | {line}", flush=True)

    with interrupted_by_signals():
        print(run_testbed(config, show, partial(ShapedTestbed, shapes=shapes)))


if __name__ == "__main__":
    main()
