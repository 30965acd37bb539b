"""A model of each client's own, in addition to the model that it receives."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option

OWN_MODEL = "own-model"
"""Setting of training and tests: share of its samples that a client keeps to validate models."""
RULE = "own-rule"
"""Setting of training: the rule by which the client's own model is trained and used."""
TRIED = "tried"
"""Rule: train it from its former weights, and compare it with the received model."""
JOINT = "joint"
"""Rule: train only its mixture with the received model; upload the change."""
ALONE = "alone"
"""Rule: train only it, on all samples, and use it unmixed; upload the change."""
MIXED = "mixed"
"""Rule: train it from its mixture with the received model, and the received model, too."""
SKIPPED = "skipped"
"""Rule: do not train it; a client without one takes the trained received model."""
PROBED = "probed"
"""Rule, of short tasks that train the initial model: the first two make the client's first one."""
OWN_SCORE, COMMON_SCORE, RECEIVED_SCORE = "own-score", "common-score", "received-score"
"""Metrics of a reply in a trial: scores on the kept samples of the client's own model, and of the
received one after and before a task."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the client's own model in the mixtures that it validates."""
MIXTURE = "own-mixture"
"""Completion that tests a mixture of the client's own model and the received one."""


@dataclass(frozen=True)
class Options:
    """Switches the models on."""

    own_model: bool | None = option(
        None,
        "clients also train a model of their own, and use a mixture of it and the received one, "
        "weighted by their validation samples (auto: with panicle)",
    )
