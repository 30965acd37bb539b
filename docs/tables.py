"""Write the tables of the results pages from the data files in ``docs/results``.

``python docs/tables.py`` rewrites every table that stands between ``<!-- table: NAME -->`` and
``<!-- end -->``; with ``--check`` it writes nothing, prints one line for each table that differs,
and exits with status 1 if there is one. A table that the data files cannot give is marked
``<!-- hand: REASON -->``; a table of a results page without a mark is an error, and so is a data
file that no page names.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import sqlite3
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scipy.stats import PermutationMethod, kendalltau, wilcoxon

from raceme.core.config import read_toml, write_toml
from raceme.core.events import ACCURACY

DOCS = Path(__file__).parent
PAGES = ("results*.md", "research/panicle*.md", "research/privacy.md")
METHODS = "research/method*.md"
"""Pages of methods, which have many tables of advice and options: these need no mark."""
NEVER = "/"
"""Published time of a method that never reached the target."""
Cell = Callable[[str], str]
"""Text of a column for the method of a row."""


_ASKED = ("strategy", "dataset", "model", "seed", "clients")
_ALWAYS = ("purity", "purity_reached_at_update", "time_to_target")
"""Figures that each summary has, of some runs without a value."""


class TableError(Exception):
    """A table that cannot be made, in one line."""


@dataclass(frozen=True)
class Experiment:
    """The content of a data file.

    Attributes
    ----------
    name : str
        Name of the file without its ending.
    tree : Mapping[str, Any]
        Its content.
    """

    name: str
    tree: Mapping[str, Any]

    @classmethod
    def read(cls, docs: Path, name: str) -> Experiment:
        """Read ``results/NAME.json``."""
        path = docs / "results" / f"{name}.json"
        try:
            return cls(name, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise TableError(f"no experiment {name}: {path} is missing") from None
        except ValueError as error:
            raise TableError(f"{path} is not JSON: {error}") from None

    def runs(self, method: str, seed: int | None = None) -> list[Mapping[str, Any]]:
        """Return the figures of a method's runs, by seed; trials of a sweep are left out."""
        rows = [row for row in self.tree["rows"] if row["method"] == method and "kind" not in row]
        rows.sort(key=lambda row: row["seed"])
        shared = self.tree["shared"]["figures"]
        found = [shared | row["figures"] for row in rows if seed in (None, row["seed"])]
        if not found:
            raise TableError(f"no runs of {method} in results/{self.name}.json")
        return found

    def trial(self, method: str) -> Mapping[str, Any]:
        """Return the figures of the run in which a point of a sweep was tried."""
        rows = [row for row in self.tree["rows"] if row["method"] == method and "kind" in row]
        if len(rows) != 1:
            raise TableError(f"no trial of {method} in results/{self.name}.json")
        figures: Mapping[str, Any] = rows[0]["figures"]
        return figures

    def values(self, method: str, key: str, seed: int | None = None) -> list[float]:
        """Return a figure of a method's runs, by seed; what is missing is left out."""
        return [float(run[key]) for run in self.runs(method, seed) if run.get(key) is not None]

    def mean(self, method: str, key: str, seed: int | None = None) -> float:
        """Return the mean of a figure over a method's runs."""
        found = self.values(method, key, seed)
        if not found:
            raise TableError(f"no {key} of {method} in results/{self.name}.json")
        return statistics.fmean(found)

    def published(self, method: str, key: str = "accuracy") -> Any:
        """Return the paper's number of a method; None if it has none."""
        return (self.tree["methods"][method].get("published") or {}).get(key)

    def configuration(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a run, as ``raceme run`` writes them to ``config.toml``."""
        return {**self.tree["shared"]["configuration"], **row["configuration"], "seed": row["seed"]}

    def unpack(self, out: Path) -> None:
        """Write the folder of a comparison, which ``raceme reproduce --out`` goes on with."""
        for row in self.tree["rows"]:
            keys = self.configuration(row)
            folder = out / row["method"] / f"{row.get('kind', 'seed')}-{row['seed']}"
            folder.mkdir(parents=True, exist_ok=True)
            write_toml(dict(sorted(keys.items())), folder / "config.toml")
            asked = {name: keys[name] for name in _ASKED} | {"target": keys["target-accuracy"]}
            figures = self.tree["shared"]["figures"] | row["figures"]
            if "cluster_sizes" in figures:
                sizes = {str(i): size for i, size in enumerate(figures["cluster_sizes"])}
                figures = figures | {"cluster_sizes": sizes}
            summary = dict.fromkeys(_ALWAYS) | asked | figures | {"versions": self.tree["versions"]}
            (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")


_OF_SUITE = (
    *("title", "dataset", "scale", "sweep-scale", "validation-fraction", "timing", "score"),
    *("measure", "target", "reference", "notes", "seeds"),
)
"""What a data file has of a comparison as it is in its `compare.json`."""


def _shared(rows: Sequence[dict[str, Any]], part: str) -> dict[str, Any]:
    """Take what all rows have alike out of a part of them, and return it."""
    first = rows[0][part]
    shared = {
        key: value
        for key, value in first.items()
        if all(key in row[part] and row[part][key] == value for row in rows)
    }
    for row in rows:
        row[part] = {key: value for key, value in row[part].items() if key not in shared}
    return shared


def _compared(folder: Path) -> dict[str, Any]:
    """Return the ``compare.json`` of a comparison."""
    try:
        of: dict[str, Any] = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TableError(f"{folder} has no compare.json: run the comparison first") from None
    return of


def _evaluated(run: Path, where: str, limit: float, name: str) -> dict[str, float]:
    """Return the accuracy at a run's last evaluation until a limit, and that of the worst tenth."""
    with closing(sqlite3.connect(run / "run.sqlite")) as database:
        last = f"SELECT event, accuracy FROM evaluations WHERE {where} <= ? ORDER BY {where} DESC"
        found = database.execute(f"{last}, event DESC LIMIT 1", (limit,)).fetchone()
        if found is None:
            return {}
        asked = "SELECT accuracy FROM client_evaluations WHERE event = ?"
        clients = [value for (value,) in database.execute(asked, found[:1])]
    worst = ACCURACY.worst_tenth(clients)
    return {f"accuracy_{name}": found[1], f"worst_tenth_accuracy_{name}": worst}


def pack(folder: Path, times: Sequence[float] = (), updates: Sequence[int] = ()) -> str:
    """Return the data file of a comparison: the inverse of :meth:`Experiment.unpack`.

    Of a folder with a comparison for each variant of a suite, methods are named
    ``VARIANT/METHOD``, and the title is that of the first. For each of some virtual times and
    numbers of updates per client rows have the accuracy then, ``accuracy_at_25`` and
    ``accuracy_after_10``, and that of the worst tenth.

    Raises
    ------
    TableError
        The folder has no finished comparison.
    """
    parts = sorted(path.parent for path in folder.glob("*/compare.json"))
    if (folder / "compare.json").exists() or not parts:
        parts = [folder]
    of = _compared(parts[0])
    methods: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for part in parts:
        prefix = "" if part == folder else f"{part.name}/"
        compared = _compared(part)
        tried = [entry for entries in compared["sweeps"].values() for entry in entries]
        for entry in (*compared["methods"], *tried):
            for run in entry["runs"]:
                path = part / run["folder"]
                kind, _, seed = path.name.partition("-")
                summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
                keys = dict(read_toml(path / "config.toml"))
                del keys["seed"]
                # Where the data lie on the machine that ran it is of no use elsewhere.
                keys |= {"data-root": "data"} if keys.get("data-root") else {}
                versions = summary["versions"]
                # Tables have no use for counts by client, nor for the help of a user's keys.
                left_out = {*_ASKED, "target", "versions", "protection", "verdicts", "own_keys"}
                figures = {k: v for k, v in summary.items() if v is not None and k not in left_out}
                figures["cluster_sizes"] = list(figures["cluster_sizes"].values())
                for at in times:
                    figures |= _evaluated(path, "time", at, f"at_{at:g}")
                for each in updates:
                    if (limit := each * summary["clients"]) <= summary["updates"]:
                        figures |= _evaluated(path, "updates", limit, f"after_{each}")
                name = f"{prefix}{path.parent.name}"
                row = {"method": name, "seed": int(seed)}
                row |= {} if kind == "seed" else {"kind": kind}
                rows.append(row | {"configuration": keys, "figures": figures})
                kept = ("label", "asynchronous", "options", "published")
                methods.setdefault(name, {key: entry[key] for key in kept if entry.get(key)})
    if not rows:
        raise TableError(f"{folder} has no finished run")
    suite = {key: of[key] for key in _OF_SUITE if of.get(key) is not None}
    shared = {part: _shared(rows, part) for part in ("figures", "configuration")}
    versions |= {"numpy": version("numpy"), "python": platform.python_version()}

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    parts = [f"  {written(key)}: {written(value)}" for key, value in suite.items()]
    parts.append(f'  "versions": {written(versions)}')
    known = [f"    {written(name)}: {written(entry)}" for name, entry in methods.items()]
    parts.append('  "methods": {\n' + ",\n".join(known) + "\n  }")
    parts.append(f'  "shared": {written(shared)}')
    parts.append('  "rows": [\n' + ",\n".join(f"    {written(row)}" for row in rows) + "\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes
    ----------
    heads : Sequence[str]
        Its columns; one that begins with "<" is aligned left, all but the first others right.
    rows : Iterable[Sequence[str]]
        Its cells.
    """

    heads: Sequence[str]
    rows: Iterable[Sequence[str]]

    def text(self) -> str:
        """Return it in Markdown."""
        marks = ["---" if i == 0 or h.startswith("<") else "---:" for i, h in enumerate(self.heads)]
        lines = [[head.removeprefix("<") for head in self.heads], *self.rows]
        written = ["| " + " | ".join(cells).replace("|  |", "| |") + " |" for cells in lines]
        written = [re.sub(r"\|  (?=\|)", "| ", line) for line in written]
        return "\n".join([written[0], "|" + "|".join(marks) + "|", *written[1:]])


def number(value: float | None, digits: int) -> str:
    """Return a number as the pages write it; a dash for none."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")


def spread(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Return the mean, with the sample's standard deviation if there are several values."""
    text = number(factor * statistics.fmean(values), digits)
    if len(values) == 1:
        return text
    return f"{text} ± {number(factor * statistics.stdev(values), digits)}"


def accuracy(of: Experiment, digits: int, key: str = "accuracy", seed: int | None = None) -> Cell:
    """Return the column of an accuracy in percent."""
    return lambda method: spread(of.values(method, key, seed), digits, 100.0)


def paper(of: Experiment, key: str = "accuracy", digits: int | None = 1, none: str = "–") -> Cell:
    """Return the column of a published number; with None as digits as the paper has it."""

    def cell(method: str) -> str:
        value = of.published(method, key)
        if value is None or value == NEVER:
            return none if value is None else "never"
        return f"{value:g}" if digits is None else number(value, digits)

    return cell


def by_seed(of: Experiment, digits: int, key: str, factor: float = 1.0) -> Cell:
    """Return the column of a figure of each seed."""
    return lambda method: ", ".join(
        number(factor * value, digits) for value in of.values(method, key)
    )


def whole(of: Experiment, key: str) -> Cell:
    """Return the column of a whole number: one, or the least and the greatest over the seeds."""

    def cell(method: str) -> str:
        values = sorted({round(value) for value in of.values(method, key)})
        return "–".join(str(value) for value in dict.fromkeys([values[0], values[-1]]))

    return cell


def lines(methods: Mapping[str, str], *columns: Cell) -> list[list[str]]:
    """Return the rows of methods, with their labels first."""
    return [[label, *(column(method) for column in columns)] for method, label in methods.items()]


def code(*methods: str, **remarks: str) -> dict[str, str]:
    """Return methods with their names in code, and what is said beside some of them."""
    notes = {name.replace("_", "-"): text for name, text in remarks.items()}
    return {method: f"`{method}`{notes.get(method, '')}" for method in methods}


# CASA -------------------------------------------------------------------------------------------


def _reached(run: Mapping[str, Any]) -> float | None:
    reached = run.get("time_to_target")
    return None if reached is None else float(reached["virtual_time"])


def _mean_time(of: Experiment, method: str) -> float:
    """Return the mean time to the target; a run that did not reach it counts with its length."""
    return statistics.fmean(_reached(run) or run["virtual_time"] for run in of.runs(method))


def _times(of: Experiment) -> Cell:
    def cell(method: str) -> str:
        times = [_reached(run) for run in of.runs(method)]
        there = [time for time in times if time is not None]
        if len(there) == len(times):
            return spread(there, 1)
        some = f" ({len(there)} of {len(times)})" if there else ""
        return f"> {number(_mean_time(of, method), 1)}{some}"

    return cell


def _times_casa(of: Experiment, above: int) -> Cell:
    def cell(method: str) -> str:
        ratio = _mean_time(of, method) / _mean_time(of, "casa")
        missed = any(_reached(run) is None for run in of.runs(method))
        return f"> {number(ratio, above)}" if missed else number(ratio, 2)

    return cell


def _published_times_casa(of: Experiment) -> Cell:
    def cell(method: str) -> str:
        time = of.published(method, "time")
        return "–" if time in (None, NEVER) else number(time / of.published("casa", "time"), 2)

    return cell


def casa_table1(docs: Path, name: str, methods: Mapping[str, str], above: int, goal: str) -> Table:
    """CASA's Table 1, the soonest at the target first."""
    of = Experiment.read(docs, name)
    heads = ("method", "accuracy %, paper", "ours", f"time{goal}, paper", "ours (s)")
    columns = (
        *(paper(of, digits=2), accuracy(of, 2), paper(of, "time", None), _times(of)),
        *(_published_times_casa(of), _times_casa(of, above), whole(of, "clusters")),
        _purity(of),
    )
    return Table((*heads, "× CASA, paper", "ours", "clusters", "purity"), lines(methods, *columns))


def casa_fig8(docs: Path) -> Table:
    """CASA's figure 8, on MNIST, with two weights of CASA-D."""
    rows = []
    for name, methods in (
        ("casa-fig8-mnist", {"casa": "`casa`", "casa-d": "`casa-d`, α = 0.3"}),
        ("casa-fig8-mnist-half", {"casa-c": "`casa-c`", "casa-d": "`casa-d`, α = 0.5"}),
    ):
        of = Experiment.read(docs, name)
        rows += lines(methods, accuracy(of, 2), _times(of), whole(of, "clusters"), _purity(of))
    return Table(("method", "accuracy %", "0.95 reached at (s)", "clusters", "purity"), rows)


def casa_fig8_cifar10(docs: Path) -> Table:
    """CASA's figure 8, on CIFAR-10, with two weights of CASA-D."""
    rows = []
    for name, methods in (
        ("casa-fig8-cifar10-half", {"casa": "`casa`"}),
        ("casa-fig8-cifar10", {"casa-d": "`casa-d`, α = 0.3"}),
        ("casa-fig8-cifar10-half", {"casa-c": "`casa-c`", "casa-d": "`casa-d`, α = 0.5"}),
    ):
        of = Experiment.read(docs, name)
        columns = paper(of, digits=2), accuracy(of, 2), whole(of, "clusters"), _purity(of)
        rows += lines(methods, *columns)
    return Table(("method", "accuracy %, paper", "ours", "clusters", "purity"), rows)


def casa_fig9a(docs: Path) -> Table:
    """CASA's figure 9a: the budget of the buffers, in items and in models."""
    budgets = {f"m={m}": f"M = {m}" for m in (5, 10, 20, 50, 75, 100)}
    cells = [
        cell
        for name in ("casa-fig9a-mnist", "casa-fig9a-digits", "casa-fig9a-models")
        for of in [Experiment.read(docs, name)]
        for cell in (accuracy(of, 2), whole(of, "clusters"), _purity(of))
    ]
    runs = "MNIST, 2,000 updates, items", "digits, 17,000, items", "digits, 4,000, models"
    heads = "<buffer", *(h for run in runs for h in (f"{run}: accuracy %", "clusters", "purity"))
    return Table(heads, lines(budgets, *cells))


def casa_fig9bc(docs: Path) -> Table:
    """CASA's figures 9b and 9c: the sparsity of CASA+, on MNIST."""
    of = Experiment.read(docs, "casa-fig9bc-mnist")
    names = {f"s0={s}": f"S0 = {s}" for s in ("0", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8")}
    columns = accuracy(of, 2), _times(of), whole(of, "clusters"), _purity(of)
    return Table(
        ("<sparsity", "accuracy %", "0.95 reached at (s)", "clusters", "purity"),
        lines(names, *columns),
    )


def casa_fig10a(docs: Path) -> Table:
    """CASA's figure 10a: the weight of an update in CFL-Async, on MNIST."""
    of = Experiment.read(docs, "casa-fig10a-mnist")
    names = {f"alpha={alpha}": f"α = {alpha}" for alpha in (0.3, 0.5, 0.7, 0.9)}
    columns = paper(of, digits=2), accuracy(of, 2), whole(of, "clusters"), _purity(of)
    heads = ("<weight", "accuracy %, paper (CIFAR-10)", "ours (MNIST)", "clusters", "purity")
    return Table(heads, lines(names, *columns))


def casa_fig10b(docs: Path) -> Table:
    """CASA's figure 10b: IFCA in rounds and asynchronous, on MNIST."""
    of = Experiment.read(docs, "casa-fig10b-mnist")
    names = {
        f"{method}-k={k}": f"`{method}`, k = {k}"
        for k in (4, 3)
        for method in ("ifca", "ifca-async")
    }
    unrest: Cell = lambda method: number(100 * of.mean(method, "unrest"), 2)  # noqa: E731
    columns = paper(of, digits=2), accuracy(of, 2), _times(of), unrest, _purity(of)
    heads = (
        *("<method", "accuracy %, paper (CIFAR-10)", "ours (MNIST)", "0.95 reached at (s)"),
        *("unrest, points", "purity"),
    )
    return Table(heads, lines(names, *columns))


def _purity(of: Experiment) -> Cell:
    return lambda method: number(of.mean(method, "purity"), 2)


def casa_sweeps(docs: Path) -> Table:
    """The points of the swept competitors."""
    of = Experiment.read(docs, "casa-table1-mnist")
    points = sorted({row["method"] for row in of.tree["rows"] if "kind" in row})
    rows = []
    for point in points:
        run = of.trial(point)
        rows.append(
            [
                *(f"`{point}`", number(100 * run["accuracy"], 2), number(_reached(run), 1)),
                *(str(run["clusters"]), number(run["purity"], 2)),
            ]
        )
    return Table(("point", "accuracy %", "0.95 reached at (s)", "clusters", "purity"), rows)


def casa_fedrep(docs: Path) -> Table:
    """CASA's Table 1 on MNIST with the paper's network."""
    of = Experiment.read(docs, "casa-table1-mnist-fedrep")
    by_paper = Experiment.read(docs, "casa-table1-mnist")
    named = {"ifca": "ifca-k=4"}

    def published(key: str, digits: int | None) -> Cell:
        cell = paper(by_paper, key, digits)
        return lambda method: cell(named.get(method, method))

    columns = (
        *(published("accuracy", 2), accuracy(of, 2), published("time", None), _times(of)),
        *(whole(of, "clusters"), _purity(of)),
    )
    heads = ("method", "accuracy %, paper", "ours", "time, paper", "ours (s)", "clusters")
    methods = code("casa", "ifca", "cfl", "fedbuff", "fedasync")
    return Table((*heads, "purity"), lines(methods, *columns))


def casa_open_data(docs: Path, name: str, theirs: str, published: Mapping[str, str]) -> Table:
    """CASA's Table 1 on open data, beside the paper's accuracies on the data that they replace."""
    of = Experiment.read(docs, f"casa-table1-{name}")
    heads = ["method", f"accuracy %, paper, {theirs}", "ours", "best", "clusters"]
    columns = [published.__getitem__, accuracy(of, 2), accuracy(of, 2, "best_accuracy")]
    columns.append(whole(of, "clusters"))
    if any(_reached(run) for method in published for run in of.runs(method)):
        target = of.configuration(of.tree["rows"][0])["target-accuracy"]
        heads.insert(4, f"{target} reached at (s)")
        columns.insert(3, _times(of))
    if of.values(next(iter(published)), "purity"):
        heads.append("purity")
        columns.append(_purity(of))
    return Table(heads, lines(code(*published), *columns))


def external_niid(docs: Path) -> Table:
    """Flower's niid_bench beside ours."""
    rows = []
    for dataset, label in (
        ("mnist", "MNIST"),
        ("fashion", "Fashion-MNIST"),
        ("cifar10", "CIFAR-10"),
        ("cifar10-iid", "CIFAR-10, IID"),
    ):
        of = Experiment.read(docs, f"external-niid-bench-{dataset}")
        ours = accuracy(of, 2, _BEST)
        for method in of.tree["methods"]:
            gap = 100 * of.mean(method, _BEST) - of.published(method)
            cells = (paper(of, digits=2)(method), ours(method), number(gap, 2))
            rows.append([label, f"`{method}`", *cells])
    return Table(("data", "<method", "published", "ours", "difference"), rows)


def external_pfllib(docs: Path, name: str, methods: str) -> Table:
    """PFLlib's table beside ours."""
    of = Experiment.read(docs, name)
    columns = (paper(of, digits=2), accuracy(of, 2, _BEST))
    return Table(("method", "published", "ours"), lines(code(*methods.split()), *columns))


def external_cfla(docs: Path) -> Table:
    """CFLA's table beside ours."""
    of = Experiment.read(docs, "external-cfla-mnist")
    methods = code("ifca", "fedgroup", "fesem", "fedavg", "casa", "panicle")
    columns = (paper(of), accuracy(of, 1), whole(of, "clusters"), _purity(of))
    return Table(("method", "published", "ours", "clusters", "purity"), lines(methods, *columns))


def casa_plus(docs: Path) -> Table:
    """CASA+ beside CASA, by seed."""
    of = Experiment.read(docs, "casa-table1-mnist")
    heads = ("seed", "CASA, accuracy %", "CASA+", "CASA, 0.95 reached at (s)", "CASA+")
    rows = []
    for label, seed in (*((str(seed), seed) for seed in of.tree["seeds"]), ("mean", None)):
        both = ("casa", "casa-plus")
        times = [[_reached(run) or math.nan for run in of.runs(m, seed)] for m in both]
        rows.append(
            [label, *(number(100 * of.mean(m, "accuracy", seed), 2) for m in both)]
            + [number(statistics.fmean(values), 1) for values in times]
        )
    return Table(heads, rows)


# CSAFL ------------------------------------------------------------------------------------------

_WINDOWED = code(
    "t-fedavg", "ta-fedavg", "g-fedavg", "ga-fedavg", "r-fedavg", "nog-fedavg", "csafl"
)
_BEST = "best_weighted_accuracy"


def _used(of: Experiment, windows: int, seed: int | None = None) -> Cell:
    """Return the updates of a window, without those of the clients' pre-training."""

    def cell(method: str) -> str:
        is_pretrained = method in ("g-fedavg", "ga-fedavg", "csafl")
        first = of.tree["shared"]["configuration"]["clients"] if is_pretrained else 0
        return spread([(v - first) / windows for v in of.values(method, "updates", seed)], 0)

    return cell


def csafl_mnist(docs: Path) -> Table:
    """CSAFL's Table II, MNIST, at two lengths."""
    long = Experiment.read(docs, "csafl-table2-mnist-10s-300-windows")
    short = Experiment.read(docs, "csafl-table2-mnist-10s")
    heads = ("method", "paper", "ours, 300 windows, seed 0", "at the end")
    columns = (
        *(paper(long), accuracy(long, 1, _BEST), accuracy(long, 1, "weighted_accuracy")),
        *(accuracy(short, 1, _BEST), accuracy(short, 1, "weighted_accuracy"), _used(short, 60)),
    )
    more = ("ours, 60 windows, seeds 0,1,2", "at the end", "updates")
    return Table((*heads, *more), lines(_WINDOWED, *columns))


def csafl_characters(docs: Path) -> Table:
    """CSAFL's Table II, characters."""
    of = Experiment.read(docs, "csafl-table2-characters-10s")
    heads = ("method", "paper (FEMNIST)", "ours (UniPen), 15 windows, seeds 0,1,2", "at the end")
    end = accuracy(of, 1, "weighted_accuracy")
    columns = (paper(of), accuracy(of, 1, _BEST), end, _used(of, 15))
    return Table((*heads, "updates"), lines(_WINDOWED, *columns))


def csafl_synthetic(docs: Path) -> Table:
    """CSAFL's Table II, Synthetic, at three lengths."""
    full, long = (
        Experiment.read(docs, f"csafl-table2-synthetic-10s-{windows}-windows")
        for windows in (300, 60)
    )
    short = Experiment.read(docs, "csafl-table2-synthetic-10s")
    heads = ("method", "paper", "ours, 300 windows, seed 0", "at the end")
    columns = (
        *(paper(full), accuracy(full, 1, _BEST), accuracy(full, 1, "weighted_accuracy")),
        *(accuracy(long, 1, _BEST), accuracy(long, 1, "weighted_accuracy")),
        *(accuracy(short, 1, _BEST), _used(short, 15, 0)),
    )
    more = ("60 windows, seeds 0,1,2", "at the end", "15 windows", "updates, seed 0")
    return Table((*heads, *more), lines(_WINDOWED, *columns))


def csafl_15s(docs: Path) -> Table:
    """CSAFL's Table II, windows of 15 s."""
    heads, columns = ["method"], []
    for name, theirs, ours in (
        ("mnist", "MNIST: paper", "ours"),
        ("synthetic", "Synthetic: paper", "ours"),
        ("characters", "FEMNIST: paper", "UniPen: ours"),
    ):
        of = Experiment.read(docs, f"csafl-table2-{name}-15s")
        heads += [theirs, ours]
        columns += [paper(of), accuracy(of, 1, _BEST)]
    return Table(heads, lines(_WINDOWED, *columns))


def csafl_idle(docs: Path) -> Table:
    """CSAFL's figure 5: how long clients wait."""
    data = {"MNIST": "mnist", "UniPen": "characters", "Synthetic": "synthetic"}
    heads, columns = [""], []
    for title, name in data.items():
        of = Experiment.read(docs, f"csafl-table2-{name}-10s")
        heads += [f"{title}: mean", "> 30 %", "> 50 %"]
        for key in ("idle_share_mean", "idle_over_30_percent", "idle_over_50_percent"):
            columns.append(lambda m, of=of, key=key: number(100 * of.mean(m, key), 0))
    return Table(heads, lines(_WINDOWED, *columns))


# CDFL, FedDrift ---------------------------------------------------------------------------------

_SCORES = ("before", "after", "cluster")
_SCORE_HEADS = tuple(head for score in _SCORES for head in (f"{score}, paper", "ours"))
_PAIR = ("cdfl", "fedsoft-async")


def _score_key(name: str) -> str:
    return "cluster_accuracy" if name == "cluster" else f"accuracy_{name}"


def _scores(of: Experiment, method: str, seed: int | None = None) -> list[str]:
    """Return a method's published scores, each with ours beside it."""
    cells = []
    for score in _SCORES:
        ours = of.values(method, _score_key(score), seed)
        cells += [paper(of, score)(method), spread(ours, 1, 100.0) if ours else "–"]
    return cells


def cdfl(docs: Path) -> Table:
    """CDFL's Table 1 with lateness in epochs."""
    rows = []
    two = Experiment.read(docs, "cdfl-table1-fashion-2")
    # The files of CDFL's run at K = 3 were not kept; the numbers are those of its report.
    lost = ["3", "`cdfl` †", "78.3", "72.4", "82.3", "73.8", "83.5", "79.3", "0.15"]
    lost += ["1.00×", "1.00×"]

    def per_update(of: Experiment, method: str, key: str) -> float:
        return of.mean(method, key) / of.mean(method, "updates")

    for k, length in ((2, ""), (3, ""), (4, ""), (6, ", half the length")):
        of = Experiment.read(docs, f"cdfl-table1-fashion-{k}")
        for method in _PAIR:
            if (k, method) == (3, "cdfl"):
                rows.append(lost)
                continue
            cells = [f"{k}{length}", f"`{method}`", *_scores(of, method)]
            cells.append(number(of.mean(method, "mixture_divergence"), 2))
            # A download is one model, or K of them, at every K.
            down = per_update(of, method, "bytes_down") / per_update(two, "cdfl", "bytes_down")
            cells.append(f"{number(down, 2)}×")
            if k == 3:
                cells.append("–")
            else:
                passes = [per_update(of, m, "sample_passes") for m in (method, "cdfl")]
                cells.append(f"{number(passes[0] / passes[1], 2)}×")
            rows.append(cells)
    return Table(("K", "<method", *_SCORE_HEADS, "KL", "down", "work"), rows)


def _bar_rows(docs: Path, k: int, stem: str, files: Mapping[str, str]) -> list[list[str]]:
    """Return the scores of runs with seed 0, beside the paper's; of files by the rows' names."""
    rows = []
    for name, suffix in files.items():
        of = Experiment.read(docs, f"{stem}{suffix}")
        method = "fedsoft-async" if name == "`fedsoft-async`" else "cdfl"
        divergence = number(of.mean(method, "mixture_divergence", seed=0), 2)
        rows.append([str(k), name, *_scores(of, method, seed=0), divergence])
    return rows


def cdfl_bar(docs: Path) -> Table:
    """CDFL with bars of the losses, beside FedSoft-Async, a tenth of the length."""
    rows = []
    for k, sharper in ((3, 0), (4, 25), (6, 80)):
        files = {"`loss-bar=0.5`": "", "`loss-bar=min`": "-min", "`loss-bar=80%`": "-80"}
        if sharper:
            files[f"`loss-bar=min`, A = {sharper}"] = "-sharp"
        files["`fedsoft-async`"] = "-fedsoft"
        rows += _bar_rows(docs, k, f"cdfl-bar-fashion-{k}", files)
    return Table(("K", "<", *_SCORE_HEADS, "KL"), rows)


def cdfl_bar_full(docs: Path) -> Table:
    """CDFL with two bars of the losses, beside FedSoft-Async, at full length."""
    files = {"`loss-bar=0.5`": "", "`loss-bar=min`": "-min", "`fedsoft-async`": ""}
    rows = [
        row
        for k in (3, 4, 6)
        for row in _bar_rows(docs, k, f"cdfl-table1-fashion-{k}-sessions", files)
    ]
    return Table(("K", "<", *_SCORE_HEADS, "KL"), rows)


def cdfl_sessions(docs: Path) -> Table:
    """CDFL's Table 1 with lateness in epochs and in sessions."""
    rows = []
    for k in (2, 3, 4, 6):
        epochs = Experiment.read(docs, f"cdfl-table1-fashion-{k}")
        sessions = Experiment.read(docs, f"cdfl-table1-fashion-{k}-sessions")
        half = " †" if k == 6 else ""
        for method in _PAIR:
            cells = [str(k), f"`{method}`"]
            for score in _SCORES:
                key = _score_key(score)
                ours = accuracy(sessions, 1, key)(method)
                if method == "cdfl":
                    ours = re.sub(r"^\S+", lambda found: f"**{found[0]}**", ours)
                # The files of this run were not kept; the numbers are those of its report.
                lost = dict(zip(_SCORES, ("72.4", "73.8", "79.3"), strict=True))
                old = (
                    lost[score] if (k, method) == (3, "cdfl") else accuracy(epochs, 1, key)(method)
                )
                cells += [paper(sessions, score)(method), old + half, ours]
            rows.append(cells)
    columns = [head for s in _SCORES for head in (f"{s}, paper", "b = 5", "b = n")]
    return Table(("K", "<method", *columns), rows)


def cdfl_digits(docs: Path) -> Table:
    """CDFL's Table 1 on digits of three origins."""
    of = Experiment.read(docs, "cdfl-table1-digits")
    rows = []
    for method, label in code(*_PAIR, "local").items():
        divergence = of.values(method, "mixture_divergence")
        kl = number(divergence[0] if divergence else None, 2)
        rows.append([label, *_scores(of, method), kl])
    return Table(("<method", *_SCORE_HEADS, "KL"), rows)


def cdfl_proxy(docs: Path) -> Table:
    """CDFL's figure 7: samples in each proxy set, with estimates of the mixtures."""
    of = Experiment.read(docs, "cdfl-effects-proxy")
    sizes = {size: f"{int(size):,}" for size in ("500", "1000", "2000", "4000")}
    columns = [accuracy(of, 1, _score_key(score)) for score in _SCORES]
    kl = by_seed(of, 2, "mixture_divergence")
    return Table(("samples", *_SCORES, "KL"), lines(sizes, *columns, kl))


def feddrift_mnist(docs: Path) -> Table:
    """FedDrift on MNIST, two and four concepts."""
    two, four = (Experiment.read(docs, f"feddrift-table-mnist-{n}") for n in (2, 4))
    methods = code(
        *("feddrift", "feddrift-eager", "ifca", "fedavg", "casa", "feddrift-async", "fedasync")
    )
    columns = []
    for of in (two, four):
        columns += [accuracy(of, 2, "accuracy_at_step_starts"), paper(of, digits=2, none="")]
    heads = ("method", "two concepts", "published", "four concepts", "published")
    return Table(heads, lines(methods, *columns))


# FlexCFL ----------------------------------------------------------------------------------------


def flexcfl_table1(docs: Path) -> Table:
    """FlexCFL's Table 1: FedAvg by the classes of a client."""
    of = Experiment.read(docs, "flexcfl-table1-mnist-mclr")
    # Of the paper's table, by row: mean discrepancy, rounds to 85 %.
    published = {
        "1-class": ("0.767", "39"),
        "3-classes": ("0.767", "14"),
        "5-classes": ("0.685", "10"),
        "10-classes": ("0.627", "4"),
    }
    rows = []
    for method, (distance, rounds) in published.items():
        (run,) = of.runs(method)
        reached = run.get("time_to_target")
        rows.append(
            [
                *(method.split("-")[0], distance),
                number(run["measures"]["discrepancy"]["value"], 3),
                *(paper(of)(method), accuracy(of, 1, _BEST)(method)),
                *(rounds, f"{reached['updates'] / 20:.0f}" if reached else "–"),
            ]
        )
    heads = ("classes of a client", "mean discrepancy, paper", "ours", "best accuracy %, paper")
    return Table((*heads, "ours", "85 % in round, paper", "ours"), rows)


def flexcfl_table3(docs: Path, name: str, order: str, heads: tuple[str, str]) -> Table:
    """A row of FlexCFL's Table 3, all of its methods."""
    of = Experiment.read(docs, f"flexcfl-table3-{name}")
    rows = lines(_table3(order), paper(of), accuracy(of, 2, _BEST))
    return Table(("method", *heads), rows)


def _table3(order: str) -> dict[str, str]:
    return code(*order.split(), flexcfl_eta=" (η_g = 0.1)", fedprox=" (μ = 1)")


def flexcfl_mnist_mclr(docs: Path) -> Table:
    """FlexCFL's Table 3, MNIST-MCLR, at two lengths."""
    long = Experiment.read(docs, "flexcfl-table3-mnist-mclr-300")
    short = Experiment.read(docs, "flexcfl-table3-mnist-mclr")
    traffic: Cell = lambda m: number(_bytes(long, m) / _bytes(long, "fedavg"), 2)  # noqa: E731
    end = accuracy(long, 2, "weighted_accuracy")
    columns = (paper(long), accuracy(long, 2, _BEST), end, accuracy(short, 2, _BEST), traffic)
    heads = ("method", "accuracy %, paper", "ours (300 rounds, seed 0)", "at the end")
    rows = lines(_table3("flexcfl flexcfl-eta ifca rcc fedprox fedavg rac fesem"), *columns)
    return Table((*heads, _SEEDS_75, "bytes / FedAvg's (300 rounds)"), rows)


def _bytes(of: Experiment, method: str, seed: int | None = None) -> float:
    return of.mean(method, "bytes_up", seed) + of.mean(method, "bytes_down", seed)


_TABLE4 = code(
    *("flexcfl", "flexcfl-eta", "fedavg", "fesem", "fedgroup", "ifca"), flexcfl_eta=" (η_g = 5)"
)
_UNCHANGED = {"fedgroup": "flexcfl", "flexcfl-eta": "flexcfl"}
"""Methods of Table 4 without a column of their own in Table 3 (η_g = 0.1 there)."""


def _lost(before: Experiment, after: Experiment, *seeds: int) -> Cell:
    """Return the column of points lost, and of those of some seeds each."""

    def points(method: str, seed: int | None = None) -> str:
        unchanged = before.mean(_UNCHANGED.get(method, method), _BEST, seed)
        return number(100 * (unchanged - after.mean(method, _BEST, seed)), 1)

    def cell(method: str) -> str:
        each = f" ({', '.join(points(method, seed) for seed in seeds)})" if seeds else ""
        return points(method) + each

    return cell


def _paper_lost(before: Experiment, after: Experiment) -> Cell:
    def cell(method: str) -> str:
        unchanged = before.published(_UNCHANGED.get(method, method))
        return number(unchanged - after.published(method), 1)

    return cell


def flexcfl_swap_mnist(docs: Path, kind: str) -> Table:
    """FlexCFL's Table 4, MNIST-MCLR."""
    before = Experiment.read(docs, "flexcfl-table3-mnist-mclr")
    after = Experiment.read(docs, f"flexcfl-table4-mnist-mclr-{kind}")
    heads = ("method", "accuracy %, paper", "ours", "lost, paper", "lost, ours (by seed)")
    lost = _paper_lost(before, after), _lost(before, after, 0, 1, 2)
    return Table(heads, lines(_TABLE4, paper(after), accuracy(after, 2, _BEST), *lost))


def flexcfl_swap_characters(docs: Path) -> Table:
    """FlexCFL's Table 4, characters."""
    before = Experiment.read(docs, "flexcfl-table3-characters-mclr")
    heads, columns = ["method"], []
    for kind in ("swap-all", "swap-part"):
        after = Experiment.read(docs, f"flexcfl-table4-characters-mclr-{kind}")
        heads += [f"{kind}, paper", "ours", "lost, ours"]
        columns += [paper(after), accuracy(after, 2, _BEST), _lost(before, after)]
    return Table(heads, lines(_TABLE4, *columns))


def flexcfl_table4(
    docs: Path, data: str, kinds: Sequence[str] = ("swap-all", "swap-part", "incremental")
) -> Table:
    """A row of FlexCFL's Table 4, by kinds of drift."""
    heads, columns = ["method"], []
    for kind in kinds:
        of = Experiment.read(docs, f"flexcfl-table4-{data}-{kind}")
        heads += [f"{kind}, paper", "ours"]
        columns += [paper(of), accuracy(of, 2, _BEST)]
    return Table(heads, lines(_TABLE4, *columns))


def flexcfl_incremental(docs: Path) -> Table:
    """FlexCFL's Table 4, incremental."""
    mnist, characters = (
        Experiment.read(docs, f"flexcfl-table4-{data}-mclr-incremental")
        for data in ("mnist", "characters")
    )
    heads = ("method", "MNIST, paper", "ours (seed 0)", "FEMNIST, paper")
    columns = (
        *(paper(mnist), accuracy(mnist, 2, _BEST)),
        *(paper(characters), accuracy(characters, 2, _BEST)),
    )
    return Table((*heads, "characters, ours (seeds 0, 1, 2)"), lines(_TABLE4, *columns))


def flexcfl_fig6_a(docs: Path) -> Table:
    """FlexCFL's figure 6a: bytes, with and without the label counts before each round."""
    of = Experiment.read(docs, "flexcfl-fig6-a")

    def bytes_of(method: str, counts: bool) -> float:
        (run,) = of.runs(method)
        return float(
            sum(
                traffic["up"] + traffic["down"]
                for phase, traffic in run["bytes_by_phase"].items()
                if counts or phase != "label-counts"
            )
        )

    def ratio(counts: bool) -> Cell:
        return lambda method: number(bytes_of(method, counts) / bytes_of("fedavg", counts), 2)

    columns = (
        *(paper(of, "traffic", None), ratio(True), ratio(False)),
        *(paper(of), accuracy(of, 2, _BEST)),
    )
    methods = code("fedavg", "fedgroup", "ifca", "ifca-mig", "flexcfl", "flexcfl-client")
    heads = ("method", "bytes / FedAvg's, paper", "ours", "without label counts")
    return Table((*heads, "accuracy %, paper", "ours"), lines(methods, *columns))


def flexcfl_fig6_b(docs: Path) -> Table:
    """FlexCFL's figure 6b."""
    of = Experiment.read(docs, "flexcfl-fig6-b")
    columns = (
        paper(of, "traffic", 2),
        lambda m: number(_bytes(of, m) / _bytes(of, "flexcfl"), 2),
        *(paper(of), accuracy(of, 2, _BEST)),
    )
    heads = ("method", "bytes / FlexCFL's, paper", "ours", "accuracy %, paper", "ours")
    methods = dict(_TABLE4)
    flexcfl = {method: methods.pop(method) for method in ("flexcfl", "flexcfl-eta")}
    rates = {f"flexcfl-eta-{rate}": f"`flexcfl-eta-{rate}` (η_g = {rate})" for rate in ("1", "0.1")}
    return Table(heads, lines(flexcfl | rates | methods, *columns))


# FAACL ------------------------------------------------------------------------------------------


def _bold(cells: Sequence[str]) -> list[str]:
    """Return the cells with the greatest of their first numbers in bold; dashes are none."""
    first = [cell.split()[0] for cell in cells]
    best = max((own for own in first if own != "–"), key=float, default="")
    return [
        cell.replace(own, f"**{own}**", 1) if own == best else cell
        for cell, own in zip(cells, first, strict=True)
    ]


def faacl_mnist(docs: Path, scenarios: str, order: str) -> Table:
    """The thesis' table of scenarios on MNIST."""
    methods = code(*order.split())
    heads, columns = ["method"], []
    for scenario in scenarios.split():
        of = Experiment.read(docs, f"faacl-table-mnist-{scenario}")
        heads += [f"{scenario.upper()}, published{' †' if scenario == 's1' else ''}", "ours"]
        noted = {("a2", "fedsoft"): " ‡"}
        columns.append([paper(of, digits=2)(m) + noted.get((scenario, m), "") for m in methods])
        columns.append(_bold([accuracy(of, 2)(m) for m in methods]))
    heads += [f"<clusters {', '.join(s.upper() for s in scenarios.split())} (published)"]
    columns.append([_clusters(docs, scenarios, m) for m in methods])
    cells = zip(methods.values(), *columns, strict=True)
    return Table(heads, [list(row) for row in cells])


def _clusters(docs: Path, scenarios: str, method: str) -> str:
    ours, theirs = [], []
    for scenario in scenarios.split():
        of = Experiment.read(docs, f"faacl-table-mnist-{scenario}")
        ours.append(whole(of, "clusters")(method))
        theirs.append(paper(of, "clusters", None)(method))
    return f"{', '.join(ours)} ({', '.join(theirs)})"


def faacl_bytes(docs: Path) -> Table:
    """Bytes as multiples of FedAvg's, by scenario."""
    names = [f"faacl-table-mnist-{name}" for name in ("s0", "s1", "s2", "a1", "a2")]
    of = [Experiment.read(docs, name) for name in names]

    def listed(values: Iterable[float]) -> str:
        each = [number(value, 2) for value in values]
        return f"{each[0]} in all" if len(set(each)) == 1 else ", ".join(each)

    methods = code("faacl", "ifca", "feddrift", "fesem", "fedgroup", "fedsoft")
    columns = (
        lambda m: listed(one.published(m, "traffic") for one in of),
        lambda m: listed(_bytes(one, m) / _bytes(one, "fedavg") for one in of),
    )
    heads = ("method", "published, 300 rounds, S0, S1, S2, A1, A2", "ours, 30 rounds")
    return Table(heads, lines(methods, *columns))


def faacl_fashion(docs: Path) -> Table:
    """The thesis' table of scenarios on Fashion-MNIST."""
    methods = code("faacl", "fedavg", "feddrift", "fedgroup", "fedsoft", "ifca", "fesem")
    names = {"s0": "S0", "s1": "S1", "s2": "S2", "a1": "A1, both kinds"}
    names |= {"a1-either": "A1, either kind", "a2": "A2"}
    columns = []
    for name in names:
        of = Experiment.read(docs, f"faacl-table-fashion-{name}")
        ours = _bold([accuracy(of, 2)(method) for method in methods])
        theirs = [paper(of, digits=2)(method) for method in methods]
        column = [f"{own} ({other})" for own, other in zip(ours, theirs, strict=True)]
        column.append(f"{whole(of, 'clusters')('faacl')} ({paper(of, 'clusters', None)('faacl')})")
        ranks = [(of.published(method), of.mean(method, "accuracy")) for method in methods]
        columns.append([*column, number(kendalltau(*zip(*ranks, strict=True)).statistic, 2)])
    labels = [*methods.values(), "clusters of `faacl` (published)", "Kendall's τ"]
    rows = [list(row) for row in zip(labels, *columns, strict=True)]
    return Table(("method", *names.values()), rows)


def sequential(docs: Path) -> Table:
    """C-FAACL's sequential stream, by seed."""
    of = Experiment.read(docs, "c-faacl-sequential-mnist-s2")
    merging = Experiment.read(docs, "c-faacl-sequential-mnist-s2-merge-1")
    rows = []
    for label, method, source in (
        ("`c-faacl`", "c-faacl", of),
        ("`feddrift`, δ' = 1", "feddrift", merging),
        ("`fedweit`", "fedweit", of),
        ("`ssgd`", "ssgd", of),
        ("`apd`", "apd", of),
        ("`feddrift`, δ = 3", "feddrift", of),
        ("`ewc`", "ewc", of),
    ):
        own = [100 * value for value in source.values(method, "accuracy_at_step_ends")]
        published = ""
        if source is of:
            deviation = number(of.published(method, "accuracy-std"), 2).removeprefix("0")
            published = f"{paper(of, digits=2)(method)} ± {deviation}"
        rows.append([label, *(number(value, 1) for value in own), published])
    heads = ("method", "seed 10", "seed 55", "seed 2077", "published (full length)")
    return Table(heads, rows)


# Panicle ----------------------------------------------------------------------------------------

_CASES = [
    "4",
    "6",
    "40",
    "10-iid",
    "20-swap",
    "20-rotation",
    "20-noise",
    "20-dirichlet",
    "20-dirichlet-01",
    "20-churn",
]
_UNTUNED = [
    "overlap",
    "small",
    "giant",
    "scale",
    "sizes",
    "late",
    "hierarchy",
    "leaving",
    "slow",
    "noise",
]
_FASHION = "fashion-"
_ABLATED = (
    *("iid", "groups", "rotation", "noise", "dirichlet"),
    *("churn", "swap", "label-shift"),
)
_ALONE = {
    "turned-mlp": "people, phones turned; `mlp`",
    "turned-cnn": "the same; `cnn1d`",
    "people-mlp": "people; `mlp`",
    "people-cnn": "the same; `cnn1d`",
    "own-labels": "labels of their own",
    "own-images": "shifts of their own",
    "dominant": "one dominant class",
}
_LIKE_FOR_LIKE = (
    *("groups-4", "groups-6", "groups-40", "iid", "swap", "rotation", "noise", "dirichlet"),
    *("dirichlet-01", "churn", "people", "speakers"),
)
_TUNED = (
    *("panicle", "ifca-async", "flexcfl-async", "csafl", "faacl-async", "casa", "fedbuff"),
    *("fedavg", "standalone", "ditto", "fedrep", "fedper", "apfl"),
)
_NATURAL = ("people", "writers", "speakers", "batches", "machines", "roles")
_LARGER = ("characters", "har", "mnist-100-iid", "fashion-100")
_RIVALS = (
    "panicle",
    "ifca-async",
    "ocfl",
    "flexcfl-async",
    "fielding",
    "echopfl",
    "standalone",
    "cfl-async",
    "fedbuff",
    "casa",
)
_FEW_CASES = 12
_TIED = 0.2
"""Points below the best that count as being level with it."""


def _interval(values: Sequence[float]) -> str:
    """Return the middle 95 % of the means of 2,000 samples drawn with replacement.

    The same in every version of Python, as SciPy's `bootstrap` is not in its own.
    """
    rng, count = random.Random(0), len(values)
    means = sorted(statistics.fmean(rng.choices(values, k=count)) for _ in range(2000))
    return f"{means[50]:.2f} to {means[-51]:.2f}"


def _signed_rank(differences: Sequence[float]) -> float:
    """Return the p of Wilcoxon's signed-rank test, two-sided; zeros are left out.

    Exact of up to twelve differences, of more by the normal approximation.
    """
    rounded = [round(d, 6) for d in differences]  # Equal ones are ties.
    few = len(rounded) <= _FEW_CASES
    method = PermutationMethod(n_resamples=2 ** len(rounded)) if few else "asymptotic"
    return float(wilcoxon([d for d in rounded if d], method=method).pvalue)


def _corrected(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by the method of Holm (1979)."""
    corrected, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def _regrets(
    cases: Mapping[str, Experiment], order: Sequence[str], key: str = "accuracy"
) -> dict[str, list[float]]:
    """Return the points of each method below the best of each case, of the means over seeds."""
    found: dict[str, list[float]] = {method: [] for method in order}
    for of in cases.values():
        means = {method: 100 * of.mean(_chosen(of, method), key) for method in order}
        for method in order:
            found[method].append(max(means.values()) - means[method])
    return found


def _of_all_cases(regrets: Mapping[str, list[float]]) -> list[list[str]]:
    """Return the rows below the cases: mean, its interval, p beside the first method, worst."""
    own, *others = regrets.values()
    beside = _corrected(
        [_signed_rank([a - b for a, b in zip(own, other, strict=True)]) for other in others]
    )
    near = (100 * statistics.fmean(value <= _TIED for value in of) for of in regrets.values())
    return [
        ["mean", *(f"{statistics.fmean(of):.2f}" for of in regrets.values())],
        ["95 %", *(_interval(of) for of in regrets.values())],
        ["p", "–", *(f"{p:.2g}" for p in beside)],
        ["worst", *(f"{max(of):.2f}" for of in regrets.values())],
        ["within 0.2", *(f"{share:.3g}%" for share in near)],
    ]


def _regret_table(regrets: Mapping[str, list[float]], cases: Iterable[str]) -> Table:
    """Return the regrets by case, the worst of each method in bold, and of all cases."""
    rows = []
    for i, case in enumerate(cases):
        cells = [(of[i], max(of)) for of in regrets.values()]
        rows.append([case, *(f"**{v:.2f}**" if v == worst else f"{v:.2f}" for v, worst in cells)])
    return Table(("case", *(f"`{method}`" for method in regrets)), rows + _of_all_cases(regrets))


def panicle_regret(docs: Path) -> Table:
    """Points below the best method of each case on digits."""
    order = (*_RIVALS, "fedasync")
    cases = {f"digits-{case}": Experiment.read(docs, f"panicle-digits-{case}") for case in _CASES}
    table = _regret_table(_regrets(cases, order), cases)
    is_first: dict[str, list[bool]] = {method: [] for method in order}
    for of in cases.values():
        times = {method: [_reached(run) for run in of.runs(method)] for method in order}
        # A method that misses the target with one seed does not reach it.
        mean_times = {
            method: math.inf if None in found else statistics.fmean(filter(None, found))
            for method, found in times.items()
        }
        if math.isfinite(best := min(mean_times.values())):
            for method in order:
                is_first[method].append(mean_times[method] <= best)
    shares = (100 * statistics.fmean(is_first[method]) for method in order)
    fastest = ["fastest", *(f"{share:.3g}%" for share in shares)]
    return Table(table.heads, [*table.rows, fastest])


def _chosen(of: Experiment, method: str) -> str:
    """Return the name in a data file of a method, of one that was tuned at its chosen point."""
    ran = {row["method"] for row in of.tree["rows"] if "kind" not in row}
    return next((name for name in ran if name.startswith(f"{method}-lr=")), method)


def _like_for_like(docs: Path, key: str) -> dict[str, Experiment]:
    """Return the cases of benchmarks/like_for_like.toml.

    At equal time without the exchange of data, which comes after a number of updates.
    """
    cases = [case for case in _LIKE_FOR_LIKE if key == "accuracy" or case != "swap"]
    return {case: Experiment.read(docs, f"like-{case}") for case in cases}


def panicle_like(docs: Path) -> Table:
    """Means over the cases of benchmarks/like_for_like.toml, at equal updates and equal time."""
    columns = []
    for key in ("accuracy", "accuracy_at_25"):
        cases = _like_for_like(docs, key)
        means = [
            100 * statistics.fmean(of.mean(_chosen(of, method), key) for of in cases.values())
            for method in _TUNED
        ]
        p = _of_all_cases(_regrets(cases, _TUNED, key))[2][1:]
        columns += [[f"**{v:.1f}**" if v == max(means) else f"{v:.1f}" for v in means], p]

    def work(of: Experiment, method: str) -> float:
        return of.mean(_chosen(of, method), "device_time")

    ratios = (
        statistics.fmean(work(of, method) / work(of, "standalone") for of in cases.values())
        for method in _TUNED
    )
    columns.append([f"{ratio:.1f}" for ratio in ratios])
    rows = zip(code(*_TUNED).values(), *columns, strict=True)
    heads = ("<method", "20 updates per client", "p", "after 25 s", "p", "computation")
    return Table(heads, [list(row) for row in rows])


def panicle_like_cases(docs: Path, key: str) -> Table:
    """Points below the best method of each case of benchmarks/like_for_like.toml."""
    cases = _like_for_like(docs, key)
    return _regret_table(_regrets(cases, _TUNED, key), cases)


def panicle_untuned(docs: Path, images: str = "") -> Table:
    """Points below the best method of each case of benchmarks/untuned_fleets.toml."""
    cases = {case: Experiment.read(docs, f"untuned-{images}{case}") for case in _UNTUNED}
    return _regret_table(_regrets(cases, (*_RIVALS, "fedavg")), cases)


def panicle_natural(docs: Path) -> Table:
    """Points below the best method of each case of benchmarks/natural_fleets.toml."""
    cases = {case: Experiment.read(docs, f"natural-{case}") for case in _NATURAL}
    return _regret_table(_regrets(cases, (*_RIVALS, "fedavg")), cases)


def panicle_alone(docs: Path) -> Table:
    """Accuracy of all clients and of the worst tenth in benchmarks/alone_or_together.toml."""
    methods, rows = ("panicle", "standalone", "fedavg", "fedbuff"), []
    for case, title in _ALONE.items():
        of = Experiment.read(docs, f"alone-{case}")
        cells = [
            f"{spread(of.values(method, 'accuracy_after_40'), 1, 100.0)} / "
            f"{number(100 * of.mean(method, 'worst_tenth_accuracy_after_40'), 1)}"
            for method in methods
        ]
        rows.append([title, *_bold(cells)])
    return Table(("fleet", *(f"`{method}`" for method in methods)), rows)


def panicle_alone_points(docs: Path, methods: str, when: str) -> Table:
    """The same at several points: all clients and, in rows of their own, the worst tenth."""
    rows = []
    for case, title in _ALONE.items():
        of = Experiment.read(docs, f"alone-{case}")
        for label, key in ((title, "accuracy"), ("worst tenth", "worst_tenth_accuracy")):
            points = [
                [_percent(of, method, f"{key}_{point}") for method in methods.split()]
                for point in when.split()
            ]
            rows.append([label, *map(", ".join, zip(*map(_bold, points), strict=True))])
    return Table(("fleet", *code(*methods.split()).values()), rows)


def _percent(of: Experiment, method: str, key: str) -> str:
    """Return the mean of an accuracy; a dash where runs were shorter."""
    found = of.values(method, key)
    return number(100 * statistics.fmean(found) if found else None, 1)


def panicle_stations(docs: Path) -> Table:
    """Errors at twelve stations, the methods from the best."""
    of = Experiment.read(docs, "natural-stations")
    order = sorted(of.tree["methods"], key=lambda method: of.mean(method, "mae"))
    errors = [spread(of.values(method, "mae"), 2) for method in order]
    return Table([f"`{method}`" for method in order], [errors])


def _with_time(of: Experiment, method: str) -> str:
    """Return the accuracy at the end, with the time to the target if it is reached."""
    reached = _reached(of.runs(method)[0])
    text = number(100 * of.mean(method, "accuracy"), 1)
    return text if reached is None else f"{text} ({number(reached, 1)} s)"


def panicle_larger(docs: Path) -> Table:
    """The cases of Panicle's suite on other data than digits."""
    order = (*_RIVALS, "fedasync")
    cases = {case: Experiment.read(docs, f"panicle-{case}") for case in _LARGER}
    rows = [
        [case, *_bold([_with_time(of, method) for method in order])] for case, of in cases.items()
    ]
    return Table(("case", *(f"`{method}`" for method in order)), rows)


def panicle_ablation(docs: Path) -> Table:
    """Accuracy of Panicle, and what it changes by without each part."""
    parts = ("no-clusters", "no-drift", "no-forward", "no-average", "no-own-model")
    rows, changes = [], []
    for case in _ABLATED:
        of = Experiment.read(docs, f"ablation-{case}")
        whole = of.mean("whole", "accuracy")
        changes.append([100 * (of.mean(part, "accuracy") - whole) for part in parts])
        cells = (number(change, 1) for change in changes[-1])
        rows.append([case, spread(of.values("whole", "accuracy"), 1, 100.0), *cells])
    means = (number(statistics.fmean(column), 1) for column in zip(*changes, strict=True))
    rows.append(["mean", "", *means])
    return Table(("case", "whole", *(part.replace("-", " ") for part in parts)), rows)


def panicle_personalized(docs: Path) -> Table:
    """Panicle beside personalized methods on natural fleets."""
    methods = ("panicle", "fedrep", "fedper", "ditto", "apfl", "fedavg", "standalone")
    rows = []
    for case in ("people", "speakers", "writers", "batches"):
        of = Experiment.read(docs, f"natural-{case}")
        cells = [spread(of.values(method, "accuracy"), 1, 100.0) for method in methods]
        rows.append([case, *_bold(cells)])
    return Table(("fleet", *(f"`{method}`" for method in methods)), rows)


# Attacks ----------------------------------------------------------------------------------------

_FAST = ("casa", "fedbuff", "flexcfl-async", "panicle")
_FAST_ATTACKS = dict.fromkeys(["none", "rush", "boil", "wedge", "split", "backdoor"], "none")
_FAST_ATTACKS |= {"visitors": "visitors", "sybils": "visitors"}
_INFORMED = ("casa", "flexcfl-async", "ifca-async", "fedbuff", "fedasync")
_KNOWN_ATTACKS = (
    "clean absent edge-anti edge-push sign-flip sign-flip-x3 mimic min-max min-sum long-good "
    "replay hidden-push hidden-anti hidden-gain pulse false-group"
)


def poisoning_late(docs: Path) -> Table:
    """Late sybils and backdoors by method, without and with the filter."""
    of = Experiment.read(docs, "poisoning-late")

    def honest(method: str, attack: str) -> str:
        key = "accuracy" if attack == "unattacked" else "honest_accuracy"
        both = (spread(of.values(f"{method}-{attack}{f}", key), 1, 100.0) for f in ("", "-filter"))
        return "; ".join(dict.fromkeys(both))

    def success(method: str, attack: str) -> str:
        names = (f"{method}-{attack}", f"{method}-{attack}-filter")
        both = (spread(of.values(name, "backdoor_success"), 0, 100.0) for name in names)
        return "; ".join(dict.fromkeys(both))

    heads = ("method", "unattacked", "sybils", "backdoor", "success", "backdoor × 3", "success")
    rows = [
        [
            *(f"`{method}`", honest(method, "unattacked"), honest(method, "sybils")),
            *(honest(method, "backdoor"), success(method, "backdoor")),
            *(honest(method, "backdoor-x3"), success(method, "backdoor-x3")),
        ]
        for method in (
            "panicle",
            "flexcfl-async",
            "ifca-async",
            "casa",
            "fedbuff",
            "fedasync",
            "cdfl",
        )
    ]
    return Table(heads, rows)


def attacked(
    docs: Path,
    name: str,
    methods: Sequence[str],
    attacks: Mapping[str, str],
    ending: str = "",
    *,
    has_worst: bool = True,
) -> Table:
    """Accuracy of honest clients under attacks, by method.

    Parameters
    ----------
    attacks : Mapping[str, str]
        Variants, to that in which the same clients are honest.
    ending : str
        What the names of all variants end with.
    has_worst : bool
        Whether runs without attack know which clients would have attacked.
    """
    of = Experiment.read(docs, name)

    def figures(attack: str, method: str, *names: str) -> list[float]:
        runs = of.runs(f"{attack}{ending}/{method.replace(' ', '-')}")
        return [100 * next(run[name] for name in names if name in run) for run in runs]

    def honest(attack: str, method: str) -> list[float]:
        # Without an attack in the configuration all clients are honest.
        return figures(attack, method, "honest_accuracy", "accuracy")

    def change(points: float) -> str:
        return f"{points:+.1f}".replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0")

    def cell(attack: str, method: str) -> str:
        shown = f"{statistics.fmean(honest(attack, method)):.1f}"
        if attack == attacks[attack] and not has_worst:
            return shown
        worst = figures(attack, method, "worst_honest_accuracy")
        shown += f" ({statistics.fmean(worst):.1f})"
        if attack == attacks[attack]:
            return shown
        pairs = zip(honest(attack, method), honest(attacks[attack], method), strict=True)
        gains = [attacked - calm for attacked, calm in pairs]
        return f"{shown} {change(statistics.fmean(gains))}, {change(min(gains))}"

    rows = [[f"`{attack}`", *(cell(attack, method) for method in methods)] for attack in attacks]
    return Table(("attack", *(f"`{method.split()[0]}`" for method in methods)), rows)


def fair(docs: Path) -> Table:
    """Unequal fleets without and with a bound on influence."""
    fleets = {
        "slow30x5": "30 % 5 times slower",
        "slow30x20": "30 % 20 times slower",
        "slow70x5": "70 % 5 times slower",
    }
    rows = []
    for name, title in fleets.items():
        of = Experiment.read(docs, f"fair-{name}")
        for method in ("casa", "fedbuff"):
            both = (method, f"{method}-fair")
            cells = [cell(one) for cell in (accuracy(of, 1), _times(of)) for one in both]
            rows.append([title, f"`{method}`", *cells])
    heads = ("devices", "<method", "accuracy %", "`fair`", "s to 0.85", "`fair`")
    return Table(heads, rows)


# Privacy ----------------------------------------------------------------------------------------


def privacy(docs: Path) -> Table:
    """Accuracy against ε of central differential privacy."""
    data = {"digits": "eps", "MNIST": "mnist", "people": "people", "speakers": "speakers"}
    rows = []
    for title, name in data.items():
        of = [Experiment.read(docs, f"privacy-{name}-{epsilon}") for epsilon in ("none", "8", "2")]
        methods = code("fedavg", "fedbuff", "panicle")
        cells = lines(methods, *(accuracy(one, 1) for one in of))
        rows += [[title if i == 0 else "", *row] for i, row in enumerate(cells)]
    return Table(("data", "<method", "no noise", "ε = 8", "ε = 2"), rows)


def sketches(docs: Path) -> Table:
    """Groups that Panicle finds from sketches with noise."""
    of = [Experiment.read(docs, f"sketches-{clients}") for clients in (20, 60)]

    titles = {"models": "none: models"} | {f"eps-{e}": str(e) for e in (800, 400, 200, 100)}
    cells = [
        cell
        for one in of
        for cell in (whole(one, "clusters"), by_seed(one, 2, "purity"), accuracy(one, 1))
    ]
    heads = [f"{head}, {n} clients" for n in (20, 60) for head in ("clusters", "purity")]
    heads.insert(2, "accuracy %")
    return Table(("<ε", *heads, "accuracy %"), lines(titles, *cells))


_PAPER_300 = "accuracy %, paper (300 rounds)"
_CHARACTERS = "accuracy %, paper, FEMNIST (300 rounds)"
_SEEDS_75 = "ours (75 rounds, seeds 0, 1, 2)"
# Methods at equal virtual time -------------------------------------------------------------------


_FAMILIES: Mapping[str, tuple[str | None, str]] = {
    "casa": (None, "casa casa-plus panicle ifca-async cfl-async fedasync"),
    "cfl": (None, "cfl ocfl icfl cfl-async casa fedavg"),
    "ifca": (None, "ifca fesem fedrc ifca-async flexcfl casa"),
    "flexcfl": (None, "flexcfl flexcfl-async ifca ifca-async panicle fedavg"),
    "faacl": (None, "faacl faacl-async flexcfl cfl panicle fedavg"),
    "csafl": (None, "csafl flexcfl flexcfl-async casa fedavg fedasync"),
    "profiles": (None, "flux cfl-gp fielding echopfl flexcfl casa"),
    "one-model": (None, "fedavg fedasync fedbuff ace casa standalone"),
    "personalized": (None, "ditto fedrep panicle fedavg standalone"),
    "feddrift": ("drift", "feddrift feddrift-async panicle fielding flexcfl-async fedasync"),
    "continual": ("tasks", "apd fedweit ewc ssgd fedavg"),
    "cdfl": ("mixtures", "cdfl fedsoft-async fedsoft"),
}
"""Methods beside their neighbours, by the page of a family: the fleet, and the rows."""


def equal_time(docs: Path, name: str, methods: str) -> Table:
    """Accuracy and costs of methods that had the same virtual time."""
    of = Experiment.read(docs, name)

    def mean(key: str, digits: int, factor: float = 1.0) -> Cell:
        return lambda method: number(factor * of.mean(method, key), digits)

    return Table(
        (
            *("method", "accuracy %", "worst tenth", "clusters", "updates", "device time (s)"),
            *("MB down", "MB up"),
        ),
        lines(
            code(*methods.split()),
            accuracy(of, 1),
            mean("worst_tenth_accuracy", 1, 100.0),
            whole(of, "clusters"),
            mean("updates", 0),
            mean("device_time", 0),
            mean("bytes_down", 1, 1e-6),
            mean("bytes_up", 1, 1e-6),
        ),
    )


TABLES: dict[str, Callable[[Path], Table]] = {
    "casa-table1-mnist": partial(
        casa_table1,
        name="casa-table1-mnist",
        methods={
            **code("casa-plus", "casa"),
            "ifca-async-k=4-alpha=0.3": "`ifca-async` *, k = 4",
            "cfl-async-eps1=0.4-eps2=0.5": "`cfl-async` *",
            "standalone": "`standalone`",
            "ifca-k=5": "`ifca` *, k = 5",
            **code("icfl-async", "icfl", "fedbuff", "cfl", "fedavg", "fedprox", "fedasync"),
        },
        above=1,
        goal="",
    ),
    "casa-table1-mnist-sweeps": casa_sweeps,
    "casa-fig8-mnist": casa_fig8,
    "casa-fig8-cifar10": casa_fig8_cifar10,
    "casa-fig9a": casa_fig9a,
    "casa-fig9bc": casa_fig9bc,
    "casa-fig10a": casa_fig10a,
    "casa-fig10b": casa_fig10b,
    "casa-table1-mnist-casa-plus": casa_plus,
    "casa-table1-mnist-fedrep": casa_fedrep,
    "casa-table1-uci-har": partial(
        casa_open_data,
        name="uci-har",
        theirs="HARBox",
        published={
            "cfl": "85.06",
            "ifca": "85.06",
            "casa": "87.38",
            "fedbuff": "81.62",
            "fedasync": "78.72",
            "standalone": "69.48",
        },
    ),
    "casa-table1-characters": partial(
        casa_open_data,
        name="characters",
        theirs="FEMNIST",
        published={
            "cfl": "98.75",
            "ifca": "96.59",
            "standalone": "93.95",
            "casa": "98.97",
            "fedasync": "96.97",
            "fedbuff": "98.21",
        },
    ),
    "external-niid-bench": external_niid,
    "external-pfllib": partial(
        external_pfllib,
        name="external-pfllib-fashion",
        methods="fedrep ditto fedper apfl fedavg fedprox panicle casa",
    ),
    "external-pfllib-two-classes": partial(
        external_pfllib,
        name="external-pfllib-fashion-two-classes",
        methods="fedrep fedper ditto apfl fedavg fedprox panicle casa",
    ),
    "external-cfla": external_cfla,
    "casa-table1-cifar10": partial(
        casa_table1,
        name="casa-table1-cifar10",
        methods={
            **code("casa-plus", "casa"),
            "cfl-eps1=0.4-eps2=0.32": "`cfl`, ε2 = 0.32",
            "ifca-k=4": "`ifca`, k = 4",
            **code("standalone", "icfl", "icfl-async"),
            "cfl-async-eps1=0.4-eps2=0.5": "`cfl-async`, ε2 = 0.5",
            "ifca-async-k=4-alpha=0.3": "`ifca-async`, k = 4",
            "cfl-eps1=0.4-eps2=0.7": "`cfl`, ε2 = 0.7 †",
            **code("fedavg", "fedprox"),
            "cfl-async-eps1=0.4-eps2=1.0": "`cfl-async`, ε2 = 1 †",
            **code("fedasync", "fedbuff"),
        },
        above=2,
        goal=" to 80 %",
    ),
    "csafl-table2-mnist": csafl_mnist,
    "csafl-table2-characters": csafl_characters,
    "csafl-table2-synthetic": csafl_synthetic,
    "csafl-table2-15s": csafl_15s,
    "csafl-fig5": csafl_idle,
    "cdfl-table1": cdfl,
    "cdfl-table1-sessions": cdfl_sessions,
    "cdfl-table1-digits": cdfl_digits,
    "cdfl-effects-proxy": cdfl_proxy,
    "cdfl-bar": cdfl_bar,
    "cdfl-bar-full": cdfl_bar_full,
    "feddrift-table-mnist": feddrift_mnist,
    "flexcfl-table1": flexcfl_table1,
    "flexcfl-table3-mnist-mclr": flexcfl_mnist_mclr,
    "flexcfl-table3-mnist-mlp": partial(
        flexcfl_table3,
        name="mnist-mlp",
        order="flexcfl rcc ifca flexcfl-eta fesem fedavg fedprox rac",
        heads=(_PAPER_300, _SEEDS_75),
    ),
    "flexcfl-table3-mnist-cnn": partial(
        flexcfl_table3,
        name="mnist-cnn-75",
        order="flexcfl flexcfl-eta rcc ifca fedavg rac fedprox fesem",
        heads=(_PAPER_300, "ours (75 rounds)"),
    ),
    "flexcfl-table3-characters-mclr": partial(
        flexcfl_table3,
        name="characters-mclr",
        order="flexcfl ifca flexcfl-eta rcc rac fesem fedprox fedavg",
        heads=(_CHARACTERS, "ours, UniPen (75 rounds, seeds 0, 1, 2)"),
    ),
    "flexcfl-table3-characters-mlp": partial(
        flexcfl_table3,
        name="characters-mlp",
        order="flexcfl rcc flexcfl-eta ifca rac fedprox fedavg fesem",
        heads=(_CHARACTERS, "ours, UniPen"),
    ),
    "flexcfl-table3-synthetic-mclr": partial(
        flexcfl_table3,
        name="synthetic-mclr",
        order="ifca rcc flexcfl rac fedprox flexcfl-eta fesem fedavg",
        heads=("accuracy %, paper", "ours (seeds 0, 1, 2)"),
    ),
    "flexcfl-table4-mnist-swap-all": partial(flexcfl_swap_mnist, kind="swap-all"),
    "flexcfl-table4-mnist-swap-part": partial(flexcfl_swap_mnist, kind="swap-part"),
    "flexcfl-table4-characters": flexcfl_swap_characters,
    "flexcfl-table4-incremental": flexcfl_incremental,
    "flexcfl-table4-mnist-mlp": partial(flexcfl_table4, data="mnist-mlp"),
    "flexcfl-table4-characters-mlp": partial(
        flexcfl_table4, data="characters-mlp", kinds=("swap-all", "incremental")
    ),
    "flexcfl-table4-synthetic": partial(flexcfl_table4, data="synthetic-mclr"),
    "flexcfl-fig6-a": flexcfl_fig6_a,
    "flexcfl-fig6-b": flexcfl_fig6_b,
    "faacl-table-mnist": partial(
        faacl_mnist,
        scenarios="s0 s1 s2",
        order="faacl ifca feddrift fedavg fesem fedgroup fedsoft",
    ),
    "faacl-table-mnist-asymmetric": partial(
        faacl_mnist,
        scenarios="a1 a2",
        order="faacl fedavg feddrift ifca fesem fedgroup fedsoft",
    ),
    "faacl-comm": faacl_bytes,
    "faacl-table-fashion": faacl_fashion,
    "c-faacl-sequential": sequential,
    "poisoning-late": poisoning_late,
    "fast-attacks-1": partial(
        attacked, name="fast-attacks", methods=_FAST, attacks=_FAST_ATTACKS, ending="-1"
    ),
    "fast-attacks-4": partial(
        attacked,
        name="fast-attacks",
        methods=_FAST,
        attacks={**_FAST_ATTACKS, "labels": "none"},
        ending="-4",
    ),
    "informed-own": partial(
        attacked,
        name="informed-own",
        methods=(*(f"{method} trust own" for method in _INFORMED), "panicle trust"),
        attacks=dict.fromkeys(_KNOWN_ATTACKS.split(), "clean"),
        has_worst=False,
    ),
    "fair": fair,
    "privacy": privacy,
    "sketches": sketches,
    "panicle-like": panicle_like,
    "panicle-like-updates": partial(panicle_like_cases, key="accuracy"),
    "panicle-like-time": partial(panicle_like_cases, key="accuracy_at_25"),
    "panicle-regret": panicle_regret,
    "panicle-natural": panicle_natural,
    "panicle-alone": panicle_alone,
    "panicle-alone-updates": partial(
        panicle_alone_points,
        methods="panicle standalone fedavg",
        when="after_10 after_25 after_40 after_100",
    ),
    "panicle-alone-time": partial(
        panicle_alone_points,
        methods="panicle standalone fedbuff fedavg",
        when="at_20 at_30 at_50",
    ),
    "panicle-stations": panicle_stations,
    "panicle-untuned": panicle_untuned,
    "panicle-fashion": partial(panicle_untuned, images=_FASHION),
    "panicle-larger": panicle_larger,
    "panicle-ablation": panicle_ablation,
    "panicle-personalized": panicle_personalized,
}
"""The tables, by the names in their marks."""

TABLES |= {
    f"equal-time-{family}": partial(
        equal_time, name=f"equal-time{'' if case is None else f'-{case}'}", methods=methods
    )
    for family, (case, methods) in _FAMILIES.items()
}

_MARKED = re.compile(r"<!-- table: ([^\n]+?) -->\n(.*?)\n?<!-- end -->", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"(?:^|\n)([^\n]*)\n(\|[^\n]*)\n\|[-:| ]+\|\n")


def pages(docs: Path) -> list[Path]:
    """Return the results pages."""
    return sorted(page for pattern in (*PAGES, METHODS) for page in docs.glob(pattern))


def rewritten(docs: Path, page: Path) -> tuple[str, list[str]]:
    """Return a page with its tables made anew, and one line for each that differs or fails."""
    problems: list[str] = []

    def replace(found: re.Match[str]) -> str:
        name, old = found[1], found[2]
        try:
            if name not in TABLES:
                raise TableError(f"no table {name!r} in docs/tables.py")
            new = TABLES[name](docs).text()
        except TableError as error:
            problems.append(f"{page.name}: {name}: {error}")
            return found[0]
        if new != old:
            pairs = zip(old.splitlines(), new.splitlines(), strict=False)
            first = next((f"{a!r}, the data give {b!r}" for a, b in pairs if a != b), "its length")
            problems.append(f"{page.name}: {name} differs: {first}")
        return f"<!-- table: {name} -->\n{new}\n<!-- end -->"

    return _MARKED.sub(replace, page.read_text(encoding="utf-8")), problems


def unmarked(page: Path) -> list[str]:
    """Return one line for each table that neither the data nor a reason stands behind."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [
        f"{page.name}: a table without <!-- table: … --> or <!-- hand: … -->: {head[2]}"
        for head in _HEAD.finditer(text)
        # A table without heads only lays out pictures.
        if re.search(r"\w", head[2])
        and "![" not in head[2]
        and not head[1].startswith(("<!-- table: ", "<!-- hand: "))
    ]


def unknown_files(docs: Path) -> list[str]:
    """Return one line for each data file that no page names."""
    text = "".join(page.read_text(encoding="utf-8") for page in pages(docs))
    named = set(re.findall(r"results/([\w.*-]+\.json)", text))
    return [
        f"results/{path.name}: no results page names this experiment"
        for path in sorted((docs / "results").iterdir())
        if not any(fnmatch(path.name, name) for name in named)
    ]


def main(arguments: Sequence[str] | None = None, docs: Path = DOCS) -> int:
    """Rewrite the tables, or with ``--check`` tell which differ; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, tell what differs")
    parser.add_argument("--unpack", metavar="EXPERIMENT", help="write the folder of its runs")
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="write a comparison's data file"
    )
    parser.add_argument(
        "--at", type=float, action="append", metavar="SECONDS", help="with the accuracy then"
    )
    parser.add_argument(
        "--after", type=int, action="append", metavar="UPDATES", help="the same, per client"
    )
    parser.add_argument("--out", type=Path, help="the folder for --unpack, the file for --pack")
    options = parser.parse_args(arguments)
    is_check, problems = options.check, list[str]()
    if options.unpack is not None or options.pack is not None:
        try:
            if options.pack is not None:
                out = options.out or docs / "results" / f"{options.pack.name}.json"
                packed = pack(options.pack, options.at or (), options.after or ())
                out.write_text(packed, encoding="utf-8")
            else:
                Experiment.read(docs, options.unpack).unpack(options.out or Path(options.unpack))
        except TableError as error:
            print(error)
            return 1
        return 0
    for page in pages(docs):
        text, found = rewritten(docs, page)
        if not is_check:
            page.write_text(text, encoding="utf-8")
            found = [problem for problem in found if " differs: " not in problem]
        problems += found + ([] if page.match(METHODS) else unmarked(page))
    problems += unknown_files(docs)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
