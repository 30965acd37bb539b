"""Layers of many networks in one operation each.

A stacked value has two leading axes, networks and samples: shape (b, ...) of one network becomes
(n, b, ...), and a weight of shape (...) becomes (n, ...). A layer is a function of the module, its
stacked arrays by name, its input and the :class:`Pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Arrays = Mapping[str, Tensor]
"""A module's own parameters and buffers by name, stacked."""
Value = Any
"""A stacked tensor, or a tuple of such."""


@dataclass
class Pass:
    """One pass of stacked samples through stacked networks.

    Attributes
    ----------
    training : bool
        Whether the networks are in training mode.
    valid : Tensor or None
        Shape (n, b), bool: False for padding samples; None without padding.
    masks : Iterator[Tensor]
        Factors of the dropout layers, in the order of use, each of shape (n, b, ...).
    dropouts : list or None
        If given, collects probability and shape per sample of each dropout layer, instead of
        applying it.
    changed : dict[str, Tensor]
        Buffers that training has changed, by name.
    """

    training: bool
    valid: Tensor | None = None
    masks: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    dropouts: list[tuple[float, tuple[int, ...]]] | None = None
    changed: dict[str, Tensor] = field(default_factory=dict)

    def dropout(self, x: Tensor, share: float, channels_only: bool = False) -> Tensor:
        """Apply dropout with separate random masks for each network."""
        if not self.training or not share:
            return x
        if self.dropouts is not None:
            shape = tuple(x.shape[2:])
            if channels_only:
                shape = (*shape[:1], *(1 for _ in shape[1:]))
            self.dropouts.append((share, shape))
            return x
        return x * next(self.masks)


_LARGE_VOCABULARY = 1024
Layer = Callable[[Any, Arrays, Value, Pass], Value]


def folded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single samples to the samples of all networks."""
    out = function(x.flatten(0, 1))
    return out.view(*x.shape[:2], *out.shape[1:])


# -----------------------------------------------------------------------------
# Layers without weights.
# -----------------------------------------------------------------------------


def elementwise(module: nn.Module, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Apply an activation."""
    out: Tensor = module(x)
    return out


def per_sample(module: nn.Module, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Apply a module that treats each sample alike, such as pooling."""
    # A stacked convolution leaves channels before samples; pooling treats them alike, too.
    turned = x.transpose(1, 2)
    if x.dim() == 5 and isinstance(module, _POOLINGS) and turned.is_contiguous():
        return folded(module, turned).transpose(1, 2)
    return folded(module, x)


def flatten(module: nn.Flatten, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Flatten axes of each sample."""
    return x.flatten(
        *(axis + 1 if axis >= 0 else axis for axis in (module.start_dim, module.end_dim))
    )


def dropout(module: Any, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Leave out each network's own random inputs."""
    return step.dropout(x, module.p)


def dropout_of_channels(module: Any, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Leave out each network's own random channels."""
    return step.dropout(x, module.p, channels_only=True)


# -----------------------------------------------------------------------------
# Layers with weights.
# -----------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b for x of shape (n, b, ..., inputs)."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    columns = weight.transpose(1, 2)
    if bias is None:
        out = torch.bmm(rows, columns)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, columns)
    return out.view(*x.shape[:-1], weight.shape[1])


def linear(module: nn.Linear, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Apply linear layers."""
    return affine(x, arrays["weight"], arrays.get("bias"))


def embedding(module: nn.Embedding, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Look up vectors of tokens, each network in its own table."""
    return embedded(x, arrays["weight"])


def embedded(x: Tensor, table: Tensor, by_matrices: bool | None = None) -> Tensor:
    """Return the vectors of tokens, shape (n, b, ..., width).

    Parameters
    ----------
    by_matrices : bool, optional
        Whether to multiply by one-hot matrices. The default on GPUs for small vocabularies, where
        the gradient is then bit-identical from run to run.
    """
    n, size, width = table.shape
    if x.is_cuda and size <= _LARGE_VOCABULARY if by_matrices is None else by_matrices:
        ones = x.flatten(1)[..., None] == torch.arange(size, device=x.device)
        return torch.bmm(ones.to(table.dtype), table).view(*x.shape, width)
    firsts = torch.arange(0, n * size, size, device=x.device).view(n, *(1 for _ in x.shape[1:]))
    return functional.embedding(x + firsts, table.reshape(n * size, width))


def convolution(module: Any, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Apply convolutions over one or two axes, without groups."""
    weight, bias = arrays["weight"], arrays.get("bias")
    sizes = module.stride, module.padding, module.dilation
    if isinstance(module, nn.Conv1d):
        # A sequence is treated as an image of one row.
        sizes = (1, *module.stride), (0, *module.padding), (1, *module.dilation)
        return convolved(x.unsqueeze(3), weight.unsqueeze(3), bias, *sizes).squeeze(3)
    return convolved(x, weight, bias, *sizes)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    by_matrices: bool | None = None,
) -> Tensor:
    """Return convolutions of images, shape (n, b, channels, height, width).

    Parameters
    ----------
    by_matrices : bool, optional
        Whether to multiply unfolded images by matrices instead of one convolution with a group of
        channels per network. The former is faster on GPUs, where it is the default, the latter on
        CPUs.
    """
    if x.is_cuda if by_matrices is None else by_matrices:
        return _by_matrices(x, weight, bias, stride, padding, dilation)
    n, b, channels, *size = x.shape
    inputs = x.transpose(0, 1).reshape(b, n * channels, *size)
    kernels = weight.flatten(0, 1)
    biases = None if bias is None else bias.reshape(-1)
    out = functional.conv2d(inputs, kernels, biases, stride, padding, dilation, groups=n)
    return out.view(b, n, weight.shape[1], *out.shape[2:]).transpose(0, 1)


def _by_matrices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    n, b, *_ = x.shape
    _, outputs, _, *kernel = weight.shape
    height, width = (
        (pixels + 2 * pad - space * (length - 1) - 1) // step + 1
        for pixels, pad, space, length, step in zip(
            x.shape[3:], padding, dilation, kernel, stride, strict=True
        )
    )
    unfolded = functional.unfold(x.flatten(0, 1), tuple(kernel), dilation, padding, stride)
    # One product per network and not per image: (n, channels · kernel, b · places).
    columns = unfolded.view(n, b, *unfolded.shape[1:]).transpose(1, 2).flatten(2)
    kernels = weight.flatten(2)
    if bias is None:
        out = torch.bmm(kernels, columns)
    else:
        out = torch.baddbmm(bias.unsqueeze(2), kernels, columns)
    return out.view(n, outputs, b, height, width).transpose(1, 2)


def group_norm(module: nn.GroupNorm, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Normalise groups of channels, sample by sample."""
    out = folded(lambda own: functional.group_norm(own, module.num_groups, eps=module.eps), x)
    shape = (len(x), 1, -1, *(1 for _ in x.shape[3:]))
    return _scaled(out, arrays, shape)


def layer_norm(module: nn.LayerNorm, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Normalise the last axes, sample by sample."""
    own = module.normalized_shape
    out = functional.layer_norm(x, own, eps=module.eps)
    between = x.dim() - 1 - len(own)
    return _scaled(out, arrays, (len(x), *(1 for _ in range(between)), *own))


def batch_norm(module: Any, arrays: Arrays, x: Tensor, step: Pass) -> Tensor:
    """Normalise channels by the statistics of each network's mini-batch, or its running ones."""
    shape = (len(x), 1, -1, *(1 for _ in x.shape[3:]))
    axes = [1, *range(3, x.dim())]
    if step.training or "running_mean" not in arrays:
        mean, variance, count = _statistics(x, axes, step.valid)
        if step.training and "running_mean" in arrays:
            batches = arrays["num_batches_tracked"] + 1
            share: Any = module.momentum
            if share is None:
                share = 1.0 / batches.to(x.dtype).unsqueeze(1)
            unbiased = variance.flatten(1) * (count / (count - 1)).view(-1, 1)
            for name, new in (("running_mean", mean.flatten(1)), ("running_var", unbiased)):
                step.changed[name] = arrays[name] + share * (new.detach() - arrays[name])
            step.changed["num_batches_tracked"] = batches
    else:
        mean, variance = (arrays[name].view(shape) for name in ("running_mean", "running_var"))
    return _scaled((x - mean) * (variance + module.eps).rsqrt(), arrays, shape)


def _statistics(x: Tensor, axes: list[int], valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance over valid samples, with their axes, and the number of values."""
    if valid is None:
        valid = x.new_ones(x.shape[:2], dtype=torch.bool)
    own = valid.view(*valid.shape, *(1 for _ in x.shape[2:]))
    # A network without valid samples has finite statistics, which are not used.
    count = valid.sum(1).clamp(min=1).to(x.dtype) * prod(x.shape[3:])
    parts = count.view(-1, *(1 for _ in x.shape[1:]))
    mean = x.masked_fill(~own, 0.0).sum(axes, keepdim=True) / parts
    variance = (x - mean).masked_fill(~own, 0.0).square().sum(axes, keepdim=True) / parts
    return mean, variance, count


def _scaled(x: Tensor, arrays: Arrays, shape: tuple[int, ...]) -> Tensor:
    """Apply the weights of a normalisation, if it has any."""
    if "weight" in arrays:
        x = x * arrays["weight"].view(shape)
    if "bias" in arrays:
        x = x + arrays["bias"].view(shape)
    return x


# -----------------------------------------------------------------------------
# Recurrent layers.
# -----------------------------------------------------------------------------


def recurrent(module: Any, arrays: Arrays, x: Tensor, step: Pass) -> Value:
    """Apply layers of GRU or LSTM cells to sequences, from a state of zeros.

    Returns outputs and last states, as the module does.
    """
    is_lstm = isinstance(module, nn.LSTM)
    steps = x if module.batch_first else x.transpose(1, 2)
    n, b = steps.shape[:2]
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        weights = [arrays[f"{name}_l{layer}"] for name in ("weight_ih", "weight_hh")]
        biases = [arrays.get(f"{name}_l{layer}") for name in ("bias_ih", "bias_hh")]
        # The part that does not depend on the state is one product for all times.
        gates = affine(steps, weights[0], biases[0])
        columns = weights[1].transpose(1, 2)
        base = gates.new_zeros(n, 1, 1) if biases[1] is None else biases[1].unsqueeze(1)
        state = gates.new_zeros(n, b, module.hidden_size)
        cell, outputs = state, []
        for own in gates.unbind(2):
            kept = torch.baddbmm(base, state, columns)
            if is_lstm:
                state, cell = _lstm(own + kept, cell)
            else:
                state = _gru(own, kept, state)
            outputs.append(state)
        steps = torch.stack(outputs, 2)
        finals.append((state, cell) if is_lstm else (state,))
    states = tuple(torch.stack(parts, 1) for parts in zip(*finals, strict=True))
    out = steps if module.batch_first else steps.transpose(1, 2)
    return out, states if is_lstm else states[0]


def _gru(gates: Tensor, kept: Tensor, state: Tensor) -> Tensor:
    reset, update, new = gates.chunk(3, 2)
    own_reset, own_update, own_new = kept.chunk(3, 2)
    candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
    return torch.lerp(candidate, state, torch.sigmoid(update + own_update))


def _lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    taken, kept, new, shown = gates.chunk(4, 2)
    cell = torch.sigmoid(kept) * cell + torch.sigmoid(taken) * torch.tanh(new)
    return torch.sigmoid(shown) * torch.tanh(cell), cell


# -----------------------------------------------------------------------------
# Which modules have a stacked layer.
# -----------------------------------------------------------------------------


_POOLINGS = (
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)
_ELEMENTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Tanhshrink,
    nn.Threshold,
)
_PER_SAMPLE = (
    *_POOLINGS,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
    nn.LocalResponseNorm,
    nn.ZeroPad2d,
    nn.ReflectionPad2d,
    nn.Upsample,
    nn.PixelShuffle,
)
_LAYERS: dict[type[nn.Module], Layer] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(_PER_SAMPLE, per_sample),
    nn.Flatten: flatten,
    nn.Dropout: dropout,
    nn.Dropout1d: dropout_of_channels,
    nn.Dropout2d: dropout_of_channels,
    nn.Dropout3d: dropout_of_channels,
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.GRU: recurrent,
    nn.LSTM: recurrent,
}


def layer_of(module: nn.Module) -> Layer | None:
    """Return the stacked layer of a module; None if the module or its options have none."""
    is_stackable = True
    match module:
        case nn.Conv1d() | nn.Conv2d():
            is_numeric = not isinstance(module.padding, str)
            is_stackable = module.groups == 1 and module.padding_mode == "zeros" and is_numeric
        case nn.Embedding():
            special = module.padding_idx, module.max_norm
            is_stackable = special == (None, None) and not module.scale_grad_by_freq
        case nn.GRU() | nn.LSTM():
            is_plain = not module.bidirectional and not module.proj_size
            is_stackable = is_plain and (not module.dropout or module.num_layers == 1)
        case nn.MaxPool1d() | nn.MaxPool2d() | nn.AdaptiveMaxPool1d() | nn.AdaptiveMaxPool2d():
            is_stackable = not module.return_indices
    # By the exact type: a subclass may compute something else.
    return _LAYERS.get(type(module)) if is_stackable else None
