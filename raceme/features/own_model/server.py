"""The server half: how own models are trained, decided by all clients of a cluster together.

The few samples that one client keeps hardly tell whether others' models help it; those of all
clients of a cluster do. Where groups of clients have been found, own models are trained from
mixtures with the received model. Where none have, own models are first trained from themselves, and
clients report how well they do, and how well the received model does after a task, mixed with what
it was, on samples that train neither. If own models are better beyond chance, and
not less and less so, clients of the cluster train them alone from then on, with all samples;
otherwise from mixtures. These are trained
with each task as long as mixtures are better than the received model, else now and then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
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
    MIXED,
    MIXTURE,
    OWN_MODEL,
    OWN_SCORE,
    RULE,
    SHARES,
    SKIPPED,
    TRIED,
    Options,
)

if TYPE_CHECKING:
    from raceme.core.strategy import Needs

_SURE, _LIKELY = 0.99, 0.9
"""Probabilities at which a difference is found before a trial ends, and at its end."""
_FEWEST = 4
"""Least number of clients with comparisons for a decision by them."""
_MIXED, _ALONE, _LONGEST, _SHRINKING = 6.0, 8.0, 12.0, 24.0
"""Comparisons per client before which no cluster leaves its trial for mixtures, or trains alone,
and after which trials end, also those in which the received model catches up. What learns faster at
first need not be better in the end."""
_USED = 4.0
"""Comparisons per client of mixtures with received models before mixtures can be of no use."""
_OFTEN = 32
"""Decisions of a cluster per update of each member, at most."""
_RARELY = 4
"""Every so many tasks an own model is trained that is of no use."""
_NEWEST, _LONGER = 0.5, 0.2
"""Weights of a client's newest comparison in their means: models change."""


@dataclass
class Comparison:
    """A client's comparisons of its own model, or the mixture in use, with the received model.

    Attributes
    ----------
    cluster : int
        Cluster of the received model.
    rule : str
        Rule of the tasks.
    better, before : float
        Means of the differences of scores, the first of the newest ones.
    count : int
        Number of tasks.
    """

    cluster: int
    rule: str
    better: float = 0.0
    before: float = 0.0
    count: int = 0

    def add(self, better: float) -> None:
        """Add a difference; NaN, of a client that reports none, counts as none found."""
        self.count += 1
        newest, longer = (1.0, 1.0) if self.count == 1 else (_NEWEST, _LONGER)
        found = better if math.isfinite(better) else 0.0
        self.better += newest * (found - self.better)
        self.before += longer * (found - self.before)


@dataclass
class OwnModelState:
    """State of the decisions.

    Attributes
    ----------
    comparisons : dict[str, Comparison]
        Comparisons of each client, under the present rule of its cluster.
    rules : dict[int, str]
        Decisions, by cluster.
    seldom : list[int]
        Clusters of rule MIXED in which mixtures are no better than the received model.
    tasks : dict[str, int]
        Tasks sent to each client of these.
    asked : dict[str, str]
        Rule of the last task sent to each client.
    """

    comparisons: dict[str, Comparison] = field(default_factory=dict)
    rules: dict[int, str] = field(default_factory=dict)
    seldom: list[int] = field(default_factory=list)
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
        """Leave ``own-model`` to the method, unless there are no samples to validate with."""
        if self.options.own_model is not None:
            return {}
        assert self.config is not None, "only runs with keys are resolved"
        wanted = bool(needs.features.get(OWN_MODEL)) and self.config.validation_share != 0
        return {"own_model": wanted}

    def check(self, needs: Needs) -> None:
        """Check that there are samples to validate with, and whole models to mix."""
        assert self.config is not None, "only runs with keys are checked"
        if names.COMPLETED_BY in needs.test_settings:
            raise UserError(
                f"own-model mixes whole models, and clients of {self.config.strategy} complete "
                "what they receive in another way: leave it out."
            )
        if self.config.validation_share == 0:
            raise UserError(
                "own-model compares models on held-out samples: validation-share must be above 0."
            )

    def on_start(self, training: dict[str, Any], tests: dict[str, Any]) -> None:
        """Ask for the models; all samples train the model that is uploaded."""
        share = training.pop(names.VALIDATION_SHARE, names.DEFAULT_VALIDATION_SHARE)
        training[OWN_MODEL] = self._share = share
        tests |= {names.COMPLETED_BY: MIXTURE, OWN_MODEL: share}

    def cost(self, settings: ConfigRecord, context: Context, examples: int) -> float:
        """Charge for the training of the own model, and the tests of mixtures or of both models."""
        kept, rule = float(settings.get(OWN_MODEL, 0.0)), settings.get(RULE)  # type: ignore[arg-type]
        if not kept or rule == SKIPPED:
            return 0.0
        if rule == ALONE:
            return 1.0
        tests = len(SHARES) + 2
        # By steps, a task takes as long with fewer samples. A trial keeps them in both trainings.
        spared = 0.0 if settings.get(names.LOCAL_STEPS) else kept * (2 if rule == TRIED else 1)
        return 1.0 - spared + kept * names.forward_cost(settings, examples, tests)

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """State the rule; short tasks, such as probes, train no own model."""
        cluster = context.clusters.main(request.client)
        rule = self._rule(cluster, context)
        if names.TASK_SHARE in request.settings:
            rule = SKIPPED
        elif cluster in self.state.seldom:
            tasks = self.state.tasks[request.client] = self.state.tasks.get(request.client, 0) + 1
            rule = rule if tasks % _RARELY == 0 else SKIPPED
        self.state.asked[request.client] = rule
        added: dict[str, Value] = {RULE: rule}
        if rule == TRIED:
            added[names.VALIDATION_SHARE] = self._share
        return replace(request, settings={**request.settings, **added})

    def on_update(self, update: Update, context: FeatureContext) -> Update:
        """Add a client's comparison, and decide for its cluster."""
        client, cluster = update.task.client, context.clusters.main(update.task.client)
        rule = self._rule(cluster, context)
        if update.task.cluster != cluster or rule == ALONE or self.state.asked.get(client) != rule:
            return update
        known = self.state.comparisons.get(client)
        if known is None or (known.cluster, known.rule) != (cluster, rule):
            known = self.state.comparisons[client] = Comparison(cluster, rule)
        own, common = (update.metrics.get(name, math.nan) for name in (OWN_SCORE, COMMON_SCORE))
        # Errors are better if they are smaller.
        known.add((own - common) * (-1 if context.spec.outputs == 1 else 1))
        # Members are counted at each decision: rarely in a large cluster.
        if context.updates % max(1, context.clusters.size(cluster) // _OFTEN) == 0:
            self._decide(cluster, rule, context)
        return update

    def _rule(self, cluster: int, context: FeatureContext) -> str:
        """Return a cluster's rule; one of several needs no trial, since its clients are alike."""
        is_only = len(context.clusters.models) == 1
        return self.state.rules.get(cluster, TRIED if is_only else MIXED)

    def _decide(self, cluster: int, rule: str, context: FeatureContext) -> None:
        """Decide for a cluster if half of its clients or more have compared models."""
        members, state = context.clusters.clients(cluster), self.state
        found = [state.comparisons.get(client) for client in members]
        known = [one for one in found if one and (one.cluster, one.rule) == (cluster, rule)]
        # A client that a feature excludes, or has gone offline, counts as none.
        if not known or 2 * len(known) < len(members):
            return
        tasks = statistics.fmean(one.count for one in known)
        if rule == MIXED:
            if tasks >= _USED:
                is_useful = statistics.fmean(one.better for one in known) > 0.0
                state.seldom = [other for other in state.seldom if other != cluster]
                state.seldom += [] if is_useful else [cluster]
            return
        are_enough = len(known) >= _FEWEST
        chance = chance_above_zero([one.better for one in known]) if are_enough else 0.5
        if tasks >= _MIXED and chance <= 1 - _SURE:
            state.rules[cluster] = MIXED
        elif chance >= _LIKELY and tasks < _SHRINKING and _is_shrinking(known):
            # The received model catches up: it learns more slowly, or was under attack.
            return
        elif tasks >= _ALONE and chance >= _SURE:
            state.rules[cluster] = ALONE
        elif tasks >= _LONGEST:
            state.rules[cluster] = ALONE if chance >= _LIKELY else MIXED


def _is_shrinking(known: Sequence[Comparison]) -> bool:
    """Return whether clients' own models have likely been further ahead before."""
    return chance_above_zero([one.better - one.before for one in known]) <= 1 - _LIKELY


def chance_above_zero(values: Sequence[float]) -> float:
    """Return the probability that a distribution has a mean above 0, given values drawn from it.

    By Student's t. A half if there are fewer than two values, or all are 0.
    """
    if len(values) < 2 or not any(values):
        return 0.5
    # A device has no scipy, and a run without own models need not wait for it.
    from scipy.special import stdtr

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    return float(stdtr(len(values) - 1, mean / error)) if error else float(mean > 0)
