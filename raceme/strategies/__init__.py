"""Methods: one file or folder each, as Flower strategies; each is imported when it is asked for.

``from raceme.strategies import FedAsync`` imports :mod:`raceme.strategies.fedasync` and no other
method. `STRATEGIES` in :mod:`raceme.core.registry` lists the module of each method. The
hyper-parameters, ``FedAsyncParameters``, are in the same module. Editors and type checkers read the
stub in the wheel, which ``python tests/strategy_stubs.py`` makes from the hyper-parameters.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raceme.core.registry import STRATEGIES as STRATEGIES

_MODULES = STRATEGIES.modules() | {
    "FlowerRounds": "raceme.strategies.fedavg",
    "Method": "raceme.core.strategy",
    "Plan": "raceme.core.progress",
    "RoundsParameters": "raceme.core.scheduling",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a method, or the hyper-parameters of one."""
    method = name.removesuffix("Parameters")
    module = _MODULES.get(name) or _MODULES.get(method)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(module), name if name in _MODULES else method)
    return found if name in _MODULES else found.parameters_type


def __dir__() -> list[str]:
    return __all__
