"""What FAACL, C-FAACL and FAACL-Async have in common: what clients are asked, and what follows.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024; see
:mod:`raceme.strategies.faacl`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.model import Model
from raceme.clustering.support import Supported, fewest_samples
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.protocol.effort import forward_cost
from raceme.protocol.events import SupportChanged
from raceme.protocol.messages import (
    ARRAYS,
    COMPUTE_SCALE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    LOSSES,
    ON,
    VALIDATION_SHARE,
    Vector,
    kept_for_validation,
)
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, InvalidReplyError, Update
from raceme.server.work import Value, Work

log = logging.getLogger("raceme")

INIT, SUPPORT = "init", "support"
"""Phases, by which bytes are counted, beside training."""
START = 0
"""The cluster of θ, in which clients are until they have a model of their own."""


@dataclass(frozen=True)
class SupportParameters:
    """What FAACL, C-FAACL and FAACL-Async can be told in common."""

    epsilon: float = option(
        0.5, "ε: how much worse another model may be on a sample and still support", low=0
    )
    alpha: float = option(0.05, "α: level of Wilcoxon's test", above=0, below=1)
    init_epochs: int = option(5, "passes over its samples before a client is compared", low=1)


@dataclass
class SupportState:
    """What they know in common beside their models.

    Attributes
    ----------
    initial : Vector
        The θ from which every client starts. Shape (d,).
    cold : dict[str, bool]
        Clients that have no model of their own yet, or data that belong nowhere yet.
    supported : Supported
        Who supports whom, and who is compared with whom.
    """

    initial: Vector
    cold: dict[str, bool] = field(default_factory=dict)
    supported: Supported = field(default_factory=Supported)


# What a client is asked.


def greet(method: Method, state: SupportState, client: Client, alpha: float) -> None:
    """Note that a new client has to train θ; say so if it has too few samples for any test."""
    state.cold[client.client_id] = True
    needed = fewest_samples(alpha)
    kept = kept_for_validation(client.num_examples, validation_share(method))
    if client.num_examples and kept < needed:
        log.warning(
            "%s keeps %d samples for validation, and a test at level %g needs %d: no other model "
            "can support its cluster. Raise validation-share or alpha.",
            client.client_id,
            kept,
            alpha,
            needed,
        )


def validation_share(method: Method) -> float:
    """Return the share of its samples that a client keeps to compare models on."""
    share = method.train_config[VALIDATION_SHARE]
    assert isinstance(share, float), "start() sees to it"
    return share


def initial_training(method: Method, client: str, initial: Vector, epochs: int) -> Work:
    """Return the work of a client that has no model yet: it trains θ, Algorithm 1."""
    settings: dict[str, Value] = {LOCAL_STEPS: 0, LOCAL_EPOCHS: epochs}
    arrays = {ARRAYS: method.record_of(initial)}
    return Work(client, models=(), arrays=arrays, settings=settings, phase=INIT)


def comparison(method: Method, client: str, clusters: Sequence[int]) -> Work:
    """Return the work of a client that measures models on its validation samples."""
    examples = method.progress.fleet.clients[client].num_examples
    cost = validation_share(method) * forward_cost(method.train_config, examples, len(clusters))
    settings: dict[str, Value] = {ON: "validation", COMPUTE_SCALE: cost}
    return Work(client, LOSSES, models=tuple(clusters), settings=settings, phase=SUPPORT)


def trains(supported: Supported, cluster: int) -> list[int]:
    """Return what a cluster's clients train, Algorithm 4: its model, and those that it supports."""
    return [cluster, *supported.supported_by(cluster)]


def check_samples(samples: int, alpha: float) -> None:
    """Raise UserError if a client keeps too few samples for any test to be passed."""
    needed = fewest_samples(alpha)
    if samples < needed:
        raise UserError(
            f"A client keeps {samples} of its samples to compare models on, and a test at level "
            f"{alpha:g} needs {needed}: raise validation-share, or take fewer clients."
        )


# What becomes of the answers.


def losses_of(answer: Answer, models: int, key: str = LOSSES) -> NDArray[np.float64]:
    """Return what a client has measured, shape (models, samples).

    Raises
    ------
    InvalidReplyError
        These are no losses of so many models.
    """
    losses = answer.numbers.get(key)
    if losses is None or losses.ndim != 2 or losses.dtype.kind != "f" or not losses.size:
        raise InvalidReplyError("it brings no losses")
    if len(losses) != models:
        raise InvalidReplyError(f"it brings losses of {len(losses)} of {models} models")
    return np.asarray(losses, np.float64)


def compared(answer: Answer, alpha: float) -> dict[int, NDArray[np.float64]]:
    """Return a client's losses by cluster, each of shape (samples,), its own cluster's first.

    Raises
    ------
    InvalidReplyError
        These are no losses of the models that it was sent, or too few for any test.
    """
    asked = answer.task.candidates
    measured, needed = losses_of(answer, len(asked)), fewest_samples(alpha)
    if measured.shape[1] < needed:
        raise InvalidReplyError(
            f"it has {measured.shape[1]} samples for validation, and a test at level {alpha:g} "
            f"needs {needed}"
        )
    return dict(zip(asked, measured, strict=True))


def found_each(method: Method, state: SupportState, updates: Sequence[Update]) -> list[Applied]:
    """Let each client that has trained θ become a cluster of its own."""
    applied = []
    for update in updates:
        client = update.task.client
        cluster = method.clusters.found(Model(update.vector.copy(), 1), [client])
        state.cold.pop(client, None)
        applied.append(Applied(cluster, staleness=0, weight=1.0))
    if START in method.models and not method.clusters.clients(START, online_only=False):
        method.clusters.retire(START)
    return applied


def report_support(
    method: Method, supported: Supported, before: Mapping[int, tuple[int, ...]]
) -> None:
    """Report who supports whom, if that is not as it was."""
    now = supported.listed()
    if now != before:
        method.report(SupportChanged(method.now(), method.progress.updates, now))
