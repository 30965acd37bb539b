"""Training one task after another without forgetting: elastic weight consolidation (EWC).

A task of a client is a step of its data. What a client needs of former tasks it keeps in its state:
of EWC its weights at the end of the former task, the Fisher information of all former tasks, and
its own model as it last trained it.
"""

from __future__ import annotations

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from raceme.protocol.effort import PASSES_OF_TRAINING
from raceme.protocol.messages import (
    ELASTIC_MEMORY,
    FISHER,
    FORMER,
    STEP,
)
from raceme.training.kinds import OWN_MODEL, train_model
from raceme.training.local import differentiate
from raceme.training.network import Network, is_usable
from raceme.training.samples import Samples
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
