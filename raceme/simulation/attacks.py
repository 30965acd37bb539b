"""Attacks of simulated clients, for experiments: the attackers, and what they do to updates.

Only the simulator reads this. Attackers are drawn from the seed of the run by a generator of their
own, so that the honest clients of an attacked run draw what they draw without attackers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean
from typing import Any
from zlib import crc32

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from raceme import client_app, datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import ARRAYS, CHOSEN, ROUND, TASK, ModelSpec, Role, Vector, candidate
from raceme.core.options import option
from raceme.core.registry import ATTACKS
from raceme.datasets.source import DataShape, Labels, generator
from raceme.simulation.virtual_grid import Node
from raceme.training.clients import Client, ModelProbe, network_of
from raceme.training.models import Samples
from raceme.training.work import Answer, ClientWork, answer_to

NONE = "none"
EVENLY = "evenly"
ONE_GROUP = "one-group"

_ATTACKERS, _POISONED = "attackers", "poisoned"


@dataclass(frozen=True)
class AttackOptions:
    """What every attack reads."""

    attackers: float = option(0.2, "share of the clients that attack", low=0, high=1)
    attackers_drawn: str = option(
        EVENLY,
        "attackers: evenly from the true groups, anywhere, or from the largest group only",
        among=(EVENLY, "anywhere", ONE_GROUP),
    )
    attackers_join: float = option(
        0.0, "virtual seconds at which attackers come online, to stay", low=0
    )
    attack_start: int = option(
        0, "number of the run's first request that is attacked; honest before", low=0
    )


@dataclass(frozen=True)
class ScaleOptions(AttackOptions):
    """What the scaling of updates reads."""

    attack_factor: float = option(1000.0, "an attacker's update is multiplied by it", low=0)


@dataclass(frozen=True)
class NoiseOptions(AttackOptions):
    """What the noise on updates reads."""

    attack_noise: float = option(
        0.2, "standard deviation of the noise on each weight, in lengths of the update", low=0
    )


@dataclass(frozen=True)
class BackdoorOptions(AttackOptions):
    """What a backdoor reads."""

    attack_target: int = option(0, "class that inputs with the trigger are to be given", low=0)
    attack_poisoned: float = option(
        0.3, "share of an attacker's samples that get trigger and target", low=0, high=1
    )
    attack_trigger: int = option(2, "side of the trigger, in pixels of the last corner", low=1)
    attack_boost: float = option(
        1.0, "an attacker's update is multiplied by it (model replacement)", low=0
    )


class Attack:
    """What a client does that attacks. An attack is a subclass.

    Parameters
    ----------
    options : Any
        Options of the attack, an instance of :attr:`options_type`.

    Attributes
    ----------
    options_type : type or None
        The frozen dataclass of the attack's options.
    """

    options_type: type[AttackOptions] | None = AttackOptions

    def __init__(self, options: Any) -> None:
        self.options = options

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
        """Return what an attacker sends as Δ = w − the model that it received. Shape (d,)."""
        return delta


class NoAttack(Attack):
    """All clients are honest."""

    options_type = None


class Scale(Attack):
    """Attackers send their update multiplied by 1000, or by attack-factor."""

    options_type = ScaleOptions

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return Δ times the factor."""
        return np.asarray(delta * np.float32(self.options.attack_factor))


class SignFlip(Attack):
    """Attackers send their update with the opposite sign: they climb where others descend."""

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return −Δ."""
        return np.asarray(-delta)


class LabelFlip(Attack):
    """Attackers train on class C − 1 − y instead of y; of a regression on −y."""

    def samples(self, own: Samples, num_classes: int, rng: np.random.Generator) -> Samples:
        """Return the same inputs with C − 1 − y."""
        y: Labels = own.y.numpy()
        return own.with_labels(num_classes - 1 - y if num_classes else -y)


class Noise(Attack):
    """Attackers add Gaussian noise to each weight, of 0.2 lengths of their update (BASGD's)."""

    options_type = NoiseOptions

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
        return self._with_trigger(own, torch.from_numpy(rng.permutation(len(own))[:count]))

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return Δ times the boost."""
        return np.asarray(delta * np.float32(self.options.attack_boost))

    def triggered(self, own: Samples) -> Samples | None:
        """Return the samples of other classes than the target, with trigger and target."""
        others = own.where((own.y != self.options.attack_target).numpy())
        return self._with_trigger(others, torch.arange(len(others))) if len(others) else None

    def _with_trigger(self, own: Samples, at: torch.Tensor) -> Samples:
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
                f"{len(order)} clients, of which one at least is honest, and attackers="
                f"{options.attackers:g} are {count}: lower attackers, or give larger groups."
            )
    return frozenset(order[:count])


def with_late_attackers(config: RunConfig, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes of a fleet, in which attackers come online at `attackers-join`, to stay."""
    attackers, nodes = attackers_of(config), list(nodes)
    if not attackers or not (join := attack_of(config).options.attackers_join):
        return nodes
    for number in attackers:
        # Periods come before random absences, which it has no more.
        late = replace(nodes[number].device, online=((join, math.inf),))
        nodes[number] = replace(nodes[number], device=late)
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


# -----------------------------------------------------------------------------
# The ClientApp of a simulation in which some clients attack. Honest clients answer as in any other
# run, and an attacker's evaluation is honest too.
# -----------------------------------------------------------------------------


app = ClientApp()


def _respond(
    honestly: Callable[[Message, Context], Message], message: Message, context: Context
) -> Message:
    work = client_app.work_of(message, context)
    if int(context.node_config["partition-id"]) not in attackers_of(work.client.config):
        return honestly(message, context)
    attack = attack_of(work.client.config)
    if work.number(TASK, work.number(ROUND, 0)) < attack.options.attack_start:
        return honestly(message, context)
    work = _poisoned_work(work, attack)
    answer = answer_to(work)
    if answer.model is not None:
        answer = _poisoned_answer(work, answer, answer.model, attack)
    return client_app.reply_to(message, work, answer)


app.train()(partial(_respond, client_app.train))
app.evaluate()(partial(_respond, client_app.evaluate))
app.query()(partial(_respond, client_app.query))


def _poisoned_work(work: ClientWork, attack: Attack) -> ClientWork:
    """Return the work on the labels that an attacker trains on; it is tested on the true ones."""

    def poisoned(client: Client) -> Client:
        rng = generator(client.config.seed, _POISONED, crc32(client.id.encode()))
        train, kept = attack.samples(client.train, client.num_classes, rng), client.validation
        if kept is not None:
            kept = attack.samples(kept, client.num_classes, rng)
        return replace(client, train=train, validation=kept, _divided={})

    return replace(
        work,
        client=poisoned(work.client),
        at_step=lambda step: poisoned(work.at_step(step)),
        steps=tuple(map(poisoned, work.steps)),
    )


def _poisoned_answer(
    work: ClientWork, answer: Answer, model: ArrayRecord, attack: Attack
) -> Answer:
    """Return an answer whose model is what an attacker sends; counters stay as they are."""
    spec = ModelSpec.of(model)
    trained, received = spec.unpack(model), _received(work, answer.told, spec)
    rng = np.random.default_rng(
        [work.client.config.seed, crc32(work.client.id.encode()), int(work.number(TASK, 0)), 1]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        sent = received + attack.update(np.asarray(trained - received), rng)
    poisoned = spec.pack(sent.astype(np.float32))
    for name, role in zip(spec.names, spec.roles, strict=True):
        if role is Role.COUNTER:
            poisoned[name] = model[name]
    return replace(answer, model=poisoned)


def _received(work: ClientWork, told: Mapping[str, object], spec: ModelSpec) -> Vector:
    """Return the model that was trained: of several the chosen one, or else their mean."""
    records = work.arrays
    if ARRAYS in records:
        return spec.unpack(records[ARRAYS])
    if CHOSEN in told:
        return spec.unpack(records[candidate(int(str(told[CHOSEN])))])
    mean = np.mean([spec.unpack(model) for model in work.models], axis=0)
    return np.asarray(mean, np.float32)


# -----------------------------------------------------------------------------
# The success of a backdoor, measured beside the clients' tests.
# -----------------------------------------------------------------------------


_SUCCESS = MeasureSchema(
    "backdoor_success", "backdoor success", ("backdoor_success",), summary="column"
)
"""Share of triggered test samples that are classified as the target: the honest clients' mean."""


class SuccessTest:
    """Tests the honest clients' models on triggered samples of their own.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, with every key resolved.
    spec : ModelSpec
        What a model looks like.
    names : Sequence[str]
        Names of all clients, by their number.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec, names: Sequence[str]) -> None:
        attack, attackers, network = attack_of(config), attackers_of(config), network_of(config)
        self._places: dict[str, int] = {}
        tests: list[Samples] = []
        for number, name in enumerate(names):
            if number in attackers:
                continue
            data = datasets.client_data(config, number)
            own = Samples(data.x_test, data.y_test, network.channels_last)
            if (triggered := attack.triggered(own)) is not None:
                self._places[name] = len(tests)
                tests.append(triggered)
        self._probe = ModelProbe(network, spec, (), tests)

    def __call__(
        self, used: Iterable[tuple[str, Vector]], time: float, updates: int
    ) -> Measured | None:
        """Return the mean success in the models that clients use; None if none is of a client here.

        Parameters
        ----------
        used : Iterable[tuple[str, Vector]]
            Clients with the models that they use, each of shape (d,).
        time, updates : float, int
            The moment of the models.
        """
        found = [
            self._probe.accuracy(vector, self._places[client])
            for client, vector in used
            if client in self._places
        ]
        return Measured(time, updates, _SUCCESS, {_SUCCESS.value: fmean(found)}) if found else None
