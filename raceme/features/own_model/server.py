"""The server half: how own models are trained, decided by the evidence of a cluster's clients.

One client's kept samples hardly tell whether others' models help it; those of all clients of
a cluster do. At first each client trains its own model from itself, and the received one on the
same samples, and reports how well both do on the samples that it keeps. If training alone is
better, beyond chance, own models of the cluster are trained alone from then on, with all samples.
Otherwise they are trained from their mixtures with the received model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Context
from scipy.stats import t as student

from raceme.core import messages as names
from raceme.core.errors import UserError
from raceme.core.feature import Feature, FeatureContext
from raceme.core.requests import Request, Update
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

_SURE = 0.99
"""Probability that training alone is better, or worse, at which this is decided."""
_FEWEST = 4
"""Clients of which at least is known how well their models do, for a decision by them."""
_LEAST = 4.0
"""Comparisons per client before which no cluster's clients train alone."""
_LONGEST = 6.0
"""Comparisons per client after which own models are trained from mixtures in any case."""


@dataclass
class Comparison:
    """Comparisons of a client's own model with the trained received one.

    Attributes
    ----------
    cluster : int
        Cluster of the received model.
    total : float
        Sum of the differences of their scores, own minus received.
    count : int
        Number of comparisons.
    """

    cluster: int
    total: float = 0.0
    count: int = 0


@dataclass
class OwnModelState:
    """State of the decisions.

    Attributes
    ----------
    comparisons : dict[str, Comparison]
        What each client has reported in its present cluster.
    rules : dict[int, str]
        Decisions, by cluster.
    """

    comparisons: dict[str, Comparison] = field(default_factory=dict)
    rules: dict[int, str] = field(default_factory=dict)


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
        # By steps, a task takes as long with fewer samples.
        spared = 0.0 if settings.get(names.LOCAL_STEPS) else kept
        tests = 2 if rule == TRIED else len(SHARES)
        spared *= 2 if rule == TRIED else 1
        return 1.0 - spared + kept * names.forward_cost(settings, examples, tests)

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """State the rule of the client's cluster; short tasks, such as probes, train no own one."""
        settings = dict(request.settings)
        if names.TASK_SHARE in settings:
            settings[RULE] = SKIPPED
        else:
            settings[RULE] = self.state.rules.get(context.clusters.main(request.client), TRIED)
            if settings[RULE] == TRIED:
                settings[names.VALIDATION_SHARE] = self._share
        return replace(request, settings=settings)

    def on_update(self, update: Update, context: FeatureContext) -> Update:
        """Add a client's comparison, and decide for its cluster if it is clear."""
        scores = [update.metrics.get(name, math.nan) for name in (OWN_SCORE, COMMON_SCORE)]
        cluster = context.clusters.main(update.task.client)
        if update.task.cluster == cluster and cluster not in self.state.rules:
            known = self.state.comparisons.get(update.task.client)
            if known is None or known.cluster != cluster:
                known = self.state.comparisons[update.task.client] = Comparison(cluster)
            # Without scores, as of a device with differential privacy, nothing is known.
            better = scores[0] - scores[1]
            known.total += better if math.isfinite(better) else 0.0
            known.count += 1
            self._decide(cluster, context)
        return update

    def _decide(self, cluster: int, context: FeatureContext) -> None:
        """Decide for a cluster, if its clients' comparisons agree or have been enough."""
        members = context.clusters.clients(cluster)
        found = [self.state.comparisons.get(client) for client in members]
        known = [one for one in found if one is not None and one.cluster == cluster]
        chance = chance_above(np.array([one.total / one.count for one in known]))
        import os, json
        if os.environ.get("OWN_LOG"):
            with open(os.environ["OWN_LOG"], "a") as f:
                f.write(json.dumps([context.updates, cluster, len(known), round(chance, 3), round(sum(o.total for o in known)/max(1,sum(o.count for o in known)), 3)]) + "\n")
        if 2 * len(known) < len(members):
            return
        mean = sum(one.count for one in known) / len(known)
        if len(known) >= _FEWEST and chance >= _SURE and mean >= _LEAST:
            self.state.rules[cluster] = ALONE
        elif len(known) >= _FEWEST and chance <= 1 - _SURE:
            self.state.rules[cluster] = MIXED
        elif sum(one.count for one in known) >= _LONGEST * len(members):
            self.state.rules[cluster] = MIXED


def chance_above(values: np.ndarray) -> float:
    """Return the probability that the mean of the values' distribution is above 0.

    By Student's t; a half if fewer than two are known, or all are 0.
    """
    if len(values) < 2 or not values.any():
        return 0.5
    error = values.std(ddof=1) / math.sqrt(len(values))
    if not error:
        return float(values.mean() > 0)
    return float(student.cdf(values.mean() / error, len(values) - 1))
