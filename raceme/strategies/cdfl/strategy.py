"""CDFL: client-driven uploads, answered with a personalized mixture of cluster models.

Li and Zhu, "Towards Client Driven Federated Learning" (CDFL). The server has K cluster models w_k,
and a proxy set D_k of each cluster's distribution. A client's data are a changing mixture of the
distributions; at a time of its choice it uploads a model v, trained from the received model u with
the proximal term ρ/2 ‖v − u‖². Each upload is one epoch t:

1. An upload from a model received more than τ0 epochs ago does not change the clusters.
2. DistributionEstimation: the client's mixture α, from the losses of v on the proxy sets and its
   similarity to the cluster models.
3. UpdateRatioCompute: β_k = β0 β1 β2, from α and the lateness of the upload.
4. ``w_k ← (1 − β_k) w_k + β_k v``, and the client receives ``u = Σ α_k w_k``.

Our readings where the paper is silent, mostly options: e_k in β2 is the epoch of the cluster's last
update *before* this one (as printed, of this one, it would have no effect); late uploads, for which
α is used without being computed, estimate it with the present models; bars apply to mean losses,
and are lowered to the smallest loss if above it; a client starts from the mean of the cluster
models; without pre-trained models all clusters start alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from raceme.core.clients import Client
from raceme.core.clusters import Model, NonFiniteModelError, blended
from raceme.core.errors import UserError
from raceme.core.messages import ARRAYS, LARGEST, PROXIMAL_MU, Vector, forward_cost
from raceme.core.options import option
from raceme.core.requests import Answer, Outcome, Request, Update
from raceme.core.schedulers import OnRequest, RequestParameters
from raceme.core.scheduling import Scheduler
from raceme.core.strategy import Method, Needs
from raceme.strategies.shared import start_clusters

# -----------------------------------------------------------------------------
# DistributionEstimation and UpdateRatioCompute. Cluster k has a model w_k, and a proxy set D_k on
# the server: samples of its distribution.
# -----------------------------------------------------------------------------


Shares = NDArray[np.float64]
"""Shares of the clusters, at least 0, sum 1. Shape (K,)."""


@dataclass(frozen=True)
class Bar:
    """Value that is subtracted from losses or distances before they are compared.

    Attributes
    ----------
    height : float
        The bar in the unit of the values; with `follows`, as a share of their minimum.
    follows : bool
        Whether the height is such a share; 1 is "min" in the paper's Table 2.
    """

    height: float
    follows: bool = False


def above_bar(values: NDArray[np.float64], bar: Bar, as_printed: bool = False) -> Shares:
    """Return the differences of values from a bar.

    The paper's Table 2 has a bar of 8 for the losses, without a unit. As printed, a bar between the
    minimum and the mean favours the better cluster more than a lower one does: the smallest
    difference is negative, so that the others' share exceeds 1. Near the mean the shares are
    unbounded, and a bar above the mean favours the worse cluster. In our reading a bar above the
    minimum is lowered to it, which avoids both.

    Parameters
    ----------
    values : NDArray[np.float64]
        Losses or distances, by cluster. Shape (K,).
    bar : Bar
        The bar.
    as_printed : bool
        Whether a bar above the minimum is kept.
    """
    least = float(values.min())
    height = bar.height * least if bar.follows else bar.height
    return values - (height if as_printed else min(height, least))


def others_shares(values: NDArray[np.float64]) -> Shares:
    """Return the share of the other clusters in a sum: 1 − value_k / Σ value.

    If the sum is 0, all shares are equal.
    """
    total = float(values.sum())
    if total == 0:
        return np.full(len(values), 1.0 - 1.0 / len(values))
    return np.asarray(1.0 - values / total)


def estimated_shares(
    losses: NDArray[np.float64],
    differences: NDArray[np.float64],
    distances: NDArray[np.float64],
    c1: float,
    c2: float,
    sharpness: Sequence[float],
) -> Shares:
    """Return α: shares of K distributions in a client's data (DistributionEstimation).

    ``α_k = (c1 Σ_{i≠k} l_i / Σ l + c2 Σ_{i≠k} d1_i / Σ d1 + (1 − c1 − c2) Σ_{i≠k} d2_i / Σ d2)
    / (K − 1)``, then ``α ← softmax(A α)``, once for each A.

    Parameters
    ----------
    losses : NDArray[np.float64]
        l: mean loss of the client's model on each proxy set, less its bar. Shape (K,).
    differences : NDArray[np.float64]
        d1: its difference from the loss of the cluster's own model, less its bar. Shape (K,).
    distances : NDArray[np.float64]
        d2: distance of the client's model from the cluster's, less its bar. Shape (K,).
    c1, c2 : float
        Weights of the first two terms; the third has the remainder.
    sharpness : Sequence[float]
        A: one or several factors of the softmax.

    Returns
    -------
    Shares
        α. Shape (K,).
    """
    count = len(losses)
    if count == 1:
        return np.ones(1)
    terms = zip((c1, c2, 1.0 - c1 - c2), (losses, differences, distances), strict=True)
    alpha = np.sum([c * others_shares(values) for c, values in terms], axis=0) / (count - 1)
    for factor in sharpness:
        alpha = softmax(factor * alpha)
    return np.asarray(alpha, np.float64)


def cluster_shares(alpha: Shares, bar: float | None = None) -> Shares:
    """Return β1: relative share of an update in each cluster. Shape (K,).

    Shares below the bar become 0; the others are divided by the largest.

    Parameters
    ----------
    alpha : Shares
        α: weight of each cluster for the upload. Shape (K,).
    bar : float, optional
        β1's bar; by default the mean of α, which is 1/K ("ave" in the paper's Table 2).
    """
    least = 1.0 / len(alpha) if bar is None else bar
    return np.where(_reaches(alpha, least), alpha / alpha.max(), 0.0)


def lateness_share(last: int, received: int, a: float, b: float) -> float:
    """Return β2: ``1`` if ``e_k − τ < b``, else ``1 / (a (e_k − τ) + 1)``.

    Parameters
    ----------
    last : int
        e_k: epoch of the cluster's last update before this one.
    received : int
        τ: epoch at which the client received what it has trained.
    a, b : float
        Slope and threshold of the lateness.
    """
    late = last - received
    return 1.0 if late < b else 1.0 / (a * late + 1.0)


def _reaches(alpha: Shares, bar: float) -> NDArray[np.bool_]:
    """Return which shares reach a bar; equal shares reach their mean despite rounding."""
    return alpha >= bar * (1.0 - 1e-9)


# -----------------------------------------------------------------------------
# CDFL.
# -----------------------------------------------------------------------------


_MIN = "min"
LAST_UPDATES = ("before", "this")


@dataclass(frozen=True)
class SoftParameters(RequestParameters):
    """Common hyper-parameters of CDFL and FedSoft-Async."""

    rho: float = option(0.1, "ρ: strength of the pull towards the received model", low=0)
    beta0: float = option(0.025, "β0: largest share of an update in a cluster", above=0, high=1)
    a: float = option(10.0, "a: how fast the share of a late update falls", low=0)
    b: float = option(5.0, "b: epochs from which on an update is late", low=0)
    oldest: int | None = option(
        None, "τ0: epochs after which an upload changes no cluster (auto: number of clients)", low=0
    )
    share_bar: float | None = option(
        None, "β1's bar: the least α with which a cluster is updated (auto: 1/K)", low=0, high=1
    )
    last_update: str = option(
        "before",
        "e_k: epoch of a cluster's last update before this one, or of this one (as printed)",
        among=LAST_UPDATES,
    )


@dataclass(frozen=True)
class CDFLParameters(SoftParameters):
    """Hyper-parameters of CDFL; the defaults are the paper's for Fashion-MNIST with K = 3."""

    k: int | None = option(None, "K: number of clusters (auto: of proxy sets)", low=1)
    c1: float = option(0.5, "c1: weight of the losses on the proxy sets", low=0, high=1)
    c2: float = option(0.25, "c2: weight of the likeness of losses", low=0, high=1)
    sharpness: str = option("3", "A: sharpness of the softmax; several apply in turn: '10, 10'")
    loss_bar: str = option(
        "0.5", "bar of l: a mean loss, a share of the smallest of the K as 80%, or min, all of it"
    )
    model_loss_bar: str = option("0", "bar of d1, the distance of losses; or a share, or min")
    distance_bar: str = option("0", "bar of d2, the distance of models; or a share, or min")
    high_bar: str = option(
        "lower",
        "a bar above the smallest value: lower it to that, or keep it as printed, which favours "
        "the best cluster while the bar is below the mean",
        among=("lower", "keep"),
    )


@dataclass
class SoftState:
    """Common state of CDFL and FedSoft-Async.

    Attributes
    ----------
    renewed : dict[int, int]
        e_k: epoch of each cluster's last update.
    since : dict[str, int]
        τ: epoch at which each client received its model.
    """

    renewed: dict[int, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)


class SoftUploads(Method):
    """Common part of CDFL and FedSoft-Async: client-driven uploads into several clusters."""

    parameters: SoftParameters
    state: SoftState
    scheduling: OnRequest

    def scheduler(self) -> Scheduler:
        """Let each client decide when it uploads."""
        return OnRequest(self.parameters)

    def on_join(self, client: Client) -> None:
        """Add a client; a new one receives the mean of the cluster models."""
        super().on_join(client)
        name = client.client_id
        if name not in self.state.since:
            self._send_back(name, dict.fromkeys(self.models, 1.0 / len(self.models)))
            self.state.since[name] = self.progress.updates

    def on_answer(self, answer: Answer) -> None:
        """Process a loss evaluation."""
        self.scheduling.take_loss(answer)

    def _send_back(self, client: str, weights: dict[int, float]) -> None:
        """Record a client's weights of the clusters in the model that it receives."""
        self.clusters.assign(client, weights)

    def _pass_cost(self, client: str, models: int = 1) -> float:
        """Return the cost of a pass without gradients under each of several models."""
        examples = self.progress.fleet.clients[client].num_examples
        return forward_cost(self.train_config, examples, models)

    def _mix_in(self, update: Update, alpha: Shares) -> Outcome:
        """Mix an upload that is in time into its clusters (UpdateRatioCompute).

        The outcome states the cluster of the largest share, the uploads of others since the client
        received its model as staleness, and the largest β_k.

        Parameters
        ----------
        alpha : Shares
            α, in order of the clusters. Shape (K,).
        """
        client, epoch = update.task.client, self.progress.updates + 1
        clusters, state, options = self.clusters, self.state, self.parameters
        received = state.since[client]
        oldest = len(clusters.members) if options.oldest is None else options.oldest
        largest = 0.0
        if epoch - received <= oldest:
            parts = cluster_shares(alpha, options.share_bar)
            for (k, model), beta1 in zip(clusters.models.items(), parts, strict=True):
                if beta1 == 0:
                    continue
                last = state.renewed[k] if options.last_update == "before" else epoch
                beta = options.beta0 * beta1 * lateness_share(last, received, options.a, options.b)
                model.mix(update.vector, beta)
                state.renewed[k], largest = epoch, max(largest, beta)
        state.since[client] = epoch
        shares = zip(clusters.models, alpha.tolist(), strict=True)
        self._send_back(client, {k: share for k, share in shares if share > 0})
        main = list(clusters.models)[int(np.argmax(alpha))]
        return Outcome(main, staleness=epoch - received - 1, weight=largest)


@dataclass
class CDFLState(SoftState):
    """State of CDFL besides its clusters.

    Attributes
    ----------
    received : dict[str, Vector]
        u: each client's last received model. Shape (d,).
    """

    received: dict[str, Vector] = field(default_factory=dict)


class CDFL(SoftUploads):
    """Client-driven uploads, answered with a mixture of cluster models per client (CDFL)."""

    parameters_type = CDFLParameters
    has_distributions = True
    state_type = CDFLState
    parameters: CDFLParameters
    state: CDFLState

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        return Needs(kinds=self.scheduling.asked_kinds, pretrained=True)

    def __init__(
        self, parameters: CDFLParameters | None = None, seed: int = 0, **arguments: Any
    ) -> None:
        """Create the method.

        Raises
        ------
        UserError
            A bar, the sharpness or the weights are invalid.
        """
        super().__init__(parameters, seed, **arguments)
        options = self.parameters
        if options.c1 + options.c2 > 1:
            raise UserError(
                f"cdfl.c1 + cdfl.c2 is {options.c1 + options.c2:g} and must be at most 1: the "
                "rest to 1 is the weight of the distance of models."
            )
        self._losses: dict[int, tuple[Model, int, float]] = {}
        self._sharpness = sharpness_of(options.sharpness)
        self._bars = (
            bar_of("cdfl.loss-bar", options.loss_bar),
            bar_of("cdfl.model-loss-bar", options.model_loss_bar),
            bar_of("cdfl.distance-bar", options.distance_bar),
        )

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Raise UserError unless there is a proxy set for each cluster."""
        wanted = self.parameters.k
        if not proxies:
            raise UserError(
                "cdfl estimates clients' mixtures with samples on the server: give --proxy, how "
                "many test samples of each group it keeps (in a simulation), or a folder with an "
                ".npz file for each cluster."
            )
        if wanted is not None and wanted != proxies:
            raise UserError(
                f"cdfl.k is {wanted}, and there are {proxies} proxy sets: there must be one for "
                "each cluster. Without cdfl.k there are as many clusters as sets."
            )

    def initialize(self, vector: Vector) -> None:
        """Start clusters from their pre-trained models, or all from the initial one."""
        assert self.probe is not None, "check_server() has seen that there is one"
        self.clusters = start_clusters(self, vector, self.probe.sets, "proxy sets", alike=True)
        self.state = CDFLState(renewed=dict.fromkeys(self.clusters.models, 0))

    # Requests.

    def request_for(self, client: str) -> Request:
        """Return training, or a loss evaluation, of the client's received model."""
        received = self.spec.pack(self.state.received[client])
        if self.scheduling.evaluates_loss(client):
            return self.scheduling.loss_evaluation(client, received, self._pass_cost(client))
        settings = {PROXIMAL_MU: self.parameters.rho}
        return Request(client, models=(), arrays={ARRAYS: received}, settings=settings)

    # Uploads.

    def on_update(self, update: Update) -> Outcome:
        """Estimate the client's mixture, mix its model in, and compute the returned model."""
        return self._mix_in(update, self.estimate(update.vector))

    def _send_back(self, client: str, weights: dict[int, float]) -> None:
        """Store the mixture of the cluster models for a client."""
        super()._send_back(client, weights)
        self.state.received[client] = blended(self.models, weights)

    def estimate(self, v: Vector) -> Shares:
        """Return α: mixture of the clusters' distributions in a model's training data.

        Raises
        ------
        NonFiniteModelError
            A loss or a distance is not finite.
        """
        assert self.probe is not None, "check_server() has seen that there is one"
        options, models = self.parameters, self.models
        losses = np.array([self._loss(v, position) for position in range(len(models))])
        own = np.array([self._own_loss(position, k) for position, k in enumerate(models)])
        weights = self.compared(v)
        # Squares of finite weights may overflow a float32.
        with np.errstate(over="ignore"):
            far = [np.linalg.norm(weights - self.compared(m.vector)) for m in models.values()]
        distances = np.array(far, np.float64)
        if not np.isfinite(distances).all():
            raise NonFiniteModelError("its weights are too large to compute distances to clusters")
        measured = (losses, np.abs(own - losses), distances)
        keeps = options.high_bar == "keep"
        pairs = zip(measured, self._bars, strict=True)
        l, d1, d2 = (above_bar(values, bar, keeps) for values, bar in pairs)  # noqa: E741
        return estimated_shares(l, d1, d2, options.c1, options.c2, self._sharpness)

    def _loss(self, vector: Vector, proxy: int) -> float:
        """Return F: mean loss of a model on a proxy set."""
        assert self.probe is not None, "check_server() has seen that there is one"
        loss = float(np.mean(self.probe([vector], proxy), dtype=np.float64))
        if not np.isfinite(loss):
            raise NonFiniteModelError(f"its loss on proxy set {proxy} is {loss}")
        return loss

    def _own_loss(self, proxy: int, cluster: int) -> float:
        """Return a cluster model's loss on its own proxy set, computed once per version."""
        model = self.models[cluster]
        measured, version, loss = self._losses.get(cluster, (None, -1, 0.0))
        if measured is not model or version != model.version:
            loss = self._loss(model.vector, proxy)
            self._losses[cluster] = model, model.version, loss
        return loss


def bar_of(name: str, text: str) -> Bar:
    """Parse a bar: a number, a share of the minimum such as ``80%``, or ``min``.

    Raises
    ------
    UserError
        It is none of these, or a share above 100 %.
    """
    stripped = text.strip()
    if stripped == _MIN:
        return Bar(1.0, follows=True)
    follows = stripped.endswith("%")
    try:
        bar = float(stripped.removesuffix("%"))
    except ValueError:
        bar = float("nan")
    if not 0 <= bar <= (100 if follows else LARGEST):
        raise UserError(
            f"{name} must be a number of at least 0, a share such as 80%, or min; got '{text}'."
        )
    return Bar(bar / 100, follows=True) if follows else Bar(bar)


def sharpness_of(text: str) -> tuple[float, ...]:
    """Parse A: positive numbers, separated by commas.

    Raises
    ------
    UserError
        It is anything else.
    """
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = ()
    if not factors or not all(0 < factor < float("inf") for factor in factors):
        raise UserError(
            f"cdfl.sharpness must be a number above 0, or several with commas; got '{text}'."
        )
    return factors
