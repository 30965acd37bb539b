"""A small convolutional network over time: sensor windows, waves, spectra."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

CHANNELS = (32, 64)
HIDDEN = 64
KERNEL = 9
GROUPS = 4
"""Groups of channels that are normalised together, sample by sample.

Without it the learning rates that are fast enough were close to those that diverge, and CASA split
people off one by one. Batch normalisation would put statistics of each client's data into the
model.
"""
POSITIONS = 8
"""Positions in time that the last convolution's output is averaged to, whatever the length."""
_LONG, _SHORT = 64, 16
"""From these lengths on a pooling keeps the best of four, and of two, neighbours."""


class ChannelsFirst(nn.Module):
    """Bring inputs to (samples, channels, time).

    Of two axes the longer one is time, of two equal ones the second; a vector is one channel.

    Parameters
    ----------
    input_shape : tuple[int, ...]
        Shape of one input.
    """

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.is_vector = len(input_shape) == 1
        self.turns = len(input_shape) == 2 and input_shape[0] > input_shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs as the convolutions take them."""
        if self.is_vector:
            return x.unsqueeze(1)
        return x.transpose(1, 2) if self.turns else x


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Convolutional network over time for windows, (channels, time) or (time, channels), and waves.

    Two convolutions and two linear layers. Channels and time are told apart by their size: the
    longer axis is time.
    """
    if len(input_shape) not in (1, 2):
        raise ValueError("it takes (channels, time), (time, channels) or (time,)")
    channels = 1 if len(input_shape) == 1 else min(input_shape)
    first, second = CHANNELS
    pooled = max(input_shape)
    pools = []
    for _ in CHANNELS:
        pools.append(4 if pooled >= _LONG else 2 if pooled >= _SHORT else 1)
        pooled //= pools[-1]
    return nn.Sequential(
        OrderedDict(
            channels=ChannelsFirst(input_shape),
            convolution1=nn.Conv1d(channels, first, KERNEL, padding=KERNEL // 2),
            pool1=nn.MaxPool1d(pools[0]),
            normal1=nn.GroupNorm(GROUPS, first),
            activation1=nn.ReLU(),
            convolution2=nn.Conv1d(first, second, KERNEL, padding=KERNEL // 2),
            pool2=nn.MaxPool1d(pools[1]),
            normal2=nn.GroupNorm(GROUPS, second),
            activation2=nn.ReLU(),
            average=nn.AdaptiveAvgPool1d(min(POSITIONS, pooled)),
            flatten=nn.Flatten(),
            hidden=nn.Linear(second * min(POSITIONS, pooled), HIDDEN),
            activation3=nn.ReLU(),
            output=nn.Linear(HIDDEN, num_classes),
        )
    )
