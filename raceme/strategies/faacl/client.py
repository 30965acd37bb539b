"""C-FAACL's client half: stored samples of former tasks, and evaluations on them.

A sample of each task, never trained on, is a record of the client's state. It leaves the client
only on a request for :func:`lend`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme.core.messages import NUM_EXAMPLES, ON, from_array, numbered, to_array
from raceme.flower.messages import array_record
from raceme.strategies import faacl as keys
from raceme.training.local import losses
from raceme.training.models import Samples
from raceme.training.work import ClientWork, WorkResult, bounded, train_model


def learn(work: ClientWork) -> WorkResult:
    """Train the received model and keep some of this step's validation samples.

    Raises
    ------
    ValueError
        The client keeps no samples for validation, or the message does not state the number.
    """
    kept = work.client.validation
    if kept is None:
        raise ValueError("To remember samples, a client has to keep some for validation.")
    count = min(int(work.number(keys.REMEMBERED, None)), len(kept))
    chosen = np.sort(work.generator().choice(len(kept), count, replace=False))
    inputs = np.asarray(kept.shaped(kept.x).cpu().numpy())[chosen]
    arrays = {keys.INPUTS: to_array(inputs), keys.LABELS: to_array(kept.y.cpu().numpy()[chosen])}
    work.state[numbered(keys.MEMORY, work.step)] = array_record(arrays)
    return train_model(work, work.model)


def match(work: ClientWork) -> WorkResult:
    """Measure the losses of several models on several sets of samples.

    The models are those of clusters, followed by clients' local models. The sets are the validation
    samples, if requested, the stored samples of the steps that the message names (left out if there
    are none), and samples in the message. The message states by positions which models are
    evaluated on which set.
    """
    models = [*_clusters(work), *_numbered(work, keys.LOCAL)]
    sets: list[tuple[str, Samples | None]] = []
    if work.settings.get(ON) == "validation":
        sets.append(("validation", work.client.validation))
    for step in _steps(work):
        name = numbered(keys.MEMORY, step)
        known = work.state.array_records[name] if name in work.state else None
        sets.append((name, None if known is None else _samples(work, known)))
    for index, record in enumerate(_numbered(work, keys.BORROWED)):
        sets.append((numbered(keys.BORROWED, index), _samples(work, record)))
    pairs = np.reshape(np.array(_integers(work, keys.PAIRS), int), (-1, 2))
    rows = [pairs[pairs[:, 0] == at, 1].tolist() for at in range(len(sets))]
    measured = {
        name: np.empty((len(rows[at]), len(samples)), np.float32)
        for at, (name, samples) in enumerate(sets)
        if samples is not None
    }
    for position, model in enumerate(models):
        work.receive(model)
        for (name, samples), own in zip(sets, rows, strict=True):
            if samples is not None and position in own:
                measured[name][own.index(position)] = losses(work.client.network, samples)
    numbers = {name: bounded(found) for name, found in measured.items()}
    return WorkResult({NUM_EXAMPLES: len(work.client.train)}, numbers=numbers)


def lend(work: ClientWork) -> WorkResult:
    """Send the kept samples of the steps that the message names."""
    numbers: dict[str, NDArray[np.generic]] = {}
    for step in _steps(work):
        name = numbered(keys.MEMORY, step)
        if name in work.state:
            record = work.state.array_records[name]
            for part in (keys.INPUTS, keys.LABELS):
                numbers[f"{name}-{part}"] = from_array(record[part])
    return WorkResult({NUM_EXAMPLES: len(work.client.train)}, numbers=numbers)


def _clusters(work: ClientWork) -> list[ArrayRecord]:
    """Return the models of clusters in a message, which may have none."""
    try:
        return work.models
    except ValueError:
        return []


def _numbered(work: ClientWork, name: str) -> Iterable[ArrayRecord]:
    """Yield the records of a message that are numbered from 0."""
    index = 0
    while numbered(name, index) in work.arrays:
        yield work.arrays[numbered(name, index)]
        index += 1


def _steps(work: ClientWork) -> list[int]:
    return _integers(work, keys.MEMORY_STEPS)


def _integers(work: ClientWork, name: str) -> list[int]:
    """Return a list of integers among the settings of a message; empty if there is none."""
    found = work.settings.get(name, [])
    return [one for one in found if isinstance(one, int)] if isinstance(found, list) else []


def _samples(work: ClientWork, record: ArrayRecord) -> Samples:
    """Return the samples of a record, in the memory layout of this client's network.

    Raises
    ------
    ValueError
        They have another shape than the client's own.
    """
    inputs, labels = from_array(record[keys.INPUTS]), from_array(record[keys.LABELS])
    own = work.client.train
    if inputs.shape[1:] != tuple(own.shaped(own.x[:1]).shape[1:]) or len(inputs) != len(labels):
        raise ValueError(f"These samples have the shape {inputs.shape}, unlike the client's own.")
    network = work.client.network
    kept = network.channels_last, network.accelerator
    return Samples(np.array(inputs, np.float32), np.array(labels), *kept)
