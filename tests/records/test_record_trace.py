"""A line for each event, as other programs read it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from raceme.core.config import RunConfig
from raceme.core.events import ClusterChange, ClustersChanged, Evaluated, UpdateApplied
from raceme.records.folder import TRACE
from raceme.records.record import TraceFile, line_of
from raceme.records.store import read_events
from raceme.runs.experiment import simulate

UPDATE = UpdateApplied(7, 9.0, "pi-3", 2, 5, 3, 0.125, 4.0, math.nan, 1000, 500)


def test_an_update_says_when_it_computed_and_when_it_travelled() -> None:
    line = line_of(UPDATE, lambda client, down, up: (down + up) / 1000)
    assert (line["start"], line["done"], line["staleness"]) == (4.0, 9.0, 3)
    assert (line["compute"], line["communication"]) == (3.5, 1.5)
    assert line["train_loss"] is None


def test_a_real_device_says_it_itself() -> None:
    device = UpdateApplied(
        7, 9.0, "pi-3", 2, 5, 3, 0.125, 4.0, 1.0, 9, 9, started_at=1e9, finished_at=1e9 + 2
    )
    assert (line_of(device)["compute"], line_of(device)["communication"]) == (2.0, 3.0)
    # Its clock may say what it likes.
    wrong = UpdateApplied(
        7, 9.0, "pi-3", 2, 5, 3, 0.125, 4.0, 1.0, 9, 9, started_at=2e9, finished_at=1e9
    )
    assert line_of(wrong)["compute"] == 0.0


def test_what_nobody_knows_is_null() -> None:
    assert (line_of(UPDATE)["compute"], line_of(UPDATE)["communication"]) == (None, None)


def test_what_is_said_of_every_client_is_left_to_the_store() -> None:
    assert "per_client" not in line_of(Evaluated(1.0, 1, 0.5, 1.0, 1, {"a": (0, 0.5, 1.0)}, 1))


def test_names_are_escaped_and_a_line_stays_a_line(tmp_path: Path) -> None:
    hostile = 'a\n{"event":"RunEnded"}\u2028\x1b[31m'
    change = ClustersChanged(0.0, 0, ClusterChange.ASSIGN, {hostile: {0: 1.0}})
    with TraceFile(tmp_path) as file:
        file.observe(change)
    text = (tmp_path / TRACE).read_text(encoding="ascii")
    assert text.count("\n") == len(text.splitlines()) == 1
    assert json.loads(text)["memberships"] == {hostile: {"0": 1.0}}


def test_a_killed_run_has_the_lines_of_its_events(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as file:
        file.observe(UPDATE)
        # Nothing is closed or flushed yet.
        assert [line["number"] for line in lines(tmp_path)] == [1]


def test_a_full_disk_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / TRACE).symlink_to("/dev/full")
    with TraceFile(tmp_path) as file:
        file.observe(UPDATE)
        file.observe(UPDATE)
    assert file.failure == "No space left on device"
    assert [record.msg for record in caplog.records] == ["%s is no longer written: %s"]


KEYS: dict[str, Any] = {
    "clients": 3,
    "groups": "0.5,0.5",
    "max-updates": 8,
    "workers": "0",
    "checkpoint-every": 4,
    "devices": "slow30x5",
    "trace": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("traced") / "out"
    simulate(RunConfig.from_mapping({**KEYS, "out": str(out)}))
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / TRACE).read_text().splitlines()]


def test_a_run_has_a_line_for_each_event(run: Path) -> None:
    found, events = lines(run), read_events(run)
    assert [line["event"] for line in found] == [type(event).__name__ for event in events]
    assert [line["number"] for line in found] == list(range(1, len(events) + 1))
    updates = [line for line in found if line["event"] == "UpdateApplied"]
    assert all(
        line["compute"] + line["communication"] == pytest.approx(line["done"] - line["start"])
        for line in updates
    )


def test_a_resumed_run_goes_on_in_its_trace(run: Path) -> None:
    before = lines(run)
    with (run / TRACE).open("a") as file:
        file.write('{"number": 1')
    simulate(RunConfig.from_mapping({**KEYS, "max-updates": 12, "resume": str(run)}))
    found, events = lines(run), read_events(run)
    assert [line["event"] for line in found] == [type(event).__name__ for event in events]
    shared = [line for line in before if line["event"] not in ("RunEnded", "Evaluated")]
    assert [line for line in found if line["number"] <= len(before)][: len(shared) - 1]
    numbers = [line["number"] for line in found]
    assert numbers == sorted(set(numbers))
