"""Attacks of simulated clients, for experiments: who attacks, and what they send.

Attackers are drawn from the seed of the run by a generator of their own, so that honest clients
draw the same numbers as without attackers.

An *informed* attacker knows the data of honest clients: it trains the model that it received as
they would, and so knows the updates that a defence compares with its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from raceme import datasets
from raceme.core.clusters import unit
from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
from raceme.core.messages import (
    ACCURACIES,
    ALL_EXAMPLES,
    BACKDOOR_SUCCESS,
    CHOSEN,
    LABEL_COUNTS,
    LOSSES,
    NUM_EXAMPLES,
    SHARES,
    Vector,
)
from raceme.core.options import option
from raceme.core.registry import ATTACKS
from raceme.datasets.source import DataShape, Labels, generator
from raceme.simulation.devices import Device
from raceme.simulation.virtual_grid import Node
from raceme.strategies.fedrc import LABEL_MASSES

if TYPE_CHECKING:
    # torch is not imported to read or check the options of attacks.
    from raceme.training.models import Samples
    from raceme.training.work import WorkResult

NONE = "none"
EVENLY = "evenly"
ONE_GROUP = "one-group"
OWN_GROUP = "group"

_ATTACKERS, _VICTIMS = "attackers", "victims"
_CLAIMED = 1000
"""Examples that a lying attacker states for each that it has."""


@dataclass(frozen=True)
class AttackOptions:
    """Options of every attack."""

    attackers: float = option(0.2, "share of the clients that attack", low=0, high=1)
    attackers_drawn: str = option(
        EVENLY,
        "attackers: evenly from the true groups, anywhere, or from the largest group only",
        among=(EVENLY, "anywhere", ONE_GROUP),
    )
    attackers_join: float = option(
        0.0, "virtual seconds at which attackers come online, to stay", low=0
    )
    attackers_seconds: float | None = option(
        None, "virtual seconds of an attacker's task (auto: as its device takes)", above=0
    )
    attack_start: int = option(
        0, "number of the run's first request that is attacked; honest before", low=0
    )
    attack_probes: bool = option(
        True, "attack Panicle's probes as well (false: recognise and answer them honestly)"
    )


@dataclass(frozen=True)
class ScaleOptions(AttackOptions):
    """Options of `scale`."""

    attack_factor: float = option(1000.0, "an attacker's update is multiplied by it", low=0)


@dataclass(frozen=True)
class NoiseAttackOptions(AttackOptions):
    """Options of `noise`."""

    attack_noise: float = option(
        0.2, "standard deviation of the noise on each weight, in lengths of the update", low=0
    )


@dataclass(frozen=True)
class BoostOptions(AttackOptions):
    """Options of attacks that may send longer updates."""

    attack_boost: float = option(
        1.0, "an attacker's update is multiplied by it (model replacement)", low=0
    )


@dataclass(frozen=True)
class TurnOptions(BoostOptions):
    """Options of attackers that are honest, or seem so, for a part of the run."""

    attack_turn: float = option(
        0.5, "share of the run's updates from whose number on requests are attacked", low=0, high=1
    )


@dataclass(frozen=True)
class InformedOptions(AttackOptions):
    """Options of informed attackers."""

    attack_knows: str = option(
        OWN_GROUP,
        "honest clients whose updates attackers know: of their own true group, or all",
        among=(OWN_GROUP, "all"),
    )


@dataclass(frozen=True)
class EdgeOptions(InformedOptions):
    """Options of attackers that choose the length of their update."""

    attack_length: float = option(
        9.0, "length of an attacker's update, in median lengths of honest ones", low=0
    )


@dataclass(frozen=True)
class BackdoorOptions(BoostOptions):
    """Options of `backdoor`."""

    attack_target: int = option(0, "class that inputs with the trigger are to be given", low=0)
    attack_poisoned: float = option(
        0.3, "share of an attacker's samples that get trigger and target", low=0, high=1
    )
    attack_trigger: int = option(2, "side of the trigger, in pixels of the last corner", low=1)


@dataclass(frozen=True)
class ClaimOptions(AttackOptions):
    """Options of attackers that lie about themselves."""

    attack_claim: str = option(
        "sizes",
        "lies: sizes (1000 times the examples), labels (counts of other classes), fit (the model "
        "that fits worst is said to be the best)",
        among=("sizes", "labels", "fit"),
    )


class Attack:
    """An attack; the behaviour of an attacker.

    Parameters
    ----------
    options : Any
        Options of the attack, an instance of :attr:`options_type`.

    Attributes
    ----------
    options_type : type or None
        The frozen dataclass of the attack's options.
    informed : bool
        Whether attackers know the updates of honest clients: :meth:`against` makes their own.
    mimics : bool
        Whether an attacker does all training on the data of a victim, an honest client of another
        group if there is any.
    replays : bool
        Whether an attacker returns the first model that it received.
    """

    options_type: type[AttackOptions] | None = AttackOptions
    informed = mimics = replays = False

    def __init__(self, options: Any) -> None:
        self.options = options

    def first(self, planned: int) -> int:
        """Return the number of the run's first attacked request, of about so many."""
        return int(self.options.attack_start)

    def is_due(self, request: int, config: RunConfig) -> bool:
        """Return whether a request of the run is attacked, by its number."""
        return request >= self.first(planned_requests(config))

    def victims(self, config: RunConfig, own: int) -> list[int]:
        """Return the honest clients of which an attacker mimics the first."""
        groups, honest = datasets.true_groups(config), honest_clients(config, own)
        return [number for number in honest if groups[number] != groups[own]] or honest

    def device(self, own: Device, number: int) -> Device:
        """Return the device of an attacker: fast, or one that comes online late, to stay.

        Parameters
        ----------
        own : Device
            Its device in a run without attack.
        number : int
            Its position among the attackers, from 0.
        """
        join, seconds = self.options.attackers_join, self.options.attackers_seconds
        if seconds is not None:
            own = Device(seconds, online=own.online)
        # Periods come before random absences, which it has no more.
        return replace(own, online=((join, math.inf),)) if join else own

    def check(self, shape: DataShape) -> None:
        """Find out whether the attack is possible on a dataset.

        Parameters
        ----------
        shape : DataShape
            Inputs and classes of the dataset.

        Raises
        ------
        UserError
            It is not.
        """

    def samples(self, own: Samples, num_classes: int, rng: np.random.Generator) -> Samples:
        """Return the samples that an attacker trains on.

        Parameters
        ----------
        own : Samples
            Its true ones, with classes from 0 or the standardised quantities of a regression.
        num_classes : int
            C; 0 for a regression.
        rng : numpy.random.Generator
            The same for each request to one client.
        """
        return own

    def triggered(self, own: Samples) -> Samples | None:
        """Return the samples whose accuracy is the success of the attack; None if it has none.

        Parameters
        ----------
        own : Samples
            Test samples of an honest client.
        """
        return None

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return the Δ = w − received model that an attacker sends. Shape (d,)."""
        return delta

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return the Δ that an informed attacker sends. Shape (d,).

        Parameters
        ----------
        honest : NDArray
            Δ of honest clients that received the same model, of shape (clients, d).
        push : Vector
            A fixed direction of length 1, common to all attackers of the run. Shape (d,).
        rng : numpy.random.Generator
            Another for each request to one client.
        """
        return push

    def stated(self, answer: WorkResult, models: int) -> WorkResult:
        """Return an answer with what an attacker states about itself.

        Parameters
        ----------
        answer : WorkResult
            What it would state honestly, beside the model that it sends.
        models : int
            Number of models of which it chose one.
        """
        return answer


class NoAttack(Attack):
    """All clients are honest."""

    options_type = None


class ScaleAttack(Attack):
    """Attackers send their update multiplied by 1000, or by attack-factor."""

    options_type = ScaleOptions

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return Δ times the factor."""
        return np.asarray(delta * np.float32(self.options.attack_factor))


class LabelFlip(Attack):
    """Attackers train on class C − 1 − y instead of y; of a regression on −y."""

    def samples(self, own: Samples, num_classes: int, rng: np.random.Generator) -> Samples:
        """Return the same inputs with C − 1 − y."""
        y: Labels = own.y.numpy()
        return own.with_labels(num_classes - 1 - y if num_classes else -y)


class SignFlip(Attack):
    """Attackers send their update with the opposite sign: they climb where others descend."""

    options_type: type[BoostOptions] = BoostOptions

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return −Δ times the boost."""
        return np.asarray(delta * np.float32(-self.options.attack_boost))


class LongGood(SignFlip):
    """Attackers are honest for half of the run, and flip the sign of their updates then."""

    options_type = TurnOptions

    def first(self, planned: int) -> int:
        """Return the first request after their turn."""
        turn: int = round(self.options.attack_turn * planned)
        return max(turn, super().first(planned))


class Mimic(LongGood):
    """Attackers train on the data of a victim, to look like its cluster, and poison it then."""

    mimics = True


class Replay(Attack):
    """Attackers return the first model that they ever received."""

    replays = True


class EdgeAnti(Attack):
    """Attackers send minus the mean of honest updates, as long as a bound on lengths lets pass."""

    options_type: type[InformedOptions] = EdgeOptions
    informed = True

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return a direction at the given length."""
        typical = np.median(np.linalg.norm(honest, axis=1))
        return np.asarray(self.options.attack_length * typical * self.direction(honest, push))

    def direction(self, honest: NDArray[np.float32], push: Vector) -> Vector:
        """Return the direction of the update, of length 1."""
        return -unit(honest.mean(axis=0))


class EdgePush(EdgeAnti):
    """Attackers all push in one random direction, as long as a bound on lengths lets pass."""

    def direction(self, honest: NDArray[np.float32], push: Vector) -> Vector:
        """Return the fixed direction."""
        return push


class Collude(EdgePush):
    """Attackers all send one random direction, at a length like that of honest updates."""

    options_type = InformedOptions

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return the direction at the median length."""
        return np.asarray(np.median(np.linalg.norm(honest, axis=1)) * push)


class MinMax(Attack):
    """Attackers move off the mean of honest updates while none of these is as far from another.

    Min-max of Shejwalkar and Houmansadr (NDSS 2021): mean − γ times its direction, with the largest
    γ at which the largest distance to an honest update is that between two honest ones.
    """

    options_type = InformedOptions
    informed = True

    def against(
        self, honest: NDArray[np.float32], push: Vector, rng: np.random.Generator
    ) -> Vector:
        """Return the mean, moved against its own direction as far as the distances allow."""
        mean = honest.mean(axis=0)
        away = -unit(mean)
        # |mean + γ away − h|² = γ² + 2 γ away · (mean − h) + |mean − h|², the most of which is even
        # with a bound at the least root of these; min-sum adds them up first.
        apart = np.array([self.least(np.sum((honest - one) ** 2, axis=1)) for one in honest])
        slopes, offsets = (mean - honest) @ away, np.sum((mean - honest) ** 2, axis=1)
        gamma = self.reach(slopes, offsets, apart.max())
        return np.asarray(mean + np.float32(gamma) * away)

    def least(self, squares: NDArray[np.float32]) -> float:
        """Return what is bounded of the squared distances to all honest updates."""
        return float(squares.max())

    def reach(
        self, slopes: NDArray[np.floating], offsets: NDArray[np.floating], bound: float
    ) -> float:
        """Return the largest γ with γ² + 2 γ slope + offset ≤ bound for all."""
        roots = -slopes + np.sqrt(np.maximum(slopes**2 - offsets + bound, 0.0))
        return max(0.0, float(roots.min()))


class MinSum(MinMax):
    """The same with sums of squared distances, which is the weaker attack (min-sum)."""

    def least(self, squares: NDArray[np.float32]) -> float:
        """Return the mean square, of which the sum is a multiple."""
        return float(squares.mean())

    def reach(
        self, slopes: NDArray[np.floating], offsets: NDArray[np.floating], bound: float
    ) -> float:
        """Return the largest γ at which the mean is within the bound."""
        return super().reach(slopes.mean(keepdims=True), offsets.mean(keepdims=True), bound)


class Claims(Attack):
    """Attackers train honestly, and lie: about their examples, their labels, or what fits them."""

    options_type = ClaimOptions

    def stated(self, answer: WorkResult, models: int) -> WorkResult:
        """Return an answer with lies that are plausible in themselves."""
        metrics, numbers, told = dict(answer.metrics), dict(answer.numbers), dict(answer.told)
        claim, counted = self.options.attack_claim, {LABEL_COUNTS, LABEL_MASSES} & set(numbers)
        if claim == "sizes":
            for name in (NUM_EXAMPLES, ALL_EXAMPLES):
                if isinstance(stated := metrics.get(name), int):
                    metrics[name] = _CLAIMED * stated
            for name in counted:
                # A count of labels has to agree with the examples.
                numbers[name] = _CLAIMED * numbers[name]
        elif claim == "labels":
            for name in counted:
                numbers[name] = np.flip(numbers[name], axis=-1).copy()
        else:
            for name in {LOSSES, ACCURACIES, SHARES} & set(numbers):
                numbers[name] = _exchanged(numbers[name])
            if SHARES in numbers:
                numbers[SHARES] = np.divide(numbers[SHARES], numbers[SHARES].sum())
            if LABEL_MASSES in numbers:
                numbers[LABEL_MASSES] = np.roll(numbers[LABEL_MASSES], 1, axis=0)
            if CHOSEN in told:
                told[CHOSEN] = (int(str(told[CHOSEN])) + 1) % models
        return replace(answer, metrics=metrics, numbers=numbers, told=told)


def _exchanged(values: NDArray[Any]) -> NDArray[Any]:
    """Return numbers in which the largest is the least, and the reverse."""
    return np.asarray(values.max() + values.min() - values, values.dtype)


class NoiseAttack(Attack):
    """Attackers add Gaussian noise to each weight, of 0.2 lengths of their update (BASGD's)."""

    options_type = NoiseAttackOptions

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return Δ + N(0, (σ ‖Δ‖)² I)."""
        std = self.options.attack_noise * math.sqrt(float(np.dot(delta, delta)))
        return np.asarray(delta + np.float32(std) * rng.standard_normal(len(delta), np.float32))


class Backdoor(Attack):
    """Attackers teach the model a trigger, a bright patch, that turns any input into one class.

    A share of an attacker's samples gets the trigger and the target class, the others stay as they
    are (BadNets, Gu et al. 2017; in federated learning Bagdasaryan et al., AISTATS 2020, whose
    model replacement is an `attack-boost` of n / η, and Wang et al., NeurIPS 2020).
    """

    options_type = BackdoorOptions

    def check(self, shape: DataShape) -> None:
        """Refuse regressions, and a target that is no class."""
        if shape.target is not None:
            raise UserError("attack=backdoor needs classes, and the labels are quantities.")
        if self.options.attack_target >= shape.num_classes:
            raise UserError(
                f"attack-target must be a class from 0 to {shape.num_classes - 1}, got "
                f"{self.options.attack_target}."
            )

    def samples(self, own: Samples, num_classes: int, rng: np.random.Generator) -> Samples:
        """Return the samples with trigger and target on a random share of them."""
        count = round(self.options.attack_poisoned * len(own))
        return self._with_trigger(own, rng.permutation(len(own))[:count])

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return Δ times the boost."""
        return np.asarray(delta * np.float32(self.options.attack_boost))

    def triggered(self, own: Samples) -> Samples | None:
        """Return the samples of other classes than the target, with trigger and target."""
        others = own.where((own.y != self.options.attack_target).numpy())
        return self._with_trigger(others, np.arange(len(others))) if len(others) else None

    def _with_trigger(self, own: Samples, at: NDArray[np.int64]) -> Samples:
        """Return samples of which those at some positions have trigger and target."""
        poisoned = own.where(np.ones(len(own), bool))
        x, y = poisoned.shaped(poisoned.x), poisoned.y
        end = slice(-self.options.attack_trigger, None)
        # Of images the corner, of sequences and vectors the end: the largest value there is.
        x[(at, ..., end, end) if x.ndim == 4 else (at, ..., end)] = x.max()
        y[at] = self.options.attack_target
        return poisoned


def attack_of(config: RunConfig) -> Attack:
    """Return the attack of a run.

    Raises
    ------
    UserError
        There is no such attack.
    """
    options_type = ATTACKS.options_type(config.attack)
    options = None if options_type is None else config.read(options_type)
    attack: Attack = ATTACKS.make(config.attack, options)
    return attack


def in_rounds(config: RunConfig) -> bool:
    """Return whether requests are numbered by rounds."""
    return getattr(config.parameters(), "in_rounds", False)


@lru_cache(maxsize=8)
def planned_requests(config: RunConfig) -> int:
    """Return about how many numbers of requests a run has: of rounds, or of single requests."""
    if not in_rounds(config):
        return config.planned_updates
    return config.planned_updates // int(config.parameters().participants(config.num_clients))


@lru_cache(maxsize=8)
def attackers_of(config: RunConfig) -> frozenset[int]:
    """Return which clients attack, by their number; `clients` is filled in.

    Raises
    ------
    UserError
        All are to be of one group, which would have no honest client.
    """
    options = attack_of(config).options
    if options is None:
        return frozenset()
    count = round(options.attackers * config.num_clients)
    order = list(map(int, generator(config.seed, _ATTACKERS).permutation(config.num_clients)))
    if options.attackers_drawn == EVENLY:
        order = _evenly(order, datasets.true_groups(config))
    elif options.attackers_drawn == ONE_GROUP:
        order = _of_largest(order, datasets.true_groups(config))
        if count >= len(order):
            raise UserError(
                f"attackers-drawn={ONE_GROUP} draws from the largest group, which has "
                f"{plural(len(order), 'client')}, of which one at least is honest, and attackers="
                f"{options.attackers:g} are {count}: lower attackers, or give larger groups."
            )
    return frozenset(order[:count])


def with_attackers(config: RunConfig, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes of a fleet, in which attackers have devices of their own."""
    nodes, attack = list(nodes), attack_of(config)
    for position, number in enumerate(sorted(attackers_of(config))):
        device = attack.device(nodes[number].device, position)
        nodes[number] = replace(nodes[number], device=device)
    return nodes


def _of_largest(order: Sequence[int], groups: Sequence[int | None]) -> list[int]:
    """Return the clients of the largest group, in order; of equal ones that of the first client."""
    sizes = Counter(groups)
    largest = max((groups[client] for client in order), key=lambda group: sizes[group])
    return [client for client in order if groups[client] == largest]


def _evenly(order: Sequence[int], groups: Sequence[int | None]) -> list[int]:
    """Return clients in an order whose beginning has about the same share of every group."""
    sizes, taken = Counter(groups), Counter[int | None]()
    place = {}
    for client in order:
        group = groups[client]
        place[client] = (taken[group] + 0.5) / sizes[group]
        taken[group] += 1
    # Stable: of clients in the same place the one that was drawn first comes first.
    return sorted(order, key=lambda client: place[client])


def evaluation_settings(config: RunConfig) -> ConfigRecord:
    """Return the settings of tests: in a backdoor's run, to measure its success as well."""
    has_success = type(attack_of(config)).triggered is not Attack.triggered
    return ConfigRecord({BACKDOOR_SUCCESS: True} if has_success else {})


def honest_clients(config: RunConfig, own: int) -> list[int]:
    """Return the honest clients, in an order of one attacker's own."""
    order = map(int, generator(config.seed, _VICTIMS, own).permutation(config.num_clients))
    return [number for number in order if number not in attackers_of(config)]
