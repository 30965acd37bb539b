"""Stable SGD, federated: training that stays in wide minima forgets less.

Mirzadeh et al., "Understanding the Role of Training Regimes in Continual Learning", NeurIPS 2020.
What a network forgets of a task is bounded by the curvature of that task's minimum, its largest
eigenvalue, times the squared distance that the weights move afterwards. So:

- dropout and small mini-batches, from the first task on, lead to wide minima;
- a large learning rate does too, but then each task gets a smaller one, η_t = η γ^t, so that the
  weights move less and less.

No memory is needed. Here each client trains so, with FedProx's term, and the server averages. t
counts the steps of the client's data; where they never change η stays. Networks are the user's:
dropout acts on what their linear layers receive, see :mod:`raceme.training.dropout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raceme.config.options import option
from raceme.protocol.messages import BATCH_SIZE, DROPOUT, LR_SCALE, PROXIMAL_MU
from raceme.server.dispatch import Dispatch, InRounds
from raceme.server.method import Applied, Method, average_by_cluster
from raceme.server.replies import Update
from raceme.server.work import Value, Work
from raceme.strategies.client_tasks import TaskRoundsParameters, task_of


@dataclass(frozen=True)
class StableSGDParameters(TaskRoundsParameters):
    """Hyper-parameters of Stable SGD."""

    dropout: float = option(0.25, "share of hidden units that a step leaves out", low=0, below=1)
    decay: float = option(
        0.8, "γ: share of the learning rate that is left from one task to the next", above=0, high=1
    )
    batch_size: int | None = option(
        None, "samples per step, small ones for wide minima (auto: the run's)", low=1
    )


class StableSGD(Method):
    """FedProx with dropout and a learning rate that falls with each task (Stable SGD)."""

    parameters_type = StableSGDParameters
    one_model = True
    parameters: StableSGDParameters
    dispatch: InRounds

    def policy(self) -> Dispatch:
        """Work in rounds."""
        return InRounds(self.parameters.fraction, picking=self.parameters.picking)

    def work_for(self, client: str) -> Work:
        """Let a client train with dropout, at its task's learning rate."""
        options = self.parameters
        settings: dict[str, Value] = {
            PROXIMAL_MU: options.mu,
            DROPOUT: options.dropout,
            LR_SCALE: options.decay ** task_of(self, client),
        }
        if options.batch_size is not None:
            settings[BATCH_SIZE] = options.batch_size
        return Work(client, settings=settings)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Average, weighted by the numbers of samples."""
        return average_by_cluster(self.clusters, updates)
