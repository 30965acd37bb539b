"""Devices: how long work and transfers take, and when a device is online.

A profile describes a fleet in TOML. ``[device]`` holds what is common to all, each ``[[group]]``
what is special to a share of them (``share = 0.3``) or to named ones (``clients = [0, 3]``)::

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
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from raceme.core.errors import UserError, unknown_name
from raceme.core.files import ReadingError, absolute, parse_toml, read_text
from raceme.core.messages import (
    COMPUTE_SCALE,
    CONFIG,
    KIND,
    OWN_MODEL,
    TASK_SHARE,
    TRAIN,
    TRAINING,
    passes,
)
from raceme.core.registry import DEVICES
from raceme.records.record import RunRecord, read_run

# -----------------------------------------------------------------------------
# The radio uplink of a device under frequency division (FDMA): how fast it sends.
#
# Every device has a band of its own. Shannon's rate of a band of B hertz is B log2(1 + SNR) bit/s
# with SNR = p g(d) / σ²: transmit power, path gain over the distance d, noise in the band. The path
# loss is that of 3GPP's urban macro cell, PL(d) = 128.1 + 37.6 log10(d / km) dB.
#
# Source: Zhang et al., "CSAFL: A Clustered Semi-Asynchronous Federated Learning Framework", IJCNN
# 2021, section on latency. The downlink is ignored there, as the base station has power enough.
# -----------------------------------------------------------------------------


_BITS_PER_BYTE = 8
_MOST_DB = 3000.0
"""A ratio beyond it is no floating-point number any more."""


@dataclass(frozen=True)
class Uplink:
    """A radio link to the base station. All four are to be given.

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
# Devices: how long work and transfers take, and when a device is online.
# -----------------------------------------------------------------------------


class Workload(NamedTuple):
    """What a task costs a device.

    Attributes
    ----------
    epochs : float
        Passes over the device's training examples.
    bytes_down, bytes_up : int
        Bytes that the device receives and sends.
    scale : float
        Factor on the compute time, e.g. the share of a model that is trained.
    examples : int or None
        Number of the training examples; None stands for as many as the device has.
    share : float
        Mini-batches, of those of an ordinary task: a factor on what any task takes.
    """

    epochs: float = 1.0
    bytes_down: int = 0
    bytes_up: int = 0
    scale: float = 1.0
    examples: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Device:
    """What the simulator knows of one device. Times are in seconds of virtual time.

    Attributes
    ----------
    seconds_per_round : float
        Compute time of one training task, whatever its size.
    seconds_per_sample : float
        Compute time per training example and local epoch, added to it.
    exponential_rate : float
        Training examples per second of a random part, added too, which every task draws anew: of
        D examples (times epochs) it is exponential with mean D / `exponential_rate`; 0 means none.
        With `seconds_per_sample` it is the shifted exponential of CSAFL (Zhang et al. 2021),
        P[T <= t] = 1 - exp(-(μ/D)(t - aD)) for t >= aD.
    bandwidth_down, bandwidth_up : float
        Bytes per second; 0 means that transfers take no time.
    jitter : float
        Each task's compute time is multiplied by 1 + jitter · u, u uniform in [-1, 1].
    drop : float
        Probability that a task is lost on the way.
    online : tuple[tuple[float, float], ...]
        Periods in which the device is online; empty means always. The last may end at infinity.
    mean_online, mean_offline : float
        Mean lengths of exponential periods for devices that come and go at random; 0 means never.
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
                    f"Device: {_kebab(item.name)} must be a number from 0 on, got {value:g}."
                )
        if self.jitter > 1 or self.drop > 1:
            raise UserError("Device: jitter and drop must be between 0 and 1.")
        starts = [0.0, *(end for _, end in self.online)]
        if not all(
            latest <= start < end for latest, (start, end) in zip(starts, self.online, strict=False)
        ):
            raise UserError(f"Device: online periods must be in order, got {list(self.online)}.")
        if (self.mean_online > 0) != (self.mean_offline > 0):
            raise UserError("Device: mean-online and mean-offline go together.")

    def duration(self, load: Workload, rng: np.random.Generator, task: int = 0) -> float:
        """Return the seconds from sending a training task to having its reply.

        Parameters
        ----------
        load : Workload
            Bytes, passes and samples of the task.
        rng : numpy.random.Generator
            The device's own; one number is drawn, so that jitter does not change later draws, and
            a second one by a device with a random part.
        task : int
            Number of the task among those that the device was given, from 0.
        """
        jitter = rng.uniform(-1.0, 1.0)
        drawn = rng.standard_exponential() if self.exponential_rate else 0.0
        return self._seconds(load, drawn, 1.0 + self.jitter * jitter)

    def mean_duration(self, load: Workload) -> float:
        """Return the mean of :meth:`duration`, in seconds."""
        return self._seconds(load, 1.0, 1.0)

    def communication(self, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds of a task that go into its transfers."""
        return self._seconds(Workload(0.0, bytes_down, bytes_up, scale=0.0), 0.0, 0.0)

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
        """Return why the reply to a task of this number is an error; None if it is none."""
        return None

    @property
    def is_per_sample(self) -> bool:
        """Whether the time of a task depends on the number of examples."""
        return self.seconds_per_sample > 0 or self.exponential_rate > 0

    @property
    def comes_and_goes(self) -> bool:
        """Whether the device may ever go offline, or come online."""
        return bool(self.online) or self.mean_online > 0

    def starts_online(self) -> bool:
        """Return whether the device is online at time 0."""
        return not self.online or self.online[0][0] <= 0

    def was_online(self, time: float) -> bool:
        """Return whether the device has been online before some time at which it is offline."""
        return self.starts_online() or self.online[0][0] < time

    def comes_after(self, time: float) -> bool:
        """Return whether the device will come online if it is offline at some time."""
        return self.mean_online > 0 or any(start >= time for start, _ in self.online)

    def switches(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield the times at which the device goes offline and online in turn, in order."""
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
        Decides which devices are the slow ones, and draws from ranges.

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
    """Return the devices that a user's function makes."""
    made: object = DEVICES.make(profile, clients, seed)
    devices = list(made) if isinstance(made, Sequence) else []
    if len(devices) != clients or not all(isinstance(item, Device) for item in devices):
        raise UserError(
            f"Device profile '{profile}' must return a list of {clients} Device, one for each "
            f"client, got {type(made).__name__} of {len(devices)}."
        )
    return devices


class _Profile:
    """A profile as it is read: its mistakes are told with its name.

    Parameters
    ----------
    name : str
        The profile as the user typed it, for error messages.
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
                # A profile may name more clients than a run has.
                chosen = [c for c in self._clients(group["clients"]) if c < clients]
            special = self._section(
                {key: value for key, value in group.items() if key not in ("share", "clients")}
            )
            # A mistake is reported even where the group is too small to have a client in this run.
            _Profile(self._name, np.random.default_rng(0))._device({**common, **special})
            for client in chosen:
                settings[client].update(special)
        return [self._device(values) for values in settings]

    def _wrong(self, what: str) -> UserError:
        return UserError(f"Device profile {self._name}: {what}.")

    def _unknown(self, key: str, known: Iterable[str]) -> UserError:
        return unknown_name(f"key in device profile {self._name}:", key, known)

    def _shares(self, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the shares of the groups that have one, which are at most 1 together."""
        if any(("share" in group) == ("clients" in group) for group in groups):
            raise self._wrong("a [[group]] takes either share or clients")
        shares = [self._number("share", group["share"]) for group in groups if "share" in group]
        for share in shares:
            if not 0 <= share <= 1:
                raise self._wrong(f"share must be between 0 and 1, got {share:g}")
        # The tolerance is for sums such as 0.1 + 0.2 + 0.7.
        if sum(shares) > 1 + 1e-9:
            raise self._wrong(
                f"the shares of the groups must not exceed 1 together, got {sum(shares):g}"
            )
        return shares

    def _clients(self, value: Any) -> list[int]:
        if not isinstance(value, list) or any(type(c) is not int or c < 0 for c in value):
            raise self._wrong(f"clients takes a list of numbers from 0 on, got {value!r}")
        return value

    def _section(self, section: Any) -> dict[str, Any]:
        """Return a table of a profile under the names of attributes."""
        if not isinstance(section, Mapping):
            raise self._wrong(f"device must be a table, got {section!r}")
        known = {_kebab(item.name): item.name for item in (*fields(Device), *fields(Uplink))}
        for name in section:
            if name not in known:
                raise self._unknown(name, known)
        return {known[name]: value for name, value in section.items()}

    def _device(self, values: Mapping[str, Any]) -> Device:
        """Make one device; what describes a radio uplink becomes its bandwidth."""
        drawn = {name: self._drawn(name, value) for name, value in values.items()}
        names = [item.name for item in fields(Uplink)]
        given = {name: drawn.pop(name) for name in names if name in drawn}
        if not given:
            return Device(**drawn)
        if len(given) < len(names) or "bandwidth_up" in drawn:
            shown = ", ".join(map(_kebab, names))
            raise self._wrong(f"a device takes either bandwidth-up or all of {shown}")
        return Device(**drawn, bandwidth_up=Uplink(**given).bytes_per_second)

    def _drawn(self, name: str, value: Any) -> Any:
        """Return the value of a key: of a range a number drawn from it."""
        if name == "online":
            return self._periods(value)
        if not isinstance(value, list):
            return self._number(name, value)
        if len(value) != 2:
            raise self._wrong(f"{_kebab(name)} takes [low, high]")
        low, high = (self._number(name, bound) for bound in value)
        if not low <= high < math.inf:
            raise self._wrong(f"{_kebab(name)} takes [low, high], got {value}")
        return float(self._rng.uniform(low, high))

    def _periods(self, value: Any) -> tuple[tuple[float, ...], ...]:
        if not isinstance(value, list) or any(
            not isinstance(period, list) or len(period) != 2 for period in value
        ):
            raise self._wrong("online takes [[from, to], …] in seconds")
        return tuple(tuple(self._number("online", end) for end in period) for period in value)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(f"{_kebab(name)} must be a number, got {value!r}")
        return float(value)


def _shared_out(shares: Sequence[float], clients: int) -> list[int]:
    """Return how many clients each share is, by largest remainder.

    Each share gets the whole part of what it is due; the clients that are left go one each to the
    largest fractions, at a tie to the earlier share. What the shares leave of 1 takes part as the
    last one. So no count is off by a whole client, and shares that add up to 1 leave no client out.
    """
    # Rounded, so that 0.3 · 10 is 3, and ties are ties whatever the binary fractions are.
    quotas = [round(share * clients, 6) for share in shares]
    quotas.append(max(0.0, round(clients - sum(quotas), 6)))
    counts = [math.floor(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda i: round(counts[i] - quotas[i], 6))
    for index in by_fraction[: clients - sum(counts)]:
        counts[index] += 1
    return counts[:-1]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


# -----------------------------------------------------------------------------
# One simulated device over time: when its tasks end, which are lost, when it comes and goes.
# -----------------------------------------------------------------------------


DROPPED = "the task was lost on the way"
TOO_SLOW = "the task took longer than its time to live"
LOST_BEFORE = "the reply was unusable in the recorded run too"
AWAY_BEFORE = "the client was away in the recorded run too"
WENT_OFFLINE, IS_OFFLINE = "the device went offline", "the device is offline"
AWAY = frozenset({AWAY_BEFORE, WENT_OFFLINE, IS_OFFLINE})
"""What is lost because its device is not there, which is no failure of the device's."""


class Outcome(NamedTuple):
    """How a task ends.

    Attributes
    ----------
    due : float
        When its reply comes, in seconds of virtual time.
    lost : str or None
        Why the reply is an error; None if it is not.
    """

    due: float
    lost: str | None


_TASKS, _ABSENCES = 0, 1
"""What a device draws random numbers for, each from a stream of its own."""
_DRAWS = np.random.Generator(np.random.PCG64(0))
"""Lent to one device after the other: a generator of its own takes ten times the memory of a
state."""


@dataclass(eq=False, slots=True)
class DeviceModel:
    """A device with its random numbers and what it is busy with. It works on one task at a time.

    Attributes
    ----------
    device : Device
        Speed, bandwidth and availability of the device.
    examples : int
        Number of training examples that it has.
    entropy : tuple[int, ...]
        Decides jitter, lost tasks and random absences.
    busy_until : float
        When the last of its tasks ends; it is free if that is over.
    """

    device: Device
    examples: int
    entropy: tuple[int, ...]
    busy_until: float = 0.0
    # Of its generator, once it has drawn.
    _state: Mapping[str, Any] | None = None
    _tasks: int = 0
    _switches: Iterator[float] | None = None
    _switched: int = 0

    @property
    def is_new(self) -> bool:
        """Whether it is as it was made."""
        return not self._tasks and not self._switched

    def _seed(self, purpose: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.entropy, spawn_key=(purpose,))

    def _generator_state(self) -> Mapping[str, Any]:
        """Return the state of this device's generator as numpy writes it."""
        return self._state or np.random.PCG64(self._seed(_TASKS)).state

    def begin(self, load: Workload, now: float, expires: float) -> Outcome:
        """Take on a task, after those that the device is busy with, and return how it ends.

        Parameters
        ----------
        load : Workload
            Bytes, passes and samples of the task.
        now : float
            Virtual time at which the task is sent, in seconds.
        expires : float
            When its time to live ends: a lost task is answered by then.
        """
        number, rng = self._tasks, _DRAWS
        rng.bit_generator.state = self._generator_state()
        self._tasks += 1
        if load.examples is None:
            load = load._replace(examples=self.examples)
        duration = self.device.duration(load, rng, number)
        # Drawn whether it can happen or not, so that one setting does not change other draws.
        dropped = rng.uniform() < self.device.drop
        self._state = rng.bit_generator.state
        due = self.busy_until = max(now, self.busy_until) + duration
        if dropped:
            return Outcome(expires, DROPPED)
        if due > expires:
            return Outcome(expires, TOO_SLOW)
        return Outcome(due, self.device.failure(number))

    def mean_duration(self, load: Workload) -> float:
        """Return the mean time of a task in seconds; None for its examples: all of the device."""
        examples = self.examples if load.examples is None else load.examples
        return self.device.mean_duration(load._replace(examples=examples))

    def stop(self) -> None:
        """Drop all work: the device has gone offline."""
        self.busy_until = 0.0

    def next_switch(self) -> float | None:
        """Return when the device next goes offline, or comes back; None if it never does."""
        self._switched += 1
        if self._switches is None:
            self._switches = self.device.switches(np.random.default_rng(self._seed(_ABSENCES)))
        return next(self._switches, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed since the beginning, as a tree of plain values."""
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
# What messages cost the devices that they are sent to.
# -----------------------------------------------------------------------------


Cost = Callable[[Message, Context, int], Workload | None]
"""Says what a message costs: of the message, its client's context, and the client's number of
training examples. None stands for no time at all."""


def category(message: Message) -> str:
    """Return a message's type without the name of the action: train, evaluate or query."""
    return message.metadata.message_type.partition(".")[0]


def training_cost(message: Message, context: Context, examples: int) -> Workload | None:
    """Return what a training message costs; queries and evaluation cost nothing.

    All arrays go down. What comes back of training is one model, as large as the first one that
    went; the numbers that answer other work are small, and take no time. To train a model of the
    client's own too takes as much again.
    """
    if category(message) != MessageType.TRAIN:
        return None
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    trains = config.get(KIND, TRAIN) in TRAINING
    scale = float(config.get(COMPUTE_SCALE, 1.0))  # type: ignore[arg-type]
    sizes = [record.count_bytes() for record in message.content.array_records.values()]
    return Workload(
        epochs=passes(config, examples),
        bytes_down=sum(sizes),
        bytes_up=sizes[0] if sizes and trains else 0,
        scale=scale + 1.0 if trains and config.get(OWN_MODEL) else scale,
        share=float(config.get(TASK_SHARE, 1.0)),  # type: ignore[arg-type]
    )


def bytes_of(content: RecordDict) -> int:
    """Return the size of all records of a message."""
    return sum(
        _config_bytes(record) if isinstance(record, ConfigRecord) else record.count_bytes()
        for record in content.values()
    )


def _config_bytes(record: ConfigRecord) -> int:
    """Return what `ConfigRecord.count_bytes` does, which raises on empty texts and lists."""
    size = sum(map(len, record))
    for value in record.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str | bytes):
                size += len(part)
            else:
                size += 1 if isinstance(part, bool) else 8
    return size


def copy_of(content: RecordDict) -> RecordDict:
    """Copy records, not the arrays in them, as sending does: messages may share their content.

    Without it what a client writes into its message would show in the others', and what the
    server writes later would show in work that is not done yet.
    """
    return RecordDict({name: record.copy() for name, record in content.items()})


# -----------------------------------------------------------------------------
# Traces: what an earlier run has recorded of its devices, played again on virtual time.
#
# Each client takes for its tasks as long as it took then, one after the other, from sending to
# reply, and is online when it was online then. What is sent and what is learned from it may be
# something else entirely: so another method can be tried on the fleet that one has.
# -----------------------------------------------------------------------------


PREFIX = "trace:"
"""Begins the name of a device profile that is the folder of a run."""


_LEFT = "went offline"
"""What a server says of work whose device has left."""
_SERVER_SECONDS = 1.0
"""A longer time between a reply and the next task is not the server's work."""
_MOMENT = 1e-3


class Leg(NamedTuple):
    """How one task went.

    Attributes
    ----------
    seconds : float
        From sending it to having its reply.
    failure : str or None
        Why the reply was unusable.
    """

    seconds: float
    failure: str | None = None


@dataclass(frozen=True)
class TracedDevice(Device):
    """A device that takes for its tasks as long as one did before.

    Attributes
    ----------
    legs : tuple[Leg, ...]
        Its tasks in order; after the last one it begins again.
    """

    legs: tuple[Leg, ...] = ()

    def duration(self, load: Workload, rng: np.random.Generator, task: int = 0) -> float:
        """Return the recorded time of a task, whatever its size."""
        return self.legs[task % len(self.legs)].seconds

    def mean_duration(self, load: Workload) -> float:
        """Return the mean of the recorded times."""
        return fmean(leg.seconds for leg in self.legs)

    def failure(self, task: int) -> str | None:
        """Return why the recorded task was lost, if it was."""
        return self.legs[task % len(self.legs)].failure


def traced_fleet(folder: str, clients: int) -> tuple[list[Device], list[str]]:
    """Return the devices of a recorded run, and their ids.

    Parameters
    ----------
    folder : str
        Folder of the recorded run, with its ``run.sqlite``.
    clients : int
        Number of devices, which must be that of the recording.

    Returns
    -------
    tuple[list[Device], list[str]]
        Devices and their recorded ids. ``client-3`` is the fourth; ids of another form follow the
        order of the text.

    Raises
    ------
    UserError
        There is no such run, it has no updates, or its clients are not as many.
    """
    if not folder:
        raise UserError("--devices trace: needs the folder of a run, as in trace:runs/mine.")
    record = read_run(Path(folder).expanduser())
    names = _recorded_clients(folder, record, clients)
    rounds = _in_rounds(record)
    legs = {name: _legs(record, name, rounds) for name in names}
    periods = {client.client: client.online for client in record.clients}
    devices: list[Device] = [
        TracedDevice(online=_online(periods.get(name, ())), legs=legs[name]) for name in names
    ]
    return devices, names


def _recorded_clients(folder: str, record: RunRecord, clients: int) -> list[str]:
    """Return the recorded clients in the order of the simulated ones."""
    recorded = {str(name) for name in record.updates.client}
    if not recorded:
        raise UserError(f"The run in {folder} has no updates: there are no times to replay.")
    numbered = [f"client-{index}" for index in range(clients)]
    names = numbered if recorded <= set(numbered) else sorted(recorded)
    if set(names) != recorded or len(names) != clients:
        shown = ", ".join(sorted(recorded)[:5]) + (", …" if len(recorded) > 5 else "")
        raise UserError(
            f"The run in {folder} has updates of {len(recorded)} clients ({shown}), this one has "
            f"{clients} clients: use --clients {len(recorded)}."
        )
    return names


def _in_rounds(record: RunRecord) -> bool:
    """Return whether clients waited for each other.

    Without rounds a client is given work, after a reply of its own or another's, while an older
    task is open. Staleness does not tell: clients with a cluster each have none.
    """
    sent, came = record.updates.dispatched_at, record.updates.time
    replies, sends = np.sort(came), np.append(np.sort(sent), math.inf)
    # For each task: the first reply after it was sent, and the first task sent after that.
    reply = replies[np.minimum(np.searchsorted(replies, sent, "right"), len(replies) - 1)]
    return not bool((sends[np.searchsorted(sends, reply)] < came).any())


def _legs(record: RunRecord, name: str, in_rounds: bool) -> tuple[Leg, ...]:
    """Return a client's tasks in the order in which it was given them."""
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
    legs, before = [], joined.get(name, -math.inf)
    for sent, returned, failure in tasks:
        # What the server took to hand out the next task belongs to the recorded rhythm. In rounds
        # a client waits for the others, which is not its own time.
        gap = 0.0 if in_rounds else sent - before
        seconds = returned - sent + (gap if 0 < gap < _SERVER_SECONDS else 0.0)
        legs.append(Leg(seconds, failure or None))
        # After an unusable reply a method lets the client rest: a replay does so by itself.
        before = -math.inf if failure else returned
    # What it was at when the run ended took longer than until then: a replay in which it would
    # come back earlier could not be the recorded run.
    open_for = record.end - max(returned for _, returned, _ in tasks)
    if legs[0].seconds <= open_for:
        legs.append(Leg(open_for + _MOMENT))
    return tuple(legs)


def _online(periods: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, float], ...]:
    """Return when a client was online; empty if it always was."""
    spans: list[tuple[float, float]] = []
    for start, stop in periods:
        end = math.inf if stop is None else stop
        if end > start:
            # Two periods that touch are one.
            if spans and start <= spans[-1][1]:
                start = spans.pop()[0]
            spans.append((start, end))
    return () if spans == [(0.0, math.inf)] else tuple(spans)
