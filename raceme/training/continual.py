"""Training one task after another without forgetting: elastic weight consolidation (EWC).

A task of a client is a step of its data. What a client needs of former tasks it keeps in its state:
of EWC its weights at the end of the former task, the Fisher information of all former tasks, and
its own model as it last trained it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import Tensor

from raceme.core.messages import (
    ADAPTIVE_INDICES,
    ADAPTIVE_VALUES,
    DRIFT_STRENGTH,
    ELASTIC_MEMORY,
    FISHER,
    FORMER,
    OTHERS,
    PASSES_OF_TRAINING,
    PROXIMAL_MU,
    SPARSITY,
    STEP,
    TRAIN_LOSS,
    InvalidModelError,
    from_array,
)
from raceme.training.decomposition import (
    PART,
    Decomposition,
    Masks,
    Strengths,
    TaskPart,
    complete,
    key,
    read,
    written,
)
from raceme.training.kinds import (
    OWN_MODEL,
    score_former,
    score_upload,
    train_model,
    training_answer,
)
from raceme.training.local import differentiate, train
from raceme.training.network import Network, Samples, is_usable
from raceme.training.work import Answer, ClientWork

TRAINED = "trained"
"""Record of a client's state: the step of the data that it last trained on."""


def train_elastic(work: ClientWork) -> Answer:
    """Train the received model; weights are held where they matter for former tasks (EWC).

    Where the client's data have moved on since its last training, the task before is over: first
    of all its Fisher information is added to that of the tasks before it.
    """
    state = work.state
    passed = _consolidate(work)
    held = {name: state.array_records[name] for name in (FISHER, FORMER) if name in state}
    answer = train_model(work, work.model, forward=passed, arrays={**work.arrays, **held})
    assert answer.model is not None, "training answers with a model"
    # A training that diverged is refused by the server; it must not spoil all that follow.
    if is_usable(work.client.network.weights):
        state[OWN_MODEL] = answer.model
        state[TRAINED] = ConfigRecord({STEP: work.step})
    return answer


def _consolidate(work: ClientWork) -> int:
    """Take the end of a task in, if one is over; return how many passes of samples that took.

    F ← γ F + F_t and w* ← w_t, the client's own weights after its last training on the task.
    """
    state, network = work.state, work.client.network
    if TRAINED not in state or state.config_records[TRAINED][STEP] == work.step:
        return 0
    former = work.at_step(int(str(state.config_records[TRAINED][STEP])))
    work.receive(state.array_records[OWN_MODEL])
    fisher = fisher_information(network, former.train)
    if FISHER in state:
        kept = network.read_weights(state.array_records[FISHER])
        fisher += work.number(ELASTIC_MEMORY, 1.0) * kept
    state[FISHER] = network.write_weights(fisher)
    state[FORMER] = network.write_weights(network.weights)
    return PASSES_OF_TRAINING * len(former.train)


def fisher_information(network: Network, samples: Samples) -> Tensor:
    """Return the diagonal of the empirical Fisher information at a network's weights.

    The mean over samples of the squared gradient of each one's loss, with the label that it has
    (Kirkpatrick et al. have labels drawn from the network's own prediction; the two agree where
    it predicts well).

    Returns
    -------
    Tensor
        Shape (d,), float32.
    """
    total = torch.zeros_like(network.weights)
    network.module.eval()
    for x, y in samples.slices(1):
        differentiate(network, x, y)
        total.addcmul_(network.gradient, network.gradient)
    return total / len(samples)


# -----------------------------------------------------------------------------
# Work on decomposed weights: APD's and FedWeIT's training, and tests with a task's own parts.
#
# The model that travels is the shared part. A client keeps a part for each of its tasks, which
# are
# the steps of its data, in its state.
# -----------------------------------------------------------------------------


def train_decomposed(work: ClientWork) -> Answer:
    """Train the received shared part, and the part of the present task (APD)."""
    answer, _ = _train(work, sigmoid=True)
    return answer


def train_borrowing(work: ClientWork) -> Answer:
    """Train likewise, with what other clients have for their tasks (FedWeIT).

    What was sent of others when the task began is kept for as long as it lasts. The answer states
    the task-adaptive weights, for others to borrow.
    """
    state, own = work.state, OTHERS + f"-{work.step}"
    if key(work.step) not in state:
        for name in [name for name in state if name.startswith(OTHERS)]:
            del state[name]
        if OTHERS in work.arrays:
            state[own] = work.arrays[OTHERS]
    answer, part = _train(work, sigmoid=False, borrowed=state.array_records.get(own))
    where = torch.nonzero(part.adaptive).reshape(-1)
    numbers: Mapping[str, NDArray[np.generic]] = {
        ADAPTIVE_INDICES: where.cpu().numpy().astype(np.int32),
        ADAPTIVE_VALUES: part.adaptive[where].cpu().numpy(),
    }
    return replace(answer, numbers=numbers)


def _train(
    work: ClientWork, sigmoid: bool, borrowed: ArrayRecord | None = None
) -> tuple[Answer, TaskPart]:
    """Train, and keep the parts; return the answer, and the present task's part."""
    client, network, received = work.client, work.client.network, work.model
    scores = score_former(work, received, lambda step: complete(work, step))
    spec = work.receive(received)
    shared, masks = network.weights.clone(), Masks(network, sigmoid)
    others = _others(borrowed, len(shared)).to(network.accelerator)
    kept = {
        name: read(record, network.accelerator)
        for name, record in work.state.array_records.items()
        if name.startswith(PART)
    }
    present = key(work.step)
    if present not in kept:
        for former in kept.values():
            former.held = former.weights(shared, masks)
        kept[present] = TaskPart.new(masks, len(shared), len(others), len(network.slices))
    formers = [part for name, part in kept.items() if name != present]
    strengths = Strengths(
        sparsity=work.number(SPARSITY, 0.0),
        drift=work.number(DRIFT_STRENGTH, 0.0),
        mu=work.number(PROXIMAL_MU, 0.0),
    )
    parts = Decomposition(network, masks, shared, kept[present], formers, others, strengths)
    # FedProx's term is on the shared part, not on what is made of it.
    settings = replace(work.training_settings(), proximal_mu=0.0)
    loss = train(network, client.train, settings, work.generator(), descent=parts.descent)
    parts.finish()
    scores |= score_upload(work)
    # A training that diverged is refused by the server; it must not spoil all that follow.
    if is_usable(parts.weights) and all(is_usable(part.adaptive) for part in formers):
        for name, part in kept.items():
            work.state[name] = written(part, masks)
    network.weights.copy_(parts.shared)
    answer = training_answer(work, work.give(spec, received), {TRAIN_LOSS: loss, **scores})
    return answer, kept[present]


def _others(record: ArrayRecord | None, weights: int) -> Tensor:
    """Return the task-adaptive weights of other clients, shape (clients, d).

    Raises
    ------
    InvalidModelError
        They do not fit the network.
    """
    record = ArrayRecord() if record is None else record
    count = sum(name.startswith(ADAPTIVE_INDICES) for name in record)
    others = torch.zeros(count, weights)
    for row in range(count):
        where = from_array(record[f"{ADAPTIVE_INDICES}-{row}"])
        values = from_array(record[f"{ADAPTIVE_VALUES}-{row}"])
        fits = where.shape == values.shape and where.ndim == 1 and where.dtype.kind in "iu"
        if not fits or (where.size and not 0 <= int(where.min()) <= int(where.max()) < weights):
            raise InvalidModelError("The task-adaptive weights of another client do not fit.")
        others[row, torch.from_numpy(where.astype(np.int64))] = torch.from_numpy(
            values.astype(np.float32)
        )
    return others
