"""The page of a run: one self-contained file with all results."""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tomli_w

from raceme.core.config import CONFIG, keys_of, parse_assignment, read_toml
from raceme.core.errors import UserError
from raceme.core.events import ClusterChange, ClustersChanged, Measure, Verdict, grouped, home
from raceme.core.files import ReadingError, parse_json, read_text
from raceme.core.options import AUTO, Value, as_typed
from raceme.features.client_map.positions import evenly_spread
from raceme.records.folder import (
    CHECKPOINTS,
    CONTROL,
    LOG,
    MODELS,
    SIMILARITY,
    STORE,
    SUMMARY,
    has_writer,
)
from raceme.records.record import ClientRecord, Flags, RunRecord, read_run
from raceme.records.similarity import read_similarity
from raceme.records.summary import Floats
from raceme.reporting.artefacts import figures_of
from raceme.reporting.console import summary_rows
from raceme.reporting.dashboard import frozen_run
from raceme.reporting.page import (
    PageTable,
    Tile,
    first_of,
    number,
    plot,
    plural,
    render,
    versions_table,
)
from raceme.reporting.plots import staleness_figure
from raceme.reporting.style import CLOCK, ChangePoint, change_points, cluster_colour

# -----------------------------------------------------------------------------
# A run's clients and clusters as tables of its page.
# -----------------------------------------------------------------------------


_MOST_CLIENTS = 200
"""Maximum number of clients in a table."""
_MOST_MEMBERS = 300
"""Maximum number of listed members of a cluster."""
_MOST_CHANGES = 50
_MOST_OWN = 4
"""Maximum number of a client's listed clusters, those with the largest weights."""
_MOST_CLUSTERS = 50


@dataclass(frozen=True)
class ClusterMembers:
    """A cluster's final members.

    Attributes
    ----------
    colour : str
        Its colour in the plots.
    clients : tuple of str
        Ids of the first members.
    further : int
        Number of unlisted members.
    counts : tuple of int
        Members of each true group, in the order of :attr:`FinalClusters.groups`.
    weight : float
        Sum of the weights of all clients, members of other clusters included.
    """

    cluster: int
    colour: str
    clients: tuple[str, ...]
    further: int
    counts: tuple[int, ...]
    weight: float

    @property
    def size(self) -> int:
        """Number of all members."""
        return len(self.clients) + self.further


@dataclass(frozen=True)
class FinalClusters:
    """The clusters' final members and true groups, if known.

    Attributes
    ----------
    groups : tuple of str
        Names of the true groups.
    clusters : tuple of ClusterMembers
        The first clusters with their members.
    further : int
        Number of unlisted clusters.
    without : int
        Number of clients without a cluster.
    shared : int
        Number of clients of several clusters, listed in the one with the largest weight.
    """

    groups: tuple[str, ...]
    clusters: tuple[ClusterMembers, ...]
    further: int
    without: int
    shared: int


def final_clusters(record: RunRecord) -> FinalClusters | None:
    """Return the clusters' members; None if there was always only one cluster."""
    if len({cluster for placed in record.placements for cluster in placed.weights}) < 2:
        return None
    assignment, memberships = record.assignment(), record.memberships()
    total: Counter[int] = Counter()
    for weights in memberships.values():
        total.update(weights)
    groups = record.groups
    known = sorted({group for group in groups.values() if group is not None})
    columns: list[int | None] = list(known)
    if known and any(groups.get(client) is None for client in assignment):
        columns.append(None)
    clusters = sorted(total)
    listed = []
    for cluster in clusters[:_MOST_CLUSTERS]:
        clients = [client for client, place in assignment.items() if place == cluster]
        counts = Counter(groups.get(client) for client in clients)
        listed.append(
            ClusterMembers(
                cluster,
                cluster_colour(cluster),
                tuple(clients[:_MOST_MEMBERS]),
                max(0, len(clients) - _MOST_MEMBERS),
                tuple(counts[group] for group in columns),
                float(total[cluster]),
            )
        )
    names = tuple("not known" if group is None else f"group {group}" for group in columns)
    without = sum(client.client not in assignment for client in record.clients)
    shared = sum(len(weights) > 1 for weights in memberships.values())
    further = max(0, len(clusters) - _MOST_CLUSTERS)
    return FinalClusters(names, tuple(listed), further, without, shared)


def clusters_table(record: RunRecord) -> PageTable | None:
    """Return the last accuracy of each cluster; None without several evaluated clusters."""
    last = len(record.evaluations.time) - 1
    found = record.client_evaluations
    own = found.evaluation == last
    clusters = np.unique(found.cluster[own])
    if len(clusters) < 2:
        return None
    updates = Counter(record.updates.cluster.tolist())
    rows = []
    for cluster in clusters[:_MOST_CLUSTERS].tolist():
        own_accuracy = found.accuracy[own & (found.cluster == cluster)]
        low, high = own_accuracy.min(), own_accuracy.max()
        mean, count = own_accuracy.mean(), len(own_accuracy)
        rows.append((f"cluster {cluster}", count, mean, low, high, updates[cluster]))
    heads = ("cluster", "clients", f"mean {record.measure.word}", "lowest", "highest", "updates")
    more = first_of(len(rows), len(clusters))
    return PageTable(f"Clusters at the last evaluation{more}", heads, rows)


def changes_table(record: RunRecord) -> PageTable | None:
    """Return the splits, merges, new and retired clusters with times; None without any.

    Initial clusters are no change.
    """
    changes = [c for c in record.changes if (c.made or c.gone) and (c.gone or c.time > 0)]
    if not changes:
        return None
    rows = [
        (
            number(change.time, 2),
            change.updates,
            change.change.value,
            ", ".join(map(str, change.gone)) or "–",
            _sizes(change),
            change.score,
            change.threshold,
        )
        for change in changes[:_MOST_CHANGES]
    ]
    heads = ("time (s)", "updates", "change", "of cluster", "to (clients)", "measured", "bound")
    some = f"{_MOST_CHANGES} of " if len(changes) > _MOST_CHANGES else ""
    title = f"{some}{plural(len(changes), 'change')} of the clusters"
    return PageTable(title, heads, rows, words=(2, 3, 4))


def _sizes(change: ClustersChanged) -> str:
    """Name the new clusters with the number of their clients."""
    sizes = Counter(home(weights) for weights in change.memberships.values())
    return ", ".join(f"{cluster} ({sizes[cluster]})" for cluster in change.made) or "–"


def moves_table(record: RunRecord) -> PageTable | None:
    """Return the clients' numbers of moves, if any."""
    moved = [change for change in record.changes if change.change is ClusterChange.MOVE]
    if not moved:
        return None
    of = Counter(client for change in moved for client in change.memberships)
    rows = of.most_common(_MOST_CHANGES)
    times = plural(sum(of.values()), "time")
    more = f", the {len(rows)} most often" if len(rows) < len(of) else ""
    title = f"Clients moved, or their weights changed, {times}{more}"
    return PageTable(title, ("client", "moves"), rows)


def clients_table(record: RunRecord) -> PageTable:
    """Return a table of clients; for a large fleet, a sample over the order of joining."""
    chosen = [record.clients[i] for i in evenly_spread(len(record.clients), _MOST_CLIENTS)]
    rows = list(_client_rows(record, chosen))
    total = len(record.clients)
    shown = f"{len(rows)} of {total:,} clients" if len(rows) < total else f"{total} clients"
    heads = (
        "client",
        "group",
        "cluster",
        "examples",
        "updates",
        "rejected",
        "median task (s)",
        "at work",
        "median staleness",
        record.measure.word,
    )
    return PageTable(f"The numbers: {shown}", heads, rows)


def costs_table(record: RunRecord) -> PageTable | None:
    """Return the total cost of each device's updates; None if not stated.

    Bytes of arrays are counted by the server; devices state seconds.
    """
    updates = record.updates
    if not np.isfinite(updates.cpu_seconds).any():
        return None
    chosen = [record.clients[i].client for i in evenly_spread(len(record.clients), _MOST_CLIENTS)]
    rows = [_cost_row(name, record, updates.client == name) for name in chosen]
    if len(chosen) == len(record.clients) > 1:
        rows.append(_cost_row("all", record, np.ones(len(updates.client), bool)))
    heads = ("client", "updates", "CPU (s)", "bytes down", "bytes up")
    more = "" if len(chosen) == len(record.clients) else f", {len(chosen)} clients of the run"
    return PageTable(f"Cost of the updates{more}", heads, rows)


def _cost_row(name: str, record: RunRecord, own: Flags) -> tuple[Any, ...]:
    updates = record.updates
    seconds = number(_sum(updates.cpu_seconds[own]), 1)
    down, up = updates.bytes_down[own].sum(), updates.bytes_up[own].sum()
    return name, own.sum(), seconds, down, up


def _sum(values: Floats) -> float | None:
    """Return the sum of known values; None without any."""
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else None


def _client_rows(record: RunRecord, clients: Iterable[ClientRecord]) -> Iterable[tuple[Any, ...]]:
    updates, found = record.updates, record.client_evaluations
    memberships = record.memberships()
    rejected = Counter(record.rejections.client.tolist())
    last = found.evaluation == len(record.evaluations.time) - 1
    accuracy = dict(zip(found.client[last].tolist(), found.accuracy[last].tolist(), strict=True))
    durations = updates.time - updates.dispatched_at
    # A single pass over the updates.
    order = np.argsort(updates.client, kind="stable")
    names = updates.client[order]
    for client in clients:
        low, high = (np.searchsorted(names, client.client, side) for side in ("left", "right"))
        own = order[low:high]
        online = sum((record.end if end is None else end) - start for start, end in client.online)
        busy = float(durations[own].sum()) / online if online > 0 else 0.0
        yield (
            client.client,
            "–" if (group := record.groups.get(client.client)) is None else str(group),
            _own_clusters(memberships.get(client.client, {})),
            client.num_examples,
            len(own),
            rejected[client.client],
            number(float(np.median(durations[own])), 2) if len(own) else "–",
            f"{min(busy, 1.0):.0%}",
            number(float(np.median(updates.staleness[own])), 1) if len(own) else "–",
            accuracy.get(client.client),
        )


def _own_clusters(weights: Mapping[int, float]) -> str:
    """Name a client's clusters, several with weights."""
    if len(weights) < 2:
        return ", ".join(map(str, weights)) or "–"
    ranked = sorted(weights, key=lambda cluster: (-weights[cluster], cluster))
    named = [f"{cluster} ({weights[cluster]:.2f})" for cluster in ranked[:_MOST_OWN]]
    return ", ".join(named) + (", …" if len(ranked) > _MOST_OWN else "")


# -----------------------------------------------------------------------------
# Tables of drift: accuracy before and after.
# -----------------------------------------------------------------------------


_MOST_DRIFTS = 50
_MOST_STEPS = 50


def drifts_table(record: RunRecord) -> PageTable | None:
    """Return the accuracy before and after each drift, and the time of recovery.

    Accuracy of the clients whose data changed. None without drift or with too many drifts for a
    table; then see :func:`steps_table`.
    """
    found = change_points(record.data_changes)
    if not 0 < len(found) <= _MOST_DRIFTS:
        return None
    untils = [*(drift.time for drift in found[1:]), math.inf]
    rows = [_row(record, drift, until) for drift, until in zip(found, untils, strict=True)]
    word = f"{record.measure.word} before"
    heads = ("time (s)", "updates", "whose data", "step", word, "after", "back after (s)")
    title = f"{plural(len(found), 'change')} of the clients' data"
    return PageTable(title, heads, rows, words=(2,))


def steps_table(record: RunRecord) -> PageTable | None:
    """Return updates and tests per step of the data; None without drift."""
    if not record.data_changes:
        return None
    trained, found = record.updates.step, record.client_evaluations
    steps = np.unique(np.concatenate([trained, found.step]))
    rows = []
    for step in steps[:_MOST_STEPS]:
        tested = found.accuracy[found.step == step]
        mean = tested.mean() if len(tested) else None
        rows.append((step, np.count_nonzero(trained == step), len(tested), mean))
    more = first_of(len(rows), len(steps))
    heads = ("step", "updates trained on it", "tests on it", f"mean {record.measure.word} of these")
    return PageTable(f"Steps of the data{more}", heads, rows, words=())


def _row(record: RunRecord, drift: ChangePoint, until: float) -> tuple[Any, ...]:
    """Return a drift's row; the next drift is at `until`."""
    found = record.client_evaluations
    affected = np.ones(len(found.client), np.bool_)
    if drift.clients is not None:
        affected = np.isin(found.client, sorted(drift.clients))
    # By step, not by time: on real devices an evaluation takes time.
    reached = found.step >= drift.steps[0]
    count = len(record.evaluations.time)
    old, new = (found.means(affected & side, count) for side in (~reached, reached))
    before = float(old[np.isfinite(old)][-1]) if np.isfinite(old).any() else None
    after = float(new[np.isfinite(new)][0]) if np.isfinite(new).any() else None
    back = "–"
    if before is not None and after is not None:
        times = record.evaluations.time
        recovered = new <= before if record.measure.is_error else new >= before
        there = np.flatnonzero(recovered & (times < until))
        back = number(max(0.0, float(times[there[0]] - drift.time)), 1) if len(there) else "not"
    return number(drift.time, 2), drift.updates, drift.whose, drift.step, before, after, back


# -----------------------------------------------------------------------------
# Tables of learning and forgetting.
# -----------------------------------------------------------------------------


_MOST_TASK_STEPS = 30

_MEANINGS = {
    "forgetting": "best before the last step minus final accuracy: mean over former tasks",
    "backward_transfer": "final accuracy minus accuracy right after learning: mean over former "
    "tasks",
    "forward_transfer": "accuracy before training on the task minus the untrained model's: mean "
    "over later tasks",
}


def learnt_table(summary: Mapping[str, Any]) -> PageTable | None:
    """Return the measures of tests on all tasks; None without such tests."""
    measure = Measure.of(summary)
    if summary.get(f"task_{measure.name}") is None:
        return None
    word = measure.word
    meanings = {
        f"average_{measure.name}": f"{word} at the end: mean over all tasks",
        f"current_{measure.name}": f"{word} on each task right after learning: mean",
        **_MEANINGS,
    }
    rows = [(name.replace("_", " "), summary[name], text) for name, text in meanings.items()]
    return PageTable("Learning and forgetting", ("", measure.label, "meaning"), rows, words=(0, 2))


def tasks_table(summary: Mapping[str, Any]) -> PageTable | None:
    """Return the accuracy on each task after each step; None without such tests."""
    measure = Measure.of(summary)
    matrix = summary.get(f"task_{measure.name}")
    if matrix is None:
        return None
    clusters, count = summary["clusters_after_steps"], min(len(matrix), _MOST_TASK_STEPS)
    rows = [
        (f"after step {step}", *row[:count], clusters[step])
        for step, row in enumerate(matrix[:count])
    ]
    more = first_of(count, len(matrix), " steps")
    heads = ("", *(f"on {step}" for step in range(count)), "clusters")
    return PageTable(f"The numbers: {measure.label} on each task{more}", heads, rows)


# -----------------------------------------------------------------------------
# Tables of verdicts on updates.
# -----------------------------------------------------------------------------


_MOST_SPELLS = 4
"""Maximum number of a client's listed exclusions, the last ones."""


def verdicts_table(record: RunRecord) -> PageTable | None:
    """Return the verdicts by reason; None if every update was accepted."""
    kinds = grouped(((event.verdict, event.reason), event) for event in record.judged)
    if not kinds:
        return None
    ranked = sorted(kinds.items(), key=lambda item: -len(item[1]))
    rows = [
        (
            verdict.value,
            reason,
            len(found),
            len({event.client for event in found}),
            _typical([event.measured for event in found]),
            _typical([event.bound for event in found]),
        )
        for (verdict, reason), found in ranked
    ]
    heads = ("verdict", "reason", "updates", "clients", "median measured", "median bound")
    clients = plural(len({event.client for event in record.judged}), "client")
    title = f"{len(record.judged):,} updates of {clients} were not simply accepted"
    return PageTable(title, heads, rows, words=(0, 1))


def judged_clients_table(record: RunRecord) -> PageTable | None:
    """Return the verdicts by client; None if every update was accepted.

    Clients with only accepted updates are left out.
    """
    counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
    for event in record.judged:
        counts[event.client][event.verdict] += 1
    if not counts:
        return None
    applied = Counter(record.updates.client.tolist())
    spells = _exclusions(record)
    worst = sorted(counts, key=lambda client: -counts[client].total())
    rows = []
    for client in worst[:_MOST_CLIENTS]:
        own = counts[client]
        scaled, refused = own[Verdict.SCALED], own[Verdict.REFUSED] + own[Verdict.EXCLUDED]
        rows.append((client, applied[client] - scaled, scaled, refused, _listed(spells[client])))
    more = first_of(len(rows), len(worst))
    heads = ("client", "accepted", "scaled", "refused", "excluded (s)")
    return PageTable(f"Verdicts by client{more}", heads, rows, words=(0, 4))


def _exclusions(record: RunRecord) -> defaultdict[str, list[tuple[float, float | None]]]:
    """Return each client's periods of exclusion; None: until the end."""
    spells: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for event in record.judged:
        own = spells[event.client]
        if event.verdict is Verdict.EXCLUDED:
            own.append((event.time, None))
        elif event.verdict is Verdict.READMITTED and own:
            own[-1] = (own[-1][0], event.time)
    return spells


def _listed(spells: list[tuple[float, float | None]]) -> str:
    texts = [
        f"from {number(float(start), 1)}"
        + (" to the end" if end is None else f" to {number(float(end), 1)}")
        for start, end in spells[-_MOST_SPELLS:]
    ]
    before = [f"{len(spells) - _MOST_SPELLS} times before"] if len(spells) > _MOST_SPELLS else []
    return ", ".join([*before, *texts]) or "–"


def _typical(values: list[float]) -> str:
    """Return the median of known values."""
    known = [float(value) for value in values if value == value]
    return f"{median(known):.3g}" if known else "–"


# -----------------------------------------------------------------------------
# The command that repeats a run, from its configuration.
# -----------------------------------------------------------------------------


_OPTIONS = (
    "strategy",
    "dataset",
    "data-root",
    "model",
    "clients",
    "partition",
    "devices",
    "max-updates",
    "max-time",
    "target-accuracy",
    "eval-every",
    "seed",
)
"""Keys shown as options of their own, in order; the others follow --set."""
_NEVER = ("out", "resume", "strategy", "dataset", "seed")
"""Keys left out or handled separately."""


def repeat_command(config: Mapping[str, Value], defaults: Mapping[str, Value]) -> str:
    """Return the command that repeats a run, with all non-default keys.

    Parameters
    ----------
    config : Mapping[str, Value]
        The resolved keys of the run.
    defaults : Mapping[str, Value]
        Default of every key.
    """
    differing = {
        name: value
        for name, value in config.items()
        if name not in _NEVER and value not in (defaults.get(name), AUTO)
    }
    shown = {name: config[name] for name in ("strategy", "dataset", "seed") if name in config}
    shown |= differing
    words = ["raceme", "run"]
    for name in _OPTIONS:
        if name in shown:
            words += [f"--{name}", as_typed(shown.pop(name))]
    for name, value in shown.items():
        words += ["--set", assignment(name, value)]
    return shlex.join(words)


def assignment(name: str, value: Value) -> str:
    """Return the assignment of a key for --set."""
    plain = f"{name}={as_typed(value)}"
    if parse_assignment(plain)[1] == value:
        return plain
    return tomli_w.dumps({"value": value}).strip().replace("value = ", f"{name}=", 1)


# -----------------------------------------------------------------------------
# The page of a run: one self-contained file with all results.
# -----------------------------------------------------------------------------


_MOST_EVALUATIONS = 60
_MOST_REASONS = 20
_FILES = (SUMMARY, CONFIG, STORE, LOG, *MODELS, SIMILARITY)


def run_page(folder: Path, links: str) -> str:
    """Return the page of a finished run.

    Parameters
    ----------
    folder : Path
        Folder of a run that `raceme run` has written.
    links : str
        Prefix of links to files.

    Raises
    ------
    UserError
        The run has not ended, or its folder is damaged.
    """
    summary, config = read_summary(folder), read_toml(folder / CONFIG)
    record = read_run(folder)
    clock = "time" if record.on_devices else CLOCK
    try:
        results, tiles = _results(summary), _tiles(summary)
        versions = versions_table({k: [str(v)] for k, v in summary["versions"].items()})
        target = summary["target"]
        title = f"{summary['strategy']} on {summary['dataset']}"
        keys = {name: (key.default, key.help) for name, key in keys_of(config).items()}
        for name, key in summary.get("own_keys", {}).items():
            keys.setdefault(name, (key["default"], str(key["help"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / SUMMARY} is not what `raceme run` writes: {type(error).__name__} {error}."
        ) from None
    similarity, trouble = None, ""
    try:
        similarity = read_similarity(folder)
    except UserError as error:
        trouble = str(error)
    figures = figures_of(record, similarity=similarity, target=target, clock=clock)
    members, name = final_clusters(record), summary["strategy"]
    if not members:
        del figures["clusters"]
    if len(record.updates.seq) and record.updates.staleness.max() > 0:
        figures["staleness"] = partial(staleness_figure, {"": record}, height=1.5)
    return render(
        "run.html",
        frozen=frozen_run(folder),
        title=title,
        summary=summary,
        tiles=tiles,
        results=results,
        traffic=_traffic(summary),
        figures={name: plot(draw(), name) for name, draw in figures.items()},
        measure=record.measure,
        evaluations=_evaluations(record),
        drifts=drifts_table(record),
        steps=steps_table(record),
        learnt=learnt_table(summary),
        task_matrix=tasks_table(summary),
        cluster_table=clusters_table(record),
        changes=changes_table(record),
        moves=moves_table(record),
        members=members,
        without_similarity=trouble
        or f"No {SIMILARITY}: {name} did not compare clients in this run.",
        clients=clients_table(record),
        costs=costs_table(record),
        measures=record.drawn_measures,
        verdicts=verdicts_table(record),
        judged_clients=judged_clients_table(record),
        rejections=_rejections(record),
        settings=_settings(config, keys),
        versions=versions,
        command=repeat_command(config, {name: default for name, (default, _) in keys.items()}),
        on_devices=record.on_devices,
        links=links,
        files=[name for name in _FILES if (folder / name).exists()],
    )


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of a run's ``summary.json``.

    Raises
    ------
    UserError
        The summary is missing or damaged.
    """
    path = folder / SUMMARY
    if not path.is_file():
        if has_writer(folder):
            raise UserError(f"{folder} has no {SUMMARY}: the run is in progress.")
        further = ""
        if (folder / CHECKPOINTS).is_dir():
            again = f"raceme run --resume {folder}"
            if (folder / CONTROL).exists():
                # The socket of a server that had no time to remove it.
                again = "the same `raceme serve` or, with --resume, `raceme up` again"
            further = f"; to resume it: {again}"
        raise UserError(f"{folder} has no {SUMMARY}: the run was killed{further}.")
    try:
        summary = parse_json(read_text(path))
    except ReadingError as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path} is damaged: expected an object.")
    return summary


def _results(summary: Mapping[str, Any]) -> PageTable:
    rows = [
        *summary_rows(summary),
        ("purity 1 since update", summary["purity_reached_at_update"]),
        ("model", str(summary["model"] or "–")),
        ("ended because", str(summary["reason"] or "it was killed")),
    ]
    return PageTable("Result", (), rows, words=(0, 1), kind="pairs")


def _traffic(summary: Mapping[str, Any]) -> PageTable | None:
    """Return the bytes per phase; None without traffic or for earlier versions."""
    phases = summary.get("bytes_by_phase") or {}
    rows = [(name, of["messages"], of["down"], of["up"]) for name, of in phases.items()]
    if not any(of["down"] or of["up"] for of in phases.values()):
        return None
    heads = ("phase", "answered", "bytes down", "bytes up")
    return PageTable("Traffic by phase", heads, rows)


def _tiles(summary: Mapping[str, Any]) -> list[Tile]:
    target, reached = summary["target"], summary["time_to_target"]
    rate = summary["updates_per_second"]
    measure = Measure.of(summary)
    last, best = (number(summary[f"{kind}{measure.name}"]) for kind in ("", "best_"))
    return [
        Tile(measure.label, last, f"best {best}"),
        Tile(
            f"time to {measure.bound(target)}" if target else "time to target",
            f"{number(reached['virtual_time'], 1)} s" if reached else "not reached",
            f"{number(reached['updates'])} updates" if reached else "",
        ),
        Tile("clusters", number(summary["clusters"]), f"purity {number(summary['purity'])}"),
        Tile("updates", number(summary["updates"]), f"{summary['rejected_updates']} rejected"),
        Tile(
            "wall time",
            f"{number(summary['wall_time'], 1)} s",
            f"{number(float(rate), 0)} updates/s" if rate else "",
        ),
    ]


def _evaluations(record: RunRecord) -> PageTable:
    found = record.evaluations
    chosen = evenly_spread(len(found.time), _MOST_EVALUATIONS)
    known = np.isfinite(found.weighted_accuracy)
    weighted = not np.allclose(found.weighted_accuracy[known], found.accuracy[known])
    rows = [
        (
            number(found.time[index], 2),
            found.updates[index],
            found.accuracy[index],
            *([found.weighted_accuracy[index]] if weighted else []),
            found.loss[index],
            found.clusters[index],
            f"{found.answered[index]:,} of {found.asked[index]:,}",
        )
        for index in chosen
    ]
    some = f"{len(rows)} of " if len(rows) < len(found.time) else ""
    title = f"The numbers: {some}{plural(len(found.time), 'evaluation')}"
    heads = (
        "time (s)",
        "updates",
        record.measure.label,
        *(["by test examples"] if weighted else []),
        "loss",
        "clusters",
        "clients that answered",
    )
    return PageTable(title, heads, rows, words=())


def _rejections(record: RunRecord) -> PageTable | None:
    """Return the reasons of unused replies, the most common first."""
    counts = Counter(str(reason) for reason in record.rejections.reason)
    if not counts:
        return None
    clients = Counter(str(client) for client in record.rejections.client)
    rows = counts.most_common(_MOST_REASONS)
    shown = f", the {_MOST_REASONS} most common reasons" if len(counts) > _MOST_REASONS else ""
    replies, of = len(record.rejections.reason), plural(len(clients), "client")
    title = f"{replies:,} replies of {of} were not used{shown}"
    return PageTable(title, ("reason", "replies"), rows)


def _settings(
    config: Mapping[str, Value], keys: Mapping[str, tuple[Value, str]]
) -> list[PageTable]:
    """Return the configuration: the method's own keys, then those of all runs."""
    own = [name for name in config if "." in name]
    others = [name for name in config if "." not in name]
    titles = {f"{config.get('strategy', 'strategy')!s}: hyper-parameters": own, "Run": others}
    tables = []
    for title, names in titles.items():
        rows = tuple((name, _shown(config[name]), keys.get(name, ("", ""))[1]) for name in names)
        marked = [
            index
            for index, name in enumerate(names)
            if name in keys and config[name] != keys[name][0]
        ]
        if rows:
            heads = ("key", "value", "meaning")
            tables.append(PageTable(title, heads, rows, (0, 1, 2), "keys", marked))
    return tables


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value) if value != "" else "–"
