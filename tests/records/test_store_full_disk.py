"""A full disk: the run ends properly, missing files are listed, and saved data are kept."""

from __future__ import annotations

import json
import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raceme.cli import app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import Event, UpdateApplied
from raceme.records.folder import log_file, saved_in
from raceme.records.store import RunStore, read_events
from raceme.reporting.artefacts import missing_line, write_all
from raceme.runs.checkpoints import CheckpointFolder
from raceme.runs.experiment import RunOutcome, simulate

pytestmark = pytest.mark.pictures

KEYS = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "eval-every": 6, "max-updates": 30}


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Limit the size of files: like a full disk, but without special rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run(out: Path, full_at: int = 0, size: int = 25_000, **keys: int) -> RunOutcome:
    """Run; from some update on the size of files is limited."""
    named = {key.replace("_", "-"): value for key, value in keys.items()}

    def fill(event: Event) -> None:
        if full_at and isinstance(event, UpdateApplied) and event.seq == full_at:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    with files_up_to(resource.RLIM_INFINITY):
        return simulate(RunConfig.from_mapping({**KEYS, **named, "out": str(out)}), fill)


def updates(out: Path) -> list[UpdateApplied]:
    return [event for event in read_events(out) if isinstance(event, UpdateApplied)]


def test_a_full_disk_ends_a_run_in_order_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    run(whole, checkpoint_every=5)
    outcome = run(out, full_at=12, checkpoint_every=5)
    assert list(outcome.unwritten) == ["plots", "run.sqlite"]
    assert "run.sqlite can no longer be written" in outcome.summary["reason"]
    assert updates(out) == updates(whole)[: len(updates(out))]
    assert 0 < len(updates(out)) < outcome.summary["updates"] < 30
    # The models and the summary cover the complete run.
    assert (out / "clusters" / "0.safetensors").is_file()
    assert json.loads((out / "summary.json").read_text())["ending"] == "interrupted"
    line = missing_line(out, outcome.unwritten)
    assert "\n" not in line
    assert line.startswith("plots, run.sqlite could not be written (")
    assert f"after {len(read_events(out))} of " in line
    assert line.endswith("summary.json.")
    assert "clusters/ (1)" in line

    simulate(RunConfig.from_mapping({**KEYS, "checkpoint-every": 5, "resume": str(out)}))
    assert read_events(out) == read_events(whole)


def test_a_checkpoint_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("raceme").propagate = True
    monkeypatch.setattr("raceme.runs.checkpoints.CHECKPOINTS", "/proc/nowhere")
    outcome = run(tmp_path / "out", checkpoint_every=4)
    assert outcome.summary["updates"] == 30
    assert list(outcome.unwritten) == ["checkpoint"]
    assert caplog.text.count("A checkpoint could not be written") > 3


def test_plots_that_cannot_be_written_are_named_and_the_command_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run(tmp_path / "out", max_updates=6)
    (tmp_path / "out" / "accuracy.png").unlink()
    with files_up_to(15_000), log_file(tmp_path / "out" / "run.log"):
        models = {0: {}}
        missing = write_all(tmp_path / "out", summary=outcome.summary, models=models)
    assert "accuracy.png" in missing
    assert "summary.json" not in missing
    assert set(missing.values()) == {"File too large"}
    assert not (tmp_path / "out" / "accuracy.png").exists()
    assert not [name for name in saved_in(tmp_path / "out") if "partial" in name]

    failed = RunOutcome(tmp_path / "out", outcome.summary, True, False, missing)
    monkeypatch.setattr("raceme.runs.experiment.simulate", lambda *_, **__: failed)
    assert CliRunner().invoke(app, ["run"]).exit_code == 1


def test_a_log_without_room_ends_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with log_file(Path("/dev/full")):
        logging.getLogger("raceme").info("lost")
    with log_file(tmp_path / "nowhere" / "run.log"):
        logging.getLogger("raceme").info("lost")
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_that_cannot_begin_leaves_the_folder_for_the_next(tmp_path: Path) -> None:
    keys = RunConfig.from_mapping({**KEYS, "max-updates": 3, "out": str(tmp_path / "out")})
    with files_up_to(10_000), pytest.raises(UserError, match=r"Cannot write .*run\.sqlite"):
        simulate(keys)
    assert run(tmp_path / "out", max_updates=3).unwritten == {}
    assert not CheckpointFolder(tmp_path / "out").path.exists()


def test_a_brief_lack_of_file_descriptors_loses_no_event(tmp_path: Path) -> None:
    """As when connections have used up all file descriptors."""
    event = UpdateApplied(1, 1.0, "a", 0, 0, 0, 0.5, 0.5, 0.1, 4, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with RunStore(tmp_path) as store:
        store.observe(event)
        # No file can be opened beyond the highest descriptor that is free now.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        later = threading.Timer(1.0, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
        later.start()
        try:
            store.commit()
        finally:
            later.join()
        assert not store.failure
    assert read_events(tmp_path) == [event]
