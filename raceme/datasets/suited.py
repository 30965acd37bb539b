"""What suits data of which only the shape is known: a network, its learning rate, a target."""

from __future__ import annotations

from raceme.datasets.source import DataShape

SPECTRUM = 512
"""From this length on a vector is taken for a spectrum or a wave, not for so many features."""
_SMALLEST_IMAGE = 4
_TARGET_ERROR = 0.25
"""Deviations of a quantity: an error that is small beside what there is to predict."""


def suited(shape: DataShape) -> tuple[str, float]:
    """Return the name of a network for inputs of a shape, and a learning rate for it.

    Token ids are for ``gru``; (channels, height, width) is an image, for ``cnn``; two axes are a
    window of sensor readings and a long vector is a spectrum or a wave, for ``cnn1d``; everything
    else is for ``mlp``.
    """
    size = shape.input_shape
    if shape.tokens:
        return "gru", 0.5
    if len(size) == 3 and min(size[1:]) >= _SMALLEST_IMAGE:
        return "cnn", 0.01
    if len(size) == 2 or (len(size) == 1 and size[0] >= SPECTRUM):
        return "cnn1d", 0.05
    return "mlp", 0.05


def suited_target(shape: DataShape, accuracy: float) -> float:
    """Return what a method is timed to: an accuracy, or the mean absolute error of a quantity."""
    return accuracy if shape.target is None else float(f"{_TARGET_ERROR * shape.target.std:.2g}")
