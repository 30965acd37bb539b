"""A method's arguments in Python's signatures, editors and mypy."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from strategy_stubs import STUB, stub

import raceme.strategies as strategies
from raceme.core.errors import UserError
from raceme.core.registry import STRATEGIES
from raceme.core.scheduling import FlowerArguments
from raceme.core.strategy import Method

METHODS = sorted(STRATEGIES.modules())
BOTH = {"parameters", "seed"} | {item.name for item in fields(FlowerArguments)}


@pytest.mark.parametrize("name", METHODS)
def test_a_signature_and_the_help_have_each_parameter(name: str) -> None:
    method = getattr(strategies, name)
    own = {item.name: item.default for item in fields(method.parameters_type)}
    known = inspect.signature(method).parameters
    assert set(known) == own.keys() | BOTH
    assert {key: known[key].default for key in own} == own
    for key, default in own.items():
        assert f"\n{key} : {known[key].annotation}, default {default!r}\n    " in method.__doc__


def test_the_help_has_ranges_and_the_source() -> None:
    assert "\n    exponent γ of the eigengap, eq 14 (greater than 0).\n" in (
        strategies.CASA.__doc__ or ""
    )
    assert "KDD 2024" in (strategies.CASA.__doc__ or "")


def test_the_stub_is_up_to_date() -> None:
    # If this fails: python tests/strategy_stubs.py
    assert STUB.read_text(encoding="utf-8") == stub()


@pytest.mark.slow
def test_mypy_finds_wrong_arguments_only(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(
        "from raceme.strategies import CASA, CASAC, FedAsync\n"
        "CASA(gamma=0.15, fraction_train=0.5)\n"
        "CASA(gama=0.1)\n"
        'CASA(gamma="x")\n'
        "CASAC(gama=0.1)\n"
        "FedAsync(gamma=0.1)\n"
        "import raceme\n"
        "from raceme.client_app import OwnData\n"
        'print(raceme.run("casa").summary["accuracy"])\n'
    )
    # Arrange the stub as in the wheel.
    there = tmp_path / "there" / "raceme"
    shutil.copytree(Path(strategies.__file__).parents[1], there)
    shutil.copyfile(STUB, there / "strategies" / "__init__.pyi")
    options = ["--strict", "--config-file", "", "--follow-imports", "silent"]
    made = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--ignore-missing-imports", "typed.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(there.parent)},
        capture_output=True,
        text=True,
    )
    wrong = [line.split(":")[1] for line in made.stdout.splitlines() if ": error:" in line]
    assert wrong == ["3", "4", "5", "6"], made.stdout + made.stderr


def test_parameters_must_be_a_dataclass() -> None:
    with pytest.raises(UserError, match=r"^Mine.parameters_type must be a @dataclass"):
        type("Mine", (Method,), {"parameters_type": type("MineParameters", (), {"alpha": 0.5})})
