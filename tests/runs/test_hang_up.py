"""A closed terminal: a run ends properly, a device goes offline, `nohup` is respected."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forking import Commands
from processes import free_port, wait_until

from raceme.core.signals import StopRequest, interrupted_by_signals


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.pictures
def test_a_hang_up_ends_a_run_whose_output_nobody_reads_any_more(
    command: Commands, tmp_path: Path
) -> None:
    out, pipe = tmp_path / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    limits = ["--clients", "4", "--groups", "0.5,0.5", "--max-updates", "1000000"]
    # A terminal sends the signal to worker processes, too.
    child = command.start("run", "--out", str(out), "--workers", "1", *limits, output=pipe)
    os.set_blocking(reader, True)
    seen = b""
    while b"evaluated at 4 " not in seen:
        more = os.read(reader, 4096)
        assert more or not seen, seen
        seen += more
    # The reader closes the pipe, and the run continues.
    os.close(reader)
    store = out / "run.sqlite"
    size = store.stat().st_size
    wait_until(lambda: store.stat().st_size > size + 4096, 60)
    for process in (*children_of(child), child, child):
        os.kill(process, signal.SIGHUP)
    assert command.exit_code() == 130
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reason"] == "interrupted by the end of its terminal (SIGHUP)"
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["00000001.safetensors"]
    for name in ("accuracy.png", "clusters.png", "devices.png", "clusters/0.safetensors"):
        assert (out / name).is_file()


def children_of(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    own = [int(child) for child in text.split()]
    return [*own, *(inner for child in own for inner in children_of(child))]


def test_a_hang_up_takes_a_device_offline(command: Commands, tmp_path: Path) -> None:
    log = tmp_path / "log"
    address = f"127.0.0.1:{free_port()}"
    child = command.start("device", "--insecure", "--superlink", address, output=log)
    wait_until(lambda: "WARNING" in log.read_text(), 60)
    os.kill(child, signal.SIGHUP)
    os.kill(child, signal.SIGHUP)
    assert command.exit_code() == 0, log.read_text()
    assert log.read_text().splitlines()[-1].endswith("INFO offline")


def test_a_process_that_ignores_hang_ups_goes_on() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop() == ""
    with interrupted_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_hang_up_is_no_second_request() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() == "interrupted by the end of its terminal (SIGHUP)"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM])
def test_the_signals_that_end_a_session_interrupt_once(second: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    tidied = []

    def work() -> None:
        with interrupted_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), second)
                tidied.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert tidied
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
