"""The packages: imports go down only, and there is no circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import raceme

PACKAGE = Path(raceme.__file__).parent

FLOORS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"notebook"},
    {"comparison", "deployment", "server_app"},
    {"apps", "experiment"},
    {"simulation"},
    {"strategies", "client_app"},
    {"checkpoints", "server", "reporting", "tracking", "training"},
    {"dashboard", "protection"},
    {"clustering", "models", "records"},
    {"datasets", "protocol"},
    {"config", "compat"},
]
"""From the top floor down. A package imports from lower floors only."""

TORCH_IS_FORBIDDEN = ("clustering", "server", "strategies")
MOST_LINES = 500


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update((inner & MODULES.keys()) or {node.module})
    return found


def package_of(module: str) -> str:
    """Return the package or top-level module of one of ours; nothing for `raceme` itself."""
    return module.split(".")[1] if "." in module else ""


ARROWS: dict[tuple[str, str], set[str]] = defaultdict(set)
for own, path in MODULES.items():
    for imported in imports_of(path):
        if imported.split(".")[0] == "raceme":
            one, other = package_of(own), package_of(imported)
            if one and other and one != other:
                ARROWS[one, other].add(f"{own} -> {imported}")


def test_every_package_has_a_floor() -> None:
    known = set().union(*FLOORS)
    assert {package_of(module) for module in MODULES} - {""} == known


def test_imports_go_down_only() -> None:
    """With one floor each and no import upwards or sideways there can be no circle of packages."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    upwards = {
        arrow
        for (one, other), arrows in ARROWS.items()
        if floor[other] <= floor[one]
        for arrow in arrows
    }
    assert not upwards


def test_no_circle_of_modules() -> None:
    graph = {
        module: {name for name in imports_of(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                # A package's face gathers its modules, which may import each other.
                if not module.startswith(f"{imported}."):
                    visit(imported, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_methods_know_neither_torch_nor_the_simulator() -> None:
    for module, path in MODULES.items():
        if package_of(module) in TORCH_IS_FORBIDDEN:
            imported = {name.split(".")[0] for name in imports_of(path)}
            assert "torch" not in imported, module
            assert not any(name.startswith("raceme.simulation") for name in imports_of(path)), (
                module
            )


def test_no_file_is_long() -> None:
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
