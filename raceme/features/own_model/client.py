"""The client half: training of the client's own model, and its mixture with the received one.

The own model never leaves the client. The client uses a mixture of both models, as in APFL (Deng et
al. 2020), whose shares depend on samples that neither model was trained on. The clients' reports on
these samples determine how the own models of a whole cluster are trained; see :mod:`.server`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from raceme.core.messages import ModelSpec
from raceme.core.training_settings import TrainingSettings
from raceme.features.own_model import (
    ALONE,
    COMMON_SCORE,
    JOINT,
    MIXED,
    OWN_MODEL,
    OWN_SCORE,
    PROBED,
    RECEIVED_SCORE,
    RULE,
    SHARES,
    SKIPPED,
    TRIED,
)
from raceme.training.clients import LocalClient
from raceme.training.local import evaluate, losses_and_scores
from raceme.training.local import train as train_locally
from raceme.training.models import Samples, is_usable
from raceme.training.work import BATCH_NORM, ClientWork

Losses = NDArray[np.float64]
"""The loss of each validation sample under some models, shape (models, samples)."""
_OWN = "own-line"
"""Record of a client's state: its own model."""
_BASE = "own-base"
"""Record of a client's state: the received model beside which the own model was trained last."""
_USE = "own-use"
"""Record of a client's state: the rule of its last task."""
_HUGE_LOSS = 1e30
_FAR = 0.9
"""Share of all likelihoods from which on one model is far more likely than the others."""


def model_to_train(work: ClientWork, received: ArrayRecord) -> ArrayRecord:
    """Return the model that a task trains: the received one, or one for both.

    Under the rule JOINT it is the mixture in use, under ALONE the client's own model.
    """
    rule = work.settings.get(RULE)
    if rule == ALONE:
        return work.state.array_records.get(_OWN, received)
    own = _own_to_compare(work) if rule == JOINT else None
    if own is None:
        return received
    spec = work.receive(received)
    _mix(work.client, own, _base(work))
    return work.client.network.write(spec)


def train_own_model(
    work: ClientWork, received: ArrayRecord, settings: TrainingSettings
) -> dict[str, float]:
    """Train the client's own model by the rule of the message.

    Parameters
    ----------
    received : ArrayRecord
        The model as received; the client's network has the trained one, see :func:`model_to_train`.
    settings : TrainingSettings
        Settings of that training. An own model that is trained in addition has no proximal term.

    Returns
    -------
    dict[str, float]
        Under the rule TRIED, scores on the kept samples as metrics of the reply: those of the own
        model, of the received model, and of the latter mixed with its trained version.
    """
    rule, state = str(work.settings.get(RULE, MIXED)), work.state
    is_beside = rule in (JOINT, MIXED, SKIPPED)
    if rule in (SKIPPED, PROBED) and _OWN in state:
        if (rule, _last_rule(work)) != (PROBED, PROBED):
            return {}
        # The second probe trained on other samples than the first.
        _add_change(work, received)
        rule = SKIPPED
    scores = dict[str, float]()
    if rule in (TRIED, MIXED):
        scores = _train_both(work, received, settings, rule)
    _keep(work, received, is_beside)
    state[_USE] = ConfigRecord({RULE: rule})
    return scores


def _train_both(
    work: ClientWork, received: ArrayRecord, settings: TrainingSettings, rule: str
) -> dict[str, float]:
    """Train the own model in addition to the received one; see :func:`train_own_model`."""
    client, own = _with_validation_samples(work), _own_to_compare(work)
    network, kept = client.network, client.validation
    trained = network.write(ModelSpec.of(received)) if rule == TRIED else received
    work.receive(received)
    scores = dict[str, float]()
    if own is not None and rule == MIXED:
        _mix(client, own, _base(work))
    elif own is not None:
        if kept is not None:
            scores[RECEIVED_SCORE] = _mix(client, trained)
            scores[COMMON_SCORE] = evaluate(network, kept)[0]
        network.read(own)
    settings = replace(settings, proximal_mu=0.0)
    train_locally(network, client.train, settings, work.generator(part=1), {})
    if own is not None and kept is not None and rule == TRIED:
        scores[OWN_SCORE] = evaluate(network, kept)[0]
    return scores


def _add_change(work: ClientWork, received: ArrayRecord) -> None:
    """Add the change of the weights in the client's network to the client's own model.

    Running statistics become those of the network: a sum of changes may have negative variances.
    """
    network, own = work.client.network, work.state.array_records[_OWN]
    trained = network.write(ModelSpec.of(received))
    network.read(_moved(own, received, trained, statistics=trained))


def _own_to_compare(work: ClientWork) -> ArrayRecord | None:
    """Return the client's own model, unless it was trained on samples that are now held out."""
    return None if _trains_alone(work) else work.state.array_records.get(_OWN)


def _base(work: ClientWork) -> ArrayRecord | None:
    """Return the received model beside which the own model was trained last, if it was."""
    return work.state.array_records.get(_BASE)


def _keep(work: ClientWork, received: ArrayRecord, is_beside: bool) -> None:
    """Keep the model in the client's network as its own, unless its training has diverged."""
    network = work.client.network
    if not is_usable(network.weights):
        return
    work.state[_OWN] = network.write(ModelSpec.of(received))
    if is_beside:
        # As the client uses it: with its own batch normalisation, if it keeps that.
        kept = work.state.array_records.get(BATCH_NORM, ArrayRecord())
        work.state[_BASE] = ArrayRecord({**received, **kept})
    elif _BASE in work.state:
        del work.state[_BASE]


def use_mixture(work: ClientWork) -> None:
    """Mix the received model with the client's own, by their losses on validation samples.

    A client that has not trained yet, or has a single sample, uses the received model; a client
    that trains its own model alone uses only this.
    """
    if _OWN not in work.state:
        return
    own = work.state.array_records[_OWN]
    if _trains_alone(work):
        work.client.network.read(own)
    else:
        _mix(_with_validation_samples(work), own, _base(work))


def _trains_alone(work: ClientWork) -> bool:
    """Return whether the client's last task trained its own model alone."""
    return _last_rule(work) == ALONE


def _last_rule(work: ClientWork) -> str:
    """Return the rule of the client's last task that trained its own model; else ""."""
    return str(work.state.config_records[_USE][RULE]) if _USE in work.state else ""


def _mix(client: LocalClient, own: ArrayRecord, base: ArrayRecord | None = None) -> float:
    """Mix the model in the client's network with another, if there are validation samples.

    An own model that was trained beside a *base*, a former received model, takes part in what
    others have learned since: it is moved by the change of the received model, unless it is far
    more likely as it was than any mixture.

    Returns the score on these samples of the model in the network before; NaN if there are none.
    """
    if client.validation is None:
        return math.nan
    network = client.network
    start = network.write(ModelSpec.of(own))
    mixture = _mixtures(start, own if base is None else _moved(own, base, start, own))
    unmoved = [] if base is None else [own]
    losses, score = _tested(client, client.validation, chain(map(mixture, SHARES), unmoved))
    weights = network.objective.likelihoods(losses)
    shares, as_it_was = weights[: len(SHARES)], weights[len(SHARES) :]
    is_spoiled = as_it_was.sum() > _FAR * weights.sum()
    network.read(own if is_spoiled else mixture(float(shares @ SHARES / shares.sum())))
    return score


def _moved(
    own: ArrayRecord, base: ArrayRecord, received: ArrayRecord, statistics: ArrayRecord
) -> ArrayRecord:
    """Return the own model with its weights moved from one model to another, and statistics."""
    spec = ModelSpec.of(own)
    change = spec.unpack(received) - spec.unpack(base)
    moved = np.asarray(spec.unpack(own) + change, np.float32)
    if spec.trainable is not None:
        moved = np.where(spec.trainable, moved, spec.unpack(statistics))
    return spec.pack(moved)


def _with_validation_samples(work: ClientWork) -> LocalClient:
    """Return the client with validation samples, unless it has too few samples."""
    if work.client.validation is not None or len(work.client.train) < 2:
        return work.client
    return work.client.divided(work.number(OWN_MODEL, None))


def _mixtures(start: ArrayRecord, own: ArrayRecord) -> Callable[[float], ArrayRecord]:
    """Return a function from the share of the client's own model to the mixture."""
    spec = ModelSpec.of(own)
    received, end = spec.unpack(start), spec.unpack(own)

    def mixture(share: float) -> ArrayRecord:
        if share == 1.0:
            # The own model is unchanged bit for bit, whatever the received model is.
            return own
        mixed = np.asarray(received + np.float32(share) * (end - received), np.float32)
        spec.copy_counters(received, mixed)
        return spec.pack(mixed)

    return mixture


def _tested(
    client: LocalClient, kept: Samples, models: Iterable[ArrayRecord]
) -> tuple[Losses, float]:
    """Return the losses under some models, and the mean score of the first."""
    losses, scores = [], []
    for model in models:
        client.network.read(model)
        of_samples, right = losses_and_scores(client.network, kept)
        losses.append(of_samples)
        scores.append(float(right.mean(dtype=float)))
    # For a model that overflows, the loss is replaced by the largest finite number.
    found = np.array(losses, np.float64)
    return np.where(found < _HUGE_LOSS, found, _HUGE_LOSS), scores[0]
