"""Data of a page: the folder of a run, read as it grows."""

from __future__ import annotations

import base64
import json
import math
import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from raceme.core import events
from raceme.core.config import CONFIG, read_toml
from raceme.core.errors import UserError
from raceme.core.events import Event, EventHandler, Placement
from raceme.core.files import ReadingError, Stamp, check_folder, file_stamp, parse_json, read_text
from raceme.features.client_map.positions import (
    SCALE,
    PositionsReader,
    Snapshot,
    flattened,
    steps_of,
)
from raceme.records.folder import (
    COMPARISON,
    CONTROL,
    ERROR,
    NOTE,
    STORE,
    SUMMARY,
    has_writer,
    read_note,
)
from raceme.records.record import History
from raceme.records.store import StoreFollower, plain
from raceme.records.summary import RunSummary, finite
from raceme.reporting.streams import Epoch, Streams

# -----------------------------------------------------------------------------
# Events as columns of JSON, from which the page reconstructs any time of a run.
#
# Columns avoid repeated names. Clients, reasons and kinds are indices into lists that are sent
# once. Times are seconds on the run's clock.
# -----------------------------------------------------------------------------


_MOST_EPOCHS = 400
"""Share of the time so far within which changes are drawn as one in the picture of the clusters."""

Table = dict[str, list[Any]]
"""Columns by name, all of one length."""


_ROW_EVENTS: Mapping[type[Any], tuple[str, Mapping[str, str]]] = {
    events.UpdateApplied: (
        "updates",
        {
            "sent": "dispatched_at",
            "client": "client",
            "cluster": "cluster",
            "staleness": "staleness",
            "weight": "weight",
            "loss": "train_loss",
        },
    ),
    events.UpdateRejected: (
        "rejections",
        {"sent": "dispatched_at", "client": "client", "reason": "reason"},
    ),
    events.UpdateJudged: (
        "verdicts",
        {name: name for name in ("client", "verdict", "cluster", "measured", "bound", "reason")},
    ),
    events.ClaimRefused: ("claims", {"client": "client", "reason": "reason"}),
    events.VersionDecided: (
        "versions",
        {name: name for name in ("cluster", "version", "outcome", "reason")},
    ),
    events.Warned: ("warnings", {"text": "text"}),
    events.DataChanged: ("drifts", {"updates": "updates", "client": "client", "step": "step"}),
}
"""Events sent as rows: their table, and the field of each column."""


class Columns(EventHandler):
    """An observer that collects a run's events as columns.

    Parameters
    ----------
    most_scores : int
        Approximate maximum number of client accuracies; see
        :class:`raceme.reporting.dashboard.source.RunSource`.
    """

    def __init__(self, most_scores: int) -> None:
        self._most_scores = most_scores
        self._sent_scores = 0
        self._evaluations = 0
        self._numbers: dict[str, dict[str, int]] = {"clients": {}, "reasons": {}, "measures": {}}
        self._summary = RunSummary()
        self._moved: list[Placement] = []
        self._groups: dict[str, int | None] = {}
        self._history = History()
        self._streams = Streams(lambda time: time / _MOST_EPOCHS)
        self._epochs: list[Epoch] = []
        self._tables: defaultdict[str, Table] = defaultdict(lambda: defaultdict(list))
        self._ending: dict[str, Any] | None = None
        self._clusters: tuple[int, float | None] | None = None
        self._on_devices, self._sent_clock = False, False

    def observe(self, event: Event) -> None:
        """Process an event."""
        self._moved = self._summary.observe(event)
        if type(event) in _ROW_EVENTS:
            table, columns = _ROW_EVENTS[type(event)]
            told = {name: self._field(of, getattr(event, of)) for name, of in columns.items()}
            if isinstance(event, events.UpdateApplied):
                sent, cluster = event.dispatched_at, event.cluster
                told["cluster"] = int(self._history.trained(event.client, sent, cluster))
            self._add(table, event.time, **told)
        self(event)

    def on_update_applied(self, event: events.UpdateApplied) -> None:
        """Remember whether the run is on real devices, which state their own times."""
        self._on_devices = self._on_devices or event.started_at is not None

    def on_client_joined(self, event: events.ClientJoined) -> None:
        """Send that a client is online, with its number of examples and group."""
        client, group = self._client(event.client), _shown(event.group)
        self._groups[event.client] = event.group
        self._add("presence", event.time, client=client, online=1)
        self._add("greetings", event.time, client=client, examples=event.num_examples, group=group)
        if event.labels:
            self._add("labels", event.time, client=client, text=event.labels)
        self._send_clusters(event.time)

    def on_client_left(self, event: events.ClientLeft) -> None:
        """Send that a client is offline."""
        self._add("presence", event.time, client=self._client(event.client), online=0)

    def on_measured(self, event: events.Measured) -> None:
        """Add to the table of a measure; a mapping is sent as items."""
        schema, values = event.schema, dict[str, Any]()
        if schema.name not in self._numbers["measures"]:
            self._numbered("measures", schema.name, **plain(vars(schema)))
        for name, value in event.values.items():
            if isinstance(value, Mapping):
                key = self._client if schema.per == "client" else int
                values[name] = [(key(of), _shown(item)) for of, item in value.items()]
            else:
                values[name] = self._field(name, value)
        self._add(f"measure_{event.name}", event.time, updates=int(event.updates), **values)

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Send the accuracies and group results."""
        scores = event.per_client
        clusters = event.by_cluster.items()
        means = sorted((int(k), len(found), _short(fmean(found))) for k, found in clusters)
        self._add(
            "evaluations",
            event.time,
            updates=int(event.updates),
            accuracy=finite(event.accuracy),
            best=finite(self._summary.best_accuracy),
            loss=_short(event.loss),
            worst=_short(event.worst_tenth),
            answered=event.answered,
            asked=int(event.asked),
            clusters=means,
            scores=self._scores({name: score[1] for name, score in scores.items()}),
        )
        for client, group in event.groups.items():
            if group != self._groups.get(client):
                self._groups[client] = group
                self._add("groups", event.time, client=self._client(client), group=int(group))
        self._send_clusters(event.time)

    def on_clusters_changed(self, event: events.ClustersChanged) -> None:
        """Send the change and the moved clients."""
        self._add(
            "changes",
            event.time,
            updates=int(event.updates),
            kind=event.change.value,
            gone=list(map(int, event.gone)),
            made=list(map(int, event.made)),
            moved=len(self._moved),
            score=_short(event.score),
            threshold=_short(event.threshold),
        )
        for placed in self._moved:
            self._history.observe(placed)
            self._epochs += self._streams.observe(placed)
            weights = {str(k): _short(weight) for k, weight in placed.weights.items()}
            self._add(
                "placements",
                event.time,
                client=self._client(placed.client),
                cluster=-1 if placed.home is None else int(placed.home),
                weights=weights if len(weights) > 1 else None,
            )
        self._send_clusters(event.time)

    def on_run_ended(self, event: events.RunEnded) -> None:
        """Store time, updates and reason of the end for browsers."""
        self._ending = {
            "time": _seconds(event.time),
            "updates": int(event.updates),
            "reason": event.reason,
            "ending": event.ending.value,
        }

    @property
    def measure(self) -> events.Measure:
        """The measure of accuracies."""
        return self._summary.measure

    @property
    def now(self) -> float:
        """Time of the latest event in seconds."""
        return _seconds(self._summary.time)

    def take(self, is_over: bool = False) -> dict[str, Any]:
        """Return the news since the last call for JSON; none if no more events will come."""
        found: dict[str, Any] = {name: dict(table) for name, table in self._tables.items()}
        self._tables.clear()
        if self._ending is not None:
            found["ended"], self._ending = self._ending, None
        # More changes of a moment may come before the end.
        self._epochs += self._streams.complete(math.inf if is_over else self.now)
        if self._epochs:
            found["streams"] = [_stream_layout(epoch) for epoch in self._epochs]
            self._epochs = []
        if found:
            found["now"] = self.now
        if self._on_devices and not self._sent_clock:
            # Only real devices state their own times.
            self._sent_clock = True
            found["clock"] = "time"
        if "evaluations" in found:
            found["measure"] = _measure(self.measure)
        return found

    def _add(self, table: str, time: float | None, /, **values: Any) -> None:
        columns = self._tables[table]
        if time is not None:
            columns["time"].append(_seconds(time))
        for name, value in values.items():
            columns[name].append(value)

    def _numbered(self, table: str, name: str, /, **told: Any) -> int:
        """Return the index of a client, reason or measure, which is sent if new."""
        numbers = self._numbers[table]
        if name not in numbers:
            numbers[name] = len(numbers)
            self._add(table, None, **told)
        return numbers[name]

    def _client(self, name: str) -> int:
        return self._numbered("clients", name, name=name)

    def _field(self, name: str, value: Any) -> Any:
        """Return an event's field for the page."""
        if name == "client":
            return -1 if value is None else self._client(value)
        if name == "reason":
            return self._numbered("reasons", value, text=value)
        return _seconds(value) if name == "dispatched_at" else _shown(value)

    def _scores(self, accuracies: Mapping[str, float]) -> str | None:
        """Return the clients' accuracies as 32-bit floats in base64, in the order of numbers."""
        self._evaluations += 1
        stride = 1 + self._sent_scores // max(1, self._most_scores)
        if not accuracies or (self._evaluations - 1) % stride:
            return None
        numbers = [self._client(client) for client in accuracies]
        column = np.full(len(self._numbers["clients"]), np.nan, "<f4")
        column[numbers] = list(accuracies.values())
        self._sent_scores += len(column)
        return base64.b64encode(column.tobytes()).decode()

    def _send_clusters(self, time: float) -> None:
        """Send changes of the number of clusters and purity."""
        clusters = self._summary.clusters, self._summary.purity()
        if clusters != self._clusters:
            self._clusters = clusters
            self._add("numbers", time, clusters=clusters[0], purity=finite(clusters[1]))


def _stream_layout(epoch: Epoch) -> dict[str, Any]:
    """Return the places of streams for the page."""
    bands = [(int(k), _short(top), _short(height)) for k, (top, height) in epoch.bands.items()]
    flows = [tuple(_shown(value) for value in flow) for flow in epoch.flows]
    return {"time": _seconds(epoch.time), "bands": bands, "flows": flows}


def _shown(value: Any) -> Any:
    """Return a measured value for the page."""
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return _short(value) if isinstance(value, float) else value


def _measure(measure: events.Measure) -> Mapping[str, Any]:
    """Return the names of the evaluations' measure."""
    return {"label": measure.label, "title": measure.title, "isError": measure.is_error}


def _seconds(time: float) -> float:
    """Round a time to microseconds."""
    return round(float(time), 6)


def _short(value: float | None) -> float | None:
    """Round a number to six digits, enough for plots."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


# -----------------------------------------------------------------------------
# Data of a page: the folder of a run, read as it grows.
# -----------------------------------------------------------------------------


class FolderSource(ABC):
    """A watched folder as incremental pieces of JSON.

    Parameters
    ----------
    folder : Path
        The folder.

    Attributes
    ----------
    pieces : list[str]
        All of them so far.
    generation : int
        Changes when pieces are no longer valid: a restart of the run or dashboard.
    trouble : str
        Reason why the folder is unreadable now, else empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pieces: list[str] = []
        self.generation = _new_generation()
        self.trouble = ""

    @abstractmethod
    def poll(self) -> bool:
        """Read new events; return whether there are more.

        An unreadable folder is reported in `trouble` and retried.
        """

    def read_all(self) -> None:
        """Read all events.

        Raises
        ------
        UserError
            The folder cannot be read.
        """
        while self.poll():
            pass
        if self.trouble:
            raise UserError(self.trouble)

    def _send(self, piece: Mapping[str, Any]) -> None:
        if piece:
            self.pieces.append(as_json(piece))


def as_json(piece: Mapping[str, Any]) -> str:
    """Return a piece as compact JSON on one line."""
    return json.dumps(piece, separators=(",", ":"), allow_nan=False)


def _new_generation() -> int:
    """Return a unique number, for browsers with outdated pieces."""
    return secrets.randbits(48)


class RunSource(FolderSource):
    """The folder of a run, which may not have begun.

    Parameters
    ----------
    folder : Path
        Folder of `raceme run`.
    most_scores : int
        Approximate maximum number of client accuracies, by default 8 MB. Beyond it, only every
        second evaluation has them, then every third, and so on.
    most_positions : int
        Approximate maximum number of positions on the map, likewise.
    """

    def __init__(
        self, folder: Path, most_scores: int = 2_000_000, most_positions: int = 1_000_000
    ) -> None:
        super().__init__(folder)
        self._follower = StoreFollower(folder)
        self._most_scores, self._most_positions = most_scores, most_positions
        self._begin()

    def _begin(self) -> None:
        """Reset."""
        self._columns = Columns(self._most_scores)
        self._is_stopped = False
        self._is_behind = True
        self._stamps: dict[str, Stamp] = {}
        self._positions = PositionsReader(self.folder)
        self._placed: dict[str, int] = {}
        self._flat: dict[str, Sequence[float]] = {}
        self._snapshots, self._sent_positions = 0, 0

    def poll(self) -> bool:
        """Read new events; return whether there are more."""
        # Checked first, so that the end of a run is never missed.
        is_stopped = not has_writer(self.folder)
        try:
            self._send_files()
            reading = self._follower.read()
        except UserError as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        if reading.restarted:
            self.generation, self.pieces = _new_generation(), []
            self._begin()
            self._send_files()
        for event in reading.events:
            self._columns.observe(event)
        is_stopped &= CONFIG in self._stamps and not reading.more
        self._send(self._columns.take(is_stopped))
        if reading.more != self._is_behind:
            self._is_behind = reading.more
            self._send({"loading": reading.more})
        if is_stopped != self._is_stopped:
            self._is_stopped = is_stopped
            self._send({"stopped": is_stopped})
        return reading.more

    def _send_files(self) -> None:
        """Send new files besides the store."""
        if self._is_new(CONFIG):
            config = read_toml(self.folder / CONFIG)
            names = ("strategy", "dataset", "seed", "max-updates", "max-time", "target-accuracy")
            told = {name: config.get(name) for name in names}
            self._send({"run": {"name": self.folder.name, **told}})
        if self._is_new(CONTROL):
            # A server for real devices; later their updates say so.
            self._send({"clock": "time"})
        if self._is_new(SUMMARY):
            try:
                self._send({"summary": parse_json(read_text(self.folder / SUMMARY))})
            except ReadingError as error:
                raise UserError(f"{self.folder / SUMMARY} is damaged: {error}.") from None
        if self._is_new(ERROR):
            # The last line of a traceback has the error.
            lines = read_text(self.folder / ERROR).strip().splitlines()
            self._send({"failure": lines[-1] if lines else "no reason given"})
        for name, piece in ((SUMMARY, "summary"), (ERROR, "failure")):
            if name in self._stamps and not (self.folder / name).exists():
                # The run has been resumed.
                del self._stamps[name]
                self._send({piece: None})
        for snapshot in self._positions.read():
            self._snapshots += 1
            stride = 1 + self._sent_positions // self._most_positions
            if (self._snapshots - 1) % stride == 0:
                self._send_snapshot(snapshot)

    def _send_snapshot(self, snapshot: Snapshot) -> None:
        """Send client positions from a time on."""
        new = [client for client in snapshot.clients if client not in self._placed]
        self._placed |= {name: len(self._placed) + index for index, name in enumerate(new)}
        self._sent_positions += len(snapshot.clients)
        flat = flattened(snapshot.points / SCALE, snapshot.clients, self._flat)
        self._flat.update(zip(snapshot.clients, flat.tolist(), strict=True))
        frame = {
            "time": snapshot.time,
            "new": new,
            "clients": [self._placed[client] for client in snapshot.clients],
            "points": base64.b64encode(steps_of(flat).tobytes()).decode(),
        }
        self._send({"frame": frame})

    def _is_new(self, name: str) -> bool:
        stamp = file_stamp(self.folder / name)
        if stamp is None or self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        return True


# -----------------------------------------------------------------------------
# Watched folders: runs, comparisons, or future ones.
# -----------------------------------------------------------------------------


_RUNS = ("*/seed-*", "*/*/seed-*", "*/*/*/seed-*")
"""Runs of a comparison, of a suite or folder of comparisons, of a folder of suites."""


def check_watchable(folder: Path) -> None:
    """Check that a folder has a run or a comparison.

    Raises
    ------
    UserError
        There is none.
    """
    check_folder(folder, "the folder of a run, a comparison or several runs")
    if not (folder / STORE).exists() and not is_comparison(folder):
        raise UserError(
            f"{folder} holds no run: expected the run.sqlite of `raceme run`, the runs of "
            "`raceme compare`, or a folder of such runs."
        )


def is_comparison(folder: Path) -> bool:
    """Return whether a folder has several runs."""
    if (folder / STORE).is_file():
        return False
    begun = (f"{runs}/{STORE}" for runs in ("*", *_RUNS))
    patterns = (COMPARISON, f"*/{COMPARISON}", *begun)
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


class Watched:
    """A watched folder and its sources.

    Parameters
    ----------
    folder : Path
        Folder of a run or comparison.
    comparison : bool
        Whether it is a comparison, possibly still empty.
    """

    def __init__(self, folder: Path, comparison: bool) -> None:
        self._top = ComparisonSource(folder) if comparison else RunSource(folder)

    def source(self, name: str) -> FolderSource | None:
        """Return the source of a comparison's run by name, or of all runs without a name."""
        if not name:
            return self._top
        folder = self.run(name)
        return None if folder is None else RunSource(folder)

    def run(self, name: str) -> Path | None:
        """Return the folder of one of several runs by name."""
        # Names are those found in the folder, which excludes other paths.
        return self._top.found().get(name) if isinstance(self._top, ComparisonSource) else None


class ComparisonSource(FolderSource):
    """The folder of a comparison: the curves and the state of all its runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        title = {"title": folder.name, "name": folder.name}
        self._send({"run": title, "comparison": {}})
        self._runs: dict[str, _Curve] = {}
        self._begun: list[str] = []
        self._differing: list[str] = []

    def found(self) -> dict[str, Path]:
        """Return the present folders of runs, by name."""
        single = (store.parent for store in self.folder.glob(f"*/{STORE}"))
        of_comparisons = (path for runs in _RUNS for path in self.folder.glob(runs))
        return {
            path.relative_to(self.folder).as_posix(): path
            for path in sorted({*single, *of_comparisons})
            if path.is_dir() and not path.is_symlink()
        }

    def poll(self) -> bool:
        """Read new events of all runs; return whether there are more."""
        more, troubles, told = False, [], dict[str, Any]()
        found = self.found()
        for name in [name for name in self._runs if name not in found]:
            # The run was deleted: browsers remove it.
            del self._runs[name]
            told[name] = None
        for name, path in found.items():
            if name not in self._runs:
                self._runs[name] = _Curve(path, name)
            try:
                more |= self._runs[name].poll()
            except UserError as error:
                troubles.append(str(error))
        begun = [name for name, run in self._runs.items() if run.config]
        if begun != self._begun:
            self._begun = begun
            self._differing = differing_settings([self._runs[name].config for name in begun])
        for name, run in self._runs.items():
            news = run.take(self._differing)
            if news:
                told[name] = news
        self.trouble = troubles[0] if troubles else ""
        if told:
            self._send({"comparison": told})
        return more


_COLUMNS = ("strategy", "dataset", "seed")
"""Settings that always have a column."""


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ among runs on one dataset.

    Runs on different datasets are not compared, as many defaults depend on the dataset. A method's
    own key is compared among the runs that have it.
    """
    values: defaultdict[tuple[str, Any], set[str]] = defaultdict(set)
    for config in configs:
        for key, value in config.items():
            values[key, config.get("dataset")].add(repr(value))
    found = {key: None for (key, _), held in values.items() if len(held) > 1}
    return [key for key in found if key not in _COLUMNS]


_CURVE = (
    events.UpdateApplied,
    events.AnswerTaken,
    events.Evaluated,
    events.ClustersChanged,
    events.RunEnded,
)


class _Curve(EventHandler):
    """Curves and state of a run of a comparison."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._follower = StoreFollower(folder)
        self._has_writer = True
        self._noted: Stamp | None = None
        self._note = ""
        self.config: Mapping[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._summary = RunSummary()
        self._points: defaultdict[str, list[Any]] = defaultdict(list)
        self._measure: Mapping[str, Any] | None = None
        self._last: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._anew = True

    def poll(self) -> bool:
        """Read new events; return whether there are more."""
        self._has_writer = has_writer(self._folder)
        stamp = file_stamp(self._folder / NOTE)
        if stamp != self._noted:
            self._noted, self._note = stamp, read_note(self._folder)
        reading = self._follower.read()
        if reading.restarted:
            self._begin()
        self._read_config()
        for event in reading.events:
            # Measures and uploads are shown on the run's own page only.
            if type(event) in _CURVE:
                self._summary.observe(event)
            self(event)
        return reading.more

    def on_evaluated(self, event: events.Evaluated) -> None:
        """Add an evaluation to the curves of mean and worst accuracy."""
        self._measure = _measure(event.measure)
        for name, value in (
            ("time", event.time),
            ("updates", event.updates),
            ("accuracy", event.accuracy),
            ("worst", event.worst_tenth),
        ):
            self._points[name].append(value if value == value else None)

    def take(self, settings: Sequence[str]) -> Mapping[str, Any]:
        """Return the news for JSON; empty without any.

        Parameters
        ----------
        settings : Sequence[str]
            Keys to send, if the run has them.
        """
        summary, config = self._summary, self.config
        state = {
            **self._known,
            "settings": {key: _setting(config[key]) for key in settings if key in config},
            "state": self._word(),
            "updates": summary.updates,
            "clusters": summary.clusters,
            "best": finite(summary.best_accuracy),
            "measure": self._measure,
            "bytes": summary.traffic.total("down") + summary.traffic.total("up"),
            "note": self._note,
        }
        told = {name: value for name, value in state.items() if self._last.get(name) != value}
        self._last = state
        if self._points:
            told["points"], self._points = self._points, defaultdict(list)
        if told and self._anew:
            self._anew, told["anew"] = False, True
        return told

    def _read_config(self) -> None:
        """Read the configuration as soon as it exists, and take names from the run's path."""
        if self._known.get("started"):
            return
        started = 0.0
        with suppress(UserError, OSError):
            self.config = read_toml(self._folder / CONFIG)
            started = (self._folder / CONFIG).stat().st_mtime
        config = self.config
        above, _, seed = self._name.rpartition("/seed-")
        case, _, method = above.rpartition("/")
        self._known = {
            "case": case,
            "method": method or config.get("strategy", ""),
            "strategy": config.get("strategy"),
            "dataset": config.get("dataset"),
            "label": f"{method}, seed {seed}" if method else self._name,
            "seed": config.get("seed"),
            "single": not method,
            "started": round(started),
            "planned": config.get("max-updates"),
        }

    def _word(self) -> str:
        if (self._folder / ERROR).is_file():
            return "failed"
        if (self._folder / SUMMARY).is_file():
            return "finished"
        if self._summary.ending is not None:
            return "ended"
        return "running" if self._has_writer or not self._known.get("started") else "stopped"


def _setting(value: Any) -> Any:
    """Return a setting for JSON, which has no infinity."""
    return value if isinstance(value, bool | int | str) or math.isfinite(value) else str(value)
