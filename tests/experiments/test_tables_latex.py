"""A comparison as a LaTeX table: bold cells, escaped characters, compilation."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raceme.cli import app
from raceme.experiments.compare import write
from raceme.experiments.page import plots
from raceme.experiments.results import Comparison, Result, Run
from raceme.experiments.suites import ComparedMethod, Suite
from raceme.experiments.tables import TO_TARGET, best_row, latex_table, main_table, to_latex

NAME = r"my_net & 50% #1 {x} ~^\ <a> $5 [α≥β]"


def run(seed: int, accuracy: float, time: float | None) -> Run:
    told = {"accuracy": accuracy, "purity": None, "updates": 10, "virtual_time": 20.0}
    reached = None if time is None else {"virtual_time": time}
    return Run(seed, f"seed-{seed}", {**told, "target": 0.9, "time_to_target": reached})


SEEDS = range(5)


def results(**accuracies: list[float]) -> Comparison:
    """Return methods with an accuracy per seed, and times that increase with it."""
    methods = tuple(ComparedMethod(label, "casa") for label in accuracies)
    found = tuple(
        Result(method, method.label, tuple(run(seed, x, 10 * x) for seed, x in enumerate(own)))
        for method, own in zip(methods, accuracies.values(), strict=True)
    )
    return Comparison(Suite("A_1 & B", methods, seeds=tuple(SEEDS)), found)


@pytest.fixture
def found() -> Comparison:
    fast, slow, never = (
        ComparedMethod(NAME, "casa"),
        ComparedMethod("slow", "fedasync"),
        ComparedMethod("never", "fedavg"),
    )
    results = (
        Result(fast, NAME, (run(0, 0.9, 4.0), run(1, 0.92, 6.0))),
        Result(slow, "slow", (run(0, 0.91, 9.0), run(1, 0.91, 9.0))),
        Result(never, "never", (run(0, 0.5, None), run(1, 0.5, None))),
    )
    return Comparison(Suite("A_1 & B", (fast, slow, never), seeds=(0, 1)), results)


def test_a_best_value_is_bold_if_a_paired_test_over_five_seeds_is_significant() -> None:
    # Two points better with every seed: 0.02, 0.03, 0.02, 0.01, 0.02 have t = 6.3.
    lower = [0.80, 0.85, 0.90, 0.70, 0.75]
    higher = [x + gain for x, gain in zip(lower, (0.02, 0.03, 0.02, 0.01, 0.02), strict=True)]
    both = results(a=lower, b=higher)
    assert best_row(both, "acc %") == 1
    # The time increases with the accuracy, so that the other method is faster.
    assert best_row(both, TO_TARGET) == 0
    assert r"\textbf{82.00 $\pm$ 8.40}" in to_latex(both)
    # With four seeds, or as many losses as wins, no row is highlighted.
    assert best_row(results(a=lower[:4], b=higher[:4]), "acc %") is None
    assert best_row(results(a=lower, b=lower[::-1]), "acc %") is None
    assert r"\textbf" not in to_latex(results(a=lower, b=lower))


def test_a_method_that_misses_the_target_is_slower_than_its_run_is_long() -> None:
    both = results(a=[0.8] * 5, b=[0.9] * 5)
    missed = replace(both.results[1], runs=tuple(run(seed, 0.9, None) for seed in SEEDS))
    assert best_row(replace(both, results=(both.results[0], missed)), TO_TARGET) == 0


def test_a_tabular_has_units_and_no_empty_columns(found: Comparison) -> None:
    text = to_latex(found)
    assert r"\shortstack[r]{accuracy \\ (\%)}" in text
    assert r"\shortstack[r]{time to \\ target (s)}" in text
    # No run has a purity, so that there is no such column.
    assert "purity" not in text
    assert "$>$ 20.0" in text
    assert not text.startswith(r"\begin{table}")


def test_where_no_run_reaches_the_target_the_length_of_the_runs_stands_there() -> None:
    both = results(a=[0.8] * 5, b=[0.9] * 5)
    missed = tuple(
        replace(of, runs=tuple(run(seed, 0.8, None) for seed in SEEDS)) for of in both.results
    )
    for found, is_reached in ((both, True), (replace(both, results=missed), False)):
        table = main_table(found)
        assert ("time to\ntarget" in table.columns) is is_reached
        assert ("virtual\ntime (s)" in table.columns) is not is_reached
        assert ("none reached 90.0%" in table.title) is not is_reached
        assert ("time-to-target" in plots(found, {})) is is_reached
        # Neither run has true groups.
        assert "purity" not in table.columns
        assert "purity" not in plots(found, {})


def test_the_worst_tenth_and_what_is_not_learned_are_shown() -> None:
    both = results(a=[0.6] * 5, b=[0.9] * 5)
    further = {"worst_tenth_accuracy": 0.25, "clusters": 3, "constant_guess": 0.6}
    told = tuple(
        replace(of, runs=tuple(replace(r, summary={**r.summary, **further}) for r in of.runs))
        for of in both.results
    )
    table = main_table(replace(both, results=told))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["worst\ntenth"] for row in rows] == ["25.00", "25.00"]
    assert [row["clusters"] for row in rows] == ["3.0", "3.0"]
    assert [row["method"] for row in rows] == ["a*", "b"]
    said = "no better than always predicting a client's most frequent class in 5 of 5 runs"
    assert f"* a: {said}" in table.lines


def test_a_table_has_a_caption_and_a_label_of_ones_own(found: Comparison) -> None:
    text = latex_table(found)
    assert r"\caption{A\_1 \& B (2 seeds" in text
    assert r"\label{tab:compare}" in text
    own = latex_table(found, r"Times of \emph{all}", "tab:own")
    assert r"\caption{Times of \emph{all}}" in own
    assert r"\label{tab:own}" in own
    assert to_latex(found) in own


def test_special_characters_are_escaped(found: Comparison) -> None:
    assert (
        r"{}my\_net \& 50\% \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} "
        r"$<$a$>$ \$5 [$\alpha$$\geq$$\beta$] &" in to_latex(found)
    )


def compiler() -> list[str] | None:
    """Return the command of a LaTeX that is installed and has booktabs."""
    if shutil.which("tectonic"):
        return ["tectonic"]
    if shutil.which("pdflatex") and not subprocess.run(["kpsewhich", "booktabs.sty"]).returncode:
        return ["pdflatex", "-interaction=nonstopmode", "-halt-on-error"]
    return None


@pytest.mark.skipif(compiler() is None, reason="LaTeX with booktabs is not installed")
def test_the_table_compiles_and_fits_a_column(found: Comparison, tmp_path: Path) -> None:
    (tmp_path / "paper.tex").write_text(
        "\\documentclass[twocolumn]{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
        f"Words.\n\n{to_latex(found)}\n\n{latex_table(found)}\\end{{document}}\n"
    )
    command = [*(compiler() or []), "paper.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-2000:]
    assert "Overfull" not in made.stdout + made.stderr
    assert (tmp_path / "paper.pdf").stat().st_size > 1000


def test_a_report_and_figures_for_a_paper(found: Comparison, tmp_path: Path) -> None:
    out = tmp_path
    assert write(found, out, ("pdf", "tex")) == {}
    assert (out / "compare.tex").read_text(encoding="utf-8") == to_latex(found)
    drawn = (out / "time-to-target.pdf").read_bytes()
    assert b"/FontFile2" in drawn  # TrueType, embedded
    assert re.search(rb"/MediaBox \[ 0 0 237\.6 ", drawn)  # 3.3 in
    (out / "compare.tex").unlink()
    done = CliRunner().invoke(app, ["report", "--latex", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "compare.tex").is_file()
    named = ["--caption", "Mine", "--label", "tab:mine"]
    assert CliRunner().invoke(app, ["report", "--latex", *named, str(out)]).exit_code == 0
    assert r"\caption{Mine}" in (out / "compare-table.tex").read_text(encoding="utf-8")
