"""Published numbers with a remark, and numbers of clusters, beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from raceme.core.errors import UserError
from raceme.experiments.results import Comparison, Result, Run, read_comparison
from raceme.experiments.suites import load_suite
from raceme.experiments.tables import main_table, to_json

SUITE = """
title = "Marked"
seeds = [0, 1]
shows-clusters = true
notes = ["A note."]

[methods.fedavg]
published = { accuracy = 67.96, clusters = 1, remark = "half of 73.57 at most." }

[methods.fedprox]
published = { accuracy = 67.5, remark = "half of 73.57 at most." }

[methods.casa]
published = { accuracy = 71.1, clusters = 4 }

[methods.ifca]

[methods.fedasync]
published = { accuracy = 50.0, remark = "of other data." }
"""


def comparison(path: Path) -> Comparison:
    (path / "suite.toml").write_text(SUITE)
    suite = load_suite(path / "suite.toml")
    summary = {"accuracy": 0.5, "purity": 1.0, "updates": 9, "virtual_time": 5.0, "target": 0.9}
    runs = tuple(Run(s, f"seed-{s}", {**summary, "clusters": 3 + s}) for s in (0, 1))
    return Comparison(suite, tuple(Result(method, method.label, runs) for method in suite.methods))


def test_marked_numbers_have_their_remarks_below_the_table(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    table = main_table(found)
    paper = {row[0]: row[1] for row in table.rows}
    assert table.columns[1] == "acc %\npaper"
    assert paper == {
        "fedavg": "67.96†",
        "fedprox": "67.50†",
        "casa": "71.10",
        "ifca": "-",
        "fedasync": "50.00†",
    }
    # Each remark is printed once, before the notes.
    assert table.lines[-3:] == (
        "† fedavg, fedprox: half of 73.57 at most.",
        "† fedasync: of other data.",
        "A note.",
    )
    (tmp_path / "compare.json").write_text(to_json(found))
    assert main_table(read_comparison(tmp_path)) == table


def test_numbers_of_clusters_stand_beside_the_published_ones(tmp_path: Path) -> None:
    table = main_table(comparison(tmp_path))
    assert table.columns[-2:] == ("clusters\npaper", "clusters\nours")
    # Means over runs with 3 and 4 clusters.
    assert [row[-2:] for row in table.rows] == [
        ("1†", "3.5 ± 0.7"),
        ("-", "3.5 ± 0.7"),
        ("4", "3.5 ± 0.7"),
        ("-", "3.5 ± 0.7"),
        ("-", "3.5 ± 0.7"),
    ]


def test_a_remark_is_text(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text("[methods.casa]\npublished = { accuracy = 5, remark = true }")
    with pytest.raises(UserError, match=r"methods.casa.published.remark in .* must be text"):
        load_suite(path)
