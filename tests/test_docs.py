"""The pages: their links resolve, and their commands, keys and suites exist."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from strategy_stubs import STUB

from raceme.cli import app
from raceme.core.config import all_keys, check_key, general_keys, parse_assignment
from raceme.experiments.suites import all_shipped, load_suite

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MOST_WORDS = 30_000
MOST_WORDS_OF_README = 900

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert [str(target) for target, _ in targets if not target.exists()] == []
    pages = [(target, anchor) for target, anchor in targets if anchor and target.suffix == ".md"]
    assert [(t.name, anchor) for t, anchor in pages if anchor not in anchors(t)] == []


def exported(module: str) -> set[str]:
    """Return the names that a type checker lets others import from a module."""
    path = ROOT.joinpath(*module.split("."))
    stub = [STUB] if module == "raceme.strategies" else []
    found = [*stub, path / "__init__.py", path.with_suffix(".py")]
    source = next(file for file in found if file.is_file()).read_text(encoding="utf-8")
    names = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=imported):
                names |= {item.name for item in imported if item.asname == item.name}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_pass_a_strict_type_checker(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    imports = re.findall(r"from (raceme[\w.]*) import (\([^)]*\)|[\w, ]+)", text)
    asked = {(module, name) for module, names in imports for name in re.findall(r"\w+", names)}
    assert [(module, name) for module, name in asked if name not in exported(module)] == []


COMMANDS: Any = typer.main.get_command(app)


def commands_on(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every `raceme` that a page tells to type, one command a line."""
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        for line in block[0].replace("\\\n", " ").splitlines():
            # An assignment before it, and what its output is piped into, are the shell's.
            found = re.match(r"\s*(?:\$ |sudo |[A-Z_]+=\S+ )*raceme (.*)", line)
            if found:
                typed = re.split(r"\s(?:&&?|\||>)", found[1])[0]
                yield shlex.split(typed, comments=True)


def test_pages_are_short_enough_to_be_read() -> None:
    words = dict(runpy.run_path(str(ROOT / "docs" / "words.py"))["user_pages"]())
    assert words["guide/my-data.md"] > 0
    assert sum(words.values()) <= MOST_WORDS, words
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS_OF_README


def test_every_picture_is_on_a_page() -> None:
    pages = [*PAGES, ROOT / "mkdocs.yml"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = {picture.name for picture in (ROOT / "docs" / "images").iterdir()}
    assert {name for name in pictures if f"images/{name}" not in text} == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<=[ :])[\w/-]+\.md$", site, re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.parent != ROOT}
    # The hooks of the site write these two.
    assert named - {"index.md", "keys.md"} == pages


# These two have keys that the page itself adds; test_extending.py and test_guide.py try them.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ("extending.md", "my-method.md")],
    ids=lambda page: page.name,
)
def test_commands_are_understood(page: Path) -> None:
    for arguments in commands_on(page):
        if arguments[0].startswith("-"):
            continue
        name, command, rest = COMMANDS.resolve_command(typer.Context(COMMANDS), arguments)
        if isinstance(command, click.Group):
            name, command, rest = command.resolve_command(click.Context(command), rest)
        # What cannot be parsed raises, with the options that there are.
        given = command.make_context(name, list(rest)).params
        keys = dict(map(parse_assignment, given.get("assignments") or []))
        general = {key: given.get(item.name) for key, item in general_keys().items()}
        keys |= {key: value for key, value in general.items() if value is not None}
        # The value of another command's own option is no key's.
        for key, value in keys.items() if "assignments" in given else ():
            check_key(key, value)
        if name == "reproduce" and given["name"]:
            parts = all_shipped()[given["name"]]
            chosen = [parts[part] for part in given["only"].split(",") if part] or parts.values()
            wanted = {label for label in (given["methods"] or "").split(",") if label}
            for suite in map(load_suite, chosen):
                assert wanted <= {method.label for method in suite.methods}, arguments


def test_the_page_of_the_keys_has_each_key_once_below_a_topic() -> None:
    pytest.importorskip("mkdocs")
    page = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["keys_page"]()
    heads = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert heads[:6] == [
        *("Run", "Local training", "Limits and evaluations", "Features", "Attacks", "Datasets")
    ]
    assert len(set(heads)) == len(heads)
    assert sorted(re.findall(r"^\| `([\w.-]+)`", page, re.MULTILINE)) == sorted(all_keys())
    # docs/javascripts/keys.js reads it.
    assert 'id="keys-filter"' in page


def test_links_of_a_page_in_a_folder_are_links_of_the_site() -> None:
    pytest.importorskip("mkdocs")
    named = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/compare.md"))
    kept = (
        "[a](../research/panicle.md#limits), [b](my-data.md), [c](#here), [d](https://e.org/f.json)"
    )
    assert named(kept, page) == kept
    outside = "[g](../../docker/alerts.yml), [h](../results/i.json)"
    assert named(outside, page) == "g (`docker/alerts.yml`), h (`docs/results/i.json`)"
