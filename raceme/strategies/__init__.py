"""Methods: one file or folder each, as Flower strategies; each is imported when it is asked for.

``from raceme.strategies import FedAsync`` imports :mod:`raceme.strategies.fedasync` and no other
method. Where each is defined says `STRATEGIES`, in :mod:`raceme.core.registry`; its
hyper-parameters, ``FedAsyncParameters``, stand beside it.
"""

# ruff: noqa: F403

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raceme.core.registry import STRATEGIES as STRATEGIES

if TYPE_CHECKING:
    from raceme.core.progress import Plan as Plan
    from raceme.core.scheduling import RoundsParameters as RoundsParameters
    from raceme.core.strategy import Method as Method
    from raceme.strategies.ace import *
    from raceme.strategies.casa.strategy import *
    from raceme.strategies.cdfl.fedsoft import *
    from raceme.strategies.cdfl.strategy import *
    from raceme.strategies.cfl import *
    from raceme.strategies.continual.strategy import *
    from raceme.strategies.csafl import *
    from raceme.strategies.faacl.continual import *
    from raceme.strategies.faacl.strategy import *
    from raceme.strategies.fedasync import *
    from raceme.strategies.fedavg import *
    from raceme.strategies.fedbuff import *
    from raceme.strategies.fedcompass import *
    from raceme.strategies.feddrift import *
    from raceme.strategies.fedrc.strategy import *
    from raceme.strategies.fesem import *
    from raceme.strategies.flexcfl import *
    from raceme.strategies.icfl import *
    from raceme.strategies.ifca import *
    from raceme.strategies.panicle.strategy import *
    from raceme.strategies.profiles.cfl_gp import *
    from raceme.strategies.profiles.flux import *
    from raceme.strategies.profiles.pacfl import *
    from raceme.strategies.standalone import *

_MODULES = STRATEGIES.modules() | {
    "FlowerRounds": "raceme.strategies.fedavg",
    "Method": "raceme.core.strategy",
    "Plan": "raceme.core.progress",
    "RoundsParameters": "raceme.core.scheduling",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a method, or its hyper-parameters, which stand beside it."""
    method = name.removesuffix("Parameters")
    module = _MODULES.get(name) or _MODULES.get(method)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(module), name if name in _MODULES else method)
    return found if name in _MODULES else found.parameters_type


def __dir__() -> list[str]:
    return __all__
