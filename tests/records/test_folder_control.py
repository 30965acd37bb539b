"""Commands over a socket in the folder of a run, to the process that writes there."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raceme.cli.fleet import devices, show, status, versions
from raceme.core.errors import UserError
from raceme.records import control as module
from raceme.records.control import ControlSocket, command, only_served_run, served_here
from raceme.records.folder import CONTROL, only_writer

THREADS: list[str] = []


def add(first: int, second: int = 1) -> int:
    THREADS.append(threading.current_thread().name)
    if second == 0:
        raise UserError("Nothing to add: give another number.")
    return first + 1000 // second


def fail() -> None:
    raise RuntimeError("a bug\x1b[1m")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    # Exceeds the maximum length of a socket's path.
    run = tmp_path / ("long" * 30) / "first"
    run.mkdir(parents=True)
    (run / "run.sqlite").touch()
    return run


@contextmanager
def at_work(run: Path, **commands: Callable[..., object]) -> Iterator[None]:
    """Execute commands in a thread that polls when it is told to."""
    told, over = threading.Event(), threading.Event()
    with ControlSocket(run, commands, told.set) as control:

        def work() -> None:
            while told.wait() and not over.is_set():
                told.clear()
                control.act()

        thread = threading.Thread(target=work, name="the run")
        thread.start()
        yield
        over.set()
        told.set()
        thread.join()


def test_a_command_is_carried_out_in_the_thread_of_the_run(run: Path) -> None:
    THREADS.clear()
    with at_work(run, add=add):
        assert command(run, "add", first=2) == 1002
        assert command(run, "add", first=2, second=10) == 102
    assert THREADS == ["the run", "the run"]
    assert not (run / CONTROL).exists()


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("add", {"first": 1, "second": 0}, "Nothing to add"),
        ("add", {"fist": 1}, "has another form of this command"),
        ("rol", {}, "has no command 'rol'"),
        ("fail", {}, r"failed in the server: RuntimeError: a bug\\x1b"),
    ],
)
def test_a_mistake_is_one_line_and_the_run_goes_on(
    run: Path, name: str, arguments: dict[str, object], said: str
) -> None:
    with at_work(run, add=add, fail=fail):
        with pytest.raises(UserError, match=said):
            command(run, name, **arguments)
        assert command(run, "add", first=0) == 1000


def test_a_command_that_was_given_up_has_no_effect(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.1)
    done: list[int] = []
    with ControlSocket(run, {"note": lambda: done.append(1)}, lambda: None) as control:
        with pytest.raises(UserError, match=r"busy for 0\.1 s, and has not carried out"):
            command(run, "note")
        assert not control.act()
    assert not done


def spoken(run: Path, line: bytes) -> Any:
    """Send a raw line to the socket."""
    with module._short_path(run / CONTROL) as path, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        return json.loads(connection.makefile("rb").readline())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[" * 60_000 + b"\n",
        b'{"protocol": 1}\n',
        b"x" * 200_000,
        b'{"protocol": 1, "command": [], "arguments": 7}\n',
        b'{"protocol": 9, "command": "add", "arguments": {"first": 1}}\n',
    ],
)
def test_every_line_gets_an_answer(run: Path, line: bytes) -> None:
    with at_work(run, add=add):
        try:
            assert "error" in spoken(run, line)
        except (ConnectionResetError, BrokenPipeError):
            # The server stopped reading an overlong line.
            assert len(line) > module._LONGEST_LINE
        assert command(run, "add", first=0) == 1000


def test_a_server_of_another_version_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with at_work(run, add=add):
        monkeypatch.setattr(module, "_PROTOCOL", 2)
        said = spoken(run, b'{"protocol": 1, "command": "add", "arguments": {"first": 1}}\n')
        assert "use the `raceme` of its version" in said["error"]
    with ControlSocket(run, {}, lambda: None) as control:
        assert control._server is not None
        control._server.answer = lambda _line: b'{"protocol": 7, "version": "9"}\n'
        with pytest.raises(UserError, match=r"is raceme 9, and this is .*: use the"):
            command(run, "status")


def test_no_server_and_no_run_are_distinguished(run: Path) -> None:
    with pytest.raises(UserError, match="No server runs in"):
        command(run, "status")
    with only_writer(run), pytest.raises(UserError, match="takes no commands"):
        command(run, "status")
    # The socket of a killed process.
    with module._short_path(run / CONTROL) as path, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(UserError, match="No server runs in"):
        command(run, "status")
    with at_work(run, add=add):
        assert command(run, "add", first=0) == 1000
    with pytest.raises(UserError, match=r"Unknown run 'frist'\. Did you mean 'first'"):
        command(run.with_name("frist"), "status")
    with pytest.raises(UserError, match="There are runs inside: first"):
        command(run.parent, "status")
    with pytest.raises(UserError, match="does not exist"):
        command(run / "no" / "run", "status")


def test_an_empty_table_is_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with at_work(run, devices=list, versions=list):
        devices(run)
        versions(run)
        devices(run, as_json=True)
    told = ["No devices have joined yet.", "No versions are kept yet.", "[]"]
    assert capsys.readouterr().out.splitlines() == told


def test_answers_are_lines_tables_or_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"device": "b\x1b[1m", "silent_seconds": 7200.0},
        {"device": "a", "accuracy": 0.5},
    ]
    told = {"devices_online": 2, "clusters": {"0": 0.25}, "loss": None}
    with at_work(
        run, status=lambda: told, devices=lambda: rows, show=lambda device: {"device": device}
    ):
        status(run)
        devices(run)
        show(run, "a", as_json=True)
    assert capsys.readouterr().out.splitlines() == [
        "devices online  2",
        "clusters        0: 0.25",
        "loss            –",
        "device    silent  accuracy",
        r"b\x1b[1m  2.0 h   –",
        "a         –       0.5",
        "{",
        '  "device": "a"',
        "}",
    ]


def test_the_run_that_is_served_here_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACEME_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="No running server of this user"):
        only_served_run()
    with served_here(tmp_path / "run"):
        servers = tmp_path / "cache" / "servers"
        # A killed process leaves its entry; process ids are at most 2²².
        (servers / "9999999").write_text("/gone")
        assert only_served_run() == tmp_path / "run"
        (servers / str(os.getppid())).write_text("/another")
        with pytest.raises(UserError, match=f"name one: /another, {tmp_path}/run"):
            only_served_run()
        (servers / str(os.getppid())).unlink()
    with pytest.raises(UserError, match="No running server of this user"):
        only_served_run()
