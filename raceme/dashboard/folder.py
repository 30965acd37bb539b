"""What a folder is that somebody wants to watch: a run, a comparison, or to become one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raceme.config import read_toml
from raceme.config.errors import UserError
from raceme.dashboard.columns import worst_share
from raceme.dashboard.source import CONFIG, SUMMARY, RunSource, as_json, new_generation
from raceme.protocol.events import ClustersChanged, Evaluated, RunEnded, UpdateApplied
from raceme.records.folder import ERROR
from raceme.records.following import StoreFollower
from raceme.records.store import FILE_NAME
from raceme.records.summary import RunSummary

_COMPARISON = "compare.json"
_RUNS = ("*/seed-*", "*/*/seed-*")
"""Where the runs of a comparison are; those of a suite of several cases are a folder deeper."""


def check_watchable(folder: Path) -> None:
    """Find out whether there is a run or a comparison in a folder.

    Raises
    ------
    UserError
        There is none.
    """
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; expected the folder of a run or of a comparison.")
    if not (folder / FILE_NAME).exists() and not is_comparison(folder):
        raise UserError(
            f"{folder} holds no run: expected the run.sqlite of `raceme run`, or the runs of "
            "`raceme compare`."
        )


def is_comparison(folder: Path) -> bool:
    """Return whether a folder has the runs of a comparison, or of several."""
    begun = (f"{runs}/{FILE_NAME}" for runs in _RUNS)
    patterns = (_COMPARISON, f"*/{_COMPARISON}", *begun)
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


class Watched:
    """A folder, and the sources of what is in it.

    Parameters
    ----------
    folder : Path
        Of a run or of a comparison.
    comparison : bool
        Which of the two; it may be empty as yet.
    """

    def __init__(self, folder: Path, comparison: bool) -> None:
        self._folder = folder
        self._top = ComparisonSource(folder) if comparison else RunSource(folder)

    def source(self, name: str) -> ComparisonSource | RunSource | None:
        """Return what tells of a run of a comparison, by its name there; of all for no name."""
        if not name:
            return self._top
        # Only what was found in the folder has a name: no way leads out of it.
        if isinstance(self._top, ComparisonSource) and name in self._top.found():
            return RunSource(self._folder / name)
        return None


class ComparisonSource:
    """The folder of a comparison as pieces of JSON: the curves and the state of all its runs.

    See :class:`raceme.dashboard.source.RunSource` for the attributes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generation = new_generation()
        self.trouble = ""
        title = {"title": folder.name, "name": folder.name}
        self.pieces = [as_json({"run": title, "comparison": {}})]
        self._runs: dict[str, _Curve] = {}

    def found(self) -> dict[str, Path]:
        """Return the folders of runs that there are now, by name."""
        return {
            path.relative_to(self.folder).as_posix(): path
            for path in sorted(path for runs in _RUNS for path in self.folder.glob(runs))
            if path.is_dir() and not path.is_symlink()
        }

    def poll(self) -> bool:
        """Read what has come to all runs; return whether there is more already."""
        more, troubles, told = False, [], {}
        for name, path in self.found().items():
            if name not in self._runs:
                self._runs[name] = _Curve(path, case=name.rpartition("/")[0].rpartition("/")[0])
            run = self._runs[name]
            try:
                more |= run.poll()
            except UserError as error:
                troubles.append(str(error))
            news = run.take()
            if news:
                told[name] = news
        self.trouble = troubles[0] if troubles else ""
        if told:
            self.pieces.append(as_json({"comparison": told}))
        return more


class _Curve:
    """What a comparison shows of one of its runs."""

    def __init__(self, folder: Path, case: str) -> None:
        self._folder, self._case = folder, case
        self._follower = StoreFollower(folder)
        self._begin()

    def _begin(self) -> None:
        self._summary = RunSummary()
        self._points: dict[str, list[Any]] = {}
        self._last: dict[str, Any] = {}
        self._anew = True

    def poll(self) -> bool:
        """Read what has come; return whether there is more already."""
        reading = self._follower.read()
        if reading.restarted:
            self._begin()
        for event in reading.events:
            # Who waits for whom and who uploaded what is for the run's own page.
            if isinstance(event, UpdateApplied | Evaluated | ClustersChanged | RunEnded):
                self._summary.observe(event)
            if isinstance(event, Evaluated):
                scores = [accuracy for _, accuracy, _ in event.per_client.values()]
                worst = worst_share(scores, event.measure)
                for name, value in (
                    ("time", event.time),
                    ("updates", event.updates),
                    ("accuracy", event.accuracy),
                    ("worst", worst),
                ):
                    self._points.setdefault(name, []).append(value if value == value else None)
        return reading.more

    def take(self) -> Mapping[str, Any]:
        """Return what is new, ready for JSON; nothing if nothing is."""
        state = self._state()
        told = {name: value for name, value in state.items() if self._last.get(name) != value}
        self._last = state
        if self._points:
            told["points"], self._points = self._points, {}
        if told and self._anew:
            self._anew, told["anew"] = False, True
        return told

    def _state(self) -> dict[str, Any]:
        method, seed = self._folder.parent.name, self._folder.name.removeprefix("seed-")
        summary = self._summary
        best = summary.best_accuracy
        return {
            "case": self._case,
            "method": method,
            "label": f"{method}, seed {seed}",
            "first": self._is_first(),
            "planned": self._planned(),
            "state": self._word(),
            "updates": summary.updates,
            "clusters": summary.clusters,
            "best": best if best is not None and best == best else None,
        }

    def _is_first(self) -> bool:
        seeds = sorted(self._folder.parent.glob("seed-*"), key=lambda path: (len(path.name), path))
        return bool(seeds) and seeds[0] == self._folder

    def _planned(self) -> Any:
        if self._last.get("planned"):
            return self._last["planned"]
        try:
            return read_toml(self._folder / CONFIG).get("max-updates")
        except UserError:
            return None

    def _word(self) -> str:
        if (self._folder / ERROR).is_file():
            return "failed"
        if (self._folder / SUMMARY).is_file():
            return "finished"
        return "ended" if self._summary.ending is not None else "running"
