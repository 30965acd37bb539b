"""Networks that tests refer to as a user would: ``module:function``."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

from raceme.datasets.source import import_datasets


def batch_norm_only(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Batch normalisation only; its outputs are the scores."""
    return nn.BatchNorm1d(num_classes)


def small_batch_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A convolution with batch normalisation, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def resnet18(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """torchvision's ResNet-18."""
    import_datasets()
    from torchvision.models import resnet18 as build

    module: nn.Module = build(num_classes=num_classes)
    return module


class Choosing(nn.Module):
    """A linear layer with data-dependent control flow, which prevents stacking."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        flat = x.flatten(1)
        outputs: Tensor = self.layer(flat if flat.sum() > 0 else -flat)
        return outputs


def choosing(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network that cannot be stacked."""
    return Choosing(prod(input_shape), num_classes)
