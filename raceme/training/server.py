"""What a server does before a run with samples of its own: a probe, and models to start from."""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import ArrayRecord

from raceme import datasets
from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.protocol.messages import InvalidModelError, ModelSpec, Vector
from raceme.training.clients import network_of
from raceme.training.probe import ModelProbe, pretrained
from raceme.training.samples import Samples
from raceme.training.settings import TrainingSettings


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
