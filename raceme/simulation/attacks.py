"""Attacks of simulated clients, for experiments: the attackers, and what they do to updates.

Only the simulator reads this. Attackers are drawn from the seed of the run by a generator of their
own, so that the honest clients of an attacked run draw what they draw without attackers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any
from zlib import crc32

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from raceme import client_app, datasets
from raceme.core.config import RunConfig
from raceme.core.messages import ARRAYS, CHOSEN, TASK, ModelSpec, Role, Vector, candidate
from raceme.core.options import option
from raceme.core.registry import ATTACKS
from raceme.datasets.source import Labels, generator
from raceme.training.clients import Client
from raceme.training.work import Answer, ClientWork, answer_to

NONE = "none"
EVENLY = "evenly"

_ATTACKERS = "attackers"


@dataclass(frozen=True)
class AttackOptions:
    """What every attack reads."""

    attackers: float = option(0.2, "share of the clients that attack", low=0, high=1)
    attackers_drawn: str = option(
        EVENLY, "attackers: evenly from the true groups, or anywhere", among=(EVENLY, "anywhere")
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

    def labels(self, y: Labels, num_classes: int) -> Labels:
        """Return the labels that an attacker trains on, given the true ones.

        Parameters
        ----------
        y : Labels
            Classes from 0, or the standardised quantities of a regression. Shape (n,).
        num_classes : int
            C; 0 for a regression.
        """
        return y

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

    def labels(self, y: Labels, num_classes: int) -> Labels:
        """Return C − 1 − y."""
        return num_classes - 1 - y if num_classes else -y


class Noise(Attack):
    """Attackers add Gaussian noise to each weight, of 0.2 lengths of their update (BASGD's)."""

    options_type = NoiseOptions

    def update(self, delta: Vector, rng: np.random.Generator) -> Vector:
        """Return Δ + N(0, (σ ‖Δ‖)² I)."""
        std = self.options.attack_noise * math.sqrt(float(np.dot(delta, delta)))
        return np.asarray(delta + np.float32(std) * rng.standard_normal(len(delta), np.float32))


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
    """Return which clients attack, by their number; `clients` is filled in."""
    options = attack_of(config).options
    if options is None:
        return frozenset()
    count = round(options.attackers * config.num_clients)
    order = list(map(int, generator(config.seed, _ATTACKERS).permutation(config.num_clients)))
    if options.attackers_drawn == EVENLY:
        order = _evenly(order, datasets.true_groups(config))
    return frozenset(order[:count])


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
        parts = {
            name: samples.with_labels(attack.labels(samples.y.numpy(), client.num_classes))
            for name in ("train", "validation")
            if (samples := getattr(client, name)) is not None
        }
        return replace(client, **parts, _divided={})

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
