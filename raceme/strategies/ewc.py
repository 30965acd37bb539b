"""FedProx-EWC: federated averaging whose clients hold what matters for their former tasks.

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017. A client
that has trained on former tasks makes its loss on the present one small together with

    λ/2 Σ_i F_i (w_i − w*_i)²,

where w* are its own weights at the end of the former task and F_i, the Fisher information, says how
much weight i matters there: the mean over the task's samples of the squared gradient of the loss.
FedProx's term μ/2 ‖w − w_g‖² is added (Li et al., MLSys 2020), and the server averages.

Information is accumulated as in online EWC (Schwarz et al., "Progress & Compress", ICML 2018): one
penalty for all former tasks together, around the latest w*, with F ← γ F + F_t at the end of task
t. γ = 1 forgets none; Kirkpatrick's own has a penalty for each task, around its own w*.

When a task is over, a client notices with its next training, as its data have moved on then. It
measures F_t at that moment, on the former step's samples, which takes about one local epoch. F and
w* never leave the client. Where data never change this is FedProx. The default of λ is ours, found
on the digits; F is a mean over samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raceme.config.options import option
from raceme.protocol.effort import PASSES_OF_TRAINING, forward_cost
from raceme.protocol.messages import (
    COMPUTE_SCALE,
    ELASTIC_MEMORY,
    ELASTIC_STRENGTH,
    PROXIMAL_MU,
    TRAIN_ELASTIC,
)
from raceme.server.dispatch import Dispatch, InRounds
from raceme.server.method import Applied, Method, average_by_cluster
from raceme.server.replies import Update
from raceme.server.work import Work
from raceme.strategies.client_tasks import TaskRoundsParameters, begins_task


@dataclass(frozen=True)
class EWCParameters(TaskRoundsParameters):
    """Hyper-parameters of FedProx-EWC."""

    strength: float = option(1000.0, "λ: strength of the pull to former tasks' weights", low=0)
    memory: float = option(
        1.0, "γ: share of former tasks' information that is left after the next", low=0, high=1
    )


class EWC(Method):
    """FedProx whose clients hold the weights that matter for their former tasks (FedProx-EWC)."""

    parameters_type = EWCParameters
    one_model = True
    parameters: EWCParameters
    dispatch: InRounds

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({TRAIN_ELASTIC})

    def policy(self) -> Dispatch:
        """Work in rounds."""
        return InRounds(self.parameters.fraction, picking=self.parameters.picking)

    def work_for(self, client: str) -> Work:
        """Let a client train, after it has measured the task that is over, if one is."""
        settings = {
            PROXIMAL_MU: self.parameters.mu,
            ELASTIC_STRENGTH: self.parameters.strength,
            ELASTIC_MEMORY: self.parameters.memory,
        }
        if client in self.progress.trained_steps and begins_task(self, client):
            examples = self.progress.fleet.clients[client].num_examples
            measuring = forward_cost(self.train_config, examples, PASSES_OF_TRAINING)
            settings[COMPUTE_SCALE] = 1.0 + measuring
        return Work(client, TRAIN_ELASTIC, settings=settings)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Average, weighted by the numbers of samples."""
        return average_by_cluster(self.clusters, updates)
