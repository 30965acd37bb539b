"""The tables of the results pages agree with the data files."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import wilcoxon

from raceme.core.config import RunConfig, read_toml

DOCS = Path(__file__).parent.parent / "docs"
TABLES: dict[str, Any] = runpy.run_path(str(DOCS / "tables.py"))
PAGE = "results-casa.md"


def checked(docs: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of ``python docs/tables.py --check``; none if there is no error."""
    status = TABLES["main"](["--check"], docs)
    lines = capsys.readouterr().out.splitlines()
    assert status == bool(lines)
    return lines


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Return a copy of one page and its data, as all pages take seconds."""
    copy = tmp_path / "docs"
    (copy / "results").mkdir(parents=True)
    shutil.copy(DOCS / PAGE, copy)
    named = re.findall(r"results/([\w-]+\.json)", (DOCS / PAGE).read_text(encoding="utf-8"))
    for name in set(named):
        shutil.copy(DOCS / "results" / name, copy / "results")
    return copy


def changed(page: Path, old: str, new: str) -> None:
    """Replace the first occurrence of a text in a page."""
    text = page.read_text(encoding="utf-8")
    assert old in text
    page.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_tables_are_those_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(DOCS, capsys) == []


def test_a_changed_number_is_one_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(docs / PAGE, "99.30 ± 0.02", "99.31 ± 0.02")
    (line,) = checked(docs, capsys)
    assert line.startswith("results-casa.md: casa-table1-mnist differs: ")
    assert "99.30 ± 0.02" in line


def test_changed_data_are_written_to_the_page(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = docs / "results" / "casa-table1-cifar10.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["methods"]["casa"]["published"]["accuracy"] = 91.46
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert len(checked(docs, capsys)) == 1
    assert TABLES["main"]([], docs) == 0
    assert "| `casa` | 91.46 | 81.48 |" in (docs / PAGE).read_text(encoding="utf-8")


def test_an_empty_table_is_filled_and_what_follows_is_kept(docs: Path) -> None:
    page = docs / PAGE
    before = page.read_text(encoding="utf-8")
    mark = "<!-- table: casa-table1-mnist -->\n"
    start = before.index(mark) + len(mark)
    page.write_text(before[:start] + before[before.index("<!-- end -->", start) :], "utf-8")
    assert TABLES["main"]([], docs) == 0
    assert page.read_text(encoding="utf-8") == before


def test_an_unknown_table_is_one_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(docs / PAGE, "<!-- table: casa-table1-mnist -->", "<!-- table: casa-table9 -->")
    assert checked(docs, capsys) == [
        "results-casa.md: casa-table9: no table 'casa-table9' in docs/tables.py"
    ]


def test_a_missing_experiment_is_one_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs / "results" / "casa-table1-cifar10.json").unlink()
    (line,) = checked(docs, capsys)
    assert line.startswith(
        "results-casa.md: casa-table1-cifar10: no experiment casa-table1-cifar10: "
    )


def test_a_file_of_no_experiment_is_one_line(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (docs / "results" / "casa-table9.json").write_text("{}", encoding="utf-8")
    assert checked(docs, capsys) == [
        "results/casa-table9.json: no results page names this experiment"
    ]


def test_a_table_without_a_mark_is_one_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(docs / PAGE, "<!-- hand: raceme run, no files kept -->\n", "")
    (line,) = checked(docs, capsys)
    assert line.startswith("results-casa.md: a table without <!-- table")


def test_every_run_can_be_written_out_again(tmp_path: Path) -> None:
    assert TABLES["main"](["--unpack", "casa-table1-mnist", "--out", str(tmp_path)], DOCS) == 0
    folders = sorted(path.parent for path in tmp_path.glob("*/*/config.toml"))
    # 13 methods with three seeds, and 11 points of sweeps.
    assert len(folders) == 13 * 3 + 11
    casa = tmp_path / "casa" / "seed-1"
    config = RunConfig.from_mapping(read_toml(casa / "config.toml"))
    assert (config.strategy, config.seed, config.max_updates) == ("casa", 1, 10_000)
    summary = json.loads((casa / "summary.json").read_text(encoding="utf-8"))
    assert (summary["updates"], summary["purity"]) == (10_000, 1.0)


def test_the_data_file_of_a_comparison_is_written_from_its_folder(tmp_path: Path) -> None:
    runs, file = tmp_path / "runs", tmp_path / "again.json"
    name = "faacl-full-mnist-a2"
    assert TABLES["main"](["--unpack", name, "--out", str(runs)], DOCS) == 0
    before = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    folders = [path.parent for path in sorted(runs.glob("*/*/config.toml"))]
    entry = {
        "asynchronous": False,
        "runs": [{"folder": f"{f.parent.name}/{f.name}"} for f in folders],
    }
    tree = {**before, "methods": [entry], "sweeps": {}}
    (runs / "compare.json").write_text(json.dumps(tree), encoding="utf-8")
    assert TABLES["main"](["--pack", str(runs), "--out", str(file)], DOCS) == 0
    after = json.loads(file.read_text(encoding="utf-8"))
    assert len(after["rows"]) == len(before["rows"]) == 7
    experiment = TABLES["Experiment"]
    for row in before["rows"]:
        (same,) = (
            r for r in after["rows"] if (r["method"], r["seed"]) == (row["method"], row["seed"])
        )
        keys = [experiment("", tree).configuration(r) for tree, r in ((before, row), (after, same))]
        assert keys[0] == keys[1]
        assert {**before["shared"]["figures"], **row["figures"]}.items() <= {
            **after["shared"]["figures"],
            **same["figures"],
        }.items()


def test_variants_of_a_suite_are_written_into_one_data_file(tmp_path: Path) -> None:
    name, runs, file = "faacl-full-mnist-a2", tmp_path / "runs", tmp_path / "both.json"
    for variant in ("calm", "rush"):
        out = runs / variant
        assert TABLES["main"](["--unpack", name, "--out", str(out)], DOCS) == 0
        (folder,) = (path.parent for path in out.glob("fedavg/*/config.toml"))
        entry = {"asynchronous": False, "runs": [{"folder": str(folder.relative_to(out))}]}
        tree = {"title": variant, "seeds": [10], "methods": [entry], "sweeps": {}}
        (out / "compare.json").write_text(json.dumps(tree), encoding="utf-8")
        with closing(sqlite3.connect(folder / "run.sqlite")) as run, run:
            columns = "(time REAL, event INTEGER, updates INTEGER, accuracy REAL)"
            run.execute(f"CREATE TABLE evaluations {columns}")
            rows = [(0.0, 1, 0, 0.1), (4.0, 2, 20, 0.5), (4.0, 3, 40, 0.6), (5.5, 4, 60, 0.9)]
            run.executemany("INSERT INTO evaluations VALUES (?, ?, ?, ?)", rows)
            run.execute("CREATE TABLE client_evaluations (event INTEGER, accuracy REAL)")
            # The worst tenth of eleven clients are two.
            tested = [(row[1], row[3] - 0.01 * client) for row in rows for client in range(11)]
            run.executemany("INSERT INTO client_evaluations VALUES (?, ?)", tested)
    points = ["--at", "5", "--at", "5.5", "--after", "2", "--after", "1000"]
    assert TABLES["main"](["--pack", str(runs), *points, "--out", str(file)], DOCS) == 0
    packed = json.loads(file.read_text(encoding="utf-8"))
    assert packed["title"] == "calm"
    figures = packed["shared"]["figures"]
    assert figures["accuracy_at_5"] == 0.6
    assert figures["accuracy_at_5.5"] == 0.9
    assert figures["worst_tenth_accuracy_at_5"] == pytest.approx(0.505)
    # Two updates of each of 20 clients. The run had no 20,000 updates.
    assert figures["accuracy_after_2"] == 0.6
    assert "accuracy_after_1000" not in figures
    assert [row["method"] for row in packed["rows"]] == ["calm/fedavg", "rush/fedavg"]
    experiment = TABLES["Experiment"]("both", packed)
    experiment.unpack(tmp_path / "again")
    assert (tmp_path / "again" / "rush" / "fedavg" / "seed-10" / "summary.json").exists()


def test_a_folder_without_a_comparison_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert TABLES["main"](["--pack", str(tmp_path)], DOCS) == 1
    assert capsys.readouterr().out.endswith("has no compare.json: run the comparison first\n")


def test_the_signed_rank_test_is_exact_without_zeros() -> None:
    differences = [0.5, -0.2, 1.1, -0.9, 0.7, 2.3, 0.3, 1.6]
    found = TABLES["_signed_rank"]([*differences, 0.0])
    assert found == pytest.approx(wilcoxon(differences, method="exact").pvalue)
    # Two of four possible sums of two equal ranks are as extreme as the observed one.
    assert TABLES["_signed_rank"]([0.5, 0.5]) == 0.5


def test_p_values_are_corrected_for_their_number() -> None:
    # 3 · 0.01, 2 · 0.02 and 1 · 0.03, each at least the previous one.
    assert TABLES["_corrected"]([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert TABLES["_corrected"]([0.6, 0.9]) == [1.0, 1.0]
