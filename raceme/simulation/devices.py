"""Devices: compute and transfer times, and availability.

A profile describes a fleet in TOML. ``[device]`` holds the common values, each ``[[group]]`` those
of a share of the devices (``share = 0.3``) or of named ones (``clients = [0, 3]``)::

    description = "30 % of the devices compute 5 times slower"

    [device]
    seconds-per-round = 1.0

    [[group]]
    share = 0.3
    seconds-per-round = 5.0

A number may also be a range, ``seconds-per-round = [1.0, 5.0]``: each device then draws its own.
Instead of ``bandwidth-up`` a profile may describe a radio uplink, with the four keys of
:class:`~raceme.simulation.devices.Uplink`.
Built-in profiles are the files in the folder ``profiles``; a new one is a new file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from raceme.core.chain import Chain
from raceme.core.errors import UserError, plural, unknown_name
from raceme.core.files import ReadingError, absolute, parse_toml, read_text
from raceme.core.messages import (
    BYTES_UP,
    COMPUTE_SCALE,
    CONFIG,
    KIND,
    TASK_SHARE,
    TRAIN,
    TRAINING,
    category,
    passes,
)
from raceme.core.options import key_of
from raceme.core.registry import DEVICES
from raceme.flower.messages import records_of
from raceme.records.record import RunRecord, read_run

# -----------------------------------------------------------------------------
# The rate of a device's radio uplink under frequency division (FDMA).
#
# Every device has a band of its own. Shannon's rate of a band of B hertz is B log2(1 + SNR) bit/s
# with SNR = p g(d) / σ²: transmit power, path gain over the distance d, noise in the band. The path
# loss is that of 3GPP's urban macro cell, PL(d) = 128.1 + 37.6 log10(d / km) dB.
#
# Source: Zhang et al., "CSAFL: A Clustered Semi-Asynchronous Federated Learning Framework", IJCNN
# 2021, section on latency. The paper neglects the downlink.
# -----------------------------------------------------------------------------


_BITS_PER_BYTE = 8
_MOST_DB = 3000.0
"""A larger ratio overflows a float."""


@dataclass(frozen=True)
class Uplink:
    """A radio link to the base station; all four attributes are required.

    Attributes
    ----------
    uplink_hz : float
        Bandwidth B in hertz.
    transmit_dbm : float
        Transmit power p in dBm (23 dBm are 0.2 W).
    distance_km : float
        Distance d to the base station in kilometres.
    noise_dbm : float
        Noise power σ² in the band, in dBm (-114 dBm is thermal noise in 1 MHz).
    """

    uplink_hz: float
    transmit_dbm: float
    distance_km: float
    noise_dbm: float

    def __post_init__(self) -> None:
        for item in fields(Uplink):
            name, value = item.name.replace("_", "-"), getattr(self, item.name)
            if not math.isfinite(value):
                raise UserError(f"Device: {name} must be a finite number, got {value:g}.")
            if not name.endswith("-dbm") and value <= 0:
                raise UserError(f"Device: {name} must be greater than 0, got {value:g}.")
        if not 0 < self.bytes_per_second < math.inf:
            raise UserError(
                f"Device: uplink-hz {self.uplink_hz:g}, transmit-dbm {self.transmit_dbm:g}, "
                f"distance-km {self.distance_km:g} and noise-dbm {self.noise_dbm:g} give an uplink "
                f"of {self.bytes_per_second:g} bytes per second."
            )

    @property
    def signal_to_noise(self) -> float:
        """The ratio of received power to noise (not in dB)."""
        received = self.transmit_dbm - path_loss(self.distance_km)
        decibels = received - self.noise_dbm
        return math.inf if decibels > _MOST_DB else math.pow(10.0, decibels / 10)

    @property
    def bytes_per_second(self) -> float:
        """Shannon's rate of the link."""
        # log1p: far away the ratio is so small that 1 + SNR would be rounded to 1.
        bits = self.uplink_hz * math.log1p(self.signal_to_noise) / math.log(2)
        return bits / _BITS_PER_BYTE


def path_loss(distance_km: float) -> float:
    """Return the path loss in dB over a distance in kilometres."""
    return 128.1 + 37.6 * math.log10(distance_km)


# -----------------------------------------------------------------------------
# Devices: compute and transfer times, and availability.
# -----------------------------------------------------------------------------


class Workload(NamedTuple):
    """The cost of a task for a device.

    Attributes
    ----------
    epochs : float
        Passes over the device's training examples.
    bytes_down, bytes_up : int
        Bytes that the device receives and sends.
    scale : float
        Factor on the compute time, e.g. the share of a model that is trained.
    examples : int or None
        Number of training examples; None: all of the device's.
    share : float
        Share of an ordinary task's mini-batches: a factor on the fixed time.
    """

    epochs: float = 1.0
    bytes_down: int = 0
    bytes_up: int = 0
    scale: float = 1.0
    examples: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Device:
    """Speed and availability of a device. Times are in seconds of virtual time.

    Attributes
    ----------
    seconds_per_round : float
        Compute time of one training task, whatever its size.
    seconds_per_sample : float
        Compute time per training example and local epoch, added to it.
    exponential_rate : float
        Rate of an additional random part, drawn per task: for D examples (times epochs) it is
        exponential with mean D / `exponential_rate`; 0 means none. With `seconds_per_sample` it is
        the shifted exponential of CSAFL (Zhang et al. 2021), P[T <= t] = 1 - exp(-(μ/D)(t - aD))
        for t >= aD.
    bandwidth_down, bandwidth_up : float
        Bytes per second; 0 means that transfers take no time.
    jitter : float
        Each task's compute time is multiplied by 1 + jitter · u, u uniform in [-1, 1].
    drop : float
        Probability that a task is lost in transit.
    online : tuple[tuple[float, float], ...]
        Periods in which the device is online; empty means always. The last may end at infinity.
    mean_online, mean_offline : float
        Mean lengths of exponentially distributed online and offline periods; 0 means no churn.
    """

    seconds_per_round: float = 1.0
    seconds_per_sample: float = 0.0
    exponential_rate: float = 0.0
    bandwidth_down: float = 0.0
    bandwidth_up: float = 0.0
    jitter: float = 0.0
    drop: float = 0.0
    online: tuple[tuple[float, float], ...] = ()
    mean_online: float = 0.0
    mean_offline: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(Device):
            value = getattr(self, item.name)
            if item.name != "online" and not 0 <= value < math.inf:
                raise UserError(
                    f"Device: {key_of(item.name)} must be a number of at least 0, got {value:g}."
                )
        if self.jitter > 1 or self.drop > 1:
            raise UserError("Device: jitter and drop must be between 0 and 1.")
        starts = [0.0, *(end for _, end in self.online)]
        if not all(
            latest <= start < end for latest, (start, end) in zip(starts, self.online, strict=False)
        ):
            raise UserError(f"Device: online periods must be in order, got {list(self.online)}.")
        if (self.mean_online > 0) != (self.mean_offline > 0):
            raise UserError("Device: mean-online and mean-offline must be given together.")

    def duration(self, load: Workload, rng: np.random.Generator, task: int = 0) -> float:
        """Return the seconds from sending a training task to receiving its reply.

        Parameters
        ----------
        load : Workload
            Bytes, passes and samples of the task.
        rng : numpy.random.Generator
            The device's generator. One number is always drawn, so that jitter does not change later
            draws; a device with a random part draws a second one.
        task : int
            Index of the task among the device's, from 0.
        """
        jitter = 2.0 * rng.random() - 1.0
        drawn = rng.standard_exponential() if self.exponential_rate else 0.0
        return self._seconds(load, drawn, 1.0 + self.jitter * jitter)

    def mean_duration(self, load: Workload) -> float:
        """Return the mean of :meth:`duration`, in seconds."""
        return self._seconds(load, 1.0, 1.0)

    def _seconds(self, load: Workload, drawn: float, jitter: float) -> float:
        """Return the time of a task, given a standard exponential number and a factor."""
        examples = load.examples or 0
        compute = load.share * self.seconds_per_round
        compute += self.seconds_per_sample * examples * load.epochs
        if self.exponential_rate:
            compute += drawn * examples * load.epochs / self.exponential_rate
        down = load.bytes_down / self.bandwidth_down if self.bandwidth_down else 0.0
        up = load.bytes_up / self.bandwidth_up if self.bandwidth_up else 0.0
        return down + compute * (load.scale * jitter) + up

    def failure(self, task: int) -> str | None:
        """Return the reason if the reply to the task of this index is an error, else None."""
        return None

    @property
    def is_per_sample(self) -> bool:
        """Whether the time of a task depends on the number of examples."""
        return self.seconds_per_sample > 0 or self.exponential_rate > 0

    @property
    def comes_and_goes(self) -> bool:
        """Whether the device ever goes offline or comes online."""
        return bool(self.online) or self.mean_online > 0

    def starts_online(self) -> bool:
        """Return whether the device is online at time 0."""
        return not self.online or self.online[0][0] <= 0

    def was_online(self, time: float) -> bool:
        """Return whether a device that is offline at `time` was online before."""
        return self.starts_online() or self.online[0][0] < time

    def comes_after(self, time: float) -> bool:
        """Return whether a device that is offline at `time` will come online later."""
        return self.mean_online > 0 or any(start >= time for start, _ in self.online)

    def switches(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield the times at which the device alternately goes offline and online, in order."""
        if self.online:
            ends = (time for period in self.online for time in period)
            yield from (time for time in ends if 0 < time < math.inf)
        elif self.mean_online:
            time, is_online = 0.0, True
            while True:
                time += rng.exponential(self.mean_online if is_online else self.mean_offline)
                is_online = not is_online
                yield time


def fleet(profile: str, clients: int, seed: int) -> list[Device]:
    """Make the devices of a profile.

    Parameters
    ----------
    profile : str
        Name of a built-in profile, path of a TOML file, or ``module:function``: a function of
        `clients` and `seed` that returns the devices.
    seed : int
        Seed of the choice of stragglers and of draws from ranges.

    Raises
    ------
    UserError
        Unknown name, unreadable file, unknown key, impossible value.
    """
    if profile.endswith(".toml"):
        try:
            text = read_text(absolute(profile))
        except ReadingError as error:
            raise UserError(f"Cannot read the device profile {profile}: {error}.") from None
    else:
        text = DEVICES[profile]
        if not isinstance(text, str):
            return _made(profile, clients, seed)
    try:
        tree = parse_toml(text)
    except ReadingError as error:
        raise UserError(f"Device profile {profile} is not valid TOML: {error}.") from None
    return _Profile(profile, np.random.default_rng([seed, 0xDE71CE])).build(tree, clients)


def _made(profile: str, clients: int, seed: int) -> list[Device]:
    """Return the devices made by a user's function."""
    made: object = DEVICES.make(profile, clients, seed)
    devices = list(made) if isinstance(made, Sequence) else []
    if len(devices) != clients or not all(isinstance(item, Device) for item in devices):
        raise UserError(
            f"Device profile '{profile}' must return a list of {clients} Device, one for each "
            f"client, got {type(made).__name__} of {len(devices)}."
        )
    return devices


class _Profile:
    """Reader of a profile, whose errors contain the profile's name.

    Parameters
    ----------
    name : str
        The profile as typed, for error messages.
    rng : numpy.random.Generator
        Draws which devices a group has, and from ranges.
    """

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self._name, self._rng = name, rng

    def build(self, tree: Mapping[str, Any], clients: int) -> list[Device]:
        """Turn a parsed profile into devices."""
        for name in tree:
            if name not in ("description", "device", "group"):
                raise self._unknown(name, ["device", "group"])
        common = self._section(tree.get("device", {}))
        groups = tree.get("group", [])
        if not isinstance(groups, list) or any(not isinstance(group, dict) for group in groups):
            raise self._wrong("groups are written as [[group]] tables")
        counts = iter(_shared_out(self._shares(groups), clients))
        settings = [dict(common) for _ in range(clients)]
        free = [int(client) for client in self._rng.permutation(clients)]
        for group in groups:
            if "share" in group:
                count = next(counts)
                chosen, free = free[:count], free[count:]
            else:
                # A profile may list more clients than the run has.
                chosen = [c for c in self._clients(group["clients"]) if c < clients]
            special = self._section(
                {key: value for key, value in group.items() if key not in ("share", "clients")}
            )
            # Errors are reported even for a group without a client in this run.
            _Profile(self._name, np.random.default_rng(0))._device({**common, **special})
            for client in chosen:
                settings[client].update(special)
        return [self._device(values) for values in settings]

    def _wrong(self, what: str) -> UserError:
        return UserError(f"Device profile {self._name}: {what}.")

    def _unknown(self, key: str, known: Iterable[str]) -> UserError:
        return unknown_name(f"key in device profile {self._name}:", key, known)

    def _shares(self, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the groups' shares, whose sum is at most 1."""
        if any(("share" in group) == ("clients" in group) for group in groups):
            raise self._wrong("a [[group]] takes either share or clients")
        shares = [self._number("share", group["share"]) for group in groups if "share" in group]
        for share in shares:
            if not 0 <= share <= 1:
                raise self._wrong(f"share must be between 0 and 1, got {share:g}")
        # The tolerance is for sums such as 0.1 + 0.2 + 0.7.
        if sum(shares) > 1 + 1e-9:
            raise self._wrong(
                f"the shares of the groups must sum to at most 1, got {sum(shares):g}"
            )
        return shares

    def _clients(self, value: Any) -> list[int]:
        if not isinstance(value, list) or any(type(c) is not int or c < 0 for c in value):
            raise self._wrong(f"clients takes a list of client numbers from 0, got {value!r}")
        return value

    def _section(self, section: Any) -> dict[str, Any]:
        """Return a table of a profile by attribute name."""
        if not isinstance(section, Mapping):
            raise self._wrong(f"device must be a table, got {section!r}")
        known = {key_of(item.name): item.name for item in (*fields(Device), *fields(Uplink))}
        for name in section:
            if name not in known:
                raise self._unknown(name, known)
        return {known[name]: value for name, value in section.items()}

    def _device(self, values: Mapping[str, Any]) -> Device:
        """Make one device; radio keys are converted to bandwidth."""
        drawn = {name: self._drawn(name, value) for name, value in values.items()}
        names = [item.name for item in fields(Uplink)]
        given = {name: drawn.pop(name) for name in names if name in drawn}
        if not given:
            return Device(**drawn)
        if len(given) < len(names) or "bandwidth_up" in drawn:
            shown = ", ".join(map(key_of, names))
            raise self._wrong(f"a device takes either bandwidth-up or all of {shown}")
        return Device(**drawn, bandwidth_up=Uplink(**given).bytes_per_second)

    def _drawn(self, name: str, value: Any) -> Any:
        """Return a key's value, drawn if it is a range."""
        if name == "online":
            return self._periods(value)
        if not isinstance(value, list):
            return self._number(name, value)
        if len(value) != 2:
            raise self._wrong(f"{key_of(name)} takes [low, high]")
        low, high = (self._number(name, bound) for bound in value)
        if not low <= high < math.inf:
            raise self._wrong(f"{key_of(name)} takes [low, high], got {value}")
        return float(self._rng.uniform(low, high))

    def _periods(self, value: Any) -> tuple[tuple[float, ...], ...]:
        if not isinstance(value, list) or any(
            not isinstance(period, list) or len(period) != 2 for period in value
        ):
            raise self._wrong("online takes [[from, to], …] in seconds")
        return tuple(tuple(self._number("online", end) for end in period) for period in value)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(f"{key_of(name)} must be a number, got {value!r}")
        return float(value)


def _shared_out(shares: Sequence[float], clients: int) -> list[int]:
    """Return the number of clients of each share, by largest remainder.

    Each share gets the integer part of its quota; the remaining clients go to the largest
    fractions, earlier shares first at a tie. The unassigned rest counts as the last share. No count
    is off by a whole client, and shares that sum to 1 cover all clients.
    """
    # Rounded, so that 0.3 · 10 is 3 and ties do not depend on binary fractions.
    quotas = [round(share * clients, 6) for share in shares]
    quotas.append(max(0.0, round(clients - sum(quotas), 6)))
    counts = [math.floor(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda i: round(counts[i] - quotas[i], 6))
    for index in by_fraction[: clients - sum(counts)]:
        counts[index] += 1
    return counts[:-1]


# -----------------------------------------------------------------------------
# One simulated device over time: task durations, losses and churn.
# -----------------------------------------------------------------------------


DROPPED = "the task was lost on the way"
TOO_SLOW = "the task took longer than its time to live"
LOST_BEFORE = "the reply was unusable in the recorded run too"
AWAY_BEFORE = "the client was away in the recorded run too"
WENT_OFFLINE, IS_OFFLINE = "the device went offline", "the device is offline"
AWAY = frozenset({AWAY_BEFORE, WENT_OFFLINE, IS_OFFLINE})
"""Losses caused by an absent device, which do not count as failures."""


class TaskOutcome(NamedTuple):
    """The end of a task.

    Attributes
    ----------
    due : float
        Arrival of its reply, in seconds of virtual time.
    lost : str or None
        Reason of an error reply, else None.
    """

    due: float
    lost: str | None


_TASKS, _ABSENCES = 0, 1
"""Purposes of a device's random numbers, one stream each."""
_DRAWS = np.random.Generator(np.random.PCG64(0))
"""One generator shared by all devices, whose states take a tenth of the memory."""


@dataclass(eq=False, slots=True)
class DeviceModel:
    """A device with its random numbers and current work, one task at a time.

    Attributes
    ----------
    device : Device
        Speed, bandwidth and availability of the device.
    examples : int
        Number of training examples that it has.
    entropy : tuple[int, ...]
        Seed of jitter, lost tasks and random absences.
    busy_until : float
        End of its last task; the device is free after it.
    """

    device: Device
    examples: int
    entropy: tuple[int, ...]
    busy_until: float = 0.0
    # State of its generator after the first draw.
    _state: Mapping[str, Any] | None = None
    _tasks: int = 0
    _switches: Iterator[float] | None = None
    _switched: int = 0

    @property
    def is_new(self) -> bool:
        """Whether it is unused."""
        return not self._tasks and not self._switched

    def _seed(self, purpose: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.entropy, spawn_key=(purpose,))

    def _generator_state(self) -> Mapping[str, Any]:
        """Return the state of this device's generator as numpy writes it."""
        return self._state or np.random.PCG64(self._seed(_TASKS)).state

    def begin(self, load: Workload, now: float, expires: float) -> TaskOutcome:
        """Queue a task behind the device's current ones, and return how it ends.

        Parameters
        ----------
        load : Workload
            Bytes, passes and samples of the task.
        now : float
            Time of sending, in seconds of virtual time.
        expires : float
            End of its time to live, when a lost task is answered.
        """
        number, rng = self._tasks, _DRAWS
        rng.bit_generator.state = self._generator_state()
        self._tasks += 1
        if load.examples is None:
            load = load._replace(examples=self.examples)
        duration = self.device.duration(load, rng, number)
        # Always drawn, so that a setting does not change other draws.
        dropped = rng.random() < self.device.drop
        self._state = rng.bit_generator.state
        due = self.busy_until = max(now, self.busy_until) + duration
        if dropped:
            return TaskOutcome(expires, DROPPED)
        if due > expires:
            return TaskOutcome(expires, TOO_SLOW)
        return TaskOutcome(due, self.device.failure(number))

    def mean_duration(self, load: Workload) -> float:
        """Return the mean time of a task in seconds; examples None: all of the device's."""
        examples = self.examples if load.examples is None else load.examples
        return self.device.mean_duration(load._replace(examples=examples))

    def stop(self) -> None:
        """Drop all work: the device has gone offline."""
        self.busy_until = 0.0

    def next_switch(self) -> float | None:
        """Return the time at which the device next goes offline or online; None if never."""
        self._switched += 1
        if self._switches is None:
            self._switches = self.device.switches(np.random.default_rng(self._seed(_ABSENCES)))
        return next(self._switches, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that has changed since the start, as a tree of plain values."""
        return {
            "busy-until": self.busy_until,
            "rng": self._generator_state(),
            "tasks": self._tasks,
            "switched": self._switched,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a new model of the same device and seed."""
        self.busy_until, self._tasks = tree["busy-until"], tree["tasks"]
        self._state = tree["rng"]
        while self._switched < tree["switched"]:
            self.next_switch()


# -----------------------------------------------------------------------------
# The cost of messages for their devices.
# -----------------------------------------------------------------------------


CostFunction = Callable[[Message, Context, int], Workload | None]
"""Maps a message, its client's context and number of training examples to the message's cost; None
means no time."""
_NO_FEATURES = Chain()


def training_cost(
    message: Message, context: Context, examples: int, features: Chain = _NO_FEATURES
) -> Workload | None:
    """Return the cost of a training message; queries and evaluation cost nothing.

    All arrays are sent down. Training returns one model, of the size of the first one sent unless
    features change it; answers to other work take no time unless their size is stated.
    """
    if category(message) != MessageType.TRAIN:
        return None
    config = message.content.get(CONFIG)
    if not isinstance(config, ConfigRecord):
        config = ConfigRecord()
    settings: Mapping[str, Any] = dict(config.items())
    trains = settings.get(KIND, TRAIN) in TRAINING
    scale = float(settings.get(COMPUTE_SCALE, 1.0))
    arrays = records_of(message.content, ArrayRecord)
    sizes = [record.count_bytes() for record in arrays.values()]
    upload = sizes[0] * features.upload_size if sizes and trains else settings.get(BYTES_UP, 0)
    share = float(settings.get(TASK_SHARE, 1.0))
    if trains:
        scale += features.cost(config, context, examples)
    return Workload(
        epochs=passes(settings, examples),
        bytes_down=sum(sizes),
        bytes_up=int(upload),
        scale=scale,
        share=share,
    )


def bytes_of(content: RecordDict) -> int:
    """Return the size of all records of a message."""
    return sum(
        _config_bytes(record) if isinstance(record, ConfigRecord) else record.count_bytes()
        for record in content.values()
    )


def _config_bytes(record: ConfigRecord) -> int:
    """Return `ConfigRecord.count_bytes`, which itself raises on empty texts and lists."""
    size = sum(map(len, record))
    for value in record.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str | bytes):
                size += len(part)
            else:
                size += 1 if isinstance(part, bool) else 8
    return size


# -----------------------------------------------------------------------------
# Traces: replay of a recorded run's devices on virtual time.
#
# Each client takes the recorded time for each of its tasks in order, from sending to reply, and is
# online at the recorded times. Messages and method may differ, so that another method can be tried
# on a recorded fleet.
# -----------------------------------------------------------------------------


PREFIX = "trace:"
"""Prefix of a device profile that names the folder of a run."""


_LEFT = "went offline"
"""A server's reason for work whose device left."""
_SERVER_SECONDS = 1.0
"""A longer time between a reply and the next task is idle time, not the server's work."""
_MOMENT = 1e-3


class ReplayedTask(NamedTuple):
    """A recorded task.

    Attributes
    ----------
    seconds : float
        Time from sending to reply.
    failure : str or None
        Reason of an unusable reply.
    """

    seconds: float
    failure: str | None = None


@dataclass(frozen=True)
class TracedDevice(Device):
    """A device that replays recorded task times.

    Attributes
    ----------
    tasks : tuple[ReplayedTask, ...]
        Its tasks in order, repeated after the last.
    """

    tasks: tuple[ReplayedTask, ...] = ()

    def duration(self, load: Workload, rng: np.random.Generator, task: int = 0) -> float:
        """Return the recorded time of a task; its size is ignored."""
        return self.tasks[task % len(self.tasks)].seconds

    def mean_duration(self, load: Workload) -> float:
        """Return the mean of the recorded times."""
        return fmean(task.seconds for task in self.tasks)

    def failure(self, task: int) -> str | None:
        """Return the reason if the recorded task was lost."""
        return self.tasks[task % len(self.tasks)].failure


def traced_fleet(
    folder: str, clients: int, names: Sequence[str] = ()
) -> tuple[list[Device], Sequence[str]]:
    """Return the devices of a recorded run, and their ids.

    Parameters
    ----------
    folder : str
        Folder of the recorded run, with its ``run.sqlite``.
    clients : int
        Number of devices, which must equal the recording's.
    names : Sequence[str]
        Names of the clients, by default ``client-`` and their numbers.

    Returns
    -------
    tuple[list[Device], Sequence[str]]
        Devices and their ids, those of `names` if the recording has them, else the recorded ones
        in alphabetical order.

    Raises
    ------
    UserError
        There is no such run, it has no updates, or its number of clients differs.
    """
    if not folder:
        raise UserError("--devices trace: needs the folder of a run, as in trace:runs/mine.")
    record = read_run(Path(folder).expanduser())
    names = _recorded_clients(folder, record, names or numbered(clients))
    rounds = _in_rounds(record)
    tasks = {name: _recorded_tasks(record, name, rounds) for name in names}
    periods = {client.client: client.online for client in record.clients}
    devices: list[Device] = [
        TracedDevice(online=_online(periods.get(name, ())), tasks=tasks[name]) for name in names
    ]
    return devices, names


def numbered(clients: int) -> list[str]:
    """Return the default names of clients."""
    return [f"client-{number}" for number in range(clients)]


def _recorded_clients(folder: str, record: RunRecord, own: Sequence[str]) -> Sequence[str]:
    """Return the recorded clients in the order of the simulated ones."""
    recorded = {str(name) for name in record.updates.client}
    if not recorded:
        raise UserError(f"The run in {folder} has no updates: there are no times to replay.")
    names = own if recorded <= set(own) else sorted(recorded)
    if set(names) != recorded or len(names) != len(own):
        shown = ", ".join(sorted(recorded)[:5]) + (", …" if len(recorded) > 5 else "")
        raise UserError(
            f"The run in {folder} has updates of {plural(len(recorded), 'client')} ({shown}), "
            f"this one has {plural(len(own), 'client')}: use --clients {len(recorded)}."
        )
    return names


def _in_rounds(record: RunRecord) -> bool:
    """Return whether clients waited for each other.

    Without rounds, some client gets work after a reply while an older task is open. Staleness is no
    criterion: clients with clusters of their own have none.
    """
    sent, came = record.updates.dispatched_at, record.updates.time
    replies, sends = np.sort(came), np.append(np.sort(sent), math.inf)
    # For each task: the first reply after it was sent, and the first task sent after that.
    reply = replies[np.minimum(np.searchsorted(replies, sent, "right"), len(replies) - 1)]
    return not bool((sends[np.searchsorted(sends, reply)] < came).any())


def _recorded_tasks(record: RunRecord, name: str, in_rounds: bool) -> tuple[ReplayedTask, ...]:
    """Return a client's tasks in the order of sending."""
    updates, rejections = record.updates, record.rejections
    failures = [
        AWAY_BEFORE if any(away in reason for away in (*AWAY, _LEFT)) else LOST_BEFORE
        for reason in rejections.reason
    ]
    tasks = sorted(
        (float(sent), float(returned), failure)
        for rows, reasons in ((updates, [""] * len(updates.time)), (rejections, failures))
        for sent, returned, client, failure in zip(
            rows.dispatched_at, rows.time, rows.client, reasons, strict=True
        )
        if client == name
    )
    joined = {client.client: client.joined_at for client in record.clients}
    replayed, before = [], joined.get(name, -math.inf)
    for sent, returned, failure in tasks:
        # The server's time until the next task is part of the recorded rhythm. In rounds, a client
        # also waits for others, which is not its own time.
        gap = 0.0 if in_rounds else sent - before
        seconds = returned - sent + (gap if 0 < gap < _SERVER_SECONDS else 0.0)
        replayed.append(ReplayedTask(seconds, failure or None))
        # After an unusable reply the method pauses the client, which a replay does by itself.
        before = -math.inf if failure else returned
    # The task open at the end of the run took longer than the recording: a replay must not finish
    # it earlier.
    open_for = record.end - max(returned for _, returned, _ in tasks)
    if replayed[0].seconds <= open_for:
        replayed.append(ReplayedTask(open_for + _MOMENT))
    return tuple(replayed)


def _online(periods: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, float], ...]:
    """Return a client's online periods; empty if it was always online."""
    spans: list[tuple[float, float]] = []
    for start, stop in periods:
        end = math.inf if stop is None else stop
        if end > start:
            # Merge adjacent periods.
            if spans and start <= spans[-1][1]:
                start = spans.pop()[0]
            spans.append((start, end))
    return () if spans == [(0.0, math.inf)] else tuple(spans)
