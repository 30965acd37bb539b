"""Drift: generators by name, and schedules of the steps of clients' data."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
from raceme.core.options import option
from raceme.core.registry import DRIFTS
from raceme.datasets.dealt import Dealt
from raceme.datasets.partition import Inputs, Scenario, ScenarioOptions, largest_remainder, rotated
from raceme.datasets.source import ClientData, Indices, generator

# -----------------------------------------------------------------------------
# Schedules of the steps of clients' data: the key ``drift-at``.
# -----------------------------------------------------------------------------


Unit = Literal["seconds", "updates", "uploads", "rounds"]

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_COUNTS: dict[str, Unit] = {"update": "updates", "upload": "uploads", "round": "rounds"}
_MOMENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)?\s*(?:(s|min|h)|(update|upload|round)s?)")
_EXPECTED = (
    "write moments, e.g. '60s', '120s, 240s', '500 updates' or '5 uploads', or a period, e.g. "
    "'every 60s' or 'every round' (units: s, min, h, updates, uploads, rounds)"
)
_ROUNDING = 1e-9
"""Tolerance: 0.3 / 0.1 is below 3 in floating point."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of the steps of clients' data.

    Attributes
    ----------
    unit : str
        Unit: ``"seconds"`` of the run's clock, ``"updates"`` of the run, ``"uploads"`` of the
        client, or completed ``"rounds"`` (or time windows).
    moments : tuple[float, ...]
        Times at which the step increases by one, ascending.
    every : float
        Period of the steps, instead of moments; 0 for none.
    """

    unit: Unit
    moments: tuple[float, ...] = ()
    every: float = 0.0

    def step(self, time: float, updates: int, uploads: int, rounds: int | None = None) -> int:
        """Return the step of a client's data, from 0; moments are inclusive.

        Parameters
        ----------
        time : float
            Seconds on the run's clock.
        updates : int
            Updates that the run has applied.
        uploads : int
            Uploads of the client.
        rounds : int, optional
            Completed rounds; None for a method without rounds.

        Raises
        ------
        UserError
            The unit is rounds, and the method has none.
        """
        counts = {"seconds": time, "updates": updates, "uploads": uploads, "rounds": rounds}
        now = counts[self.unit]
        if now is None:
            raise UserError(
                "drift-at counts rounds, and the method has none: give seconds, updates or "
                "uploads, or use a method with rounds, such as fedavg."
            )
        if self.every:
            return math.floor(now / self.every + _ROUNDING)
        return bisect_right(self.moments, now)

    def next_time(self, time: float) -> float:
        """Return the next time after `time` at which the step changes, in seconds.

        Infinity if there is none, or if the unit is not seconds.
        """
        if self.unit != "seconds":
            return math.inf
        if self.every:
            return (math.floor(time / self.every + _ROUNDING) + 1) * self.every
        later = bisect_right(self.moments, time)
        return self.moments[later] if later < len(self.moments) else math.inf

    @property
    def per_client(self) -> bool:
        """Whether each client has a step of its own, counted in its uploads."""
        return self.unit == "uploads"

    @property
    def in_rounds(self) -> bool:
        """Whether the unit is rounds."""
        return self.unit == "rounds"


def parse_schedule(text: str) -> Schedule:
    """Parse the key ``drift-at``.

    Parameters
    ----------
    text : str
        Moments of one unit, separated by commas, or one period: ``"120s, 240s"``,
        ``"500 updates"``, ``"every 3 uploads"``, ``"every round"``.

    Raises
    ------
    UserError
        The text is invalid.
    """
    plain = text.strip().lower()
    period = plain.startswith("every ")
    parts = [_parse_time(part, text, period) for part in plain.removeprefix("every ").split(",")]
    units = {unit for unit, _ in parts}
    amounts = tuple(amount for _, amount in parts)
    if len(units) > 1:
        raise UserError(
            f"drift-at '{text}' mixes {' and '.join(sorted(units))}: count in one of them."
        )
    if period and len(parts) > 1:
        raise UserError(f"drift-at '{text}' has more than one period: {_EXPECTED}.")
    if any(later <= earlier for earlier, later in pairwise(amounts)):
        raise UserError(f"drift-at '{text}' must list moments in ascending order.")
    unit = parts[0][0]
    return Schedule(unit, every=amounts[0]) if period else Schedule(unit, amounts)


def _parse_time(part: str, text: str, period: bool) -> tuple[Unit, float]:
    """Parse a number with its unit; a period may omit the number 1."""
    match = _MOMENT.fullmatch(part.strip())
    if match is None or (match[1] is None and not period):
        raise UserError(f"drift-at '{text}' cannot be read: {_EXPECTED}.")
    unit: Unit = "seconds" if match[2] else _COUNTS[match[3]]
    amount = float(match[1] or 1) * _SECONDS.get(match[2], 1.0)
    if amount <= 0 or (unit != "seconds" and not amount.is_integer()):
        kind = "a number above 0" if unit == "seconds" else "a whole number from 1"
        raise UserError(f"drift-at '{text}': {part.strip()} must be {kind} of {unit}.")
    return unit, amount


# -----------------------------------------------------------------------------
# The interface of drift generators.
# -----------------------------------------------------------------------------


State = TypeVar("State")
_KEPT = 4
"""States kept by an :class:`Evolution`: open tasks have few different steps."""


@dataclass(frozen=True)
class DriftOptions:
    """Options of every drift."""

    drift_at: str | None = option(
        None, "times of the drift: '60s, 120s', '500 updates', 'every round', …"
    )
    drift_seed: int | None = option(None, "seed of the drift (auto: the run's)", low=0)


class Drift:
    """Base class of drift generators: changes clients' data from step to step.

    The data are a pure function of partitioned data, options, seed, client and step, so that any
    process on any machine generates the same.

    Parameters
    ----------
    dealt : Dealt
        All clients' data before the drift.
    options : Any
        Options of the generator, an instance of :attr:`options_type`.

    Attributes
    ----------
    options_type : type or None
        The frozen dataclass of the drift's own options.
    needs_others : bool
        Whether a client's data depend on those of others, which excludes devices with only their
        own data.
    planned_steps : int
        Default number of steps of a run; 0 for a single change in the middle.
    """

    options_type: type[DriftOptions] | None = DriftOptions
    needs_others = False
    planned_steps = 0

    def __init__(self, dealt: Dealt, options: Any) -> None:
        self.dealt = dealt
        self.options = options

    @classmethod
    def default_schedule(cls, config: RunConfig) -> str:
        """Return the default of ``drift-at``."""
        if cls.planned_steps:
            return f"every {max(1, config.planned_updates // cls.planned_steps)} updates"
        return f"{max(1, config.planned_updates // 2)} updates"

    @staticmethod
    def check_schedule(config: RunConfig, schedule: Schedule) -> None:
        """Check that data can change at the scheduled times.

        Raises
        ------
        UserError
            Data cannot change at these times.
        """

    def check(self) -> None:
        """Check that the drift applies to the data.

        Raises
        ------
        UserError
            The drift does not apply; the message suggests another.
        """

    def needs_labels(self) -> None:
        """Raise UserError if a drift needs classes and the labels are quantities."""
        if self.dealt.dataset.target is not None:
            config = self.dealt.config
            raise UserError(
                f"drift {config.drift} needs classes, and the labels of {config.dataset} are "
                "quantities: take swap-all, noise, incremental or in-order."
            )

    def partitions(self, which: str) -> str:
        """Return a hint at other partitions; none for data with clients of their own."""
        return "" if self.dealt.dataset.users is not None else f"partition {which}, or "

    def data(self, client: int, step: int) -> ClientData:
        """Return a client's data at a step."""
        return self.dealt.data(client)

    def fewest(self, client: int) -> int:
        """Return the minimum number of training samples of a client at any step.

        By default the first step's; drifts with steps of other sizes override it.
        """
        return len(self.data(client, 0).y_train)

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the true group of every client at a step."""
        return self.dealt.partition.groups

    def rng(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Return the generator of random numbers for one purpose and client."""
        return generator(self.seed, f"drift: {purpose}", client)

    @property
    def seed(self) -> int:
        """The seed of the drift, by default the run's."""
        own: int | None = self.options.drift_seed
        return self.dealt.config.seed if own is None else own


def _training(data: ClientData, own: Indices) -> ClientData:
    """Return data with some of the training samples only."""
    return replace(data, x_train=data.x_train[own], y_train=data.y_train[own])


class NoDrift(Drift):
    """No drift."""

    options_type = None


class Evolution(Generic[State]):
    """A sequence of states, each computed from the previous, with few kept.

    Parameters
    ----------
    start : State
        The state of step 0.
    advance : Callable
        Returns the state of a step, given the previous state, which it does not change, and the
        step's number.
    """

    def __init__(self, start: State, advance: Callable[[State, int], State]) -> None:
        self._start = start
        self._advance = advance
        self._kept: OrderedDict[int, State] = OrderedDict()

    def at(self, step: int) -> State:
        """Return the state at a step, computed from the nearest stored earlier one."""
        earlier = max((kept for kept in self._kept if kept <= step), default=0)
        state = self._kept[earlier] if earlier else self._start
        for number in range(earlier + 1, step + 1):
            state = self._advance(state, number)
        self._kept[step] = state
        self._kept.move_to_end(step)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return state


# -----------------------------------------------------------------------------
# Drifts that change a client's own samples: their images, labels, noise, or number.
# -----------------------------------------------------------------------------


_QUARTERS = 4
"""Default number of steps of a gradual drift in a run."""


@dataclass(frozen=True)
class ShareOptions(DriftOptions):
    """Option of drifts that may affect only some clients."""

    drift_share: float = option(1.0, "share of the clients that drift", above=0, high=1)


class SomeClients(Drift):
    """A drift of some clients, the same ones at every step."""

    options_type = ShareOptions

    def drifts(self, client: int) -> bool:
        """Return whether a client drifts."""
        count = max(1, round(self.options.drift_share * self.dealt.clients))
        return client in self.rng("who").permutation(self.dealt.clients)[:count]

    def data(self, client: int, step: int) -> ClientData:
        """Return the partitioned data, changed by the drift of `step` steps."""
        data = self.dealt.data(client)
        moved = step > 0 and self.drifts(client)
        return self.changed(data, client, step) if moved else data

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return data changed by the drift of `step` steps, at least one."""
        raise TypeError(f"{type(self).__name__} does not define changed().")


@dataclass(frozen=True)
class RotateOptions(ShareOptions):
    """Options of the drift ``rotate``: clients and angle."""

    rotate_degrees: float = option(30.0, "rotation of images in degrees per step")


class Rotate(SomeClients):
    """Anticlockwise rotation of images by rotate-degrees per step."""

    options_type = RotateOptions
    planned_steps = _QUARTERS

    def check(self) -> None:
        """Raise UserError if there are no images."""
        shape = self.dealt.dataset.shape.input_shape
        if len(shape) != 3:
            raise UserError(
                f"drift rotate turns images, and {self.dealt.config.dataset} has inputs of shape "
                f"{shape}: take noise or label-shift, or a dataset of images."
            )

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return images turned by the step times rotate-degrees."""
        degrees, blank = step * self.options.rotate_degrees % 360.0, self.dealt.dataset.blank
        train, test = (rotated(x, degrees, blank) for x in (data.x_train, data.x_test))
        return replace(data, x_train=train, x_test=test)


@dataclass(frozen=True)
class LabelShiftOptions(ShareOptions):
    """Options of the drift ``label-shift``: clients and shift."""

    label_shift: int = option(1, "shift s of the labels, y + s mod C, per step")


class LabelShift(SomeClients):
    """Shifted labels, y + s mod C: the same inputs, another task."""

    options_type = LabelShiftOptions

    def check(self) -> None:
        """Raise UserError if there are no classes, or the shift changes nothing."""
        self.needs_labels()
        classes = self.dealt.dataset.num_classes
        if self.options.label_shift % classes == 0:
            raise UserError(
                f"label-shift {self.options.label_shift} does not change the labels of {classes} "
                f"classes: give another number."
            )

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return labels shifted by the step times label-shift, modulo C."""
        shift, classes = step * self.options.label_shift, self.dealt.dataset.num_classes
        train, test = ((y + shift) % classes for y in (data.y_train, data.y_test))
        return replace(data, y_train=train, y_test=test)


@dataclass(frozen=True)
class NoiseDriftOptions(ShareOptions):
    """Options of the drift ``noise``: clients, and growth of the noise."""

    noise_growth: float = option(
        0.5, "standard deviation added per step, for normalised inputs", above=0
    )


class NoiseDrift(SomeClients):
    """Gaussian noise that grows by noise-growth per step, as in a wearing sensor."""

    options_type = NoiseDriftOptions
    planned_steps = _QUARTERS

    def check(self) -> None:
        """Raise UserError if the inputs are not quantities."""
        if self.dealt.dataset.tokens:
            raise UserError(
                f"drift noise adds to quantities, and {self.dealt.config.dataset} has text: take "
                f"swap-all or label-shift."
            )

    def changed(self, data: ClientData, client: int, step: int) -> ClientData:
        """Return noisier inputs; a sample's noise only grows in size from step to step."""
        level = np.float32(step * self.options.noise_growth)
        train, test = (
            inputs
            + level * self.rng(f"noise {part}", client).standard_normal(inputs.shape, np.float32)
            for part, inputs in (("train", data.x_train), ("test", data.x_test))
        )
        return replace(data, x_train=train, x_test=test)


@dataclass(frozen=True)
class IncrementalOptions(DriftOptions):
    """Options of the drift ``incremental``: how much data each step adds."""

    incremental_start: float = option(
        0.25,
        "initial share of a client's training samples",
        above=0,
        high=1,
    )
    incremental_more: float = option(
        0.25, "share of the training samples that each step adds", above=0, high=1
    )
    incremental_of: str = option(
        "original",
        "base of the shares: original (all of a client's samples) or rest (those left by the "
        "previous step)",
        among=("original", "rest"),
    )


class Incremental(Drift):
    """Growing training data: 25 % at first, 25 % more at every step.

    Shares refer to all samples of a client, as in the text of Duan et al. 2022. In their code each
    share refers to the previous remainder, so that a client has fewer and fewer new samples: 25,
    12.5, 9.4 and 9.4 % (``incremental-of=rest``). All test samples are available from the
    beginning, as their distribution does not change.
    """

    options_type = IncrementalOptions
    planned_steps = _QUARTERS

    def data(self, client: int, step: int) -> ClientData:
        """Return the part that is available at a step, which includes those of earlier steps."""
        dealt = self.dealt.data(client)
        share, count = self._share(step), len(dealt.y_train)
        data = replace(dealt, all_training=count)
        there = min(count, max(1, round(share * count)))
        if there == count:
            return data
        own = np.sort(self.rng("release", client).permutation(count)[:there])
        return _training(data, own)

    def _share(self, step: int) -> float:
        """Return the share of a client's samples that is available at a step."""
        start: float = self.options.incremental_start
        more: float = self.options.incremental_more
        if self.options.incremental_of == "original":
            return min(1.0, start + step * more)
        # Once the share is 1, nothing changes any more.
        last = min(step, math.ceil((1.0 - start) / more))
        return math.prod(min(1.0, start + number * more) for number in range(last + 1))


# -----------------------------------------------------------------------------
# Clients that exchange data.
#
# "Swap all" and "swap part" of Duan et al., "Flexible Clustered Federated Learning for Client-
# Level Data Distribution Shift" (FlexCFL), TPDS 2022. At every step all clients are paired at
# random, and each pair exchanges with the same chance.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SwapOptions(DriftOptions):
    """Options of the two exchanges."""

    swap_chance: float = option(0.05, "probability that a pair of clients swaps", above=0, high=1)


class Swap(Drift):
    """Common part of both exchanges: the pairs."""

    options_type = SwapOptions
    needs_others = True

    @classmethod
    def default_schedule(cls, config: RunConfig) -> str:
        """Return a schedule with one step per `clients` updates, the size of a round."""
        return f"every {config.num_clients} updates"

    def check(self) -> None:
        """Raise UserError if there are no two clients."""
        if self.dealt.clients < 2:
            raise UserError("Exchanging data needs at least 2 clients.")

    def pairs(self, clients: int, step: int) -> Indices:
        """Return the pairs that exchange at a step, shape (pairs, 2)."""
        rng = self.rng(f"pairs {step}")
        pairs = rng.permutation(clients)[: clients // 2 * 2].reshape(-1, 2)
        chosen: Indices = pairs[rng.random(len(pairs)) < self.options.swap_chance]
        return chosen


class SwapAll(Swap):
    """Swap of all training and test samples, and the group, between pairs of clients."""

    def data(self, client: int, step: int) -> ClientData:
        """Return the partitioned data of the client whose data it has now."""
        return self.dealt.data(int(self._origins.at(step)[client]))

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the groups, which move with the data."""
        return tuple(self.dealt.group(origin) for origin in self._origins.at(step).tolist())

    @cached_property
    def _origins(self) -> Evolution[Indices]:
        """The original owner of each client's present data, shape (clients,)."""
        return Evolution(np.arange(self.dealt.clients), self._exchanged)

    def _exchanged(self, origins: Indices, step: int) -> Indices:
        first, second = self.pairs(len(origins), step).T
        after = origins.copy()
        after[first], after[second] = origins[second], origins[first]
        return after


class SwapPart(Swap):
    """Swap of one exclusive label between pairs of clients."""

    def check(self) -> None:
        """Raise UserError if no two clients have labels of their own."""
        super().check()
        self.needs_labels()
        owned = {frozenset(np.flatnonzero(row).tolist()) for row in self._dealt_counts.sum(axis=0)}
        # Each has a label that the other lacks.
        if all(one <= other or other <= one for one in owned for other in owned):
            raise UserError(
                "drift swap-part exchanges labels that only one of two clients has, and there are "
                f"no two such clients: take {self.partitions('classes or label-groups')}swap-all."
            )

    def data(self, client: int, step: int) -> ClientData:
        """Return the samples that the client kept, and those from the other clients."""
        mine = self._holders.at(step) == client
        origins = np.flatnonzero(mine.any(axis=1))
        if mine[client].all() and origins.tolist() == [client]:
            return self.dealt.data(client)
        parts = [_of_labels(self.dealt.data(origin), mine[origin]) for origin in origins.tolist()]
        names = ("x_train", "y_train", "x_test", "y_test")
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in names
        }
        return ClientData(**joined, group=self.dealt.group(client))

    @cached_property
    def _dealt_counts(self) -> Indices:
        """Training and test samples of each label of each client, shape (2, clients, labels)."""
        dealt, labels = self.dealt, self.dealt.dataset.num_classes
        counts = np.empty((2, dealt.clients, labels), np.int64)
        for client in range(dealt.clients):
            for part, own in enumerate(dealt.indices(client)):
                given = dealt.labels(own, dealt.group(client))
                counts[part, client] = np.bincount(given, minlength=labels)
        return counts

    @cached_property
    def _holders(self) -> Evolution[Indices]:
        """The client that has the samples of a label dealt to a client, shape (clients, labels)."""
        labels = self.dealt.dataset.num_classes
        clients = np.repeat(np.arange(self.dealt.clients)[:, None], labels, axis=1)
        return Evolution(clients, self._exchanged)

    def _exchanged(self, holders: Indices, step: int) -> Indices:
        # A client is in at most one pair, so that pairs can be processed in any order.
        counts = self._held(holders)
        after = holders.copy()
        for pair, (one, other) in enumerate(self.pairs(len(holders), step).tolist()):
            rng = self.rng(f"labels {step}", pair)
            for label in _exchanged_labels(counts[:, one], counts[:, other], rng):
                column = after[:, label]
                had, got = column == one, column == other
                column[had], column[got] = other, one
        return after

    def _held(self, holders: Indices) -> Indices:
        """Return each client's present samples of each label, shape (2, clients, labels)."""
        counts = np.zeros_like(self._dealt_counts)
        for held, dealt in zip(counts, self._dealt_counts, strict=True):
            np.add.at(held, (holders, np.arange(holders.shape[1])), dealt)
        return counts


def _exchanged_labels(one: Indices, other: Indices, rng: np.random.Generator) -> tuple[int, ...]:
    """Draw the labels that a pair exchanges; none if no exchange is possible.

    Parameters
    ----------
    one, other : Indices
        Training and test samples of each label, shape (2, labels).
    rng : np.random.Generator
        Random generator of the pair.
    """
    has, gets = one.sum(axis=0) > 0, other.sum(axis=0) > 0
    given, taken = np.flatnonzero(has & ~gets), np.flatnonzero(gets & ~has)
    if len(given) == 0 or len(taken) == 0:
        return ()
    label, back = int(rng.choice(given)), int(rng.choice(taken))
    moved = one[:, label] - other[:, back]
    # Every client must keep a training sample and a test sample.
    if np.any(one.sum(axis=1) - moved < 1) or np.any(other.sum(axis=1) + moved < 1):
        return ()
    return label, back


def _of_labels(data: ClientData, wanted: NDArray[np.bool_]) -> ClientData:
    """Return the samples of the labels in a mask, shape (labels,)."""
    train, test = wanted[data.y_train], wanted[data.y_test]
    return replace(
        _training(data, np.flatnonzero(train)), x_test=data.x_test[test], y_test=data.y_test[test]
    )


# -----------------------------------------------------------------------------
# Clients whose data are a mixture of distributions that changes over time.
#
# Li and Zhu, "Towards Client Driven Federated Learning" (CDFL). The distributions are the groups
# of the partition: with rotation-groups, noise-groups and most scenarios all samples as each group
# sees them, otherwise the samples of each group's clients.
# -----------------------------------------------------------------------------


_SHARES = (0.5, 2.0)
"""Default minimum and maximum size of a draw, relative to the mean client."""
_LEAST = 2


@dataclass(frozen=True)
class MixtureOptions(DriftOptions):
    """Options of mixture; the defaults of shares and rest are the paper's."""

    mixture_main_low: float = option(
        0.4, "minimum share of a client's main distribution", above=0, high=1
    )
    mixture_main_high: float = option(
        0.9, "maximum share of a client's main distribution", above=0, high=1
    )
    mixture_rest: str = option(
        "even",
        "division of the rest among the others: even or dirichlet",
        among=("even", "dirichlet"),
    )
    mixture_main: str = option(
        "kept",
        "whether a client's main distribution is kept or redrawn",
        among=("kept", "redrawn"),
    )
    mixture_size_low: int | None = option(
        None, "minimum training samples per draw (auto: half the mean client's)", low=2
    )
    mixture_size_high: int | None = option(
        None, "maximum training samples per draw (auto: twice the mean client's)", low=2
    )


class Mixture(Drift):
    """Mixtures of the groups' distributions, redrawn per client at every step."""

    options_type = MixtureOptions
    needs_others = True

    @classmethod
    def default_schedule(cls, config: RunConfig) -> str:
        """Return a step per upload of the client."""
        return "every upload"

    def check(self) -> None:
        """Raise UserError if there are no groups, or the bounds are inconsistent."""
        groups = set(self.dealt.partition.groups)
        if None in groups or len(groups) < 2:
            raise UserError(
                "drift mixture mixes the distributions of groups, and these clients have "
                f"{'no groups' if None in groups else 'only one'}: take "
                f"{self.partitions('rotation-groups, noise-groups or label-groups')}data with "
                "groups."
            )
        low, high = self.options.mixture_main_low, self.options.mixture_main_high
        if low > high:
            raise UserError(f"mixture-main-low {low:g} is above mixture-main-high {high:g}.")
        fewest, most = self._sizes
        if fewest > most:
            raise UserError(f"mixture-size-low {fewest} is above mixture-size-high {most}.")

    def data(self, client: int, step: int) -> ClientData:
        """Return a draw: as many test samples as training samples, from the same mixture.

        Training and test samples are disjoint over all clients. Samples of one distribution are
        distinct as long as there are enough.
        """
        rng = self.rng(f"mixture {step}", client)
        counts = self._counts(client, rng)

        def drawn(part: str, pools: dict[int, Indices]) -> tuple[Inputs, Indices]:
            x, y = [], []
            for (group, pool), count in zip(pools.items(), counts.tolist(), strict=True):
                own = np.sort(rng.choice(pool, count, replace=count > len(pool)))
                x.append(self.dealt.inputs(own, group, client, f"{part} {step} {group}"))
                y.append(self.dealt.labels(own, group))
            return np.concatenate(x), np.concatenate(y)

        train, test = self._pools
        x_train, y_train = drawn("train", train)
        x_test, y_test = drawn("test", test)
        mixture = tuple((counts / counts.sum()).tolist())
        return ClientData(x_train, y_train, x_test, y_test, self._largest(counts), mixture)

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the group that has the largest share of each client's draw."""
        return tuple(
            self._largest(self._counts(client, self.rng(f"mixture {step}", client)))
            for client in range(self.dealt.clients)
        )

    def _largest(self, counts: Indices) -> int:
        return list(self._pools[0])[int(np.argmax(counts))]

    def _counts(self, client: int, rng: np.random.Generator) -> Indices:
        """Draw the number of samples from each distribution, shape (groups,)."""
        options, numbers = self.options, list(self._pools[0])
        groups = len(numbers)
        size = int(rng.integers(*self._sizes, endpoint=True))
        main_share = rng.uniform(options.mixture_main_low, options.mixture_main_high)
        own = self.dealt.group(client)
        assert own is not None, "check() has seen that there are groups"
        kept = options.mixture_main == "kept"
        main = numbers.index(own) if kept else int(rng.integers(groups))
        others = np.full(groups - 1, 1.0 / (groups - 1))
        if options.mixture_rest == "dirichlet":
            others = rng.dirichlet(np.ones(groups - 1))
        shares = np.insert((1.0 - main_share) * others, main, main_share)
        return largest_remainder(size, shares)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Minimum and maximum training samples of a draw."""
        sizes = [len(self.dealt.indices(client)[0]) for client in range(self.dealt.clients)]
        given = self.options.mixture_size_low, self.options.mixture_size_high
        low, high = (
            max(_LEAST, round(share * sum(sizes) / len(sizes))) if size is None else size
            for share, size in zip(_SHARES, given, strict=True)
        )
        return low, high

    @cached_property
    def _pools(self) -> tuple[dict[int, Indices], dict[int, Indices]]:
        """Training samples of each distribution, and its test samples."""
        return (
            self.dealt.pools(lambda client: self.dealt.indices(client)[0]),
            self.dealt.pools(lambda client: self.dealt.indices(client)[1]),
        )


# -----------------------------------------------------------------------------
# Concepts that reach clients one after another: the same inputs with exchanged labels.
#
# After the label-swapping streams of Jothimurugesan et al., "Federated Learning under Distributed
# Concept Drift" (FedDrift), AISTATS 2023: a client's data of each step follow one concept, the
# change reaches clients at different steps, and with more than two concepts different new ones
# occur at the same time. The times of the changes are drawn, and the exchanged labels are fixed
# (our readings).
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ConceptsOptions(DriftOptions):
    """Options of the drift ``concepts``: number, pace and samples of the concepts."""

    concepts: int = option(2, "number of concepts", low=2)
    concept_steps: int = option(10, "number of steps over which the changes are spread", low=2)
    concept_samples: str = option(
        "new",
        "training samples of a step: new (each step has a part of the client's) or same (all at "
        "every step)",
        among=("new", "same"),
    )


class Concepts(Drift):
    """Concepts that exchange two labels; each client changes concept at steps of its own.

    Concept 0 has the original labels; concept k exchanges labels 2k − 1 and 2k. All clients begin
    with concept 0 and have every other concept once: client i first 1 + i mod (K − 1), then the
    following ones in turn. The K − 1 steps at which it changes are drawn, without repetition, from
    1 to ``concept-steps`` − 1.
    """

    options_type = ConceptsOptions
    planned_steps = 10

    def check(self) -> None:
        """Raise UserError if there are too few labels, steps or samples."""
        self.needs_labels()
        count, steps = self.options.concepts, self.options.concept_steps
        classes = self.dealt.dataset.num_classes
        if 2 * count - 1 > classes:
            raise UserError(
                f"{count} concepts exchange the labels 1 to {2 * count - 2}, and there are labels "
                f"0 to {classes - 1}: take fewer concepts."
            )
        if count > steps:
            raise UserError(
                f"A client meets {count} concepts at {count} different steps, and concept-steps is "
                f"{steps}: take fewer concepts or more concept-steps."
            )
        if self.options.concept_samples == "new":
            fewest, client = min((len(self.dealt.indices(c)[0]), c) for c in self.dealt.present)
            if fewest < steps:
                raise UserError(
                    f"Client {client} has {plural(fewest, 'training sample')}, too few for a new "
                    f"one at each of {steps} steps: take concept-samples same, fewer clients or "
                    "concept-steps."
                )

    def data(self, client: int, step: int) -> ClientData:
        """Return the samples of a step with the labels of its concept."""
        data = self.dealt.data(client)
        if self.options.concept_samples == "new":
            steps = self.options.concept_steps
            order = self.rng("samples of steps", client).permutation(len(data.y_train))
            own = np.sort(np.array_split(order, steps)[step % steps])
            data = _training(data, own)
        concept = self.concept(client, step)
        return replace(
            data,
            y_train=exchanged(data.y_train, concept),
            y_test=exchanged(data.y_test, concept),
            group=concept,
        )

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the concept of every client."""
        return tuple(self.concept(client, step) for client in range(self.dealt.clients))

    def concept(self, client: int, step: int) -> int:
        """Return the concept of a client's data at a step, from 0."""
        others = self.options.concepts - 1
        rng = self.rng("steps of change", client)
        moments = rng.choice(np.arange(1, self.options.concept_steps), others, replace=False)
        changes = int(np.sum(moments <= step))
        return 1 + (client + changes - 1) % others if changes else 0


def exchanged(y: NDArray[np.int64], concept: int) -> NDArray[np.int64]:
    """Return labels with 2k − 1 and 2k exchanged for concept k; unchanged for concept 0."""
    if concept == 0:
        return y
    one, other = 2 * concept - 1, 2 * concept
    return np.where(y == one, other, np.where(y == other, one, y))


# -----------------------------------------------------------------------------
# Data in temporal order, for datasets recorded over a long time.
# -----------------------------------------------------------------------------


_SAMPLES = 2
"""A period needs one training and one test sample."""


@dataclass(frozen=True)
class InOrderOptions(DriftOptions):
    """Options of the drift ``in-order``."""

    in_order_lag: int = option(
        0, "lag of the last clients behind the first, in periods (staggered drift)", low=0
    )


class InOrder(Drift):
    """Samples in recorded order, one period per step.

    Each step has the training and test samples of one period; the last period stays. With a lag,
    the clients are divided in order into parts, each one period behind the previous: several
    periods occur at a time, and a client's period is its true group.
    """

    options_type = InOrderOptions
    planned_steps = 8
    """A fixed number, because the number of periods is unknown at this point."""

    def check(self) -> None:
        """Raise UserError if samples have no time, or a client lacks a period."""
        if self.dealt.dataset.periods is None:
            raise UserError(
                "drift in-order needs the time of each sample, and "
                f"{self.dealt.config.dataset} has none: take npz-folder, with an array period."
            )
        lag, last = self.options.in_order_lag, self._last
        if lag > last:
            raise UserError(f"in-order-lag {lag} is too large: the data have {last + 1} periods.")
        for client in self.dealt.present:
            counts = self._counts(client)
            if counts.min() < _SAMPLES:
                raise UserError(
                    f"drift in-order needs {_SAMPLES} samples of every period at every client, and "
                    f"client {client} has {counts.min()} of period {int(counts.argmin())}, from 0: "
                    "take fewer clients."
                )

    def data(self, client: int, step: int) -> ClientData:
        """Return the client's samples of its current period."""
        period = self.period(client, step)
        data = self.dealt.data_where(client, self._periods == period)
        return replace(data, group=period) if self.options.in_order_lag else data

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the clients' current periods, if these may differ."""
        if not self.options.in_order_lag:
            return self.dealt.partition.groups
        return tuple(self.period(client, step) for client in range(self.dealt.clients))

    def period(self, client: int, step: int) -> int:
        """Return a client's period at a step."""
        behind = client * (self.options.in_order_lag + 1) // self.dealt.clients
        return int(np.clip(step - behind, 0, self._last))

    def _counts(self, client: int) -> Indices:
        """Return a client's number of samples per period, shape (periods,)."""
        own = np.concatenate(self.dealt.indices(client))
        return np.bincount(self._periods[own], minlength=self._last + 1)

    @property
    def _periods(self) -> Indices:
        periods = self.dealt.dataset.periods
        assert periods is not None, "check() has seen that there are periods"
        return periods

    @cached_property
    def _last(self) -> int:
        return int(self._periods.max())


# -----------------------------------------------------------------------------
# Task sequences for continual learning: other labels at every step.
# -----------------------------------------------------------------------------


_MOST = 5
"""Default number of tasks, if the clients have enough labels."""
_FEWEST = 2
"""A task needs one training and one test sample."""


@dataclass(frozen=True)
class TasksOptions(DriftOptions):
    """Options of the drift ``tasks``: length and order of the sequence."""

    tasks_count: int | None = option(
        None, "length of the sequence (auto: 5, or the fewest labels of a client)", low=2
    )
    tasks_order: str = option(
        "own",
        "order of tasks: one per client, or the same for all",
        among=("own", "same"),
    )


class Tasks(Drift):
    """Task sequence per client: its labels are split into tasks, one per step.

    One random order of all labels assigns labels to tasks, so that clients with the same labels
    have the same tasks. The sequence repeats after the last task.
    """

    options_type = TasksOptions

    @classmethod
    def default_schedule(cls, config: RunConfig) -> str:
        """Return an equal number of updates per task; for five tasks if no number is given."""
        count = config.read(TasksOptions).tasks_count or _MOST
        return f"every {max(1, config.planned_updates // count)} updates"

    def check(self) -> None:
        """Raise UserError if there are no classes, or a client has too few."""
        self.needs_labels()
        wanted, (fewest, client) = self._number, self._fewest_labels
        if fewest < wanted:
            raise UserError(
                f"drift tasks needs {wanted} labels of at least {_SAMPLES} samples at every "
                f"client, a label for each task, and client {client} has {fewest}: take "
                "partition iid or dirichlet, or fewer tasks-count."
            )

    def data(self, client: int, step: int) -> ClientData:
        """Return the client's samples of its current task."""
        count = self._number
        position = step % count
        if self.options.tasks_order == "own":
            position = int(self.rng("order of tasks", client).permutation(count)[position])
        tasks = np.array_split(self._labels(client), count)
        return self.dealt.data_where(client, np.isin(self.dealt.dataset.y, tasks[position]))

    def fewest(self, client: int) -> int:
        """Return the fewest training samples of a client at any step."""
        return min(len(self.data(client, step).y_train) for step in range(self._number))

    def _labels(self, client: int) -> Indices:
        """Return the labels with enough samples of a client, in the common order."""
        own = np.concatenate(self.dealt.indices(client))
        counts = np.bincount(self.dealt.dataset.y[own], minlength=self.dealt.dataset.num_classes)
        order = self.rng("order of labels").permutation(self.dealt.dataset.num_classes)
        enough: Indices = order[counts[order] >= _SAMPLES]
        return enough

    @cached_property
    def _number(self) -> int:
        """The number of tasks, the same for every client."""
        if self.options.tasks_count is not None:
            return int(self.options.tasks_count)
        fewest, _ = self._fewest_labels
        return max(_FEWEST, min(_MOST, fewest))

    @cached_property
    def _fewest_labels(self) -> tuple[int, int]:
        """The minimum number of labels of a client, and that client."""
        return min((len(self._labels(client)), client) for client in self.dealt.present)


# -----------------------------------------------------------------------------
# Continual streams of two concepts, one of which recurs at every step.
#
# C-FAACL's experiments (Zhang, Waterloo 2024): ten time steps, each with new data, of the two
# groups' data in one of the scenarios S1, S2, A1 and A2. In the sequential setting all clients have
# the same concept at a step; in the multi-task setting each has one of the two. The thesis does
# not state the order: here it is drawn, so that both occur.
# -----------------------------------------------------------------------------


_CONCEPTS = 2
_TRAINING = 2
"""Minimum training samples of a step: one may be kept for validation."""


@dataclass(frozen=True)
class StreamOptions(ScenarioOptions, DriftOptions):
    """Options of scenario-stream."""

    stream_steps: int = option(10, "steps of new data", low=2)
    stream_mode: str = option(
        "sequential",
        "concepts at a step: sequential (the same for all clients) or multi-task (one per client)",
        among=("sequential", "multi-task"),
    )


class ScenarioStream(Drift):
    """Stream of new samples per step, from one of a scenario's two concepts (C-FAACL).

    A client's training and test samples are divided evenly over the steps; if a concept has classes
    of its own (S1), over the steps with the concept. No sample occurs twice, and all occur unless a
    concept has few samples (A2). The stream repeats after the last step.
    """

    options_type = StreamOptions

    @classmethod
    def default_schedule(cls, config: RunConfig) -> str:
        """Return an equal part of the run (or its rounds, if limited) per step."""
        steps = config.read(StreamOptions).stream_steps
        in_rounds = config.max_rounds and config.max_updates is None
        total = config.max_rounds if in_rounds else config.planned_updates
        unit = "rounds" if in_rounds else "updates"
        if total < steps:
            return f"every {unit[:-1]}"
        return ", ".join(f"{total * step // steps} {unit}" for step in range(1, steps))

    @staticmethod
    def check_schedule(config: RunConfig, schedule: Schedule) -> None:
        """Raise UserError if the run is known to end before the stream's last step."""
        steps = config.read(StreamOptions).stream_steps
        ends = {
            "seconds": config.max_time,
            "rounds": config.max_rounds,
            "updates": 0 if config.max_rounds else config.planned_updates,
        }
        end = ends.get(schedule.unit, 0)
        if not end:
            return
        # The last update counts, but the end in time is exclusive.
        last = end - (1 if schedule.unit != "seconds" else 1e-6)
        count = int(last)
        met = 1 + schedule.step(last, count, count, count)
        if met < steps:
            raise UserError(
                f"The stream has {steps} steps, and drift-at lets this run of {end:g} "
                f"{schedule.unit} meet {met} of them: take fewer stream-steps, a longer run or "
                "another drift-at."
            )

    def check(self) -> None:
        """Raise UserError if there are not two concepts, or too few samples for the steps."""
        self.needs_labels()
        config, dataset = self.dealt.config, self.dealt.dataset
        if self._scenario.groups < _CONCEPTS:
            raise UserError("scenario s0 has one concept only: take s1, s2, a1 or a2.")
        if dataset.users is None and self.dealt.partition.groups[0] is not None:
            raise UserError(
                f"drift scenario-stream makes the two concepts itself, and partition "
                f"{config.partition} makes groups: take partition iid or dirichlet."
            )
        self._scenario.check(dataset, config.dataset)
        for client in self.dealt.present:
            concepts = self._concepts(client)
            for part, least, kind in ((0, _TRAINING, "training"), (1, 1, "test")):
                own = self.dealt.indices(client)[part]
                for concept in range(_CONCEPTS):
                    steps, samples = self._share(own, concepts, concept)
                    if self._kept(len(samples) // len(steps), concept) < least:
                        raise UserError(
                            f"Client {client} has {plural(len(samples), f'{kind} sample')} for "
                            f"{len(steps)} steps of scenario {self.options.scenario}, concept "
                            f"{concept}, too few for {least} at each: take fewer clients or "
                            "stream-steps, or a larger scenario-little."
                        )

    def data(self, client: int, step: int) -> ClientData:
        """Return the samples of a step in the view of its concept."""
        concepts = self._concepts(client)
        position = step % len(concepts)
        concept = int(concepts[position])
        train, test = (
            self._of_step(client, own, concepts, position, part)
            for part, own in zip(("train", "test"), self.dealt.indices(client), strict=True)
        )
        dataset, scenario = self.dealt.dataset, self._scenario
        return ClientData(
            scenario.inputs(dataset, train, concept),
            scenario.labels(dataset.y[train], concept, dataset.num_classes),
            scenario.inputs(dataset, test, concept),
            scenario.labels(dataset.y[test], concept, dataset.num_classes),
            group=concept,
        )

    def fewest(self, client: int) -> int:
        """Return the fewest training samples of a client at any step."""
        own, concepts = self.dealt.indices(client)[0], self._concepts(client)
        shares = (self._share(own, concepts, concept) for concept in range(_CONCEPTS))
        sizes = (len(samples) // len(steps) for steps, samples in shares)
        return min(self._kept(size, concept) for concept, size in enumerate(sizes))

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the concept of every client."""
        steps = self.options.stream_steps
        return tuple(int(self._concepts(c)[step % steps]) for c in range(self.dealt.clients))

    @cached_property
    def _scenario(self) -> Scenario:
        return Scenario(self.options, self.seed)

    def _concepts(self, client: int) -> Indices:
        """Draw the concept of each of a client's steps, shape (steps,); both occur."""
        alike = self.options.stream_mode == "sequential"
        rng = self.rng("concepts of steps", 0 if alike else 1 + client)
        while True:
            drawn: Indices = rng.integers(_CONCEPTS, size=self.options.stream_steps)
            if len(np.unique(drawn)) == _CONCEPTS:
                return drawn

    def _share(self, own: Indices, concepts: Indices, concept: int) -> tuple[Indices, Indices]:
        """Return the steps that share a concept's samples, and these samples."""
        if not self._scenario.divides_classes:
            return np.arange(len(concepts)), own
        dataset = self.dealt.dataset
        kinds = self._scenario.classes(np.arange(dataset.num_classes), concept)
        return np.flatnonzero(concepts == concept), own[np.isin(dataset.y[own], kinds)]

    def _of_step(
        self, client: int, own: Indices, concepts: Indices, position: int, part: str
    ) -> Indices:
        """Return a client's samples of a step, ascending."""
        concept = int(concepts[position])
        steps, samples = self._share(own, concepts, concept)
        order = self.rng(f"samples of steps: {part}", client).permutation(samples)
        share = np.array_split(order, len(steps))[int(np.searchsorted(steps, position))]
        return np.sort(share[: self._kept(len(share), concept)])

    def _kept(self, count: int, concept: int) -> int:
        """Return the number of a step's samples if its concept has few."""
        return round(count * self._scenario.size(concept))


# -----------------------------------------------------------------------------
# Drift: generators by name, and schedules of the steps of clients' data.
# -----------------------------------------------------------------------------


def drift_type(config: RunConfig) -> type[Drift]:
    """Return the generator that a configuration names.

    Raises
    ------
    UserError
        There is no such drift.
    """
    chosen: type[Drift] = DRIFTS[config.drift]
    return chosen


def drift_of(config: RunConfig, dealt: Dealt) -> Drift:
    """Return the drift of a run with its options.

    Raises
    ------
    UserError
        There is no such drift, or an option is out of its range.
    """
    declared = drift_type(config).options_type
    options = None if declared is None else config.read(declared)
    drift: Drift = DRIFTS.make(config.drift, dealt, options)
    return drift


def schedule_of(config: RunConfig) -> Schedule | None:
    """Return the schedule of a run's drift; None without drift.

    Parameters
    ----------
    config : RunConfig
        Configuration with the number of clients; without ``drift-at`` the drift's default applies.

    Raises
    ------
    UserError
        There is no such drift, or ``drift-at`` is invalid or unsuitable.
    """
    chosen = drift_type(config)
    if chosen.options_type is None:
        return None
    at = config.read(chosen.options_type).drift_at
    schedule = parse_schedule(chosen.default_schedule(config) if at is None else at)
    chosen.check_schedule(config, schedule)
    return schedule
