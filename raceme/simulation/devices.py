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
:class:`~raceme.simulation.uplink.Uplink`.
Built-in profiles are the files in the folder ``profiles``; a new one is a new file.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

import numpy as np

from raceme.config.errors import UserError, unknown_name
from raceme.config.reading import ReadingError, absolute, parse_toml, read_text
from raceme.simulation.uplink import Uplink


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

    def duration(
        self,
        examples: int,
        epochs: float,
        bytes_down: int,
        bytes_up: int,
        scale: float,
        rng: np.random.Generator,
        task: int = 0,
        share: float = 1.0,
    ) -> float:
        """Return the seconds from sending a training task to having its reply.

        Parameters
        ----------
        examples, epochs : int, float
            Size of the work: training examples, and passes over them.
        bytes_down, bytes_up : int
            Size of the transfers.
        scale : float
            Factor on the compute time, e.g. the share of a model that is trained.
        rng : numpy.random.Generator
            The device's own; one number is drawn, so that jitter does not change later draws, and
            a second one by a device with a random part.
        task : int
            Number of the task among those that the device was given, from 0.
        share : float
            Factor on what a task takes whatever its size, e.g. of a few mini-batches only.
        """
        compute = share * self.seconds_per_round + self.seconds_per_sample * examples * epochs
        jitter = rng.uniform(-1.0, 1.0)
        if self.exponential_rate:
            compute += rng.standard_exponential() * examples * epochs / self.exponential_rate
        compute *= scale * (1.0 + self.jitter * jitter)
        return self._with_transfers(bytes_down, bytes_up, compute)

    def mean_duration(
        self, examples: int, epochs: float, bytes_down: int, bytes_up: int, scale: float = 1.0
    ) -> float:
        """Return the mean of :meth:`duration`, in seconds."""
        per_sample = self.seconds_per_sample
        if self.exponential_rate:
            per_sample += 1.0 / self.exponential_rate
        compute = scale * (self.seconds_per_round + per_sample * examples * epochs)
        return self._with_transfers(bytes_down, bytes_up, compute)

    def communication(self, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds of a task that go into its transfers."""
        return sum(self._transfers(bytes_down, bytes_up))

    def _with_transfers(self, bytes_down: int, bytes_up: int, compute: float) -> float:
        """Return a task's time with the transfers before and after the computation."""
        down, up = self._transfers(bytes_down, bytes_up)
        return down + compute + up

    def _transfers(self, bytes_down: int, bytes_up: int) -> tuple[float, float]:
        down = bytes_down / self.bandwidth_down if self.bandwidth_down else 0.0
        up = bytes_up / self.bandwidth_up if self.bandwidth_up else 0.0
        return down, up

    def fails(self, task: int) -> bool:
        """Return whether the reply to a task of this number is an error."""
        return False

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


def _profile_files() -> dict[str, str]:
    folder = files("raceme.simulation") / "profiles"
    return {
        item.name.removesuffix(".toml"): item.read_text(encoding="utf-8")
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if item.name.endswith(".toml")
    }


PROFILES: Mapping[str, str] = _profile_files()
"""Text of the built-in profiles by name."""


def summaries() -> dict[str, str]:
    """Return the one-line description of each built-in profile."""
    return {name: tomllib.loads(text).get("description", "") for name, text in PROFILES.items()}


def fleet(profile: str, clients: int, seed: int) -> list[Device]:
    """Make the devices of a profile.

    Parameters
    ----------
    profile : str
        Name of a built-in profile, or path of a TOML file.
    clients : int
        Number of devices.
    seed : int
        Decides which devices are the slow ones, and draws from ranges.

    Raises
    ------
    UserError
        Unknown name, unreadable file, unknown key, impossible value.
    """
    if profile in PROFILES:
        text = PROFILES[profile]
    elif profile.endswith(".toml"):
        try:
            text = read_text(absolute(profile))
        except ReadingError as error:
            raise UserError(f"Cannot read the device profile {profile}: {error}.") from None
    else:
        raise unknown_name("device profile", profile, PROFILES)
    try:
        tree = parse_toml(text)
    except ReadingError as error:
        raise UserError(f"Device profile {profile} is not valid TOML: {error}.") from None
    return _build(profile, tree, clients, np.random.default_rng([seed, 0xDE71CE]))


def _build(
    profile: str, tree: Mapping[str, Any], clients: int, rng: np.random.Generator
) -> list[Device]:
    """Turn a parsed profile into devices."""
    for name in tree:
        if name not in ("description", "device", "group"):
            raise unknown_name(f"key in device profile {profile}:", name, ["device", "group"])
    common = dict(_section(profile, tree.get("device", {})))
    groups = _groups(profile, tree.get("group", []))
    counts = iter(_shared_out(_shares(profile, groups), clients))
    settings = [dict(common) for _ in range(clients)]
    free = [int(client) for client in rng.permutation(clients)]
    for group in groups:
        if "share" in group:
            count = next(counts)
            chosen, free = free[:count], free[count:]
        else:
            # A profile may name more clients than a run has.
            chosen = [c for c in _clients(profile, group["clients"]) if c < clients]
        special = dict(
            _section(profile, {k: v for k, v in group.items() if k not in ("share", "clients")})
        )
        # A mistake is reported even where the group is too small to have a client in this run.
        _device(profile, {**common, **special}, np.random.default_rng(0))
        for client in chosen:
            settings[client].update(special)
    return [_device(profile, values, rng) for values in settings]


def _shares(profile: str, groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the shares of the groups that have one, which are at most 1 together."""
    if any(("share" in group) == ("clients" in group) for group in groups):
        raise UserError(f"Device profile {profile}: a [[group]] takes either share or clients.")
    shares = [_share(profile, group["share"]) for group in groups if "share" in group]
    # The tolerance is for sums such as 0.1 + 0.2 + 0.7.
    if sum(shares) > 1 + 1e-9:
        raise UserError(
            f"Device profile {profile}: the shares of the groups must not exceed 1 together, "
            f"got {sum(shares):g}."
        )
    return shares


def _shared_out(shares: Sequence[float], clients: int) -> list[int]:
    """Return how many clients each share is, by largest remainder.

    Each share gets the whole part of what it is due; the clients that are left go one each to the
    largest fractions, at a tie to the earlier share. What the shares leave of 1 takes part as the
    last one. So no count is off by a whole client, and shares that add up to 1 leave nobody out.
    """
    # Rounded, so that 0.3 · 10 is 3, and ties are ties whatever the binary fractions are.
    quotas = [round(share * clients, 6) for share in shares]
    quotas.append(max(0.0, round(clients - sum(quotas), 6)))
    counts = [math.floor(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda i: round(counts[i] - quotas[i], 6))
    for index in by_fraction[: clients - sum(counts)]:
        counts[index] += 1
    return counts[:-1]


def _groups(profile: str, groups: Any) -> list[Mapping[str, Any]]:
    if not isinstance(groups, list) or any(not isinstance(group, dict) for group in groups):
        raise UserError(f"Device profile {profile}: groups are written as [[group]] tables.")
    return groups


def _share(profile: str, value: Any) -> float:
    share = _number(profile, "share", value)
    if not 0 <= share <= 1:
        raise UserError(f"Device profile {profile}: share must be between 0 and 1, got {share:g}.")
    return share


def _clients(profile: str, value: Any) -> list[int]:
    if not isinstance(value, list) or any(
        isinstance(client, bool) or not isinstance(client, int) or client < 0 for client in value
    ):
        raise UserError(
            f"Device profile {profile}: clients takes a list of numbers from 0 on, got {value!r}."
        )
    return value


def _section(profile: str, section: Any) -> Iterator[tuple[str, Any]]:
    """Check the keys of a table of a profile."""
    if not isinstance(section, Mapping):
        raise UserError(f"Device profile {profile}: device must be a table, got {section!r}.")
    known = {_kebab(item.name): item.name for item in (*fields(Device), *fields(Uplink))}
    for name, value in section.items():
        if name not in known:
            raise unknown_name(f"key in device profile {profile}:", name, known)
        yield known[name], value


def _device(profile: str, values: Mapping[str, Any], rng: np.random.Generator) -> Device:
    """Make one device; what describes a radio uplink becomes its bandwidth."""
    drawn = _draw(profile, values, rng)
    names = [item.name for item in fields(Uplink)]
    given = {name: drawn.pop(name) for name in names if name in drawn}
    if not given:
        return Device(**drawn)
    if len(given) < len(names) or "bandwidth_up" in drawn:
        shown = ", ".join(map(_kebab, names))
        raise UserError(
            f"Device profile {profile}: a device takes either bandwidth-up or all of {shown}."
        )
    return Device(**drawn, bandwidth_up=Uplink(**given).bytes_per_second)


def _draw(profile: str, values: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Replace ranges by a number drawn from them."""
    drawn: dict[str, Any] = {}
    for name, value in values.items():
        if name == "online":
            drawn[name] = _periods(profile, value)
        elif isinstance(value, list):
            if len(value) != 2:
                raise UserError(f"Device profile {profile}: {_kebab(name)} takes [low, high].")
            low, high = (_number(profile, name, bound) for bound in value)
            if not low <= high < math.inf:
                raise UserError(
                    f"Device profile {profile}: {_kebab(name)} takes [low, high], got {value}."
                )
            drawn[name] = float(rng.uniform(low, high))
        else:
            drawn[name] = _number(profile, name, value)
    return drawn


def _periods(profile: str, value: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list) or any(
        not isinstance(period, list) or len(period) != 2 for period in value
    ):
        raise UserError(f"Device profile {profile}: online takes [[from, to], …] in seconds.")
    return tuple(
        (_number(profile, "online", start), _number(profile, "online", end)) for start, end in value
    )


def _number(profile: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(
            f"Device profile {profile}: {_kebab(name)} must be a number, got {value!r}."
        )
    return float(value)


def _kebab(name: str) -> str:
    return name.replace("_", "-")
