"""The server half: how own models are trained, a decision for each cluster.

The few validation samples of one client hardly show whether other clients' models help it; the
samples of many clients of a cluster do. If there are several clusters, own models are trained from
mixtures with the received model. If there is one, a trial comes first: half of the clients train
own models from their former weights, and report scores on samples that train neither model, of
their own model and of the received model, before a task and mixed with the result of it. The others
train the mixture in place of the received model, with every other task. If own models are
significantly better than the received model, and this does not catch up, the cluster's clients
train them alone from then on, with all samples; otherwise from mixtures, with every other task. In
several clusters, where they matter less, it is every third. With a protection all clients are on
trial, and own models are trained with every task.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context

from raceme.core import messages as names
from raceme.core.errors import UserError
from raceme.core.feature import Feature, FeatureContext
from raceme.core.requests import Request, Update, Value
from raceme.features.own_model import (
    ALONE,
    COMMON_SCORE,
    JOINT,
    MIXED,
    MIXTURE,
    OWN_MODEL,
    OWN_SCORE,
    PROBED,
    RECEIVED_SCORE,
    RULE,
    SHARES,
    SKIPPED,
    TRIED,
    Options,
)

if TYPE_CHECKING:
    from raceme.core.strategy import Needs

_SURE, _LIKELY, _SHRINKING = 0.99, 0.9, 0.95
"""Probabilities from which on a difference counts during a trial, and at its end, and from which
on a lead shrinks."""
_FEWEST = 4
"""Least number of clients with comparisons for a decision."""
_OFTEN = 32
"""Most decisions of a cluster per update of each member."""
_JOINT = 2
"""Interval, in tasks, in which clients that are not on trial train mixtures during a trial."""
_NEWEST, _LONGER = 0.5, 0.2
"""Weights of a client's newest comparison in the running means."""


@dataclass(frozen=True)
class Pace:
    """How much is trained and compared.

    Attributes
    ----------
    on_trial : float
        Share of a cluster's clients that are on trial.
    together, alone : float
        Comparisons per client before which no trial ends at all, or with training alone.
    longest : float
        Comparisons per client at which a trial ends.
    mixed, grouped : int
        Intervals, in tasks, in which own models are trained from mixtures in a single cluster,
        after its trial, and in several ones.
    """

    on_trial: float
    together: float
    alone: float
    longest: float
    mixed: int
    grouped: int


_QUICK = Pace(0.5, together=5.0, alone=6.0, longest=9.0, mixed=2, grouped=3)
_CAREFUL = Pace(1.0, together=6.0, alone=8.0, longest=12.0, mixed=1, grouped=1)
"""With a protection: attackers slow the received model down, and own models make up for it."""


@dataclass
class ModelComparison:
    """A client's comparisons of its own model with the received one, in a trial.

    Attributes
    ----------
    cluster : int
        Cluster of the received model.
    adapted, received : float
        Running means of the own model's lead over the received model after and before a task.
    adapted_longer, received_longer : float
        The same over more tasks.
    count : int
        Number of tasks.
    is_known : bool
        Whether any task had scores.
    """

    cluster: int
    adapted: float = 0.0
    received: float = 0.0
    adapted_longer: float = 0.0
    received_longer: float = 0.0
    count: int = 0
    is_known: bool = False

    def add(self, adapted: float, received: float) -> None:
        """Add a task's leads; NaN if the client reports none, as it has no own model yet."""
        self.count += 1
        if not (math.isfinite(adapted) and math.isfinite(received)):
            return
        newest, longer = (_NEWEST, _LONGER) if self.is_known else (1.0, 1.0)
        self.is_known = True
        self.adapted += newest * (adapted - self.adapted)
        self.received += newest * (received - self.received)
        self.adapted_longer += longer * (adapted - self.adapted_longer)
        self.received_longer += longer * (received - self.received_longer)


@dataclass
class OwnModelState:
    """State of the decisions.

    Attributes
    ----------
    comparisons : dict[str, ModelComparison]
        Comparisons of each client on trial.
    tried : dict[str, bool]
        Whether each client is on trial when there is one.
    rules : dict[int, str]
        Decisions, by cluster.
    tasks : dict[str, int]
        Tasks sent to each client that is not on trial and does not train alone.
    asked : dict[str, str]
        Rule of the last task sent to each client.
    """

    comparisons: dict[str, ModelComparison] = field(default_factory=dict)
    tried: dict[str, bool] = field(default_factory=dict)
    rules: dict[int, str] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)


class OwnModel(Feature):
    """Clients also train a model of their own, and use a mixture of it and the received one."""

    options_type = Options
    state_type = OwnModelState
    switch = "own_model"
    settings = frozenset({RULE})
    state: OwnModelState

    def resolved(self, needs: Needs) -> Mapping[str, Any]:
        """Let the method decide on ``own-model``, unless there are no samples for validation."""
        if self.options.own_model is not None:
            return {}
        assert self.config is not None, "only runs with keys are resolved"
        wanted = bool(needs.features.get(OWN_MODEL)) and self.config.validation_share != 0
        return {"own_model": wanted}

    def check(self, needs: Needs) -> None:
        """Check that there are samples for validation, and whole models to mix."""
        assert self.config is not None, "only runs with keys are checked"
        if names.COMPLETED_BY in needs.test_settings:
            raise UserError(
                f"own-model mixes whole models, but clients of {self.config.strategy} complete "
                f"received models in another way: leave it out."
            )
        if self.config.validation_share == 0:
            raise UserError(
                "own-model compares models on held-out samples: validation-share must be above 0."
            )

    def on_start(self, training: dict[str, Any], tests: dict[str, Any]) -> None:
        """Request own models; the uploaded model is trained on all samples."""
        is_protected = self.config is not None and self.config.value("protection") != "none"
        self._pace = _CAREFUL if is_protected else _QUICK
        share = training.pop(names.VALIDATION_SHARE, names.DEFAULT_VALIDATION_SHARE)
        training[OWN_MODEL] = self._share = share
        tests |= {names.COMPLETED_BY: MIXTURE, OWN_MODEL: share}

    def cost(self, settings: ConfigRecord, context: Context, examples: int) -> float:
        """Return the further cost of a task: training, and tests of mixtures or both models."""
        kept, rule = float(settings.get(OWN_MODEL, 0.0)), settings.get(RULE)  # type: ignore[arg-type]
        if not kept or rule in (SKIPPED, PROBED, ALONE):
            return 0.0
        tests = len(SHARES) + (2 if rule == TRIED else 1)
        # Trainings that hold out samples are shorter, but not those of a number of steps.
        shorter = 2 if rule == TRIED else 1
        spared = 0.0 if settings.get(names.LOCAL_STEPS) else kept * shorter
        trained = 0.0 if rule == JOINT else 1.0
        return trained - spared + kept * names.forward_cost(settings, examples, tests)

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """State the rule in the request."""
        rule = self._rule_of_task(request, context)
        self.state.asked[request.client] = rule
        added: dict[str, Value] = {RULE: rule}
        if rule in (TRIED, JOINT):
            added[names.VALIDATION_SHARE] = self._share
        return replace(request, settings={**request.settings, **added})

    def on_update(self, update: Update, context: FeatureContext) -> Update:
        """Add a client's comparison, and decide for its cluster."""
        client, cluster = update.task.client, context.clusters.main(update.task.client)
        is_compared = self.state.asked.get(client) == TRIED == self._rule(cluster, context)
        if update.task.cluster != cluster or not is_compared:
            return update
        known = self.state.comparisons.get(client)
        if known is None or known.cluster != cluster:
            known = self.state.comparisons[client] = ModelComparison(cluster)
        # For errors, smaller is better.
        sign = -1 if context.spec.outputs == 1 else 1
        own, adapted, received = (
            sign * update.metrics.get(name, math.nan)
            for name in (OWN_SCORE, COMMON_SCORE, RECEIVED_SCORE)
        )
        known.add(own - adapted, own - received)
        # A decision counts all members, so it is rare in a large cluster.
        if context.updates % max(1, context.clusters.size(cluster) // _OFTEN) == 0:
            self._decide(cluster, context)
        return update

    def _rule(self, cluster: int, context: FeatureContext) -> str:
        """Return a cluster's rule; several clusters need no trial, as their clients are alike."""
        return self.state.rules.get(cluster, TRIED if _is_only(context) else MIXED)

    def _rule_of_task(self, request: Request, context: FeatureContext) -> str:
        """Return the rule of a client's next task."""
        client, state = request.client, self.state
        rule = self._rule(context.clusters.main(client), context)
        if names.TASK_SHARE in request.settings:
            return PROBED
        if rule == ALONE or (rule == TRIED and self._is_on_trial(client, context)):
            return rule
        tasks = state.tasks[client] = state.tasks.get(client, 0) + 1
        if rule == TRIED:
            return JOINT if tasks % _JOINT == 0 else SKIPPED
        interval = self._pace.mixed if _is_only(context) else self._pace.grouped
        return MIXED if tasks % interval == 0 else SKIPPED

    def _is_on_trial(self, client: str, context: FeatureContext) -> bool:
        """Return whether a client is on trial: the first four that ask, and a share of all.

        When all of them are gone, a trial begins anew.
        """
        tried = self.state.tried
        if not any(is_tried and context.is_online(name) for name, is_tried in tried.items()):
            tried.clear()
        if client not in tried:
            wanted = max(_FEWEST, self._pace.on_trial * (len(tried) + 1))
            tried[client] = sum(tried.values()) < wanted
        return tried[client]

    def _decide(self, cluster: int, context: FeatureContext) -> None:
        """Decide for a cluster if half of its clients on trial or more have compared models."""
        state = self.state
        members = [c for c in context.clusters.clients(cluster) if state.tried.get(c)]
        found = [state.comparisons.get(client) for client in members]
        known = [one for one in found if one and one.cluster == cluster]
        # Clients that are offline, or that a feature excludes, do not count.
        if not known or 2 * len(known) < len(members):
            return
        tasks, pace = statistics.fmean(one.count for one in known), self._pace
        if tasks < pace.together:
            return

        def chance(lead: Callable[[ModelComparison], float]) -> float:
            enough = len(known) >= _FEWEST
            return chance_above_zero([lead(one) for one in known]) if enough else 0.5

        over_adapted = chance(lambda one: one.adapted)
        over_received = chance(lambda one: one.received)
        growths = (
            chance(lambda one: one.adapted - one.adapted_longer),
            chance(lambda one: one.received - one.received_longer),
        )
        catches_up = min(growths) <= 1 - _SHRINKING
        sure = _SURE if tasks < pace.longest else _LIKELY
        is_better = over_received >= sure and over_adapted > 1 - sure and not catches_up
        if over_adapted <= 1 - _SURE:
            state.rules[cluster] = MIXED
        elif tasks >= pace.alone and is_better:
            state.rules[cluster] = ALONE
        elif tasks >= pace.longest:
            state.rules[cluster] = MIXED


def _is_only(context: FeatureContext) -> bool:
    """Return whether there is a single cluster."""
    return len(context.clusters.models) == 1


def chance_above_zero(values: Sequence[float]) -> float:
    """Return the probability that a distribution has a mean above 0, given values drawn from it.

    By Student's t distribution; 0.5 if there are fewer than two values, or all are 0.
    """
    if len(values) < 2 or not any(values):
        return 0.5
    # Imported late: a device has no scipy, and other runs do not need it.
    from scipy.special import stdtr

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    return float(stdtr(len(values) - 1, mean / error)) if error else float(mean > 0)
