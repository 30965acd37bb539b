"""Plots of scored uploads and of mixtures."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from summaries import summarise

from raceme.core.config import RunConfig, write_toml
from raceme.core.events import (
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    ClustersScored,
    Evaluated,
    Event,
    Measure,
    RunEnded,
    UpdateApplied,
)
from raceme.records.record import RunRecord
from raceme.records.store import RunStore
from raceme.reporting.artefacts import write_all
from raceme.reporting.console import summary_rows
from raceme.reporting.plots import mixtures_figure, uploads_figure
from raceme.reporting.run_page import run_page

pytestmark = pytest.mark.pictures


def upload(seq: int, client: str, before: float, after: float | None) -> list[Event]:
    applied = UpdateApplied(
        *(seq, float(seq), client, 0, 0, 0, 0.5, 0.0, 1.0, 10, 10),
        accuracy_before=before,
        accuracy_after=after,
        mixture=(0.75, 0.25) if client == "a" else (0.5, 0.5),
    )
    weights = {client: {0: 0.75, 1: 0.25}}
    return [applied, ClustersChanged(float(seq), seq, ClusterChange.MOVE, weights)]


RUN: list[Event] = [
    *(ClientJoined(0.0, client, 0, 10, None) for client in "ab"),
    ClustersScored(0.0, 0, {0: 0.5, 1: 0.25}),
    *upload(1, "a", 0.5, None),
    *upload(2, "b", 0.25, None),
    *upload(3, "a", 0.75, 0.75),
    *upload(4, "b", 0.75, 0.5),
    ClustersScored(4.0, 4, {0: 1.0, 1: 0.75}),
    RunEnded(4.0, 4, "so"),
]


def curves(axes: Axes) -> dict[str, list[list[float]]]:
    lines = (line for line in axes.lines if not str(line.get_label()).startswith("_"))
    return {str(line.get_label()): line.get_xydata().tolist() for line in lines}


def test_of_a_regression_errors_are_drawn_with_their_unit() -> None:
    evaluated = Evaluated(*(4.0, 4, 30.0, 1.0, 2, {"a": (0, 30.0, 1.0)}, 1), measure=Measure("W"))
    watts = [
        *(ClientJoined(0.0, client, 0, 10, None) for client in "ab"),
        *(*upload(1, "a", 60.0, None), *upload(2, "b", 40.0, None)),
        *(*upload(3, "a", 20.0, 50.0), *upload(4, "b", 20.0, 30.0)),
        evaluated,
        RunEnded(4.0, 4, "so"),
    ]
    (axes,) = uploads_figure(RunRecord.of(watts)).axes
    assert axes.get_ylabel() == "MAE (W)"
    # Values by session are between 20 and 50, with a margin of 3 % of the largest.
    assert axes.get_ylim() == pytest.approx((18.5, 51.5))
    summary = summarise(watts, strategy="cdfl", dataset="npz", seed=0, wall_time=1.0, target=25.0)
    rows = dict(summary_rows(summary))
    assert rows["uploads"] == "20.00 W, returned 40.00 W"
    assert rows["time to 25 W"] == "not reached"


def test_uploads_and_what_was_got_for_them_are_drawn_by_session() -> None:
    (axes,) = uploads_figure(RunRecord.of(RUN)).axes
    assert curves(axes) == {
        "uploaded": [[2, 0.375], [4, 0.75]],
        "returned": [[2, 0.625]],
        "cluster 0": [[0, 0.5], [4, 1.0]],
        "cluster 1": [[0, 0.25], [4, 0.75]],
        "mean of the clusters": [[0, 0.375], [4, 0.875]],
    }
    # All curves are within the axes, including those of the clusters.
    low, high = axes.get_ylim()
    assert low < 0.25
    assert high == 1.0
    dots = [line for line in axes.lines if line.get_marker() == "."]
    assert [len(line.get_xdata()) for line in dots] == [4, 2]


def test_divergences_are_drawn_by_session_and_mixtures_of_a_client_of_each_distribution() -> None:
    top, first = mixtures_figure(RunRecord.of(RUN)).axes
    drawn = curves(top)
    # For a the estimate is exact; for b .5 log(.5/.75) + .5 log(.5/.25) = .1438.
    assert [y for _, y in drawn["an upload"]] == pytest.approx([0, 0.14384, 0, 0.14384], abs=1e-4)
    assert drawn["mean by session"] == [
        [2, pytest.approx(0.07192, abs=1e-4)],
        [4, pytest.approx(0.07192, abs=1e-4)],
    ]
    # Both clients count for the first distribution, which also wins ties.
    assert first.get_ylabel() == "a"
    heights = [round(bar.get_height(), 6) for bar in first.patches]
    assert heights == [0.75] * 2 + [0.25] * 2 + [0.75] * 2 + [0.25] * 2


def test_clusters_alone_are_not_called_uploads() -> None:
    alone = [event for event in RUN if not isinstance(event, UpdateApplied)]
    (both,), (clusters,) = (uploads_figure(RunRecord.of(run)).axes for run in (RUN, alone))
    assert both.get_title(loc="left") == "Uploads and the models returned for them"
    assert clusters.get_title(loc="left") == "Cluster models on the server's test sets"


def test_distributions_without_a_cluster_are_not_drawn_but_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("raceme"), "propagate", True)
    few = [
        replace(event, mixture=(0.25, 0.5, 0.25)) if isinstance(event, UpdateApplied) else event
        for event in RUN
    ]
    why = "no cluster corresponds to distribution 2: there are fewer clusters"
    (axes,) = mixtures_figure(RunRecord.of(few)).axes
    assert axes.texts[-1].get_text() == why
    with RunStore(tmp_path) as store:
        for event in few:
            store.observe(event)
    summary = summarise(few, strategy="cdfl", dataset="digits", seed=0, wall_time=1.0)
    assert write_all(tmp_path, summary=summary, models={}) == {}
    assert not (tmp_path / "mixtures.png").exists()
    assert f"mixtures.png is left out: {why}" in caplog.messages


def test_a_run_without_them_has_no_pictures_and_reports_it(tmp_path: Path) -> None:
    plain = [ClientJoined(0.0, "a", 0, 10, None), RunEnded(1.0, 0, "so")]
    for figure in (uploads_figure, mixtures_figure):
        (axes,) = figure(RunRecord.of(plain)).axes
        assert axes.texts[-1].get_text().startswith("no ")
    for name, events in (("without", plain), ("with", RUN)):
        folder = tmp_path / name
        with RunStore(folder) as store:
            for event in events:
                store.observe(event)
        write_toml(RunConfig().to_mapping(), folder / "config.toml")
        summary = summarise(events, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
        assert write_all(folder, summary=summary, models={}) == {}
        page = run_page(folder, "")
        for what in ("uploads", "mixtures"):
            assert (folder / f"{what}.png").exists() is (name == "with")
            assert (f'id="{what}"' in page) is (name == "with")
