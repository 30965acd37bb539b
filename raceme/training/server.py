"""What a server does before a run with samples of its own: a probe, and models to start from."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import InvalidModelError, ModelSpec, Vector
from raceme.training.clients import network_of
from raceme.training.local import TrainingSettings, evaluate, losses, train
from raceme.training.network import Network, Samples

# -----------------------------------------------------------------------------
# What a server does with samples of its own: the torch behind `raceme.core.strategy.Probe`.
# -----------------------------------------------------------------------------


class ModelProbe:
    """Losses of flat models on proxy sets.

    Parameters
    ----------
    network : Network
        A network of the models' kind; its weights are overwritten at every call.
    spec : ModelSpec
        Names and shapes of a model's arrays.
    proxies : Sequence[Samples]
        The proxy sets.
    tests : Sequence[Samples]
        Test samples of the same distributions, for reports; none if there are none.
    """

    def __init__(
        self,
        network: Network,
        spec: ModelSpec,
        proxies: Sequence[Samples],
        tests: Sequence[Samples] = (),
    ) -> None:
        self._network, self._spec = network, spec
        self._proxies, self._tests = proxies, tests

    @property
    def sets(self) -> int:
        """How many proxy sets there are."""
        return len(self._proxies)

    @property
    def tests(self) -> int:
        """How many test sets there are."""
        return len(self._tests)

    def accuracy(self, vector: Vector, k: int) -> float:
        """Return the share of a test set's samples that a model classifies correctly."""
        self._network.read(self._spec.pack(vector))
        return evaluate(self._network, self._tests[k])[0]

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> NDArray[np.float32]:
        """Return the loss of each sample of a proxy set under each model.

        Parameters
        ----------
        vectors : Sequence[Vector]
            The models, each of shape (d,).
        proxy : int
            Which proxy set, from 0.

        Returns
        -------
        NDArray[np.float32]
            Shape (models, samples).

        Raises
        ------
        ValueError
            There is no such proxy set.
        """
        if not 0 <= proxy < len(self._proxies):
            raise ValueError(f"there is no proxy set {proxy}: there are {len(self._proxies)}")
        measured = []
        for vector in vectors:
            self._network.read(self._spec.pack(vector))
            measured.append(losses(self._network, self._proxies[proxy]))
        return np.stack(measured)


def pretrained(
    network: Network,
    spec: ModelSpec,
    vector: Vector,
    samples: Sequence[Samples],
    settings: TrainingSettings,
    seed: int,
) -> list[Vector]:
    """Train one model on each of several sets of samples, all from the same start.

    Parameters
    ----------
    network : Network
        A network of the models' kind; its weights are overwritten.
    spec : ModelSpec
        Names and shapes of a model's arrays.
    vector : Vector
        The model that each starts from. Shape (d,).
    samples : Sequence[Samples]
        The sets.
    settings : TrainingSettings
        How to train.
    seed : int
        Decides the order of samples.

    Returns
    -------
    list[Vector]
        The models, in the order of the sets.
    """
    models = []
    for number, own in enumerate(samples):
        network.read(spec.pack(vector))
        rng = np.random.default_rng(np.random.SeedSequence([seed, crc32(b"pretrain"), number]))
        train(network, own, settings, rng)
        models.append(spec.unpack(network.write(spec)))
    return models


# -----------------------------------------------------------------------------
# What a server does before a run with samples of its own: a probe, and models to start from.
# -----------------------------------------------------------------------------


def probe_of(config: RunConfig, initial: ArrayRecord) -> ModelProbe | None:
    """Return what measures models on the server's proxy sets; None if it has none.

    Raises
    ------
    UserError
        They cannot be had.
    """
    if not config.proxy:
        return None
    held, network = datasets.proxy_sets(config), network_of(config)
    return ModelProbe(
        network,
        ModelSpec.of(initial),
        [Samples(own.x, own.y, network.channels_last) for own in held.proxies],
        [Samples(own.x, own.y, network.channels_last) for own in held.tests],
    )


def starts_of(config: RunConfig, initial: ArrayRecord) -> Sequence[Vector]:
    """Return the models that the server has pre-trained, one for each distribution, if any.

    All start from the same initial model: the mean of models from different ones is worthless.

    Raises
    ------
    UserError
        There are no samples to train on, or training left a model that is not finite.
    """
    if not config.pretrain:
        return ()
    if config.dataset == "npz" and not config.proxy:
        raise UserError(
            "pretrain needs samples on the server: set proxy to a folder of .npz files."
        )
    held = datasets.pretraining(config)
    network, spec = network_of(config), ModelSpec.of(initial)
    assert config.lr is not None, "resolve() sets the learning rate"
    settings = TrainingSettings(
        lr=config.lr,
        batch_size=config.batch_size,
        local_epochs=config.pretrain_epochs,
        optimizer=config.optimizer,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    samples = [Samples(own.x, own.y, network.channels_last) for own in held]
    try:
        return pretrained(network, spec, spec.unpack(initial), samples, settings, config.seed)
    except InvalidModelError as error:
        raise UserError(
            f"pretrain leaves a model that cannot be used, {error}: take a smaller lr."
        ) from None
