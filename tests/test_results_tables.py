"""Tables of the results pages are what the data files give."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tables"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A copy of the pages and their data."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    for page in (*(ROOT / "docs").glob("results*.md"), ROOT / "docs" / "panicle.md"):
        shutil.copy(page, tmp_path)
    return tmp_path


def problems(tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    status = tables.main(["--check"], docs)
    found = capsys.readouterr().out.splitlines()
    assert status == bool(found)
    return found


def test_every_table_is_what_the_data_give(
    tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not problems(tables, docs, capsys)


def test_a_number_that_the_data_do_not_give_is_found(
    tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = docs / "results-cdfl.md"
    text = page.read_text(encoding="utf-8")
    start = text.index("<!-- table: cdfl-table1 -->")
    changed = text[:start] + text[start:].replace("79.", "78.", 1)
    assert changed != text
    page.write_text(changed, encoding="utf-8")
    (line,) = problems(tables, docs, capsys)
    assert line.startswith("results-cdfl.md: cdfl-table1 differs: ")


def test_a_table_without_data_is_found(
    tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = docs / "results.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    (line,) = problems(tables, docs, capsys)
    assert "a table without" in line


def test_a_table_that_does_not_exist_is_one_line(
    tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = docs / "results.md"
    mark = "<!-- table: casa-table1-mnist -->"
    text = page.read_text(encoding="utf-8").replace(mark, "<!-- table: casa-table9 -->")
    page.write_text(text, encoding="utf-8")
    assert "results.md: casa-table9: no table 'casa-table9' in docs/tables.py" in problems(
        tables, docs, capsys
    )


def test_an_experiment_without_a_file_is_one_line(
    tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (docs / "results" / "casa-table1-cifar10.json").unlink()
    found = problems(tables, docs, capsys)
    assert any("no experiment casa-table1-cifar10: " in line for line in found)
    assert all(line.startswith("results.md: casa-table1-cifar10") for line in found)


def test_a_file_that_no_page_names_is_found(
    tables: ModuleType, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(docs / "results" / "panicle-har.json", docs / "results" / "stray.json")
    assert problems(tables, docs, capsys) == [
        "results/stray.json: no results page names this experiment"
    ]
