"""Plots and the page of a simulated app."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from raceme.records.exchanges import FleetRecord, TaskRecord
from raceme.reporting.style import FAINT, REJECTED
from raceme.reporting.waiting import (
    AWAITED,
    EVALUATION,
    WORK,
    shown,
    timeline_figure,
    waiting_figure,
)


def task(client: str, begun: float, ended: float, **other: object) -> TaskRecord:
    values = {"kind": "train", "sent": begun, "answered": ended, "failure": None}
    sizes = {"bytes_down": 0, "bytes_up": 0}
    return TaskRecord(client, begun=begun, ended=ended, **{**values, **sizes, **other})  # type: ignore[arg-type]


FLEET = FleetRecord(
    end=10.0,
    clients=("a", "b", "c"),
    tasks=(
        task("a", 0, 1),
        task("b", 0, 4),
        task("a", 4, 4.5, kind="evaluate"),
        task("c", 4, 6, failure="lost", answered=math.inf),
        task("b", 4, 10),
    ),
    offline={"c": [(6.0, 10.0)]},
)


def bars(figure: Figure) -> dict[str, list[tuple[float, float, int]]]:
    """Return the bars of each colour: start, end and row."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for collection in figure.axes[0].collections:
        boxes = [path.get_extents() for path in collection.get_paths()]
        spans = [(box.x0, box.x1, round((box.y0 + box.y1) / 2)) for box in boxes]
        found.setdefault(to_hex(collection.get_facecolor()[0]) if spans else "", []).extend(spans)
    return found


def names(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def ticks(figure: Figure) -> Sequence[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_a_timeline_shows_who_worked_and_who_was_waited_for() -> None:
    figure = timeline_figure(FLEET)
    assert shown(FLEET) == ticks(figure) == ["a", "c", "b"]
    found = bars(figure)
    assert found[WORK] == [(0, 1, 0)]
    assert found[AWAITED] == [(0, 4, 2), (4, 10, 2)]
    assert found[EVALUATION] == [(4, 4.5, 0)]
    assert found[REJECTED] == [(4, 6, 1)]
    # Waiting is drawn, and being offline is left blank.
    assert found[FAINT] == [(1, 4, 0), (4.5, 10, 0), (0, 4, 1)]
    assert "offline" in names(figure)
    assert "offline" not in names(timeline_figure(replace(FLEET, offline={})))


def test_a_timeline_without_waiting_highlights_nobody() -> None:
    tasks = (task("a", 0, 2), task("b", 0, 3), task("a", 2, 4), task("b", 3, 4))
    figure = timeline_figure(FleetRecord(end=4.0, clients=("a", "b"), tasks=tasks, offline={}))
    assert bars(figure).keys() - {""} == {WORK}
    assert names(figure) == ["at work"]


def test_shares_and_waiting() -> None:
    figure = waiting_figure(FLEET, FLEET.accounts())
    left, right = figure.axes
    busy, idle = ([bar.get_width() for bar in part] for part in left.containers)
    assert busy == pytest.approx([0.15, 0.2, 1.0])
    assert idle == pytest.approx([0.85, 0.4, 0.0])
    # a waits from 1 to 4 and from 4.5 to 10, c until 4.
    assert [bar.get_width() for bar in right.containers[0]] == pytest.approx([0, 0, 3 + 5.5 + 4])


def test_of_very_many_bars_the_first_are_shown() -> None:
    many = tuple(task("a", second, second + 1) for second in range(5000))
    figure = timeline_figure(replace(FLEET, end=5000.0, tasks=many, offline={}))
    assert "(the first 3,000 s)" in figure.axes[0].get_title(loc="left")
    assert figure.axes[0].get_xlim() == (0, 3000)
    fleet = replace(FLEET, clients=tuple(map(str, range(300))), tasks=(), offline={})
    assert len(shown(fleet)) == 120
    assert "120 of 300 devices" in timeline_figure(fleet).axes[0].get_ylabel()


def test_a_simulation_in_which_nothing_took_time() -> None:
    empty = FleetRecord(0.0, ("a",), (), {})
    for figure in (timeline_figure(empty), waiting_figure(empty, empty.accounts())):
        assert figure.axes[0].texts
