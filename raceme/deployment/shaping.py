"""Slow devices and bad networks on one machine: a network namespace and a CPU share per device.

A device's namespace is joined to the host by a pair of virtual interfaces, whose two ends are
slowed down by the kernel's netem, one for each direction. Its CPU share is kept by stopping its
process for a part of every tenth of a second. Needs root and iproute2; what was set up is taken
down again at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from raceme.config.errors import UserError
from raceme.simulation import Device

_PERIOD_SECONDS = 0.1
_MOST_DEVICES = 250


@dataclass(frozen=True)
class Shape:
    """What one device has of the machine.

    Attributes
    ----------
    down, up : float
        Bytes per second to it and from it; 0 for no limit.
    delay : float
        Milliseconds that every packet takes longer, in each direction.
    loss : float
        Percentage of packets that are lost, in each direction.
    cpu : float
        Share of one core, at most 1.
    """

    down: float = 0.0
    up: float = 0.0
    delay: float = 0.0
    loss: float = 0.0
    cpu: float = 1.0


def shapes_of(devices: Sequence[Device], delay: float, loss: float) -> list[Shape]:
    """Turn simulated devices into shapes: the fastest has a whole core, the others their share."""
    seconds = [device.mean_duration(1, 1, bytes_down=0, bytes_up=0) for device in devices]
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
class Place:
    """Where a shaped device runs.

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
        """Return a command as it is run there."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def places(shapes: Sequence[Shape]) -> Iterator[list[Place]]:
    """Set up a network namespace for each shape, and take it down at the end.

    Raises
    ------
    UserError
        Not root, no iproute2, or a kernel that cannot do it.
    """
    check(len(shapes))
    with ExitStack() as stack:
        yield [_place(index, shape, stack) for index, shape in enumerate(shapes)]


def check(devices: int) -> None:
    """Raise UserError if this machine or this user cannot shape devices."""
    if os.geteuid() != 0:
        raise UserError(
            "--shape makes network namespaces, for which it must run as root: use sudo, or leave "
            "out --shape."
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"--shape needs the program '{missing[0]}': install iproute2 (apt-get install "
            "iproute2), or leave out --shape."
        )
    if devices > _MOST_DEVICES:
        raise UserError(f"--shape takes {_MOST_DEVICES} devices at most, got {devices}.")


def _place(index: int, shape: Shape, stack: ExitStack) -> Place:
    # Interface names have 15 characters at most.
    name, outside, inside = (f"rc{os.getpid()}{kind}{index}" for kind in "nho")
    host, guest = f"10.213.{index}.1", f"10.213.{index}.2"
    _run("ip", "netns", "add", name)
    # Its end of the pair goes with the namespace, and the other end with that one.
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
    return Place(name, host)


def netem(shape: Shape, rate: float) -> list[str]:
    """Return what netem is told for one direction; nothing if it has nothing to do."""
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
        raise UserError(f"--shape: '{' '.join(command)}' failed: {reason}{hint}")


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)


class CpuShare:
    """Lets a process run for a share of the time, from its start until closed.

    Parameters
    ----------
    process_id : int
        The process.
    share : float
        From above 0 to 1; 1 leaves it alone.
    """

    def __init__(self, process_id: int, share: float) -> None:
        self._process_id = process_id
        self._share = share
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._alternate, daemon=True)

    def start(self) -> None:
        """Slow the process down from now on."""
        if self._share < 1:
            self._thread.start()

    def close(self) -> None:
        """Let the process run freely again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _alternate(self) -> None:
        # Once the process has ended there is nothing more to do.
        with suppress(ProcessLookupError):
            try:
                while not self._stop.wait(_PERIOD_SECONDS * self._share):
                    os.kill(self._process_id, signal.SIGSTOP)
                    self._stop.wait(_PERIOD_SECONDS * (1 - self._share))
                    os.kill(self._process_id, signal.SIGCONT)
            finally:
                os.kill(self._process_id, signal.SIGCONT)
