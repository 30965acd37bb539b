"""The folder of a run: creation, resumption, locking and commands."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import secrets
import socket
import socketserver
import statistics
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from raceme import __version__
from raceme.core.config import CONFIG, TRUST, RunConfig, write_toml
from raceme.core.errors import (
    PlainFormatter,
    UserError,
    one_line,
    os_errors_as_user_errors,
    printable,
    unknown_name,
)
from raceme.core.files import absolute, atomic_write, flush
from raceme.core.options import Value

log = logging.getLogger("raceme.folder")

COMPARISON = "compare.json"
"""Results of a comparison, in its folder."""
LOG = "run.log"
MLFLOW = "mlflow-run.txt"
"""Id of the MLflow run, for resumption."""
POSITIONS = "positions.jsonl"
REPORT = "report.html"
SIMILARITY = "similarity.npz"
STORE = "run.sqlite"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files."""
TRACE = "trace.jsonl"
WANDB = "wandb"
"""Folder of Weights & Biases' files."""
WANDB_RUN = "wandb-run.txt"
"""Id of the Weights & Biases run, for resumption."""
WALL_TIMES = "wall-times.csv"
ERROR = "error.txt"
"""Traceback of a failed run."""
MESSAGES = "messages.csv"
"""Every message of a simulated Flower app."""
CONTROL = "control.sock"
"""Command socket of the process that serves a run."""
_FILES = {
    CONFIG,
    CONTROL,
    ERROR,
    LOG,
    MLFLOW,
    POSITIONS,
    REPORT,
    SIMILARITY,
    STORE,
    SUMMARY,
    TRACE,
    WANDB_RUN,
    WALL_TIMES,
    "accuracy.png",
    "clusters.png",
    "devices.png",
    "similarity.png",
}
_FIGURE = b"Software\0Raceme"
"""Marker in the head of every figure."""
MODELS = ("clusters", "clients")
"""Folders of models: one for each cluster, and one for each client."""
CHECKPOINTS = "checkpoint"
"""Folder of the checkpoints of a run."""
_FOLDERS = {CHECKPOINTS, TENSORBOARD, WANDB, *MODELS}
_OF_TRACKERS = {
    TENSORBOARD: ("events.out.",),
    WANDB: ("debug", "latest-run", "offline-run-", "run-"),
}
"""How the names in the folders of trackers begin."""


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
    return _made_anew(dated_folder(name).resolve())


def dated_folder(name: str) -> Path:
    """Return the folder of results that are given none: in ``runs``, named after the time."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def check_new(out: Path) -> None:
    """Raise UserError if a folder is unsuitable for a new run."""
    with os_errors_as_user_errors(f"Cannot write to {out}"):
        if not out.exists():
            return
        held = sorted(path.name for path in out.iterdir())
    if {STORE, MESSAGES} & set(held):
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
    with os_errors_as_user_errors(f"Cannot write to {out}"):
        out.mkdir(parents=True, exist_ok=True)


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
            for name in (CONFIG, LOG):
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
            ours = path.name in _FOLDERS and all(map(_is_of_folder, path.iterdir()))
        elif path.suffix == ".png" and path.is_file():
            with path.open("rb") as file:
                ours = ours or _FIGURE in file.read(500)
        if not ours:
            return path.name
    return ""


def _is_of_folder(path: Path) -> bool:
    """Return whether a file in a folder of a run's is the run's."""
    is_of_tracker = path.name.startswith(_OF_TRACKERS.get(path.parent.name, ()))
    return is_of_tracker or path.suffix == ".safetensors" or _is_partial(path)


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def recorded(config: RunConfig) -> dict[str, Value]:
    """Return the keys that the folder of a run records."""
    keys = config.with_values(out="", resume="").to_mapping()
    # Given anew by each user.
    del keys[TRUST]
    return keys


def _write_config(out: Path, config: RunConfig) -> None:
    with os_errors_as_user_errors(f"Cannot write to {out}"), atomic_write(out / CONFIG) as file:
        write_toml(recorded(config), file)


def resumed_folder(config: RunConfig) -> Path:
    """Return the folder of the run to resume.

    Raises
    ------
    UserError
        There is no run in it, or another output folder is given.
    """
    out = absolute(config.resume)
    if not (out / STORE).is_file():
        raise UserError(f"There is no run in {out} to resume; expected a folder of results.")
    if config.out and absolute(config.out) != out:
        raise UserError(f"A run resumes in its own folder, {out}: leave out --out.")
    return out


def forget_end(config: RunConfig, out: Path) -> None:
    """Remove what tells of an earlier end of a run, which is not at its end any more.

    Limits may have changed, so the configuration is rewritten. Figures stay until the new end.
    """
    for folder in MODELS:
        for path in (out / folder).glob("*.safetensors"):
            path.unlink()
    for name in (ERROR, SUMMARY):
        (out / name).unlink(missing_ok=True)
    _write_config(out, config)


def _made_anew(path: Path) -> Path:
    """Create a folder, with a number appended if it exists, for parallel starts."""
    make_folder(path.parent)
    candidate, number = path, 2
    while True:
        with os_errors_as_user_errors(f"Cannot write to {candidate}"), suppress(FileExistsError):
            candidate.mkdir()
            return candidate
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1


def model_file(out: Path, of: int | str) -> Path:
    """Return the model file of a cluster, by number, or of a client, by name."""
    # A device's name may be no valid file name.
    inner = f"clients/{quote(of, safe='')}" if isinstance(of, str) else f"clusters/{of}"
    return out / f"{inner}.safetensors"


def clusters_in(out: Path) -> list[int]:
    """Return the clusters that have a model file, ascending."""
    return sorted(int(path.stem) for path in (out / MODELS[0]).glob("*.safetensors"))


def read_model(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read the file of a model; UserError if it is damaged."""
    # Here and below: devices, which need the names of files only, have no safetensors.
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {one_line(error)}. A run that is resumed from a checkpoint "
            "writes it again."
        ) from None


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
        with suppress(OSError):
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


@contextmanager
def served_here(run: Path) -> Iterator[None]:
    """List a run among those that are served on this machine, in the user's cache."""
    note = _servers() / str(os.getpid())
    try:
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text(str(run.absolute()), encoding="utf-8")
    except OSError:
        # Its commands then need the folder.
        pass
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def the_served_run() -> Path:
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


# -----------------------------------------------------------------------------
# Versions of the clusters' models: which one devices use, and which are kept to go back to.
#
# The table is written after the file of a version, and each of them as a whole: a server that is
# killed in between finds the table as it was.
# -----------------------------------------------------------------------------


VERSIONS = "versions"
"""Folder of the kept versions, and of their table."""
_TABLE = "versions.json"
_CLUSTER, _CLIENT = "cluster/", "client/"
"""Beginnings of the arrays' names in a version's file."""

Arrays = Mapping[str, NDArray[np.generic]]
Pair = tuple[float, float]
"""A device's scores of a new version and of the one in use, on the same samples; NaN for none."""


class Stage(StrEnum):
    """What a version is used for.

    TRIAL: some devices test it. CANARY: they use it. IN_USE: all devices of the cluster do.
    HELD: it was worse than the one in use, or an operator has gone back to another. FORMER: a newer
    one has taken its place.
    """

    TRIAL = "trial"
    CANARY = "canary"
    IN_USE = "in-use"
    HELD = "held"
    FORMER = "former"

    @property
    def is_new(self) -> bool:
        """Whether it is not decided yet."""
        return self in (Stage.TRIAL, Stage.CANARY)


@dataclass(frozen=True)
class Version:
    """A version of a cluster's model.

    Attributes
    ----------
    cluster, number : int
        The cluster, and the number of the version there, from 1.
    changes : int
        Version of the cluster's model in training.
    stage : Stage
        What it is used for.
    score : float
        Its validation: mean of the devices that tested it; NaN before.
    """

    cluster: int
    number: int
    changes: int
    stage: Stage = Stage.TRIAL
    score: float = math.nan

    @property
    def key(self) -> tuple[int, int]:
        """Cluster and number."""
        return self.cluster, self.number

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.cluster}-{self.number}.safetensors"


def is_no_worse(pairs: Sequence[Pair], margin: float, of_errors: bool = False) -> bool:
    """Return whether a version may be used, by devices' scores of it and of the one in use.

    The median of their differences counts, so that no minority decides. A device that has nothing
    to compare with accepts what it can test.

    Parameters
    ----------
    pairs : Sequence[Pair]
        The scores of each device.
    margin : float
        How much worse it may be; of errors as a share of that of the one in use.
    of_errors : bool
        Lower is better.
    """
    differences = []
    for new, used in pairs:
        if not math.isfinite(new):
            differences.append(-math.inf)
        elif not math.isfinite(used):
            differences.append(0.0)
        else:
            differences.append(used * (1 + margin) - new if of_errors else new - used + margin)
    # Rounding must not hold a version that is worse by just the margin.
    return bool(differences) and statistics.median_low(differences) >= -1e-9


def kept(versions: Sequence[Version], last: int, of_errors: bool = False) -> list[Version]:
    """Return the versions of a cluster that are kept: the last ones, the best, the one in use."""
    tested = [version for version in versions if math.isfinite(version.score)]
    sign = -1 if of_errors else 1
    best = max(tested, key=lambda found: (sign * found.score, found.number), default=None)
    return [
        version
        for version in versions
        if version in versions[-last:]
        or version is best
        or version.stage.is_new
        or version.stage is Stage.IN_USE
    ]


class VersionStore:
    """The versions in the folder of a run.

    Parameters
    ----------
    run : Path
        The folder of the run.
    last : int
        Versions of each cluster that are kept at least.

    Attributes
    ----------
    run_id : str
        Tells the versions of this run from those of others.
    pinned : set[int]
        Clusters for which an operator has chosen the version in use.
    of_errors : bool
        Of scores lower is better.

    Raises
    ------
    UserError
        The table cannot be read.
    """

    def __init__(self, run: Path, last: int = 1) -> None:
        self._folder, self._last = run / VERSIONS, max(1, last)
        self.run_id, self.pinned, self.of_errors = secrets.token_hex(8), set[int](), False
        self._versions: dict[int, list[Version]] = {}
        # Clients with a model of their own in a version, where that was looked up.
        self._owners: dict[tuple[int, int], set[str]] = {}
        table = self._folder / _TABLE
        if table.is_file():
            try:
                told = json.loads(table.read_text(encoding="utf-8"))
                self.run_id, self.pinned = str(told["run_id"]), set(map(int, told["pinned"]))
                self.of_errors = bool(told["of_errors"])
                for row in told["versions"]:
                    cluster, number, changes = (
                        int(row[name]) for name in ("cluster", "number", "changes")
                    )
                    score = math.nan if row["score"] is None else float(row["score"])
                    version = Version(cluster, number, changes, Stage(row["stage"]), score)
                    self._versions.setdefault(cluster, []).append(version)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{table} cannot be read ({printable(error)}): remove {self._folder}, and "
                    "versions are kept anew."
                ) from None

    @property
    def clusters(self) -> list[int]:
        """The clusters that have versions."""
        return sorted(self._versions)

    def of(self, cluster: int) -> list[Version]:
        """Return the versions of a cluster that are kept, oldest first."""
        return list(self._versions.get(cluster, ()))

    def at(self, cluster: int, number: int) -> Version | None:
        """Return a version; None if it is not kept."""
        return next((found for found in self.of(cluster) if found.number == number), None)

    def in_use(self, cluster: int) -> Version | None:
        """Return the version that a cluster's devices use, if there is one."""
        return next((found for found in self.of(cluster) if found.stage is Stage.IN_USE), None)

    def new(self, cluster: int) -> Version | None:
        """Return the version that is being tried, if there is one."""
        return next((found for found in self.of(cluster) if found.stage.is_new), None)

    def add(self, cluster: int, changes: int, model: Arrays, own: Mapping[str, Arrays]) -> Version:
        """Keep a new version, and drop those that are not kept any more.

        Parameters
        ----------
        cluster, changes : int
            The cluster, and the version of its model in training.
        model : Arrays
            The cluster's model.
        own : Mapping[str, Arrays]
            The models of its clients that use another one.

        Raises
        ------
        OSError
            It cannot be written: nothing has changed.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        before = self.of(cluster)
        version = Version(cluster, before[-1].number + 1 if before else 1, changes)
        tensors = {_CLUSTER + name: np.ascontiguousarray(a) for name, a in model.items()}
        for client, arrays in own.items():
            start = f"{_CLIENT}{quote(client, safe='')}/"
            tensors |= {start + name: np.ascontiguousarray(a) for name, a in arrays.items()}
        path = self._folder / version.file
        try:
            with atomic_write(path) as file:
                save_file(tensors, file)
                flush(file)
            self._versions[cluster] = kept([*before, version], self._last, self.of_errors)
            self.save()
        except (OSError, SafetensorError) as error:
            self._versions[cluster] = before
            if not before:
                del self._versions[cluster]
            path.unlink(missing_ok=True)
            raise error if isinstance(error, OSError) else OSError(errno.EIO, str(error)) from error
        return version

    def change(self, version: Version, stage: Stage, score: float | None = None) -> Version:
        """Put a version at another stage; one that comes into use takes the place of another."""
        changed = replace(version, stage=stage, score=version.score if score is None else score)
        self._versions[version.cluster] = [
            changed
            if found.number == version.number
            else replace(found, stage=Stage.FORMER)
            if stage is Stage.IN_USE and found.stage is Stage.IN_USE
            else found
            for found in self.of(version.cluster)
        ]
        return changed

    def keep_only(self, clusters: Collection[int]) -> None:
        """Forget the versions of all other clusters."""
        for cluster in self._versions.keys() - set(clusters):
            del self._versions[cluster]
        self.pinned &= set(clusters)

    def has_own(self, version: Version, client: str) -> bool:
        """Return whether a version has a model for a client alone."""
        from safetensors import safe_open

        if version.key not in self._owners:
            with safe_open(self._folder / version.file, framework="numpy") as file:
                parts = (name.split("/") for name in file.keys() if name.startswith(_CLIENT))  # noqa: SIM118
                self._owners[version.key] = {unquote(owner) for _, owner, *_ in parts}
        return client in self._owners[version.key]

    def load(self, version: Version, client: str = "") -> dict[str, NDArray[np.generic]]:
        """Return the model of a version that serves a client, or the cluster's.

        Raises
        ------
        OSError, SafetensorError
            Its file cannot be read.
        """
        from safetensors import safe_open

        with safe_open(self._folder / version.file, framework="numpy") as file:
            names = list(file.keys())
            start = f"{_CLIENT}{quote(client, safe='')}/"
            if not client or not any(name.startswith(start) for name in names):
                start = _CLUSTER
            return {
                name.removeprefix(start): file.get_tensor(name)
                for name in names
                if name.startswith(start)
            }

    def save(self) -> None:
        """Write the table, then remove the files of versions that are not in it.

        Raises
        ------
        OSError
            It cannot be written.
        """
        versions = [version for found in self._versions.values() for version in found]
        rows = [asdict(version) for version in versions]
        for row in rows:
            row["score"] = row["score"] if math.isfinite(row["score"]) else None
        told = {
            "run_id": self.run_id,
            "of_errors": self.of_errors,
            "pinned": sorted(self.pinned),
            "versions": rows,
        }
        with atomic_write(self._folder / _TABLE) as file:
            file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            flush(file)
        files = {version.file for version in versions}
        for path in self._folder.glob("*.safetensors"):
            if path.name not in files:
                path.unlink(missing_ok=True)
