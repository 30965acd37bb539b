"""CSAFL: groups by update direction and latency, semi-asynchronous in time windows.

Zhang et al., "CSAFL: A Clustered Semi-Asynchronous Federated Learning Framework", IJCNN 2021. All
clients pre-train the initial model w0 once; spectral clustering of latencies and update cosines
divides them into groups (Algorithms 3 and 4). A communication round is a time window: K random
clients train the models of their groups repeatedly until the window ends, and each update is
aggregated on arrival (Algorithm 2). After an update that is too stale, the members of its group
update synchronously once.

The variants of the paper's Table II differ in `update` and `grouping` only.

Algorithm 2 compares the staleness with the threshold (line 15) without saying whether this is
before a client trains or after. We read it as before, so that no trained update is dropped: a stale
update is mixed in like any other, and then the group's members, once all are idle, train from the
same model (line 17). With ``stale=dropped``, the other reading, the check is of the arrival, and a
stale update is discarded (line 19).

Further readings where the paper is silent: updates that arrive after the window do not count; a
client is idle while it waits for others before or after a synchronous update; the latency for the
grouping is the expected one of pre-training (section IV-B3) in a simulation, and the measured one
on real devices; a client that joins later pre-trains in its first window and joins the group whose
mean direction has the largest cosine with its update; a synchronous update that the window ends is
the mean of the members that have answered (``unfinished=dropped`` discards it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model, cosine, cosines, parts_of, unit
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import ARRAYS, LOCAL_EPOCHS, LOCAL_STEPS, Vector
from raceme.core.options import SECONDS, option, with_defaults
from raceme.core.requests import Outcome, Outcomes, Request, Update
from raceme.core.schedulers import InWindows
from raceme.core.scheduling import InRounds, Scheduler, sample, then
from raceme.core.strategy import Method, Needs, Variant, average_by_cluster
from raceme.strategies.shared import (
    DEFAULT_K,
    by_examples,
    check_groups,
    contribution,
    log_count,
    partition,
)

log = getLogger("raceme")

IDLE = MeasureSchema(
    "idle",
    "how long a client waited for others in a window",
    ("client", "window", "seconds", "budget"),
    value="seconds",
    unit="s",
    of="budget",
    summary="shares",
    figure="shares",
)
"""One event per client and window; 0 seconds for a client that never waited."""

UPDATES = ("semi-asynchronous", "asynchronous", "synchronous")
GROUPINGS = ("spectral", "random", "none")


@dataclass(frozen=True)
class CSAFLParameters:
    """Hyper-parameters of CSAFL; the paper states the budget only."""

    update: str = option("semi-asynchronous", "how the members of a group update", among=UPDATES)
    grouping: str = option("spectral", "how clients are grouped", among=GROUPINGS)
    groups: int = option(DEFAULT_K, "m: number of groups", low=1)
    budget: float = option(10.0, "T: time budget of a communication round", unit=SECONDS, above=0)
    picked: int = option(20, "K: clients picked at random for a communication round", low=1)
    threshold: int = option(5, "staleness δ beyond which a group updates together", low=0)
    stale: str = option(
        "mixed",
        "treatment of an update beyond the threshold: mixed in like any other (Algorithm 2), or "
        "dropped",
        among=("mixed", "dropped"),
    )
    rho: float = option(0.1, "ρ: weight of the latency relative to the cosines", low=0)
    width: float = option(0.0, "width of the Gaussian kernel (0: the median distance)", low=0)
    pretrain_epochs: int = option(2, "passes over the samples in pre-training", low=1)
    unfinished: str = option(
        "averaged",
        "treatment of a synchronous update if members are missing at the end of the budget: the "
        "others are averaged, or it is dropped",
        among=("averaged", "dropped"),
    )
    mixing: str = option(
        "model",
        "part of an update mixed into its group: the share of the model, or of its change",
        among=("model", "change"),
    )

    def participants(self, clients: int) -> int:
        """Return the number of clients selected for a communication round."""
        return min(self.picked, clients)


@dataclass
class CSAFLState:
    """State of CSAFL besides its groups.

    Attributes
    ----------
    initial : Vector
        w0: weights of the initial model. Shape (d,).
    grouped : bool
        Whether the clients are divided into groups.
    directions : dict[int, Vector]
        Mean unit update of each group's members, for clients that join later.
    """

    initial: Vector
    grouped: bool = False
    directions: dict[int, Vector] = field(default_factory=dict)


class CSAFL(Method):
    """Groups by update direction and latency, semi-asynchronous in time windows (CSAFL)."""

    parameters_type = CSAFLParameters
    state_type = CSAFLState
    parameters: CSAFLParameters
    state: CSAFLState

    @property
    def needs(self) -> Needs:
        """Base models and latencies; synchronous groups that compare no updates need sums only."""
        is_sum = self.parameters.update == "synchronous" and self.parameters.grouping != "spectral"
        return Needs(bases=True, latencies=True, sum_weight=by_examples if is_sum else None)

    def scheduler(self) -> Scheduler:
        """Pre-train all clients in one round, then train in windows."""
        self.windows = InWindows(
            self.parameters.budget,
            self._pick,
            lambda client: self.clusters.home(client),
            together=self.parameters.update == "synchronous",
            idled=self._report_idle,
        )
        return then(InRounds(), self.windows, lambda: self.state is None or self.state.grouped)

    def check(self, clients: int) -> None:
        """Raise UserError if there are more groups than clients."""
        if self.parameters.grouping != "none":
            check_groups(self.parameters.groups, clients)

    def initialize(self, vector: Vector) -> None:
        """Start with w0; only spectral clustering needs pre-training."""
        if self.parameters.grouping != "none":
            log_count(self, self.parameters.groups, "groups")
        self.clusters = Clusters({0: Model(vector)})
        self.state = CSAFLState(vector.copy(), grouped=self.parameters.grouping != "spectral")

    # Algorithms 3 and 4: grouping clients.

    def request_for(self, client: str) -> Request:
        """Return pre-training of w0 for a client without a group, else training of its group."""
        if self.state.grouped and self.clusters.is_placed(client):
            return Request(client)
        settings = {LOCAL_EPOCHS: self.parameters.pretrain_epochs, LOCAL_STEPS: 0}
        w0 = self.record_of(self.state.initial)
        return Request(client, models=(), arrays={ARRAYS: w0}, settings=settings)

    def _form_groups(self, updates: Sequence[Update]) -> Outcomes:
        """Group the pre-trained clients by spectral clustering of cosines and latencies."""
        clients = [update.task.client for update in updates]
        deltas = np.stack([self._change(update) for update in updates])
        seconds = np.array([latency_of(update) for update in updates])
        count = min(self.parameters.groups, len(clients))
        if count < self.parameters.groups:
            log.warning(
                "Only %d clients have pre-trained, which limits the number of groups.", count
            )
        weights = affinity_of(deltas, seconds, self.parameters.rho, self.parameters.width)
        labels = np.zeros(len(clients), np.int64)
        if count > 1:
            labels = partition(weights, count, seed=int(self.rng.integers(2**31)))
        for part, group in enumerate(self.clusters.split(0, parts_of(clients, labels))):
            members = deltas[labels == part]
            self.state.directions[group] = np.mean([unit(delta) for delta in members], axis=0)
        self.state.grouped = True
        home = self.clusters.main
        return {u.number: Outcome(home(u.task.client), staleness=0, weight=0.0) for u in updates}

    def _place(self, update: Update) -> Outcome:
        """Assign a client that joined later to the group of the nearest direction."""
        delta, directions = self._change(update), self.state.directions
        group = max(directions, key=lambda group: cosine(directions[group], delta))
        self.clusters.assign(update.task.client, group)
        return Outcome(group, staleness=0, weight=0.0)

    def _change(self, update: Update) -> Vector:
        return self.compared(np.asarray(update.vector - self.state.initial))

    def _group_at_random(self, clients: Sequence[Client]) -> None:
        """Assign clients at random to groups of equal size, for R-FedAvg."""
        if 0 in self.clusters.models:
            count = min(self.parameters.groups, len(clients))
            labels = self.rng.permutation(np.arange(len(clients)) % count)
            self.clusters.split(0, parts_of([client.client_id for client in clients], labels))
            return
        for client in clients:
            if not self.clusters.is_placed(client.client_id):
                group = int(self.rng.choice(list(self.clusters.models)))
                self.clusters.assign(client.client_id, group)

    # Algorithm 2: training.

    def _pick(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Select K clients at random, of all groups."""
        if self.parameters.grouping == "random":
            self._group_at_random(online)
        return sample(online, self.parameters.picked, rng)

    def _report_idle(self, client: str, window: int, seconds: float) -> None:
        """Report a client's idle time in a window."""
        budget = self.parameters.budget
        values = {"client": client, "window": window, "seconds": seconds, "budget": budget}
        self.report(Measured(self.now(), self.progress.updates, IDLE, values))

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Form the groups first; later mix single updates in, and average synchronous ones."""
        if not self.state.grouped:
            return self._form_groups(updates)
        if self.parameters.unfinished == "dropped" and not self.windows.is_open:
            home = self.clusters.main
            return {u.number: Outcome(home(u.task.client), u.staleness, 0.0) for u in updates}
        joint = [update for update in updates if self.windows.is_joint(update)]
        single = [update for update in updates if not self.windows.is_joint(update)]
        return {**average_by_cluster(self.clusters, joint), **super().aggregate(single)}

    def on_update(self, update: Update) -> Outcome:
        """Mix one update in with its client's share of the group's samples (Algorithm 2, line 19).

        ``w_g ← w_g + n_i / Σ n_j · (w_i − w_g)``, the sum over the group's members in the window. A
        staleness above δ also makes the group's next update synchronous (line 17).
        """
        client = update.task.client
        if not self.clusters.is_placed(client):
            return self._place(update)
        group = self.clusters.main(client)
        model = self.models[group]
        staleness = update.staleness
        is_semi = self.parameters.update == "semi-asynchronous"
        if is_semi and staleness > self.parameters.threshold:
            self.windows.gather(group)
            if self.parameters.stale == "dropped":
                return Outcome(group, staleness, weight=0.0)
        share = update.num_examples / max(self._examples(group), update.num_examples)
        if self.parameters.mixing == "model":
            model.mix(update.vector, share)
        else:
            mixed = update.vector - model.vector
            step = contribution(update.delta, mixed, self.trainable)
            model.move(np.float32(share) * step)
        return Outcome(group, staleness, share)

    def _examples(self, group: int) -> int:
        """Return Σ n_j over the members of a group in this window."""
        fleet, picked = self.progress.fleet, self.windows.state.members
        return sum(fleet.plausible_examples(c) for c in picked if self.clusters.home(c) == group)


def latency_of(update: Update) -> float:
    """Return a client's update latency: the expected one (section IV-B3) if known, else measured.

    Returns
    -------
    float
        Seconds: ``D (a + 1/μ)`` for the computation, and the update's size over the rate for the
        transfer.
    """
    measured = update.arrived_at - update.task.sent_at
    return measured if update.task.expected is None else update.task.expected


def affinity_of(
    deltas: NDArray[np.float32], seconds: NDArray[np.float64], rho: float, width: float = 0.0
) -> NDArray[np.float64]:
    """Return the affinity of clients: a Gaussian kernel of their rows of latency and cosines.

    Row i is ``[ρ z_i, cos(i, 1), …, cos(i, n)]``, with z_i the latency in standard deviations from
    the mean; the affinity of two clients is ``exp(−‖row_i − row_j‖² / (2 σ²))``.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        Update of each client. Shape (n, d).
    seconds : NDArray[np.float64]
        Latency of each client. Shape (n,).
    rho : float
        ρ: weight of the latency.
    width : float
        σ; 0 for the median distance between rows.

    Returns
    -------
    NDArray[np.float64]
        Shape (n, n), symmetric, 1 on the diagonal.
    """
    z = (seconds - seconds.mean()) / (seconds.std() or 1.0)
    rows = np.column_stack([rho * z, cosines(deltas, deltas)])
    distances = pdist(rows)
    sigma = width or (float(np.median(distances)) if len(distances) else 0.0) or 1.0
    return np.asarray(np.exp(-np.square(squareform(distances)) / (2.0 * sigma**2)))


def _variant(summary: str, **defaults: str) -> Variant[CSAFL]:
    return Variant(CSAFL, with_defaults(CSAFLParameters, **defaults), summary)


TFedAvg = _variant(
    "CSAFL's baseline: synchronous updates, one group (T-FedAvg).",
    update="synchronous",
    grouping="none",
)
TAFedAvg = _variant(
    "CSAFL's baseline: asynchronous updates, one group (TA-FedAvg).",
    update="asynchronous",
    grouping="none",
)
GFedAvg = _variant("CSAFL with synchronous updates (G-FedAvg).", update="synchronous")
GAFedAvg = _variant("CSAFL with asynchronous updates (GA-FedAvg).", update="asynchronous")
RFedAvg = _variant("CSAFL with random groups (R-FedAvg).", grouping="random")
NoGFedAvg = _variant("CSAFL without groups (NoG-FedAvg).", grouping="none")
