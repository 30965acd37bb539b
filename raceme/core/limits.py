"""Limits of a run, and when clients evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import SECONDS, option


@dataclass(frozen=True)
class Limits:
    """Keys of every run about its end and its evaluations."""

    max_rounds: int = option(0, "stop after this number of rounds or windows (0: no limit)", low=0)
    max_time: float = option(
        0.0, "stop at this time of the run's clock (0: no limit)", unit=SECONDS, low=0
    )
    max_compute: float = option(
        0.0,
        "stop when clients have worked for this time in total (0: no limit)",
        unit=SECONDS,
        low=0,
    )
    target_accuracy: float | None = option(
        None,
        "stop at this mean accuracy over the clients (regression: mean absolute error)",
        above=0,
    )
    stop_at_target: bool | None = option(
        None, "stop at the target accuracy (auto: if one is given)"
    )
    eval_every: int | None = option(
        None, "updates between two evaluations (auto: the number of clients)", low=1
    )
    eval_rounds: int = option(
        0, "rounds or windows between two evaluations (0: use eval-every)", low=0
    )
    eval_steps: bool = option(
        False, "also evaluate after each change of all clients' data, before training on them"
    )
    eval_clients: int = option(
        0, "number of clients that evaluate, always the same ones (0: all)", low=0
    )
    concurrency: int = option(0, "clients that train at a time (0: all online)", low=0)
