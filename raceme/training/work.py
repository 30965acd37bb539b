"""What a message asks of a client, and what the client answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from raceme.core.messages import (
    ARRAYS,
    BATCH_SIZE,
    DROPOUT,
    ELASTIC_STRENGTH,
    FORMER_STEP,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    LR,
    LR_SCALE,
    MOMENTUM,
    OPTIMIZER,
    PROXIMAL_MU,
    ROUND,
    STEP,
    TASK,
    WEIGHT_DECAY,
    ModelSpec,
    candidate,
)
from raceme.core.options import Value
from raceme.training.clients import Client
from raceme.training.local import TrainingSettings

Metric = int | float | list[int] | list[float]

BATCH_NORM = "batch-norm"
"""Record of a client's state: its own arrays of batch normalisation."""


@dataclass(frozen=True, eq=False)
class ClientWork:
    """What a message asks of a client.

    Attributes
    ----------
    kind : str
        Name of the kind of work.
    client : Client
        Who is asked, with its samples.
    content : RecordDict
        The message's records.
    settings : ConfigRecord
        The one of them that says how to do it.
    state : RecordDict
        What this client keeps from one message to the next.
    at_step : Callable
        Returns this client with its data of another step, which it loads.
    steps : tuple[Client, ...]
        The client with its data of each of the steps that the message names; empty if it names
        none. To train is to train on all of them together: :attr:`client` has them so.
    since : int
        First step whose data the client still has: that at which a device's own file was replaced.
    """

    kind: str
    client: Client
    content: RecordDict
    settings: ConfigRecord
    state: RecordDict
    at_step: Callable[[int], Client]
    steps: tuple[Client, ...] = ()
    since: int = 0

    @property
    def arrays(self) -> Mapping[str, ArrayRecord]:
        """The records of named arrays: models, and whatever else came with them."""
        return self.content.array_records

    @property
    def model(self) -> ArrayRecord:
        """The received model.

        Raises
        ------
        ValueError
            There is none, or several.
        """
        if ARRAYS in self.arrays:
            return self.arrays[ARRAYS]
        raise ValueError(
            f"The message holds no model: kind '{self.kind}' expects an ArrayRecord named "
            f"'{ARRAYS}', got {sorted(self.content)}."
        )

    @property
    def models(self) -> list[ArrayRecord]:
        """The received models: several, or the only one.

        Raises
        ------
        ValueError
            There is none.
        """
        several: list[ArrayRecord] = []
        while candidate(len(several)) in self.arrays:
            several.append(self.arrays[candidate(len(several))])
        return several or [self.model]

    @property
    def step(self) -> int:
        """The step of the client's data; 0 where data never change."""
        return int(self.number(STEP, 0))

    def former(self) -> Client | None:
        """Return the client with the data of its last upload; None if there was none.

        Raises
        ------
        ValueError
            The step of these data is none.
        """
        if FORMER_STEP not in self.settings:
            return None
        step = self.settings[FORMER_STEP]
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"{FORMER_STEP} must be a whole number of at least 0, got {step!r}.")
        return self.at_step(step)

    def receive(self, model: ArrayRecord) -> ModelSpec:
        """Put a received model into the client's network, with what the client keeps of its own.

        Raises
        ------
        InvalidModelError
            The arrays are not those of the network.
        """
        spec = self.client.network.read(model)
        if self._keeps_batch_norm and BATCH_NORM in self.state:
            self.client.network.restore(self.state.array_records[BATCH_NORM])
        return spec

    def give(self, spec: ModelSpec, received: ArrayRecord) -> ArrayRecord:
        """Return the trained model out of the client's network, without what the client keeps.

        Parameters
        ----------
        spec : ModelSpec
            What :meth:`receive` has returned.
        received : ArrayRecord
            The model that was trained: in the place of what stays here its values go back.
        """
        network = self.client.network
        model = network.write(spec)
        if self._keeps_batch_norm:
            self.state[BATCH_NORM] = network.keep(network.batch_norm)
            model.update({name: received[name] for name in network.batch_norm})
        return model

    @property
    def _keeps_batch_norm(self) -> bool:
        """FedBN (Li et al., ICLR 2021): batch normalisation stays at home, all of it."""
        return self.client.config.batch_norm == "local"

    def training_settings(self) -> TrainingSettings:
        """Return the hyper-parameters of the message, or else of the run.

        Raises
        ------
        ValueError
            One is of the wrong type or out of its range.
        """
        config = self.client.config
        return TrainingSettings(
            lr=self.number(LR, config.lr) * self.number(LR_SCALE, 1.0),
            batch_size=int(self.number(BATCH_SIZE, config.batch_size)),
            local_epochs=int(self.number(LOCAL_EPOCHS, config.local_epochs)),
            local_steps=int(self.number(LOCAL_STEPS, config.local_steps)),
            optimizer=str(self.settings.get(OPTIMIZER, config.optimizer)),
            momentum=self.number(MOMENTUM, config.momentum),
            weight_decay=self.number(WEIGHT_DECAY, config.weight_decay),
            proximal_mu=self.number(PROXIMAL_MU, 0.0),
            elastic_strength=self.number(ELASTIC_STRENGTH, 0.0),
            dropout=self.number(DROPOUT, 0.0),
        )

    def number(self, name: str, default: float | None) -> float:
        """Return a number among the settings.

        Raises
        ------
        ValueError
            It is no number, or it is missing and there is no default.
        """
        return number(self.settings, name, default)

    def generator(self) -> np.random.Generator:
        """Return what decides whatever the work leaves to chance.

        It is made anew for each piece of work, from the seed of the run, the client and the
        number of the task.
        """
        task = int(self.number(TASK, self.number(ROUND, 0)))
        entropy = [self.client.config.seed, crc32(self.client.id.encode()), task]
        return np.random.default_rng(np.random.SeedSequence(entropy))


@dataclass(frozen=True, eq=False)
class Answer:
    """What a client answers.

    Attributes
    ----------
    metrics : Mapping[str, int or float or list[float]]
        Single numbers, and short lists of them.
    model : ArrayRecord or None
        The trained model.
    numbers : Mapping[str, NDArray]
        Numbers by sample or by class, by name.
    told : Mapping[str, Value]
        What else is stated, e.g. which model was chosen.
    """

    metrics: Mapping[str, Metric]
    model: ArrayRecord | None = None
    numbers: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    told: Mapping[str, Value] = field(default_factory=dict)


def number(settings: ConfigRecord, name: str, default: float | None) -> float:
    """Return a number among a message's settings.

    Raises
    ------
    ValueError
        It is no number, or it is missing and there is no default.
    """
    value = settings.get(name, default)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)
