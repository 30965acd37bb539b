"""A measure that a method declares is stored, summarised, printed, tabulated and drawn."""

from __future__ import annotations

import csv
import io
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fleets import grid_of, pulled_app
from runs import devices, run
from summaries import summarise

from raceme.core.config import RunConfig, write_toml
from raceme.core.errors import UserError
from raceme.core.events import Event, Measured, MeasureSchema
from raceme.core.requests import Outcome, Update
from raceme.experiments.results import Comparison, Result, Run
from raceme.experiments.suites import load_suite
from raceme.experiments.tables import to_csv
from raceme.records.folder import saved_in
from raceme.records.store import RunStore, StoreFollower, read_events
from raceme.reporting.artefacts import write_all
from raceme.reporting.console import summary_rows
from raceme.reporting.dashboard.source import Columns
from raceme.reporting.run_page import run_page
from raceme.strategies import FedAsync

pytestmark = pytest.mark.pictures

GAP = MeasureSchema("gap", "distance to the start", ("client", "gap"), unit="m", summary="max")
LOAD = MeasureSchema("load", "updates of a cluster", ("load",), per="cluster", figure="steps")


class Measuring(FedAsync):
    """FedAsync that reports two measures with each update, and its number as a distance."""

    def on_update(self, update: Update) -> Outcome:
        count = self.progress.updates + 1
        values = {"client": update.task.client, "gap": np.float64(count / 2)}
        self.report(Measured(self.now(), count, GAP, values))
        self.report(Measured(self.now(), count, LOAD, {"load": {0: np.int64(count)}}))
        return super().on_update(update)


@pytest.mark.parametrize(
    ("schema", "value"),
    [(GAP, "far"), (GAP, np.ones(2)), (LOAD, {0: np.ones(2)}), (LOAD, {0: {}})],
)
def test_a_value_that_is_no_number_is_refused(schema: MeasureSchema, value: object) -> None:
    values = {"client": "a"} if schema is GAP else {}
    with pytest.raises(UserError, match=f"The measure {schema.name} must have a number as "):
        Measured(0.0, 1, schema, {**values, schema.value: value})
    # An array with a single number is accepted.
    Measured(0.0, 1, GAP, {"client": "a", "gap": np.array(1.0)})


def test_unknown_values_are_left_out() -> None:
    assert Measured(0.0, 1, GAP, {"client": "a", "gap": None}).numbers() == {}
    assert Measured(0.0, 1, LOAD, {"load": {0: None, 1: 2}}).numbers() == {1: 2.0}


@pytest.fixture(scope="module")
def seen() -> list[Event]:
    return run(Measuring(), grid_of(pulled_app(), devices(1.0)), num_rounds=3)


def stored(folder: Path, events: list[Event]) -> Path:
    with RunStore(folder) as store:
        for event in events:
            store.observe(event)
    return folder


def test_the_store_has_rows_and_a_view_and_gives_the_events_back(
    seen: list[Event], tmp_path: Path
) -> None:
    folder = stored(tmp_path, seen)
    measured = [event for event in seen if isinstance(event, Measured)]
    assert len(measured) == 6
    assert [event for event in read_events(folder) if isinstance(event, Measured)] == measured
    followed = StoreFollower(folder).read().events
    assert [event for event in followed if isinstance(event, Measured)] == measured
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        gaps = connection.execute("SELECT updates, client, gap FROM measure_gap").fetchall()
        loads = connection.execute("SELECT updates, cluster, load FROM measure_load").fetchall()
    client = measured[0].values["client"]
    assert gaps == [(1, client, 0.5), (2, client, 1.0), (3, client, 1.5)]
    assert loads == [(1, 0, 1), (2, 0, 2), (3, 0, 3)]


def test_the_summary_has_a_line(seen: list[Event]) -> None:
    summary = summarise(seen, strategy="measuring", dataset="digits", seed=0, wall_time=1.0)
    assert summary["measures"] == {
        "gap": {"title": "distance to the start", "unit": "m", "value": 1.5},
        "load": {"title": "updates of a cluster", "unit": "", "value": {"0": 3}},
    }
    rows = dict(summary_rows(summary))
    assert rows["distance to the start"] == "1.5 m"
    assert rows["updates of a cluster"] == "3 to 3"


def test_the_dashboard_has_columns(seen: list[Event]) -> None:
    columns = Columns(1000)
    for event in seen:
        columns.observe(event)
    told = columns.take()
    assert told["measure_gap"]["gap"] == [0.5, 1.0, 1.5]
    assert told["measure_load"]["load"] == [[(0, 1)], [(0, 2)], [(0, 3)]]


def test_figures_are_drawn_and_shown_on_the_page(seen: list[Event], tmp_path: Path) -> None:
    folder = stored(tmp_path, seen)
    write_toml(RunConfig().to_mapping(), folder / "config.toml")
    summary = summarise(seen, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
    assert write_all(folder, summary=summary, models={}) == {}
    assert {"measure-gap.png", "measure-load.png"} <= set(saved_in(folder))
    page = run_page(folder, "")
    assert 'id="measure-gap"' in page
    assert "distance to the start" in page


def test_a_comparison_has_a_column_of_single_numbers(seen: list[Event], tmp_path: Path) -> None:
    suite_file = tmp_path / "suite.toml"
    suite_file.write_text("[methods.fedasync]\n[methods.casa]\n")
    suite = load_suite(suite_file)
    plain, measuring = (
        summarise(events, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
        for events in ([], seen)
    )
    results = (
        Result(suite.methods[0], "fedasync", (Run(0, "plain", plain),)),
        Result(suite.methods[1], "casa", (Run(0, "measuring", measuring),)),
    )
    rows = list(csv.DictReader(io.StringIO(to_csv(Comparison(suite, results)))))
    assert [row["measure_gap"] for row in rows] == ["", "1.5"]
    assert "measure_load" not in rows[0]


def test_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    values = (math.inf, -math.inf, math.nan)
    events: list[Event] = [Measured(1.0, 1, GAP, {"client": "a", "gap": value}) for value in values]
    found = [e.value for e in read_events(stored(tmp_path, events)) if isinstance(e, Measured)]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_a_resumed_run_drops_later_measures(tmp_path: Path) -> None:
    events: list[Event] = [
        Measured(float(n), n, GAP, {"client": "a", "gap": float(n)}) for n in (1, 2, 3)
    ]
    stored(tmp_path, events)
    with RunStore(tmp_path, after=2) as store:
        store.observe(events[2])
    assert read_events(tmp_path) == events


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (("a b",), {}, "identifiers"),
        (("time",), {}, "columns of every measure"),
        (("a",), {"value": "b"}, "no column b"),
        (("a", "b"), {"per": "client"}, "expected one column"),
        (("a",), {"summary": "sum"}, "expected one of"),
        (("a",), {"figure": "pie"}, "expected one of"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(
    columns: tuple[str, ...], options: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        MeasureSchema("m", "title", columns, **options)


TWO = ("clients", "gap")


def test_of_several_numbers_the_summarised_one_is_named() -> None:
    with pytest.raises(UserError, match=r'several numbers: .*value="gap"'):
        Measured(0.0, 0, MeasureSchema("m", "title", TWO), {"clients": 2, "gap": 1.0})
    named = MeasureSchema("m", "title", TWO, value="clients")
    assert Measured(0.0, 0, named, {"clients": np.int64(2), "gap": 1.0}).numbers() == {"": 2.0}
    # Names of clients are not numbers.
    assert Measured(0.0, 0, GAP, {"client": "a", "gap": 1.0}).numbers() == {"": 1.0}


def test_a_list_is_no_value_of_a_column() -> None:
    named = MeasureSchema("m", "title", TWO, value="gap")
    for wrong in ([1, 2], (1, 2), {"a": 1}, np.ones(3), np.ones(1)):
        with pytest.raises(UserError, match="number or a text as clients"):
            Measured(0.0, 0, named, {"clients": wrong, "gap": 1.0})


def test_values_have_to_be_those_declared() -> None:
    with pytest.raises(ValueError, match="has the columns"):
        Measured(0.0, 0, GAP, {"gap": 1.0})
