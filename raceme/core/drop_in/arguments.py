"""The arguments that Flower's strategies are made with, beside a method's hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from flwr.app import MetricRecord, RecordDict

from raceme.core.errors import UserError, unknown_name
from raceme.core.messages import ARRAYS, CONFIG, NUM_EXAMPLES
from raceme.core.options import convert
from raceme.core.strategy import Method

MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
"""Aggregates the metrics of replies, given the name of the weight among them."""

_FORMER = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
}
"""What arguments were called in earlier versions of Flower."""
_TO_START = {
    "evaluate_fn": "evaluate_fn=...",
    "initial_parameters": "initial_arrays=...",
    "on_fit_config_fn": "train_config=...",
    "on_evaluate_config_fn": "evaluate_config=...",
    "num_rounds": "num_rounds=...",
    "max_updates": "max_updates=...",
    "timeout": "timeout=...",
}
"""What is no property of a strategy but said at the start."""


@dataclass(frozen=True)
class FlowerArguments:
    """What Flower's strategies are told about clients and messages, with Flower's defaults.

    Attributes
    ----------
    fraction_train : float
        Share of the connected nodes that train: in a round, or at a time where there are none.
    fraction_evaluate : float
        Share of the connected nodes that test models after each round; 0: none of them do.
    min_train_nodes, min_evaluate_nodes : int
        So many at least, as far as they are connected.
    min_available_nodes : int
        Nodes that must be connected before the run begins.
    weighted_by_key : str
        The metric that says how much a client counts: its number of examples.
    arrayrecord_key, configrecord_key : str
        Names of the records with the model and with the settings in messages to clients.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : Callable or None
        Aggregate what clients have measured in a round; by default the mean by weight.
    accuracy_key : str
        The metric of a test that is the accuracy; by default it is found by its name.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = NUM_EXAMPLES
    arrayrecord_key: str = ARRAYS
    configrecord_key: str = CONFIG
    train_metrics_aggr_fn: MetricsFn | None = None
    evaluate_metrics_aggr_fn: MetricsFn | None = None
    accuracy_key: str = ""

    def trained(self, online: int) -> int:
        """Return how many of so many nodes train: at a time, or in a round."""
        return _share(online, self.fraction_train, max(1, self.min_train_nodes))

    def tested(self, online: int) -> int:
        """Return how many of so many nodes test models after a round."""
        if not self.fraction_evaluate:
            return 0
        return _share(online, self.fraction_evaluate, self.min_evaluate_nodes)


def _share(online: int, fraction: float, least: int) -> int:
    return min(online, max(int(fraction * online), least))


def divided(
    method: str, parameters_type: type[Any], parameters: Any, arguments: Mapping[str, Any]
) -> tuple[Any, FlowerArguments]:
    """Divide the arguments of a method into its hyper-parameters and what Flower's strategies take.

    Parameters
    ----------
    method : str
        Name of the method, for error messages.
    parameters_type : type
        The dataclass of its hyper-parameters.
    parameters : dataclass or None
        Hyper-parameters that were given together.
    arguments : Mapping[str, Any]
        All other arguments, by keyword.

    Raises
    ------
    UserError
        An argument is unknown, of the wrong type or out of its range, or means nothing to the
        method.
    """
    if parameters is not None and not is_dataclass(parameters):
        raise UserError(
            f"{method} takes its arguments by keyword: {method}(fraction_train={parameters!r})."
        )
    own = {item.name: item for item in fields(parameters_type)}
    flower = {item.name: item for item in fields(FlowerArguments)}
    for name in arguments:
        _check_known(method, name, [*own, *flower, "seed"])
    given = {
        name: convert(name, value, own[name]) for name, value in arguments.items() if name in own
    }
    told = FlowerArguments(
        **{
            name: _checked(name, value, flower[name].default)
            for name, value in arguments.items()
            if name in flower
        }
    )
    parameters = parameters_type() if parameters is None else parameters
    if "fraction" in own and "fraction_train" in arguments:
        if "fraction" in given and given["fraction"] != told.fraction_train:
            raise UserError("fraction and fraction_train are the same: give one of them.")
        given["fraction"] = told.fraction_train
    elif "fraction" in own:
        fraction = given.get("fraction", getattr(parameters, "fraction", 1.0))
        told = replace(told, fraction_train=fraction)
    return (replace(parameters, **given) if given else parameters), told


def check_share(method: Method, arguments: FlowerArguments) -> None:
    """Raise UserError if clients are to take part by share, and the method chooses them itself."""
    chooses = method.scheduling.rounds is not None and not hasattr(method.parameters, "fraction")
    if chooses and arguments.fraction_train < 1:
        name = type(method).__name__
        own = ", ".join(item.name for item in fields(method.parameters))
        raise UserError(
            f"fraction_train means nothing to {name}, which chooses itself who takes part: leave "
            f"it out; {name}'s own arguments are {own}."
        )


def _check_known(method: str, name: str, known: list[str]) -> None:
    """Raise UserError if there is no such argument, with what was meant."""
    if name in known:
        return
    if name in _FORMER:
        raise UserError(f"{name} is called {_FORMER[name]} in Flower's present strategies.")
    if name in _TO_START:
        raise UserError(
            f"{name} is no argument of {method}: give it to its start({_TO_START[name]})."
        )
    raise unknown_name(f"argument of {method}", name, known)


def _checked(name: str, value: Any, default: object) -> Any:
    """Check the type and the range of an argument.

    Raises
    ------
    UserError
        It is of another type, or out of its range.
    """
    if default is None:
        if value is not None and not callable(value):
            raise UserError(f"{name} must be a function or None, got {value!r}.")
        return value
    if isinstance(default, str):
        if not isinstance(value, str) or not (value or name == "accuracy_key"):
            raise UserError(f"{name} must be text, got {value!r}.")
        return value
    wanted = float if isinstance(default, float) else int
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or wanted(value) != value:
        kind = "a number" if wanted is float else "a whole number"
        raise UserError(f"{name} must be {kind}, got {value!r}.")
    if name == "fraction_train" and not 0 < value <= 1:
        raise UserError(f"{name} must be above 0 and at most 1, got {value:g}.")
    if value < 0 or (wanted is float and value > 1):
        raise UserError(f"{name} must be {'between 0 and 1' if wanted is float else 'at least 0'}.")
    return wanted(value)
