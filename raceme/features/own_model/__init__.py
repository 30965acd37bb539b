"""A model of each client's own beside the one that it receives."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option

OWN_MODEL = "own-model"
"""Setting of training and tests: share of its samples that a client keeps to validate models."""
RULE = "own-rule"
"""Setting of training: how the client's own model is trained and used."""
TRIED, MIXED, ALONE, SKIPPED = "tried", "mixed", "alone", "skipped"
"""Rules: trained from itself and compared with the received model; trained from their mixture;
trained from itself on all samples, and used as it is; not trained by this task."""
COMMON_SCORE, OWN_SCORE = "own-common", "own-alone"
"""Metrics of a reply: score of the received model and of the client's own, after this task, on the
kept samples."""
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
