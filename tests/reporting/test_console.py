"""Console output: plain lines in a file, a live line on a terminal, a final table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from summaries import summarise

from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    DataChanged,
    Ending,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
    UpdateRejected,
    change_line,
)
from raceme.reporting.console import (
    RunProgress,
    data_line,
    print_summary,
    shown_seconds,
    summary_rows,
    update_line,
)

UPDATE = UpdateApplied(
    seq=7,
    time=4.5,
    client="pi-3",
    cluster=2,
    base_version=5,
    staleness=3,
    weight=0.125,
    dispatched_at=2.25,
    train_loss=1.5,
    bytes_down=1500,
    bytes_up=900,
)
SPLIT = ClustersChanged(
    4.5,
    7,
    ClusterChange.SPLIT,
    {"pi-3": {3: 1.0}, "pi-4": {3: 1.0}, "pi-5": {4: 1.0}},
    gone=(2,),
    made=(3, 4),
)
RUN: list[Event] = [
    ClientJoined(0.0, "pi-3", 0, 10, 0),
    ClustersChanged(0.0, 0, ClusterChange.ASSIGN, {"pi-3": {2: 1.0}}),
    Evaluated(0.0, 0, 0.1, 2.0, 1),
    UPDATE,
    UpdateRejected(4.5, "pi-4", "the update [weights] is not finite", 1.0),
    SPLIT,
    Evaluated(5.0, 7, 0.625, 1.0, 2),
    Evaluated(6.0, 8, 0.5, 1.0, 2, {"pi-3": (3, 0.5, 1.0)}, 3),
    RunEnded(6.0, 8, "reached max-updates"),
]


def shown(
    events: list[Event],
    *,
    terminal: bool = False,
    each_update: bool = False,
    width: int = 100,
) -> str:
    """Return the output for some events."""
    out = StringIO()
    # Ignore an environment that forces colours or reports a dumb terminal.
    console = Console(
        file=out, force_terminal=terminal, width=width, highlight=False, _environ={"TERM": "xterm"}
    )
    with RunProgress(500, each_update, console) as progress:
        for event in events:
            progress.observe(event)
    return out.getvalue()


def without_rate(text: str) -> list[str]:
    """Return the lines without the rate, the only part that varies between runs."""
    return re.sub(r" · \d+/s", "", text).splitlines()


def controls(text: str) -> set[str]:
    return {char for char in text if ord(char) < 32 and char != "\n"} | ({"\x7f"} & set(text))


def test_piped_there_is_a_line_for_each_evaluation_and_split() -> None:
    text = shown(RUN)
    assert not controls(text)
    assert without_rate(text) == [
        "evaluated at 0 updates: t = 0.0 s · accuracy 0.100 (best 0.100) · 1 cluster",
        "rejected  pi-4: the update [weights] is not finite (further ones: run.log)",
        "cluster 2 → clusters 3 (2), 4 (1) at update 7",
        "evaluated at 7 updates: t = 5.0 s · accuracy 0.625 (best 0.625) · 2 clusters · 1 rejected",
        "evaluated at 8 updates: t = 6.0 s · accuracy 0.500 (1 of 3 clients, best 0.625) · "
        "2 clusters · 1 rejected",
    ]


def test_piped_lines_are_not_broken_or_cut() -> None:
    assert without_rate(shown(RUN, width=20)) == without_rate(shown(RUN))


def test_piped_a_run_without_evaluations_prints_nothing() -> None:
    assert shown([UPDATE, RunEnded(1.0, 1, "interrupted", Ending.INTERRUPTED)]) == ""


def test_the_most_frequent_reason_of_rejections_is_in_the_summary() -> None:
    said = ["late", "late", "damaged"]
    rejected = [UpdateRejected(float(at), "pi-4", why, 0.0) for at, why in enumerate(said, 1)]
    rows = dict(summary_rows(summary_of([*rejected, *RUN], wall_time=2.0)))
    assert rows["updates"] == "7 (4 rejected, 2 of them: late; see run.log)"


def test_an_update_that_changes_no_model_reports_it() -> None:
    line = shown([replace(UPDATE, weight=0.0)], each_update=True)
    assert "weight 0 (no model changes)  loss" in line
    assert "no model" not in shown([UPDATE], each_update=True)


def test_each_update_has_its_line() -> None:
    text = shown(RUN, each_update=True)
    assert not controls(text)
    assert without_rate(text)[2:5] == [
        "update    7  pi-3  cluster 2  staleness 3  weight 0.125  loss 1.500  took 2.2 s",
        # Text in brackets is not taken for markup.
        "rejected  pi-4: the update [weights] is not finite",
        "cluster 2 → clusters 3 (2), 4 (1) at update 7",
    ]


def test_devices_that_come_and_go_have_lines_and_simulated_clients_none() -> None:
    seen = [
        ClientJoined(0.0, "pump", 7, 120, None, labels="room=garden"),
        ClientJoined(1.0, "oven", 8, 90, None),
        ClientLeft(2.0, "pump"),
    ]
    assert shown(seen, each_update=True).splitlines() == [
        "online  pump  120 samples  room=garden",
        "online  oven  90 samples",
        "offline  pump",
    ]
    assert shown(seen) == ""


def test_on_a_terminal_updates_have_lines_above_the_bar() -> None:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(RUN, each_update=True, terminal=True))
    assert update_line(UPDATE) in plain
    assert "7/500 t = 6.0 s" in plain.strip().splitlines()[-1]


def console_after(*moments: tuple[float, Event], terminal: bool = False) -> str:
    """Return the output for events at given wall-clock seconds."""
    out, now = StringIO(), 0.0
    console = Console(file=out, force_terminal=terminal, width=100, _environ={"TERM": "xterm"})
    with RunProgress(100, console=console, clock=lambda: now) as progress:
        for moment, event in moments:
            now = moment
            progress.observe(event)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def applied(seq: int) -> UpdateApplied:
    return replace(UPDATE, seq=seq, time=float(seq))


def test_piped_ten_quiet_seconds_have_a_line() -> None:
    # 21 updates in 21 s: the other 79 take 79 s.
    text = console_after(*((float(seq), applied(seq)) for seq in range(1, 22)))
    assert text.splitlines() == [
        "10 of 100 updates: t = 10.0 s · 0 clusters · 1/s · 90 s left",
        "20 of 100 updates: t = 20.0 s · 0 clusters · 1/s · 80 s left",
    ]


def test_a_line_that_is_printed_anyway_counts() -> None:
    lines = console_after(
        (6.0, applied(6)), (7.0, Evaluated(7.0, 7, 0.5, 1.0, 1)), (16.5, applied(16))
    ).splitlines()
    assert [line.split(" updates")[0] for line in lines] == ["evaluated at 7"]


def test_the_remaining_time_of_a_resumed_run_ignores_its_earlier_part() -> None:
    # Ten updates in 10 s from the 60th on: 30 are left.
    text = console_after(*((float(second), applied(60 + second)) for second in range(1, 11)))
    assert text.splitlines() == ["70 of 100 updates: t = 70.0 s · 0 clusters · 1/s · 30 s left"]


def test_of_a_resumed_run_a_split_may_leave_out_whom_it_was_never_told_of() -> None:
    left_out = replace(SPLIT, memberships={**SPLIT.memberships, "pi-6": {}})
    lines = shown([UPDATE, left_out, Evaluated(5.0, 7, 0.625, 1.0, 2)]).splitlines()
    assert lines[0] == change_line(left_out)
    assert "2 clusters" in lines[1]


def test_more_updates_than_expected_are_not_so_many_of_fewer() -> None:
    # For a run in rounds the number of updates is only an estimate.
    assert console_after((10.0, applied(130))).splitlines() == [
        "130 updates: t = 130.0 s · 0 clusters · 0/s"
    ]
    assert "130/130 t = 130.0 s" in console_after((10.0, applied(130)), terminal=True)


def test_the_bar_says_how_long_it_will_take() -> None:
    text = console_after((1.0, applied(1)), (25.0, applied(25)), terminal=True)
    assert "25/100 t = 25.0 s · 0 clusters · 75 s left" in text
    assert "left" not in console_after((25.0, applied(100)), terminal=True)
    # The last line of a run that is interrupted has no estimate either.
    assert text.rindex("25/100") > text.rindex("left")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.2, "1 s"),
        (99.4, "99 s"),
        (99.5, "2 min"),
        (5399.0, "90 min"),
        (5400.0, "1.5 h"),
        (172800.0, "2.0 d"),
    ],
)
def test_times_have_units_that_suit(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown


def test_a_terminal_has_a_live_line() -> None:
    text = shown(RUN, terminal=True, width=160)
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "cluster 2 → clusters 3 (2), 4 (1) at update 7" in plain
    last = plain.strip().splitlines()[-1]
    assert "7/500 t = 6.0 s" in last
    assert "t = 6.0 s · accuracy 0.500 (1 of 3 clients, best 0.625) · 2 clusters" in last
    assert "evaluated at" not in plain


def test_a_terminal_gets_its_cursor_back_after_an_error() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, _environ={"TERM": "xterm"})
    with pytest.raises(RuntimeError, match="broke"), RunProgress(10, console=console):
        raise RuntimeError("broke")
    text = out.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_diverged_run_is_shown() -> None:
    nan = Evaluated(1.0, 1, math.nan, math.nan, 1)
    assert "accuracy nan" in shown([Evaluated(0.5, 0, 0.5, 1.0, 1), nan])
    # There is no earlier best accuracy either.
    assert "accuracy nan" in shown([nan])


def test_an_evaluation_that_all_answered_does_not_say_so() -> None:
    text = shown([Evaluated(1.0, 1, 0.5, 1.0, 1, {"a": (0, 0.5, 1.0)}, 1)])
    assert "accuracy 0.500 (best 0.500) · " in text


WEIGHTS = {client: {5: 0.5, 6: 0.5} for client in "ab"}


def change(kind: ClusterChange, gone: tuple[int, ...], made: tuple[int, ...]) -> ClustersChanged:
    return ClustersChanged(1.0, 9, kind, WEIGHTS, gone, made)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (SPLIT, "cluster 2 → clusters 3 (2), 4 (1) at update 7"),
        (change(ClusterChange.MERGE, (3, 4), (5,)), "clusters 3, 4 → cluster 5 (2) at update 9"),
        (change(ClusterChange.FOUND, (), (5,)), "new cluster 5 (2) at update 9"),
        (
            ClustersChanged(1.0, 9, ClusterChange.FOUND, {}, made=(5,)),
            "new cluster 5 at update 9",
        ),
        (
            ClustersChanged(1.0, 9, ClusterChange.RETIRE, {}, gone=(5,)),
            "cluster 5 ended at update 9",
        ),
    ],
)
def test_changes_of_clusters_have_their_lines(event: ClustersChanged, line: str) -> None:
    assert change_line(event) == line
    assert shown([event]) == f"{line}\n"


def test_moves_and_initial_assignments_are_not_printed() -> None:
    first = ClustersChanged(0.0, 0, ClusterChange.FOUND, {"a": {0: 1.0}}, made=(0,))
    assign = change(ClusterChange.ASSIGN, (), ())
    assert shown([first, assign, change(ClusterChange.MOVE, (), ())], each_update=True) == ""


def test_a_real_device_that_moves_has_a_line() -> None:
    begun = ClustersChanged(0.0, 0, ClusterChange.ASSIGN, {"pi-3": {2: 1.0}, "pi-4": {2: 1.0}})
    moved = ClustersChanged(
        9.0, 9, ClusterChange.MOVE, {"pi-3": {2: 0.5, 1: 0.5}, "pi-4": {2: 1.0}}
    )
    assert shown([begun, moved], each_update=True) == "moved  pi-3  cluster 2 → 1\n"
    assert shown([begun, moved]) == ""


def test_a_run_of_real_devices_of_months_counts_days() -> None:
    evaluated = Evaluated(864_000.0, 8, 0.5, 1.0, 2)
    assert "t = 10.0 d · accuracy" in shown([evaluated], each_update=True)
    assert "t = 864000.0 s · accuracy" in shown([evaluated])


def test_data_of_single_clients_are_told_among_updates_only() -> None:
    everybody, one = DataChanged(1.0, 7, None, 2), DataChanged(1.0, 7, "pi-3", 2)
    assert shown([everybody, one]) == "data of all clients: step 2 at update 7\n"
    assert shown([one], each_update=True) == "data of pi-3: step 2 at update 7\n"


def test_events_have_lines() -> None:
    assert data_line(DataChanged(1.0, 7, "a", 2)) == "data of a: step 2 at update 7"
    assert update_line(UPDATE) == (
        "update    7  pi-3  cluster 2  staleness 3  weight 0.125  loss 1.500  took 2.2 s"
    )


def printed(summary: dict[str, Any], out: Path, missing: Sequence[str] = ()) -> str:
    file = StringIO()
    print_summary(summary, out, Console(file=file, width=100, highlight=False), missing=missing)
    return file.getvalue()


def summary_of(
    events: list[Event], *, wall_time: float, dataset: str = "digits", target: float | None = None
) -> dict[str, Any]:
    return summarise(
        events, strategy="casa", dataset=dataset, seed=0, wall_time=wall_time, target=target
    )


def test_the_summary_of_a_run_is_printed() -> None:
    text = printed(summary_of(RUN, wall_time=2.0, target=0.6), Path("/elsewhere/run"))
    assert not controls(text)
    title, *rows = [line.strip() for line in text.strip().splitlines()[:10]]
    assert title == "casa on digits: reached max-updates"
    assert dict(re.split(r"\s{2,}", row) for row in rows) == {
        "accuracy": "0.500 (best 0.625), mean over 1 of 3 clients",
        "time to 0.6": "5.0 s, 7 updates",
        "clusters": "2",
        "purity": "1.000",
        "clients": "1",
        "updates": "7 (1 rejected: the update [weights] is not finite; see run.log)",
        "virtual time": "6.0 s",
        "wall time": "2.0 s (4 updates/s)",
        "traffic": "900 B up, 1.5 kB down",
    }
    assert text.splitlines()[-1] == "Results, plots and models: /elsewhere/run"


def test_unknown_values_are_a_dash() -> None:
    text = printed(summary_of([], wall_time=0.0), Path("/elsewhere/run"))
    assert "None" not in text.split("\n", 2)[2]
    assert "- (best -), mean over clients" in text
    assert "time to target  not reached" in re.sub(r"target +", "target  ", text)
    assert re.search(r"purity +-", text)
    assert "0.0 s (0 updates/s)" in text


def test_the_accuracy_by_test_examples_is_printed_if_it_differs() -> None:
    def row(weighted: float | None) -> str:
        summary = summary_of(RUN, wall_time=2.0)
        summary |= {"weighted_accuracy": weighted, "best_weighted_accuracy": weighted}
        text = printed(summary | {"best_accuracy": 0.5}, Path("/elsewhere/run"))
        return next((line.strip() for line in text.splitlines() if "examples" in line), "")

    assert row(None) == ""
    assert row(0.5) == ""
    assert re.fullmatch(r"by test examples +0\.750 \(best 0\.750\), weighted mean", row(0.75))


@pytest.mark.parametrize(("moves", "shown"), [(0, []), (1, ["once"]), (7, ["7 times"])])
def test_moves_are_printed_if_there_are_any(moves: int, shown: list[str]) -> None:
    text = printed(summary_of(RUN, wall_time=2.0) | {"moves": moves}, Path("/elsewhere/run"))
    assert re.findall(r"clients moved +(.*), without splits", text) == shown


def test_a_run_that_has_not_ended_has_no_reason() -> None:
    title = printed(summary_of([], wall_time=0.0), Path("/elsewhere/run")).splitlines()[1]
    assert title.strip() == "casa on digits"


def test_names_in_brackets_are_no_markup() -> None:
    events: list[Event] = [RunEnded(1.0, 0, "ended by [/quit] of [someone]")]
    text = printed(summary_of(events, wall_time=1.0, dataset="[own]"), Path("/a/[b]"))
    assert "casa on [own]: ended by [/quit] of [someone]" in text
    assert "/a/[b]" in text


def test_a_folder_below_is_shown_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = printed(summary_of(RUN, wall_time=1.0), tmp_path / "runs" / "mine")
    assert text.endswith("Results, plots and models: runs/mine\n")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_340_000, "2.34 MB"), (5e9, "5 GB")],
)
def test_traffic_has_units_that_suit(count: int, expected: str) -> None:
    summary = summary_of([], wall_time=1.0) | {"bytes_up": count}
    assert f"{expected} up," in printed(summary, Path("/elsewhere"))


def test_missing_results_are_reported() -> None:
    text = printed(summary_of(RUN, wall_time=4.2), Path("out"), ["run.sqlite", "checkpoint"])
    assert "Results without run.sqlite, checkpoint: out" in text
    assert "plots and models" not in text
