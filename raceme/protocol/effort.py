"""How much of a client's work a message asks for."""

from __future__ import annotations

from collections.abc import Mapping

from raceme.protocol.messages import BATCH_SIZE, LOCAL_EPOCHS, LOCAL_STEPS, TASK_SHARE


def passes(settings: Mapping[str, object], examples: int) -> float:
    """Return how often a training message lets a client go through its samples.

    Parameters
    ----------
    settings : Mapping
        The message's.
    examples : int
        Number of the client's training samples.
    """
    steps, epochs = settings.get(LOCAL_STEPS, 0), settings.get(LOCAL_EPOCHS, 1)
    if isinstance(steps, int) and steps > 0:
        return steps * _batch_size(settings, examples) / max(1, examples)
    return float(epochs) if isinstance(epochs, int | float) else 1.0


def mini_batches(settings: Mapping[str, object], examples: int) -> float:
    """Return how many mini-batches the passes of :func:`passes` are, parts of one included."""
    return passes(settings, examples) * examples / _batch_size(settings, examples)


def _batch_size(settings: Mapping[str, object], examples: int) -> int:
    """Return how many samples a mini-batch has: of fewer than it may hold, all that there are."""
    size = settings.get(BATCH_SIZE, 1)
    return min(size, max(1, examples)) if isinstance(size, int) else 1


PASSES_OF_TRAINING = 3
"""A step takes a sample forward, and backward at twice the cost: to inputs and to weights."""


def forward_cost(settings: Mapping[str, object], examples: int, models: int = 1) -> float:
    """Return what passing all samples forward once takes, as a `COMPUTE_SCALE`.

    Parameters
    ----------
    settings : Mapping
        Those of the run's training, of whose computation it is a share.
    examples : int
        Number of the client's training samples.
    models : int
        Models under which the samples are passed.
    """
    return models / (PASSES_OF_TRAINING * passes(settings, examples))


def short_task(settings: Mapping[str, object], examples: int, steps: int) -> dict[str, int | float]:
    """Return what the message of a task of so many mini-batches says beyond the run's settings.

    Parameters
    ----------
    settings : Mapping
        The run's settings of local training.
    examples : int
        Number of the client's training samples.
    steps : int
        Mini-batches, at least 1; they may be more than an ordinary task's.
    """
    share = passes({**settings, LOCAL_STEPS: steps}, examples) / passes(settings, examples)
    return {LOCAL_STEPS: steps, TASK_SHARE: share}
