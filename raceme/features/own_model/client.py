"""The client half: training of the client's own model, and its mixture with the received one.

It never leaves the client, which uses a mixture of the two, as in APFL (Deng et al. 2020), with a
share by samples that neither has been trained on. How it is trained is decided for all clients of
a cluster together, by what each reports of these samples: see :mod:`.server`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from raceme.core.messages import ModelSpec
from raceme.core.training_settings import TrainingSettings
from raceme.features.own_model import (
    ALONE,
    COMMON_SCORE,
    MIXED,
    OWN_MODEL,
    OWN_SCORE,
    RULE,
    SHARES,
    SKIPPED,
    TRIED,
)
from raceme.training.clients import LocalClient
from raceme.training.local import evaluate
from raceme.training.local import losses as sample_losses
from raceme.training.local import train as train_locally
from raceme.training.models import Samples, is_usable
from raceme.training.work import ClientWork

Losses = NDArray[np.float64]
"""The loss of each validation sample under mixtures of two models, shape (shares, samples)."""
_OWN = "own-line"
"""Record of a client's state: its own model."""
_USE = "own-use"
"""Record of a client's state: the rule of its last task."""
_HUGE_LOSS = 1e30


def train_own_model(
    work: ClientWork, received: ArrayRecord, settings: TrainingSettings
) -> dict[str, float]:
    """Train the client's own model by the rule of the message.

    Parameters
    ----------
    received : ArrayRecord
        The model that was trained just now; the trained one is in the client's network.
    settings : TrainingSettings
        As of that training. The own model is not kept near the model that it starts from.

    Returns
    -------
    dict[str, float]
        Scores on the kept samples, as metrics of the reply: under the rule TRIED of the own model
        and of the received one's mixture with itself after this task, under MIXED of the mixture
        in use and the received model before it; none otherwise.
    """
    rule, state = str(work.settings.get(RULE, MIXED)), work.state
    client = work.client if rule == ALONE else _validating(work)
    network, kept = client.network, client.validation
    if rule == SKIPPED:
        if _OWN not in state and is_usable(network.weights):
            state[_OWN] = network.write(ModelSpec.of(received))
        return {}
    trained = network.write(ModelSpec.of(received)) if rule == TRIED else received
    spec, own = work.receive(received), state.array_records.get(_OWN)
    if own is not None and rule != ALONE and _trains_alone(work):
        # It has been trained on the samples that are kept from now on.
        own = None
    scores = dict[str, float]()
    if own is not None and kept is not None and rule == MIXED:
        scores[COMMON_SCORE] = evaluate(network, kept)[0]
        _mix(client, own)
        scores[OWN_SCORE] = evaluate(network, kept)[0]
    elif own is not None:
        if kept is not None and rule == TRIED:
            _mix(client, trained)
            scores[COMMON_SCORE] = evaluate(network, kept)[0]
        network.read(own)
    settings = replace(settings, proximal_mu=0.0)
    train_locally(network, client.train, settings, work.generator(part=1), {})
    if own is not None and kept is not None and rule == TRIED:
        scores[OWN_SCORE] = evaluate(network, kept)[0]
    # A training that diverged must not spoil all that follow.
    if is_usable(network.weights):
        state[_OWN] = network.write(spec)
    state[_USE] = ConfigRecord({RULE: rule})
    return scores


def use_mixture(work: ClientWork) -> None:
    """Mix the received model with the client's own, by how well it does on validation samples.

    A client that has not trained yet, or has a single sample, uses the received model; one that
    trains alone its own.
    """
    if _OWN not in work.state:
        return
    own = work.state.array_records[_OWN]
    if _trains_alone(work):
        work.client.network.read(own)
    else:
        _mix(_validating(work), own)


def _trains_alone(work: ClientWork) -> bool:
    """Return whether the client's last task trained its own model alone."""
    return _USE in work.state and work.state.config_records[_USE][RULE] == ALONE


def _mix(client: LocalClient, own: ArrayRecord) -> None:
    """Mix the model in the client's network with another, if there are samples to choose by."""
    if client.validation is not None:
        start = client.network.write(ModelSpec.of(own))
        losses = _losses_of_mixtures(client, client.validation, own)
        share = _mean_share(client.network.objective.likelihoods(losses))
        client.network.read(_mixtures(start, own)(share))


def _validating(work: ClientWork) -> LocalClient:
    """Return the client with validation samples, unless it has too few samples."""
    if work.client.validation is not None or len(work.client.train) < 2:
        return work.client
    return work.client.divided(work.number(OWN_MODEL, None))


def _mixtures(start: ArrayRecord, own: ArrayRecord) -> Callable[[float], ArrayRecord]:
    """Return the mixture of a received model and the client's own, given the share of its own."""
    spec = ModelSpec.of(own)
    received, end = spec.unpack(start), spec.unpack(own)

    def mixture(share: float) -> ArrayRecord:
        if share == 1.0:
            # Not even the precision of the own model depends on the received one.
            return own
        mixed = np.asarray(received + np.float32(share) * (end - received), np.float32)
        spec.copy_counters(received, mixed)
        return spec.pack(mixed)

    return mixture


def _losses_of_mixtures(client: LocalClient, kept: Samples, own: ArrayRecord) -> Losses:
    """Return the losses under mixtures of the network's model and the client's own.

    The network has its model again in the end.
    """
    network = client.network
    start = network.write(ModelSpec.of(own))
    mixture = _mixtures(start, own)
    losses = np.empty((len(SHARES), len(kept)))
    for row, share in zip(losses, SHARES, strict=True):
        network.read(mixture(share))
        row[...] = sample_losses(network, kept)
    network.read(start)
    # The loss of a model that overflows is finite here, and the largest.
    return np.where(losses < _HUGE_LOSS, losses, _HUGE_LOSS)


def _mean_share(weights: NDArray[np.float64]) -> float:
    """Return the mean of the shares that are compared, given a weight of each."""
    return float(weights @ SHARES / weights.sum())
