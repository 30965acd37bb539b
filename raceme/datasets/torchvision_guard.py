"""Importing torchvision where its compiled operators do not match the installed torch.

torch's CPU wheel together with the package index's torchvision is such a pair: torchvision's
operators are built for CUDA, are not loaded, and ``import torchvision`` fails when it declares
their shapes for the compiler. Datasets and transforms need no operators, so that declaration is
left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TypeVar

_DECLARATIONS = "torchvision._meta_registrations"

Loaded = TypeVar("Loaded")


def import_datasets() -> ModuleType:
    """Return the module ``torchvision.datasets``."""
    return without_operators(lambda: import_module("torchvision.datasets"))


def without_operators(load: Callable[[], Loaded]) -> Loaded:
    """Return what imports something that may import torchvision; try again if just that fails.

    Parameters
    ----------
    load : Callable
        Does the import.

    Raises
    ------
    Exception
        Whatever the import raises for another reason.
    """
    try:
        return load()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    # The failed attempt has left half of the package behind.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules[_DECLARATIONS] = ModuleType(_DECLARATIONS)
    return load()
