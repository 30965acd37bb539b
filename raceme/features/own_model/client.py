"""The client half: training of the client's own model, and its mixture with the received one.

It never leaves the client, which uses a mixture of the two, as in APFL (Deng et al. 2020), with a
share by samples that its own model has not been trained on. From this mixture its own model
continues with each task: as if it were alone where the others are no help, and as a local
adaptation of their model where they are. A client that is better off alone, task after task, is
not held back by the others' model, nor by the samples that are kept for the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from raceme.core.messages import TASK_SHARE, ModelSpec
from raceme.core.training_settings import TrainingSettings
from raceme.features.own_model import OWN_MODEL, SHARES, WHOLE
from raceme.training.clients import LocalClient
from raceme.training.local import losses as sample_losses
from raceme.training.local import train as train_locally
from raceme.training.models import Samples, is_usable
from raceme.training.work import ClientWork

Losses = NDArray[np.float64]
"""The loss of each validation sample under mixtures of two models, shape (shares, samples)."""
_OWN = "own-line"
"""Record of a client's state: its own model."""
_SURE = "own-sure"
"""Record of a client's state: for how many tasks its own model has nearly surely been the best."""
_NEARLY = 0.9
"""Share of the own model, by the chances of each to be the best, from which on it surely is."""
_PATIENCE = 5
"""Such tasks in a row after which a client trains as if it were alone."""
_HUGE_LOSS = 1e30
_DRAWS = 200


def train_own_model(work: ClientWork, received: ArrayRecord, settings: TrainingSettings) -> None:
    """Train the client's own model, from its mixture with the received one.

    Parameters
    ----------
    received : ArrayRecord
        The model that was trained just now.
    settings : TrainingSettings
        As of that training. The own model is not kept near the model that it starts from, and
        trains for an ordinary task where that one is shorter or longer, such as a probe.
    """
    client, state = _validating(work), work.state
    network, spec = client.network, work.receive(received)
    start, share, is_alone = network.write(spec), 0.0, False
    if (losses := _losses_of_mixtures(client, state)) is not None:
        likely = network.objective.likelihoods(losses)
        # What the samples rule out, such as a model that overflows, has no chance.
        chances = _chances_to_be_best(losses, work.generator(part=2)) * (likely > 0.0)
        surely = _mean_share(chances)
        former = int(state.config_records.get(_SURE, {"tasks": 0})["tasks"])  # type: ignore[arg-type]
        tasks = former + 1 if surely >= _NEARLY else 0
        state[_SURE], is_alone = ConfigRecord({"tasks": tasks}), tasks >= _PATIENCE
        share = max(_mean_share(likely), surely if is_alone else 0.0)
    settings = replace(settings, proximal_mu=0.0)
    if TASK_SHARE in work.settings:
        run = client.config
        settings = replace(settings, local_epochs=run.local_epochs, local_steps=run.local_steps)

    def train(name: str, samples: Samples, part: int) -> None:
        own = state.array_records.get(name)
        network.read(start if own is None else _mixtures(start, own)(share))
        train_locally(network, samples, settings, work.generator(part), {})
        # A training that diverged must not spoil all that follow.
        if is_usable(network.weights):
            state[name] = network.write(spec)

    train(_OWN, client.train, 1)
    if WHOLE in state:
        train(WHOLE, work.client.train, 3)
    if is_alone and client is not work.client:
        state.setdefault(WHOLE, state[_OWN])
    else:
        state.pop(WHOLE, None)


def use_mixture(work: ClientWork) -> None:
    """Mix the received model with the client's own, by how well it does on validation samples.

    A client that has not trained yet, or has a single sample, uses the received model.
    """
    client, own = _validating(work), work.state.array_records
    if (losses := _losses_of_mixtures(client, work.state)) is not None:
        start = client.network.write(ModelSpec.of(own[_OWN]))
        share = _mean_share(client.network.objective.likelihoods(losses))
        used = own.get(WHOLE, own[_OWN])
        client.network.read(_mixtures(start, used)(share))


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


def _losses_of_mixtures(client: LocalClient, state: RecordDict) -> Losses | None:
    """Return the losses under mixtures of the network's model and the client's own, if it has one.

    The network has its model again in the end.
    """
    network, kept = client.network, client.validation
    if _OWN not in state or kept is None:
        return None
    own = state.array_records[_OWN]
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


def _chances_to_be_best(losses: Losses, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the probability of each share that it has the least expected loss.

    By draws from the posterior distribution of the expected losses, Student's t, of normal losses
    with an unknown covariance (Jeffreys' prior). A difference that is small, but the same for all
    samples, is certain, where the likelihood of few samples hardly changes by it. Nothing is known
    from one sample.
    """
    shares, samples = losses.shape
    if samples < 2:
        return np.full(shares, 1 / shares)
    means = losses.mean(axis=1)
    noise = rng.normal(size=(_DRAWS, samples)) @ (losses - means[:, None]).T
    noise /= np.sqrt(samples * rng.chisquare(samples - 1, size=(_DRAWS, 1)))
    drawn = means + noise
    is_best = drawn == drawn.min(axis=1, keepdims=True)
    return np.asarray((is_best / is_best.sum(axis=1, keepdims=True)).mean(axis=0))
