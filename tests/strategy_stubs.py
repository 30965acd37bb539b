"""Write the wheel's stub of raceme.strategies from the methods' hyper-parameters.

Run ``python tests/strategy_stubs.py`` after a change of hyper-parameters.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from pathlib import Path

import raceme.strategies as strategies
from raceme.core.registry import STRATEGIES
from raceme.core.scheduling import FlowerArguments

STUB = Path(__file__).parents[1] / "stubs" / "strategies.pyi"
HEAD = '''"""Written by ``python tests/strategy_stubs.py``: what editors and type checkers know."""

# ruff: noqa
# fmt: off

from typing import Any, TypedDict, Unpack

from raceme.core.progress import Plan as Plan
from raceme.core.registry import STRATEGIES as STRATEGIES
from raceme.core.scheduling import MetricsFn
from raceme.core.scheduling import RoundsParameters as RoundsParameters
from raceme.core.strategy import Method as Method
from raceme.strategies.fedavg import FlowerRounds as FlowerRounds
'''


def stub() -> str:
    """Return the stub: a class, or a function for a variant, with each method's arguments."""
    imports, found = [], []
    shared = {item.name: f"    {item.name}: {item.type}" for item in fields(FlowerArguments)}
    for name, module in sorted(STRATEGIES.modules().items()):
        method = getattr(strategies, name)
        given = []
        for key, one in inspect.signature(method).parameters.items():
            if key in shared:
                continue
            if one.kind is one.KEYWORD_ONLY and "*" not in given:
                given.append("*")
            given.append(f"{one.name}: {one.annotation} = {one.default!r}")
        given.append("**arguments: Unpack[_Arguments]")
        of = getattr(method, "method", method).__name__
        options = method.parameters_type
        if method is getattr(strategies, of):
            imports.append(f"from {module} import {name} as _{name}")
            lines = [f"class {name}(_{name}):", "    def __init__(", "        self,"]
        else:
            lines = [f"def {name}("]
        indent = "        " if lines[0].startswith("class") else "    "
        lines += [f"{indent}{argument}," for argument in given]
        lines.append(f"{indent[4:]}) -> {'None' if indent[4:] else of}: ...")
        found.append("\n".join(lines))
        if options.__module__ != "raceme.core.scheduling":
            origin = options.__module__
            if not hasattr(sys.modules[origin], options.__name__):
                continue
            imports.append(f"from {origin} import {options.__name__} as {options.__name__}")
    arguments = "\n".join(["class _Arguments(TypedDict, total=False):", *shared.values()])
    return "\n".join([HEAD + "\n".join(sorted(set(imports))), "", arguments, *found]) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
