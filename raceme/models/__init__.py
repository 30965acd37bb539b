"""Networks by name, or a user's own by ``module:function``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature

import torch
from flwr.app import ArrayRecord
from torch import nn

from raceme.compat import array_record
from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.registry import MODELS
from raceme.datasets import DataShape, data_shape, with_defaults
from raceme.models.batch_norm import has_batch_norm
from raceme.protocol.messages import to_array

__all__ = ["MODELS", "build", "initial_arrays"]

_Builder = Callable[..., nn.Module]
_PROBE = 2
"""Samples in the batch that tries out a network."""


def build(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int = 0, tokens: int = 0
) -> nn.Module:
    """Build a network with seeded initial weights, and check that it fits the data.

    Parameters
    ----------
    name : str
        A registered name, or ``module:function``: a function that takes `input_shape` and
        `num_classes`, and `tokens` if it has a parameter of that name, and returns a network. The
        current folder is searched for the module too.
    input_shape : tuple[int, ...]
        Shape of one input.
    num_classes : int
        Number of outputs.
    seed : int
        Seed of the initial weights. torch's global generator is left as it was.
    tokens : int
        Size of the vocabulary where inputs are token ids; 0 where they are quantities.

    Raises
    ------
    UserError
        There is no such network, or it does not fit the data.
    """
    builder: _Builder = _own_builder(name) if ":" in name else MODELS[name]
    vocabulary = {"tokens": tokens} if "tokens" in signature(builder).parameters else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = builder(input_shape, num_classes, **vocabulary)
        except Exception as error:
            raise _unfit(name, input_shape, num_classes, error) from error
        if not isinstance(module, nn.Module):
            raise UserError(
                f"Model '{name}' must return a torch.nn.Module, got {type(module).__name__}."
            )
        _probe(name, module.float(), input_shape, num_classes)
    return module


def initial_arrays(config: RunConfig, shape: DataShape | None = None) -> ArrayRecord:
    """Return the initial model of a run, by layer: what goes into the first message.

    Parameters
    ----------
    config : RunConfig
        Names the network (or leaves it to the dataset) and the seed.
    shape : DataShape, optional
        What the network has to fit; asked of the dataset if it is not given.

    Raises
    ------
    UserError
        There is no such network, or it does not fit the data or what is asked of it.
    """
    shape = data_shape(config) if shape is None else shape
    name = with_defaults(config).model
    module = build(str(name), shape.input_shape, shape.outputs, config.seed, shape.tokens)
    if config.batch_norm == "local" and not has_batch_norm(module):
        raise UserError(
            f"batch-norm=local keeps batch normalisation at home, but model '{name}' has none."
        )
    state = module.state_dict()
    return array_record({name: to_array(values.numpy()) for name, values in state.items()})


def _own_builder(name: str) -> _Builder:
    """Import a user's function."""
    module_name, _, function_name = name.partition(":")
    # A console script, unlike `python3 -m`, does not search the folder where it is started.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except Exception as error:
        raise UserError(
            f"Cannot import '{module_name}' of model '{name}': {_first_line(error)}. "
            f"A model is one of {', '.join(sorted(MODELS))}, or module:function."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(
            f"Module '{module_name}' has no function '{function_name}' to build model '{name}': "
            f"write def {function_name or 'build'}(input_shape, num_classes)."
        )
    builder: _Builder = function
    return builder


def _probe(name: str, module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Raise UserError if the network cannot take the inputs or gives the wrong outputs."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.zeros(_PROBE, *input_shape))
    except Exception as error:
        raise _unfit(name, input_shape, num_classes, error) from error
    module.train(training)
    wanted = (_PROBE, num_classes)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != wanted:
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        reason = ValueError(f"its output for {_PROBE} samples is {got}, not {wanted}")
        raise _unfit(name, input_shape, num_classes, reason)


def _unfit(
    name: str, input_shape: tuple[int, ...], num_classes: int, error: Exception
) -> UserError:
    return UserError(
        f"Model '{name}' does not fit the data, inputs of shape {input_shape} and {num_classes} "
        f"outputs: {_first_line(error)}. mlp and mclr fit any inputs."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
