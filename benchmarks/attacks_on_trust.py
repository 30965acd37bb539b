"""Attacks tuned to ``protection=trust``: they stay within its bounds, or look honest.

From the root of the repository::

    raceme run --protection trust --attack benchmarks.attacks_on_trust:HiddenPush

``informed_attacks.toml`` compares methods under them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.messages import Vector
from raceme.simulation import Device
from raceme.simulation.attacks import Collude, LabelFlip, SignFlip, attackers_of, in_rounds
from raceme.training.models import Samples

_LENGTH = 2.0
"""Length that ``protection=trust`` permits, in median lengths of honest updates."""
_JUST_BELOW = 1.95
"""A length just below it."""
_AT_A_TIME = 4
"""Number of attackers of `sybils` that are online at a time."""
_VISIT = 6.0
"""Time that each of them stays, in tasks: with own models it makes two updates."""


def one_to_four(clients: int, seed: int) -> list[Device]:
    """Return devices that take 1 to 4 s for a task."""
    rng = np.random.default_rng([seed, 0x1204])
    return [Device(seconds_per_round=float(rng.uniform(1.0, 4.0))) for _ in range(clients)]


class HiddenPush(Collude):
    """Attackers push in one direction, each with its own noise, so that all updates differ."""

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return the direction with noise, at twice the median length."""
        noise = _unit(rng.standard_normal(len(push), np.float32))
        length = _LENGTH * np.median(np.linalg.norm(honest, axis=1))
        return np.asarray(length * _unit(self.hidden(honest, push) + np.float32(0.3) * noise))

    def hidden(self, honest: NDArray[np.float32], push: Vector) -> Vector:
        """Return the direction that is hidden, of length 1."""
        return push


class HiddenAnti(HiddenPush):
    """Attackers push against honest updates, as far as the defence permits.

    The cosine with the mean is just above the one at which an update counts as contradicted.
    """

    def hidden(self, honest: NDArray[np.float32], push: Vector) -> Vector:
        """Return the common direction, turned against the mean of the honest updates."""
        mean = _unit(honest.mean(axis=0))
        aside = _unit(push - np.float32(push @ mean) * mean)
        return np.asarray(np.float32(0.93) * aside - np.float32(0.37) * mean)


class HiddenGain(HiddenPush):
    """Attackers help an honest client of their group, and push against all others.

    With samples on the server, the defence requires a gain on one of the server's sets.
    """

    def hidden(self, honest: NDArray[np.float32], push: Vector) -> Vector:
        """Return the mates' direction, minus the part of the mean that is orthogonal to it."""
        own, mean = _unit(honest[0]), honest.mean(axis=0)
        return _unit(own - _unit(mean - np.float32(mean @ own) * own))


class Rush(HiddenPush):
    """Fast attackers push against the mean of honest updates, below the bound on lengths."""

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return minus the mean with noise, at 1.95 median lengths."""
        noise = _unit(rng.standard_normal(len(push), np.float32))
        length = _JUST_BELOW * np.median(np.linalg.norm(honest, axis=1))
        return np.asarray(length * _unit(np.float32(0.2) * noise - _unit(honest.mean(axis=0))))


class Sybils(Rush):
    """Attackers join four at a time, and each leaves before its third update."""

    def device(self, own: Device, number: int) -> Device:
        """Return the device, with consecutive periods for each group of four attackers."""
        own, stay = super().device(own, number), _VISIT * self.options.attackers_seconds
        begin = number // _AT_A_TIME * stay
        return replace(own, online=((begin, begin + stay),))


class Boil(LabelFlip):
    """Attackers train on permuted labels, and send updates just below the bound on lengths."""

    def samples(self, own: Samples, num_classes: int, rng: np.random.Generator) -> Samples:
        """Return the same inputs with the next class."""
        return own.with_labels((own.y.numpy() + 1) % num_classes)

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return 1.95 Δ."""
        return np.asarray(np.float32(_JUST_BELOW) * delta)


class Wedge(HiddenPush):
    """Attackers send the mean of all honest updates, to appear between two groups."""

    def hidden(self, honest: NDArray[np.float32], push: Vector) -> Vector:
        """Return the mean direction."""
        return _unit(honest.mean(axis=0))


class Split(HiddenPush):
    """Attackers amplify a difference among honest clients, so that CASA splits a group.

    The honest clients are halved by their side of a direction. Each attacker sends the mean of one
    half minus the mean of the other: two sets of updates that oppose each other.
    """

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return the difference of the halves, with a random sign, at 1.95 median lengths."""
        leaning = np.argsort(honest @ push)
        half = len(leaning) // 2
        apart = honest[leaning[half:]].mean(axis=0) - honest[leaning[:half]].mean(axis=0)
        side = np.float32(rng.choice((-1.0, 1.0)))
        length = _JUST_BELOW * np.median(np.linalg.norm(honest, axis=1))
        return np.asarray(length * side * _unit(apart))


class Pulse(SignFlip):
    """Attackers flip the sign of every third update only, to keep a good reputation."""

    def is_due(self, request: int, config: RunConfig) -> bool:
        """Return whether about two updates for each client have passed since the last time."""
        of_each = request if in_rounds(config) else request // config.num_clients
        return of_each % 3 == 2 and super().is_due(request, config)


class FalseGroup(LabelFlip):
    """Attackers train on the samples of one group with flipped labels, to form their own group."""

    mimics = True

    def victims(self, config: RunConfig, own: int) -> list[int]:
        """Return the largest group's honest clients, starting with another one per attacker."""
        groups, attackers = datasets.true_groups(config), attackers_of(config)
        honest = [number for number in range(config.num_clients) if number not in attackers]
        sizes = Counter(groups)
        # Among groups of equal size, the first client's wins.
        largest = max((groups[number] for number in honest), key=lambda group: sizes[group])
        order = [number for number in honest if groups[number] == largest]
        at = sorted(attackers).index(own) % len(order)
        return order[at:] + order[:at]


def _unit(vector: Vector) -> Vector:
    """Scale a vector to length 1; zeros stay."""
    return np.asarray(vector / np.float32(np.linalg.norm(vector) or 1.0))
