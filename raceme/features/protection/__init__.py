"""Protection against poisoned updates; :mod:`raceme.features.protection.guards` judges them."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option
from raceme.core.registry import PROTECTIONS


@dataclass(frozen=True)
class Options:
    """Choice of a protection, which has options of its own."""

    protection: str = option(
        "none",
        "defence against poisoned updates: norm, filter, trust, or module:Name",
        names=PROTECTIONS,
    )
