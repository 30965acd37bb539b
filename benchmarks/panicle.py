"""Run Panicle on a list of cases: time to correct clusters, accuracy, and robustness.

    python3 benchmarks/panicle.py small-fleets iid --seeds 0,1,2 --json panicle.json
    python3 benchmarks/panicle.py mnist --data-root data --methods panicle,casa

Every case is run with each method and seed; a row is the mean over the seeds, with the worst in
brackets. `--set panicle.forward=0` ablates a part, `--updates` shortens a case. A case that
needs files of a dataset is skipped where there are none.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.records.record import RunRecord
from raceme.runs.experiment import simulate
from raceme.strategies.panicle import strategy as panicle

TARGET = 0.95
MNIST = {"dataset": "mnist", "clients": 100, "partition": "label-groups"}
CIFAR = {**MNIST, "dataset": "cifar10"}


@dataclass(frozen=True)
class Case:
    """Settings and length of a run.

    Attributes
    ----------
    settings : dict
        Configuration keys.
    updates : int
        Client updates.
    every : int
        Updates from one evaluation to the next.
    methods : str
        Methods to run without `--methods`.
    late : tuple[int, ...]
        Clients that join during the run, one after another.
    unknown : bool
        Whether a whole true group and one client of another group join late instead.
    wrong : bool
        Whether the run starts with clients in four wrong clusters.
    """

    settings: dict[str, Any]
    updates: int
    every: int = 10
    methods: str = "panicle"
    late: tuple[int, ...] = ()
    unknown: bool = False
    wrong: bool = False


ONE_MODEL = "panicle,fedasync,fedbuff"
CASES = {
    **{f"small-{n}": Case({"clients": n}, 200, methods="panicle,casa") for n in (4, 6, 8)},
    "digits": Case({"clients": 40}, 600, 20, "panicle,casa"),
    "iid": Case({"clients": 10, "partition": "iid"}, 300, methods=ONE_MODEL),
    "iid-40": Case({"clients": 40, "partition": "iid"}, 1000, 50, ONE_MODEL),
    **{
        f"null-{n}": Case({"clients": n, "partition": "iid", "own-model": False}, 3 * n, 3 * n)
        for n in (4, 6, 8, 10, 20, 40, 60, 100)
    },
    "dirichlet": Case({"clients": 20, "partition": "dirichlet"}, 600, 20, ONE_MODEL),
    "rotation": Case({"clients": 20, "partition": "rotation-groups"}, 600, 20, "panicle,casa"),
    "wrong-split": Case({"clients": 20}, 400, 10, wrong=True),
    "swap-all": Case(
        {"clients": 20, "drift": "swap-all", "drift-at": "400 updates", "swap-chance": 1.0},
        800,
    ),
    "newcomers": Case({"clients": 20}, 600, 10, late=tuple(range(15, 20))),
    "unknown-group": Case({"clients": 20}, 600, 10, unknown=True),
    "scaled": Case({"clients": 20, "attack": "scale"}, 400, 20),
    "flipped": Case({"clients": 20, "attack": "sign-flip"}, 400, 20),
    "labels-flipped": Case({"clients": 20, "attack": "label-flip"}, 400, 20),
    "not-attacked": Case({"clients": 20}, 400, 20),
    "mnist": Case(MNIST, 600, 20, "panicle,casa"),
    "mnist-10000": Case(MNIST, 10_000, 500, "panicle,casa,ifca-async"),
    "mnist-50000": Case(MNIST, 50_000, 1000),
    "cifar10": Case(CIFAR, 10_000, 500, "panicle,standalone,casa"),
}
GROUPS = {"small-fleets": ("small-4", "small-6", "small-8")}
GROUPS["null"] = tuple(name for name in CASES if name.startswith("null-"))
GROUPS["attackers"] = ("not-attacked", "scaled", "flipped", "labels-flipped")


@dataclass
class Watch:
    """Tracks when all clients are in pure clusters for good, and newcomers' placements."""

    groups: dict[str, int | None] = field(default_factory=dict)
    homes: dict[str, int | None] = field(default_factory=dict)
    pure_since: float | None = None
    pure_updates: int = 0
    most: int = 1
    uploads: Counter[str] = field(default_factory=Counter)
    late: tuple[str, ...] = ()
    right: dict[str, int] = field(default_factory=dict)

    def __call__(self, event: events.Event) -> None:
        """Take an event in."""
        if isinstance(event, events.ClientJoined):
            self.groups[event.client] = event.group
        elif isinstance(event, events.UpdateApplied):
            self.uploads[event.client] += 1
            for client in self.late:
                if client not in self.right and self._is_right(client):
                    self.right[client] = self.uploads[client]
        elif isinstance(event, events.ClustersChanged):
            for client, weights in event.memberships.items():
                self.homes[client] = max(weights, key=weights.__getitem__) if weights else None
            self.most = max(self.most, len(set(self.homes.values())))
            self._look(event)

    def _look(self, event: events.ClustersChanged) -> None:
        placed = all(self.homes.get(client) is not None for client in self.groups)
        pairs = {(self.homes.get(client), group) for client, group in self.groups.items()}
        if placed and len({home for home, _ in pairs}) == len(pairs):
            if self.pure_since is None:
                self.pure_since, self.pure_updates = event.time, event.updates
        else:
            self.pure_since = None

    def _is_right(self, client: str) -> bool:
        """Whether all clients of a client's cluster are of its true group."""
        home = self.homes.get(client)
        if home is None or client not in self.groups:
            return False
        own = {self.groups[other] for other, where in self.homes.items() if where == home}
        return own == {self.groups[client]}


def fleet(late: tuple[int, ...], folder: Path) -> Path:
    """Write a fleet in which some clients join late, one every 2.5 s, or about 50 updates."""
    groups = [
        f"[[group]]\nclients = [{client}]\nonline = [[{8 + 2.5 * place}, 1e9]]\n"
        for place, client in enumerate(late)
    ]
    path = folder / "fleet.toml"
    head = 'description = "some come later"\n[device]\nseconds-per-round = 1.0\njitter = 0.1\n'
    path.write_text(head + "".join(groups))
    return path


def a_whole_group(settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the clients of the smallest true group, and one of another, by number."""
    groups: dict[int, int | None] = {}

    def observe(event: events.Event) -> None:
        if isinstance(event, events.ClientJoined):
            groups[int(event.client.rsplit("-", 1)[1])] = event.group

    with TemporaryDirectory() as folder:
        shortest = {**settings, "max-updates": 1, "out": str(Path(folder) / "run")}
        simulate(RunConfig.from_mapping(shortest), observe)
    group = min(Counter(groups.values()).items(), key=lambda item: (item[1], item[0]))[0]
    other = next(client for client in sorted(groups) if groups[client] != group)
    return (*sorted(client for client in groups if groups[client] == group), other)


@contextmanager
def wrongly_split(is_on: bool) -> Iterator[None]:
    """Start the run with clients in four clusters in turn, regardless of their data."""
    plain = panicle.Panicle

    class Wrong(plain):  # type: ignore[misc, valid-type]
        """Panicle that starts with four clusters of clients that do not belong together."""

        def initialize(self, vector: Any) -> None:
            super().initialize(vector)
            for _ in range(3):
                self.clusters.found(self.models[0].copy())

        def on_join(self, client: Any) -> None:
            super().on_join(client)
            turn = len(self.clusters.members) % 4
            self.clusters.assign(client.client_id, turn)

    Wrong.__name__ = plain.__name__
    panicle.Panicle = Wrong if is_on else plain  # type: ignore[misc]
    try:
        yield
    finally:
        panicle.Panicle = plain  # type: ignore[misc]


def measure(name: str, method: str, seed: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Run a case once."""
    case = CASES[name]
    settings = {"dataset": "digits", "devices": "slow30x5", "seed": seed, "strategy": method}
    settings |= {"max-updates": case.updates, "eval-every": case.every, "workers": "0"}
    settings |= {"stop-at-target": False, **case.settings}
    settings |= {k: v for k, v in keys.items() if "." not in k or k.startswith(f"{method}.")}
    coming = a_whole_group(settings) if case.unknown else case.late
    late = tuple(f"client-{client}" for client in coming)
    watch, seen = Watch(late=late), list[events.Event]()

    def observe(event: events.Event) -> None:
        watch(event)
        seen.append(event)

    with TemporaryDirectory() as folder, wrongly_split(case.wrong and method == "panicle"):
        if coming:
            settings["devices"] = str(fleet(coming, Path(folder)))
        config = RunConfig.from_mapping({**settings, "out": str(Path(folder) / "run")})
        summary = simulate(config, observe).summary
    tests = RunRecord.of(seen).evaluations
    reached = np.flatnonzero(np.asarray(tests.accuracy) >= TARGET)
    last = max(1, len(tests.accuracy) // 5)
    row: dict[str, Any] = {"case": name, "method": method, "seed": seed}
    row |= {"accuracy": float(tests.accuracy[-1]), "late": float(np.mean(tests.accuracy[-last:]))}
    row["target_at"] = float(tests.time[reached[0]]) if len(reached) else None
    row |= {"pure_at": watch.pure_since, "pure_updates": watch.pure_updates}
    row |= {"clusters": summary["clusters"], "most_clusters": watch.most}
    row["newcomers_right_at"] = {client: watch.right.get(client) for client in late}
    row["curve"] = [
        (int(u), round(float(t), 2), round(float(a), 4))
        for u, t, a in zip(tests.updates, tests.time, tests.accuracy, strict=True)
    ]
    return row


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """Return what the table shows of a case and a method."""
    return [
        _of(rows, "late", min, lambda value: f"{100 * value:.2f}"),
        _of(rows, "target_at", max, lambda value: f"{value:.1f}"),
        _of(rows, "pure_at", max, lambda value: f"{value:.2f}"),
        _of(rows, "clusters", max, lambda value: f"{value:g}"),
    ]


def _of(
    rows: list[dict[str, Any]],
    name: str,
    worst: Callable[[list[float]], float],
    show: Callable[[float], str],
) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return "never"
    missing = len(rows) - len(values)
    never = f", never {missing}×" if missing else ""
    return f"{show(statistics.mean(values))} ({show(worst(values))}{never})"


def main() -> None:
    """Run the cases, and print a row for each case and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", help=", ".join([*CASES, *GROUPS]))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="", help="methods instead of the case's own")
    parser.add_argument("--updates", default="", help="client updates, instead of the case's own")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--set", action="append", default=[], help="e.g. panicle.forward=0")
    parser.add_argument("--json", type=Path, help="a file to which results are added")
    arguments = parser.parse_args()
    keys = dict(item.split("=", 1) for item in arguments.set) | {"data-root": arguments.data_root}
    keys |= {"max-updates": arguments.updates} if arguments.updates else {}
    table = Table("case", "method", "accuracy, last fifth %", f"{TARGET:g} at (s)", "pure at (s)")
    table.add_column("clusters")
    done = json.loads(arguments.json.read_text()) if _exists(arguments.json) else []
    names = [case for name in arguments.cases for case in GROUPS.get(name, (name,))]
    for name in names:
        for method in (arguments.methods or CASES[name].methods).split(","):
            try:
                seeds = [int(seed) for seed in arguments.seeds.split(",")]
                rows = [measure(name, method, seed, keys) for seed in seeds]
            except UserError as error:
                Console().print(f"{name}, {method}: skipped. {error}", markup=False)
                continue
            table.add_row(name, method, *cells(rows))
            if name in GROUPS["null"]:
                splits = sum(row["most_clusters"] > 1 for row in rows)
                Console().print(f"{name}: {splits} of {len(rows)} fleets were split")
            for row in rows:
                if row["newcomers_right_at"]:
                    Console().print(f"{name}, seed {row['seed']}: {row['newcomers_right_at']}")
            done += [{**row, "set": arguments.set} for row in rows]
            if arguments.json:
                arguments.json.write_text(json.dumps(done) + "\n")
    Console(width=120).print(table)


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
