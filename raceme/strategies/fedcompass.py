"""FedCompass: fast clients take more local steps, so that groups of clients arrive together.

Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices
Using a Computing Power-Aware Scheduler", ICLR 2024. Who takes how many steps, and who waits for
whom, is in :mod:`raceme.server.arrivals`. When a group is complete, ``w ← w + (α/N) Σ st(s_i)
(w_i − w)``, with ``st(s) = (1 + s)^−a``: N clients, s_i staleness, all against the same w.

The authors' code has st(s) = (1 + s)^a, which counts stale updates more; we take that for a slip.
N is the number of clients online. The paper's local optimiser is Adam, with mini-batches of 64.
Nothing is kept of the models that clients have started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.protocol.effort import short_task
from raceme.server.arrivals import ByArrival
from raceme.server.dispatch import Dispatch
from raceme.server.method import Applied, Method
from raceme.server.replies import Update
from raceme.server.work import Work


@dataclass(frozen=True)
class FedCompassParameters:
    """Hyper-parameters; the defaults are those of the authors' code."""

    min_steps: int = option(20, "Q_min: mini-batches of a client's work, at least", low=1)
    max_steps: int = option(100, "Q_max: mini-batches of a client's work, at most", low=1)
    patience: float = option(
        1.5, "λ: latest time of a group, in times of what its first member needs", low=1
    )
    renewal: float = option(
        0.9, "share of the last measurement in a client's speed", above=0, high=1
    )
    alpha: float = option(0.9, "α: what all clients together move the model by", above=0, high=1)
    a: float = option(0.5, "a: power by which staleness counts, (1 + s)^−a", low=0)

    def __post_init__(self) -> None:
        if self.min_steps > self.max_steps:
            raise UserError(
                f"fedcompass: min-steps is {self.min_steps} and max-steps {self.max_steps}: the "
                "former must not be larger."
            )


class FedCompass(Method):
    """Groups of clients that arrive together, the fast with more local steps (FedCompass)."""

    parameters_type = FedCompassParameters
    one_model = True
    parameters: FedCompassParameters
    dispatch: ByArrival

    def policy(self) -> Dispatch:
        """Let clients of a group be back at once."""
        own = self.parameters
        return ByArrival(own.min_steps, own.max_steps, own.patience, own.renewal)

    def work_for(self, client: str) -> Work:
        """Let a client take as many steps as it can until its group is back."""
        examples = self.progress.fleet.clients[client].num_examples
        steps = self.dispatch.steps_of(client)
        return Work(client, settings=short_task(self.train_config, examples, steps))

    def aggregate(self, updates: Sequence[Update]) -> Sequence[Applied]:
        """Move the model towards those of a group: w ← w + (α/N) Σ st(s_i) (w_i − w)."""
        model, own = self.models[0], self.parameters
        clients = max(len(updates), self.clusters.size(0))
        stale = [model.version - update.task.version for update in updates]
        shares = [own.alpha / clients * (1.0 + s) ** -own.a for s in stale]
        step = np.zeros_like(model.vector)
        for update, share in zip(updates, shares, strict=True):
            step += np.float32(share) * (update.vector - model.vector)
        model.move(step)
        return [Applied(0, s, share) for s, share in zip(stale, shares, strict=True)]
