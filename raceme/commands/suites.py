"""What `raceme compare` and `raceme reproduce` share: running suites and printing their tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from raceme.comparison.suites import Suite
from raceme.config import Value
from raceme.config.errors import UserError, unknown_name

if TYPE_CHECKING:
    from raceme.comparison.compare import RunAll
    from raceme.comparison.results import Comparison
    from raceme.comparison.text_table import Text

SHARED = (
    *("data-root", "download", "clients", "devices"),
    *("max-updates", "max-rounds", "max-time", "eval-every"),
)
"""Keys of a run that the help of both commands shows."""

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="folder for the results; the same folder again continues from there"
    ),
]
Seeds = Annotated[str | None, typer.Option("--seeds", help="seeds, e.g. 0,1,2", show_default=False)]
Only = Annotated[
    str,
    typer.Option("--only", help="parts of a suite, e.g. digits-4,digits-6", show_default=False),
]
Processes = Annotated[
    int, typer.Option("--processes", help="runs at a time (0: one per core)", min=0)
]


def run_suites(
    planned: Sequence[tuple[Suite, Path]],
    processes: int,
    overview: Callable[[Mapping[str, Comparison]], Text] | None = None,
    workers: Value = "",
    out: Path | None = None,
) -> None:
    """Run suites one after another, after all of them were checked, and print their tables.

    Parameters
    ----------
    planned : Sequence[tuple[Suite, Path]]
        Each with the folder of its results.
    processes : int
        Runs at a time; 0: one per core.
    overview : Callable, optional
        Makes a last table of all of them, by the names of their folders.
    workers : Value
        The key of this name: a Ray cluster's CPUs do the runs, one each; anything else is for runs
        alone.
    out : Path, optional
        With which option ``--out`` the same command goes on; None: as it was typed.
    """
    from raceme.checkpoints import interrupted_by_signals
    from raceme.comparison.compare import compare as run_suite
    from raceme.comparison.compare import prepare
    from raceme.comparison.table import main_table, sweep_table
    from raceme.reporting.artefacts import missing_line

    logging.getLogger("flwr").setLevel(logging.ERROR)
    console = Console(highlight=False)
    prepared = [prepare(suite, out) for suite, out in planned]
    failed = False
    done: dict[str, Comparison] = {}
    for plan in prepared:
        suite = plan.suite
        if suite.scale != 1.0:
            console.print(f"{suite.title}: SHORTENED, --scale {suite.scale:g}", markup=False)
        try:
            with interrupted_by_signals(), _runner(workers) as (run_all, most):
                comparison = run_suite(plan, processes or most, console, run_all)
        except KeyboardInterrupt:
            how = "" if out is None else f" with --out {out}"
            console.print(
                f"\nInterrupted. Finished runs are kept; to continue, the same command{how}",
                markup=False,
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
        for text in (main_table(comparison), sweep_table(comparison)):
            if text is not None:
                console.print()
                console.print(text.rich())
                for line in text.lines:
                    console.print(line, markup=False, soft_wrap=True)
        console.print(f"\nTables, plots and runs: {plan.out}", markup=False, soft_wrap=True)
        if comparison.unwritten:
            said = missing_line(plan.out, comparison.unwritten)
            print(f"raceme: {said}", file=sys.stderr)
        done[plan.out.name] = comparison
        failed |= bool(comparison.unwritten)
        failed |= any(result.errors for result in comparison.results)
    if overview is not None:
        text = overview(done)
        console.print()
        # Cut to the width of a narrow terminal it would have no names of cases.
        console.print(text.rich(), width=max(console.width, 100), crop=False)
        path = prepared[0].out.parent / "regret.md"
        path.write_text(text.markdown(), encoding="utf-8")
        console.print(f"\nThe same as a file: {path}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _runner(workers: Value) -> Iterator[tuple[RunAll, int]]:
    """Offer what does runs, and how many at a time it can do."""
    from raceme.comparison.runner import cores, run_jobs
    from raceme.simulation import is_ray

    if not is_ray(str(workers)):
        yield run_jobs, cores()
        return
    from raceme.comparison.ray_runner import RayRuns

    cluster = RayRuns(str(workers))
    try:
        yield cluster.run, cluster.cpus
    finally:
        cluster.close()


def parts(name: str, variants: Mapping[str, str], only: str) -> dict[str, str]:
    """Return the parts of a suite that a person names, with commas; all of them for none.

    Raises
    ------
    UserError
        There is no such part.
    """
    if not only:
        return dict(variants)
    named = [part.strip() for part in only.split(",")]
    for part in named:
        if part not in variants:
            raise unknown_name(f"part of {name}", part, variants)
    return {part: variants[part] for part in named}


def with_seeds(suite: Suite, text: str | None) -> Suite:
    """Return a suite with other seeds, as a person writes them: ``"0,1,2"``.

    Raises
    ------
    UserError
        They are not numbers with commas.
    """
    if text is None:
        return suite
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--seeds takes numbers with commas, e.g. 0,1,2; got '{text}'.") from None
    return replace(suite, seeds=seeds)
