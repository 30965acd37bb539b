"""Tests for forgetting: models are tested on the data of all steps so far."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option


@dataclass(frozen=True)
class Options:
    """Switches the tests on."""

    eval_tasks: bool = option(
        False, "test for forgetting: at the end of each step, on the data of all steps so far"
    )
