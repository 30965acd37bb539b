"""Protection against poisoned updates; :mod:`raceme.features.protection.guards` judges them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raceme.core.options import option, reads
from raceme.core.registry import PROTECTIONS

if TYPE_CHECKING:
    from raceme.core.config import RunConfig
    from raceme.features.protection.guards import Guard


@dataclass(frozen=True)
class ProtectionOptions:
    """Choice of a protection, which has options of its own."""

    protection: str = option(
        "none",
        "defence against poisoned updates: norm, filter, trust, or module:Name",
        names=PROTECTIONS,
    )


@reads(ProtectionOptions)
def protection(options: ProtectionOptions, config: RunConfig) -> Guard:
    """Return the protection that a configuration names.

    Raises
    ------
    UserError
        There is no such protection, or an option is out of its range.
    """
    kind = PROTECTIONS.options_type(options.protection)
    guard: Guard = PROTECTIONS.make(options.protection, *([config.read(kind)] if kind else []))
    return guard
