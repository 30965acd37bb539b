"""The server half: messages ask for the models, and simulated devices are charged for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context

from raceme.core import messages as names
from raceme.core.errors import UserError
from raceme.core.feature import Feature
from raceme.features.own_model import MIXTURE, OWN_MODEL, SHARES, WHOLE, Options

if TYPE_CHECKING:
    from raceme.core.strategy import Needs


class OwnModel(Feature):
    """Clients also train a model of their own, and use a mixture of it and the received one."""

    options_type = Options
    switch = "own_model"

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
        training[OWN_MODEL] = share
        tests |= {names.COMPLETED_BY: MIXTURE, OWN_MODEL: share}

    def cost(self, settings: ConfigRecord, context: Context, examples: int) -> float:
        """Charge for the training of the own model and its copy, and the tests of mixtures."""
        kept = float(settings.get(OWN_MODEL, 0.0))  # type: ignore[arg-type]
        if not kept:
            return 0.0
        # It trains for an ordinary task, of which this one is a share; in steps for as many.
        ordinary = context.run_config if names.TASK_SHARE in settings else settings
        trained = 1.0 if ordinary.get(names.LOCAL_STEPS) else 1.0 - kept
        trained += WHOLE in context.state
        share = float(settings.get(names.TASK_SHARE, 1.0))  # type: ignore[arg-type]
        return trained / share + kept * names.forward_cost(settings, examples, len(SHARES))
