"""The plots of a comparison, and the page with its tables, plots and settings.

The page is a single self-contained file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raceme.core.errors import plural
from raceme.core.events import grouped
from raceme.experiments import tables as table
from raceme.experiments.results import Comparison, Result, read_comparison, read_runs
from raceme.experiments.suites import Scored, Timing, described
from raceme.records.folder import COMPARISON
from raceme.records.record import RunRecord
from raceme.reporting.dashboard import frozen_comparison
from raceme.reporting.page import Links, PageTable, Section, plot, render, versions_table
from raceme.reporting.plots import (
    compared_measures,
    comparison_figure,
    shares_figure,
    staleness_figure,
)
from raceme.reporting.style import (
    INK,
    MUTED,
    PAPER,
    method_looks,
    new_figure,
    one_axes,
    style,
    time_unit,
    write_placeholder,
)

# -----------------------------------------------------------------------------
# The plots, and bars of times and purities.
# -----------------------------------------------------------------------------

_BAR = 0.62
_ROW_HEIGHT = 0.27


def plots(
    comparison: Comparison, runs: Mapping[str, Sequence[RunRecord]]
) -> dict[str, Callable[[], Figure]]:
    """Return the functions that draw the plots of a comparison, by name.

    Parameters
    ----------
    comparison : Comparison
        The comparison whose results are drawn.
    runs : Mapping[str, Sequence[RunRecord]]
        Runs of each method by label, if any. Plots of single runs show the first.
    """
    suite, found = comparison.suite, dict[str, Callable[[], Figure]]()
    records = {label: own[0] for label, own in runs.items()}
    if runs:
        found["accuracy"] = partial(
            comparison_figure, runs, target=comparison.target, title=suite.title
        )
    if any(result.time.count for result in comparison.results):
        found["time-to-target"] = lambda: times_figure(comparison)
    if any(result.spread("purity").count for result in comparison.results):
        found["purity"] = lambda: purity_figure(comparison)
    if records:
        found["staleness"] = lambda: staleness_figure(records)
    for schema in compared_measures(records.values()):
        found[schema.file] = partial(shares_figure, records, schema)
    if records and suite.scores:
        found["scores"] = lambda: scores_figure(records, suite.scores)
    if records and suite.shows_mixtures:
        found["mixtures"] = lambda: divergences_figure(records)
    return found


def times_figure(comparison: Comparison) -> Figure:
    """Draw the mean time of each method as a bar, with a dot for each seed.

    Methods with a seed that missed the target have no bar.
    """
    values = {
        result.label: [run.time for run in result.runs if run.time is not None]
        for result in comparison.results
    }
    longest = max((time for times in values.values() for time in times), default=0.0)
    seconds, unit = time_unit(longest)
    scaled = {label: [time / seconds for time in times] for label, times in values.items()}
    target = comparison.target
    goal = "the target" if target is None else comparison.measure.goal(target)
    if comparison.suite.timing is Timing.CONVERGENCE:
        goal = "convergence"
    instead = {result.label: _missed_runs(result) for result in comparison.results}
    axis = f"virtual time ({unit})"
    return _bars(comparison.results, scaled, f"Virtual time to {goal}", axis, instead)


def _missed_runs(result: Result) -> str:
    """Describe the runs that missed the target."""
    if not result.runs:
        return "no runs"
    lengths = [run.summary["virtual_time"] for run in result.runs if run.time is None]
    if not lengths:
        return ""
    seconds, unit = time_unit(mean := float(np.mean(lengths)))
    text = f"not within {float(f'{mean / seconds:.3g}'):,g} {unit}"
    if len(lengths) == len(result.runs):
        return text
    return f"{text} with {len(lengths)} of {len(result.runs)} seeds"


def purity_figure(comparison: Comparison) -> Figure:
    """Draw the purity of each method's clusters at the end, with a dot for each seed."""
    values = {
        result.label: [
            float(run.summary["purity"]) for run in result.runs if run.summary["purity"] is not None
        ]
        for result in comparison.results
    }
    return _bars(
        comparison.results,
        values,
        "Final purity of the clusters",
        "share of clients in the majority group of their cluster",
        {label: "" if own else "no groups known" for label, own in values.items()},
        limit=1.0,
    )


@style()
def _bars(
    results: Sequence[Result],
    values: Mapping[str, Sequence[float]],
    title: str,
    axis: str,
    instead: Mapping[str, str],
    limit: float | None = None,
) -> Figure:
    """Draw a horizontal bar to the mean of each method's values, and the values as dots.

    A text in `instead` replaces a method's bar.
    """
    labels = [result.label for result in results]
    figure, axes = one_axes(7.2, 1.1 + _ROW_HEIGHT * len(labels), title, x=axis, grid="x")
    top = limit or 1.06 * max((v for group in values.values() for v in group), default=1.0)
    axes.set_xlim(0.0, top)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    if not any(values.values()):
        # Without bars, the scale is meaningless.
        axes.set_xticks([])
    # Curves have no methods without runs, and the same colours.
    looks = method_looks(result.label for result in results if result.runs)
    for place, label in enumerate(labels):
        own = values[label]
        if instead[label]:
            axes.text(
                0.005 * top,
                place,
                instead[label],
                va="center",
                color=MUTED,
                fontsize=8,
                # Keep the grid behind the words.
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
            )
        else:
            axes.barh(place, np.mean(own), height=_BAR, color=looks[label][0], alpha=0.85)
        if len(own) > 1 or instead[label]:
            axes.plot(own, [place] * len(own), "o", ms=3, color=INK, zorder=3, clip_on=False)
    return figure


# -----------------------------------------------------------------------------
# Scores of uploads and clusters, and of estimated mixtures, of several methods over a run.
# -----------------------------------------------------------------------------


_NAMES = {
    Scored.BEFORE: "uploaded",
    Scored.AFTER: "returned",
    Scored.CLUSTER: "clusters' models",
}

Curve = list[tuple[int, float]]
"""Points of a curve: updates and value."""


@style()
def scores_figure(records: Mapping[str, RunRecord], measures: Sequence[Scored]) -> Figure:
    """Draw each score of several runs on a common axis of accuracy.

    Scores of uploads are means over clients per session, in which every client has uploaded at
    least once; scores of clusters are per evaluation.
    """
    figure = new_figure(7.2, 3.4)
    panels = np.atleast_1d(figure.subplots(1, len(measures), sharey=True))
    for axes, measure in zip(panels, measures, strict=True):
        curves = {label: score_curve(record, measure) for label, record in records.items()}
        # Not a title, since titles at the left and centre of an axes share one height.
        axes.text(0.5, 1.02, _NAMES[measure], transform=axes.transAxes, ha="center")
        _draw(axes, curves)
    panels[0].set_title("Uploads, returned models and clusters", pad=24)
    panels[0].set_ylabel("accuracy")
    _legend(figure, panels, records)
    return figure


@style()
def divergences_figure(records: Mapping[str, RunRecord]) -> Figure:
    """Draw the divergence of estimated from true mixtures per session, of several runs."""
    title, label = "Estimated mixtures against the true ones", "KL(true ‖ estimated)"
    figure, axes = one_axes(7.2, 3.2, title, y=label)
    _draw(axes, {name: run.summary.uploads.curve("divergence") for name, run in records.items()})
    axes.set_ylim(bottom=0)
    _legend(figure, [axes], records)
    return figure


def score_curve(record: RunRecord, measure: Scored) -> Curve:
    """Return a score over a run."""
    if measure is Scored.CLUSTER:
        return [(event.updates, event.mean) for event in record.cluster_scores]
    return record.summary.uploads.curve(str(measure))


def _draw(axes: Axes, curves: Mapping[str, Curve]) -> None:
    axes.set_xlabel("updates")
    axes.grid(axis="y")
    looks = method_looks(curves)
    for label, curve in curves.items():
        if curve:
            axes.plot(
                *zip(*curve, strict=True),
                color=looks[label][0],
                ls=looks[label][1],
                marker="o",
                ms=3,
                label=label,
            )
    if any(curves.values()):
        axes.set_xlim(left=0)
    else:
        axes.set_xticks([])
        write_placeholder(axes, "nothing known")


def _legend(
    figure: Figure, panels: Sequence[Axes] | np.ndarray, records: Mapping[str, RunRecord]
) -> None:
    """Draw a legend with each run once, in order."""
    named: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    shown = [label for label in records if label in named]
    if shown:
        handles = [named[label] for label in shown]
        figure.legend(handles, shown, loc="outside lower center", ncols=min(len(shown), 5))


# -----------------------------------------------------------------------------
# The page.
# -----------------------------------------------------------------------------

_FILES = (COMPARISON, "compare.csv", "compare.md")


def comparison_page(folder: Path, links: str) -> str:
    """Return the page of a comparison.

    Parameters
    ----------
    folder : Path
        Folder of `raceme compare` or `raceme reproduce`.
    links : str
        Prefix of links to files.

    Raises
    ------
    UserError
        Its ``compare.json`` is damaged.
    """
    comparison = read_comparison(folder)
    runs, missing = read_runs(folder, comparison)
    suite, main, sweeps = comparison.suite, table.main_table(comparison), None
    costs = table.costs_table(comparison)
    drawn = {name: plot(draw()) for name, draw in plots(comparison, runs).items()}
    if (text := table.sweep_table(comparison)) is not None:
        sweeps = PageTable(text.title, text.columns, text.rows, words=(0, 3))
    seeds = ", ".join(map(str, suite.seeds))
    lead = f"{plural(len(suite.methods), 'method')} on {suite.dataset} · "
    lead += f"{'seeds' if len(suite.seeds) > 1 else 'seed'} {seeds} · "
    lead += "the same clients, devices and initial model for all"
    lost = f"The runs of {', '.join(missing)} are missing from the folder and from plots of runs."
    settings = PageTable(
        "Shared settings",
        (),
        [(name, str(value)) for name, value in suite.settings.items()],
        words=(0, 1),
    )
    folders = [
        (f"{result.method.label}, seed {run.seed}", f"{run.folder}/")
        for result in comparison.results
        for run in result.runs
        if (folder / run.folder).is_dir()
    ]
    files = [(name, name) for name in _FILES if (folder / name).exists()]
    sections = [
        Section(
            "result", main.title, [PageTable(main.title, main.columns, main.rows), *main.lines]
        ),
        Section("costs", "Costs", [PageTable("Costs", costs.columns, costs.rows), *costs.lines]),
        Section("accuracy", "Accuracy", [drawn.get("accuracy")], drawn=True),
        Section(
            "plots",
            "Plots",
            [
                *(shown for name, shown in drawn.items() if name != "accuracy"),
                lost if missing else None,
            ],
        ),
        Section("sweeps", "Sweeps", [sweeps]),
        Section(
            "configuration",
            "Configuration",
            [
                _methods_table(comparison),
                settings
                if settings.rows
                else "All other settings have the defaults of `raceme run`.",
                versions_table(_versions(comparison)),
                Links("Runs", folders) if folders else None,
                Links("Files", files),
            ],
        ),
    ]
    frozen = frozen_comparison(folder) if runs else None
    return render("Comparison", suite.title, lead, sections, links=links, frozen=frozen)


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
    heads = ("method", "strategy", "its own hyper-parameters", "server updates")
    return PageTable("Methods", heads, rows, words=(0, 1, 2, 3))


def _versions(comparison: Comparison) -> dict[str, list[str]]:
    """Return the runs' package versions."""
    runs = (run.summary.get("versions") for result in comparison.results for run in result.runs)
    stated = (of for of in runs if isinstance(of, dict))
    pairs = ((str(name), str(version)) for of in stated for name, version in of.items())
    return {name: list(dict.fromkeys(found)) for name, found in grouped(pairs).items()}
