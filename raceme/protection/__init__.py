"""Poison: what stands between clients' updates and a method, and attacks to try it with."""

from __future__ import annotations

from raceme.config import RunConfig
from raceme.config.registry import PROTECTIONS
from raceme.protection.guard import Guard


def protection_of(config: RunConfig) -> Guard:
    """Return the protection that a configuration names.

    Raises
    ------
    UserError
        There is no such protection, or an option is out of its range.
    """
    kind: type[Guard] = PROTECTIONS[config.protection]
    options_type = kind.options_type
    return kind() if options_type is None else kind(config.read(options_type))
