"""Tests by clients of uploaded models and of the models received in return, for reports only."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option


@dataclass(frozen=True)
class Options:
    """Switches the tests on."""

    score_uploads: bool = option(False, "clients test each upload and the model received in return")
