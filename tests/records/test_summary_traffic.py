"""Bytes by phase: added up by hand, and as runs report them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fleets import MODEL, grid_of, pulled_app
from runs import devices, of, run
from summaries import summarise

from raceme.core.config import RunConfig
from raceme.core.events import AnswerTaken, Event, UpdateApplied
from raceme.core.requests import Request
from raceme.records.record import read_run
from raceme.reporting.console import summary_rows
from raceme.reporting.run_page import run_page
from raceme.runs.experiment import simulate
from raceme.strategies import FedAsync, Standalone

UPDATE = UpdateApplied(1, 1.0, "a", 0, 0, 0, 0.5, 0.0, 1.0, 100, 90)
RUN: list[Event] = [
    replace(UPDATE, phase="init"),
    AnswerTaken(1.5, "a", "losses", "support", 1000, 40),
    AnswerTaken(1.5, "b", "losses", "support", 1000, 20),
    replace(UPDATE, seq=2),
    replace(UPDATE, seq=3, bytes_down=300),
]


def test_traffic_by_phase_by_hand() -> None:
    summary = summarise(RUN, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
    assert summary["bytes_by_phase"] == {
        "init": {"down": 100, "up": 90, "messages": 1},
        "support": {"down": 2000, "up": 60, "messages": 2},
        "train": {"down": 400, "up": 180, "messages": 2},
    }
    assert (summary["bytes_down"], summary["bytes_up"]) == (2500, 330)
    rows = dict(summary_rows(summary))
    assert rows["traffic"] == "330 B up, 2.5 kB down"
    assert rows["traffic by phase"].startswith("init 90 B up, 100 B down; support 60 B up, 2 kB")


class Phased(FedAsync):
    """FedAsync that names the phase of its work, and whether clients hold the model already."""

    def __init__(self, is_held: bool) -> None:
        super().__init__()
        self.is_held = is_held

    def request_for(self, client: str) -> Request:
        return Request(client, phase="warm-up", is_held=self.is_held)


def test_an_update_is_counted_in_the_phase_that_its_work_names() -> None:
    size = MODEL.count_bytes()
    for is_held, down in ((False, size), (True, 0)):
        seen = run(Phased(is_held), grid_of(pulled_app(), devices(1.0)), num_rounds=2)
        found = [(e.phase, e.bytes_down, e.bytes_up) for e in of(UpdateApplied, seen)]
        assert found == [("warm-up", down, size)] * 2


def test_feddrifts_queries_and_trainings_are_counted_by_phase(tmp_path: Path) -> None:
    base = RunConfig.from_mapping(
        {"strategy": "feddrift-eager", "clients": 4, "drift": "concepts", "partition": "iid"}
    )
    config = base.with_values(max_updates=24, workers="0", out=str(tmp_path / "run"))
    summary, record = simulate(config).summary, read_run(tmp_path / "run")
    phases = summary["bytes_by_phase"]
    assert phases["train"] == {
        "down": record.updates.bytes_down.sum(),
        "up": record.updates.bytes_up.sum(),
        "messages": len(record.updates.seq),
    }
    asked = record.answers.bytes_down[record.answers.phase == "scores"]
    assert phases["scores"]["down"] == asked.sum() > 0
    assert phases["scores"]["messages"] == len(asked)
    assert summary["bytes_down"] == sum(phase["down"] for phase in phases.values())
    page = run_page(tmp_path / "run", "")
    assert "Traffic by phase" in page
    assert f"{phases['scores']['down']:,}" in page


def test_where_nothing_is_exchanged_there_is_no_traffic(tmp_path: Path) -> None:
    seen = run(Standalone(), grid_of(pulled_app(), devices(1.0)), num_rounds=2)
    summary = summarise(seen, strategy="standalone", dataset="digits", seed=0, wall_time=1.0)
    assert summary["bytes_by_phase"] == {"train": {"down": 0, "up": 0, "messages": 2}}
