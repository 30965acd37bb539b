"""FedBuff: buffered asynchronous aggregation.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
Algorithm 1: the server collects K deltas, each scaled by s(τ) = 1 / √(1 + τ), and then takes one
step w ← w + η_g · mean. Statistics of batch normalisation become the mean of the clients'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters, Model, cosine
from raceme.core.messages import TRAINING, Vector
from raceme.core.options import option
from raceme.core.requests import InFlight, Outcome, Outcomes, Update
from raceme.core.scheduling import EveryIdle, InRounds, Scheduler, then
from raceme.core.strategy import Method, Needs, Variant
from raceme.strategies.shared import contribution, only_weights, stepped

log = getLogger("raceme")


@dataclass(frozen=True)
class FedBuffParameters:
    """Hyper-parameters; the defaults are those with which CASA's paper runs FedBuff."""

    k: int = option(10, "updates K per server step", low=1)
    server_lr: float = option(1.0, "server learning rate η_g", above=0)


@dataclass
class FedBuffState:
    """The buffer for the next version of the global model.

    Attributes
    ----------
    total : Vector
        Sum of the buffered scaled deltas, and of clients' statistics. Shape (d,).
    count : int
        Number of deltas in the sum.
    """

    total: Vector
    count: int = 0


def freshness(staleness: int) -> float:
    """Return s(τ), the factor of a delta: 1 / √(1 + τ)."""
    return 1.0 / math.sqrt(1.0 + staleness)


class FedBuff(Method):
    """Single model, updated by the mean of every K staleness-scaled deltas."""

    parameters_type = FedBuffParameters
    state_type = FedBuffState
    needs = Needs(
        bases=True,
        one_model=True,
        sums=True,
        sum_weight=lambda update: freshness(update.staleness),
    )
    state: FedBuffState
    parameters: FedBuffParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with an empty buffer."""
        warn_of_short_run("FedBuff", "k", self.parameters.k, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        self.state = FedBuffState(np.zeros_like(vector))

    def on_update(self, update: Update) -> Outcome:
        """Buffer the scaled delta; take the server step when there are K."""
        state, options, model = self.state, self.parameters, self.models[0]
        staleness = update.staleness
        scale = freshness(staleness)
        scaled = np.float32(scale) * update.delta
        state.total += contribution(scaled, update.vector, self.trainable)
        state.count += 1
        if state.count == options.k:
            step = np.float32(options.server_lr / options.k) * state.total
            mean = state.total / np.float32(options.k)
            # Emptied first: if the step is non-finite and refused, the next buffer starts empty.
            state.total[...] = 0.0
            state.count = 0
            model.replace(stepped(model.vector, step, mean, self.trainable))
        return Outcome(cluster=0, staleness=staleness, weight=options.server_lr * scale / options.k)


def warn_of_short_run(name: str, option: str, needed: int, planned: int) -> None:
    """Warn if a run ends before a buffering method changes its model.

    Parameters
    ----------
    name, option : str
        Method, and its option for the buffer size.
    needed, planned : int
        Buffer size, and number of updates of the run; 0 if unknown.
    """
    if 0 < planned < needed:
        log.warning(
            "%s changes its model after every %d updates, and the run has %d: the model will not "
            "change. Set a smaller %s.",
            name,
            needed,
            planned,
            option,
        )


# -----------------------------------------------------------------------------
# CA2FL: a buffer whose mean is corrected by every client's last update.
#
# Wang et al., "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached
# Update Calibration", ICLR 2024. As in FedBuff the server collects M updates before it takes a
# step. It also keeps h_i, the last update of each client, 0 at the start, and their mean h over all
# N clients. An update counts by its difference from the client's former one, and h stands in for
# the clients without an update in the buffer, as in SAGA: ``v = h + 1/M Σ (Δ_i − h_i)``,
# ``w ← w + η_g v``.
#
# The cache takes N · |w| numbers. h is the mean before the buffer was filled. If a client reports
# twice in one buffer, its second residual is relative to its first update. The defaults of M and
# η_g, 10 (of 100 clients) and 1, are those of third parties; the paper's are not confirmed. With
# η_g = 1 the cache's term may grow until nothing is learnt; then take a smaller η_g. Clients that
# went offline stay in the mean, and clients that have not reported yet count as 0.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CA2FLParameters:
    """Hyper-parameters; the defaults are third parties', as the paper's are not confirmed."""

    m: int = option(10, "M: updates per server step", low=1)
    server_lr: float = option(1.0, "server learning rate η_g", above=0)


@dataclass
class CA2FLState:
    """The cache, and the buffer for the next step.

    Attributes
    ----------
    latest : dict[str, Vector]
        h_i: last update of each client that has reported, its weights only. Shape (d,).
    latest_total : NDArray[np.float64]
        Σ h_i now. Shape (d,).
    mean : NDArray[np.float64]
        h: mean over all clients, from before the buffer. Shape (d,).
    residuals : NDArray[np.float64]
        D: sum of Δ_i − h_i over the buffer, and of clients' statistics. Shape (d,).
    count : int
        Number of updates in the buffer.
    """

    latest_total: NDArray[np.float64]
    mean: NDArray[np.float64]
    residuals: NDArray[np.float64]
    latest: dict[str, Vector] = field(default_factory=dict)
    count: int = 0


class CA2FL(Method):
    """FedBuff with a cache of each client's last update that calibrates the mean (CA2FL)."""

    parameters_type = CA2FLParameters
    state_type = CA2FLState
    needs = Needs(bases=True)
    state: CA2FLState
    parameters: CA2FLParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model, with empty cache and buffer."""
        warn_of_short_run("CA2FL", "m", self.parameters.m, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        zeros = np.zeros(len(vector))
        self.state = CA2FLState(zeros, zeros.copy(), zeros.copy())

    def on_update(self, update: Update) -> Outcome:
        """Buffer the residual, update the cache; take the server step when there are M."""
        state, options, client = self.state, self.parameters, update.task.client
        staleness = update.staleness
        brought = contribution(update.delta, update.vector, self.trainable)
        change = only_weights(brought, self.trainable).astype(np.float64)
        state.residuals += brought
        if client in state.latest:
            state.residuals -= state.latest[client]
            change -= state.latest[client]
        state.latest[client] = only_weights(brought, self.trainable)
        state.latest_total += change
        state.count += 1
        if state.count == options.m:
            self._step()
        return Outcome(cluster=0, staleness=staleness, weight=options.server_lr / options.m)

    def _step(self) -> None:
        """Take the step along v = h + D/M, and update h to the present mean over all clients."""
        state, model = self.state, self.models[0]
        mean = state.residuals / state.count
        step = self.parameters.server_lr * (state.mean + mean)
        state.mean = state.latest_total / len(self.clusters.members)
        state.residuals, state.count = np.zeros_like(mean), 0
        model.replace(stepped(model.vector, step, mean, self.trainable))


# -----------------------------------------------------------------------------
# FADAS: AMSGrad on the server over a buffer's mean, slower when the buffer holds a stale update.
#
# Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization", ICML 2024 (arXiv
# 2407.18365). With every M updates, Δ their mean and s_max the largest staleness among them:
# ``m ← β1 m + (1 − β1) Δ``, ``v ← β2 v + (1 − β2) Δ²``, ``v̂ ← max(v̂, v)``,
# ``w ← w + η_t m / (√v̂ + ε)``.
#
# η_t is η while s_max ≤ τ_c, and η / s_max beyond, as in the authors' code; a transcription of the
# paper has min(η, 1/s_max), which is ``delay-rule = least``. The authors' code also divides m by
# 1 − β1^t and √v̂ by √(1 − β2^t): ``bias-correction``. It is not confirmed which rules the paper
# uses; the defaults are our reading. The server keeps m, v, v̂ and the buffer's sum, but no vectors
# of clients. With η of 0.01 or more the model may diverge after small steps, since v̂ adapts slowly.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FADASParameters:
    """Hyper-parameters; the defaults are those of the authors' code."""

    m: int = option(5, "M: updates per server step", low=1)
    server_lr: float = option(1e-3, "server learning rate η (without delay rule: 1e-4)", above=0)
    beta1: float = option(0.9, "β1: decay of the mean", low=0, below=1)
    beta2: float = option(0.99, "β2: decay of the mean square", low=0, below=1)
    epsilon: float = option(1e-8, "ε, added to the root", above=0)
    calm_delay: int = option(1, "τ_c: staleness up to which η is not reduced", low=0)
    delay_rule: str = option(
        "divide",
        "η beyond τ_c: divide: η / s (authors' code), least: min(η, 1/s), or none: η",
        among=("divide", "least", "none"),
    )
    bias_correction: bool = option(False, "divide by 1 - β^t as the authors' code does")

    def rate(self, largest: int) -> float:
        """Return η_t, by the largest staleness of the buffer."""
        if largest <= self.calm_delay or self.delay_rule == "none":
            return self.server_lr
        if self.delay_rule == "least":
            return min(self.server_lr, 1.0 / largest)
        return self.server_lr / largest


@dataclass
class FADASState:
    """The optimiser, and the buffer for its next step.

    Attributes
    ----------
    momentum, square, largest_square : NDArray[np.float64]
        m, v and v̂. Shape (d,).
    total : NDArray[np.float64]
        Sum of the buffered updates, and of clients' statistics. Shape (d,).
    count : int
        Number of updates in the sum.
    largest_staleness : int
        s_max: largest staleness of the updates in the sum.
    steps : int
        t: steps of the server so far.
    """

    momentum: NDArray[np.float64]
    square: NDArray[np.float64]
    largest_square: NDArray[np.float64]
    total: NDArray[np.float64]
    count: int = 0
    largest_staleness: int = 0
    steps: int = 0


class FADAS(Method):
    """AMSGrad on the server every M updates, with a delay-adaptive step size (FADAS)."""

    parameters_type = FADASParameters
    state_type = FADASState
    needs = Needs(bases=True, sum_weight=lambda update: 1.0)
    state: FADASState
    parameters: FADASParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with an empty buffer."""
        warn_of_short_run("FADAS", "m", self.parameters.m, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        zeros = np.zeros(len(vector))
        self.state = FADASState(zeros, zeros.copy(), zeros.copy(), zeros.copy())

    def on_update(self, update: Update) -> Outcome:
        """Buffer the update; take the server step when there are M."""
        state, options = self.state, self.parameters
        staleness = update.staleness
        state.total += contribution(update.delta, update.vector, self.trainable)
        state.largest_staleness = max(state.largest_staleness, staleness)
        state.count += 1
        if state.count == options.m:
            self._step()
        # Adam normalises the size of its input, so the outcome states the update's share of the
        # mean.
        return Outcome(cluster=0, staleness=staleness, weight=1.0 / options.m)

    def _step(self) -> None:
        """Take the optimiser's step along the mean of the buffer."""
        state, options, model = self.state, self.parameters, self.models[0]
        mean, rate = state.total / state.count, options.rate(state.largest_staleness)
        state.total, state.count, state.largest_staleness = np.zeros_like(mean), 0, 0
        state.steps += 1
        state.momentum = options.beta1 * state.momentum + (1.0 - options.beta1) * mean
        state.square = options.beta2 * state.square + (1.0 - options.beta2) * mean**2
        state.largest_square = np.maximum(state.largest_square, state.square)
        momentum, root = state.momentum, np.sqrt(state.largest_square)
        if options.bias_correction:
            momentum = momentum / (1.0 - options.beta1**state.steps)
            root = root / np.sqrt(1.0 - options.beta2**state.steps)
        step = rate * momentum / (root + options.epsilon)
        model.replace(stepped(model.vector, step, mean, self.trainable))


# -----------------------------------------------------------------------------
# PORT: a buffer of updates weighted by freshness and by agreement with the model's last step.
#
# Su and Li, "How Asynchronous Can Federated Learning Be?", IWQoS 2022. When enough clients have
# reported, ``w ← w + Σ p_i Δ_i``, Σ p_i = 1, with
# ``p_i ∝ n_i [γ S / (s_i + S) + μ (cos(Δ_i, w − w_ref) + 1) / 2]``: n_i examples, s_i staleness, S
# its bound. The cosine is taken as 1 when s_i ≤ 1 or there is no older model.
#
# w_ref is the model before the last step, as in the authors' code. A comment there mentions the
# model that the client started from, ``reference = start``; it is not confirmed which one the paper
# uses. In the paper a client above the bound must report its present model. Here no message
# interrupts a training client; instead, the buffer waits until no client at work is above the bound
# (our reading). Only weights are compared. The server keeps one more model, the buffer's sum, and
# the models that clients started from.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PORTParameters:
    """Hyper-parameters; the defaults are those of the authors' code."""

    min_clients: int = option(15, "least number of updates per server step", low=1)
    bound: int = option(10, "S: staleness above which the buffer waits for a client", low=1)
    gamma: float = option(3.0, "γ: weight of freshness", low=0)
    mu: float = option(1.0, "μ: weight of agreement", low=0)
    reference: str = option(
        "last-step",
        "w_ref: the model before the last step, or the one that the client started from",
        among=("last-step", "start"),
    )

    def weight(self, staleness: int, cos: float) -> float:
        """Return γ S / (s + S) + μ (cos + 1) / 2."""
        fresh = self.bound / (staleness + self.bound)
        return self.gamma * fresh + self.mu * (cos + 1.0) / 2.0


@dataclass
class PORTState:
    """The buffer for the next step.

    Attributes
    ----------
    total : NDArray[np.float64]
        Sum of the weighted updates, and of clients' statistics. Shape (d,).
    weight : float
        Sum of the weights of these updates.
    count : int
        Number of updates in the sum.
    before : Vector or None
        The model before the last step. Shape (d,).
    at_work : dict[str, int]
        Version of the model that each client trains.
    """

    total: NDArray[np.float64]
    weight: float = 0.0
    count: int = 0
    before: Vector | None = None
    at_work: dict[str, int] = field(default_factory=dict)


class PORT(Method):
    """Buffer weighted by freshness and agreement, with a bound on staleness (PORT)."""

    parameters_type = PORTParameters
    state_type = PORTState
    needs = Needs(bases=True)
    state: PORTState
    parameters: PORTParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with an empty buffer."""
        options = self.parameters
        warn_of_short_run("PORT", "min-clients", options.min_clients, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        self.state = PORTState(np.zeros(len(vector)))

    def on_sent(self, task: InFlight) -> None:
        """Record the version that a client trains."""
        self.state.at_work[task.client] = task.version

    def on_closed(self, task: InFlight) -> None:
        """Record the end of a client's work."""
        self.state.at_work.pop(task.client, None)

    def on_update(self, update: Update) -> Outcome:
        """Buffer the weighted update; take the step unless a stale client is awaited."""
        state, options = self.state, self.parameters
        staleness = update.staleness
        weight = options.weight(staleness, self._agreement(update, staleness)) * update.num_examples
        brought = contribution(update.delta, update.vector, self.trainable)
        state.total += weight * brought
        state.weight += weight
        state.count += 1
        share = weight / state.weight if state.weight else 0.0
        state.at_work.pop(update.task.client, None)
        if state.count >= options.min_clients and not self._waits():
            self._step()
        return Outcome(cluster=0, staleness=staleness, weight=share)

    def _agreement(self, update: Update, staleness: int) -> float:
        """Return cos(Δ_i, w − w_ref); 1 for a fresh update, and before the first step."""
        by_start = self.parameters.reference == "start"
        reference = update.base if by_start else self.state.before
        if staleness <= 1 or reference is None:
            return 1.0
        direction = np.asarray(self.models[0].vector - reference)
        return float(cosine(self.compared(update.delta), self.compared(direction)))

    def _waits(self) -> bool:
        """Return whether a working client is staler than the bound."""
        oldest = min(self.state.at_work.values(), default=self.models[0].version)
        return self.models[0].version - oldest > self.parameters.bound

    def _step(self) -> None:
        """Take the step along the weighted mean."""
        state, model = self.state, self.models[0]
        mean = state.total / state.weight if state.weight else np.zeros_like(state.total)
        state.total, state.weight, state.count = np.zeros_like(mean), 0.0, 0
        state.before = model.vector.copy()
        model.replace(stepped(model.vector, mean, mean, self.trainable))


# -----------------------------------------------------------------------------
# ACE and ACED: at every arrival a step along the mean of all clients' latest gradients.
# Chang et al., 2025 (arXiv 2511.19066). The server keeps U_i, the latest gradient of each client,
# and their mean u. When client i arrives: ``u ← u + (U_new − U_i)/N``, ``U_i ← U_new``,
# ``w ← w − η u``, so that fast clients do not dominate the model. The cache takes N · |w| numbers.
#
# U_i is −Δ_i. With one local step (``--local-steps 1``), as in the paper's theory, it is a gradient
# times the local rate; more steps bring back some of the bias that the method removes.
# ``server-lr`` is η N, our scale: at 1 the arrivals of N clients weigh as much as a round of
# federated averaging. All clients train w^0 first, and the mean of their updates is the first step,
# which counts as N arrivals (our reading). With ``start = seen`` there is no such round, and the
# mean is over the clients that have reported.
#
# ACED takes the mean over the clients whose latest gradient is not too old, ``A = {i : t − t_i ≤
# τ_algo}``; without any it takes no step. Two points are not confirmed: τ_algo, which is N here, as
# in a third party's code; and whether t_i is the version on which the cached gradient was computed,
# the default and our reading, or the version that the client received last (``clock = sent``).
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ACEParameters:
    """Hyper-parameters of ACE."""

    server_lr: float = option(
        1.0, "η N: at 1 the arrivals of N clients weigh as a round of FedAvg (our scale)", above=0
    )
    start: str = option(
        "all",
        "first step: all: when all clients have trained w0, or seen: at once, over the clients "
        "that have reported",
        among=("all", "seen"),
    )

    def longest_delay(self, clients: int) -> float:
        """Return τ_algo: the maximum age of gradients."""
        return math.inf

    @property
    def counts_from_sending(self) -> bool:
        """Whether a gradient's age is that of the client's last received model."""
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
        """Return τ_algo: the maximum age of gradients."""
        return clients if self.delay is None else self.delay

    @property
    def counts_from_sending(self) -> bool:
        """Whether a gradient's age is that of the client's last received model."""
        return self.clock == "sent"


@dataclass
class ACEState:
    """The cache.

    Attributes
    ----------
    total : NDArray[np.float64]
        −Σ U_i over the clients that count. Shape (d,).
    latest : dict[str, Vector]
        −U_i: latest Δ_i of each client, with its statistics. Shape (d,).
    trained_from : dict[str, int]
        t_i of each of these clients.
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
    """One step along the mean of all clients' latest gradients at each arrival (ACE)."""

    parameters_type = ACEParameters
    state_type = ACEState
    needs = Needs(bases=True)
    state: ACEState
    parameters: ACEParameters

    def scheduler(self) -> Scheduler:
        """Wait for all clients once; then work asynchronously."""
        if self.parameters.start == "seen":
            return EveryIdle()
        return then(InRounds(), EveryIdle(), lambda: self.state.started)

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with an empty cache."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = ACEState(np.zeros(len(vector)), started=self.parameters.start == "seen")

    def on_sent(self, task: InFlight) -> None:
        """Record the model that a client received last, if ages count from it."""
        known = task.client in self.state.latest
        if self.parameters.counts_from_sending and known and task.kind in TRAINING:
            self.state.trained_from[task.client] = task.version

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Fill the cache and take the first step; later apply single updates."""
        if self.state.started:
            return super().aggregate(updates)
        for update in updates:
            self._cache(update)
        self.state.started = True
        self._count(self.models[0].version)
        self._step(self.parameters.server_lr)
        weight = self.parameters.server_lr / len(updates)
        return {u.number: Outcome(cluster=0, staleness=0, weight=weight) for u in updates}

    def on_update(self, update: Update) -> Outcome:
        """Replace the client's former update, and step along the mean."""
        version, clients = self.models[0].version, len(self.clusters.members)
        self._cache(update)
        self._count(version)
        rate = self.parameters.server_lr / clients if self.state.counted else 0.0
        if rate:
            self._step(rate)
        return Outcome(cluster=0, staleness=update.staleness, weight=rate)

    def _cache(self, update: Update) -> None:
        """U_i ← U_new, counted again."""
        state, client = self.state, update.task.client
        self._leave_out(client)
        brought = contribution(update.delta, update.vector, self.trainable)
        state.latest[client] = brought
        if not (self.parameters.counts_from_sending and client in state.trained_from):
            state.trained_from[client] = update.task.version

    def _count(self, version: int) -> None:
        """Update the set A of clients with recent gradients."""
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
        """Take a step along the mean of the gradients that count."""
        model, mean = self.models[0], self.state.total / len(self.state.counted)
        model.replace(stepped(model.vector, rate * mean, mean, self.trainable))


ACED = Variant(
    ACE, ACEDParameters, "ACE restricted to clients with a recent enough latest gradient (ACED)."
)
