"""The page of a comparison: its tables, plots and settings on one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raceme.experiments import figures
from raceme.experiments import tables as table
from raceme.experiments.figures import score_plots
from raceme.experiments.results import Comparison, Result, quality, read_comparison, read_first_runs
from raceme.experiments.suites import Score, Timing, described
from raceme.records.record import RunRecord
from raceme.reporting.console import PlainTable
from raceme.reporting.dashboard.page import frozen_comparison
from raceme.reporting.page import PageTable, Plot, Tile, number, plot, render, versions_table
from raceme.reporting.plots import (
    compared_measures,
    comparison_figure,
    shares_figure,
    staleness_figure,
)

_SCORE_HEADS = {
    Score.BEST_WEIGHTED: "best by test\nexamples",
    Score.STEP_STARTS: "at steps'\nstarts",
    Score.STEP_ENDS: "at steps'\nends",
    Score.CURRENT: "when\nlearnt",
}
_FILES = ("compare.json", "compare.csv", "compare.md")


def comparison_page(folder: Path, links: str) -> str:
    """Return the page of a comparison.

    Parameters
    ----------
    folder : Path
        What `raceme compare` or `raceme reproduce` left.
    links : str
        What stands before the name of a file in a link to it.

    Raises
    ------
    UserError
        Its ``compare.json`` is damaged.
    """
    comparison = read_comparison(folder)
    records, missing = read_first_runs(folder, comparison)
    main, sweeps = table.main_table(comparison), table.sweep_table(comparison)
    return render(
        "comparison.html",
        frozen=frozen_comparison(folder) if records else None,
        title=comparison.suite.title,
        suite=comparison.suite,
        tiles=_tiles(comparison),
        main=_page_table(main),
        lines=main.lines,
        plots=_plots(comparison, records),
        missing=missing,
        sweeps=None if sweeps is None else _page_table(sweeps, words=(0, 3)),
        runs_table=_runs_table(comparison),
        methods=_methods_table(comparison),
        settings=_settings_table(comparison),
        versions=versions_table(_versions(comparison)),
        links=links,
        there=[name for name in _FILES if (folder / name).exists()],
        folders=[
            (f"{result.method.label}, seed {run.seed}", f"{run.folder}/")
            for result in comparison.results
            for run in result.runs
            if (folder / run.folder).is_dir()
        ],
    )


def _page_table(text: PlainTable, words: tuple[int, ...] = (0,)) -> PageTable:
    return PageTable(text.title, text.columns, text.rows, words=words)


def _plots(comparison: Comparison, records: Mapping[str, RunRecord]) -> list[Plot]:
    """Return the plots; those of single runs only if there are any runs."""
    measure = comparison.measure
    seed = f"{measure.title} over virtual time, seed {comparison.suite.seeds[0]}"
    plots = []
    if records:
        accuracy = comparison_figure(records, target=comparison.target, title=seed)
        plots.append(plot(accuracy, measure.name))
    plots.append(plot(figures.times_figure(comparison), "times"))
    plots.append(plot(figures.purity_figure(comparison), "purity"))
    if records:
        plots.append(plot(staleness_figure(records), "staleness"))
    for schema in compared_measures(records.values()):
        plots.append(plot(shares_figure(records, schema), schema.file))
    suite = comparison.suite
    for name, draw in score_plots(records, suite.scores, suite.shows_mixtures).items():
        plots.append(plot(draw(), name))
    return plots


def _tiles(comparison: Comparison) -> list[Tile]:
    """Return who was the most accurate, and who the first at the target."""
    suite, results = comparison.suite, comparison.results
    tiles = [
        Tile("methods", str(len(results)), f"on {suite.dataset}"),
        Tile(
            "seeds" if len(suite.seeds) > 1 else "seed",
            str(len(suite.seeds) if len(suite.seeds) > 1 else suite.seeds[0]),
            "" if suite.scale == 1.0 else f"shortened to {suite.scale:g}",
        ),
    ]
    accurate = [result for result in results if result.accuracy.mean is not None]
    if accurate:
        best, unit = max(accurate, key=quality), comparison.measure.unit or ""
        tiles.append(Tile("most accurate", best.label, f"{number(best.accuracy.mean)} {unit}"))
    arrived = [result for result in results if _arrives(result)]
    if arrived:
        first = min(arrived, key=lambda result: result.rank_time or 0.0)
        goal = (
            "" if comparison.target is None else f" at {comparison.measure.goal(comparison.target)}"
        )
        if suite.timing is Timing.CONVERGENCE:
            goal = " to converge"
        tiles.append(Tile(f"first{goal}", first.label, f"{number(first.rank_time, 1)} s"))
    if comparison.has_published:
        for name in comparison.ranked:
            tau = comparison.tau(name)
            tiles.append(Tile(f"Kendall's τ, {name}", number(tau, 2), "against the paper's order"))
    return tiles


def _arrives(result: Result) -> bool:
    return result.rank_time is not None and result.rank_time != float("inf")


def _runs_table(comparison: Comparison) -> PageTable:
    head, measure = _SCORE_HEADS.get(comparison.suite.score), comparison.measure
    rows = tuple(
        (
            result.method.label,
            str(run.seed),
            number(run.summary.get(measure.name), 4),
            number(run.summary.get(f"best_{measure.name}"), 4),
            *([number(run.accuracy, 4)] if head else []),
            number(run.time, 1),
            number(run.summary.get("clusters")),
            number(run.summary.get("purity"), 2),
            number(run.summary.get("updates")),
            number(run.summary.get("virtual_time"), 1),
            number(run.summary.get("wall_time"), 1),
        )
        for result in comparison.results
        for run in result.runs
    )
    timing = comparison.suite.timing
    heads = (
        *("method", "seed", measure.label, "best"),
        *([head] if head else []),
        *(f"time to\n{timing} (s)", "clusters", "purity"),
        *("updates", "virtual\ntime (s)", "wall\ntime (s)"),
    )
    return PageTable(f"All {len(rows)} runs", heads, rows)


def _methods_table(comparison: Comparison) -> PageTable:
    rows = tuple(
        (
            result.label,
            result.method.strategy,
            described(result.method.options) or "–",
            "per update" if result.method.asynchronous else "per round",
        )
        for result in comparison.results
    )
    heads = ("method", "strategy", "its own hyper-parameters", "the server acts")
    return PageTable("Methods", heads, rows, words=(0, 1, 2, 3), kind="free")


def _settings_table(comparison: Comparison) -> PageTable:
    rows = tuple((name, str(value)) for name, value in comparison.suite.settings.items())
    return PageTable("What all methods share", (), rows, words=(0, 1), kind="pairs")


def _versions(comparison: Comparison) -> dict[str, list[str]]:
    """Return the versions that the runs state, by package."""
    versions: dict[str, list[str]] = {}
    for result in comparison.results:
        for run in result.runs:
            stated = run.summary.get("versions")
            for name, version in (stated if isinstance(stated, dict) else {}).items():
                if str(version) not in versions.setdefault(str(name), []):
                    versions[str(name)].append(str(version))
    return versions
