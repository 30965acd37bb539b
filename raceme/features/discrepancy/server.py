"""The measure ``discrepancy``: one event per aggregation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raceme.core.events import MeasureSchema
from raceme.core.feature import Feature, FeatureContext
from raceme.core.requests import Outcome, Update
from raceme.features.discrepancy import Options

DISCREPANCY = MeasureSchema(
    "discrepancy",
    "distance of clients' models from that of their cluster",
    ("clients", "discrepancy"),
    value="discrepancy",
    summary="mean",
)


class Discrepancy(Feature):
    """Measures Discrepancy(t) = 1/|S_t| Σ_{i ∈ S_t} ‖w_i − w_t‖, eq (3) of FlexCFL's paper.

    As in the authors' code, w_t is the model after the round, of the client's group. Updates of
    weight 0 are left out.
    """

    options_type = Options
    switch = "discrepancy"

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Report the mean distance, if any update was used."""
        models = context.clusters.models
        distances = [
            float(np.linalg.norm(context.compared(update.vector - model.vector)))
            for update, outcome in zip(updates, outcomes, strict=True)
            if outcome.weight and (model := models.get(outcome.cluster)) is not None
        ]
        if distances:
            mean = sum(distances) / len(distances)
            context.measure(DISCREPANCY, clients=len(distances), discrepancy=mean)
