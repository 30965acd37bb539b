"""The page of a run: everything that its folder knows, on one page that needs nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raceme.config import Value, read_toml
from raceme.config.errors import UserError
from raceme.config.reading import ReadingError, parse_json, read_text
from raceme.dashboard.frozen import frozen_run
from raceme.protocol.measure import Measure
from raceme.records.folder import MODELS
from raceme.records.record import RunRecord, read_run
from raceme.records.similarity import read_similarity
from raceme.reporting.artefacts import draw_similarity
from raceme.reporting.clusters_plot import clusters_figure
from raceme.reporting.console import summary_rows
from raceme.reporting.drift_tables import drifts_table, steps_table
from raceme.reporting.fleet_plots import devices_figure
from raceme.reporting.fleet_tables import (
    changes_table,
    clients_table,
    clusters_table,
    costs_table,
    membership,
    moves_table,
)
from raceme.reporting.idle_plot import idle_figure
from raceme.reporting.mixtures_plot import has_mixtures, mixtures_figure
from raceme.reporting.page import (
    PageTable,
    Plot,
    Tile,
    number,
    plot,
    render,
    spread_over,
    versions_table,
)
from raceme.reporting.plots import accuracy_figure
from raceme.reporting.protection_tables import judged_clients_table, verdicts_table
from raceme.reporting.repeat import repeat_command
from raceme.reporting.staleness import staleness_figure
from raceme.reporting.style import CLOCK
from raceme.reporting.support_plot import has_support, support_figure
from raceme.reporting.task_tables import learnt_table, tasks_table
from raceme.reporting.tasks_plot import has_tasks, tasks_figure
from raceme.reporting.uploads_plot import has_scores, uploads_figure

_MOST_EVALUATIONS = 60
_MOST_REASONS = 20
_FILES = ("summary.json", "config.toml", "run.sqlite", "run.log", *MODELS, "similarity.npz")


def run_page(folder: Path, links: str) -> str:
    """Return the page of a finished run.

    Parameters
    ----------
    folder : Path
        What `raceme run` left.
    links : str
        What stands before the name of a file in a link to it.

    Raises
    ------
    UserError
        The run has not ended, or its folder is damaged.
    """
    summary, config = _read_summary(folder), read_toml(folder / "config.toml")
    record = read_run(folder)
    clock = "time" if record.on_devices else CLOCK
    try:
        results, tiles = _results(summary), _tiles(summary)
        versions = versions_table({k: [str(v)] for k, v in summary["versions"].items()})
        target = summary["target"]
        title = f"{summary['strategy']} on {summary['dataset']}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / 'summary.json'} is not what `raceme run` writes: "
            f"{type(error).__name__} {error}."
        ) from None
    similarity, without = _similarity(folder, record, str(summary["strategy"]))
    members = membership(record)
    keys = _described_keys()
    return render(
        "run.html",
        frozen=frozen_run(folder),
        title=title,
        summary=summary,
        tiles=tiles,
        results=results,
        traffic=_traffic(summary),
        accuracy=plot(accuracy_figure(record, target=target, clock=clock), record.measure.name),
        measure=record.measure,
        evaluations=_evaluations(record),
        clusters=plot(clusters_figure(record, clock=clock), "clusters") if members else None,
        drifts=drifts_table(record),
        steps=steps_table(record),
        tasks=plot(tasks_figure(record), "tasks") if has_tasks(record) else None,
        learnt=learnt_table(summary),
        task_matrix=tasks_table(summary),
        cluster_table=clusters_table(record),
        changes=changes_table(record),
        moves=moves_table(record),
        members=members,
        support=plot(support_figure(record, clock=clock), "support")
        if has_support(record)
        else None,
        similarity=similarity,
        without_similarity=without,
        devices=plot(devices_figure(record, clock=clock), "devices"),
        clients=clients_table(record),
        costs=costs_table(record),
        staleness=_staleness(record),
        idle=_idle(record),
        uploads=plot(uploads_figure(record), "uploads") if has_scores(record) else None,
        mixtures=plot(mixtures_figure(record), "mixtures") if has_mixtures(record) else None,
        protection=str(config.get("protection", "none")),
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


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        further = ""
        if (folder / "checkpoint").is_dir():
            further = f"; to resume it: raceme run --resume {folder}"
        raise UserError(
            f"{folder} has no summary.json: the run is not over yet or was killed{further}."
        )
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
        ("purity is 1 since update", number(summary["purity_reached_at_update"])),
        ("model", str(summary["model"] or "–")),
        ("ended because", str(summary["reason"] or "it was killed")),
    ]
    return PageTable("Result", (), tuple(rows), words=(0, 1), kind="pairs")


def _traffic(summary: Mapping[str, Any]) -> PageTable | None:
    """Return the bytes of each phase; None if none travelled, or of earlier versions."""
    phases = summary.get("bytes_by_phase") or {}
    rows = tuple(
        (name, number(of["messages"]), number(of["down"]), number(of["up"]))
        for name, of in phases.items()
    )
    if not any(of["down"] or of["up"] for of in phases.values()):
        return None
    heads = ("phase", "answered", "bytes down", "bytes up")
    return PageTable("Traffic by phase", heads, rows)


def _tiles(summary: Mapping[str, Any]) -> list[Tile]:
    target, reached = summary["target"], summary["time_to_target"]
    rate = summary["updates_per_second"]
    measure = Measure.of(summary)
    last, best = (number(summary[f"{kind}{measure.name}"]) for kind in ("", "best_"))
    tiles = [
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
    return tiles


def _evaluations(record: RunRecord) -> PageTable:
    found = record.evaluations
    chosen = spread_over(len(found.time), _MOST_EVALUATIONS)
    known = np.isfinite(found.weighted_accuracy)
    weighted = not np.allclose(found.weighted_accuracy[known], found.accuracy[known])
    rows = tuple(
        (
            number(float(found.time[index]), 2),
            number(int(found.updates[index])),
            number(float(found.accuracy[index])),
            *([number(float(found.weighted_accuracy[index]))] if weighted else []),
            number(float(found.loss[index])),
            number(int(found.clusters[index])),
            f"{found.answered[index]:,} of {found.asked[index]:,}",
        )
        for index in chosen
    )
    shown = f"{len(rows)} of {len(found.time)}" if len(rows) < len(found.time) else f"{len(rows)}"
    title = f"The numbers: {shown} evaluation{'' if len(rows) == 1 else 's'}"
    heads = (
        *("time (s)", "updates", record.measure.label),
        *(["by test examples"] if weighted else []),
        *("loss", "clusters", "clients that answered"),
    )
    return PageTable(title, heads, rows, words=())


def _similarity(folder: Path, record: RunRecord, strategy: str) -> tuple[Plot | None, str]:
    """Return the plot of the similarities, or why there is none."""
    try:
        similarity = read_similarity(folder)
    except UserError as error:
        return None, str(error)
    if similarity is not None:
        return plot(draw_similarity(record, similarity), "similarity"), ""
    return None, f"There is no similarity.npz: {strategy} did not compare clients in this run."


def _staleness(record: RunRecord) -> Plot | None:
    if not len(record.updates.seq) or record.updates.staleness.max() == 0:
        return None
    return plot(staleness_figure({"": record}, height=1.5), "staleness")


def _idle(record: RunRecord) -> Plot | None:
    if not len(record.idle_times.share):
        return None
    return plot(idle_figure({"": record}), "idle")


def _rejections(record: RunRecord) -> PageTable | None:
    """Return why replies were not used, the most common reasons first."""
    counts = Counter(str(reason) for reason in record.rejections.reason)
    if not counts:
        return None
    clients = Counter(str(client) for client in record.rejections.client)
    rows = tuple((reason, number(n)) for reason, n in counts.most_common(_MOST_REASONS))
    total, of = sum(counts.values()), len(clients)
    shown = f", the {_MOST_REASONS} most common reasons" if len(counts) > _MOST_REASONS else ""
    title = f"{total:,} replies of {of} client{'' if of == 1 else 's'} were not used{shown}"
    return PageTable(title, ("reason", "replies"), rows)


def _described_keys() -> dict[str, tuple[Value, str]]:
    from raceme.config import all_keys

    return {name: (key.default, key.help) for name, key in all_keys().items()}


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
