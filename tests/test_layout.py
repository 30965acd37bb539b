"""Layers of the package: imports go down only, without cycles; scripts' imports exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STRUCTURE = ROOT / "benchmarks" / "structure.py"
_SPEC = importlib.util.spec_from_file_location("structure", STRUCTURE)
assert _SPEC is not None
assert _SPEC.loader is not None
structure = importlib.util.module_from_spec(_SPEC)
sys.modules["structure"] = structure
_SPEC.loader.exec_module(structure)

MODULES = structure.modules()
TORCH_IS_FORBIDDEN = ("core", "features", "records", "strategies")


def test_every_room_has_a_floor() -> None:
    known = frozenset().union(*structure.FLOORS)
    assert {structure.room_of(module) for module in MODULES} - {""} == known


def test_imports_go_down_only() -> None:
    """Each package is in one layer, so without upward or sideways imports there are no cycles."""
    assert not structure.upward_imports(MODULES)


def test_no_circle_of_modules() -> None:
    assert not structure.circles(MODULES)


def test_methods_know_neither_torch_nor_the_simulator() -> None:
    for module, path in MODULES.items():
        if structure.room_of(module) in TORCH_IS_FORBIDDEN:
            imported = {name for name, _ in structure.imports_of(path, MODULES)}
            assert "torch" not in {name.split(".")[0] for name in imported}, module
            assert not any(name.startswith("raceme.simulation") for name in imported), module


def test_client_halves_are_imported_by_name_only() -> None:
    """A server needs no torch for a method, and a device needs no server halves."""
    halves = {module for module in MODULES if structure.room_of(module) == "client halves"}
    owners = {module.split(".")[2] for module in halves}
    features = {"central_privacy", "own_model", "secure", "short_upload"}
    assert owners == {*features, "continual", "faacl", "fedrc", "panicle", "profiles"}
    for module, path in MODULES.items():
        imported = {name for name, _ in structure.imports_of(path, MODULES)}
        assert not imported & halves, module
        if module in halves:
            own, rooms = module.rpartition(".")[0], {"core", "flower", "training"}
            for name in imported:
                ours = name.startswith("raceme")
                assert not ours or name.startswith(own) or structure.room_of(name) in rooms, module


SCRIPTS = sorted(
    path for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)


def names_of_ours(script: Path) -> Iterator[tuple[str, str]]:
    """Names that a script imports from this repository: module and name, or module and ""."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            if node.module.split(".")[0] in ("raceme", "benchmarks", "tests"):
                for alias in node.names:
                    yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "raceme":
                    yield alias.name, ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_scripts_import_exists(script: Path) -> None:
    """Few scripts are run by a test, and a renamed import would break the others unnoticed."""
    for module, name in names_of_ours(script):
        found = importlib.import_module(module)
        assert not name or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}")
