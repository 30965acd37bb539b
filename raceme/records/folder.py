"""The folder of a run: creation, resumption, locking and commands."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import CONFIG, TRUST, RunConfig, write_toml
from raceme.core.errors import PlainFormatter, UserError, one_line, os_errors_as_user_errors
from raceme.core.files import ReadingError, absolute, atomic_write, read_text
from raceme.core.options import Value
from raceme.core.registry import FEATURES

log = logging.getLogger("raceme.folder")

COMPARISON = "compare.json"
"""Results of a comparison, in its folder."""
LOG = "run.log"
MLFLOW = "mlflow-run.txt"
"""Id of the MLflow run, for resumption."""
NOTE = "note.txt"
"""A user's note about the run."""
REPORT = "report.html"
SIMILARITY = "similarity.npz"
STORE = "run.sqlite"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files."""
WANDB = "wandb"
"""Folder of Weights & Biases' files."""
WANDB_RUN = "wandb-run.txt"
"""Id of the Weights & Biases run, for resumption."""
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
    NOTE,
    *FEATURES.files(),
    REPORT,
    SIMILARITY,
    STORE,
    SUMMARY,
    WANDB_RUN,
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
"""Prefixes of the names in the folders of trackers."""


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
    return _make_numbered_folder(dated_folder(name).resolve())


def dated_folder(name: str) -> Path:
    """Return the default folder for results: in ``runs``, named after the time."""
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
def removed_on_failure(out: Path) -> Iterator[None]:
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
    """Return whether a file in a subfolder of a run belongs to the run."""
    is_of_tracker = path.name.startswith(_OF_TRACKERS.get(path.parent.name, ()))
    return is_of_tracker or path.suffix == ".safetensors" or _is_partial(path)


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def recorded(config: RunConfig) -> dict[str, Value]:
    """Return the keys that the folder of a run records."""
    keys = config.with_values(out="", resume="").to_mapping()
    # Not recorded: each user gives it again.
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
    """Remove the files that an ended run has, when it is resumed.

    Limits may have changed, so the configuration is rewritten. Figures stay until the new end.
    """
    for folder in MODELS:
        for path in (out / folder).glob("*.safetensors"):
            path.unlink()
    for name in (ERROR, SUMMARY):
        (out / name).unlink(missing_ok=True)
    _write_config(out, config)


def _make_numbered_folder(path: Path) -> Path:
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
    # Imported late here and below: devices have no safetensors, and need the names of files only.
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


LONGEST_NOTE = 500
"""Letters of a note."""


def read_note(run: Path) -> str:
    """Return the note of a run on one line; empty if there is none that can be read."""
    try:
        text = read_text(run / NOTE, 1 << 16)
    except ReadingError:
        return ""
    return one_line(text)[:LONGEST_NOTE]


def write_note(run: Path, text: str) -> None:
    """Store a note with the files of a run; an empty note is removed.

    Raises
    ------
    UserError
        It cannot be written.
    """
    with os_errors_as_user_errors(f"The note of {run} cannot be written"):
        if not text.strip():
            (run / NOTE).unlink(missing_ok=True)
            return
        with atomic_write(run / NOTE) as file:
            file.write_text(one_line(text)[:LONGEST_NOTE] + "\n", encoding="utf-8")


def remove_run(run: Path, patience: float = 0.0, instead: str = "") -> None:
    """Remove the folder of a run to which no process writes.

    Parameters
    ----------
    run : Path
        The folder.
    patience : float
        Seconds to wait for a process that still writes to it.
    instead : str
        Alternative for the user if the folder has a foreign file, as the end of a sentence.

    Raises
    ------
    UserError
        It has a foreign file, a process still writes to it, or it cannot be removed.
    """
    with only_writer(run, patience), os_errors_as_user_errors(f"{run} cannot be removed"):
        strange = run.name if run.is_symlink() else foreign(run)
        if strange:
            raise UserError(
                f"{run} is not removed, because {strange} in it belongs to no run: move that"
                f"{instead}."
            )
        shutil.rmtree(run)


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
