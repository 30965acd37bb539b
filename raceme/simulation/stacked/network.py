"""A network with the weights of many clients.

`torch.fx` traces the network. Known layers have a stacked form, see
:mod:`raceme.simulation.stacked.layers`; other operations are mapped by :func:`torch.vmap`, as is a
whole network that cannot be traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from raceme.simulation.stacked.layers import Pass, Value, layer_of
from raceme.training.local import hidden_linear_layers
from raceme.training.models import Network

_TOLERANCE = 1e-3
"""Tolerance relative to the largest output; a wrongly traced network differs far more."""


class StackedNetwork:
    """A network with the weights of many clients.

    Parameters
    ----------
    network : Network
        The network of one client.

    Attributes
    ----------
    trained : list[str]
        Names of the trainable parameters.
    buffers : list[str]
        Names of the buffers.
    activations : int
        Bytes that training takes per sample and network besides the weights, as measured by
        :meth:`check`.

    Raises
    ------
    ValueError
        The network cannot be stacked.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.activations = network, 0
        module = network.module
        self._shapes = {name: values.shape for name, values in module.named_parameters()}
        self._names = {id(values): name for name, values in module.named_parameters()}
        self.buffers = [name for name, _ in module.named_buffers()]
        self.trained = [n for n, values in module.named_parameters() if values.requires_grad]
        self._modules = dict(module.named_modules())
        self._hidden = {id(layer) for layer in hidden_linear_layers(module)}
        training = module.training
        try:
            self._graphs = {mode: _traced(module.train(mode)) for mode in (True, False)}
        finally:
            module.train(training)

    def parameters(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the arrays of stacked weights, shape (n, d), by name, as views."""
        n = len(weights)
        return {
            name: weights[:, where].view(n, *self._shapes[name])
            for name, where in self.network.slices.items()
        }

    def outputs(
        self, arrays: Mapping[str, Tensor], x: Tensor, step: Pass, hidden_dropout: float = 0.0
    ) -> Tensor:
        """Return the outputs of all networks.

        Parameters
        ----------
        arrays : Mapping[str, Tensor]
            Stacked parameters and buffers by name; see :meth:`parameters`.
        x : Tensor
            Samples, shape (n, b, ...).
        step : Pass
            The pass; collects the buffers that it changes.
        hidden_dropout : float
            Dropout probability of the inputs of hidden linear layers; see
            :func:`raceme.training.local.dropout`.

        Returns
        -------
        Tensor
            Shape (n, b, outputs).
        """
        graph = self._graphs[step.training]
        if graph is None:
            if hidden_dropout or self.buffers:
                raise ValueError("it cannot be traced, and has buffers or dropout")
            whole = _functional(self.network.module.train(step.training))
            out: Tensor = _mapped(whole, arrays, x)
            return out
        values: dict[fx.Node, Value] = {}
        for node in graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = x
                case "output":
                    out = values[node.args[0]]
                    return out
                case "get_attr":
                    values[node] = arrays[self._name(str(node.target))]
                case "call_module":
                    target = str(node.target)
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = self._applied(
                        target, self._modules[target], arrays, args, kwargs, step, hidden_dropout
                    )
                case "call_function" | "call_method":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = _called(node, args, kwargs, step)
        raise AssertionError("a traced graph has an output")

    def _name(self, target: str) -> str:
        """Return the name of an array; the first name of a shared one."""
        owner, _, name = target.rpartition(".")
        held = getattr(self.network.module.get_submodule(owner), name)
        return self._names.get(id(held), target)

    def _applied(
        self,
        target: str,
        module: nn.Module,
        arrays: Mapping[str, Tensor],
        args: Sequence[Value],
        kwargs: Mapping[str, Value],
        step: Pass,
        hidden_dropout: float,
    ) -> Value:
        """Apply a module with the arrays of all networks to its input."""
        held = (*module.named_parameters(), *module.named_buffers())
        names = {name: self._name(f"{target}.{name}") for name, _ in held}
        own = {name: arrays[whole] for name, whole in names.items()}
        layer = layer_of(module)
        if layer is None or len(args) != 1 or kwargs:
            if any(True for _ in module.buffers()):
                raise ValueError(f"{type(module).__name__} has buffers, which training may change")
            return _mapped(_functional(module), own, *args, **kwargs)
        x = args[0]
        if hidden_dropout and id(module) in self._hidden:
            x = step.dropout(x, hidden_dropout)
        former, step.changed = step.changed, {}
        out = layer(module, own, x, step)
        former |= {names[name]: values for name, values in step.changed.items()}
        step.changed = former
        return out

    def dropouts(self, x: Tensor, hidden_dropout: float) -> list[tuple[float, tuple[int, ...]]]:
        """Return probability and shape per sample of each dropout in a training pass.

        Parameters
        ----------
        x : Tensor
            Samples, shape (b, ...).
        """
        step = Pass(training=True, dropouts=[])
        weights = self.network.weights.to(x.device)[None]
        arrays = self.parameters(weights) | self.own_buffers(1, x.device)
        with torch.no_grad():
            self.outputs(arrays, x[None], step, hidden_dropout)
        assert step.dropouts is not None
        return step.dropouts

    def own_buffers(self, n: int, device: torch.device) -> dict[str, Tensor]:
        """Return the buffers of the network, stacked `n` times."""
        return {
            name: values.to(device).expand(n, *values.shape)
            for name, values in self.network.module.named_buffers()
        }

    def check(self, x: Tensor) -> None:
        """Compare the network with its stacked form, in tests and in training.

        Parameters
        ----------
        x : Tensor
            Two samples or more, shape (b, ...), on any device.

        Raises
        ------
        Exception
            The network cannot be stacked, or its stacked form computes other results.
        """
        module, device = self.network.module, x.device
        training, alone = module.training, x.to(self.network.weights.device)
        buffers = dict(module.named_buffers())
        kept = {name: values.clone() for name, values in buffers.items()}
        parameters = self.parameters(self.network.weights.to(device).repeat(2, 1))
        arrays = parameters | self.own_buffers(2, device)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                expected = module.eval()(alone).to(device)
                stacked = self.outputs(arrays, x.expand(2, *x.shape), Pass(training=False))
                changed = self._trained_once(parameters, x)
                module.train()(alone)
                buffers = dict(module.named_buffers())
                after = {name: values.clone() for name, values in buffers.items()}
        finally:
            for name, values in kept.items():
                buffers[name].copy_(values)
            module.train(training)
        same = _close(stacked[0], expected) and all(
            _close(changed[name][0] if name in changed else kept[name], values)
            for name, values in after.items()
        )
        if not same:
            raise ValueError("its operations differ from sample to sample, or from call to call")

    def _trained_once(self, parameters: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        """Make a training pass and measure its memory; return the changed buffers."""
        shapes = self.dropouts(x, 0.0)
        masks = [x.new_ones(2, len(x), *shape) for _, shape in shapes]
        arrays = {name: values.detach().clone() for name, values in parameters.items()}
        step = Pass(training=True, masks=iter(masks))
        with torch.enable_grad():
            leaves = [arrays[name].requires_grad_() for name in self.trained]
            arrays |= self.own_buffers(2, x.device)
            with saved_bytes([*arrays.values(), *masks]) as saved:
                out = self.outputs(arrays, torch.stack([x, x]), step)
                loss = out.square().sum()
            torch.autograd.grad(loss, leaves, allow_unused=True)
        # The largest tensor needs twice its memory more, while it and its gradient are computed.
        self.activations = (saved.total + 2 * saved.largest) // (2 * len(x))
        return step.changed


@dataclass
class Saved:
    """Bytes of all tensors that autograd saves for the backward pass, and of the largest one."""

    total: int = 0
    largest: int = 0


@contextmanager
def saved_bytes(others: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """Count the bytes that autograd saves; a convolution by matrices saves unfolded images.

    Parameters
    ----------
    others : Iterable[Tensor]
        Tensors to leave out.
    """
    counted = {values.untyped_storage().data_ptr() for values in others}
    saved = Saved()

    def count(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in counted:
            counted.add(memory.data_ptr())
            saved.total += memory.nbytes()
            saved.largest = max(saved.largest, memory.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield saved


def _close(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    most = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=_TOLERANCE * max(most, 1e-12))


class _Tracer(fx.Tracer):
    """A tracer that treats torch's own modules, and those with stacked layers, as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return False
        return layer_of(m) is not None or type(m).__module__.startswith("torch.")


def _traced(module: nn.Module) -> fx.Graph | None:
    """Return the operations of a network in its mode; None if it cannot be traced."""
    has_hooks = any(
        own._forward_hooks or own._forward_pre_hooks or own._backward_hooks
        for own in module.modules()
    )
    if has_hooks:
        raise ValueError("it has hooks")
    try:
        return _Tracer().trace(module)
    except Exception:
        # E.g. a branch on values of the input, which vmap may still support.
        return None


# -----------------------------------------------------------------------------
# Operations without a layer.
# -----------------------------------------------------------------------------


_ELEMENTWISE: frozenset[Any] = frozenset(
    {
        torch.relu,
        torch.tanh,
        torch.sigmoid,
        torch.neg,
        torch.exp,
        torch.abs,
        functional.relu,
        functional.gelu,
        functional.silu,
        functional.tanh,
        functional.leaky_relu,
        functional.elu,
        operator.neg,
        "relu",
        "tanh",
        "sigmoid",
        "neg",
        "exp",
        "abs",
        "float",
        "long",
        "contiguous",
    }
)
_BINARY: frozenset[Any] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.mul, torch.sub}
)


def _called(node: fx.Node, args: Sequence[Value], kwargs: Mapping[str, Value], step: Pass) -> Value:
    """Apply a function or a method to stacked values."""
    if node.target is functional.dropout:
        return _dropout(step, *args, **kwargs)
    if node.op == "call_method":
        function: Callable[..., Value] = getattr(torch.Tensor, str(node.target))
    else:
        assert callable(node.target)
        function = node.target
    tensors = [one for one in _tensors(args) if one.dim()]
    is_alike = node.target in _BINARY and len({one.dim() for one in tensors}) == 1
    if node.target in _ELEMENTWISE or is_alike:
        return function(*args, **kwargs)
    if node.target is operator.getitem and not isinstance(args[0], Tensor):
        return args[0][args[1]]
    if not tensors and not _tensors(list(kwargs.values())):
        return function(*args, **kwargs)
    if function is getattr or node.target == "size":
        # Sizes of a sample's tensors differ from those of stacked ones.
        own = args[0][0]
        return function(own, *args[1:], **kwargs)
    return _mapped(lambda _, *given, **named: function(*given, **named), {}, *args, **kwargs)


def _dropout(
    step: Pass, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return step.dropout(x, p) if training else x


def _tensors(values: Value) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [one for value in values for one in _tensors(value)]
    return []


def _mapped(
    function: Callable[..., Value], arrays: Mapping[str, Tensor], *args: Value, **kwargs: Value
) -> Value:
    """Apply a function to each network's part of all stacked tensors among its arguments."""
    flat, spec = torch.utils._pytree.tree_flatten((dict(arrays), args, kwargs))
    places = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]

    def of_one(*tensors: Tensor) -> Value:
        own = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        held, given, named = torch.utils._pytree.tree_unflatten(own, spec)
        return function(held, *given, **named)

    return vmap(of_one)(*(flat[place] for place in places))


def _functional(module: nn.Module) -> Callable[..., Value]:
    """Return a module as a function of its arrays and inputs."""

    def call(arrays: dict[str, Tensor], *args: Value, **kwargs: Value) -> Value:
        return functional_call(module, arrays, args, kwargs)

    return call
