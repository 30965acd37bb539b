"""Commands to the process of a run, by a socket in its folder.

The socket's mode is the authentication: its owner alone may write to it. A command is a line of
JSON, and so is its answer.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any, Self

from raceme import __version__
from raceme.core.errors import UserError, printable, unknown_name
from raceme.records.folder import CONTROL, STORE, has_writer

log = logging.getLogger("raceme.folder")

_PROTOCOL = 1
"""Increased on incompatible changes of the protocol."""
_LONGEST_LINE = 1 << 16
_LINE_SECONDS = 5.0
_TURN_SECONDS = 20.0
"""Maximum wait for the run's thread, which may be busy with an update or evaluation."""


class ControlSocket:
    """Accepts commands about a run within the context, also in parallel.

    Commands run in :meth:`act` in the run's thread, between two events, and may access the run's
    state.

    Parameters
    ----------
    run : Path
        Folder of the run.
    commands : Mapping[str, Callable]
        Functions by name, with text and number arguments and JSON results; they raise `UserError`
        on errors.
    wake : Callable
        Makes the run's thread call :meth:`act`.
    """

    def __init__(
        self, run: Path, commands: Mapping[str, Callable[..., object]], wake: Callable[[], None]
    ) -> None:
        self._run, self._commands, self._wake = run, commands, wake
        self._asked: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._server: _ControlServer | None = None

    def __enter__(self) -> Self:
        with _short_path(self._run / CONTROL) as path:
            # Only a killed process can have left it, since this process holds the folder's lock.
            Path(path).unlink(missing_ok=True)
            self._server = _ControlServer(path, self.answer)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_raised: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        with suppress(OSError):
            (self._run / CONTROL).unlink()
        for _, answer in self._asked:
            answer.cancel()

    def act(self) -> bool:
        """Execute pending commands; return whether there were any."""
        acted = False
        while self._asked:
            command, answer = self._asked.popleft()
            # Abandoned commands must not take effect later.
            if not answer.set_running_or_notify_cancel():
                continue
            acted = True
            try:
                answer.set_result(command())
            except UserError as error:
                answer.set_exception(error)
            except Exception as error:
                log.exception("A command has failed")
                said = printable(f"{type(error).__name__}: {error}")
                answer.set_exception(UserError(f"The command failed in the server: {said}."))
        return acted

    def answer(self, line: bytes) -> bytes:
        """Answer a line, in a thread of its own."""
        try:
            said: dict[str, object] = {"answer": self._execute(line)}
        except UserError as error:
            said = {"error": str(error)}
        return json.dumps({"protocol": _PROTOCOL, "version": __version__, **said}).encode() + b"\n"

    def _execute(self, line: bytes) -> object:
        try:
            asked = json.loads(line)
            protocol, name = asked["protocol"], str(asked["command"])
            arguments = dict(asked["arguments"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError("The server cannot read this command.") from None
        if protocol != _PROTOCOL or name not in self._commands:
            raise UserError(
                f"The server (raceme {__version__}) has no command '{printable(name, 40)}': use "
                "the `raceme` of its version."
            )
        command = self._commands[name]
        try:
            bound = signature(command).bind(**arguments)
        except TypeError as error:
            raise UserError(
                f"The server (raceme {__version__}) has another form of this command: {error}."
            ) from None
        answer: Future[object] = Future()
        self._asked.append((lambda: command(*bound.args, **bound.kwargs), answer))
        self._wake()
        with suppress(TimeoutError):
            return answer.result(_TURN_SECONDS)
        if answer.cancel():
            raise UserError(
                f"The server has been busy for {_TURN_SECONDS:g} s, and has not carried out the "
                "command: try again, and see /healthz."
            )
        # It has begun.
        return answer.result()


class _ControlServer(socketserver.ThreadingUnixStreamServer):
    """Listens on a socket writable by its owner only, with a thread per connection."""

    daemon_threads = True

    def __init__(self, path: str, answer: Callable[[bytes], bytes]) -> None:
        self.answer = answer
        super().__init__(path, _ControlConnection)

    def server_activate(self) -> None:
        """Listen; earlier connections are impossible."""
        os.chmod(str(self.server_address), 0o600)
        super().server_activate()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections."""


class _ControlConnection(socketserver.StreamRequestHandler):
    timeout = _LINE_SECONDS

    def handle(self) -> None:
        """Answer one line."""
        assert isinstance(self.server, _ControlServer)
        self.wfile.write(self.server.answer(self.rfile.readline(_LONGEST_LINE)))


@contextmanager
def served_here(run: Path) -> Iterator[None]:
    """Record in the user's cache, within the context, that a run is served on this machine."""
    note = _servers() / str(os.getpid())
    try:
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text(str(run.absolute()), encoding="utf-8")
    except OSError:
        # Without the record, commands must name the folder.
        pass
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def only_served_run() -> Path:
    """Return the folder of the one run that this user serves on this machine.

    Raises
    ------
    UserError
        There is none, or several.
    """
    notes = [note for note in _servers().glob("*") if Path(f"/proc/{note.name}").exists()]
    runs = sorted({Path(note.read_text(encoding="utf-8")) for note in notes})
    if len(runs) == 1:
        return runs[0]
    if runs:
        raise UserError(f"Several runs are served here, name one: {', '.join(map(str, runs))}.")
    raise UserError(
        "No running server of this user was found on this machine: name the folder of its run, the "
        "--out of `raceme serve`; as another user, use `sudo -u USER`."
    )


def _servers() -> Path:
    from raceme.datasets.source import cache_folder

    return cache_folder() / "servers"


def command(run: Path, name: str, **arguments: object) -> Any:
    """Let the process that serves a run execute a command; return its answer.

    Raises
    ------
    UserError
        There is no such run, no process serves it, the version differs, or the command is refused.
    """
    _check_run(run)
    asked = {"protocol": _PROTOCOL, "command": name, "arguments": arguments}
    try:
        with (
            _short_path(run / CONTROL) as path,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            connection.settimeout(_LINE_SECONDS + _TURN_SECONDS)
            connection.connect(path)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            with connection.makefile("rb") as file:
                said = json.loads(file.readline())
    except PermissionError:
        raise UserError(
            f"The server of {run} takes commands of its own user only: use `sudo -u USER`."
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise UserError(_unserved(run)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it has ended, or hangs"
        raise UserError(f"The server of {run} gives no answer: {reason}.") from None
    if said.get("protocol") != _PROTOCOL:
        raise UserError(
            f"The server of {run} is raceme {said.get('version')}, and this is {__version__}: use "
            "the `raceme` of its version."
        )
    if "error" in said:
        raise UserError(said["error"])
    return said["answer"]


def _check_run(run: Path) -> None:
    """Raise UserError if a folder has no run, with a suggestion."""
    if (run / STORE).is_file():
        return
    if run.is_dir():
        within = sorted(path.parent.name for path in run.glob(f"*/{STORE}"))
        hint = f" There are runs inside: {', '.join(within[:5])}." if within else ""
        raise UserError(f"There is no run in {run}.{hint}")
    beside = [path.parent.name for path in run.parent.glob(f"*/{STORE}")]
    if not beside:
        raise UserError(f"{run} does not exist; expected the folder of a run.")
    raise unknown_name("run", run.name, beside)


def _unserved(run: Path) -> str:
    if has_writer(run):
        return (
            f"The process that writes to {run} takes no commands: it is not `raceme serve`, or is "
            "just starting or ending."
        )
    return f"No server runs in {run}. The `raceme serve` command that began the run resumes it."


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Return an equivalent path within the 107 characters of a socket path."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        short = Path(f"/proc/self/fd/{folder}", path.name)
        yield str(short if short.parent.exists() else path)
    finally:
        os.close(folder)
