"""Checkpoints of a run: schedule, content, and resumption."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import raceme
from raceme.core.config import (
    CONFIG,
    RunConfig,
    check_trusted,
    code_of,
    general_keys,
    imported_by,
    keys_of,
    read_toml,
)
from raceme.core.errors import UserError, one_line
from raceme.core.events import Ending, Event, RunEnded
from raceme.core.files import (
    ReadingError,
    atomic_write,
    check_memory,
    check_regular,
    flush,
    parse_json,
)
from raceme.core.messages import functions_in
from raceme.core.options import Value
from raceme.core.progress import Progress
from raceme.core.registry import users_line
from raceme.core.strategy import Method
from raceme.core.timeline import Resumable, timeline_of
from raceme.records.folder import CHECKPOINTS, STORE
from raceme.records.store import RunStore
from raceme.simulation.virtual_grid import saved_messages

# -----------------------------------------------------------------------------
# Trees of plain values and arrays in one safetensors file, written atomically.
#
# A tree consists of dicts with text keys, lists, numbers, text, bytes, booleans, None and numpy
# arrays. Arrays and bytes are tensors of the file, everything else is JSON in one more tensor.
# Nothing is unpickled: a malicious file can at most be refused.
# -----------------------------------------------------------------------------


FORMAT = "raceme-checkpoint-1"

_TREE = "tree"
"""Name of the tensor with the JSON; arrays are named by their number."""
_HASH = "sha256"
_MARK = "$"
"""Prefix of keys that stand for a tensor; doubled for keys of the tree that begin with it."""
_ARRAY, _BYTES = "$array", "$bytes"

_UNREADABLE = (OSError, ReadingError, SafetensorError, ValueError, TypeError, KeyError)

_Array = NDArray[np.generic]


class DamagedError(Exception):
    """A file is damaged; the message says how."""


def write_tree(path: Path, tree: Any, note: Mapping[str, str]) -> None:
    """Write a tree durably and atomically.

    An object that occurs several times is written once.

    Parameters
    ----------
    path : Path
        The file; its folder is created if necessary.
    tree : Any
        The tree of plain values and arrays.
    note : Mapping[str, str]
        Stored in the header of the file.

    Raises
    ------
    TypeError
        The tree holds an unsupported type.
    """
    packer = _Packer()
    text = json.dumps(packer.pack(tree)).encode("ascii")
    tensors = {_TREE: np.frombuffer(text, np.uint8), **packer.tensors}
    metadata = {**note, "format": FORMAT}
    metadata[_HASH] = _digest(metadata, tensors)
    with atomic_write(path) as file:
        save_file(tensors, file, metadata=metadata)
        flush(file)
    flush(path.parent)


def read_tree(path: Path) -> tuple[Any, dict[str, str]]:
    """Read a tree and its note as written by :func:`write_tree`.

    Raises
    ------
    DamagedError
        The file is damaged or has another origin.
    """
    try:
        check_regular(path)
        check_memory(path.stat().st_size, f"The checkpoint {path}")
        # The reader has checked the header's sizes against the file.
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except _UNREADABLE as error:
        raise DamagedError(one_line(error) or type(error).__name__) from None
    if metadata.get("format") != FORMAT:
        raise DamagedError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.pop(_HASH, None) != _digest(metadata, tensors):
        raise DamagedError("its content does not match its checksum")
    del metadata["format"]
    try:
        return _unpack(parse_json(tensors[_TREE].tobytes()), tensors, {}), metadata
    # The hash detects accidental damage only; a forged file may have a valid one.
    except (ReadingError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"its tree cannot be read: {error}") from None


class _Packer:
    """Extracts arrays and bytes from a tree.

    Attributes
    ----------
    tensors : dict[str, ndarray]
        The extracted arrays by number.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, _Array] = {}
        self._numbers: dict[object, int] = {}

    def pack(self, value: Any) -> Any:
        """Return a tree that JSON can hold."""
        if isinstance(value, dict):
            return {_escaped(key): self.pack(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.pack(inner) for inner in value]
        if isinstance(value, np.ndarray):
            return {_ARRAY: self._number(_identity(value), value)}
        if isinstance(value, bytes):
            return {_BYTES: self._number(id(value), np.frombuffer(value, np.uint8))}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"cannot keep a {type(value).__name__} in a checkpoint")

    def _number(self, identity: object, array: _Array) -> int:
        if identity not in self._numbers:
            self._numbers[identity] = len(self.tensors)
            # `ascontiguousarray` turns zero dimensions into one.
            plain = np.ascontiguousarray(array).reshape(array.shape)
            self.tensors[str(len(self.tensors))] = plain
        return self._numbers[identity]


def _identity(array: _Array) -> object:
    """Return a key that is equal for identical views of the same memory."""
    address = array.__array_interface__["data"][0]
    return address, array.shape, array.strides, array.dtype.str


def _escaped(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"cannot keep a dict with the key {key!r} in a checkpoint")
    return _MARK + key if key.startswith(_MARK) else key


def _unpack(value: Any, tensors: Mapping[str, _Array], known: dict[int, bytes]) -> Any:
    """Restore arrays and bytes; shared objects are shared again."""
    if isinstance(value, list):
        return [_unpack(inner, tensors, known) for inner in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return tensors[str(value[_ARRAY])]
    if _BYTES in value:
        number = value[_BYTES]
        if number not in known:
            known[number] = tensors[str(number)].tobytes()
        return known[number]
    return {key.removeprefix(_MARK): _unpack(inner, tensors, known) for key, inner in value.items()}


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, _Array]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode("ascii"))
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode("ascii"))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# A run's checkpoints: numbered files, the latest two of which are kept.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.checkpoints")

_KEPT = 2
_SUFFIX = ".safetensors"

Check = Callable[[Any, Mapping[str, str]], str]
"""Returns why a checkpoint cannot be used, or an empty text."""


class CheckpointFolder:
    """The checkpoints of one run.

    Parameters
    ----------
    run : Path
        The run's folder, with the checkpoints in ``checkpoint``.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / CHECKPOINTS
        self._good: list[int] = []

    def save(self, tree: Any, note: Mapping[str, str]) -> Path:
        """Write the next checkpoint and drop all but the last two."""
        number = max(self._numbers(), default=0) + 1
        path = self._file(number)
        write_tree(path, tree, note)
        self._good = [*self._good, number][-_KEPT:]
        for old in self._numbers():
            if old not in self._good:
                # It may be a foreign file or folder, which is kept.
                with suppress(OSError):
                    self._file(old).unlink(missing_ok=True)
        return path

    def load(self, check: Check) -> tuple[Any, Path]:
        """Read the newest usable checkpoint; log if a newer one is unusable.

        Parameters
        ----------
        check : Check
            Refuses unsuitable checkpoints.

        Raises
        ------
        UserError
            No checkpoint is usable.
        """
        refused: list[str] = []
        for number in reversed(self._numbers()):
            path = self._file(number)
            try:
                tree, note = read_tree(path)
                reason = check(tree, note)
            except (DamagedError, UserError) as error:
                reason = f"it is damaged ({error})"
            if not reason:
                if refused:
                    log.warning("%s Using the previous one: %s.", " ".join(refused), path.name)
                self._good = [number]
                return tree, path
            refused.append(f"The checkpoint {path} cannot be used: {reason}.")
        if refused:
            raise UserError(f"{' '.join(refused)} There is no other to resume from.")
        raise UserError(
            f"There is no checkpoint in {self.path}: resume from the folder of a run that was "
            "started with checkpoint-every or checkpoint-seconds, or start anew."
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint, usable or not."""
        return not self._numbers()

    def _numbers(self) -> list[int]:
        """Return the numbers of the existing checkpoints, in order."""
        stems = [path.stem for path in self.path.glob(f"*{_SUFFIX}")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _file(self, number: int) -> Path:
        return self.path / f"{number:08d}{_SUFFIX}"


# -----------------------------------------------------------------------------
# Checkpoints of a run: schedule, content, and resumption.
# -----------------------------------------------------------------------------


STATE = 26
"""Format number of the state. It is raised when the content or meaning of the state of a strategy,
policy or grid changes, and older checkpoints are then refused."""

_PARTS: Mapping[str, tuple[type, ...]] = {
    "config": (dict,),
    "strategy": (dict,),
    "grid": (dict, type(None)),
    "events": (int,),
    "wall-time": (int, float),
}
CONDITIONS = (
    "data-file",
    *(key for key, item in general_keys().items() if not item.metadata["affects_results"]),
)
"""Keys that do not change results. Locations of data are among them, so that a run can move to
another machine."""

_FREE = (
    *CONDITIONS,
    "device",
    "device-keys",
    "labels",
    "max-compute",
    "max-rounds",
    "max-time",
    "max-updates",
    "out",
    "precision",
    "resume",
    "stop-at-target",
    "target-accuracy",
    "vectorised",
)
"""Keys that may differ on resumption, because they do not affect the run up to the checkpoint."""

_LEAST_SECONDS, _COSTS = 10.0, 50.0
"""Default interval of checkpoints on real devices: at least so many seconds, and so many times the
duration of the last one, so that checkpoints take at most 2 % of the time."""


@dataclass(frozen=True)
class Restored:
    """State of a resumed run besides that of its strategy and grid.

    Attributes
    ----------
    events : int
        Number of events in the run store.
    wall_time : float
        Wall time of the run so far in seconds.
    path : Path or None
        The checkpoint from which the run resumes; None if it starts again.
    """

    events: int
    wall_time: float
    path: Path | None


class Checkpointer:
    """Writes checkpoints when due, between two steps of the strategy.

    They are due after ``checkpoint-every`` updates and ``checkpoint-seconds`` of wall time; by
    default on real devices only, at a cost of at most 2 % of the time. One at the start is always
    written, and on real devices one at the end, since a run that is extended cannot repeat updates.

    Parameters
    ----------
    folder : CheckpointFolder
        The checkpoints of the run.
    config : RunConfig
        The resolved configuration, which a resumed run must match.
    strategy : Method
        The strategy whose state is saved.
    grid : Grid
        Saved with clock and open messages if it is a
        :class:`~raceme.core.timeline.Resumable`.
    store : RunStore
        The run store, which is flushed first.
    wall_time : Callable
        Returns the wall time of the run in seconds.
    stop : Callable
        Returns the reason if the run is to end now, else an empty text.
    resumed : bool
        Whether the run has just been resumed.

    Attributes
    ----------
    failure : str
        Reason if the last due checkpoint could not be written, else empty.
    code : str
        Digest of the users' modules that the run names: :func:`raceme.core.config.code_of`.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        config: RunConfig,
        strategy: Method,
        grid: Grid,
        store: RunStore,
        *,
        wall_time: Callable[[], float],
        stop: Callable[[], str],
        resumed: bool,
    ) -> None:
        self._folder, self._config, self._store = folder, config, store
        self._strategy, self._progress, self._grid = strategy, strategy.progress, grid
        self._wall_time, self._stop = wall_time, stop
        self._every, seconds = config.checkpoint_every, config.checkpoint_seconds
        self._follows_cost = seconds is None and not timeline_of(grid).is_virtual
        self._seconds = _LEAST_SECONDS if self._follows_cost else seconds or 0.0
        self._saved_updates = self._progress.updates if resumed else -1
        self._saved_at = wall_time()
        self.failure = ""
        # Computed at the start, when the modules are imported.
        self.code = code_of(config.to_mapping())

    def stop_check(self) -> str:
        """Write a checkpoint if one is due; return the reason if the run is to end.

        An unwritable checkpoint does not end a run. Unwritable events do, as the run could not be
        analysed.
        """
        reason = self._stop()
        if reason or self._is_due():
            path = self._saved()
            if reason and path is not None:
                # The checkpoint's grandparent is the run's folder.
                virtual = timeline_of(self._grid).is_virtual
                run = path.parent.parent
                command = f"raceme run --resume {run}"
                if imported_by(self._config.to_mapping()):
                    command += f" --trust {run}"
                log.info("To resume: %s", command if virtual else "the same command again")
        failure = self._store.failure
        return reason or (f"{STORE} can no longer be written: {failure}" if failure else "")

    def on_event(self, event: Event) -> None:
        """Write a checkpoint when a run ends by itself, before its store has the end.

        An interrupted run has just written one.
        """
        has_ended = isinstance(event, RunEnded) and event.ending is not Ending.INTERRUPTED
        if has_ended and self._progress.updates > self._saved_updates >= 0:
            self._saved()

    def _is_due(self) -> bool:
        if self._saved_updates < 0:
            return bool(self._every or self._seconds)
        if self._every and self._progress.updates >= self._saved_updates + self._every:
            return True
        return bool(self._seconds) and self._wall_time() >= self._saved_at + self._seconds

    def _saved(self) -> Path | None:
        """Write a checkpoint; on failure return None and keep the earlier ones."""
        try:
            path = self._save()
        except (OSError, SafetensorError, UserError) as error:
            self.failure = one_line(error)
            # A failed store ends the run and is logged by itself.
            if not self._store.failure:
                log.warning("A checkpoint could not be written: %s", self.failure)
            # Try again when the next one is due.
            self._saved_updates, self._saved_at = self._progress.updates, self._wall_time()
            return None
        self.failure = ""
        return path

    def _save(self) -> Path:
        begun = self._wall_time()
        events = self._store.commit()
        config = identity(self._config)
        tree = {
            "config": config,
            "strategy": self._strategy.state_dict(),
            "grid": self._grid.state_dict() if isinstance(self._grid, Resumable) else None,
            "events": events,
            "wall-time": self._wall_time(),
        }
        note = {
            "raceme": raceme.__version__,
            "state": str(STATE),
            "strategy": self._config.strategy,
            "command": _command(self._grid),
            "code": self.code,
            "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
            "updates": str(self._progress.updates),
        }
        path = self._folder.save(tree, note)
        self._saved_updates, self._saved_at = self._progress.updates, self._wall_time()
        if self._follows_cost:
            self._seconds = max(_LEAST_SECONDS, _COSTS * (self._saved_at - begun))
        log.debug("checkpoint %s after %d updates", path.name, self._saved_updates)
        return path


def _command(grid: Grid) -> str:
    """Return the command whose runs have this kind of grid."""
    if timeline_of(grid).is_virtual:
        return "raceme run"
    return "raceme serve" if isinstance(grid, Resumable) else "flwr run"


def restore(folder: CheckpointFolder, config: RunConfig, strategy: Method, grid: Grid) -> Restored:
    """Restore a strategy, and a resumable grid, from the last usable checkpoint.

    Without any checkpoint, a run on virtual time starts again.

    Parameters
    ----------
    folder : CheckpointFolder
        The checkpoints of the run.
    config : RunConfig
        Configuration of the resumed run, with every key resolved.
    strategy : Method
        A new strategy of the same method.
    grid : Grid
        A new grid of the same fleet.

    Raises
    ------
    UserError
        No checkpoint can be used.
    """
    if timeline_of(grid).is_virtual and folder.is_empty:
        run = folder.path.parent
        before = RunConfig.from_mapping(read_toml(run / CONFIG))
        if reason := _other_config(identity(before), identity(config)):
            raise UserError(f"The run in {run} cannot be resumed: {reason}.")
        log.info("There is no checkpoint in %s: the run starts again, with the same results", run)
        return Restored(0, 0.0, None)
    resumable, here = grid if isinstance(grid, Resumable) else None, _command(grid)

    def check(tree: Any, note: Mapping[str, str]) -> str:
        reason = _unfit(tree, note, config)
        if not reason and (command := note.get("command", here)) != here:
            reason = f"it belongs to a run of `{command}`: resume it with that command"
        if reason:
            return reason
        try:
            strategy.load_state_dict(tree["strategy"])
        # A forged state can raise any exception.
        except Exception as error:
            return f"its state does not fit this version of Raceme ({_described(error)})"
        if changed := _other_code(note, config):
            log.warning("The run goes on, but %s.", changed)
        writer = note.get("raceme")
        if writer != raceme.__version__:
            log.info("The checkpoint is of Raceme %s, this is %s", writer, raceme.__version__)
        return ""

    tree, path = folder.load(check)
    if resumable is not None:
        try:
            # On real devices their owners decide.
            if timeline_of(grid).is_virtual:
                check_work(saved_messages(tree["grid"]), path, config)
            resumable.load_state_dict(tree["grid"])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"The checkpoint {path} cannot be used: the state of its grid does not fit this "
                f"version of Raceme ({_described(error)})."
            ) from None
    log.info("Resuming from %s", path)
    return Restored(int(tree["events"]), float(tree["wall-time"]), path)


def check_work(messages: Iterable[Message], path: Path, config: RunConfig) -> None:
    """Check that the functions in open messages are of the run's own modules, or trusted.

    Parameters
    ----------
    messages : Iterable[Message]
        The messages.
    path : Path
        The checkpoint.
    config : RunConfig
        Configuration of the run that is resumed.

    Raises
    ------
    UserError
        A function is neither.
    """
    own = {name.partition(":")[0] for name in imported_by(config.to_mapping()).values()}
    found = {name for message in messages for name in functions_in(message)}
    others = sorted(name for name in found if name.partition(":")[0] not in own)
    check_trusted(path, [("work", name) for name in others], config.trust, path.parents[1])


@contextmanager
def resuming(path: Path, progress: Progress) -> Iterator[None]:
    """Log an error before the first update, and raise a UserError that names the checkpoint.

    A forged checkpoint may pass all checks and fail later. Errors of a user's module are unchanged.

    Parameters
    ----------
    path : Path
        The checkpoint from which the run resumes.
    progress : Progress
        Progress of the resumed strategy.
    """
    updates = progress.updates
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if progress.updates > updates or users_line(error):
            raise
        log.exception("The run failed after it was resumed from %s", path)
        raise UserError(
            f"The run cannot be resumed from {path}: {_described(error)}; run.log has the details."
        ) from None


def read_checkpoint(out: Path, config: RunConfig) -> tuple[Any, Path]:
    """Return the state from which a run would be resumed, and its file.

    Raises
    ------
    UserError
        No checkpoint can be used.
    """
    return CheckpointFolder(out).load(lambda tree, note: _unfit(tree, note, config))


def can_resume(run: Path, config: RunConfig) -> bool:
    """Return whether a run's folder holds a usable checkpoint of this configuration.

    Parameters
    ----------
    run : Path
        Folder of a run on virtual time.
    config : RunConfig
        The resolved configuration to compare with.
    """
    if not (run / STORE).is_file():
        return False
    try:
        CheckpointFolder(run).load(
            lambda tree, note: _unfit(tree, note, config) or _other_code(note, config)
        )
    except UserError:
        return False
    return True


def identity(config: RunConfig) -> dict[str, Value]:
    """Return the keys that a run and its resumption must share."""
    return {key: value for key, value in config.to_mapping().items() if key not in _FREE}


def _unfit(tree: Any, note: Mapping[str, str], config: RunConfig) -> str:
    """Return why a checkpoint does not belong to this run or cannot be read, or an empty text."""
    stated = note.get("state")
    if stated != str(STATE):
        return (
            f"its state has {f'format {stated}' if stated else 'no format'} and is of Raceme "
            f"{note.get('raceme')}; Raceme {raceme.__version__} reads format {STATE}: resume it "
            "with the version that wrote it"
        )
    if not isinstance(tree, dict) or tree.keys() != _PARTS.keys():
        return "it is damaged (its parts are not those of a checkpoint)"
    for name, kinds in _PARTS.items():
        value = tree[name]
        numeric = isinstance(value, int | float)
        if type(value) not in kinds or (numeric and not 0 <= value < 2**63):
            return f"it is damaged ({name} is {str(value)[:40]})"
    return _other_config(tree["config"], identity(config))


def _other_code(note: Mapping[str, str], config: RunConfig) -> str:
    """Return that users' modules have changed since a checkpoint, or an empty text."""
    code = code_of(config.to_mapping())
    if note.get("code", code) == code:
        return ""
    return "the source of a module that the run names, or of one beside it, has changed since"


def _described(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


def _other_config(there: Mapping[str, Value], here: Mapping[str, Value]) -> str:
    """Return how two configurations differ, or an empty text."""
    # A key that did not exist when the checkpoint was written had its default.
    known = keys_of(here)
    there = {**{key: known[key].default for key in here.keys() & known.keys()}, **there}
    differences = [
        f"{key[:80]} is {repr(there.get(key))[:200]} there and {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys(), key=lambda key: ("." in key, key))
        if there.get(key) != here.get(key)
    ]
    if not differences:
        return ""
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return f"it belongs to another run: {'; '.join(differences[:3])}{more}"
