"""A model of each client's own beside the one that it receives."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option

OWN_MODEL = "own-model"
"""Setting of training and tests: share of its samples that a client keeps to validate mixtures."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the client's own model in the mixtures that it validates."""
WHOLE = "own-whole"
"""Record of a client's state: a copy of its own model that it trains on all samples."""
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
