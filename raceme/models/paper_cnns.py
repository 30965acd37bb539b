"""The convolutional networks of papers' experiments, by their sizes.

Of FlexCFL's (Duan et al., TPDS 2022) the paper tells the convolutions and the number of weights;
the rest follows from the number, on images of 28x28 pixels and 10 classes, and from the authors'
published code. Of CDFL's (Li and Zhu) it tells all but the channels.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

_HIDDEN, _MIDDLE_HIDDEN, _WIDE_HIDDEN = 128, 512, 1024
_CHANNELS = (32, 64)


def cnn3x3(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's network for MNIST: two 3x3 convolutions, dropout (50,186 weights on MNIST)."""
    channels, height, width = _image(input_shape, 4)
    return nn.Sequential(
        OrderedDict(
            **_padded(channels, 3),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.5),
            output=nn.Linear(_CHANNELS[1] * (height // 4) * (width // 4), num_classes),
        )
    )


def cnn5x5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """CDFL's network: two 5x5 convolutions, 512 hidden units (1,663,370 weights on 28x28 pixels).

    32 and 64 channels are our reading, and padding that keeps the size.
    """
    return _two_5x5(input_shape, num_classes, _MIDDLE_HIDDEN)


def cnn5x5_wide(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's for Fashion-MNIST: two 5x5 convolutions, 1,024 hidden units (3,274,634 weights)."""
    return _two_5x5(input_shape, num_classes, _WIDE_HIDDEN)


def _two_5x5(input_shape: tuple[int, ...], num_classes: int, hidden: int) -> nn.Module:
    channels, height, width = _image(input_shape, 4)
    return nn.Sequential(
        OrderedDict(
            **_padded(channels, 5),
            flatten=nn.Flatten(),
            hidden=nn.Linear(_CHANNELS[1] * (height // 4) * (width // 4), hidden),
            activation3=nn.ReLU(),
            output=nn.Linear(hidden, num_classes),
        )
    )


def cnn6(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's network for FEMNIST: six convolutions, dropout (325,578 weights, 10 classes)."""
    channels, *size = _image(input_shape, 13)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for block, width in enumerate(_CHANNELS):
        first = 3 * block + 1
        for number, (kernel, stride) in enumerate(((3, 1), (3, 1), (5, 2)), start=first):
            # The third keeps the size but for its stride; the others cut a pixel off every edge.
            padding = kernel // 2 if stride == 2 else 0
            layers[f"convolution{number}"] = nn.Conv2d(
                channels, width, kernel, stride=stride, padding=padding
            )
            layers[f"activation{number}"] = nn.ReLU()
            channels = width
            size = [(pixels + 2 * padding - kernel) // stride + 1 for pixels in size]
        layers[f"dropout{block + 1}"] = nn.Dropout(0.4)
    layers["flatten"] = nn.Flatten()
    layers["hidden"] = nn.Linear(channels * size[0] * size[1], _HIDDEN)
    layers["activation7"] = nn.ReLU()
    layers["dropout3"] = nn.Dropout(0.4)
    layers["output"] = nn.Linear(_HIDDEN, num_classes)
    return nn.Sequential(layers)


def _padded(channels: int, kernel: int) -> dict[str, nn.Module]:
    """Return two convolutions that keep the size, each with a 2x2 pooling that halves it."""
    first, second = _CHANNELS
    return {
        "convolution1": nn.Conv2d(channels, first, kernel, padding=kernel // 2),
        # Pooling before the activation gives the same and activates a quarter as much.
        "pool1": nn.MaxPool2d(2),
        "activation1": nn.ReLU(),
        "convolution2": nn.Conv2d(first, second, kernel, padding=kernel // 2),
        "pool2": nn.MaxPool2d(2),
        "activation2": nn.ReLU(),
    }


def _image(input_shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return the shape of an image that is large enough."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"it takes images, (channels, height, width), of at least {least}x{least} pixels"
        )
    return input_shape
