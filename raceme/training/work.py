"""Kinds of work of clients: requests, answers and implementations.

A kind of work is a function of a :class:`ClientWork` that returns a :class:`WorkResult` and depends
on nothing else, so that messages may be answered early, in any order and in any process. This
module has the kinds for any method; a method's own are in its ``client.py``. Their names are in
:data:`raceme.core.registry.CLIENT_WORK`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard
from zlib import crc32

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import ArrayLike, NDArray

from raceme import datasets
from raceme.core import messages as names
from raceme.core.clusters import cosine
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec, candidate, from_array
from raceme.core.options import Value
from raceme.core.registry import (
    AFTER_TRAINING,
    BEFORE_TRAINING,
    CLIENT_WORK,
    COMPLETIONS,
    MODELS,
    load,
)
from raceme.core.training_settings import TrainingSettings
from raceme.datasets.source import own_randomness
from raceme.flower.messages import records_of
from raceme.training.clients import LocalClient
from raceme.training.local import TermBuilder, epoch_sizes
from raceme.training.local import evaluate as test_locally
from raceme.training.local import losses as sample_losses
from raceme.training.local import train as train_locally
from raceme.training.models import (
    Samples,
    deployed_network,
    description_of,
    is_usable,
    read_model_file,
    write_model_file,
)

Metric = int | float | list[int] | list[float]

BATCH_NORM = "batch-norm"
"""Record in a client's state: its own batch normalisation arrays."""
_MOST_COUNTED = 10_000


@dataclass(frozen=True, eq=False)
class ClientWork:
    """A message's request to a client.

    Attributes
    ----------
    kind : str
        Name of the kind of work.
    client : LocalClient
        The client with its samples.
    content : RecordDict
        All records of the message: models, further arrays, settings.
    settings : ConfigRecord
        The settings record of the message.
    state : RecordDict
        The client's persistent state.
    at_step : Callable
        Loads this client's data of another step.
    steps : tuple[LocalClient, ...]
        The client with its data of each step that the message names; empty if none. Training uses
        all of them together, as does :attr:`client`.
    since : int
        First step whose data the client still has, after a replacement of a device's file.
    labels : str
        The client's labels, from the node's configuration.
    model_file : str
        File of the model for the device's application; empty if there is none.
    """

    kind: str
    client: LocalClient
    content: RecordDict
    settings: ConfigRecord
    state: RecordDict
    at_step: Callable[[int], LocalClient]
    steps: tuple[LocalClient, ...] = ()
    since: int = 0
    labels: str = ""
    model_file: str = ""

    @property
    def arrays(self) -> Mapping[str, ArrayRecord]:
        """The array records: models and additions."""
        return records_of(self.content, ArrayRecord)

    @property
    def model(self) -> ArrayRecord:
        """The received model.

        Raises
        ------
        ValueError
            There is none, or several.
        """
        if names.ARRAYS in self.arrays:
            return self.arrays[names.ARRAYS]
        raise ValueError(
            f"The message holds no model: kind '{self.kind}' expects an ArrayRecord named "
            f"'{names.ARRAYS}', got {sorted(self.content)}."
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
        """The step of the client's data; 0 without drift."""
        return int(self.number(names.STEP, 0))

    def at(self, step: int) -> ClientWork:
        """Return the same work on the client's data of another step."""
        settings = ConfigRecord({**self.settings, names.STEP: step})
        return replace(self, client=self.at_step(step), settings=settings)

    def former(self) -> LocalClient | None:
        """Return the client with the data of its last upload; None if there was none.

        Raises
        ------
        ValueError
            The step is invalid.
        """
        if names.FORMER_STEP not in self.settings:
            return None
        return self.at_step(step_in(self.settings, names.FORMER_STEP))

    def receive(self, model: ArrayRecord) -> ModelSpec:
        """Load a received model and the client's own arrays into the network.

        Raises
        ------
        InvalidModelError
            The arrays do not match the network.
        """
        spec = self.client.network.read(model)
        if self._keeps_batch_norm and BATCH_NORM in self.state:
            self.client.network.restore(self.state.array_records[BATCH_NORM])
        return spec

    def give(
        self, spec: ModelSpec, received: ArrayRecord, start: ArrayRecord | None = None
    ) -> ArrayRecord:
        """Return the trained model from the client's network, without the client's own arrays.

        Parameters
        ----------
        spec : ModelSpec
            Layout of the received model, as :meth:`receive` returned it.
        received : ArrayRecord
            The received model, whose values replace the client's own arrays.
        start : ArrayRecord, optional
            The model that was trained, by default the received one; the change of another is added
            to the received one.
        """
        network = self.client.network
        model = network.write(spec)
        if start is not None and start is not received:
            model = _moved(spec, received, start, model)
        if self._keeps_batch_norm:
            own = network.keep(network.batch_norm)
            # Arrays of a diverged training must not enter the client's state.
            if is_usable(network.weights) and all(
                np.isfinite(from_array(array)).all() for array in own.values()
            ):
                self.state[BATCH_NORM] = own
            model.update({name: received[name] for name in network.batch_norm})
        return model

    @property
    def _keeps_batch_norm(self) -> bool:
        """FedBN (Li et al., ICLR 2021): all batch normalisation stays with the client."""
        return self.client.config.batch_norm == "local"

    def training_settings(self) -> TrainingSettings:
        """Return the hyper-parameters of the message, by default those of the run.

        Raises
        ------
        ValueError
            A value has the wrong type or is out of range.
        """
        scale = self.number(names.LR_SCALE, 1.0)
        return TrainingSettings.of(self.settings, self.client.config, scale)

    def number(self, name: str, default: float | None) -> float:
        """Return a number among the settings.

        Raises
        ------
        ValueError
            It is no number, or missing without a default.
        """
        value = self.settings.get(name, default)
        if not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}.")
        return float(value)

    def count(self, name: str) -> int:
        """Return a setting that is a count.

        Raises
        ------
        ValueError
            It is invalid or too large.
        """
        value = self.settings.get(name)
        if not isinstance(value, int) or not 1 <= value <= _MOST_COUNTED:
            raise ValueError(f"{name} must be a whole number from 1 to {_MOST_COUNTED:,}.")
        return value

    def generator(self, part: int = 0) -> np.random.Generator:
        """Return the generator of the work's random choices.

        It is derived from the seed of the run, the client, the number of the request, and the part
        of the work.
        """
        entropy = [*self.entropy, part] if part else self.entropy
        return np.random.default_rng(np.random.SeedSequence(entropy))

    @property
    def entropy(self) -> list[int]:
        """The seed of the run, the client and the number of the request."""
        return [self.client.config.seed, crc32(self.client.id.encode()), self.request]

    @property
    def request(self) -> int:
        """The number of the task; in rounds, whose messages lack it, the number of the round."""
        return int(self.number(names.TASK, self.number(names.ROUND, 0)))


def step_in(settings: ConfigRecord, name: str) -> int:
    """Return the step of a client's data in a message's settings; 0 by default.

    Raises
    ------
    ValueError
        It is no whole number of at least 0.
    """
    step = settings.get(name, 0)
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {step!r}.")
    return step


@dataclass(frozen=True, eq=False)
class WorkResult:
    """A client's answer.

    Attributes
    ----------
    metrics : Mapping[str, int or float or list[float]]
        Single numbers, and short lists of them.
    model : ArrayRecord or None
        The trained model; None for work that does not train.
    numbers : Mapping[str, NDArray]
        Arrays by name, with a number per sample or class.
    told : Mapping[str, Value]
        Further statements, e.g. the chosen model.
    """

    metrics: Mapping[str, Metric]
    model: ArrayRecord | None = None
    numbers: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    told: Mapping[str, Value] = field(default_factory=dict)


# -----------------------------------------------------------------------------
# Dispatch of kinds of work.
# -----------------------------------------------------------------------------


def answer_to(work: ClientWork) -> WorkResult:
    """Do the work of a message.

    Raises
    ------
    UserError
        A user's function cannot be imported or returns another type.
    """
    do, model = CLIENT_WORK[work.kind], work.client.config.model
    if CLIENT_WORK.is_own(work.kind) and (model is None or MODELS.is_own(model)):
        answer = do(work)
    else:
        # Users' code may draw from the process's generators. Seeding these takes 0.1 ms.
        with own_randomness(work.entropy):
            answer = do(work)
    if not isinstance(answer, WorkResult):
        raise UserError(
            f"'{work.kind}' must return a raceme.training.work.WorkResult, got "
            f"{type(answer).__name__}."
        )
    return answer


# -----------------------------------------------------------------------------
# Quality of uploads: additional tests of a client, for reports only.
#
# Li and Zhu ("Towards Client Driven Federated Learning") test a client's uploaded model, "client
# before", and the model returned for it, "client after", both on test data of the mixture that the
# upload was trained on. The latter is tested at the client's next message.
#
# The tests, enabled by the setting ``scored``, do not change training.
# -----------------------------------------------------------------------------


def score_former(
    work: ClientWork, received: ArrayRecord, completed_by: str = ""
) -> dict[str, Metric]:
    """Test the model returned for a client's last upload, on the data of that upload.

    Call before training; loads the received model into the client's network.

    Parameters
    ----------
    work : ClientWork
        The client's work.
    received : ArrayRecord
        The model to start from: the received one, or a mixture of several.
    completed_by : str
        Name of the completion of the received model; see :func:`measure`.

    Returns
    -------
    dict[str, Metric]
        The accuracy as a metric of the answer; empty if not requested or without an upload so far.
    """
    former = work.former() if work.settings.get(names.SCORED, False) else None
    if former is None:
        return {}
    there = work.at(int(work.number(names.FORMER_STEP, None)))
    return {names.ACCURACY_AFTER: measure(there, received, completed_by)[0]}


def score_upload(work: ClientWork, forward: int = 0) -> dict[str, Metric]:
    """Test the trained model in the client's network on the data of its step.

    Parameters
    ----------
    work : ClientWork
        The client's work.
    forward : int
        Forward passes of samples besides training, counted per model.

    Returns
    -------
    dict[str, Metric]
        The accuracy and the passes of samples without these tests, as metrics of the answer; empty
        if not requested.
    """
    if not work.settings.get(names.SCORED, False):
        return {}
    client = work.client
    trained = epoch_sizes(len(client.train), work.training_settings(), client.network.needs_pairs)
    return {
        names.ACCURACY_BEFORE: test_locally(client.network, client.test)[0],
        names.SAMPLE_PASSES: forward + names.PASSES_OF_TRAINING * sum(trained),
    }


# -----------------------------------------------------------------------------
# The kinds of work that any method may ask for: one function each.
# -----------------------------------------------------------------------------


OWN_MODEL = "own-model"
"""Record in a client's state: its personal model."""


def train(work: ClientWork) -> WorkResult:
    """Train the received model on the client's training samples."""
    return train_model(work, work.model)


def train_best(work: ClientWork) -> WorkResult:
    """Train the one of several models that best fits the training samples (IFCA).

    The answer states the choice: the first model with the lowest loss; non-finite losses count as
    infinite.
    """
    models = work.models
    losses = []
    for model in models:
        work.receive(model)
        loss = test_locally(work.client.network, work.client.train)[1]
        losses.append(loss if math.isfinite(loss) else math.inf)
    chosen = losses.index(min(losses))
    forward = len(models) * len(work.client.train)
    return train_model(work, models[chosen], {names.CHOSEN: chosen}, forward)


def evaluate(work: ClientWork) -> WorkResult:
    """Test the received model on the client's test samples."""
    return evaluation_answer(work, *measure(work, work.model, _completed_by(work)))


def measure(work: ClientWork, model: ArrayRecord, completed_by: str = "") -> tuple[float, float]:
    """Return the score and the mean loss of a model on the client's test samples.

    Parameters
    ----------
    work : ClientWork
        The client's work.
    model : ArrayRecord
        Model as received from the server.
    completed_by : str
        Name of the completion applied to the received model in the client's network; empty for
        none.
    """
    _receive_completed(work, model, completed_by)
    return test_locally(work.client.network, work.client.test)


def _receive_completed(work: ClientWork, model: ArrayRecord, completed_by: str) -> None:
    """Load a received model into the client's network, and complete it."""
    work.receive(model)
    if completed_by:
        COMPLETIONS[completed_by](work)


def _completed_by(work: ClientWork) -> str:
    return str(work.settings.get(names.COMPLETED_BY, ""))


def test_steps(work: ClientWork) -> WorkResult:
    """Test received models on the client's test samples of the steps that the message names.

    A model is completed for the tested step with the client's present samples; samples of the
    tested step are used for the test only. Steps without data, e.g. because a device's file was
    replaced, give NaN.

    Raises
    ------
    ValueError
        The message does not assign models to steps.
    """
    steps, which = (work.settings.get(name) for name in (names.TESTED_STEPS, names.TESTED_MODELS))
    models = work.models
    if not (_are_counts(steps) and _are_counts(which)) or len(steps) != len(which):
        raise ValueError(
            f"{names.TESTED_STEPS} and {names.TESTED_MODELS} must be two lists of equal length."
        )
    if any(index >= len(models) for index in which):
        raise ValueError(f"{names.TESTED_MODELS} names models that were not sent: {which!r}.")
    network, measured = work.client.network, np.full(len(steps), np.nan)
    for place, (step, index) in enumerate(zip(steps, which, strict=True)):
        if step < work.since:
            continue
        try:
            there = work.at(step)
        except UserError:
            continue
        if work.settings.get(names.UNTRAINED, False) and place == len(steps) - 1:
            # The untrained model is tested without the client's own arrays.
            network.read(models[index])
        else:
            completing = replace(there, client=work.client)
            _receive_completed(completing, models[index], _completed_by(work))
        measured[place] = test_locally(network, there.client.test)[0]
    unit = network.objective.measure.unit
    return WorkResult(
        {names.NUM_EXAMPLES: len(work.client.test)},
        numbers={names.ACCURACIES: measured},
        told={} if unit is None else {names.UNIT: unit},
    )


def use(work: ClientWork) -> WorkResult:
    """Write a received model to the application's file; state the version in the file.

    Raises
    ------
    OSError
        The file cannot be written; it is unchanged.
    """
    if not work.model_file:
        return WorkResult({names.USES: 0})
    path = Path(work.model_file)
    if names.ARRAYS in work.arrays:
        _receive_completed(work, work.model, _completed_by(work))
        config, state = work.client.config, work.client.network.module.state_dict()
        data = datasets.described(config)
        arrays = {name: values.cpu().numpy() for name, values in state.items()}
        labels = list(data.labels or map(str, range(data.num_classes)))
        about = description_of(config, data, labels if data.target is None else None, "torchscript")
        about["run_id"] = str(work.settings[names.USED_RUN])
        about["cluster"] = work.settings[names.USED_CLUSTER]
        about["version"] = work.settings[names.USED_VERSION]
        about["device"] = work.client.id
        write_model_file(path, deployed_network(config, data, arrays), data, about)
    return WorkResult({names.USES: 1}, told=_version_in(path))


def _version_in(path: Path) -> dict[str, Value]:
    """Return the version that a model file states, if any."""
    about, told = read_model_file(path), dict[str, Value]()
    for name, key, kind in (
        (names.USED_RUN, "run_id", str),
        (names.USED_CLUSTER, "cluster", int),
        (names.USED_VERSION, "version", int),
    ):
        if isinstance(about.get(key), kind):
            told[name] = about[key]
    return told


def _are_counts(stated: object) -> TypeGuard[list[int]]:
    """Return whether a setting is a list of whole numbers of at least 0."""
    return isinstance(stated, list) and all(isinstance(n, int) and n >= 0 for n in stated)


def losses(work: ClientWork) -> WorkResult:
    """Measure each sample's loss under each received model.

    A non-finite loss becomes the largest number.

    Raises
    ------
    ValueError
        Other samples than those for training or testing are requested.
    """
    client, wanted = work.client, work.settings.get(names.ON, "train")
    parts = {"train": client.train, "test": client.test, "validation": client.validation}
    samples = parts.get(wanted) if isinstance(wanted, str) else None
    if samples is None:
        known = ", ".join(name for name, part in parts.items() if part is not None)
        raise ValueError(f"losses are measured on these samples: {known}; not on {wanted!r}.")
    measured = bounded(losses_of(work, work.models, samples))
    return WorkResult({names.NUM_EXAMPLES: len(samples)}, numbers={names.LOSSES: measured})


def scores(work: ClientWork) -> WorkResult:
    """Score each received model on the training samples of each step.

    The steps are those named by the message, by default its own. Losses that are not finite in
    float32 become the largest number.
    """
    models, clients = work.models, work.steps or (work.client,)
    measured = np.empty((2, len(models), len(clients)), np.float64)
    for row, model in enumerate(models):
        work.receive(model)
        for column, client in enumerate(clients):
            measured[:, row, column] = test_locally(client.network, client.train)
    accuracies, means = bounded(measured)
    numbers = {names.ACCURACIES: accuracies, names.LOSSES: means}
    return WorkResult(
        {names.NUM_EXAMPLES: sum(len(client.train) for client in clients)}, numbers=numbers
    )


def bounded(measured: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return measurements with non-finite and too large numbers replaced by the largest."""
    most = float(np.finfo(np.float32).max)
    finite = np.nan_to_num(measured, nan=most, posinf=most).clip(max=most)
    return np.asarray(finite, np.float32)


def label_counts(work: ClientWork) -> WorkResult:
    """Count the client's training samples per class, and those of the whole stream.

    Raises
    ------
    ValueError
        The task is a regression.
    """
    client = work.client
    if not client.num_classes:
        raise ValueError("label-counts counts classes, and these data have quantities for labels.")
    labels = client.train.y.cpu().numpy()
    counts = np.bincount(labels, minlength=client.num_classes).astype(np.int64)
    metrics = {names.NUM_EXAMPLES: len(client.train)}
    if client.all_training is not None:
        metrics[names.ALL_EXAMPLES] = client.all_training
    return WorkResult(metrics, numbers={names.LABEL_COUNTS: counts})


def nearest_direction(work: ClientWork) -> WorkResult:
    """Train the received model, return the nearest direction of the change, and keep the model.

    FlexCFL's client cold start (eq 8), on the client as in the paper:
    ``argmin_j (1 − cos(Δw_0^(g_j), Δw_pre)) / 2``.

    Raises
    ------
    ValueError
        The directions are missing or do not match the model.
    """
    spec = ModelSpec.of(work.model)
    trained = train_model(work, work.model).model
    assert trained is not None, "training answers with a model"
    change = spec.compared(spec.unpack(trained) - spec.unpack(work.model))
    received = work.arrays[names.DIRECTIONS].values()
    directions = [np.asarray(from_array(array), np.float32) for array in received]
    if not directions or any(direction.shape != change.shape for direction in directions):
        raise ValueError(f"directions must have the model's {change.size:,} weights.")
    nearest = int(np.argmin([(1 - cosine(one, change)) / 2 for one in directions]))
    return WorkResult({names.NUM_EXAMPLES: len(work.client.train), names.CHOSEN: nearest})


def training_answer(
    work: ClientWork,
    model: ArrayRecord,
    metrics: Mapping[str, Metric],
    told: Mapping[str, int] | None = None,
) -> WorkResult:
    """Answer with a trained model and, under drift, the current mixture of the data."""
    metrics = {names.NUM_EXAMPLES: len(work.client.train), **metrics}
    if names.STEP in work.settings and work.client.mixture is not None:
        metrics[names.MIXTURE] = list(work.client.mixture)
    return WorkResult(metrics, model, told=told or {})


def evaluation_answer(work: ClientWork, score: float, loss: float) -> WorkResult:
    """Answer with test results and, under drift, the current group of the data.

    The score is named ``accuracy``, or ``mae`` with its unit.
    """
    measure = work.client.network.objective.measure
    metrics: dict[str, Metric] = {
        measure.name: score,
        names.LOSS: loss,
        names.NUM_EXAMPLES: len(work.client.test),
    }
    group = work.client.group
    if names.STEP in work.settings and group is not None:
        metrics[names.GROUP] = group
    return WorkResult(metrics, told={} if measure.unit is None else {names.UNIT: measure.unit})


def train_model(
    work: ClientWork,
    received: ArrayRecord,
    told: Mapping[str, int] | None = None,
    forward: int = 0,
    arrays: Mapping[str, ArrayRecord] | None = None,
    returned: ArrayRecord | None = None,
    terms: Sequence[TermBuilder] = (),
    weights: ArrayLike | None = None,
    before_step: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
) -> WorkResult:
    """Train a model on the client's training samples, and test it if requested.

    Parameters
    ----------
    work : ClientWork
        The client's work.
    received : ArrayRecord
        The model to start from.
    told : Mapping[str, int], optional
        Further statements of the answer.
    forward : int
        Forward passes of samples that led to this model, counted per network.
    arrays : Mapping[str, ArrayRecord], optional
        Array records for terms of the objective; by default those of the message.
    returned : ArrayRecord, optional
        Model returned for the client's last upload, if not the model to start from; it is tested on
        that upload's data.
    terms : Sequence[TermBuilder]
        Terms of the objective besides those of the settings.
    weights : ArrayLike, optional
        Factor on the loss of each sample, shape (n,), float32.
    before_step : Callable, optional
        Called with each mini-batch before the step on it: see :func:`raceme.training.local.train`.
    """
    client, network = work.client, work.client.network
    samples = client.train
    if names.HALF in work.settings:
        samples = samples.every_other(int(work.number(names.HALF, None))).balanced()
    settings, rng = work.training_settings(), work.generator()
    scores = score_former(work, received if returned is None else returned)
    start = received
    for setting, target in BEFORE_TRAINING.items():
        if setting in work.settings:
            start = load(target)(work, received)
    spec = work.receive(start)
    loss = train_locally(
        network,
        samples,
        settings,
        rng,
        work.arrays if arrays is None else arrays,
        terms=terms,
        weights=None if weights is None else torch.as_tensor(weights).to(network.accelerator),
        before_step=before_step,
    )
    scores |= score_upload(work, forward)
    model = work.give(spec, received, start)
    for setting, target in AFTER_TRAINING.items():
        if setting in work.settings:
            scores |= load(target)(work, received, settings)
    return training_answer(work, model, {names.TRAIN_LOSS: loss, **scores}, told)


def _moved(
    spec: ModelSpec, received: ArrayRecord, start: ArrayRecord, trained: ArrayRecord
) -> ArrayRecord:
    """Add the change from a training's start to the received model; statistics are the trained."""
    before, after = spec.unpack(start), spec.unpack(trained)
    moved = np.asarray(spec.unpack(received) + (after - before), np.float32)
    weights = spec.trainable
    return spec.pack(moved if weights is None else np.where(weights, moved, after))


def losses_of(
    work: ClientWork, models: Sequence[ArrayRecord], samples: Samples | None = None
) -> NDArray[np.float32]:
    """Return the loss of each sample under each model; by default of training samples."""
    samples = work.client.train if samples is None else samples
    measured = np.empty((len(models), len(samples)), np.float32)
    for row, model in zip(measured, models, strict=True):
        work.receive(model)
        row[...] = sample_losses(work.client.network, samples)
    return measured
