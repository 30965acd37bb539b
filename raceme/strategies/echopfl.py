"""EchoPFL: asynchronous clusters that follow each update, and broadcasts to clients at work.

Li et al., "EchoPFL: Asynchronous Personalized Federated Learning on Mobile Devices with On-Demand
Staleness Control", IMWUT 2024 (arXiv 2401.15960). Every update counts, however late, and is mixed
into the model of its client's cluster; clusters are dynamic; against staleness the server sends a
cluster's model to its clients at work, not after each update but on demand.

Only the paper's summary was available. Our readings: a client belongs to the cluster whose other
clients' updates are on average most similar to its own (cosines of each client's running mean); if
none is as similar as ``expand``, the client founds a cluster with a copy of its model; a cluster
without clients is removed. A broadcast is due when a model has moved, since the last one, by
``echo`` times the mean length of its clients' running means while one of them works on an older
version. A client at work adds the model's change to its weights, w ← w + (w_echo − w_received), and
continues. Here the server adds the change when the update arrives, so that the gradients in between
are those of the former weights; the update's staleness counts from the broadcast. Reported traffic
does not include broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from raceme.core.clusters import nearest
from raceme.core.messages import TRAIN, Vector
from raceme.core.options import option
from raceme.core.requests import InFlight, Outcome, Update
from raceme.core.strategy import Method, Needs
from raceme.strategies.fedasync import MixingParameters, mix_by_staleness
from raceme.strategies.shared import only_weights

_WEIGHT = 0.3
"""Weight of an update in its client's mean, an exponential moving average."""


@dataclass(frozen=True)
class EchoPFLParameters(MixingParameters):
    """Hyper-parameters of EchoPFL."""

    expand: float = option(0.0, "similarity below which a client founds a cluster", low=-1, high=1)
    echo: float = option(
        1.0,
        "distance that a model moves between two broadcasts, in lengths of a mean update (0: "
        "always)",
        low=0,
    )


@dataclass
class Echo:
    """The last broadcast of a cluster.

    Attributes
    ----------
    version : int
        Version of the model.
    vector : Vector
        The model. Shape (d,).
    """

    version: int
    vector: Vector


@dataclass
class EchoPFLState:
    """State of EchoPFL besides its clusters.

    Attributes
    ----------
    deltas : dict[str, Vector]
        Running mean of each client's updates. Shape (d,), weights only.
    echoes : dict[int, Echo]
        Last broadcast of each cluster; before the first, its model at the start.
    working : dict[str, int]
        Version of the model that each client at work has.
    broadcasts : int
        Number of models sent to clients at work.
    """

    deltas: dict[str, Vector] = field(default_factory=dict)
    echoes: dict[int, Echo] = field(default_factory=dict)
    working: dict[str, int] = field(default_factory=dict)
    broadcasts: int = 0


class EchoPFL(Method):
    """Clusters that follow each update, and model broadcasts to clients at work (EchoPFL)."""

    parameters_type = EchoPFLParameters
    state_type = EchoPFLState
    needs = Needs(bases=True)
    parameters: EchoPFLParameters
    state: EchoPFLState

    def on_sent(self, task: InFlight) -> None:
        """Note the version that a client works on."""
        if task.kind == TRAIN:
            self.state.working[task.client] = task.version
            self._echo(task.cluster)

    def on_closed(self, task: InFlight) -> None:
        """Forget a client's work."""
        if task.kind == TRAIN:
            self.state.working.pop(task.client, None)

    def on_update(self, update: Update) -> Outcome:
        """Place the client, mix its update in, and broadcast if it is due."""
        client, trained = update.task.client, update.task.cluster
        delta = self.compared(update.delta)
        before = self.state.deltas.get(client, delta)
        self.state.deltas[client] = before + np.float32(_WEIGHT) * (delta - before)
        self.state.working.pop(client, None)
        home = self._place(client)
        echo = self.state.echoes.get(home)
        if home == trained and echo is not None and echo.version > update.task.version:
            shift = only_weights(echo.vector - update.base, self.trainable)
            update = replace(update, vector=update.vector + shift)
            staleness = self.models[home].version - echo.version
        else:
            staleness = update.staleness
        outcome = mix_by_staleness(self, update, home, staleness)
        self._broadcast_if_due(home)
        return outcome

    def _place(self, client: str) -> int:
        """Move a client to the most similar cluster, or to one of its own; return it."""
        clusters, deltas = self.clusters, self.state.deltas
        before = clusters.main(client)
        known = {
            cluster: [deltas[c] for c in clusters.clients(cluster) if c in deltas and c != client]
            for cluster in self.models
        }
        similarity = nearest(deltas[client], known)
        best = max(similarity, key=lambda cluster: similarity[cluster], default=before)
        if similarity.get(best, 1.0) >= self.parameters.expand:
            clusters.assign(client, best)
        elif not clusters.is_alone(client):
            founded = clusters.found(self.models[before].copy(), [client])
            self.state.echoes[founded] = self._present(founded)
        home = clusters.main(client)
        if home != before and not clusters.clients(before, online_only=False):
            clusters.retire(before)
            self.state.echoes.pop(before, None)
        return home

    def _broadcast_if_due(self, cluster: int) -> None:
        """Send a cluster's model to its clients at work, if it has moved far enough."""
        state, model = self.state, self.models[cluster]
        members = self.clusters.clients(cluster)
        late = [c for c in members if state.working.get(c, model.version) < model.version]
        lengths = [float(np.linalg.norm(state.deltas[c])) for c in members if c in state.deltas]
        if not late or not lengths:
            return
        moved = float(np.linalg.norm(self.compared(model.vector - self._echo(cluster).vector)))
        if moved <= self.parameters.echo * float(np.mean(lengths)):
            return
        state.echoes[cluster] = self._present(cluster)
        state.working |= dict.fromkeys(late, model.version)
        state.broadcasts += len(late)

    def _echo(self, cluster: int) -> Echo:
        """Return the last broadcast of a cluster; before the first, its present model."""
        echoes = self.state.echoes
        if cluster not in echoes:
            echoes[cluster] = self._present(cluster)
        return echoes[cluster]

    def _present(self, cluster: int) -> Echo:
        model = self.models[cluster]
        return Echo(model.version, model.vector.copy())
