"""The folder of a run: creation, resumption, locking and commands."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import socketserver
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from raceme import __version__
from raceme.core.config import RunConfig, write_toml
from raceme.core.errors import PlainFormatter, UserError, printable, unknown_name
from raceme.core.files import absolute, atomic_write

log = logging.getLogger("raceme.folder")

CONFIG = "config.toml"
ERROR = "error.txt"
"""Traceback of a failed run."""
_STORE = "run.sqlite"
MESSAGES = "messages.csv"
"""Every message of a simulated Flower app."""
CONTROL = "control.sock"
"""Command socket of the process that serves a run."""
_FILES = {
    CONFIG,
    CONTROL,
    ERROR,
    _STORE,
    "run.log",
    "summary.json",
    "similarity.npz",
    "positions.jsonl",
    "wall-times.csv",
    "report.html",
    "accuracy.png",
    "clusters.png",
    "devices.png",
    "similarity.png",
}
_FIGURE = b"Software\0Raceme"
"""Marker in the head of every figure."""
MODELS = ("clusters", "clients")
"""Folders of models: one for each cluster, and one for each client."""
_FOLDERS = {"checkpoint", *MODELS}


def new_folder(out: str | Path | None, name: str) -> Path:
    """Choose and create the folder of a new run, without content.

    Parameters
    ----------
    out : str or Path or None
        The folder; if empty or None a new one in ``runs``, named after the time and `name`.
    name : str
        Short name of the run.

    Raises
    ------
    UserError
        It is not empty, or cannot be created.
    """
    if out:
        folder = absolute(out)
        check_new(folder)
        make_folder(folder)
        return folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return _made_anew(Path("runs").resolve() / f"{stamp}-{name}")


def check_new(out: Path) -> None:
    """Raise UserError if a folder is unsuitable for a new run."""
    try:
        if not out.exists():
            return
        held = sorted(path.name for path in out.iterdir())
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}.") from None
    if {_STORE, MESSAGES} & set(held):
        raise UserError(f"{out} holds a run already; choose another folder with --out.")
    if held:
        raise UserError(
            f"{out} is not empty and holds no run ({held[0]} is in it): choose a new folder with "
            "--out."
        )


def make_folder(out: Path) -> None:
    """Create a folder if missing.

    Raises
    ------
    UserError
        It cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}.") from None


def begin(out: Path, config: RunConfig) -> None:
    """Write the configuration of a new run into its locked folder.

    Without the key `out`, so that its reuse makes a new run.

    Raises
    ------
    UserError
        Another process was first, or the folder is not writable.
    """
    check_new(out)
    _write_config(out, config)


@contextmanager
def given_up_if_it_fails(out: Path) -> Iterator[None]:
    """Undo :func:`begin` if the run cannot start, so that the next one can."""
    try:
        yield
    except UserError:
        with suppress(OSError):
            for name in (CONFIG, "run.log"):
                (out / name).unlink(missing_ok=True)
        raise


@contextmanager
def failure_recorded(out: Path) -> Iterator[None]:
    """Write the traceback of a failing run into its folder, except for a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        # The run may have failed because the folder is not writable.
        with suppress(OSError):
            out.mkdir(parents=True, exist_ok=True)
            (out / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        raise


def foreign(folder: Path) -> str:
    """Return the name of a foreign file in a run's folder, or an empty text."""
    for path in sorted(folder.iterdir()):
        ours = path.name.removesuffix("-journal") in _FILES or _is_partial(path)
        if path.is_dir() and not path.is_symlink():
            ours = path.name in _FOLDERS and all(
                inner.suffix == ".safetensors" or _is_partial(inner) for inner in path.iterdir()
            )
        elif path.suffix == ".png" and path.is_file():
            with path.open("rb") as file:
                ours = ours or _FIGURE in file.read(500)
        if not ours:
            return path.name
    return ""


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def _write_config(out: Path, config: RunConfig) -> None:
    try:
        with atomic_write(out / CONFIG) as file:
            write_toml(config.with_values(out="", resume="").to_mapping(), file)
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}.") from None


def resumed_folder(config: RunConfig) -> Path:
    """Return the folder of the run to resume.

    Raises
    ------
    UserError
        There is no run in it, or another output folder is given.
    """
    out = absolute(config.resume)
    if not (out / _STORE).is_file():
        raise UserError(f"There is no run in {out} to resume; expected a folder of results.")
    if config.out and absolute(config.out) != out:
        raise UserError(f"A run resumes in its own folder, {out}: leave out --out.")
    return out


def forget_end(config: RunConfig, out: Path) -> None:
    """Remove artefacts of an earlier end of a run that would not be overwritten.

    Limits may have changed, so the configuration is rewritten.
    """
    for folder in MODELS:
        for path in (out / folder).glob("*.safetensors"):
            path.unlink()
    (out / ERROR).unlink(missing_ok=True)
    _write_config(out, config)


def _made_anew(path: Path) -> Path:
    """Create a folder, with a number appended if it exists, for parallel starts."""
    make_folder(path.parent)
    candidate, number = path, 2
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            candidate = path.with_name(f"{path.name}-{number}")
            number += 1
        except OSError as error:
            raise UserError(f"Cannot write to {candidate}: {error.strerror}.") from None


def model_file(out: Path, of: int | str) -> Path:
    """Return the model file of a cluster, by number, or of a client, by name."""
    # A device's name may be no valid file name.
    inner = f"clients/{quote(of, safe='')}" if isinstance(of, str) else f"clusters/{of}"
    return out / f"{inner}.safetensors"


def saved_in(out: Path) -> list[str]:
    """Return the artefacts in a run's folder, with the number of files per subfolder."""
    names = []
    with suppress(OSError):
        for path in sorted(out.iterdir()):
            if path.is_dir():
                names.append(f"{path.name}/ ({len(list(path.iterdir()))})")
            elif not _is_partial(path):
                names.append(path.name)
    return names


class _LogFile(logging.FileHandler):
    """A log file that drops lines on a full disk, without ending the run."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write Raceme's log to a file within the context."""
    handler = _LogFile(path, encoding="utf-8", delay=True)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("raceme")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


# -----------------------------------------------------------------------------
# Locking of a run's folder for one writer.
# -----------------------------------------------------------------------------


_PAUSE_SECONDS = 0.2
_INSTANT_SECONDS = 0.02


@contextmanager
def only_writer(run: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock the folder of a run against other processes; the lock of a dead process is released.

    Two processes that resume from one checkpoint would each write their own updates.

    Parameters
    ----------
    run : Path
        Folder of the run.
    patience : float
        Seconds to wait for a process that still holds the lock.

    Raises
    ------
    UserError
        The lock is still held after that time.
    """
    handle = os.open(run, os.O_RDONLY)
    try:
        _lock(handle, run, patience)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, run: Path, patience: float) -> None:
    """Wait for the lock of a folder; see `only_writer`."""
    deadline = time.monotonic() + patience
    said = retried = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not retried:
                # A dashboard takes the lock briefly to test it.
                retried = True
                time.sleep(_INSTANT_SECONDS)
                continue
            if time.monotonic() >= deadline:
                raise UserError(
                    f"Another process is still writing to {run}: wait for its end or stop it, "
                    "then try again."
                ) from None
        except OSError as error:
            # Some network file systems have no locks; run without one.
            log.warning("%s cannot be locked: %s", run, error.strerror)
            return
        if not said:
            said = True
            log.info("Waiting up to %.0f s for the process that still writes to %s", patience, run)
        time.sleep(_PAUSE_SECONDS)


def has_writer(run: Path) -> bool:
    """Return whether a process writes to the folder of a run; True if unknown."""
    try:
        handle = os.open(run, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # Held, or the file system has no locks.
        return True
    finally:
        os.close(handle)
    return False


# -----------------------------------------------------------------------------
# Commands to the process of a run, by a socket in its folder.
#
# The socket's mode is the authentication: its owner alone may write to it. A command is a line of
# JSON, and so is its answer.
# -----------------------------------------------------------------------------


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
            # A killed process's socket, since the folder's lock is held here.
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
            said: dict[str, object] = {"answer": self._carried_out(line)}
        except UserError as error:
            said = {"error": str(error)}
        return json.dumps({"protocol": _PROTOCOL, "version": __version__, **said}).encode() + b"\n"

    def _carried_out(self, line: bytes) -> object:
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
                f"The server (raceme {__version__}) understands the command otherwise: {error}."
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
    if (run / _STORE).is_file():
        return
    if run.is_dir():
        within = sorted(path.parent.name for path in run.glob(f"*/{_STORE}"))
        hint = f" There are runs inside: {', '.join(within[:5])}." if within else ""
        raise UserError(f"There is no run in {run}.{hint}")
    beside = [path.parent.name for path in run.parent.glob(f"*/{_STORE}")]
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
