"""Central differential privacy of clients; :mod:`raceme.features.central_privacy.server` has it."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option

CLIP = "privacy-clip"
"""Setting that asks a client to clip its change, and the metric by which it says that it has."""


@dataclass(frozen=True)
class Options:
    """Noise, clipping and account."""

    privacy_central: float = option(
        0.0,
        "central differential privacy: noise on what models make of updates, in multiples of "
        "privacy-clip (0: none)",
        low=0,
    )
    privacy_clip: float = option(
        1.0, "length to which central privacy clips each update's change of the weights", above=0
    )
    privacy_delta: float = option(
        1e-5, "δ at which ε is stated; it should be below 1 / clients", above=0, below=1
    )
    privacy_budget: float | None = option(
        None,
        "largest ε of any client; the run ends when it is spent for all (auto: no budget)",
        above=0,
    )
    privacy_updates: int | None = option(
        None, "updates of a client after which it gets no further work (auto: no bound)", low=1
    )
    privacy_cohort: int = option(
        20, "updates of a cluster that get one noise together, with methods such as panicle", low=1
    )
    privacy_known_groups: bool = option(
        False, "take groups of clients as known: the probes that they come from get no noise"
    )
    privacy_tree: int | None = option(
        None,
        "noise of binary trees of so many versions each, a power of two (auto: independent noise)",
        low=2,
    )
