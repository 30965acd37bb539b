"""The server half: training requests ask for the tests."""

from __future__ import annotations

from dataclasses import replace

from raceme.core.feature import Feature, FeatureContext
from raceme.core.messages import FORMER_STEP, SCORED
from raceme.core.requests import Request, Value
from raceme.features.upload_scores import Options


class UploadScores(Feature):
    """Requests ask clients to test each upload and the model received in return."""

    options_type = Options
    switch = "score_uploads"
    settings = frozenset({SCORED, FORMER_STEP})

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Ask for the tests; the received model is tested on the data of the last upload."""
        asked: dict[str, Value] = {SCORED: True}
        former = context.trained_steps.get(request.client)
        if former is not None and context.exchanges:
            asked[FORMER_STEP] = former
        return replace(request, settings={**request.settings, **asked})
