"""Waiting times of clients in windows: the distribution by hand, and its plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raceme.core.events import Measured, RunEnded
from raceme.records.record import RunRecord
from raceme.records.store import RunStore
from raceme.reporting.artefacts import write_all
from raceme.reporting.plots import longer_than, shares_figure
from raceme.strategies.csafl import IDLE

pytestmark = pytest.mark.pictures


def idled(time: float, seconds: float, budget: float) -> Measured:
    values = {"client": "a", "window": 1, "seconds": seconds, "budget": budget}
    return Measured(time, 0, IDLE, values)


def waited(*shares: float) -> RunRecord:
    return RunRecord.of([idled(10.0, 10 * share, 10.0) for share in shares])


def test_how_often_a_client_waits_longer_by_hand() -> None:
    # Of 0, 0.25, 0.25 and 0.5, three are above 0, one is above 0.25, none above 0.5.
    shares, often = longer_than(np.array([0.25, 0.0, 0.5, 0.25]))
    assert shares.tolist() == [0.0, 0.25, 0.5, 1.0]
    assert often.tolist() == [0.75, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(("share", "above"), [(0.0, [0.0, 0.0]), (1.0, [1.0, 0.0, 0.0])])
def test_clients_that_never_or_always_wait_have_a_curve(share: float, above: list[float]) -> None:
    assert longer_than(np.full(3, share))[1].tolist() == above


def test_each_run_that_has_windows_has_a_curve() -> None:
    runs = {"t-fedavg": waited(0.5, 0.25), "fedavg": RunRecord.of([]), "ta-fedavg": waited(0.0)}
    (axes,) = shares_figure(runs, IDLE).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["t-fedavg: mean 38%", "ta-fedavg: never"]
    first, second = (line for line in axes.lines if line.get_label() in labels)
    assert first.get_xydata().tolist() == [[0, 1], [0.25, 0.5], [0.5, 0], [1, 0]]
    assert second.get_xydata().tolist() == [[0, 0], [1, 0]]


def test_a_run_without_windows_says_so_and_leaves_no_picture(tmp_path: Path) -> None:
    (axes,) = shares_figure({"fedavg": RunRecord.of([])}, IDLE).axes
    assert [text.get_text() for text in axes.texts] == ["not measured"]
    summary = {"strategy": "fedavg", "dataset": "digits", "seed": 0}
    for name, events in (
        ("without", [RunEnded(1.0, 1, "so")]),
        ("with", [idled(1.0, 0.5, 1.0), RunEnded(1.0, 1, "so")]),
    ):
        with RunStore(tmp_path / name) as store:
            for event in events:
                store.observe(event)
        assert write_all(tmp_path / name, summary=summary, models={}) == {}
        assert (tmp_path / name / "idle.png").exists() is (name == "with")
