"""Measure the size of the package and the dependencies between its parts.

``python benchmarks/structure.py`` prints them; `tests/test_layout.py` holds the limits.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "raceme"

FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor)
    for floor in (
        {"__main__"},
        {"cli"},
        {"notebook"},
        {"experiments", "fleet", "server_app"},
        {"runs"},
        {"simulation"},
        {"client halves"},
        {"strategies", "client_app", "reporting"},
        {"training", "records"},
        {"datasets"},
        {"features"},
        {"core"},
        {"flower"},
    )
)
"""The packages ("rooms") from the top layer down. A room imports from lower layers only."""


@dataclass(frozen=True)
class Lines:
    """Lines of code: neither blank nor comment nor docstring.

    Attributes
    ----------
    code : int
        All of them.
    imports : int
        Those that belong to import statements.
    """

    code: int
    imports: int


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the modules of the package: dotted name to file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def count_lines(source: str) -> Lines:
    """Count the lines of code of one module."""
    tree = ast.parse(source)
    outside: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(tree):
        # Strings below constants are docstrings by convention, though Python does not keep them.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            outside.update(_span(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(_span(node))
    ignored = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= outside
    return Lines(len(code), len(code & imports))


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def imports_of(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a file imports, and whether it does so only inside a function.

    Imports for type checkers only are left out.
    """

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            within = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Import):
                yield from ((alias.name, within) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                inner = {f"{child.module}.{alias.name}" for alias in child.names}
                yield from ((name, within) for name in (inner & known.keys()) or {child.module})
            yield from walk(child, within)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def room_of(module: str) -> str:
    """Return the room of a module; empty for `raceme` itself.

    The client halves of methods and features are a room of their own above `strategies`: they use
    what both halves share, and `training`; nothing below imports them but by name.
    """
    parts = module.split(".")
    if len(parts) > 3 and parts[1] in ("features", "strategies") and parts[-1] == "client":
        return "client halves"
    return parts[1] if len(parts) > 1 else ""


def upward_imports(known: Mapping[str, Path]) -> list[str]:
    """Return the imports that do not go to a lower layer."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = set()
    for own, path in known.items():
        for imported, _ in imports_of(path, known):
            one, other = room_of(own), room_of(imported)
            ours = imported.split(".")[0] == "raceme"
            if ours and one and other and one != other and floor[other] <= floor[one]:
                found.add(f"{own} -> {imported}")
    return sorted(found)


def circles(known: Mapping[str, Path]) -> list[str]:
    """Return the import cycles between modules, including imports inside functions."""
    graph: dict[str, set[str]] = defaultdict(set)
    for own, path in known.items():
        for imported, _ in imports_of(path, known):
            # A package's `__init__` gathers its modules, which may import each other.
            if imported in known and not own.startswith(f"{imported}."):
                graph[own].add(imported)
    done: set[str] = set()
    found: list[str] = []

    def visit(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            found.append(" -> ".join((*way[way.index(module) :], module)))
        elif module not in done:
            for imported in sorted(graph[module] - {module}):
                visit(imported, (*way, module))
            done.add(module)

    for module in known:
        visit(module, ())
    return found


_FLOWERS = frozenset(
    {
        "start",
        "summary",
        "configure_train",
        "aggregate_train",
        "configure_evaluate",
        "aggregate_evaluate",
    }
)
"""Methods of Flower's own `Strategy`."""


def hooks(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return what a method may override, each with the classes that do.

    These are the public names of `Method` that it lists under its heading "Hooks", and all others
    that a method in `strategies` defines too. Annotations that only narrow a type do not count, nor
    do methods of Flower's own strategies.
    """
    source = (package / "core" / "strategy.py").read_text(encoding="utf-8")
    base = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Method")
    assert isinstance(base, ast.ClassDef)
    own = _defined(base).items()
    public = {name: n for name, n in own if not name.startswith("_") and name not in _FLOWERS}
    headings = [n for n, line in enumerate(source.splitlines(), 1) if line.startswith("    # ")]
    begin = next(n for n in headings if source.splitlines()[n - 1].startswith("    # Hooks"))
    end = min(n for n in headings if n > begin)
    found: dict[str, list[str]] = {n: [] for n, line in public.items() if begin < line < end}
    classes: dict[str, ast.ClassDef] = {}
    for path in sorted((package / "strategies").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def is_method(name: str) -> bool:
        bases = classes[name].bases if name in classes else []
        return name == "Method" or any(isinstance(b, ast.Name) and is_method(b.id) for b in bases)

    for name, node in classes.items():
        if is_method(name):
            for hook in _defined(node).keys() & public.keys():
                found.setdefault(hook, []).append(name)
    return found


def _defined(node: ast.ClassDef) -> dict[str, int]:
    """Return the names that a class defines, with the lines where it does."""
    found = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            found[part.name] = part.lineno
        elif isinstance(part, ast.AnnAssign) and part.value and isinstance(part.target, ast.Name):
            found[part.target.id] = part.lineno
        elif isinstance(part, ast.Assign):
            targets = (target for target in part.targets if isinstance(target, ast.Name))
            found |= {target.id: part.lineno for target in targets}
    return found


def main() -> None:
    """Print the counts."""
    known = modules()
    lines = {name: count_lines(path.read_text(encoding="utf-8")) for name, path in known.items()}
    code = sum(found.code for found in lines.values())
    imports = sum(found.imports for found in lines.values())
    print(f"modules                {len(known):6,}")
    print(f"lines of code          {code:6,}")
    print(f"of them imports        {imports:6,} ({imports / code:.1%})")
    print(f"circles                {len(circles(known)):6,}")
    print(f"imports upward         {len(upward_imports(known)):6,}")
    print(f"hooks of a method      {len(hooks()):6,}")
    rooms: dict[str, int] = defaultdict(int)
    for name, found in lines.items():
        rooms[room_of(name) or "raceme"] += found.code
    for room, count in sorted(rooms.items(), key=lambda pair: -pair[1]):
        print(f"  {room:<20} {count:6,}")


if __name__ == "__main__":
    main()
