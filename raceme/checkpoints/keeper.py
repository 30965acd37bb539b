"""When checkpoints of a run are written, what is in them, and how a run is resumed from one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from flwr.serverapp import Grid
from safetensors import SafetensorError

import raceme
from raceme.checkpoints.folder import CheckpointFolder
from raceme.config import RunConfig, Value
from raceme.config.errors import UserError
from raceme.protocol.timeline import Resumable
from raceme.records.store import FILE_NAME, RunStore

log = logging.getLogger("raceme.checkpoints")

STATE = 6
"""The format of what a checkpoint holds. It is raised by whoever changes what the state of a
strategy, a policy or the grid consists of, or means: a run then does not go on from an earlier one.
Versions with the same number read each other's checkpoints."""

_PARTS: Mapping[str, tuple[type, ...]] = {
    "config": (dict,),
    "strategy": (dict,),
    "grid": (dict, type(None)),
    "events": (int,),
    "wall-time": (int, float),
}
_FREE = frozenset(
    {
        "checkpoint-every",
        "checkpoint-seconds",
        "client-map",
        "client-models",
        "data-file",
        "data-root",
        "device",
        "device-keys",
        "download",
        "max-rounds",
        "max-time",
        "trace",
        "track",
        "max-updates",
        "out",
        "resume",
        "stop-at-target",
        "target-accuracy",
        "vectorised",
        "workers",
    }
)
"""Keys that may differ when a run is resumed: they do not change what was learned so far."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Stateful(Protocol):
    """A strategy, as far as checkpoints are concerned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a tree."""
        ...

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When a checkpoint is due. The first one, of the beginning, always is.

    Attributes
    ----------
    every : int
        Updates from one to the next; 0 stands for never.
    seconds : float
        Seconds on the wall clock from one to the next; 0 stands for never.
    """

    every: int = 0
    seconds: float = 0.0

    @property
    def is_off(self) -> bool:
        """True if there is to be none."""
        return not self.every and not self.seconds


@dataclass(frozen=True)
class Restored:
    """What a resumed run has to know beside its strategy's and its grid's state.

    Attributes
    ----------
    events : int
        Events that were in the run store.
    wall_time : float
        Seconds that the run had taken.
    path : Path
        The checkpoint.
    """

    events: int
    wall_time: float
    path: Path


class Keeper:
    """Writes checkpoints when they are due. It is asked between two steps of the strategy.

    Parameters
    ----------
    folder : CheckpointFolder
        Where to.
    schedule : Schedule
        When.
    config : RunConfig
        The resolved configuration, which a resumed run must share.
    strategy : Stateful
        The strategy.
    grid : Grid
        Saved with its clock and open messages, if it is a
        :class:`~raceme.protocol.timeline.Resumable`.
    store : RunStore
        The run store; everything observed so far is written to it first.
    updates : Callable
        Returns the number of updates applied.
    wall_time : Callable
        Returns the seconds that the run has taken.
    stop : Callable
        Returns why the run is to end now; nothing if it is not.
    resumed : bool
        The run has just been resumed from a checkpoint.

    Attributes
    ----------
    failure : str
        Why the last checkpoint that was due could not be written; empty if it was.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        schedule: Schedule,
        config: RunConfig,
        strategy: Stateful,
        grid: Grid,
        store: RunStore,
        *,
        updates: Callable[[], int],
        wall_time: Callable[[], float],
        stop: Callable[[], str],
        resumed: bool,
    ) -> None:
        self._folder, self._schedule = folder, schedule
        self._config, self._strategy, self._grid, self._store = config, strategy, grid, store
        self._updates, self._wall_time, self._stop = updates, wall_time, stop
        self._saved_updates = updates() if resumed else -1
        self._saved_at = wall_time()
        self.failure = ""

    def stop_check(self) -> str:
        """Write a checkpoint if one is due; return why the run is to end, if it is.

        A checkpoint that cannot be written does not end a run; events that cannot do, for nobody
        could tell afterwards what the run did.
        """
        reason = self._stop()
        if reason or self._is_due():
            path = self._saved()
            if reason and path is not None:
                log.info("The run can be resumed from %s", path)
        return reason or self._unrecorded()

    def _unrecorded(self) -> str:
        failure = self._store.failure
        return f"{FILE_NAME} cannot be written any more: {failure}" if failure else ""

    def _is_due(self) -> bool:
        every, seconds = self._schedule.every, self._schedule.seconds
        if self._saved_updates < 0:
            return not self._schedule.is_off
        if every and self._updates() >= self._saved_updates + every:
            return True
        return bool(seconds) and self._wall_time() >= self._saved_at + seconds

    def _saved(self) -> Path | None:
        """Write a checkpoint; None if that is not possible, and the ones before it are kept."""
        try:
            path = self._save()
        except UserError as error:
            self.failure = str(error)
            return None
        except (OSError, SafetensorError) as error:
            self.failure = " ".join(str(error).split())
            log.warning("A checkpoint could not be written: %s", self.failure)
            # The next one is tried when it is due.
            self._saved_updates, self._saved_at = self._updates(), self._wall_time()
            return None
        self.failure = ""
        return path

    def _save(self) -> Path:
        events = self._store.commit()
        tree = {
            "config": identity(self._config),
            "strategy": self._strategy.state_dict(),
            "grid": self._grid.state_dict() if isinstance(self._grid, Resumable) else None,
            "events": events,
            "wall-time": self._wall_time(),
        }
        note = {
            "raceme": raceme.__version__,
            "state": str(STATE),
            "strategy": self._config.strategy,
            "config": _hash(identity(self._config)),
            "updates": str(self._updates()),
        }
        path = self._folder.save(tree, note)
        self._saved_updates, self._saved_at = self._updates(), self._wall_time()
        log.debug("checkpoint %s after %d updates", path.name, self._saved_updates)
        return path


def restore(
    folder: CheckpointFolder, config: RunConfig, strategy: Stateful, grid: Grid
) -> Restored:
    """Bring a strategy, and a grid that can, back to where the last usable checkpoint was taken.

    Parameters
    ----------
    folder : CheckpointFolder
        Where the checkpoints are.
    config : RunConfig
        The resolved configuration.
    strategy : Stateful
        New, of the same method.
    grid : Grid
        New, of the same fleet.

    Raises
    ------
    UserError
        No checkpoint can be used.
    """
    resumable = grid if isinstance(grid, Resumable) else None

    def check(tree: Any, note: Mapping[str, str]) -> str:
        reason = _unfit(tree, note, config)
        if not reason and (tree["grid"] is None) != (resumable is None):
            reason = (
                "it is of a run on real time: resume it with `flwr run`"
                if tree["grid"] is None
                else "it is of a run of `raceme run` or `raceme serve`: resume it with that"
            )
        if reason:
            return reason
        try:
            strategy.load_state_dict(tree["strategy"])
        # A state that somebody has made up raises whatever comes first.
        except Exception as error:
            return f"its state does not fit this version of Raceme ({_described(error)})"
        writer = note.get("raceme")
        if writer != raceme.__version__:
            log.info("The checkpoint is of Raceme %s, this is %s", writer, raceme.__version__)
        return ""

    tree, path = folder.load(check)
    if resumable is not None:
        try:
            resumable.load_state_dict(tree["grid"])
        except Exception as error:
            raise UserError(
                f"The checkpoint {path} cannot be used: the state of its grid does not fit this "
                f"version of Raceme ({_described(error)})."
            ) from None
    log.info("Resuming from %s", path)
    return Restored(int(tree["events"]), float(tree["wall-time"]), path)


def resumed(start: Callable[_Given, _Result], path: Path) -> Callable[_Given, _Result]:
    """Return a strategy's start that says of what it was resumed, should it fail.

    A checkpoint that somebody has made up may fit as far as can be told, and fail later on.

    Parameters
    ----------
    start : Callable
        Starts the strategy. What it raises is logged, and becomes a UserError.
    path : Path
        The checkpoint.
    """

    def go_on(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        try:
            return start(*given, **named)
        except UserError:
            raise
        except Exception as error:
            log.exception("The run failed after it was resumed from %s", path)
            raise UserError(
                f"The run cannot go on from {path}: {_described(error)}; run.log has the details."
            ) from None

    return go_on


def can_resume(run: Path, config: RunConfig) -> bool:
    """Return whether a run's folder holds a checkpoint of this configuration that can be read here.

    Parameters
    ----------
    run : Path
        The folder of a run on virtual time.
    config : RunConfig
        The resolved configuration that the run is to be of.
    """

    def check(tree: Any, note: Mapping[str, str]) -> str:
        return _unfit(tree, note, config)

    if not (run / FILE_NAME).is_file():
        return False
    try:
        CheckpointFolder(run).load(check)
    except UserError:
        return False
    return True


def identity(config: RunConfig) -> dict[str, Value]:
    """Return the keys that a run and its continuation must share."""
    return {key: value for key, value in config.to_mapping().items() if key not in _FREE}


def _unfit(tree: Any, note: Mapping[str, str], config: RunConfig) -> str:
    """Say why a checkpoint is none of this run, or none that can be read; nothing if it is."""
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


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


def _other_config(there: Mapping[str, Value], here: Mapping[str, Value]) -> str:
    """Say how two configurations differ; nothing if they do not."""
    differences = [
        f"{key[:80]} is {repr(there.get(key))[:200]} there and {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys(), key=lambda key: ("." in key, key))
        if there.get(key) != here.get(key)
    ]
    if not differences:
        return ""
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return f"it is of another run: {'; '.join(differences[:3])}{more}"


def _hash(config: Mapping[str, Value]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
