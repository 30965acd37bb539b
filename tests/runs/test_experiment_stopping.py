"""The end of a run's process: orphans end, and one process at a time writes to a folder."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import Event, UpdateApplied
from raceme.flower.grid import parent_pid
from raceme.records.folder import only_writer
from raceme.records.store import read_events
from raceme.reporting.dashboard.source import RunSource
from raceme.runs.experiment import simulate

STEP = """
import os, signal, threading
from raceme.core.signals import end_with_parent
end_with_parent(os.getppid(), 0.5)
# As Flower's thread pools do it: a wait that no signal ends.
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(os.getpid(), flush=True)
threading.Event().wait()
"""


def test_an_orphan_ends_by_itself_whatever_it_waits_for() -> None:
    child = [sys.executable, "-c", STEP]
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({child!r})"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as parent:
        assert parent.stdout
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        # Reads until the child, too, has closed the pipe.
        assert parent.stdout.read() == (
            "The SuperLink of this run has died: the run ends within 0 s\n"
            "The run stops; it can be resumed from its last checkpoint\n"
        )


def test_only_flowers_own_process_has_a_parent_to_look_at() -> None:
    command = ["/usr/bin/flwr-serverapp", "--token", "t", "--insecure", "--parent-pid", "12"]
    assert parent_pid(command) == 12
    assert parent_pid(command[:-2]) is None
    assert parent_pid(["pytest", "--parent-pid", "12"]) is None
    assert parent_pid() is None


def test_only_one_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        with pytest.raises(UserError, match="Another process is still writing"):
            only_writer(tmp_path).__enter__()
        with pytest.raises(UserError, match="wait for its end or stop it"):
            only_writer(tmp_path, patience=0.3).__enter__()
    with only_writer(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_the_next_waits_until_the_folder_is_free(tmp_path: Path) -> None:
    first = only_writer(tmp_path)
    first.__enter__()
    threading.Timer(0.3, first.__exit__, (None, None, None)).start()
    with only_writer(tmp_path, patience=60):
        pass


def test_a_run_that_still_goes_on_cannot_be_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "checkpoint-every": 4}
    simulate(RunConfig.from_mapping({**keys, "max-updates": 6, "out": str(out)}))
    before = read_events(out)
    more = RunConfig.from_mapping({**keys, "max-updates": 9, "resume": str(out)})
    with only_writer(out), pytest.raises(UserError, match="Another process is still writing"):
        simulate(more)
    assert read_events(out) == before
    assert simulate(more).summary["updates"] == 9


def test_a_run_that_fails_leaves_its_traceback_until_it_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "checkpoint-every": 4}
    source = RunSource(out)

    def told(name: str) -> list[object]:
        while source.poll():
            pass
        return [told[name] for told in map(json.loads, source.pieces) if name in told]

    def fail(event: Event) -> None:
        assert not told("stopped"), "its process writes"
        if isinstance(event, UpdateApplied) and event.seq == 6:
            raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        simulate(RunConfig.from_mapping({**keys, "max-updates": 9, "out": str(out)}), fail)
    assert (out / "error.txt").read_text().endswith("ValueError: no more data\n")
    assert (told("failure"), told("stopped")) == (["ValueError: no more data"], [True])
    simulate(RunConfig.from_mapping({**keys, "max-updates": 9, "resume": str(out)}))
    assert not (out / "error.txt").exists()
    assert told("failure")[-1:] in ([], [None])
    assert "updates" in told("summary")[0]


def test_a_failure_after_a_resumed_runs_first_update_is_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "checkpoint-every": 4}
    simulate(RunConfig.from_mapping({**keys, "max-updates": 4, "out": str(out)}))

    def fail(event: Event) -> None:
        if isinstance(event, UpdateApplied):
            raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        simulate(RunConfig.from_mapping({**keys, "max-updates": 9, "resume": str(out)}), fail)
    assert (out / "error.txt").read_text().endswith("ValueError: no more data\n")
