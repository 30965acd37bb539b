"""What was forgotten and learnt: how accurate a run is on each task after each step of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, Locator, MaxNLocator

from raceme.protocol.measure import Measure
from raceme.records.record import RunRecord
from raceme.records.tasks import Floats, TaskAccuracies
from raceme.reporting.style import INK, MUTED, new_figure, say_empty, series_colour, style

_MOST_WORDS = 12
"""More tasks than this have no numbers in their cells."""
_DARK = 0.6
"""From this share of the colours on words are dark."""


def has_tasks(record: RunRecord) -> bool:
    """Return whether models of a run were tested on all tasks."""
    return bool(record.task_tests)


def tasks_figure(record: RunRecord) -> Figure:
    """Draw the accuracy on each task after each step, and beside it the means and the clusters.

    A column of the map is a moment: the end of a step. Framed is the task that was trained on then;
    below the frame are former tasks, above it the next one, which nobody has trained on.

    Parameters
    ----------
    record : RunRecord
        The run.
    """
    with style():
        figure = new_figure(7.2, 4.0)
        tasks = TaskAccuracies(record.task_tests)
        if not tasks.count:
            axes = figure.add_subplot()
            axes.set_title("Tasks, one after another")
            say_empty(axes, "no tests on former tasks")
            return figure
        parts = figure.subplot_mosaic(
            [["map", "means"], ["map", "clusters"]],
            width_ratios=[1.35, 1.0],
            height_ratios=[2.6, 1.0],
        )
        _draw_map(parts["map"], tasks.matrix(), tasks.measure)
        _draw_means(parts["means"], tasks)
        _draw_clusters(parts["clusters"], tasks)
        return figure


def means_over_time(tasks: TaskAccuracies) -> dict[str, Floats]:
    """Return by label, after each step: the accuracy on that task, of all so far, on the next."""
    matrix = tasks.matrix()
    so_far = [row[: step + 1] for step, row in enumerate(matrix)]
    found = {
        "task of the step": np.diagonal(matrix).copy(),
        "mean of all so far": np.array([_mean(row) for row in so_far]),
        "next task": np.array([*np.diagonal(matrix, 1), np.nan]),
    }
    return {label: values for label, values in found.items() if np.isfinite(values).any()}


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _draw_map(axes: Axes, matrix: Floats, measure: Measure) -> None:
    """Draw a cell for each task (upwards) and each step (to the right)."""
    count = len(matrix)
    axes.set_title(f"{measure.title} on each task")
    axes.set_xlabel("after step")
    axes.set_ylabel("tested on the data of step")
    known = matrix[np.isfinite(matrix)]
    low, high = (0.0, max(float(known.max(initial=0)), 1e-9)) if measure.is_error else (0.0, 1.0)
    colours = "viridis_r" if measure.is_error else "viridis"
    image = axes.imshow(
        matrix.T,
        origin="lower",
        aspect="auto",
        cmap=colours,
        vmin=low,
        vmax=high,
        interpolation="nearest",
    )
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_steps_locator(count))
    axes.set_xlim(-0.55, count - 0.45)
    axes.set_ylim(-0.55, count - 0.45)
    for step in np.flatnonzero(np.isfinite(np.diagonal(matrix))):
        frame = Rectangle((step - 0.5, step - 0.5), 1, 1, fill=False, edgecolor=INK, lw=1.4)
        axes.add_patch(frame)
    label = measure.label
    if count <= _MOST_WORDS:
        _write_numbers(axes, matrix, measure, (low, high))
        label += "" if measure.is_error else "; in the cells percent"
    axes.figure.colorbar(image, ax=axes, label=label).outline.set_visible(False)


def _steps_locator(count: int) -> Locator:
    """Return ticks at the steps: at all of them, if they are few."""
    if count <= _MOST_WORDS:
        return FixedLocator(list(range(count)))
    return MaxNLocator(10, integer=True)


def _write_numbers(
    axes: Axes, matrix: Floats, measure: Measure, bounds: tuple[float, float]
) -> None:
    """Write into each cell what it stands for: of an accuracy percent."""
    size = min(8.5, 60.0 / len(matrix))
    for after, on in np.argwhere(np.isfinite(matrix)):
        value = float(matrix[after, on])
        share = (value - bounds[0]) / (bounds[1] - bounds[0])
        is_light = (1 - share if measure.is_error else share) > _DARK
        text = f"{value:.3g}" if measure.is_error else f"{100 * value:.0f}"
        colour = INK if is_light else "white"
        axes.text(after, on, text, ha="center", va="center", fontsize=size, color=colour)


def _draw_means(axes: Axes, tasks: TaskAccuracies) -> None:
    """Draw the means after each step, and the untrained model on each task."""
    look: dict[str, dict[str, Any]] = {
        "task of the step": {"color": series_colour(0)},
        "mean of all so far": {"color": INK},
        "next task": {"color": series_colour(1), "ls": (0, (4.5, 1.6))},
    }
    steps = np.arange(tasks.count)
    for label, values in means_over_time(tasks).items():
        known = np.isfinite(values)
        how = {"marker": "o", "ms": 3.5, "label": label, **look[label]}
        axes.plot(steps[known], values[known], **how)
    untrained = tasks.untrained()[1:]
    known = np.isfinite(untrained)
    if known.any():
        # Tested a step before its own, as the next task: it stands below that.
        dots: dict[str, Any] = {"color": MUTED, "ls": (0, (1.1, 1.3)), "lw": 1.2}
        axes.plot(steps[:-1][known], untrained[known], label="next task, untrained", **dots)
    axes.set_title("After each step")
    axes.xaxis.set_major_locator(_steps_locator(tasks.count))
    axes.set_xlim(-0.3, tasks.count - 0.7)
    axes.set_ylabel(tasks.measure.label)
    axes.grid(axis="y")
    if not tasks.measure.is_error:
        axes.set_ylim(0.0, 1.02)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=2, columnspacing=1.0)


def _draw_clusters(axes: Axes, tasks: TaskAccuracies) -> None:
    """Draw the number of cluster models after each step."""
    known = [(step, number) for step, number in enumerate(tasks.clusters) if number is not None]
    axes.step(*zip(*known, strict=True), where="mid", color=INK, label="clusters")
    axes.set_ylim(0, 1.25 * max(number for _, number in known))
    axes.set_ylabel("clusters")
    axes.set_xlabel("step")
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(_steps_locator(tasks.count))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.set_xlim(-0.3, tasks.count - 0.7)
