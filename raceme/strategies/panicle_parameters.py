"""What can be set of Panicle, and switched off."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.config.options import option


@dataclass(frozen=True)
class PanicleParameters:
    """Hyper-parameters; each part can be switched off."""

    probe_steps: int = option(
        5, "mini-batches of a probe at most, of a tenth of a task (0: a whole task)", low=0
    )
    clustering: bool = option(True, "form clusters (false: one model for all)")
    level: float = option(0.45, "evidence from which on there are clusters", above=0, below=1)
    most: int = option(12, "clusters at most", low=1)
    repair: bool = option(True, "split, move and merge after the clusters were formed")
    recheck: int = option(20, "own updates after which a client is probed again (0: never)", low=0)
    drift: bool = option(True, "probe clients again whose updates suddenly grow")
    growth: float = option(2.0, "growth of an update that is sudden", above=1)
    alpha0: float = option(2.0, "α0 of a cluster's first updates: α0 / log2(members + 3)", above=0)
    ease: float = option(10.0, "updates per member after which the share has halved", above=0)
    forward: float = option(
        0.5, "share of what the model has moved meanwhile that an update keeps", low=0, high=1
    )
    stale: float = option(1.0, "power by which what was overtaken counts less (0: alike)", low=0)
    unbiased: bool = option(True, "let members count alike, however often they report")
    clip: float = option(3.0, "longest update, in medians of its cluster's (0: any)", low=0)
    average: float = option(0.1, "share of versions that a model in use averages", low=0, high=1)
    own: float = option(
        500.0,
        "samples from which a client uses its own model as far as it is unlike others (0: never)",
        low=0,
    )
    sketch: int = option(1024, "numbers of a direction that are kept (0: all)", low=0)
    exact_up_to: int = option(
        2000,
        "clients compared pair by pair; of a larger fleet so many, drawn at random, stand for all "
        "(0: all are compared)",
        low=0,
    )
