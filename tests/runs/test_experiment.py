"""A run from its configuration: its warnings are events."""

from __future__ import annotations

import logging
from pathlib import Path

from raceme.core.config import RunConfig
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


def test_a_resumed_run_does_not_repeat_its_warnings() -> None:
    collected = RunWarnings()
    collected.known.update(["few clients"])
    record = logging.LogRecord("raceme", logging.WARNING, "", 0, "few clients", (), None)
    collected.handle(record)
    assert list(collected.take(0.0)) == []
