"""A comparison as a LaTeX table: what is bold, what is escaped, and that it compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raceme.cli import app
from raceme.experiments.compare import write
from raceme.experiments.results import Comparison, Result, Run
from raceme.experiments.suites import ComparedMethod, Suite
from raceme.experiments.tables import to_latex

NAME = r"my_net & 50% #1 {x} ~^\ <a> $5 [α≥β]"


def run(seed: int, accuracy: float, time: float | None) -> Run:
    told = {"accuracy": accuracy, "purity": None, "updates": 10, "virtual_time": 20.0}
    reached = None if time is None else {"virtual_time": time}
    return Run(seed, f"seed-{seed}", {**told, "target": 0.9, "time_to_target": reached})


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


def test_the_best_values_are_bold_and_equal_ones_share_it(found: Comparison) -> None:
    text = to_latex(found)
    first, second, third = (line for line in text.splitlines() if line.startswith("{}"))
    assert r"\textbf{91.00 $\pm$ 1.41}" in first
    assert r"\textbf{5.0 $\pm$ 1.4}" in first
    assert r"\textbf{91.00 $\pm$ 0.00} & 9.0 $\pm$ 0.0" in second
    # A time that was not reached is a bound, and no best value.
    assert r"\textbf" not in third
    assert "$>$ 20.0" in third


def test_special_characters_are_escaped(found: Comparison) -> None:
    text = to_latex(found)
    assert (
        r"{}my\_net \& 50\% \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} "
        r"$<$a$>$ \$5 [$\alpha$$\geq$$\beta$] &" in text
    )
    assert r"\caption{A\_1 \& B (2 seeds" in text


def compiler() -> list[str] | None:
    """Return the command of a LaTeX that is installed and has booktabs."""
    if shutil.which("tectonic"):
        return ["tectonic"]
    if shutil.which("pdflatex") and not subprocess.run(["kpsewhich", "booktabs.sty"]).returncode:
        return ["pdflatex", "-interaction=nonstopmode", "-halt-on-error"]
    return None


@pytest.mark.skipif(compiler() is None, reason="LaTeX with booktabs is not installed")
def test_the_table_compiles(found: Comparison, tmp_path: Path) -> None:
    (tmp_path / "paper.tex").write_text(
        "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
        f"{to_latex(found)}\\end{{document}}\n"
    )
    command = [*(compiler() or []), "paper.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 1000


def test_a_report_and_figures_for_a_paper(found: Comparison, tmp_path: Path) -> None:
    out = tmp_path
    assert write(found, out, ("pdf", "tex")) == {}
    assert (out / "compare.tex").read_text(encoding="utf-8") == to_latex(found)
    drawn = (out / "purity.pdf").read_bytes()
    assert b"/FontFile2" in drawn  # TrueType, embedded
    assert re.search(rb"/MediaBox \[ 0 0 237\.6 ", drawn)  # 3.3 in
    (out / "compare.tex").unlink()
    done = CliRunner().invoke(app, ["report", "--latex", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "compare.tex").is_file()
