"""Networks by name, their objectives, and samples as tensors."""

from __future__ import annotations

import json
import platform
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import ACCURACY, Measure
from raceme.core.files import atomic_write, flush
from raceme.core.messages import LARGEST_SQUARE, InvalidModelError, ModelSpec, from_array, to_array
from raceme.core.registry import MODELS, explained, users_line
from raceme.datasets import data_shape, with_defaults
from raceme.datasets.source import Dataset, DataShape, Labels, Target, own_randomness
from raceme.flower.messages import array_record

# -----------------------------------------------------------------------------
# Arrays of batch normalisation.
# -----------------------------------------------------------------------------


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


# -----------------------------------------------------------------------------
# Multinomial logistic regression.
# -----------------------------------------------------------------------------


def mclr(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer, a convex problem."""
    return _network(flatten=nn.Flatten(), output=nn.Linear(prod(input_shape), num_classes))


def _network(**layers: nn.Module) -> nn.Sequential:
    """Return a sequence of named layers."""
    return nn.Sequential(OrderedDict(layers))


# -----------------------------------------------------------------------------
# Multilayer perceptrons with one hidden layer: a small one, CASA's, and two of FlexCFL's.
#
# The small one uses tanh: on digits in four label groups (20 seeds, learning rate 0.25) CASA then
# found exactly four clusters every time, but more than four in 7 of 20 with ReLU.
# -----------------------------------------------------------------------------


_MLP_HIDDEN = 64


def mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Perceptron with one hidden layer of 64 units, for small images and feature vectors."""
    return _perceptron(input_shape, _MLP_HIDDEN, nn.Tanh(), num_classes)


def mlp300(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """CASA's and ClusterFL's perceptron for sensors: 300 hidden units, ReLU (900-300-3 on IMU)."""
    return _perceptron(input_shape, 300, nn.ReLU(), num_classes)


def mlp128(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's perceptron for MNIST: 128 hidden units, ReLU (101,770 weights on MNIST)."""
    return _perceptron(input_shape, 128, nn.ReLU(), num_classes)


def mlp512(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's perceptron for FEMNIST: 512 hidden units, ReLU (407,050 weights, 10 classes)."""
    return _perceptron(input_shape, 512, nn.ReLU(), num_classes)


def _perceptron(
    input_shape: tuple[int, ...], hidden: int, activation: nn.Module, num_classes: int
) -> nn.Module:
    return _network(
        flatten=nn.Flatten(),
        hidden=nn.Linear(prod(input_shape), hidden),
        activation=activation,
        output=nn.Linear(hidden, num_classes),
    )


# -----------------------------------------------------------------------------
# The small convolutional network of the papers' image experiments.
# -----------------------------------------------------------------------------


_CNN_CHANNELS = (10, 20)
_CNN_HIDDEN = 50
_LARGE = 16
"""Minimum width in pixels for two unpadded 5x5 convolutions."""


def cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Small convolutional network: two convolutions, two linear layers (21,840 weights on MNIST).

    Images of at least 16x16 pixels use 5x5 convolutions, smaller ones padded 3x3 convolutions.
    """
    channels, *size = _image(input_shape, 4)
    kernel, padding = (5, 0) if min(size) >= _LARGE else (3, 1)
    for _ in _CNN_CHANNELS:
        size = [(pixels - kernel + 1 + 2 * padding) // 2 for pixels in size]
    return _network(
        **_convolutions(channels, _CNN_CHANNELS, kernel, padding),
        flatten=nn.Flatten(),
        hidden=nn.Linear(_CNN_CHANNELS[1] * size[0] * size[1], _CNN_HIDDEN),
        activation3=nn.ReLU(),
        output=nn.Linear(_CNN_HIDDEN, num_classes),
    )


def _convolutions(
    channels: int, widths: tuple[int, int], kernel: int, padding: int
) -> dict[str, nn.Module]:
    """Return two convolutions, each with a 2x2 pooling that halves the image."""
    first, second = widths
    return {
        "convolution1": nn.Conv2d(channels, first, kernel, padding=padding),
        # Pooling before the activation gives the same result with a quarter of the activations.
        "pool1": nn.MaxPool2d(2),
        "activation1": nn.ReLU(),
        "convolution2": nn.Conv2d(first, second, kernel, padding=padding),
        "pool2": nn.MaxPool2d(2),
        "activation2": nn.ReLU(),
    }


def _image(input_shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return the shape of an image, checked against a minimum size."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"it takes images, (channels, height, width), of at least {least}x{least} pixels"
        )
    return input_shape


# -----------------------------------------------------------------------------
# A small convolutional network over time: sensor windows, waves, spectra.
# -----------------------------------------------------------------------------


_CNN1D_CHANNELS = (32, 64)
_CNN1D_HIDDEN = 64
KERNEL = 9
_CNN1D_GROUPS = 4
"""Groups of channels that are normalised together, sample by sample.

Without it, useful learning rates were close to diverging ones, and CASA split people off one by
one. Batch normalisation would put statistics of each client's data into the model.
"""
POSITIONS = 8
"""Number of time positions to which the last convolution's output is averaged."""
_LONG, _SHORT = 64, 16
"""Minimum lengths for max pooling over four and over two neighbours."""


class ChannelsFirst(nn.Module):
    """Reorders inputs to (samples, channels, time).

    Of two axes the longer one is time, of two equal ones the second; a vector is one channel.

    Parameters
    ----------
    input_shape : tuple[int, ...]
        Shape of one input, without the axis of samples.
    """

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.is_vector = len(input_shape) == 1
        self.turns = len(input_shape) == 2 and input_shape[0] > input_shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the reordered inputs."""
        if self.is_vector:
            return x.unsqueeze(1)
        return x.transpose(1, 2) if self.turns else x


def cnn1d(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One-dimensional convolutional network for windows (channels, time) and waveforms.

    Two convolutions and two linear layers. Channels and time are told apart by their size: the
    longer axis is time.
    """
    if len(input_shape) not in (1, 2):
        raise ValueError("it takes (channels, time), (time, channels) or (time,)")
    channels = 1 if len(input_shape) == 1 else min(input_shape)
    first, second = _CNN1D_CHANNELS
    pooled = max(input_shape)
    pools = []
    for _ in _CNN1D_CHANNELS:
        pools.append(4 if pooled >= _LONG else 2 if pooled >= _SHORT else 1)
        pooled //= pools[-1]
    return _network(
        channels=ChannelsFirst(input_shape),
        convolution1=nn.Conv1d(channels, first, KERNEL, padding=KERNEL // 2),
        pool1=nn.MaxPool1d(pools[0]),
        normal1=nn.GroupNorm(_CNN1D_GROUPS, first),
        activation1=nn.ReLU(),
        convolution2=nn.Conv1d(first, second, KERNEL, padding=KERNEL // 2),
        pool2=nn.MaxPool1d(pools[1]),
        normal2=nn.GroupNorm(_CNN1D_GROUPS, second),
        activation2=nn.ReLU(),
        average=nn.AdaptiveAvgPool1d(min(POSITIONS, pooled)),
        flatten=nn.Flatten(),
        hidden=nn.Linear(second * min(POSITIONS, pooled), _CNN1D_HIDDEN),
        activation3=nn.ReLU(),
        output=nn.Linear(_CNN1D_HIDDEN, num_classes),
    )


# -----------------------------------------------------------------------------
# The convolutional networks of papers' experiments, by their sizes.
#
# FlexCFL's paper (Duan et al., TPDS 2022) states the convolutions and the number of weights; the
# rest follows from that number, for images of 28x28 pixels and 10 classes, and from the authors'
# code. CDFL's (Li and Zhu) states all but the channels. CASA's (Liu et al., KDD 2024) is "a CNN as"
# in FedRep (Collins et al., ICML 2021), whose code has the sizes.
# -----------------------------------------------------------------------------


_NARROW_HIDDEN, _MIDDLE_HIDDEN, _WIDE_HIDDEN = 128, 512, 1024
_PAPER_CHANNELS = (32, 64)
_FEDREP_CHANNELS = (64, 64)


def cnn3x3(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's network for MNIST: two 3x3 convolutions, dropout (50,186 weights on MNIST)."""
    channels, height, width = _image(input_shape, 4)
    return _network(
        **_convolutions(channels, _PAPER_CHANNELS, 3, padding=1),
        flatten=nn.Flatten(),
        dropout=nn.Dropout(0.5),
        output=nn.Linear(_PAPER_CHANNELS[1] * (height // 4) * (width // 4), num_classes),
    )


def cnn5x5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """CDFL's network: two 5x5 convolutions, 512 hidden units (1,663,370 weights on 28x28 pixels).

    32 and 64 channels and size-preserving padding are our reading.
    """
    return _two_5x5(input_shape, num_classes, _MIDDLE_HIDDEN)


def cnn5x5_wide(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's Fashion-MNIST network: two 5x5 convolutions, 1,024 units (3,274,634 weights)."""
    return _two_5x5(input_shape, num_classes, _WIDE_HIDDEN)


def _two_5x5(input_shape: tuple[int, ...], num_classes: int, hidden: int) -> nn.Module:
    channels, height, width = _image(input_shape, 4)
    return _network(
        **_convolutions(channels, _PAPER_CHANNELS, 5, padding=2),
        flatten=nn.Flatten(),
        hidden=nn.Linear(_PAPER_CHANNELS[1] * (height // 4) * (width // 4), hidden),
        activation3=nn.ReLU(),
        output=nn.Linear(hidden, num_classes),
    )


def cnn_fedrep(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """CASA's and FedRep's image network: two 5x5 convolutions of 64, three linear layers.

    The first hidden layer has 128 units for grey images (244,234 weights on MNIST), and 120 for
    colour ones (307,842 on CIFAR-10); the second has 64.
    """
    hidden = 128 if input_shape[0] == 1 else 120
    return _two_5x5_unpadded(input_shape, num_classes, _FEDREP_CHANNELS, (hidden, 64))


def lenet5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling, as in NIID-Bench (44,426 weights on MNIST)."""
    return _two_5x5_unpadded(input_shape, num_classes, (6, 16), (120, 84))


def lenet5_tanh(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet-5 with tanh and mean pooling, as in CFLA's tables (61,706 weights on MNIST)."""
    channels, height, width = _image(input_shape, _LARGE)
    return _network(
        convolution1=nn.Conv2d(channels, 6, 5, padding=2),
        activation1=nn.Tanh(),
        pool1=nn.AvgPool2d(2),
        convolution2=nn.Conv2d(6, 16, 5),
        activation2=nn.Tanh(),
        pool2=nn.AvgPool2d(2),
        flatten=nn.Flatten(),
        hidden1=nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120),
        activation3=nn.Tanh(),
        hidden2=nn.Linear(120, 84),
        activation4=nn.Tanh(),
        output=nn.Linear(84, num_classes),
    )


def cnn5x5_unpadded(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """PFLlib's network: two unpadded 5x5 convolutions, 512 units (582,026 weights on MNIST)."""
    return _two_5x5_unpadded(input_shape, num_classes, _PAPER_CHANNELS, (_MIDDLE_HIDDEN,))


def _two_5x5_unpadded(
    input_shape: tuple[int, ...], num_classes: int, widths: tuple[int, int], hidden: tuple[int, ...]
) -> nn.Module:
    channels, *size = _image(input_shape, _LARGE)
    height, width = ((((pixels - 4) // 2) - 4) // 2 for pixels in size)
    layers = _convolutions(channels, widths, 5, padding=0) | {"flatten": nn.Flatten()}
    units = widths[1] * height * width
    for number, wanted in enumerate(hidden, start=1):
        layers[f"hidden{number}"] = nn.Linear(units, wanted)
        layers[f"activation{number + 2}"] = nn.ReLU()
        units = wanted
    return _network(**layers, output=nn.Linear(units, num_classes))


def cnn6(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's network for FEMNIST: six convolutions, dropout (325,578 weights, 10 classes)."""
    channels, *size = _image(input_shape, 13)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for block, width in enumerate(_PAPER_CHANNELS):
        first = 3 * block + 1
        for number, (kernel, stride) in enumerate(((3, 1), (3, 1), (5, 2)), start=first):
            # The third is padded and strided; the others are unpadded.
            padding = kernel // 2 if stride == 2 else 0
            layers[f"convolution{number}"] = nn.Conv2d(
                channels, width, kernel, stride=stride, padding=padding
            )
            layers[f"activation{number}"] = nn.ReLU()
            channels = width
            size = [(pixels + 2 * padding - kernel) // stride + 1 for pixels in size]
        layers[f"dropout{block + 1}"] = nn.Dropout(0.4)
    layers["flatten"] = nn.Flatten()
    layers["hidden"] = nn.Linear(channels * size[0] * size[1], _NARROW_HIDDEN)
    layers["activation7"] = nn.ReLU()
    layers["dropout3"] = nn.Dropout(0.4)
    layers["output"] = nn.Linear(_NARROW_HIDDEN, num_classes)
    return nn.Sequential(layers)


# -----------------------------------------------------------------------------
# Recurrent networks for text and sensor windows.
# -----------------------------------------------------------------------------


EMBEDDING = 16
_RECURRENT_HIDDEN = 128


class Recurrent(nn.Module):
    """A recurrent layer with a linear layer on its last state; token ids are embedded.

    Parameters
    ----------
    input_shape : tuple[int, ...]
        Shape of one input: (length,) of token ids, or a window of two axes of which the longer one
        is time.
    tokens : int
        Size of the vocabulary; 0 for a window of quantities.
    layer : type
        Class of the layer, ``nn.GRU`` or ``nn.LSTM``.
    num_classes : int
        Number of outputs: one per class, or 1 for a regression.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        tokens: int,
        layer: type[nn.GRU | nn.LSTM],
        num_classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, EMBEDDING) if tokens else None
        self.turns = not tokens and input_shape[0] <= input_shape[1]
        size = EMBEDDING if tokens else min(input_shape)
        self.recurrent = layer(size, _RECURRENT_HIDDEN, batch_first=True)
        self.output = nn.Linear(_RECURRENT_HIDDEN, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (samples, classes), of token ids or of windows."""
        if self.embedding is not None:
            steps = self.embedding(x.long())
        else:
            steps = x.transpose(1, 2) if self.turns else x
        states, _ = self.recurrent(steps)
        scores: Tensor = self.output(states[:, -1])
        return scores


def gru(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (GRU) for token ids (length,) and sensor windows."""
    return _recurrent(input_shape, num_classes, tokens, nn.GRU)


def lstm(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (LSTM) with the inputs and size of the GRU."""
    return _recurrent(input_shape, num_classes, tokens, nn.LSTM)


def _recurrent(
    input_shape: tuple[int, ...], num_classes: int, tokens: int, layer: type[nn.GRU | nn.LSTM]
) -> nn.Module:
    if len(input_shape) != (1 if tokens else 2):
        raise ValueError("it takes token ids, (length,), or windows, (channels, time)")
    return Recurrent(input_shape, tokens, layer, num_classes)


# -----------------------------------------------------------------------------
# ResNet-18 (He et al., CVPR 2016) for small colour images, with group normalisation.
#
# Batch normalisation puts statistics of each client's data into the model and fails where clients'
# labels differ; group normalisation does not (Hsieh et al., ICML 2020). As usual for images of
# 32x32 pixels the first convolution is 3x3 without stride, and no pooling follows it.
# -----------------------------------------------------------------------------


WIDTHS = (64, 128, 256, 512)
BLOCKS = 2
"""Number of blocks per width."""
_RESNET_GROUPS = 2
"""Groups of channels that are normalised together, sample by sample."""


class Block(nn.Module):
    """A residual block of two convolutions.

    Parameters
    ----------
    inputs, outputs : int
        Numbers of input and output channels.
    stride : int
        Stride of the first convolution, and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(_RESNET_GROUPS, outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_RESNET_GROUPS, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                nn.GroupNorm(_RESNET_GROUPS, outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        inside = self.norm1(self.convolution1(x)).relu()
        total: Tensor = self.norm2(self.convolution2(inside)) + self.shortcut(x)
        return total.relu()


class Mean(nn.Module):
    """Global average pooling that, unlike torch's, can be stacked over clients."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it, shape (n, channels)."""
        return x.mean(dim=(-2, -1))


def resnet18(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-18 with group normalisation (11,173,962 weights on CIFAR-10)."""
    inputs = _image(input_shape, 8)[0]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        convolution=nn.Conv2d(inputs, WIDTHS[0], 3, padding=1, bias=False),
        norm=nn.GroupNorm(_RESNET_GROUPS, WIDTHS[0]),
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


# -----------------------------------------------------------------------------
# Networks by name, or a user's own by ``module:function``.
# -----------------------------------------------------------------------------


_Builder = Callable[..., nn.Module]
_PROBE = 2
"""Batch size for testing a new network."""


def build(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int = 0, tokens: int = 0
) -> nn.Module:
    """Build a network with seeded initial weights, and check that it fits the data.

    Parameters
    ----------
    name : str
        A name of the registry, or ``module:function``: a function of `input_shape` and
        `num_classes`, optionally `tokens`, or without arguments, that returns a network. The module
        may be in the current folder.
    input_shape : tuple[int, ...]
        Shape of one input, without the axis of samples.
    num_classes : int
        Number of outputs: one per class, or 1 for a regression.
    seed : int
        Seed of the initial weights. The process's generators are left as they were.
    tokens : int
        Size of the vocabulary where inputs are token ids; 0 where they are quantities.

    Raises
    ------
    UserError
        There is no such network, or it does not fit the data.
    """
    builder: _Builder = MODELS[name]
    parameters = signature(builder).parameters
    vocabulary = {"tokens": tokens} if "tokens" in parameters else {}
    # A network of fixed size needs no arguments.
    fixed = "input_shape" not in parameters and all(
        item.default is not Parameter.empty or item.kind is Parameter.VAR_KEYWORD
        for item in parameters.values()
    )
    sizes = () if fixed else (input_shape, num_classes)
    with own_randomness([seed]):
        torch.default_generator.manual_seed(seed)
        try:
            module = builder(*sizes, **vocabulary)
            if isinstance(module, nn.Module):
                _try_out(module.float(), input_shape, num_classes)
        except Exception as error:
            told = explained(error)
            # torch's errors of shapes and kinds of values are of these types.
            may_be_shape = isinstance(error, RuntimeError | ValueError)
            if isinstance(told, UserError) and told is not error and not may_be_shape:
                raise told from error
            raise _misfit(name, input_shape, num_classes, error) from error
    if not isinstance(module, nn.Module):
        raise UserError(
            f"Model '{name}' must return a torch.nn.Module, got {type(module).__name__}."
        )
    if not any(weights.requires_grad for weights in module.parameters()):
        raise UserError(f"Model '{name}' has no weights to train: all are frozen, or it has none.")
    for array, values in module.state_dict().items():
        if not _is_sendable(values):
            raise UserError(
                f"Model '{name}': '{array}' must hold finite real numbers. Initialise it, or "
                "register such a buffer with persistent=False."
            )
    return module


_OF_TOKENS = re.compile(r"\b(indices|Long|Int|dtype)\b")
"""Words of torch's messages about quantities where token ids are expected."""


def _misfit(
    name: str, input_shape: tuple[int, ...], num_classes: int, error: Exception
) -> UserError:
    """Return the error for a network that failed on two inputs of zeros."""
    lines = str(error).strip().splitlines()
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    where = f" ({line})" if (line := users_line(error)) else ""
    if isinstance(error, NotImplementedError):
        return UserError(f"Model '{name}' cannot be used: {reason}{where}.")
    hint = "" if ":" in name else " mlp and mclr fit any inputs."
    if ":" in name and _OF_TOKENS.search(reason):
        hint = " Inputs and weights are float32: token ids need x.long()."
    return UserError(
        f"Model '{name}' does not fit the data, inputs of shape {input_shape} and {num_classes} "
        f"outputs: {reason}{where}.{hint}"
    )


def _try_out(module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Raise an error if a network cannot take the inputs or gives the wrong outputs."""
    training = module.training
    module.eval()
    with torch.no_grad():
        output = module(torch.zeros(_PROBE, *input_shape))
    module.train(training)
    wanted = (_PROBE, num_classes)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != wanted:
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ValueError(f"its output for {_PROBE} samples is {got}, not {wanted}")


def _is_sendable(values: Any) -> bool:
    """Return whether an entry of a network's state can travel as an array of a model."""
    if not isinstance(values, torch.Tensor) or values.is_complex():
        return False
    return bool(values.isfinite().all())


def initial_arrays(config: RunConfig, shape: DataShape | None = None) -> ArrayRecord:
    """Return the initial model of a run by layer, as sent in the first message.

    Parameters
    ----------
    config : RunConfig
        Configuration with network (by default the dataset's) and seed.
    shape : DataShape, optional
        Shape of the data; by default the dataset's.

    Raises
    ------
    UserError
        There is no such network, or it does not fit the data or the options.
    """
    shape = data_shape(config) if shape is None else shape
    name = with_defaults(config).model
    module = build(str(name), shape.input_shape, shape.outputs, config.seed, shape.tokens)
    if config.batch_norm == "local" and not has_batch_norm(module):
        raise UserError(f"batch-norm=local needs batch normalisation, and model '{name}' has none.")
    state = module.state_dict()
    return array_record({name: to_array(values.numpy()) for name, values in state.items()})


# -----------------------------------------------------------------------------
# Objectives of training and measures of tests, by task.
# -----------------------------------------------------------------------------


class Objective:
    """Classification: cross-entropy and accuracy.

    Attributes
    ----------
    measure : Measure
        Measure whose mean is over :meth:`scores`.
    """

    measure = ACCURACY

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the loss of a network's outputs.

        Parameters
        ----------
        outputs : Tensor
            Shape (n, outputs).
        targets : Tensor
            Labels or standardised quantities, shape (n,).
        reduction : str
            ``"mean"``, ``"sum"``, or ``"none"`` for the loss of each sample, shape (n,).
        """
        return cross_entropy(outputs, targets, reduction=reduction)

    def likelihoods(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how likely some samples are under each model, as shares of the best.

        Parameters
        ----------
        losses : ndarray
            The loss of each sample under each model, shape (models, samples).
        """
        sums = losses.sum(axis=1)
        return np.asarray(np.exp(sums.min() - sums))

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each correctly classified sample, else 0, shape (n,)."""
        return (outputs.argmax(dim=1) == targets).float()


@dataclass(frozen=True)
class Regression(Objective):
    """Regression: Huber's loss of the standardised quantity, and the absolute error in its unit.

    Huber's loss is quadratic up to one standard deviation and linear beyond, so that rare peaks do
    not dominate the gradient.

    Attributes
    ----------
    target : Target
        Unit, mean and standard deviation of the predicted quantity.
    """

    target: Target

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """The mean absolute error, in the unit of the quantity."""
        return Measure(self.target.unit)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return Huber's loss."""
        return huber_loss(outputs.squeeze(1), targets, reduction=reduction)

    def likelihoods(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how likely some samples are under each model, as shares of the best.

        The noise of the quantity is unknown. For normal noise whose variance is integrated out
        (Jeffreys' prior), n samples with mean loss L have a likelihood proportional to L^(−n/2).
        """
        sums = np.maximum(losses.sum(axis=1), np.finfo(np.float64).tiny)
        return np.asarray((sums.min() / sums) ** (losses.shape[1] / 2))

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute error of each sample in the unit of the quantity, shape (n,)."""
        return (outputs.squeeze(1) - targets).abs() * self.target.std


def objective_of(shape: DataShape) -> Objective:
    """Return the objective for a shape of data."""
    return Objective() if shape.target is None else Regression(shape.target)


# -----------------------------------------------------------------------------
# A network for use outside Raceme: from raw inputs to scores, or to a quantity in its unit.
# -----------------------------------------------------------------------------


class DeployedNetwork(nn.Module):
    """A network with the normalisation of its inputs and, for a regression, of its output.

    Parameters
    ----------
    network : nn.Module
        The network as it is trained.
    data : Dataset
        Determines the normalisation of inputs; see :func:`raceme.datasets.described`.

    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, data: Dataset) -> None:
        super().__init__()
        self.network, self.target = network, data.target
        self.has_tokens = bool(data.tokens)
        self.scale = 255.0 if raw_type(data) == "uint8" else 1.0
        self.register_buffer("mean", torch.tensor(data.mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(data.std, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, shape (n, classes), or quantities, shape (n, 1)."""
        if not self.has_tokens:
            x = (x.float() / self.scale - self.mean) / self.std
        outputs: Tensor = self.network(x)
        if self.target is not None:
            outputs = outputs * self.target.std + self.target.mean
        return outputs


def deployed_network(
    config: RunConfig, data: Dataset, arrays: Mapping[str, NDArray[np.generic]]
) -> DeployedNetwork:
    """Return the network of a run with these weights.

    Raises
    ------
    UserError
        The weights do not fit the network, which may be a user's own that has changed.
    """
    shape = data.shape
    network = build(str(config.model), shape.input_shape, shape.outputs, 0, shape.tokens)
    weights = {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise UserError(
            f"The model does not fit the network '{config.model}', which may have been changed "
            f"since: {lines[-1].strip()}"
        ) from None
    return DeployedNetwork(network, data).eval()


def description_of(
    config: RunConfig, data: Dataset, labels: Sequence[str] | None, kind: str
) -> dict[str, Any]:
    """Return the content of `model.json`, without the names of run and device.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run.
    data : Dataset
        Says how inputs are normalised; see :func:`raceme.datasets.described`.
    labels : Sequence[str] or None
        Names of the classes; None for a regression.
    kind : str
        Format of the model's file.
    """
    type_, keys = raw_type(data), config.to_mapping()
    return {
        "format": kind,
        "run": {key: keys[key] for key in ("strategy", "dataset", "model", "seed")},
        "input": {"shape": list(data.shape.input_shape), "type": type_},
        "normalisation": {
            "in_model": True,
            "divided_by": 255 if type_ == "uint8" else 1,
            "mean": np.asarray(data.mean).tolist(),
            "std": np.asarray(data.std).tolist(),
        },
        "labels": None if labels is None else list(labels),
        "unit": None if data.target is None else data.target.unit,
    }


def raw_type(data: Dataset) -> str:
    """Return the type of a dataset's inputs before they are normalised."""
    if data.tokens:
        return "int64"
    return "uint8" if data.x.dtype == np.uint8 else "float32"


def raw_inputs(data: Dataset, count: int) -> NDArray[Any]:
    """Return random inputs before normalisation, the same in every call."""
    rng, shape, kind = np.random.default_rng(0), (count, *data.shape.input_shape), raw_type(data)
    if kind != "float32":
        return rng.integers(0, data.tokens or 256, shape).astype(kind)
    values = rng.standard_normal(shape) * np.asarray(data.std) + np.asarray(data.mean)
    return np.asarray(values, np.float32)


_ABOUT = "model.json"
"""A member of a model file: the result of :func:`description_of`, with the version."""


def write_model_file(
    path: Path, network: DeployedNetwork, data: Dataset, about: Mapping[str, Any]
) -> None:
    """Write a model atomically for an application that may read the file at any time.

    It is TorchScript, with its description as the extra file ``model.json``, and takes any number
    of inputs.

    Raises
    ------
    OSError
        It cannot be written; a former file is unchanged.
    """
    example = torch.from_numpy(raw_inputs(data, _PROBE))
    with warnings.catch_warnings(), torch.inference_mode():
        # torch recommends torch.export, which takes seconds instead of a tenth of a second.
        warnings.simplefilter("ignore")
        trace: Callable[..., Any] = torch.jit.trace
        traced = trace(network.eval(), example, check_trace=False)
    # Not written to a path, as torch aborts the process if the disk is full.
    content = traced.save_to_buffer(_extra_files={_ABOUT: json.dumps(about)})
    with atomic_write(path) as file:
        file.write_bytes(content)
        flush(file)


def read_model_file(path: Path) -> dict[str, Any]:
    """Return the description in a model file; empty if it is missing."""
    try:
        with ZipFile(path) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/extra/{_ABOUT}"))
            return dict(json.loads(archive.read(member)))
    except (OSError, BadZipFile, StopIteration, ValueError, TypeError):
        return {}


# -----------------------------------------------------------------------------
# Samples as tensors.
# -----------------------------------------------------------------------------


_GATHERED = 64
"""Number of mini-batches gathered at once, for less work per step in bounded memory."""


class Samples:
    """Inputs and labels as tensors.

    Parameters
    ----------
    x : NDArray[np.float32]
        Inputs, shape (n, ...).
    y : Labels
        Labels, shape (n,): classes, or quantities.
    channels_last : bool
        Store inputs of shape (n, channels, height, width) channels-last, which is fastest for
        convolutions.
    accelerator : str
        Device of the tensors, the network's.
    """

    def __init__(
        self,
        x: NDArray[np.float32],
        y: Labels,
        channels_last: bool = False,
        accelerator: str = "cpu",
    ) -> None:
        self._channels_last = channels_last and x.ndim == 4
        # Kept as (n, height, width, channels): selections of it are "channels last", unlike
        # selections from a tensor that merely has such strides. numpy does the reordering, because
        # for a single channel torch keeps strides that its kernels do not recognise.
        values = np.array(np.moveaxis(x, 1, -1), order="C") if self._channels_last else x
        self.x = torch.from_numpy(np.ascontiguousarray(values)).to(accelerator)
        self.y = torch.from_numpy(np.ascontiguousarray(y)).to(accelerator)

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Return the concatenation of at least one part (copied)."""
        if len(parts) == 1:
            return parts[0]
        x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
        return parts[0]._with(x, y)

    def divided(self, count: int, rng: np.random.Generator) -> tuple[Samples, Samples]:
        """Split off `count` random samples; return the rest and them (copied)."""
        taken = np.zeros(len(self), bool)
        taken[rng.choice(len(self), count, replace=False)] = True
        return self.where(~taken), self.where(taken)

    def with_labels(self, y: Labels) -> Samples:
        """Return the same inputs (not copied) with other labels, shape (n,)."""
        return self._with(self.x, torch.from_numpy(np.ascontiguousarray(y)).to(self.y.device))

    def where(self, wanted: NDArray[np.bool_]) -> Samples:
        """Return the samples selected by a mask, shape (n,) (copied)."""
        return self._at(np.flatnonzero(wanted))

    def every_other(self, first: int) -> Samples:
        """Return every other sample, from the given one on (copied); at least one."""
        return self.where(np.arange(len(self)) % 2 == first % 2) if len(self) > 1 else self

    def balanced(self) -> Samples:
        """Return as many samples with balanced classes (copied), repeating samples of rare ones.

        Samples of a regression are returned unchanged.
        """
        if self.y.is_floating_point():
            return self
        classes = self.y.cpu().numpy()
        of_kinds = [np.flatnonzero(classes == kind) for kind in np.unique(classes)]
        turns = np.arange(-(-len(classes) // len(of_kinds)))
        order = np.stack([of_kind[turns * len(of_kind) // len(turns)] for of_kind in of_kinds], 1)
        return self._at(order.reshape(-1)[: len(classes)])

    def _at(self, places: NDArray[np.int64]) -> Samples:
        """Return the samples at some places (copied)."""
        positions = torch.from_numpy(places).to(self.y.device)
        return self._with(self.x.index_select(0, positions), self.y.index_select(0, positions))

    def _with(self, x: Tensor, y: Tensor) -> Samples:
        """Return samples in the same memory layout."""
        other = Samples.__new__(Samples)
        other._channels_last, other.x, other.y = self._channels_last, x, y
        return other

    def __len__(self) -> int:
        return len(self.y)

    def mini_batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples at `order`, `size` at a time."""
        for block in torch.split(order, size * _GATHERED):
            x, y = self.shaped(self.x.index_select(0, block)), self.y.index_select(0, block)
            yield from zip(torch.split(x, size), torch.split(y, size), strict=True)

    def slices(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples in order, `size` at a time, without copying."""
        return zip(torch.split(self.shaped(self.x), size), torch.split(self.y, size), strict=True)

    def shaped(self, x: Tensor) -> Tensor:
        """Return a selection of :attr:`x` in the network's input shape."""
        return x.permute(0, 3, 1, 2) if self._channels_last else x


# -----------------------------------------------------------------------------
# Networks on one flat vector of weights.
#
# All weights are views of one vector and all gradients of another, so that steps and terms are
# single vector operations, whatever the number of layers, and a received model is copied once.
# -----------------------------------------------------------------------------


_CLASSIFICATION = Objective()


def _divided(module: nn.Module, accelerator: str) -> tuple[nn.Sequential, nn.Module]:
    """Divide a network after its last pooling, if oneDNN supports all layers before.

    Tests of the first part take half to four fifths of the time in oneDNN's own layout. Training
    does not gain. Measured on x86-64, and used only there.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_measured = accelerator == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not (has_onednn and is_measured and type(module) is nn.Sequential):
        return nn.Sequential(), module
    first = list(takewhile(_is_known_to_onednn, module))
    while first and not isinstance(first[-1], nn.MaxPool2d):
        first.pop()
    return nn.Sequential(*first), module[len(first) :]


def _is_known_to_onednn(layer: nn.Module) -> bool:
    kind = type(layer)
    if kind is nn.Conv2d:
        is_plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        # Weights that are computed before each pass, e.g. by `weight_norm`, are not supported.
        is_stored = isinstance(layer.weight, nn.Parameter) and layer.weight.dtype is torch.float32
        return is_plain and is_stored
    if kind is nn.MaxPool2d:
        return layer.dilation in (1, (1, 1)) and not layer.return_indices
    return kind in (nn.ReLU, nn.Dropout)


def _convolved(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """Apply a convolution with the present weights in oneDNN's own layout."""
    # `torch.utils.mkldnn` keeps a scripted copy of the weights, which change with every model.
    weight, bias = layer.weight.to_mkldnn(), layer.bias
    bias = None if bias is None else bias.to_mkldnn()
    stride, padding, dilation = layer.stride, layer.padding, layer.dilation
    return torch.conv2d(x, weight, bias, stride, padding, dilation, layer.groups)


def is_usable(weights: Tensor) -> bool:
    """Return whether the server accepts these weights: neither NaN nor huge."""
    return float(weights @ weights) <= LARGEST_SQUARE


class Network:
    """A torch network on one flat vector of weights.

    Parameters
    ----------
    module : nn.Module
        The network. Its parameters become views into :attr:`weights`, and their gradients views
        into :attr:`gradient`.
    objective : Objective
        Objective of training and tests.
    accelerator : str
        Processor: ``"cpu"``, ``"cuda"`` or ``"mps"``.

    Attributes
    ----------
    weights, gradient : Tensor
        All parameters and their gradients, shape (d,), float32, in the accelerator's memory.
    accelerator : str
        Processor: ``"cpu"``, ``"cuda"`` or ``"mps"``.
    slices : dict[str, slice]
        Position of each parameter in them.
    trained : tuple[nn.Parameter, ...]
        Trainable parameters.
    trained_values : tuple[Tensor, ...]
        Their values in the same memory, which may be changed in place.
    needs_pairs : bool
        Whether mini-batches of one sample are unusable, due to batch normalisation.
    batch_norm : tuple[str, ...]
        Names of its batch normalisation arrays: weights, statistics and counters.
    channels_last : bool
        Whether it has convolutions, for which images are stored channels-last.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective = _CLASSIFICATION,
        accelerator: str = "cpu",
    ) -> None:
        self.module = module.to(accelerator)
        self.objective = objective
        self.accelerator = accelerator
        parameters = list(module.parameters())
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters]).float()
        self.gradient = torch.zeros_like(self.weights)
        self.slices: dict[str, slice] = {}
        start = 0
        for name, parameter in module.named_parameters():
            end = start + parameter.numel()
            parameter.data = self.weights[start:end].view_as(parameter)
            parameter.grad = self.gradient[start:end].view_as(parameter)
            self.slices[name] = slice(start, end)
            start = end
        self.trained = tuple(p for p in parameters if p.requires_grad)
        self.trained_values = tuple(parameter.detach() for parameter in self.trained)
        self._tensors: dict[str, Tensor] = dict(module.state_dict())
        # Parameters and buffers as numpy arrays: shared memory on a CPU, else a copy.
        self._state: dict[str, NDArray[np.generic]] = {
            name: values.cpu().numpy() for name, values in self._tensors.items()
        }
        self._buffers = [
            (owner, name, values)
            for prefix, owner in module.named_modules()
            for name, values in owner.named_buffers(recurse=False)
            if f"{prefix}.{name}".lstrip(".") in self._tensors
        ]
        self.needs_pairs = has_batch_norm(module)
        self.batch_norm = batch_norm_arrays(module)
        self.channels_last = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
        self._first, self._rest = _divided(module, accelerator)

    @property
    def kernels(self) -> Tensor:
        """Mask of weights in arrays of at least two dimensions, shape (d,), bool."""
        parts = [torch.full((p.numel(),), p.dim() > 1) for p in self.module.parameters()]
        return torch.cat(parts).to(self.weights.device)

    def width(self, samples: Samples) -> int:
        """Return the number of outputs."""
        self.module.eval()
        with torch.inference_mode():
            x, _ = next(iter(samples.slices(1)))
            return int(self.module(x).shape[1])

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for a test, in inference mode and of a module in evaluation mode."""
        if len(self._first):
            x = x.to_mkldnn()
            for layer in self._first:
                x = _convolved(x, layer) if isinstance(layer, nn.Conv2d) else layer(x)
            x = x.to_dense()
        outputs: Tensor = self._rest(x)
        return outputs

    def read(self, record: ArrayRecord) -> ModelSpec:
        """Load a received model, buffers included.

        Returns
        -------
        ModelSpec
            Names, shapes and types of the record, for :meth:`write`.

        Raises
        ------
        InvalidModelError
            The arrays do not match this network.
        """
        spec = ModelSpec.of(record)
        if set(spec.names) != set(self._state):
            raise InvalidModelError(
                f"The received model has the arrays {list(spec.names)}; "
                f"this client's network has {list(self._state)}."
            )
        self._take(record.items())
        return spec

    def restore(self, record: ArrayRecord) -> None:
        """Load arrays that :meth:`keep` returned.

        Raises
        ------
        InvalidModelError
            They do not match this network.
        """
        foreign = [name for name in record if name not in self._state]
        if foreign:
            raise InvalidModelError(f"This client's network has no arrays {foreign}.")
        self._take(record.items())

    def _gather_buffers(self) -> None:
        """Put buffers that the module has replaced by new tensors back into their memory."""
        for owner, name, values in self._buffers:
            current = getattr(owner, name)
            if current is not values:
                values.copy_(current.detach())
                setattr(owner, name, values)

    def _take(self, arrays: Iterable[tuple[str, Array]]) -> None:
        self._gather_buffers()
        for name, array in arrays:
            values, own = from_array(array), self._state[name]
            kinds = "b" if own.dtype.kind == "b" else "fiu"
            if values.shape != own.shape or values.dtype.kind not in kinds:
                raise InvalidModelError(
                    f"The received array '{name}' is {values.dtype} of shape {values.shape}; "
                    f"this client's network has shape {own.shape}."
                )
            np.copyto(own, values, casting="unsafe")
            if self.accelerator != "cpu":
                self._tensors[name].copy_(torch.from_numpy(own))

    def read_mask(self, record: ArrayRecord) -> Tensor:
        """Return the trainable weights of a record of zeros and ones.

        Parameters
        ----------
        record : ArrayRecord
            One array per parameter, of its name and shape; arrays of bool or integers.

        Returns
        -------
        Tensor
            Shape (d,), bool, in the order of :attr:`weights`.

        Raises
        ------
        InvalidModelError
            A parameter is missing, or an array has another shape or type.
        """
        mask = torch.empty_like(self.weights, dtype=torch.bool)
        for name, where in self.slices.items():
            if name not in record:
                raise InvalidModelError(f"The received mask lacks '{name}'.")
            values, shape = from_array(record[name]), self._state[name].shape
            if values.shape != shape or values.dtype.kind not in "biu":
                raise InvalidModelError(
                    f"The received mask of '{name}' is {values.dtype} of shape {values.shape}; "
                    f"it must be bool or uint8 of shape {shape}."
                )
            mask[where] = torch.from_numpy(values.reshape(-1) != 0)
        return mask

    def read_weights(self, record: ArrayRecord) -> Tensor:
        """Return the weights of a model without receiving it.

        Parameters
        ----------
        record : ArrayRecord
            A model; its statistics and counters are ignored.

        Returns
        -------
        Tensor
            Shape (d,), float32, in the order of :attr:`weights`.

        Raises
        ------
        InvalidModelError
            A parameter is missing, or has another shape.
        """
        weights = torch.empty_like(self.weights)
        for name, where in self.slices.items():
            values = from_array(record[name]) if name in record else np.empty(0)
            if values.shape != self._state[name].shape:
                raise InvalidModelError(
                    f"The received model's '{name}' must have shape {self._state[name].shape}, got "
                    f"{values.shape}."
                )
            weights[where] = torch.from_numpy(values.reshape(-1).astype(np.float32))
        return weights

    def write_weights(self, values: Tensor) -> ArrayRecord:
        """Return a vector as arrays by name, the inverse of :meth:`read_weights`."""
        return array_record(
            {
                name: to_array(values[where].cpu().numpy().reshape(self._state[name].shape))
                for name, where in self.slices.items()
            }
        )

    def write(self, spec: ModelSpec) -> ArrayRecord:
        """Return the current model in the order and types of the one read."""
        self._gather_buffers()
        return array_record(
            {
                name: to_array(self._present(name).astype(dtype, copy=False))
                for name, dtype in zip(spec.names, spec.dtypes, strict=True)
            }
        )

    def keep(self, names: Collection[str]) -> ArrayRecord:
        """Return copies of some of the arrays, by name."""
        self._gather_buffers()
        return array_record({name: to_array(self._present(name)) for name in names})

    def _present(self, name: str) -> NDArray[np.generic]:
        """Return a current array in CPU memory."""
        if self.accelerator == "cpu":
            return self._state[name]
        return self._tensors[name].cpu().numpy()
