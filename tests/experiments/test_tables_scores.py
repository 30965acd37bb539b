"""Comparisons of several scores: columns, published numbers and plots, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from raceme.core.errors import UserError
from raceme.core.events import (
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    ClustersScored,
    Event,
    RunEnded,
    UpdateApplied,
)
from raceme.experiments.compare import write
from raceme.experiments.page import comparison_page, divergences_figure, scores_figure
from raceme.experiments.results import Comparison, Result, Run, read_comparison
from raceme.experiments.suites import ComparedMethod, Published, Scored, Suite, load_suite
from raceme.experiments.tables import main_table, to_csv, to_json
from raceme.records.record import RunRecord
from raceme.records.store import RunStore

pytestmark = pytest.mark.pictures

SUITE = """
title = "Scores"
seeds = [0, 1]
scores = ["before", "cluster"]
shows-mixtures = true
shows-work = true
reference = "soft"

[methods.soft]
strategy = "fedasync"
published = { before = 79.9, after = 83.4, cluster = 83.8 }

[methods.hard]
strategy = "casa"
published = { before = 78.1 }
"""


def run(seed: int, before: float, **numbers: float | None) -> Run:
    summary = {
        **{"accuracy": 0.5, "purity": None, "updates": 10, "virtual_time": 5.0, "target": 0.9},
        **{"accuracy_before": before, "accuracy_after": 0.5, "cluster_accuracy": None},
        **{"mixture_divergence": None, "bytes_up": 0, "bytes_down": 0, "sample_passes": None},
    }
    return Run(seed, f"seed-{seed}", {**summary, **numbers})


def comparison(path: Path) -> Comparison:
    (path / "suite.toml").write_text(SUITE)
    suite = load_suite(path / "suite.toml")
    soft, hard = suite.methods
    known = {"cluster_accuracy": 0.75, "mixture_divergence": 0.125}
    runs = (
        run(0, 0.75, **known, bytes_down=100, sample_passes=600),
        run(1, 0.77, **known, bytes_down=100, sample_passes=600),
    )
    # Twice as many updates: the same bytes per update, and half the work.
    twice = {"updates": 20, "bytes_down": 200, "sample_passes": 600}
    return Comparison(
        suite,
        (Result(soft, "soft", runs), Result(hard, "hard", (run(0, 0.5, **twice),), {1: "lost"})),
    )


def test_each_score_stands_beside_the_published_one(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    table = main_table(found)
    assert table.title == "Scores (2 seeds, accuracies in %)"
    assert table.columns == (
        *("method", "before\npaper", "before\nours", "cluster\npaper", "cluster\nours"),
        *("KL", "bytes\ndown", "client\nwork"),
    )
    assert table.rows == (
        # Mean of 75 and 77, sample deviation 1.41.
        ("soft", "79.9", "76.0 ± 1.4", "83.8", "75.0 ± 0.0", "0.12 ± 0.00", "1.00×", "1.00×"),
        ("hard", "78.1", "50.0", "-", "-", "-", "1.00×", "0.50×"),
    )
    # Both orders agree for this score; for clusters only one number is published.
    assert "our: before" not in table.lines[0]
    assert table.lines[0].endswith("before 1.00, cluster -.")
    assert any(line.startswith("Before: a client's upload") for line in table.lines)
    assert not any("target" in text for text in (*table.columns, *table.lines))
    (tmp_path / "compare.json").write_text(to_json(found))
    assert main_table(read_comparison(tmp_path)) == table
    head, first, *_ = to_csv(found).splitlines()
    cells = dict(zip(head.split(","), first.split(","), strict=True))
    assert (cells["accuracy_before"], cells["mixture_divergence"]) == ("0.75", "0.125")


def test_scores_without_published_ones_have_a_column_each() -> None:
    method = ComparedMethod("soft", "fedasync")
    suite = Suite("t", (method,), scores=(Scored.BEFORE, Scored.AFTER))
    table = main_table(Comparison(suite, (Result(method, "soft", (run(0, 0.5),)),)))
    assert (table.columns, table.rows) == (
        ("method", "before\nours", "after\nours"),
        (("soft", "50.0", "50.0"),),
    )


def test_a_suite_with_scores_has_the_clients_make_the_tests(tmp_path: Path) -> None:
    suite = comparison(tmp_path).suite
    assert all(suite.config(method, 0).value("score-uploads") for method in suite.methods)
    plain = Suite("t", suite.methods, scores=(Scored.CLUSTER,))
    assert not plain.config(plain.methods[0], 0).value("score-uploads")
    assert suite.methods[0].published == (Published(before=79.9, after=83.4, cluster=83.8),)
    # Without the reference method no relative work is shown.
    assert not suite.only(["hard"]).shows_work


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ('scores = ["befor"]', "befor"),
        ('scores = "before"', "must be a list"),
        ('scores = ["after", "after"]', "must be different"),
        ("shows-work = true", "name one"),
    ],
)
def test_a_score_that_the_runs_lack_is_an_error(tmp_path: Path, key: str, error: str) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(f"{key}\n[methods.casa]\n")
    with pytest.raises(UserError, match=error):
        load_suite(path)


def events(before: float, weight: float | None) -> list[Event]:
    mixture = () if weight is None else (0.5, 0.5)
    moved: list[Event] = []
    if weight is not None:
        weights = {"a": {0: weight, 1: 1 - weight}}
        moved = [ClustersChanged(1.0, 1, ClusterChange.MOVE, weights)]
    return [
        ClientJoined(0.0, "a", 0, 10, None),
        UpdateApplied(
            *(1, 1.0, "a", 0, 0, 0, 0.5, 0.0, 1.0, 1, 1), accuracy_before=before, mixture=mixture
        ),
        *moved,
        ClustersScored(1.0, 1, {0: before, 1: 1.0}),
        RunEnded(1.0, 1, "so"),
    ]


def test_scores_and_divergences_of_the_methods_are_drawn_side_by_side() -> None:
    records = {"soft": RunRecord.of(events(0.5, 0.25)), "hard": RunRecord.of(events(0.25, None))}
    figure = scores_figure(records, tuple(Scored))
    drawn = [
        {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}
        for axes in figure.axes
    ]
    assert drawn == [
        {"soft": [[1, 0.5]], "hard": [[1, 0.25]]},
        {},
        {"soft": [[1, 0.75]], "hard": [[1, 0.625]]},
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["soft", "hard"]
    (axes,) = divergences_figure(records).axes
    ((label, curve),) = {str(line.get_label()): line.get_xydata() for line in axes.lines}.items()
    assert label == "soft"
    assert curve.tolist() == [[1, pytest.approx(0.14384, abs=1e-4)]]


def test_the_plots_are_written_and_on_the_page(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    for number, weight in ((0, 0.25), (1, 0.5)):
        with RunStore(tmp_path / f"seed-{number}") as store:
            for event in events(0.5, weight):
                store.observe(event)
    write(found, tmp_path)
    assert (tmp_path / "scores.png").exists()
    assert (tmp_path / "mixtures.png").exists()
    page = comparison_page(tmp_path, "")
    assert "Uploads, returned models and clusters" in page
    assert "Estimated mixtures against the true ones" in page
