"""One of Raceme's methods in the place of the strategy that a Flower app starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from logging import INFO, getLogger
from typing import Any

from flwr.serverapp.strategy import Strategy

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.protocol.events import Observer, ignore
from raceme.strategies import STRATEGIES, Method

Value = str | int | float | bool


def build_method(name: str, parameters: Mapping[str, Value], seed: int) -> Method:
    """Make a method by its name.

    Parameters
    ----------
    name : str
        As in ``raceme list``.
    parameters : Mapping[str, Value]
        Its hyper-parameters, as ``casa.gamma``.
    seed : int
        Decides whatever the method leaves to chance.

    Raises
    ------
    UserError
        There is no such method, or no such hyper-parameter.
    """
    prefix = STRATEGIES.prefix(name)
    foreign = [key for key in parameters if not key.startswith(prefix)]
    if foreign:
        raise UserError(
            f"--set {foreign[0]}: only keys of the strategy can be set here, as {prefix}KEY; the "
            "app's own keys go into --run-config."
        )
    config = RunConfig.from_mapping({"strategy": name, "seed": seed, **parameters})
    config.check_options()
    method: Method = STRATEGIES[name](config.parameters(), seed=seed)
    return method


class Replacement:
    """Starts a method where an app starts a strategy.

    Parameters
    ----------
    name : str
        The method's name.
    make : Callable
        Makes the method; asked once for each strategy that is started.
    observe : Observer
        Called with everything that happens to the first of them.

    Attributes
    ----------
    methods : list[Method]
        Those that were started.
    """

    def __init__(self, name: str, make: Callable[[], Method], observe: Observer) -> None:
        self._name, self._make, self._observe = name, make, observe
        self.methods: list[Method] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Take the place of every strategy that is started meanwhile, the app's own too."""
        starts = {kind: kind.__dict__["start"] for kind in _kinds(Strategy)}
        try:
            for kind, start in starts.items():
                setattr(kind, "start", self._instead_of(start))  # noqa: B010
            yield
        finally:
            for kind, start in starts.items():
                setattr(kind, "start", start)  # noqa: B010

    def _instead_of(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in the place of a strategy's `start`."""

        @wraps(start)
        def instead(strategy: Strategy, *arguments: Any, **named: Any) -> Any:
            if any(strategy is method for method in self.methods):
                return start(strategy, *arguments, **named)
            method = self._make()
            self.methods.append(method)
            getLogger("flwr").log(
                INFO, "%s takes the place of %s.", self._name, type(strategy).__name__
            )
            # An app's own start may have names for Flower's arguments in another order, and more.
            given = dict(inspect.signature(start).bind_partial(strategy, *arguments).arguments)
            given = {**dict(list(given.items())[1:]), **named}
            known = inspect.signature(method.start).parameters
            passed = {name: value for name, value in given.items() if name in known}
            observe = self._observe if len(self.methods) == 1 else ignore
            return method.start(**{**passed, "observe": observe})

        return instead


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and those that derive from it, where they have a `start` of their own."""
    if "start" in kind.__dict__:
        yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)
