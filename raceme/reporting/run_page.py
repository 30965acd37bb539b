"""The page of a run: one self-contained file with all results."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from raceme.core.config import CONFIG, keys_of, parse_assignment, read_toml
from raceme.core.errors import UserError, plural
from raceme.core.events import Measure
from raceme.core.files import ReadingError, parse_json, read_text
from raceme.core.options import AUTO, Value, as_typed
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
from raceme.records.record import Flags, RunRecord, read_run
from raceme.records.similarity import evenly_spread, read_similarity
from raceme.records.summary import Floats
from raceme.reporting.artefacts import figures_of
from raceme.reporting.console import summary_rows
from raceme.reporting.dashboard import frozen_run
from raceme.reporting.page import (
    Command,
    Links,
    PageTable,
    Section,
    first_of,
    number,
    plot,
    render,
    versions_table,
)
from raceme.reporting.style import CLOCK, ChangePoint, change_points

# -----------------------------------------------------------------------------
# Cost of the updates.
# -----------------------------------------------------------------------------


_MOST_CLIENTS = 200
"""Maximum number of clients in a table."""


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
    return PageTable(f"Stated seconds, counted bytes{more}", heads, rows, folded=True)


def _cost_row(name: str, record: RunRecord, own: Flags) -> tuple[Any, ...]:
    updates = record.updates
    seconds = number(_sum(updates.cpu_seconds[own]), 1)
    down, up = updates.bytes_down[own].sum(), updates.bytes_up[own].sum()
    return name, own.sum(), seconds, down, up


def _sum(values: Floats) -> float | None:
    """Return the sum of known values; None without any."""
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else None


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
    heads = (
        "time (s)",
        "updates",
        "whose data",
        "step",
        word,
        "after",
        "back after (s)",
    )
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
    return PageTable(f"Steps of the data{more}", heads, rows, words=(), folded=True)


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
    return (
        number(drift.time, 2),
        drift.updates,
        drift.affected_clients,
        drift.step,
        before,
        after,
        back,
    )


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
    title = f"The numbers: {measure.label} on each task{more}"
    return PageTable(title, heads, rows, folded=True)


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


_FILES = (SUMMARY, CONFIG, STORE, LOG, *MODELS, SIMILARITY)

_SECTIONS = {
    "accuracy": ("Accuracy", ""),
    "clusters": ("Clusters over time", ""),
    "devices": ("Devices at work", "A bar is a task from sending to reply."),
    "tasks": (
        "Tasks",
        "A column is the end of a step of the data, a row the tested task. The frame marks the "
        "task trained in that step; below it are former tasks, above it the next, untrained one. "
        "Every client tests its model on its own test data of each step.",
    ),
    "uploads": (
        "Uploads",
        "A dot is an upload, a line the mean over the clients per session, in which every client "
        "uploads at least once. Clients test uploads and returned models on the test data of the "
        "upload; the server tests cluster models on a test set per distribution.",
    ),
    "mixtures": (
        "Mixtures",
        "Divergence of the clients' weights from the true mixtures of their data in nats, and both "
        "for some clients; a column is an upload.",
    ),
    "similarity": ("Similarity", ""),
}
"""Title of each figure's section, and its note."""
_SHARES = "Share of cases in which the {} exceed a share of the {}."
"""Note of a figure of shares, which the dashboard shows in another way."""


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
        result = [_results(summary), _traffic(summary)]
        versions = versions_table({k: [str(v)] for k, v in summary["versions"].items()})
        target = summary["target"]
        title = f"{summary['strategy']} on {summary['dataset']}"
        lead = f"{plural(summary['clients'], 'client')} · seed {summary['seed']} · "
        lead += str(summary["reason"] or "killed")
        keys = {name: (key.default, key.help) for name, key in keys_of(config).items()}
        for name, key in summary.get("own_keys", {}).items():
            keys.setdefault(name, (key["default"], str(key["help"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / SUMMARY} is not what `raceme run` writes: {type(error).__name__} {error}."
        ) from None
    similarity, trouble = None, None
    try:
        similarity = read_similarity(folder)
    except UserError as error:
        trouble = str(error)
    figures = figures_of(record, similarity=similarity, target=target, clock=clock)
    tables = {"tasks": [learnt_table(summary), tasks_table(summary)]}
    sections = [Section("result", "Result", result)]
    drawn = {"accuracy", "clusters", "devices"}
    for name, (heading, note) in _SECTIONS.items():
        if name in figures:
            heading = record.measure.title if name == "accuracy" else heading
            parts = [plot(figures[name]()), note or None, *tables.get(name, [])]
            sections.append(Section(name, heading, parts, name in drawn))
    for schema in record.drawn_measures:
        said = _SHARES.format(schema.value, schema.of) if schema.figure == "shares" else ""
        parts = [plot(figures[schema.file]()), said or None]
        sections.append(Section(schema.file, schema.heading, parts, drawn=not said))
    sections += [
        Section("similarity", "Similarity", [trouble]),
        Section("drift", "Data that change", [drifts_table(record), steps_table(record)]),
        Section("costs", "Cost of the updates", [costs_table(record)]),
        Section("configuration", "Configuration", [_MARKED, *_settings(config, keys)]),
        Section(
            "again", "Repeat", [*_repeat_commands(record, config, keys), versions, _files(folder)]
        ),
    ]
    return render("Run", title, lead, sections, links=links, frozen=frozen_run(folder))


_MARKED = "Non-default values are highlighted. Defaults of the dataset are shown with their values."


def _repeat_commands(
    record: RunRecord, config: Mapping[str, Value], keys: Mapping[str, tuple[Value, str]]
) -> list[str | Command]:
    """Return the commands that repeat a run."""
    if record.on_devices:
        return [
            "This run was on real devices. To replay its devices' recorded times on virtual time, "
            "with the clients' data on this machine, type in the folder of the run:",
            Command("raceme run --config config.toml --devices trace:."),
        ]
    return [
        "In the folder of the run (the same versions give the same run, bit for bit):",
        Command("raceme run --config config.toml"),
        "From anywhere:",
        Command(repeat_command(config, {name: default for name, (default, _) in keys.items()})),
    ]


def _files(folder: Path) -> Links:
    return Links("Files", [(name, name) for name in _FILES if (folder / name).exists()])


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
    return PageTable("Traffic by phase (arrays of answered work)", heads, rows)


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
