"""A device's machine: processors, cost of work, and the fastest way to compute.

In a simulation every client trains on one thread of the CPU: see :mod:`raceme.client_app`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raceme.core.errors import UserError
from raceme.core.messages import CPU_SECONDS, JOULES
from raceme.training.local import TrainingSettings, step, train
from raceme.training.models import Network, Samples

# -----------------------------------------------------------------------------
# Description of a machine: processors, memory, torch.
# -----------------------------------------------------------------------------


_MIB = 1024 * 1024
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_SHARE = Path("/sys/fs/cgroup/cpu.max")


def describe() -> dict[str, str | int]:
    """Return the number of processors, the memory in MiB, and torch's version.

    Limits of a container apply.
    """
    return {
        "cpu-count": processors(),
        "memory-mib": _memory() // _MIB,
        "torch-version": _torch_version(),
    }


@cache
def _torch_version() -> str:
    """Cached, as each of many simulated clients needs it and a look-up takes milliseconds."""
    return metadata.version("torch")


def processors() -> int:
    """Return the number of cores available to this process, within a container's limits."""
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    else:
        there = os.cpu_count() or 1
    try:
        # "150000 100000": CPU microseconds per period; "max" means no limit.
        quota, period = map(int, _CONTAINER_SHARE.read_text().split())
    except (OSError, ValueError):
        return there
    return max(1, min(there, quota // period)) if period else there


def _memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        # "max" means no limit.
        return min(physical, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        return physical


# -----------------------------------------------------------------------------
# The cost of work for a machine: compute time and energy.
#
# Two kinds of boards report their power through Linux files:
#
# - NVIDIA's Jetson boards have INA3221 chips, each of which measures three supply lines
#   (``/sys/class/hwmon/hwmon*/``, kernel documentation ``hwmon/ina3221``): volts and amperes of the
#   moment, which are sampled while the work goes on.
# - x86 processors count their energy (RAPL, ``/sys/class/powercap/intel-rapl:*/``,
#   kernel documentation ``power/powercap``), with overflow to 0.
#
# Both measure the whole board or processor, not one program.
# -----------------------------------------------------------------------------


SYSTEM = Path("/sys/class")

_WHOLE_BOARD = ("VDD_IN", "POM_5V_IN")
"""Labels of the line that feeds the whole board; without it all lines are summed."""
_SAMPLE_SECONDS = 0.1
_MICRO = 1e-6


class Meter(Protocol):
    """Measures energy from :meth:`start` to :meth:`joules`."""

    def start(self) -> None:
        """Start a measurement."""

    def joules(self) -> float | None:
        """End, and return the energy used since the start; None if unreadable."""


class Rapl:
    """Energy of x86 processors: packages, and memory if counted.

    Parameters
    ----------
    counters : Sequence
        Folders of the zones to sum.
    """

    def __init__(self, counters: Sequence[Path]) -> None:
        self._zones = counters
        self._before: list[int] = []

    @classmethod
    def found(cls, system: Path = SYSTEM) -> Rapl | None:
        """Return the meter of a machine with readable counters, else None."""
        zones = sorted((system / "powercap").glob("intel-rapl:*"))
        chosen = []
        for zone in zones:
            # A package includes its cores but not its memory.
            name = _text(zone / "name")
            is_package = zone.name.count(":") == 1 and name.startswith("package-")
            if is_package or name == "dram":
                chosen.append(zone)
        readable = [zone for zone in chosen if _text(zone / "energy_uj").isdecimal()]
        return cls(readable) if readable else None

    def start(self) -> None:
        """Start a measurement."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Return the energy used since the start; a decreased counter has overflowed."""
        after = self._read()
        if len(after) != len(self._before) or not after:
            return None
        total = 0
        for zone, one, other in zip(self._zones, self._before, after, strict=True):
            range_ = 0 if other >= one else _number(zone / "max_energy_range_uj")
            total += other - one + range_
        return total * _MICRO if total >= 0 else None

    def _read(self) -> list[int]:
        try:
            return [_number(zone / "energy_uj") for zone in self._zones]
        except (OSError, ValueError):
            return []


class _Line(NamedTuple):
    """A supply line of an INA3221: files with millivolts and milliamperes."""

    volts: Path
    amperes: Path

    def watts(self) -> float:
        return _number(self.volts) * _number(self.amperes) * _MICRO


class Ina3221:
    """Energy of a Jetson board: power sampled by a thread and integrated over time.

    Parameters
    ----------
    lines : Sequence
        Supply lines to sum.
    clock : Callable
        Monotonic clock in seconds.
    """

    def __init__(self, lines: Sequence[_Line], clock: Callable[[], float] = time.monotonic) -> None:
        self._lines, self._clock = lines, clock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    @classmethod
    def found(cls, system: Path = SYSTEM) -> Ina3221 | None:
        """Return the meter of a board with such chips, else None."""
        labelled = dict[str, _Line]()
        for chip in sorted((system / "hwmon").glob("hwmon*")):
            if _text(chip / "name") != "ina3221":
                continue
            for label in sorted(chip.glob("in[123]_label")):
                number = label.name[2]
                line = _Line(chip / f"in{number}_input", chip / f"curr{number}_input")
                if _text(line.volts).isdecimal() and _is_whole(_text(line.amperes)):
                    labelled[_text(label)] = line
        whole = [labelled[name] for name in _WHOLE_BOARD if name in labelled][:1]
        lines = whole or list(labelled.values())
        return cls(lines) if lines else None

    def start(self) -> None:
        """Start a measurement."""
        self._joules, self._last = 0.0, None
        self.sample()
        self._ended.clear()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="raceme-power")
        self._thread.start()

    def joules(self) -> float | None:
        """End, and return the energy used since the start; None if unreadable."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.sample()
        return self._joules if self._last is not None else None

    def sample(self) -> None:
        """Add the energy since the last sample, by the trapezoidal rule."""
        try:
            watts = sum(line.watts() for line in self._lines)
        except (OSError, ValueError):
            return
        now = self._clock()
        if self._last is not None:
            then, former = self._last
            # A line with hardly any load may be measured below 0.
            self._joules += max(0.0, (watts + former) / 2) * (now - then)
        self._last = now, watts

    def _go_on(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self.sample()


def meter_of(system: Path = SYSTEM) -> Meter | None:
    """Return this machine's energy meter; None without one."""
    return Ina3221.found(system) or Rapl.found(system)


@contextmanager
def measured(meter: Meter | None) -> Iterator[dict[str, float]]:
    """Measure the cost of the block into the mapping, which is filled at its end.

    Parameters
    ----------
    meter : Meter or None
        Energy meter, if any.
    """
    cost: dict[str, float] = {}
    began = time.process_time()
    if meter is not None:
        meter.start()
    try:
        yield cost
    finally:
        joules = None if meter is None else meter.joules()
        cost[CPU_SECONDS] = time.process_time() - began
        if joules is not None:
            cost[JOULES] = joules


def _text(path: Path) -> str:
    """Return the text of a file, empty if unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int:
    return int(path.read_text())


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


# -----------------------------------------------------------------------------
# Choice of the fastest processor and number of threads on a real device.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.device")

ACCELERATOR, THREADS = "accelerator", "threads"
"""Keys of a node's configuration."""
AUTO = "auto"
CPU = "cpu"
GPUS = ("cuda", "mps")
"""torch's names of NVIDIA's and Apple's GPUs."""
MOST_THREADS = 1024

_TOLERANCE = 1e-2
"""Relative; GPUs may round the inputs of convolutions to 10 bits."""
_WORTHWHILE = 0.9
"""Maximum relative time of more threads or a GPU to be preferred."""
_ROUNDS = 4
_LONGEST_SECONDS = 5.0
"""Time limit for starting further rounds of measurement."""


class Way(NamedTuple):
    """A way to compute.

    Attributes
    ----------
    accelerator : str
        ``"cpu"``, ``"cuda"`` or ``"mps"``.
    threads : int
        Number of CPU threads that torch uses.
    """

    accelerator: str
    threads: int

    def __str__(self) -> str:
        number = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return number if self.accelerator == CPU else self.accelerator


def ways_of(node: Mapping[str, object]) -> list[Way]:
    """Return the ways to compute that a node's owner allows, the simplest first.

    Parameters
    ----------
    node : Mapping[str, object]
        Node configuration. Without the keys ``accelerator`` and ``threads`` the only way is one CPU
        thread.

    Raises
    ------
    UserError
        A value is invalid, or the accelerator is missing or unusable.
    """
    places = accelerators(node.get(ACCELERATOR, CPU))
    counts = thread_counts(node.get(THREADS, 1))
    # A GPU is fed by one thread.
    return [Way(p, n) for p in places for n in (counts if p == CPU else counts[:1])]


def accelerators(wanted: object) -> list[str]:
    """Return the usable accelerators: the wanted one, or all for ``"auto"``.

    A GPU is usable if it trains a small network to the CPU's result.

    Raises
    ------
    UserError
        The accelerator is missing, fails, or computes other results.
    """
    if wanted == CPU:
        return [CPU]
    if wanted == AUTO:
        there = [name for name in GPUS if _is_there(name)]
        for name in there:
            if _failure(name) is not None:
                log.warning("the accelerator '%s' is not used: %s", name, _failure(name))
        return [CPU, *(name for name in there if _failure(name) is None)]
    if wanted not in GPUS:
        valid = ", ".join((AUTO, CPU, *GPUS))
        raise UserError(f"There is no accelerator '{wanted}'. Valid: {valid}.")
    name = str(wanted)
    if not _is_there(name):
        raise UserError(
            f"torch {torch.__version__} finds no accelerator '{name}' here: install a torch build "
            "that supports it, or leave --accelerator out."
        )
    if _failure(name) is not None:
        raise UserError(f"The accelerator '{name}' cannot be used: {_failure(name)}")
    return [name]


def thread_counts(wanted: object) -> list[int]:
    """Return the candidate numbers of threads: the wanted one, or several for ``"auto"``.

    Those are 1, 2, 4 and so on up to the available cores or ``OMP_NUM_THREADS``.

    Raises
    ------
    UserError
        The number is invalid.
    """
    if wanted == AUTO:
        stated = os.environ.get("OMP_NUM_THREADS", "")
        most = int(stated) if stated.isdecimal() and int(stated) else processors()
        return sorted({*(2**power for power in range(int(math.log2(most)) + 1)), most})
    text = str(wanted)
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise UserError(
            f"threads must be auto, or a number from 1 to {MOST_THREADS}, got '{text[:40]}'."
        )
    return [int(text)]


def fastest(
    ways: Sequence[Way],
    build: Callable[[str], Network],
    x: NDArray[np.float32],
    y: NDArray[np.generic],
) -> Way:
    """Return the fastest way for a step on a mini-batch; simpler ones win near ties.

    Parameters
    ----------
    ways : Sequence[Way]
        Candidates, the simplest first.
    build : Callable
        Returns the network on an accelerator. Its weights are kept, its gradient and statistics
        not.
    x, y : NDArray
        Inputs and labels of the mini-batch.
    """
    if len(ways) == 1:
        return ways[0]
    seconds = dict.fromkeys(ways, math.inf)
    before, started = torch.get_num_threads(), time.perf_counter()
    try:
        # The ways take turns; the first step in each is the slowest.
        for number in range(1 + _ROUNDS):
            for way in ways:
                took = _timed_step(way, build(way.accelerator), x, y)
                seconds[way] = min(seconds[way], took) if number else math.inf
            if number and time.perf_counter() - started > _LONGEST_SECONDS:
                break
    finally:
        torch.set_num_threads(before)
    chosen = ways[0]
    for way in ways[1:]:
        if seconds[way] < _WORTHWHILE * seconds[chosen]:
            chosen = way
    told = ", ".join(f"{1000 * seconds[way]:.1f} ms on {way}" for way in ways)
    log.info("a mini-batch of %d takes %s: training on %s", len(y), told, chosen)
    return chosen


def _timed_step(
    way: Way, network: Network, x: NDArray[np.float32], y: NDArray[np.generic]
) -> float:
    torch.set_num_threads(way.threads)
    samples = Samples(x, y, network.channels_last, way.accelerator)
    network.module.train()
    ((inputs, labels),) = samples.slices(len(y))
    started = time.perf_counter()
    # Reading the loss waits for the end of the computation.
    float(step(network, inputs, labels, lr=0.0))
    return time.perf_counter() - started


def _is_there(name: str) -> bool:
    return bool(torch.get_device_module(name).is_available())


@cache
def _failure(name: str) -> str | None:
    """Return why an accelerator is unusable, or None.

    A torch build for other GPUs finds this one but fails at the first computation.
    """
    try:
        found, expected = trial(name), trial(CPU)
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    if np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return "its weights of a small trained network differ from the CPU's"


def trial(name: str) -> NDArray[np.float32]:
    """Train a fixed small convolutional network for some steps on an accelerator.

    Returns
    -------
    NDArray[np.float32]
        Its weights afterwards, shape (d,).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)
    network = Network(nn.Sequential(*layers), accelerator=name)
    rng = np.random.default_rng(0)
    x, y = rng.random((24, 1, 8, 8), np.float32), rng.integers(3, size=24)
    samples = Samples(x, y, network.channels_last, name)
    train(network, samples, TrainingSettings(lr=0.1, batch_size=8), rng)
    weights: NDArray[np.float32] = network.weights.cpu().numpy()
    return weights
