"""Importing torchvision where its compiled operators do not match the installed torch.

torch's CPU wheel together with the package index's torchvision is such a pair: torchvision's
operators are built for CUDA, are not loaded, and ``import torchvision`` fails when it declares
their shapes for the compiler. Datasets need no operators, so that declaration is left out.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from raceme.config.extras import explained

_DECLARATIONS = "torchvision._meta_registrations"


def import_datasets() -> ModuleType:
    """Return the module ``torchvision.datasets``.

    Raises
    ------
    UserError
        It is not installed.
    """
    try:
        return import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        raise explained(error) from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    # The failed attempt has left half of the package behind.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules[_DECLARATIONS] = ModuleType(_DECLARATIONS)
    return import_module("torchvision.datasets")
