"""Central differential privacy: clipped updates, noise, and an account of each client.

The server is trusted with single updates; models are published. With noise multiplier z and clip C,
each update's change Δ_i of the weights is scaled to a length of at most C, and Gaussian noise hides
it. Two runs are neighbours if they differ in all updates of one client, which are zeros in one of
them (McMahan et al., ICLR 2018; zeros: Kairouz et al., ICML 2021). Which client works when is
taken as known: no client is sampled, so there is no amplification.

**Sums.** If updates enter the model as sums only (`Needs.sums`: FedAvg, FedBuff, FedAsync), the
noise enters each new version: of a standard deviation of z C max_i a_i on each weight, with a_i the
weights α of client i's updates in this version. Removing client i moves the version by a_i C at
most, so the noise is at least z times that, whatever the staleness of the buffered updates. One
update at a time is a buffer of one. What the buffer holds is seen by the server only.

**Single updates.** Any other method may compare, keep and combine updates. Each gets noise of
standard deviation z C on every weight before the method sees it: whatever the method does then adds
nothing to what a client reveals.

In both, an update of a client counts as one Gaussian mechanism of multiplier z, and k of them as
one of z / √k, exactly: the weights that a method gives depend on published models and on time. The
account states the ε of the client that took part most. What single updates tell besides (numbers
of examples, losses, metrics) is withheld from methods, so that all updates of equal staleness count
alike; methods that ask clients for more are refused.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from logging import getLogger
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
from raceme.core.events import MeasureSchema
from raceme.core.feature import Feature, FeatureContext, Refusal
from raceme.core.gaussian import gaussian_noise, seeded_key
from raceme.core.messages import FINISHED_AT, STARTED_AT, TRAIN, ModelSpec, Vector
from raceme.core.registry import explained
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.features.central_privacy import Options

if TYPE_CHECKING:
    from raceme.core.strategy import Needs

log = getLogger("raceme")

PRIVACY = MeasureSchema(
    "privacy",
    "privacy loss ε of the client that took part most",
    ("client", "participations", "epsilon"),
    value="epsilon",
    figure="steps",
)
_TIMES = (STARTED_AT, FINISHED_AT)
"""Metrics that are kept: when a client works is taken as known."""


@dataclass
class CentralPrivacyState:
    """State of the feature.

    Attributes
    ----------
    participations : dict[str, int]
        Number of updates that each client has contributed.
    pending : dict[str, float]
        Weights of the updates since the last version of the model, by client; with sums only.
    version : int
        That version; −1 before the first update.
    draws : int
        Number of noise vectors so far.
    unused : dict[int, bool]
        Numbers of the requests whose updates are counted, and wait to be aggregated.
    """

    participations: dict[str, int] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    version: int = -1
    draws: int = 0
    unused: dict[int, bool] = field(default_factory=dict)


class CentralPrivacy(Feature):
    """Clips updates, adds noise, and gives clients no work beyond their privacy budget."""

    options_type = Options
    state_type = CentralPrivacyState
    switch = "privacy_central"
    keeps_bases = True
    options: Options
    state: CentralPrivacyState
    _worst: tuple[int, str] | None = None
    """The client that took part most, derived from the state: number of its updates, and its id."""

    # Before a run.

    def resolved(self, needs: Needs) -> Mapping[str, Any]:
        """Leave own models out, unless they are asked for."""
        assert self.config is not None, "only runs with keys are resolved"
        is_auto = self.config.value("own-model") is None
        return {"own_model": False} if self.is_on and is_auto else {}

    def check(self, needs: Needs) -> None:
        """Check that the method sees nothing of clients but updates, and that ε can be kept."""
        config = self.config
        assert config is not None, "only runs with keys are checked"
        if needs.kinds or needs.validation:
            more = ", ".join(sorted(needs.kinds)) or "comparisons on validation samples"
            raise UserError(
                f"privacy-central puts noise on updates, and {config.strategy} asks clients for "
                f"more, which gets none: {more}."
            )
        if not needs.exchange:
            raise UserError(f"privacy-central: {config.strategy} shares no models, leave it out.")
        for key, why in (
            ("own-model", "clients report how well their own models do"),
            ("score-uploads", "scores of single updates get no noise"),
        ):
            if config.value(key) is True:
                raise UserError(f"privacy-central cannot run with {key}: {why}.")
        if config.value("protection") != "none":
            raise UserError(
                "privacy-central cannot run with a protection, whose verdicts on single updates "
                "get no noise: privacy-clip bounds the influence of each update."
            )
        self._check_account(config.clients or 0)

    def _check_account(self, clients: int) -> None:
        """Check that the budget allows an update, and warn of a δ that says little."""
        options = self.options
        first = epsilon_of(1, options.privacy_central, options.privacy_delta)
        if options.privacy_budget is not None and first > options.privacy_budget:
            needed = account().get_sigma_gaussian(options.privacy_budget, options.privacy_delta)
            raise UserError(
                f"privacy-budget {options.privacy_budget:g} is spent before the first update, "
                f"which costs ε = {first:.3g}: give privacy-central {needed:.3g} or more."
            )
        if options.privacy_delta * clients >= 1:
            log.warning(
                "privacy-delta %g is not below 1 / %d, one by the number of clients: a mechanism "
                "that publishes all data of one client would pass. Give a smaller one.",
                options.privacy_delta,
                clients,
            )

    def check_model(self, spec: ModelSpec) -> None:
        """Check that a model consists of weights only."""
        if spec.trainable is not None or spec.counters is not None:
            raise UserError(
                "privacy-central clips changes of weights, and the model has running statistics "
                "of batch normalisation besides: take a model without them."
            )

    # Updates.

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Refuse work that the method has not declared, and whose answer gets no noise.

        Raises
        ------
        UserError
            It is other work than training.
        """
        if request.kind != TRAIN:
            raise UserError(
                f"privacy-central puts noise on updates, and the method asks {request.client} for "
                f"work of kind '{request.kind}', whose answer gets none."
            )
        return request

    def on_update(self, update: Update, context: FeatureContext) -> Update | Refusal:
        """Clip an update, and count it; with noise unless it enters a sum."""
        state, client = self.state, update.task.client
        if self.holds(client, context):
            return Refusal("its client has contributed as many updates as its privacy permits")
        self._count(client, context)
        state.unused[update.number] = True
        if state.version < 0:
            state.version = next(iter(context.clusters.models.values())).version
        base = context.base(update)
        change = clipped(update.vector - base, self.options.privacy_clip)
        if not self._sums(context):
            change = change + self._noise(len(change), self.options.privacy_clip, context)
        return replace(
            update,
            vector=np.asarray(base + change, np.float32),
            num_examples=1,
            train_loss=math.nan,
            metrics={name: update.metrics[name] for name in _TIMES if name in update.metrics},
            numbers={},
            mixture=(),
        )

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Add noise to the model if it has become a new version."""
        if not self._sums(context):
            return
        state, (model,) = self.state, context.clusters.models.values()
        for update, outcome in zip(updates, outcomes, strict=True):
            client = update.task.client
            state.pending[client] = state.pending.get(client, 0.0) + outcome.weight
        if model.version == state.version:
            return
        # A client with several updates in one buffer moves it by the sum of their weights.
        moved = self.options.privacy_clip * max(state.pending.values())
        model.amend(self._noise(len(model.vector), moved, context))
        state.pending, state.version = {}, model.version

    @staticmethod
    def _sums(context: FeatureContext) -> bool:
        return context.has_sums and context.has_one_model

    def _noise(self, size: int, sensitivity: float, context: FeatureContext) -> Vector:
        """Return noise of z times a sensitivity: from the seed in simulations, else secret."""
        seed = (self.config or RunConfig()).seed
        key = seeded_key(seed, "central-privacy", self.state.draws)
        if not context.is_simulated:
            key = secrets.token_bytes(32)
        self.state.draws += 1
        deviation = self.options.privacy_central * sensitivity
        return np.asarray(deviation * gaussian_noise(key, size), np.float32)

    # Account.

    @cached_property
    def _affordable(self) -> float:
        """The number of updates of one client that the budget permits."""
        options = self.options
        if options.privacy_budget is None:
            return math.inf
        z, delta = options.privacy_central, options.privacy_delta
        return affordable(options.privacy_budget, z, delta)

    @property
    def _most(self) -> float:
        """The number of updates that a client may contribute."""
        return min(self._affordable, self.options.privacy_updates or math.inf)

    def holds(self, client: str, context: FeatureContext) -> bool:
        """Return whether a client has contributed all its updates."""
        return self.state.participations.get(client, 0) >= self._most

    def ends(self, context: FeatureContext) -> str:
        """Return why the run ends: no client that is online may contribute more."""
        taken = self.state.participations
        # Updates that wait for the end of a round are paid for.
        if self._most == math.inf or self.state.unused or not 0 < context.online <= len(taken):
            return ""
        if not all(self.holds(client, context) for client in context.clients):
            return ""
        each = f"each client has contributed {plural(int(self._most), 'update')}"
        if self._affordable > self._most:
            return each
        return f"the privacy budget of ε = {self.options.privacy_budget:g} is spent: {each}"

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Record that an update waits no more."""
        self.state.unused.pop(task.number, None)

    @property
    def _most_frequent(self) -> tuple[int, str]:
        if self._worst is None:
            taken = ((count, client) for client, count in self.state.participations.items())
            self._worst = max(taken, default=(0, ""))
        return self._worst

    def _count(self, client: str, context: FeatureContext) -> None:
        """Count an update; report the loss of the client that took part most."""
        taken = self.state.participations.get(client, 0) + 1
        worst, _ = self._most_frequent
        self.state.participations[client] = taken
        if taken > worst:
            self._worst = taken, client
            epsilon = epsilon_of(taken, self.options.privacy_central, self.options.privacy_delta)
            values = {"client": client, "participations": taken, "epsilon": epsilon}
            context.measure(PRIVACY, **values)


def clipped(change: Vector, length: float) -> Vector:
    """Return a change, scaled to a length if it is longer. Shape (d,)."""
    own = float(np.linalg.norm(change.astype(np.float64)))
    return change if own <= length else np.asarray(change * (length / own))


def epsilon_of(participations: int, noise: float, delta: float) -> float:
    """Return the ε of a client after a number of updates, by Google's dp-accounting.

    k Gaussian mechanisms of multiplier z are one of z / √k.

    Parameters
    ----------
    participations : int
        k: the client's updates, at least 1.
    noise : float
        z: standard deviation of the noise by the sensitivity.
    delta : float
        δ.
    """
    return float(account().get_epsilon_gaussian(noise / math.sqrt(participations), delta))


def affordable(budget: float, noise: float, delta: float) -> int:
    """Return the largest number of updates of one client whose ε is within a budget."""
    count: int = round((noise / account().get_sigma_gaussian(budget, delta)) ** 2)
    # The inversion is off by rounding errors.
    return count if count and epsilon_of(count, noise, delta) <= budget else max(0, count - 1)


def account() -> ModuleType:
    """Import dp-accounting, which is an extra.

    Raises
    ------
    UserError
        It is not installed.
    """
    try:
        found: ModuleType = import_module("dp_accounting").gaussian_mechanism
    except ModuleNotFoundError as error:
        raise explained(error) from None
    return found
