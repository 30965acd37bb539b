"""ResNet-18 (He et al., CVPR 2016) for small colour images, with group normalisation.

Batch normalisation puts statistics of each client's data into the model and fails where clients'
labels differ; group normalisation does not (Hsieh et al., ICML 2020). As usual for images of 32x32
pixels the first convolution is 3x3 without stride, and no pooling follows it.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)
BLOCKS = 2
"""Blocks of each width."""
GROUPS = 2
"""Groups of channels that are normalised together, sample by sample."""


class Block(nn.Module):
    """Two convolutions, to whose output the input is added.

    Parameters
    ----------
    inputs, outputs : int
        Channels.
    stride : int
        Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                nn.GroupNorm(GROUPS, outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        inside = self.norm1(self.convolution1(x)).relu()
        total: Tensor = self.norm2(self.convolution2(inside)) + self.shortcut(x)
        return total.relu()


class Mean(nn.Module):
    """The mean of each channel; unlike torch's pooling it can be stacked over clients."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it, shape (n, channels)."""
        return x.mean(dim=(-2, -1))


def resnet18(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-18 with group normalisation (11,173,962 weights on CIFAR-10)."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        raise ValueError("it takes images, (channels, height, width), of at least 8x8 pixels")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        convolution=nn.Conv2d(input_shape[0], WIDTHS[0], 3, padding=1, bias=False),
        norm=nn.GroupNorm(GROUPS, WIDTHS[0]),
        activation=nn.ReLU(),
    )
    inputs = WIDTHS[0]
    for stage, width in enumerate(WIDTHS, start=1):
        for number in range(1, BLOCKS + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            layers[f"block{stage}_{number}"] = Block(inputs, width, stride)
            inputs = width
    layers["pool"] = Mean()
    layers["output"] = nn.Linear(inputs, num_classes)
    return nn.Sequential(layers)
