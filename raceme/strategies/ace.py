"""ACE and ACED: at every arrival a step along the mean of all clients' latest gradients.

Chang et al., 2025 (arXiv 2511.19066).
The server keeps U_i, the latest gradient of each client, and their mean u. When client i arrives:
``u ← u + (U_new − U_i)/N``, ``U_i ← U_new``, ``w ← w − η u``: fast clients do not own the model.
The cache takes N · |w| numbers.

U_i is −Δ_i: with one local step (``--local-steps 1``), the paper's theory, it is a gradient times
the local rate; more steps bring back some of the bias that the method removes. ``server-lr`` is
η N, our scale: at 1 the arrivals of N clients weigh as much as a round of federated averaging. All
clients train w^0 first, and the mean of what they bring makes the first step, which counts as N
arrivals (our reading). ``start = seen`` does without that round: the mean is over those seen.

ACED takes the mean over the clients whose latest gradient is not too old,
``A = {i : t − t_i ≤ τ_algo}``; if there are none it takes no step. Not confirmed: τ_algo, which is
N here as with a third party; and whether t_i is the version that the cached gradient was computed
on, the default and our reading, or of the model which the client got last (``clock = sent``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters, Model
from raceme.core.messages import TRAINING, Vector
from raceme.core.options import option
from raceme.core.requests import InFlight, Outcome, Update
from raceme.core.scheduling import EveryIdle, InRounds, Scheduler, then
from raceme.core.strategy import Method, Needs, Variant
from raceme.strategies.shared import contribution, stepped


@dataclass(frozen=True)
class ACEParameters:
    """Hyper-parameters of ACE."""

    server_lr: float = option(
        1.0, "η N: at 1 the arrivals of N clients weigh as a round of FedAvg (our scale)", above=0
    )
    start: str = option(
        "all",
        "first step: when all clients have trained w0, or seen: at once, with those seen so far",
        among=("all", "seen"),
    )

    def longest_delay(self, clients: int) -> float:
        """Return τ_algo: up to which age a gradient counts."""
        return math.inf

    @property
    def counts_from_sending(self) -> bool:
        """Whether the age of a client's gradient is that of the model that it got last."""
        return False


@dataclass(frozen=True)
class ACEDParameters(ACEParameters):
    """Hyper-parameters of ACED."""

    delay: int | None = option(
        None, "τ_algo: versions after which a gradient counts no more (auto: N)", low=0
    )
    clock: str = option(
        "trained",
        "t_i: version that the cached gradient was trained from, or of the model sent last",
        among=("trained", "sent"),
    )

    def longest_delay(self, clients: int) -> float:
        """Return τ_algo: up to which age a gradient counts."""
        return clients if self.delay is None else self.delay

    @property
    def counts_from_sending(self) -> bool:
        """Whether the age of a client's gradient is that of the model that it got last."""
        return self.clock == "sent"


@dataclass
class ACEState:
    """The cache.

    Attributes
    ----------
    total : NDArray[np.float64]
        −Σ U_i over the clients that count. Shape (d,).
    latest : dict[str, Vector]
        −U_i: Δ_i of each client that has reported; of statistics what it has. Shape (d,).
    trained_from : dict[str, int]
        t_i of each of them.
    counted : dict[str, bool]
        Clients that are in the total.
    started : bool
        Whether the first step has been taken.
    """

    total: NDArray[np.float64]
    latest: dict[str, Vector] = field(default_factory=dict)
    trained_from: dict[str, int] = field(default_factory=dict)
    counted: dict[str, bool] = field(default_factory=dict)
    started: bool = False


class ACE(Method):
    """Every arrival makes a step along the mean of all clients' latest gradients (ACE)."""

    parameters_type = ACEParameters
    state_type = ACEState
    needs = Needs(bases=True)
    state: ACEState
    parameters: ACEParameters

    def scheduler(self) -> Scheduler:
        """Wait for all clients once; then every client works all the time."""
        if self.parameters.start == "seen":
            return EveryIdle()
        return then(InRounds(), EveryIdle(), lambda: self.state.started)

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with an empty cache."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = ACEState(np.zeros(len(vector)), started=self.parameters.start == "seen")

    def on_sent(self, task: InFlight) -> None:
        """Note which model a client got last, if ages are counted from there."""
        known = task.client in self.state.latest
        if self.parameters.counts_from_sending and known and task.kind in TRAINING:
            self.state.trained_from[task.client] = task.version

    def aggregate(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Fill the cache and take the first step; later act on each update by itself."""
        if self.state.started:
            return super().aggregate(updates)
        for update in updates:
            self._cache(update)
        self.state.started = True
        self._count(self.models[0].version)
        self._step(self.parameters.server_lr)
        weight = self.parameters.server_lr / len(updates)
        return [Outcome(cluster=0, staleness=0, weight=weight) for _ in updates]

    def on_update(self, update: Update) -> Outcome:
        """Put the update in the place of the client's former one, and step along the mean."""
        version, clients = self.models[0].version, len(self.clusters.members)
        self._cache(update)
        self._count(version)
        rate = self.parameters.server_lr / clients if self.state.counted else 0.0
        if rate:
            self._step(rate)
        return Outcome(cluster=0, staleness=update.staleness, weight=rate)

    def _cache(self, update: Update) -> None:
        """U_i ← U_new; it is counted anew."""
        state, client = self.state, update.task.client
        self._leave_out(client)
        brought = contribution(update.delta, update.vector, self.trainable)
        state.latest[client] = brought
        if not (self.parameters.counts_from_sending and client in state.trained_from):
            state.trained_from[client] = update.task.version

    def _count(self, version: int) -> None:
        """Let those count whose gradient is young enough: A."""
        state, longest = self.state, self.parameters.longest_delay(len(self.clusters.members))
        for client, trained_from in state.trained_from.items():
            if version - trained_from > longest:
                self._leave_out(client)
            elif client not in state.counted:
                state.counted[client] = True
                state.total += state.latest[client]

    def _leave_out(self, client: str) -> None:
        if self.state.counted.pop(client, False):
            self.state.total -= self.state.latest[client]

    def _step(self, rate: float) -> None:
        """Take a step along the mean of those that count."""
        model, mean = self.models[0], self.state.total / len(self.state.counted)
        model.replace(stepped(model.vector, rate * mean, mean, self.trainable))


ACED = Variant(ACE, ACEDParameters, "ACE over those whose latest gradient is young enough (ACED).")
