"""Versions of the clusters' models: the ones in use on devices, and earlier ones for rollbacks.

Files are written atomically, the table after the file of a version. A server that is killed in
between finds the former table.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from raceme.core.errors import UserError, printable
from raceme.core.files import atomic_write, flush

VERSIONS = "versions"
"""Folder of the stored versions and their table."""
_TABLE = "versions.json"
_CLUSTER, _CLIENT = "cluster/", "client/"
"""Prefixes of the arrays' names in a version's file."""

Arrays = Mapping[str, NDArray[np.generic]]
Pair = tuple[float, float]
"""A device's scores of a new version and of the one in use, on the same samples; NaN for none."""


class Stage(StrEnum):
    """Use of a version.

    TRIAL: some devices test it. CANARY: they use it. IN_USE: all devices of the cluster do. HELD:
    it was worse than the one in use, or an operator rolled back to another one. FORMER: a newer
    version has replaced it.
    """

    TRIAL = "trial"
    CANARY = "canary"
    IN_USE = "in-use"
    HELD = "held"
    FORMER = "former"

    @property
    def is_new(self) -> bool:
        """Whether it is undecided."""
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
        Its present use.
    score : float
        Mean score over the devices that tested it; NaN before.
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

    The median of the differences counts, so that no minority decides. A device without a score of
    the version in use accepts every version that it can test.

    Parameters
    ----------
    pairs : Sequence[Pair]
        The scores of each device.
    margin : float
        How much worse it may be; for errors, relative to the error of the one in use.
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
    # With a tolerance, so that a version that is worse by exactly the margin is not held.
    return bool(differences) and statistics.median_low(differences) >= -1e-9


def kept(versions: Sequence[Version], last: int, of_errors: bool = False) -> list[Version]:
    """Return the versions of a cluster to keep: the last ones, the best, the one in use."""
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
        Least number of versions to keep of each cluster.

    Attributes
    ----------
    run_id : str
        Distinguishes the versions of this run from those of others.
    pinned : set[int]
        Clusters for which an operator has chosen the version in use.
    of_errors : bool
        Whether lower scores are better.

    Raises
    ------
    UserError
        The table cannot be read.
    """

    def __init__(self, run: Path, last: int = 1) -> None:
        self._folder, self._last = run / VERSIONS, max(1, last)
        self.run_id, self.pinned, self.of_errors = secrets.token_hex(8), set[int](), False
        self._versions: dict[int, list[Version]] = {}
        # Clients with a model of their own in a version, cached.
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
        """Return the stored versions of a cluster, oldest first."""
        return list(self._versions.get(cluster, ()))

    def at(self, cluster: int, number: int) -> Version | None:
        """Return a version; None if it is not stored."""
        return next((found for found in self.of(cluster) if found.number == number), None)

    def in_use(self, cluster: int) -> Version | None:
        """Return the version in use on a cluster's devices, if any."""
        return next((found for found in self.of(cluster) if found.stage is Stage.IN_USE), None)

    def new(self, cluster: int) -> Version | None:
        """Return the undecided version, if any."""
        return next((found for found in self.of(cluster) if found.stage.is_new), None)

    def add(self, cluster: int, changes: int, model: Arrays, own: Mapping[str, Arrays]) -> Version:
        """Store a new version, and drop versions that need not be kept.

        Parameters
        ----------
        cluster, changes : int
            The cluster, and the version of its model in training.
        model : Arrays
            The cluster's model.
        own : Mapping[str, Arrays]
            Models of clients that use another model than the cluster's.

        Raises
        ------
        OSError
            It cannot be written; nothing has changed.
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
        """Change the stage of a version; a version that comes into use replaces the former one."""
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
        """Return whether a version has a model of a client's own."""
        from safetensors import safe_open

        if version.key not in self._owners:
            with safe_open(self._folder / version.file, framework="numpy") as file:
                parts = (name.split("/") for name in file.keys() if name.startswith(_CLIENT))  # noqa: SIM118
                self._owners[version.key] = {unquote(owner) for _, owner, *_ in parts}
        return client in self._owners[version.key]

    def load(self, version: Version, client: str = "") -> dict[str, NDArray[np.generic]]:
        """Return a version's model for a client, by default the cluster's.

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
        """Write the table, then remove the files of versions that it does not list.

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
