"""Every figure of every kind of run can be drawn without a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from drawn_runs import RUNS, changed, evaluated, joined, moved, split, updates
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from raceme.core.events import (
    ClusterChange,
    ClustersChanged,
    DataChanged,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
)
from raceme.records.record import RunRecord, read_run
from raceme.records.store import RunStore
from raceme.reporting.artefacts import figures_of
from raceme.reporting.plots import (
    accuracy_figure,
    client_band,
    clusters_figure,
    comparison_figure,
    devices_figure,
    over_seeds,
    similarity_figure,
    staleness_figure,
)
from raceme.reporting.style import cluster_colour, save_figure, series_colour, time_unit

pytestmark = pytest.mark.pictures


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


KINDS = pytest.mark.parametrize("events", RUNS.values(), ids=RUNS)
FIGURES: dict[str, Callable[[RunRecord], Figure]] = {
    "accuracy": lambda record: accuracy_figure(record, target=0.7, title="casa on digits"),
    "clusters": clusters_figure,
    "devices": devices_figure,
}


def saved(figure: Figure, path: Path) -> tuple[int, int]:
    """Save a figure, read it back, and return its size."""
    save_figure(figure, path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    with Image.open(path) as image:
        image.verify()
        assert image.format == "PNG"
        return image.size


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for axes in figure.axes for text in axes.texts}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
@KINDS
def test_each_figure_of_each_run_is_saved(
    tmp_path: Path, events: list[Event], draw: Callable[[RunRecord], Figure]
) -> None:
    width, height = saved(draw(RunRecord.of(events)), tmp_path / "figure.png")
    assert width >= 1000
    assert height >= 600


@KINDS
def test_similarities_of_each_run_are_saved(tmp_path: Path, events: list[Event]) -> None:
    record = RunRecord.of(events)
    clients = [client.client for client in record.clients]
    random = np.random.default_rng(0).random((len(clients), len(clients)))
    matrix = (random + random.T) / 2
    saved(similarity_figure(clients, matrix, record.assignment()), tmp_path / "figure.png")


@KINDS
def test_each_run_is_compared_with_another(tmp_path: Path, events: list[Event]) -> None:
    path = tmp_path / "curves.png"
    runs = {"this": [RunRecord.of(events)], "other": [RunRecord.of(RUNS["split"])] * 2}
    save_figure(comparison_figure(runs, target=0.7), path)
    with Image.open(path) as image:
        image.verify()


def test_runs_are_compared_from_their_folders(tmp_path: Path) -> None:
    for name in ("split", "no updates"):
        with RunStore(tmp_path / name) as store:
            for event in RUNS[name]:
                store.observe(event)
    read = {"one": [read_run(tmp_path / "split")], "two": [read_run(tmp_path / "no updates")]}
    save_figure(comparison_figure(read), tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 0


def test_time_is_logarithmic_if_the_target_is_reached_early() -> None:
    def run(reached: float) -> RunRecord:
        curve = [(0.0, 0.1), (2.0, 0.5), (reached, 0.9), (200.0, 0.95)]
        events = [evaluated(time, {"a": (0, accuracy)}) for time, accuracy in curve]
        return RunRecord.of([*joined({"a": 0}), *events, RunEnded(200.0, 200, "max-updates")])

    def scale(runs: dict[str, RunRecord], target: float) -> tuple[str, float, float]:
        axes = comparison_figure({name: [run] for name, run in runs.items()}, target=target).axes[0]
        return axes.get_xscale(), *axes.get_xlim()

    early, late = run(19.0), run(21.0)
    assert scale({"late": late, "early": early}, 0.9) == ("log", 2.0, 200.0)
    assert scale({"late": late}, 0.9) == ("linear", 0.0, 200.0)
    # A target that is reached at the start does not determine the scale.
    assert scale({"early": early}, 0.1) == ("linear", 0.0, 200.0)


def test_a_line_from_the_start_is_true_on_a_logarithmic_axis() -> None:
    """Between 0 and 8 s the accuracy rises from 0.1 to 0.9; at 2 s it is below 0.9."""
    curve = [(0.0, 0.1), (8.0, 0.9), (200.0, 0.95)]
    events = [evaluated(time, {"a": (0, accuracy)}) for time, accuracy in curve]
    run = RunRecord.of([*joined({"a": 0}), *events, RunEnded(200.0, 200, "max-updates")])
    axes = comparison_figure({"one": [run]}, target=0.9).axes[0]
    assert axes.get_xscale() == "log"
    times, accuracies = axes.lines[0].get_data()
    assert np.interp(np.log(4.0), np.log(times[1:]), accuracies[1:]) == pytest.approx(0.5, abs=0.01)


def test_short_tasks_of_a_long_run_are_seen() -> None:
    updates = [UpdateApplied(1, 1e6, "a", 0, 0, 0, 1.0, 1e6 - 60, 0.1, 8, 8)]
    run = RunRecord.of([*joined({"a": 0}), *updates, RunEnded(1e6, 1, "max-updates")])
    axes = devices_figure(run).axes[0]
    (box,) = axes.collections[0].get_paths()
    left, right = axes.get_xlim()
    assert box.get_extents().width >= 0.0019 * (right - left)
    assert axes.collections[0].get_linewidths()[0] == 0, "an edge would cover it"


def test_a_method_has_one_colour_whatever_the_order_of_the_methods() -> None:
    stale = [
        replace(event, staleness=2) if isinstance(event, UpdateApplied) else event
        for event in RUNS["split"]
    ]
    run = RunRecord.of(stale)

    def look(*labels: str) -> dict[str, list[str]]:
        of = dict.fromkeys(labels, run)
        lines = comparison_figure({label: [run] for label in labels}).axes[0].lines
        colours = {str(line.get_label()): [str(line.get_color())] for line in lines}
        rows = staleness_figure(of).axes
        for axes in rows:
            colours[axes.get_ylabel()].append(to_hex(axes.patches[0].get_facecolor()))
        return colours

    assert look("fedavg", "casa") == look("casa", "fedavg")
    # As on the dashboard, colours are assigned in alphabetical order.
    assert look("fedavg", "casa")["casa"] == [series_colour(0)] * 2


def test_a_comparison_draws_mean_and_deviation_of_its_seeds() -> None:
    def run(*curve: tuple[float, float]) -> RunRecord:
        events = [evaluated(time, {"a": (0, accuracy)}) for time, accuracy in curve]
        return RunRecord.of([*joined({"a": 0}), *events, RunEnded(curve[-1][0], 9, "max-updates")])

    first, second = run((0.0, 0.2), (10.0, 0.6)), run((0.0, 0.4), (4.0, 0.5), (20.0, 0.9))
    times, values = over_seeds([first, second])
    assert times.tolist() == [0.0, 4.0, 10.0]
    # The first is at 0.2 + 0.4 · 4 / 10 after 4 s, the second at 0.5 + 0.4 · 6 / 16 after 10 s.
    assert values == pytest.approx(np.array([[0.2, 0.36, 0.6], [0.4, 0.5, 0.65]]))
    axes = comparison_figure({"both": [first, second]}).axes[0]
    (line,), (band,) = axes.lines, axes.collections
    assert line.get_ydata() == pytest.approx([0.3, 0.43, 0.625])
    # 0.3 minus the sample deviation of 0.2 and 0.4, √0.02.
    assert band.get_datalim(axes.transData).y0 == pytest.approx(0.3 - 0.02**0.5)
    assert axes.get_legend().get_title().get_text() == "mean ± SD of 2 seeds"
    (alone,) = comparison_figure({"one": [first]}).axes
    assert not alone.collections
    assert alone.get_legend().get_title().get_text() == "one seed"


def test_a_comparison_of_nothing_reports_it(tmp_path: Path) -> None:
    figure = comparison_figure({}, target=0.5)
    assert "no runs" in texts(figure)
    saved(figure, tmp_path / "figure.png")


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, draw in FIGURES.items():
        paths = [tmp_path / f"{name}{index}.png" for index in range(2)]
        for path in paths:
            save_figure(draw(RunRecord.of(RUNS["split"])), path)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_accuracy_figure_shows_mean_target_and_split() -> None:
    figure = accuracy_figure(RunRecord.of(RUNS["split"]), target=0.7, title="casa on digits")
    axes = figure.axes[0]
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    x, y = np.asarray(lines["mean over clients"].get_data())
    assert list(x) == [4.0, 8.0]
    assert list(y) == pytest.approx([0.5, 0.85])
    # Before the split cluster 1 had no clients, so there is no line.
    np.testing.assert_allclose(np.asarray(lines["mean of cluster 1"].get_ydata()), [np.nan, 0.8])
    np.testing.assert_allclose(np.asarray(lines["mean of cluster 2"].get_ydata()), [np.nan, 0.9])
    assert lines["mean of cluster 1"].get_color() == cluster_colour(1)
    assert {"target 0.7", "0 \u2192 1, 2"} <= texts(figure)
    assert axes.get_title(loc="left") == "casa on digits"
    assert axes.get_xlabel() == "virtual time (s)"


def test_the_band_holds_the_middle_of_the_clients() -> None:
    low, high = client_band(RunRecord.of(RUNS["split"]).client_evaluations, 2)
    # Of 0.2, 0.4, 0.6 and 0.8 the 10th percentile lies 0.3 of the way from the first to the second.
    assert low == pytest.approx([0.26, 0.73])
    assert high == pytest.approx([0.74, 0.97])
    low, high = client_band(RunRecord.of(RUNS["nothing"]).client_evaluations, 1)
    assert np.isnan([low, high]).all()


def streams_of(events: list[Event]) -> list[np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Return the corners of the drawn shapes in the figure of the clusters."""
    found = clusters_figure(RunRecord.of(events)).axes[0].collections
    assert all(isinstance(shapes, PolyCollection) for shapes in found)
    return [np.asarray(path.vertices) for shapes in found for path in shapes.get_paths()]


def near(corners: list[list[float]]) -> object:
    return pytest.approx(np.array(corners))


def test_streams_bend_from_their_clusters_and_are_level_then() -> None:
    *_, one, other, level, last = streams_of(
        [
            *joined({"a": 0, "b": 0}),
            *updates("ab", 0, 1),
            split(5.0, 0, {1: ("a",), 2: ("b",)}),
            RunEnded(10.0, 2, "max-updates"),
        ]
    )
    # Two clients from -1 to 1 become two streams with a gap of 0.4 between them; a bend takes three
    # hundredths of the run.
    assert one[[0, 15, 16, -2]] == near([[5.0, -1.0], [5.3, -1.2], [5.3, -0.2], [5.0, 0.0]])
    assert other[[0, 15, 16, -2]] == near([[5.0, 0.0], [5.3, 0.2], [5.3, 1.2], [5.0, 1.0]])
    assert level[:4] == near([[5.3, -1.2], [10.0, -1.2], [10.0, -0.2], [5.3, -0.2]])
    assert last[:4] == near([[5.3, 0.2], [10.0, 0.2], [10.0, 1.2], [5.3, 1.2]])


def test_changes_that_come_all_the_time_are_drawn_together() -> None:
    events = joined({"a": 0, "b": 1})
    for time in range(1, 1001):
        events.append(moved(float(time), {"a" if time % 2 else "b": time % 7}))
    record = RunRecord.of([*events, RunEnded(1000.0, 1000, "max-updates")])
    # Bends are at least three hundredths of the run apart; the start is one more.
    assert len(clusters_figure(record).axes[0].collections) == 34


def test_changes_show_what_marks_them() -> None:
    figure = clusters_figure(RunRecord.of(RUNS["merge, found, retire"]))
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["split", "merge", "new cluster", "cluster given up"]
    marks = [np.asarray(line.get_xdata()).tolist() for line in figure.axes[0].get_lines()]
    assert marks == [[4.0], [10.0], [9.0, 9.5], [11.0]]
    assert "cluster 4 · 4 clients" in texts(figure)


def test_the_label_of_a_cluster_is_on_its_colour_wherever_its_band_is() -> None:
    late = split(9.9, 0, {1: ("a",), 2: ("b",)})
    figure = clusters_figure(RunRecord.of([*joined({"a": 0, "b": 0}), late, RunEnded(10, 2, "so")]))
    boxes = {text.get_text(): text.get_bbox_patch() for text in figure.axes[0].texts}
    for cluster in (1, 2):
        box = boxes[f"cluster {cluster} · 1 client"]
        assert box is not None
        assert to_hex(box.get_facecolor()) == cluster_colour(cluster).lower()


def test_changes_of_one_kind_that_are_too_many_are_counted() -> None:
    found = [changed(ClusterChange.FOUND, 1.0 + k, {"a": k}, made=(k,)) for k in range(1, 82)]
    figure = clusters_figure(RunRecord.of([*joined({"a": 0}), *found]))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["new cluster: 81 times"]
    assert not figure.axes[0].get_lines()


def test_initial_assignments_are_not_marked() -> None:
    found = [changed(ClusterChange.FOUND, 0.0, {f"c{k}": k}, made=(k,)) for k in range(4)]
    assert not clusters_figure(RunRecord.of([*found, RunEnded(1.0, 0, "so")])).legends


def test_clients_of_several_clusters_are_told_with_their_weights() -> None:
    shares = ClustersChanged(0.0, 0, ClusterChange.ASSIGN, {"a": {0: 0.75, 1: 0.25}, "b": {1: 1.0}})
    shown = texts(clusters_figure(RunRecord.of([shares, RunEnded(1.0, 0, "so")])))
    assert {"cluster 0 · 1 client, weight 0.8", "cluster 1 · 2 clients, weight 1.2"} <= shown


@pytest.mark.parametrize("draw", [accuracy_figure, clusters_figure])
def test_each_drift_is_marked(draw: Callable[[RunRecord], Figure]) -> None:
    figure = draw(RunRecord.of(RUNS["drift"]))
    lines = [np.asarray(line.get_xdata()).tolist() for line in figure.axes[0].get_lines()]
    assert [8.5, 8.5] in lines
    assert [11.0, 11.0] in lines
    # The data of both clients changed at 11 s, which is drawn as one moment.
    assert {"step 1", "2 clients: steps 1-2"} <= texts(figure)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "clients' data change" in words


@pytest.mark.parametrize("draw", [accuracy_figure, clusters_figure])
def test_more_drifts_than_can_be_told_apart_are_counted(
    draw: Callable[[RunRecord], Figure],
) -> None:
    figure = draw(RunRecord.of(RUNS["drift at every update"]))
    assert "the clients' data changed at 99 moments, which are not marked" in texts(figure)
    lines = [np.asarray(line.get_xdata()).tolist() for line in figure.axes[0].get_lines()]
    assert not any(len(x) == 2 and x[0] == x[1] > 8.0 for x in lines)


def test_labels_of_drifts_do_not_lie_on_each_other() -> None:
    drifts = [DataChanged(10.0 + index, 1, None, index) for index in range(1, 21)]
    figure = clusters_figure(RunRecord.of([*joined({"a": 0}), *drifts, RunEnded(100.0, 1, "so")]))
    axes = figure.axes[0]
    assert len(axes.get_lines()) == 20
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in axes.texts if t.get_text().startswith("step")]
    assert 2 <= len(boxes) < 20
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def test_a_target_that_few_clients_answered_is_not_reached() -> None:
    def curve(answered: int) -> RunRecord:
        scores = {f"c{i}": (0, 0.95, 1.0) for i in range(answered)}
        return RunRecord.of(
            [
                Evaluated(1.0, 1, 0.95, 1.0, 1, scores, 10),
                Evaluated(2.0, 2, 0.5, 1.0, 1, scores, answered),
            ]
        )

    def labels(record: RunRecord) -> list[str]:
        return [str(line.get_label()) for line in accuracy_figure(record).axes[0].get_lines()]

    few, enough = curve(8), curve(9)
    assert few.evaluations.counts.tolist() == [False, True]
    assert (few.evaluations.asked[0], few.evaluations.answered[0]) == (10, 8)
    assert "fewer than 9 of 10 answered" in labels(few)
    assert "fewer than 9 of 10 answered" not in labels(enough)
    reached = [
        sum(line.get_markersize() == 6 and line.get_marker() == "o" for line in axes.get_lines())
        for axes in (accuracy_figure(r, target=0.9).axes[0] for r in (few, enough))
    ]
    assert reached[1] - reached[0] == 1


def test_the_clusters_figure_names_each_final_cluster() -> None:
    shown = texts(clusters_figure(RunRecord.of(RUNS["leaver and newcomer"])))
    assert {"cluster 1 · 2 clients", "cluster 2 · 3 clients", "true groups"} <= shown
    assert "true groups" not in texts(clusters_figure(RunRecord.of(RUNS["no groups"])))


def test_empty_figures_say_so() -> None:
    record = RunRecord.of([])
    assert "no evaluations" in texts(accuracy_figure(record))
    assert "no clients" in texts(clusters_figure(record))
    assert "no devices" in texts(devices_figure(record))
    assert "no pair was compared" in texts(similarity_figure([], np.empty((0, 0)), {}))


def test_the_devices_figure_has_a_bar_for_each_task() -> None:
    figure = devices_figure(RunRecord.of(RUNS["rejected"]))
    applied, refused = figure.axes[0].collections
    # The client that never joined has no row.
    assert (len(applied.get_paths()), len(refused.get_paths())) == (8, 1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("cluster 0", "cluster 1", "cluster 2", "rejected")
    ]
    assert figure.axes[0].get_ylabel() == "4 of 4 devices"


@pytest.mark.parametrize(("largest", "turned"), [(3, 0.0), (100, 45.0)])
def test_bins_of_staleness_fit_a_column(largest: int, turned: float) -> None:
    tasks = [
        UpdateApplied(i + 1, i + 1.0, "a", 0, 0, stale, 0.5, float(i), 1.0, 1, 1)
        for i, stale in enumerate((0, largest))
    ]
    figure = staleness_figure({"one": RunRecord.of([*joined({"a": 0}), *tasks])})
    labels = figure.axes[0].get_xticklabels()
    assert [text.get_text() for text in labels][:3] == ["0", "1", "2-3"]
    assert {text.get_rotation() for text in labels} == {turned}


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_few_devices_have_their_names(tmp_path: Path) -> None:
    """The fastest is on top; names are not parsed as formulas, and may use any script."""
    took = {"slow": 9.0, "厨房": 5.0, "$x_": 1.0, "hospital-very-long-name-007": 0.5}
    tasks = [
        UpdateApplied(1, 9.0, name, 0, 0, 0, 0.5, 9.0 - seconds, 1.0, 1, 1)
        for name, seconds in took.items()
    ]
    figure = devices_figure(RunRecord.of([*joined(dict.fromkeys(took)), *tasks]))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    # Long names are shortened in the middle, since those of a fleet differ at the end.
    assert labels == ["hospital-…g-name-007", "$x_", "厨房", "slow"]
    saved(figure, tmp_path / "figure.png")


def test_a_long_run_shows_its_first_tasks_and_some_devices(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(300)]
    tasks = [
        UpdateApplied(i + 1, i + 1.0, names[i % 300], 0, 0, 0, 0.5, float(i), 1.0, 1, 1)
        for i in range(4000)
    ]
    figure = devices_figure(RunRecord.of([*joined(dict.fromkeys(names)), *tasks]))
    assert figure.axes[0].get_ylabel() == "120 of 300 devices"
    title = figure.axes[0].get_title(loc="left")
    assert title == "Devices at work (the first 3,000 s of the run)"
    saved(figure, tmp_path / "figure.png")


def test_similar_clients_stand_side_by_side(tmp_path: Path) -> None:
    matrix = np.array([[1.0, 0.1, 0.9], [0.1, 1.0, np.nan], [0.9, np.nan, 1.0]])
    figure = similarity_figure(["a", "b", "c"], matrix, {"a": 1, "b": 2, "c": 1})
    (image,) = figure.axes[0].images
    expected = [[1.0, 0.9, 0.1], [0.9, 1.0, np.nan], [0.1, np.nan, 1.0]]
    shown = np.asarray(image.get_array())
    np.testing.assert_array_equal(shown, expected)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["cluster 1", "cluster 2"]
    saved(figure, tmp_path / "figure.png")


@pytest.mark.parametrize(
    "matrix", [np.full((2, 2), np.nan), np.ones((2, 2)), np.ones((2, 2), np.float32)]
)
def test_similarities_without_a_range_are_drawn(
    tmp_path: Path, matrix: np.ndarray[tuple[int, int], np.dtype[np.floating]]
) -> None:
    saved(similarity_figure(["a", "b"], matrix, {}), tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("span", "unit"),
    [(0.0, (1.0, "s")), (5400.0, (1.0, "s")), (7200.0, (60.0, "min")), (1e5, (3600.0, "h"))],
)
def test_the_unit_of_time_suits_the_run(span: float, unit: tuple[float, str]) -> None:
    assert time_unit(span) == unit


def test_the_settings_of_the_user_are_left_alone() -> None:
    with matplotlib.rc_context({"font.size": 21.0}):
        before = dict(matplotlib.rcParams)
        accuracy_figure(RunRecord.of(RUNS["split"]))
        assert dict(matplotlib.rcParams) == before


def test_a_run_that_compares_no_clients_has_no_plot_of_similarities() -> None:
    assert "similarity" not in figures_of(RunRecord.of(joined({"a": 0})), similarity=None)
