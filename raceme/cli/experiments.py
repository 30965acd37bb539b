"""Shared by `raceme compare` and `raceme reproduce`: running suites and printing tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raceme.cli.report import ADDRESS, Address, Watch, watched
from raceme.core.errors import UserError, check_known
from raceme.core.options import Value
from raceme.core.registry import STRATEGIES

if TYPE_CHECKING:
    from rich.console import Console

    from raceme.experiments.compare import RunAll
    from raceme.experiments.results import Comparison
    from raceme.experiments.suites import Suite

Out = Annotated[
    Path | None,
    typer.Option(help="folder for the results; the same folder resumes an interrupted comparison"),
]
Seeds = Annotated[str | None, typer.Option(help="seeds, e.g. 0,1,2 or 0..4")]
Only = Annotated[str, typer.Option(help="only these parts of the suite, e.g. digits-4,digits-6")]
Formats = Annotated[
    str,
    typer.Option(
        "--format", help="also write plots as pdf or svg, and the table as tex, e.g. pdf,tex"
    ),
]
Processes = Annotated[int, typer.Option(help="parallel runs (0: one per core)", min=0)]


def run_suites(
    planned: Sequence[tuple[Suite, Path]],
    processes: int,
    has_cases: bool = False,
    workers: Value = "",
    out: Path | None = None,
    formats: Sequence[str] = (),
) -> None:
    """Check all suites, run them one after another, and print their tables.

    Parameters
    ----------
    planned : Sequence[tuple[Suite, Path]]
        Each with the folder of its results.
    processes : int
        Runs at a time; 0: one per core.
    has_cases : bool
        Whether the suites are cases of one comparison, whose regrets end the output.
    workers : Value
        Key `workers`: a Ray cluster executes the runs, one per CPU; other values apply within runs.
    out : Path, optional
        Option ``--out`` that resumes the command; None: none needed.
    formats : Sequence[str]
        Additional formats of tables and plots besides Markdown and PNG.
    """
    from rich.console import Console

    from raceme.core.signals import interrupted_by_signals
    from raceme.experiments.compare import compare as run_suite
    from raceme.experiments.compare import prepare
    from raceme.experiments.results import regret_overview, regret_table

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
                comparison = run_suite(plan, processes or most, console, run_all, formats)
        except KeyboardInterrupt:
            how = "" if out is None else f" with --out {out}"
            console.print(
                f"\nInterrupted. Finished runs are kept. To resume: the same command{how}",
                markup=False,
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
        _print_results(comparison, plan.out, console)
        done[plan.out.name] = comparison
        failed |= bool(comparison.unwritten)
        failed |= any(result.errors for result in comparison.results)
    if has_cases and (text := regret_table(done)) is not None:
        console.print()
        console.print(regret_overview(done).rich())
        path = prepared[0].out.parent / "regret.md"
        path.write_text(text.markdown(), encoding="utf-8")
        console.print(f"\nAll cases: {path}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _print_results(comparison: Comparison, out: Path, console: Console) -> None:
    """Print the tables of a comparison and their folder, and what could not be written there."""
    from raceme.experiments.tables import costs_table, main_table, sweep_table
    from raceme.reporting.artefacts import missing_line

    for text in (main_table(comparison), costs_table(comparison), sweep_table(comparison)):
        if text is not None:
            console.print()
            console.print(text.rich())
            for line in text.lines:
                console.print(line, markup=False, soft_wrap=True)
    console.print(f"\nTables, plots and runs: {out}", markup=False, soft_wrap=True)
    if comparison.unwritten:
        print(f"raceme: {missing_line(out, comparison.unwritten)}", file=sys.stderr)


@contextmanager
def _runner(workers: Value) -> Iterator[tuple[RunAll, int]]:
    """Provide the executor of runs, and its parallelism."""
    from raceme.experiments.jobs import run_jobs, run_on_ray
    from raceme.simulation import cores, is_ray

    if not is_ray(str(workers)):
        yield run_jobs, cores()
        return
    from raceme.simulation.ray_cluster import Cluster

    cluster = Cluster(str(workers), cores())
    try:
        yield partial(run_on_ray, cluster), cluster.cpus
    finally:
        cluster.close()


def with_seeds(suite: Suite, text: str | None) -> Suite:
    """Return a suite with other seeds, parsed from text: ``"0,1,2"`` or ``"0..4"``.

    Raises
    ------
    UserError
        The text is no list of numbers.
    """
    if text is None:
        return suite
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("..")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        raise UserError(f"--seeds takes numbers, e.g. 0,1,2 or 0..4; got '{text}'.") from None
    if not seeds:
        raise UserError(f"--seeds takes the smaller number first, e.g. 0..4; got '{text}'.")
    return replace(suite, seeds=tuple(seeds))


# -----------------------------------------------------------------------------
# `raceme compare`: several methods on the same clients, devices and seeds.
# -----------------------------------------------------------------------------


def compare(
    keys: Mapping[str, Value],
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="strategies (see `raceme list strategies`), or methods of the suite"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="compare all strategies")] = False,
    suite: Annotated[
        Path | None, typer.Option(help="TOML file, or a built-in suite: panicle, poisoning")
    ] = None,
    only: Only = "",
    seeds: Seeds = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,…", help="values to try for each method; repeatable"),
    ] = None,
    tune_on: Annotated[
        str, typer.Option(help="samples that choose among these values: validation")
    ] = "validation",
    budget: Annotated[
        str,
        typer.Option(
            metavar="time=20s|updates=500|compute=900s",
            help="the limit of every run: virtual time, updates, or the clients' time at work",
        ),
    ] = "",
    out: Out = None,
    processes: Processes = 0,
    formats: Formats = "",
    watch: Watch = False,
    watch_address: Address = ADDRESS,
) -> None:
    """Run several methods on the same clients, devices and seeds, and compare them.

    For example: raceme compare casa fedasync --seeds 0,1,2

    With --sweep, values are tried with the first seed and chosen on held-out training samples; the
    best ones run with all seeds, and are tested on the test samples.

    Finished runs in --out are kept. The target accuracy is recorded, but ends no run.
    """
    if suite is not None and every:
        raise UserError("Give --suite or --all, not both.")
    if suite is None:
        for method in methods or ():
            STRATEGIES.check(method)

    from raceme.experiments.compare import checked_formats
    from raceme.experiments.suites import load_suite, of_names, parts, read_sweep, variants
    from raceme.records.folder import dated_folder

    check_known("kind of samples to tune on", tune_on, ["validation"])
    written_as, tried = checked_formats(formats), read_sweep(sweep or ())
    cases: Mapping[str, str] = {}
    if suite is not None and (cases := variants(suite)):
        folder = out or dated_folder(f"compare-{suite.name.removesuffix('.toml')}")
        chosen = [
            (load_suite(case, keys, methods or ()), name)
            for name, case in parts(str(suite), cases, only).items()
        ]
    elif only:
        raise UserError(
            "--only chooses parts of a suite with variants: give --suite panicle, or a file."
        )
    else:
        named = [*STRATEGIES] if every else methods or []
        one = of_names(named, keys) if suite is None else load_suite(suite, keys, methods or ())
        folder = out or dated_folder(f"compare-{keys.get('dataset', one.dataset)}")
        chosen = [(one, "")]
    planned = []
    for plan, name in chosen:
        adapted = (plan.only(methods) if methods and suite else plan).with_settings(keys)
        adapted = adapted.with_budget(budget) if budget else adapted
        planned.append((with_seeds(adapted.with_sweep(tried), seeds), folder / name))
    with watched(watch, folder, watch_address, comparison=True):
        run_suites(planned, processes, bool(cases), keys.get("workers", ""), folder, written_as)


# -----------------------------------------------------------------------------
# `raceme reproduce`: a paper's experiment, beside the published numbers.
# -----------------------------------------------------------------------------


def reproduce(
    keys: Mapping[str, Value],
    name: Annotated[
        str, typer.Argument(help="experiment, e.g. casa-table1; without a name: list all")
    ] = "",
    dataset: Annotated[
        str | None, typer.Option(help="only the part on this dataset, e.g. mnist")
    ] = None,
    only: Only = "",
    methods: Annotated[str, typer.Option(help="only these methods, e.g. casa,fedavg")] = "",
    scale: Annotated[
        float,
        typer.Option(
            help="length of the runs as a share of the paper's, e.g. 0.1 for a quick look"
        ),
    ] = 1.0,
    seeds: Seeds = None,
    out: Out = None,
    processes: Processes = 0,
    formats: Formats = "",
) -> None:
    """Run a paper's experiment, and show the published numbers beside ours."""
    from raceme.experiments.compare import checked_formats
    from raceme.experiments.suites import all_shipped, out_of, reproductions

    if not name:
        for shown, variants in all_shipped().items():
            print(f"{shown}: {', '.join(variants)}")
        return
    written_as = checked_formats(formats)
    suites = reproductions(name, dataset, only, methods, keys, scale)
    planned = [
        (with_seeds(suite, seeds), out_of(variant, out, scale, len(suites)))
        for variant, suite in suites.items()
    ]
    run_suites(planned, processes, workers=keys.get("workers", ""), out=out, formats=written_as)
