"""When evaluations were, on the wall's clock."""

from __future__ import annotations

from pathlib import Path

from raceme.core.events import Evaluated
from raceme.records.folder import WALL_TIMES
from raceme.records.record import WallTimes, read_wall_times


def test_each_evaluation_is_a_line_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    now = iter([1.5, 2.25, 9.0])
    times = WallTimes(tmp_path, lambda: next(now))
    for time in (0.0, 4.0):
        times.observe(Evaluated(time, 0, 0.5, 0.5, 1))
    assert read_wall_times(tmp_path) == [(0.0, 1.5), (4.0, 2.25)]
    resumed = WallTimes(tmp_path, lambda: next(now), after=3.0)
    resumed.observe(Evaluated(4.0, 0, 0.5, 0.5, 1))
    assert read_wall_times(tmp_path) == [(0.0, 1.5), (4.0, 9.0)]


def test_a_line_that_is_being_written_is_left(tmp_path: Path) -> None:
    assert read_wall_times(tmp_path) == []
    (tmp_path / WALL_TIMES).write_text("time,seconds\n1.0,2.0\n3.0,4")
    assert read_wall_times(tmp_path) == [(1.0, 2.0)]
