"""Layers of many networks at once: the same outputs and gradients as one by one."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raceme.simulation.stacked import network as stacked_network
from raceme.simulation.stacked.layers import Pass, convolved, embedded, layer_of
from raceme.simulation.stacked.network import StackedNetwork, saved_bytes
from raceme.training import models
from raceme.training.models import Network

NETWORKS, SAMPLES = 3, 4


def stacked_arrays(
    own: StackedNetwork, weights: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {
        name: values.detach().clone().requires_grad_(name in own.trained)
        for name, values in own.parameters(weights).items()
    }
    return parameters, parameters | own.own_buffers(len(weights), weights.device)


def assert_alike(module: nn.Module, *shape: int, tokens: int = 0, training: bool = True) -> None:
    """Compare each of several networks with itself alone, in float64."""
    torch.manual_seed(0)
    module = module.double()
    network = Network(module)
    # Only `Network` itself requires float32; in float64 differences are not due to rounding.
    weights = torch.randn(NETWORKS, len(network.weights), dtype=torch.float64) * 0.3
    own = StackedNetwork(network)
    parameters, arrays = stacked_arrays(own, weights)
    x = torch.randn(NETWORKS, SAMPLES, *shape, dtype=torch.float64)
    if tokens:
        x = torch.randint(tokens, x.shape).double()
    step = Pass(training=training)
    out = own.outputs(arrays, x, step)
    grads = torch.autograd.grad(
        out.square().sum(), [parameters[n] for n in own.trained], allow_unused=True
    )
    before = {name: values.clone() for name, values in module.named_buffers()}
    for client in range(NETWORKS):
        for name, parameter in module.named_parameters():
            parameter.data = parameters[name][client].detach().clone()
            parameter.grad = None
        for name, values in module.named_buffers():
            values.copy_(before[name])
        alone = module.train(training)(x[client])
        torch.testing.assert_close(out[client], alone, rtol=1e-5, atol=1e-8)
        alone.square().sum().backward()
        for name, grad in zip(own.trained, grads, strict=True):
            expected = module.get_parameter(name).grad
            if expected is None:
                assert grad is None or not grad[client].any()
            else:
                torch.testing.assert_close(grad[client], expected, rtol=1e-5, atol=1e-8)
        for name, values in module.named_buffers():
            changed = step.changed[name][client] if name in step.changed else before[name]
            torch.testing.assert_close(changed, values, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("by_matrices", "numbers"),
    # The images, and unfolded 4 · 3 · 3 pixels for each of 8 · 8 places.
    [(False, 3 * 2 * 4 * 8 * 8), (True, 3 * 2 * 8 * 8 * 4 * 3 * 3)],
)
def test_unfolded_images_count_as_memory(by_matrices: bool, numbers: int) -> None:
    images, weight = torch.zeros(3, 2, 4, 8, 8), torch.zeros(3, 5, 4, 3, 3, requires_grad=True)
    with saved_bytes([weight]) as saved:
        convolved(images, weight, None, (1, 1), (1, 1), (1, 1), by_matrices)
    assert (saved.total, saved.largest) == (4 * numbers, 4 * numbers)


def on_images(*layers: nn.Module) -> nn.Module:
    # Copied, since the layers are parameters of the tests, which change them.
    return nn.Sequential(*copy.deepcopy(layers), nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), bias=False),
        nn.Conv2d(3, 6, 3, groups=3, padding=1),
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
        nn.MaxPool2d(2),
        nn.AvgPool2d(3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.AdaptiveMaxPool2d(2),
        nn.GroupNorm(3, 3),
        nn.GroupNorm(1, 3, affine=False),
        nn.LayerNorm([3, 8, 9]),
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, affine=False, track_running_stats=False),
        nn.GELU(),
        nn.PReLU(),
        nn.Identity(),
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "test"])
def test_layers_of_images_are_stacked(layer: nn.Module, training: bool) -> None:
    module = on_images(nn.Conv2d(3, 3, 1), layer)
    module(torch.zeros(2, 3, 8, 9))
    assert_alike(module, 3, 8, 9, training=training)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [((1, 1), (0, 0), (1, 1)), ((2, 3), (1, 2), (2, 1))])
def test_both_ways_of_convolution_agree(sizes: tuple[tuple[int, int], ...], bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 9, 8, dtype=torch.float64)
    weight = torch.randn(2, 5, 4, 3, 2, dtype=torch.float64)
    values = torch.randn(2, 5, dtype=torch.float64) if bias else None
    expected = [
        functional.conv2d(x[i], weight[i], None if values is None else values[i], *sizes)
        for i in (0, 1)
    ]
    for by_matrices in (True, False):
        found = convolved(x, weight, values, *sizes, by_matrices=by_matrices)
        torch.testing.assert_close(found, torch.stack(expected))


def test_both_ways_of_embedding_agree() -> None:
    x, table = torch.randint(7, (2, 3, 4)), torch.randn(2, 7, 5, requires_grad=True)
    found = [embedded(x, table, by_matrices) for by_matrices in (True, False)]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(f.square().sum(), table) for f in found))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 5, 4, stride=2, padding=1, dilation=2),
        nn.MaxPool1d(2),
        nn.AvgPool1d(2),
        nn.AdaptiveAvgPool1d(4),
        nn.BatchNorm1d(3),
        nn.Linear(12, 5),
    ],
    ids=str,
)
def test_layers_of_series_are_stacked(layer: nn.Module) -> None:
    module = on_images(layer)
    module(torch.zeros(2, 3, 12))
    assert_alike(module, 3, 12)


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module, tokens: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 3) if tokens else None
        self.layer, self.output = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x.long())
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        states, final = self.layer(x)
        last = final[0] if isinstance(self.layer, nn.LSTM) else final
        states = states if self.layer.batch_first else states.transpose(0, 1)
        out: Tensor = self.output(states[:, -1] + last[-1] + states.mean(dim=1))
        return out


@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU(3, 4, batch_first=True),
        nn.GRU(3, 4, num_layers=2, bias=False),
        nn.LSTM(3, 4, num_layers=2, batch_first=True),
        nn.LSTM(3, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [0, 11])
def test_recurrent_layers_are_stacked(layer: nn.Module, tokens: int) -> None:
    shape = (6,) if tokens else (6, 3)
    assert_alike(Sequence(copy.deepcopy(layer), tokens), *shape, tokens=tokens)


class Functions(nn.Module):
    """Sums, products and reshapes of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.arange(6.0))
        self.last = nn.Linear(6, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first(x)) * self.scale + self.shift
        inner = torch.cat([inner, self.second(inner).tanh()], dim=1)
        inner = inner.view(x.size(0), 2, -1).permute(0, 2, 1).mean(-1) + x
        out: Tensor = self.last(self.first(inner).reshape(x.shape[0], -1))
        return out


def test_operations_between_layers_and_repeated_layers_are_stacked() -> None:
    assert_alike(Functions(), 6)


def test_a_network_that_chooses_by_its_values_is_not_stacked() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x if x.sum() > 0 else -x)
            return out

    with pytest.raises(RuntimeError, match="data-dependent"):
        StackedNetwork(Network(Choosing())).check(torch.ones(2, 3))


def test_a_network_whose_samples_depend_on_each_other_is_not_stacked_wrongly() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            out: Tensor = self.layer(x)
            return out

    with pytest.raises(ValueError, match="from call to call"):
        StackedNetwork(Network(Counting())).check(torch.ones(2, 3))


BUILT = {
    "mclr": (5,),
    "mlp": (5,),
    "mlp300": (5,),
    "mlp128": (5,),
    "mlp512": (5,),
    "cnn": (1, 8, 8),
    "cnn1d": (3, 70),
    "cnn3x3": (1, 8, 8),
    "cnn5x5": (1, 8, 8),
    "cnn5x5_wide": (1, 8, 8),
    "cnn_fedrep": (3, 16, 16),
    "lenet5": (1, 16, 16),
    "lenet5_tanh": (1, 16, 16),
    "cnn5x5_unpadded": (1, 16, 16),
    "cnn6": (1, 14, 14),
    "gru": (3, 7),
    "lstm": (3, 7),
    "resnet18": (3, 8, 8),
}


def test_every_registered_network_is_tested() -> None:
    from raceme.core.registry import MODELS

    assert {name.replace("-", "_") for name in MODELS} == set(BUILT)


@pytest.mark.parametrize("name", BUILT)
def test_no_network_of_the_registry_goes_through_vmap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_network, "functional_call", None)
    module = models.build(name.replace("_", "-"), BUILT[name], 3)
    own = StackedNetwork(Network(module))
    assert all(graph is not None for graph in own._graphs.values())
    layers = [layer for layer in module.modules() if any(True for _ in layer.parameters(False))]
    assert all(layer_of(layer) is not None for layer in layers)
    own.check(torch.randn(3, *BUILT[name]))


def test_tokens_are_stacked() -> None:
    for name in ("gru", "lstm"):
        module = models.build(name, (9,), 4, tokens=12)
        StackedNetwork(Network(module)).check(torch.randint(12, (3, 9)).float())


def test_random_numbers_are_each_networks_own() -> None:
    layers = OrderedDict(first=nn.Linear(4, 5), drop=nn.Dropout(0.5), last=nn.Linear(5, 2))
    own = StackedNetwork(Network(nn.Sequential(layers)))
    x = torch.ones(2, 3, 4)
    shapes = own.dropouts(x[0], hidden_dropout=0.25)
    assert shapes == [(0.5, (5,)), (0.25, (5,))]
    masks = [torch.zeros(2, 3, 5), torch.ones(2, 3, 5)]
    masks[0][1] = 1.0
    weights = own.network.weights.repeat(2, 1)
    out = own.outputs(own.parameters(weights), x, Pass(True, masks=iter(masks)), 0.25)
    bias = own.network.module.get_parameter("last.bias")
    torch.testing.assert_close(out[0], bias.expand(3, 2))
    assert (out[1] - bias).abs().min() > 0
