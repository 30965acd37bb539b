"""What a piece of work costs the machine that does it: seconds of computing, and energy.

Two kinds of boards tell how much power they take, both through files that Linux offers:

- NVIDIA's Jetson boards have INA3221 chips, each of which measures three supply lines
  (``/sys/class/hwmon/hwmon*/``, kernel documentation ``hwmon/ina3221``): volts and amperes of the
  moment, which are sampled while the work goes on.
- x86 processors count the energy that they take (RAPL, ``/sys/class/powercap/intel-rapl:*/``,
  kernel documentation ``power/powercap``), from a certain point over again from 0.

Both measure the board, or the processor, with all that it does, not one program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raceme.protocol.cost import CPU_SECONDS, JOULES

SYSTEM = Path("/sys/class")

_WHOLE_BOARD = ("VDD_IN", "POM_5V_IN")
"""Labels of the line that feeds the whole board, where one is measured; else all are added up."""
_SAMPLE_SECONDS = 0.1
_MICRO = 1e-6


class Meter(Protocol):
    """Measures energy from :meth:`start` to :meth:`joules`."""

    def start(self) -> None:
        """Begin anew."""

    def joules(self) -> float | None:
        """End, and return the energy taken since; None if it could not be read."""


@dataclass(frozen=True)
class _Counter:
    """An energy counter of a processor, in microjoules."""

    folder: Path

    def read(self) -> int:
        return int((self.folder / "energy_uj").read_text())

    def range(self) -> int:
        return int((self.folder / "max_energy_range_uj").read_text())


class Rapl:
    """The energy of x86 processors: their packages, and the memory where it is counted.

    Parameters
    ----------
    counters : Sequence
        Folders of the zones to add up.
    """

    def __init__(self, counters: Sequence[Path]) -> None:
        self._counters = [_Counter(folder) for folder in counters]
        self._before: list[int] = []

    @classmethod
    def found(cls, system: Path = SYSTEM) -> Rapl | None:
        """Return the meter of a machine that has such counters and lets this process read them."""
        zones = sorted((system / "powercap").glob("intel-rapl:*"))
        chosen = []
        for zone in zones:
            # A package counts its cores; its memory is beside it.
            name = _text(zone / "name")
            is_package = zone.name.count(":") == 1 and name.startswith("package-")
            if is_package or name == "dram":
                chosen.append(zone)
        readable = [zone for zone in chosen if _text(zone / "energy_uj").isdecimal()]
        return cls(readable) if readable else None

    def start(self) -> None:
        """Begin anew."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Return the energy taken since; a counter that is smaller than before has begun anew."""
        after = self._read()
        if len(after) != len(self._before) or not after:
            return None
        total = 0
        for counter, one, other in zip(self._counters, self._before, after, strict=True):
            total += other - one if other >= one else other - one + counter.range()
        return total * _MICRO if total >= 0 else None

    def _read(self) -> list[int]:
        try:
            return [counter.read() for counter in self._counters]
        except (OSError, ValueError):
            return []


@dataclass(frozen=True)
class _Line:
    """A supply line that an INA3221 measures: files with millivolts and milliamperes."""

    volts: Path
    amperes: Path

    def watts(self) -> float:
        return int(self.volts.read_text()) * int(self.amperes.read_text()) * _MICRO


class Ina3221:
    """The energy of a Jetson board: its power, sampled by a thread and summed up over time.

    Parameters
    ----------
    lines : Sequence
        Supply lines to add up.
    clock : Callable
        Seconds that go on evenly.
    """

    def __init__(self, lines: Sequence[_Line], clock: Callable[[], float] = time.monotonic) -> None:
        self._lines, self._clock = lines, clock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    @classmethod
    def found(cls, system: Path = SYSTEM) -> Ina3221 | None:
        """Return the meter of a board that has such chips."""
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
        """Begin anew."""
        self._joules, self._last = 0.0, None
        self.sample()
        self._ended.clear()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="raceme-power")
        self._thread.start()

    def joules(self) -> float | None:
        """End, and return the energy taken since; None if it could not be read."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.sample()
        return self._joules if self._last is not None else None

    def sample(self) -> None:
        """Add the energy since the last sample: the mean of both powers over the time between."""
        try:
            watts = sum(line.watts() for line in self._lines)
        except (OSError, ValueError):
            return
        now = self._clock()
        if self._last is not None:
            then, former = self._last
            # A supply line that is hardly used may be measured below 0.
            self._joules += max(0.0, (watts + former) / 2) * (now - then)
        self._last = now, watts

    def _go_on(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self.sample()


def meter_of(system: Path = SYSTEM) -> Meter | None:
    """Return what measures the energy of this machine; None where nothing does."""
    return Ina3221.found(system) or Rapl.found(system)


@contextmanager
def measured(meter: Meter | None) -> Iterator[dict[str, float]]:
    """Measure what the block costs; the numbers are in the mapping when it has ended.

    Parameters
    ----------
    meter : Meter or None
        Measures energy, if anything does.
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
    """Return the text of a file, or nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
