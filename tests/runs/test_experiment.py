"""A run from its configuration: its warnings are events."""

from __future__ import annotations

import logging
from pathlib import Path

from raceme.core.config import RunConfig
from raceme.core.errors import about
from raceme.core.events import ClientJoined, Warned
from raceme.records.store import read_events
from raceme.reporting.console import summary_rows
from raceme.runs.experiment import RunWarnings, simulate, warnings_of_run


def test_a_warning_is_an_event_and_told_with_the_results(tmp_path: Path) -> None:
    keys = {
        **{"strategy": "casa", "clients": 4, "groups": "1", "model": "mclr", "workers": 0},
        **{"max-updates": 6, "out": str(tmp_path / "run")},
    }
    outcome = simulate(RunConfig.from_mapping(keys))
    events = read_events(outcome.out)
    # α_c = 2 / log2(13) of ten clients is the first whose power 1 / 0.15 is at most 0.02. Of four
    # clients it is 2 / log2(7), whose logarithm is 0.086 of that of 0.02.
    text = (
        "4 clients are too few for CASA, which with gamma=0.15 tells clusters apart among at least "
        "10: they may share one model. Set gamma to at most 0.08, take more clients, or use "
        "--strategy panicle."
    )
    assert [event for event in events if isinstance(event, Warned)] == [Warned(0.0, text)]
    assert (type(events[0]), type(events[1])) == (Warned, ClientJoined)
    assert outcome.summary["warnings"] == [text]
    assert ("warning", text) in summary_rows(outcome.summary)


def test_a_warning_is_reported_once_and_those_of_the_machine_are_not() -> None:
    with warnings_of_run() as outer, warnings_of_run() as inner:
        assert inner is outer
        for name in ("raceme", "raceme.run", "raceme.checkpoints"):
            logging.getLogger(name).warning("few\nclients")
        logging.getLogger("raceme").error("a file could not be written")
        assert list(outer.take(2.0)) == [Warned(2.0, "few clients")]
        logging.getLogger("raceme").warning("few clients")
        assert list(outer.take(3.0)) == []
    logging.getLogger("raceme").warning("after the run")
    assert not outer.texts


def test_of_warnings_about_devices_the_first_of_each_kind_is_told() -> None:
    log = logging.getLogger("raceme")
    with warnings_of_run() as collected:
        for client in ("c1", "c2"):
            log.warning("%s is slow", client, extra=about(client))
            log.warning("%s is far away", client, extra=about(client))
            log.warning("%s for all", client)
        told = [event.text for event in collected.take(0.0)]
    further = " (further ones: run.log)"
    assert told == [f"c1 is slow{further}", f"c1 is far away{further}", "c1 for all", "c2 for all"]


def test_the_end_of_a_window_is_no_warning(tmp_path: Path) -> None:
    keys = {
        **{"strategy": "csafl", "clients": 12, "model": "mclr", "workers": 0, "max-rounds": 3},
        **{"csafl.budget": 2.5, "out": str(tmp_path / "run")},
    }
    summary = simulate(RunConfig.from_mapping(keys)).summary
    assert summary["rejections"] == {"its window ended first": summary["rejected_updates"]}
    assert "warnings" not in summary


def test_a_resumed_run_does_not_repeat_its_warnings() -> None:
    collected = RunWarnings()
    collected.known.update(["few clients", "c1 is slow (further ones: run.log)"])
    collected.handle(logging.LogRecord("raceme", logging.WARNING, "", 0, "few clients", (), None))
    record = logging.LogRecord("raceme", logging.WARNING, "", 0, "%s is slow", ("c2",), None)
    vars(record).update(about("c2"))
    collected.handle(record)
    assert list(collected.take(0.0)) == []
