"""The small convolutional network of the papers' image experiments."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

CHANNELS = (10, 20)
HIDDEN = 50
_LARGE = 16
"""From this many pixels on, two unpadded 5x5 convolutions leave enough of the image."""


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Small convolutional network: two convolutions, two linear layers (21,840 weights on MNIST).

    Images of at least 16x16 pixels meet 5x5 convolutions; smaller ones 3x3 convolutions with
    padding.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ValueError("it takes images, (channels, height, width), of at least 4x4 pixels")
    channels, *size = input_shape
    kernel, padding = (5, 0) if min(size) >= _LARGE else (3, 1)
    for _ in CHANNELS:
        size = [(pixels - kernel + 1 + 2 * padding) // 2 for pixels in size]
    first, second = CHANNELS
    return nn.Sequential(
        OrderedDict(
            convolution1=nn.Conv2d(channels, first, kernel, padding=padding),
            # Pooling before the activation gives the same and activates a quarter as much.
            pool1=nn.MaxPool2d(2),
            activation1=nn.ReLU(),
            convolution2=nn.Conv2d(first, second, kernel, padding=padding),
            pool2=nn.MaxPool2d(2),
            activation2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(second * size[0] * size[1], HIDDEN),
            activation3=nn.ReLU(),
            output=nn.Linear(HIDDEN, num_classes),
        )
    )
