"""Central differential privacy: clipped updates, noise, and an account of each client.

Models are published; the server is trusted with single updates or, with `secure`, with their sums.
With noise multiplier z and clip C, each update's change Δ_i of the weights is scaled to a length of
at most C, and Gaussian noise hides it. Two runs are neighbours if they differ in all updates of one
client, which are zeros in one of them (McMahan et al., ICLR 2018; zeros: Kairouz et al., ICML
2021). Which client works when is taken as known: no client is sampled, so there is no
amplification.

**Versions.** If updates enter one model as sums only (`Needs.sums`: FedAvg, FedBuff, FedAsync), the
noise enters each new version: of a standard deviation of z C max_i a_i on each weight, with a_i the
weights α of client i's updates in this version. Removing client i moves the version by a_i C at
most, so the noise is at least z times that, whatever the staleness of the buffered updates. One
update at a time is a buffer of one. What the buffer holds is seen by the server only. With
`privacy-tree` the noise of versions is that of binary trees; see
:mod:`raceme.features.central_privacy.tree`.

**Cohorts.** If a method needs sums of updates of a cluster (`Needs.sum_weight`: Panicle), updates
wait until there are `privacy-cohort` of the cluster. The method receives for each of them their
weighted mean, Σ w_i Δ_i / Σ w_i, with noise of standard deviation z C max_i w_i / Σ w_i: the more
members, the less. With `secure` the cohorts are its own; devices clip before they mask, and the
server adds the noise to the sum that it learns.

**Single updates.** Any other method may compare, keep and combine updates. Each gets noise of
standard deviation z C on every weight before the method sees it.

In the last two, whatever a method does then adds nothing to what a client reveals. In all but the
tree, an update of a client counts as one Gaussian mechanism of multiplier z, and k of them as one
of z / √k, exactly: the weights that a method gives depend on published models and on time. The
account states the ε of the client that has spent most. What single updates tell besides (numbers
of examples, losses, metrics) is withheld from methods, so that all updates of equal staleness count
alike; methods that ask clients for more are refused.

**Groups.** Panicle groups clients by probes. As sketches that get noise on the device
(`panicle.sketch-epsilon`), each counts as one more Gaussian mechanism. With `privacy-known-groups`
probes are not part of the account, and ε is that of the updates, given the groups.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from logging import getLogger
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import MetricRecord, RecordDict

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
from raceme.core.events import MeasureSchema, grouped
from raceme.core.feature import Feature, FeatureContext, Held, Refusal
from raceme.core.gaussian import clipped, gaussian_noise, seeded_key
from raceme.core.messages import (
    FINISHED_AT,
    METRICS,
    NUMBERS,
    SKETCH,
    SKETCH_NOISE,
    STARTED_AT,
    TRAIN,
    TRAIN_SKETCH,
    InvalidReplyError,
    ModelSpec,
    Vector,
    array_of,
)
from raceme.core.registry import explained
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.core.sketches import Sketcher
from raceme.features.central_privacy import CLIP, Options
from raceme.features.central_privacy.tree import cost, renewed
from raceme.features.secure import COHORT

if TYPE_CHECKING:
    from raceme.core.strategy import Needs

log = getLogger("raceme")

PRIVACY = MeasureSchema(
    "privacy",
    "privacy loss ε of the client that has spent most",
    ("client", "participations", "epsilon"),
    value="epsilon",
    figure="steps",
)
_TIMES = (STARTED_AT, FINISHED_AT)
"""Metrics that are kept: when a client works is taken as known."""
_ROUNDING = 1e-9
"""Share of a budget by which sums of floating-point numbers may exceed it."""


@dataclass
class CentralPrivacyState:
    """State of the feature.

    Attributes
    ----------
    participations : dict[str, int]
        Number of updates that each client has contributed.
    spent : dict[str, float]
        μ² of each client besides its updates: of its noisy sketches, and of former trees.
    pending : dict[str, float]
        Weights of the updates since the last version of the model, by client; with sums only.
    version : int
        That version; −1 before the first update.
    draws : int
        Number of noise vectors so far.
    unused : dict[int, bool]
        Numbers of the requests whose updates are counted, and wait to be aggregated.
    ready : dict[str, Update]
        Updates that wait for others of their cluster, with the clipped change for the vector.
    sketched : dict[str, int]
        Size of the sketch that a client's present request is for.
    deviation : float
        Deviation of the noise that clients add to sketches; 0 if none.
    leaf : int
        Number of leaves of trees so far.
    share : float
        Weight α to which the noise of trees is relative: the largest of the first version.
    leaves : dict[str, dict[int, float]]
        Parts of clients in the leaves of the present tree, relative to it.
    root : str
        Key from which the noise of trees derives, in hexadecimal digits.
    """

    participations: dict[str, int] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    version: int = -1
    draws: int = 0
    unused: dict[int, bool] = field(default_factory=dict)
    ready: dict[str, Update] = field(default_factory=dict)
    sketched: dict[str, int] = field(default_factory=dict)
    deviation: float = 0.0
    leaf: int = 0
    share: float = 0.0
    leaves: dict[str, dict[int, float]] = field(default_factory=dict)
    root: str = ""


class CentralPrivacy(Feature):
    """Clips updates, adds noise, and gives clients no work beyond their privacy budget."""

    options_type = Options
    state_type = CentralPrivacyState
    switch = "privacy_central"
    client = "raceme.features.central_privacy.client:work"
    keeps_bases = True
    settings = frozenset({CLIP})
    holds_for_good = True
    options: Options
    state: CentralPrivacyState
    _most_spent: float | None = None
    """The largest μ² of a client, derived from the state."""

    def __init__(self, options: Options | None = None, config: RunConfig | None = None) -> None:
        super().__init__(options, config)
        self._run = config or RunConfig()
        self._warned: set[int] = set()
        self._cohort: tuple[float, Vector] | None = None
        """Number and noise of the masked sum whose updates are being released."""

    # Before a run.

    def resolved(self, needs: Needs) -> Mapping[str, Any]:
        """Leave own models out, unless they are asked for."""
        is_auto = self._run.value("own-model") is None
        return {"own_model": False} if self.is_on and is_auto else {}

    def check(self, needs: Needs) -> None:
        """Check that the method sees nothing of clients but updates, and that ε can be kept."""
        config, strategy = self._run, self._run.strategy
        kinds = needs.kinds - {TRAIN_SKETCH}
        if kinds or needs.validation:
            more = ", ".join(sorted(kinds)) or "comparisons on validation samples"
            raise UserError(
                f"privacy-central puts noise on updates, and {strategy} asks clients for more, "
                f"which gets none: {more}."
            )
        if not needs.exchange:
            raise UserError(f"privacy-central: {strategy} shares no models, leave it out.")
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
        if (
            needs.sketches
            and TRAIN_SKETCH not in needs.kinds
            and not self.options.privacy_known_groups
        ):
            raise UserError(
                f"privacy-central: with its noise {strategy} cannot tell which clients are alike. "
                f"Give {strategy}.sketch-epsilon, for groups from sketches with noise of their "
                "own, or privacy-known-groups=true, which leaves the groups out of ε."
            )
        self._check_noise(needs)
        self._check_account(config.clients or 0)

    def _check_noise(self, needs: Needs) -> None:
        """Check that a tree fits the method."""
        tree = self.options.privacy_tree
        if tree is None:
            return
        if tree & (tree - 1):
            raise UserError(f"privacy-tree must be a power of two, got {tree}.")
        if self._is_masked:
            raise UserError(
                "privacy-tree puts noise on versions, and with secure each sum gets its own: leave "
                "one of them out."
            )
        if not needs.sums:
            raise UserError(
                f"privacy-tree puts noise on versions, and {self._run.strategy} does not only add "
                "updates to one model: take fedbuff or fedasync."
            )

    def _check_sketches(self) -> None:
        """Check that the budget allows two sketches of a client and an update."""
        needed = 2 * self._cost_of_sketch + self._least_cost
        if needed > self._budget:
            raise UserError(
                f"privacy-budget {self.options.privacy_budget:g} is spent before the first update: "
                f"with a client's two sketches it costs ε = {self._epsilon(needed):.3g}. Give a "
                "larger one, or privacy-known-groups=true, which leaves the groups out of ε."
            )

    def _check_account(self, clients: int) -> None:
        """Check that the budget allows an update, and warn of a δ that says little."""
        options = self.options
        first = self._epsilon(self._least_cost)
        if options.privacy_budget is not None and first > options.privacy_budget:
            needed = account().get_sigma_gaussian(options.privacy_budget, options.privacy_delta)
            needed *= options.privacy_central * math.sqrt(self._least_cost)
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

    # Which noise.

    @property
    def _is_masked(self) -> bool:
        """Whether the server learns sums only, to which it adds the noise."""
        return bool(self._run.value("secure"))

    def _by_version(self, context: FeatureContext) -> bool:
        return context.has_sums and context.has_one_model and not self._is_masked

    def _by_cohort(self, context: FeatureContext) -> bool:
        return context.has_weights and not context.has_sums and not self._is_masked

    @property
    def _height(self) -> int | None:
        """Height of the trees, if the noise is theirs."""
        tree = self.options.privacy_tree
        return None if tree is None else tree.bit_length() - 1

    # Updates.

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Refuse work whose answer gets no noise; ask for clipping before masks.

        Raises
        ------
        UserError
            It is work that the method has not declared, or a round with the noise of trees.
        """
        if request.kind not in (TRAIN, TRAIN_SKETCH):
            raise UserError(
                f"privacy-central puts noise on updates, and the method asks {request.client} for "
                f"work of kind '{request.kind}', whose answer gets none."
            )
        if self._height is not None and context.together:
            raise UserError(
                "privacy-tree is for updates that arrive one by one: in rounds, in which all "
                "clients take part, independent noise is smaller. Leave it out."
            )
        if size := request.settings.get(SKETCH):
            self.state.sketched[request.client] = int(size)  # type: ignore[arg-type]
            self.state.deviation = float(request.settings.get(SKETCH_NOISE, 0.0))  # type: ignore[arg-type]
            self._check_sketches()
        elif self._is_masked:
            settings = {**request.settings, CLIP: self.options.privacy_clip}
            return replace(request, settings=settings)
        return request

    def on_reply(self, content: RecordDict, context: FeatureContext) -> RecordDict:
        """Check that a change that is to be masked is clipped, as the device says."""
        metrics = content.metric_records.get(METRICS, MetricRecord())
        is_sketch = SKETCH in content.array_records.get(NUMBERS, {})
        if self._is_masked and not is_sketch and metrics.get(CLIP) != self.options.privacy_clip:
            raise InvalidReplyError(
                "it is not clipped: the device's raceme knows no privacy-central, or its run has "
                "another configuration"
            )
        return content

    def on_update(self, update: Update, context: FeatureContext) -> Update | Refusal | Held:
        """Clip an update, and count it; with noise unless it enters a version or a cohort."""
        state, client = self.state, update.task.client
        if size := state.sketched.get(client):
            return self._sketch(update, size, context)
        if self.holds(client, context):
            return Refusal("its client has contributed as many updates as its privacy permits")
        if state.version < 0:
            state.version = next(iter(context.clusters.models.values())).version
        base = context.base(update)
        change = clipped(update.vector - base, self.options.privacy_clip)
        told = {name: update.metrics[name] for name in _TIMES if name in update.metrics}
        known = replace(
            update, num_examples=1, train_loss=math.nan, metrics=told, numbers={}, mixture=()
        )
        if self._by_cohort(context):
            state.ready[client] = replace(known, vector=np.asarray(change, np.float32))
            return Held(f"cohorts of {self.options.privacy_cohort} updates (privacy-cohort)")
        self._count(update, context)
        if self._is_masked:
            change = change + self._noise_of_sum(update, context)
        elif not self._by_version(context):
            change = change + self._noise(len(change), self.options.privacy_clip, context)
        return replace(known, vector=np.asarray(base + change, np.float32))

    def _sketch(self, update: Update, size: int, context: FeatureContext) -> Update:
        """Return a probe of which the method sees the sketch only; count it if it has noise."""
        client, sketcher, base = update.task.client, Sketcher(size), context.base(update)
        length = sketcher.length(len(context.compared(base)))
        if SKETCH in update.numbers:
            found = array_of(update.numbers, SKETCH, (length,)).astype(np.float32)
        else:
            found = sketcher.direction(context.compared(update.vector - base))
        if not self.options.privacy_known_groups:
            spent = self.state.spent.get(client, 0.0)
            self.state.spent[client] = spent + self._cost_of_sketch
            self._report(client, context)
        return replace(
            update,
            vector=base.copy(),
            num_examples=1,
            train_loss=math.nan,
            metrics={name: update.metrics[name] for name in _TIMES if name in update.metrics},
            numbers={SKETCH: found},
            mixture=(),
        )

    def pending(self, context: FeatureContext) -> Iterator[Update]:
        """Release the noisy means of cohorts that are complete.

        A cohort is complete with `privacy-cohort` members, or all of a smaller cluster; where
        updates wait for each other anyway, when no other client of the cluster is at work. If none
        is, half as many are enough. Fewer wait: noise would be all that is left of them.
        """
        if not self.state.ready:
            return
        ready = grouped((context.clusters.main(client), client) for client in self.state.ready)
        busy = {context.clusters.main(task.client) for task in context.at_work}
        for cluster, clients in ready.items():
            size = max(1, context.clusters.size(cluster))
            enough = min(self.options.privacy_cohort, size)
            is_full = len(clients) >= enough and not context.together
            if is_full or (cluster not in busy and 2 * len(clients) >= enough):
                self._warn(cluster, size)
                yield from self._released([self.state.ready.pop(c) for c in clients], context)

    def _warn(self, cluster: int, size: int) -> None:
        """Warn once of a cluster that is much smaller than a cohort."""
        if 2 * size <= self.options.privacy_cohort and cluster not in self._warned:
            self._warned.add(cluster)
            log.warning(
                "Cluster %d has %s online: the noise in its model is %.1f times that of a cohort "
                "of %d (privacy-cohort).",
                cluster,
                plural(size, "client"),
                self.options.privacy_cohort / size,
                self.options.privacy_cohort,
            )

    def _released(self, updates: Sequence[Update], context: FeatureContext) -> Iterator[Update]:
        """Release the mean of some updates, with noise, as the update of each of them."""
        weights = np.array([context.weight(update) for update in updates])
        shares = weights / weights.sum()
        mean = shares @ np.stack([update.vector for update in updates]).astype(np.float64)
        moved = self.options.privacy_clip * float(shares.max())
        mean = mean + self._noise(len(mean), moved, context)
        vectors = [np.asarray(context.base(update) + mean, np.float32) for update in updates]
        for update, vector in zip(updates, vectors, strict=True):
            self._count(update, context)
            yield replace(update, vector=vector, arrived_at=context.now())

    def _noise_of_sum(self, update: Update, context: FeatureContext) -> Vector:
        """Return the noise of the masked sum that an update was part of: the same for each."""
        number, share, rounding = array_of(update.numbers, COHORT, (3,))
        if self._cohort is None or self._cohort[0] != number:
            moved = (self.options.privacy_clip + rounding) * share
            self._cohort = number, self._noise(len(update.vector), moved, context)
        return self._cohort[1]

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Add noise to the model if it has become a new version."""
        if not self._by_version(context):
            return
        state, (model,) = self.state, context.clusters.models.values()
        for update, outcome in zip(updates, outcomes, strict=True):
            client = update.task.client
            state.pending[client] = state.pending.get(client, 0.0) + outcome.weight
        if model.version == state.version:
            return
        if self._height is None:
            # A client with several updates in one buffer moves it by the sum of their weights.
            moved = self.options.privacy_clip * max(state.pending.values())
            model.amend(self._noise(len(model.vector), moved, context))
        else:
            largest = max(outcome.weight for outcome in outcomes)
            model.amend(self._noise_of_leaf(len(model.vector), largest, self._height, context))
        state.pending, state.version = {}, model.version

    def _noise(self, size: int, sensitivity: float, context: FeatureContext) -> Vector:
        """Return noise of z times a sensitivity: from the seed in simulations, else secret."""
        key = seeded_key(self._run.seed, "central-privacy", self.state.draws)
        if not context.is_simulated:
            key = secrets.token_bytes(32)
        self.state.draws += 1
        deviation = self.options.privacy_central * sensitivity
        return np.asarray(deviation * gaussian_noise(key, size), np.float32)

    # The tree.

    def _noise_of_leaf(
        self, size: int, largest: float, height: int, context: FeatureContext
    ) -> Vector:
        """Return by how much the noise of the sum changes with the present version."""
        state = self.state
        state.share = state.share or largest
        if not state.root:
            is_known = context.is_simulated
            seed = (self._run.seed, "central-privacy-tree")
            state.root = (seeded_key(*seed) if is_known else secrets.token_bytes(32)).hex()
        deviation = self.options.privacy_central * self.options.privacy_clip * state.share
        new, former = renewed(state.leaf, height)
        total = np.zeros(size)
        for sign, nodes in ((1.0, [new]), (-1.0, former)):
            for node in nodes:
                total += sign * gaussian_noise(seeded_key(state.root, *node), size)
        pending, state.pending = state.pending, {}
        for client, weight in pending.items():
            parts = state.leaves.setdefault(client, {})
            parts[state.leaf] = weight / state.share
            self._report(client, context)
        state.leaf += 1
        if state.leaf % 2**height == 0:
            for client, parts in state.leaves.items():
                spent = cost(parts, height) / self.options.privacy_central**2
                state.spent[client] = state.spent.get(client, 0.0) + spent
            state.leaves = {}
        return np.asarray(deviation * total, np.float32)

    # Account: of the Gaussian mechanisms of a client, with multipliers z_j, μ² = Σ 1 / z_j².

    @property
    def _least_cost(self) -> float:
        """μ² of a client with a single update."""
        return (1.0 if self._height is None else self._height + 1.0) / self._z2

    @property
    def _cost_of_sketch(self) -> float:
        """μ² of a noisy sketch: any two are 2 apart at most. 0 if groups are known."""
        deviation = self.state.deviation
        return 4.0 / deviation**2 if deviation and not self.options.privacy_known_groups else 0.0

    @property
    def _z2(self) -> float:
        return self.options.privacy_central**2

    def _epsilon(self, spent: float) -> float:
        """Return the ε of μ²."""
        return epsilon_of(1, 1.0 / math.sqrt(spent), self.options.privacy_delta)

    @cached_property
    def _budget(self) -> float:
        """The μ² that the budget permits."""
        options = self.options
        if options.privacy_budget is None:
            return math.inf
        sigma = account().get_sigma_gaussian(options.privacy_budget, options.privacy_delta)
        return float(sigma**-2) * (1.0 + _ROUNDING)

    def _spent(self, client: str, further: float = 0.0) -> float:
        """Return μ² of a client, as if it had a number of further updates in the next version."""
        state, height = self.state, self._height
        spent = state.spent.get(client, 0.0)
        if height is None:
            return spent + (state.participations.get(client, 0) + further) / self._z2
        # None of its later nodes contains more of its updates than those of the next version.
        parts = dict(state.leaves.get(client, {}))
        waiting = state.pending.get(client, 0.0) / (state.share or 1.0)
        if further or waiting:
            parts[state.leaf] = parts.get(state.leaf, 0.0) + further + waiting
        return spent + cost(parts, height) / self._z2

    def holds(self, client: str, context: FeatureContext) -> bool:
        """Return whether a client may contribute no further update."""
        taken, most = self.state.participations.get(client, 0), self.options.privacy_updates
        if most is not None and taken >= most:
            return True
        if self._budget == math.inf:
            return False
        sketch = self._spent(client) + self._cost_of_sketch
        return max(self._spent(client, 1.0), sketch) > self._budget

    def ends(self, context: FeatureContext) -> str:
        """Return why the run ends: no client that is online may contribute more."""
        state, most = self.state, self.options.privacy_updates
        is_bounded = most is not None or self._budget < math.inf
        # Updates that wait for the end of a round are paid for.
        if not is_bounded or state.unused or not 0 < context.online <= len(state.participations):
            return ""
        if not all(self.holds(client, context) for client in context.clients):
            return ""
        taken = state.participations.values()
        counts = f"{min(taken)} to {plural(max(taken), 'update')}"
        if min(taken) == max(taken):
            counts = plural(max(taken), "update")
        each = f"each client has contributed {counts}"
        if most is not None and min(taken) >= most:
            return each
        return f"the privacy budget of ε = {self.options.privacy_budget:g} is spent: {each}"

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Record that an update waits no more."""
        state = self.state
        state.unused.pop(task.number, None)
        state.sketched.pop(task.client, None)
        state.ready.pop(task.client, None)

    def _count(self, update: Update, context: FeatureContext) -> None:
        """Count an update."""
        state, client = self.state, update.task.client
        state.participations[client] = state.participations.get(client, 0) + 1
        state.unused[update.number] = True
        if self._height is None:
            self._report(client, context)

    def _report(self, client: str, context: FeatureContext) -> None:
        """Report the loss of a client if no other has spent as much."""
        if self._most_spent is None:
            others = [other for other in self.state.participations if other != client]
            self._most_spent = max(map(self._spent, others), default=0.0)
        spent = self._spent(client)
        if spent > self._most_spent * (1.0 + _ROUNDING):
            self._most_spent = spent
            taken = self.state.participations.get(client, 0)
            values = {"client": client, "participations": taken, "epsilon": self._epsilon(spent)}
            context.measure(PRIVACY, **values)


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
