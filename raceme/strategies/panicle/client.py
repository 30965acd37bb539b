"""Panicle's client half: a probe that returns only a noisy sketch."""

from __future__ import annotations

import secrets
from dataclasses import replace

from raceme.core.gaussian import gaussian_noise
from raceme.core.messages import NUM_EXAMPLES, REPORT_TIMING, SKETCH, SKETCH_NOISE, ModelSpec
from raceme.core.sketches import Sketcher
from raceme.training.work import ClientWork, WorkResult, train_model


def train_sketch(work: ClientWork) -> WorkResult:
    """Train the received model; return it unchanged, with a noisy sketch of its direction.

    The sketch has length 1, which bounds its sensitivity. On the wall clock the noise has a secret
    key; on virtual time it derives from the seed.

    Raises
    ------
    ValueError
        The size or the noise is not a positive number.
    """
    received, size = work.model, work.count(SKETCH)
    deviation = float(work.number(SKETCH_NOISE, None))
    if not deviation > 0:
        raise ValueError(f"{SKETCH_NOISE} must be above 0, got {deviation!r}.")
    result, spec = train_model(work, received), ModelSpec.of(received)
    assert result.model is not None, "training returns a model"
    change = spec.unpack(result.model) - spec.unpack(received)
    direction = Sketcher(size).direction(spec.compared(change))
    is_timed = bool(work.settings.get(REPORT_TIMING, False))
    key = secrets.token_bytes(32) if is_timed else work.generator(1).bytes(32)
    noisy = direction + deviation * gaussian_noise(key, len(direction))
    # The training loss and other metrics are left out, as they have no noise.
    metrics = {NUM_EXAMPLES: result.metrics[NUM_EXAMPLES]}
    return replace(result, model=received, metrics=metrics, numbers={SKETCH: noisy})
