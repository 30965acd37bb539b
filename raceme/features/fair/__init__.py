"""Influence of clients over time; :mod:`raceme.features.fair.server` bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option


@dataclass(frozen=True)
class Options:
    """The shares that bound the influence of clients."""

    fair: str = option(
        "auto",
        "bound on a client's influence over time, in asynchronous methods: its share of the "
        "clients or of the examples, or none (auto: clients with protection=trust, else none)",
        among=("auto", "clients", "examples", "none"),
    )
