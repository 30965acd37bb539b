"""Which of a network's arrays belong to batch normalisation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a network has a layer of batch normalisation."""
    return any(True for _ in _layers(module))


def batch_norm_arrays(module: nn.Module) -> tuple[str, ...]:
    """Return the names, as in ``state_dict()``, of all arrays of batch normalisation layers.

    They are a layer's affine weights, its running statistics and its counter of batches.
    """
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in _layers(module)
        for name in layer.state_dict()
    )


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            yield prefix, layer
