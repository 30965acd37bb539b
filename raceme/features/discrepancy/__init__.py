"""Distance of clients' models from that of their cluster, measured after each aggregation."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option


@dataclass(frozen=True)
class Options:
    """Switches the measure on."""

    discrepancy: bool = option(
        False, "measure after each round the distance of clients' models from their cluster's model"
    )
