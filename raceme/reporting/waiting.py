"""The page of a simulated app: work and waiting times of devices."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from rich.console import Console

from raceme.core.errors import UserError
from raceme.records.exchanges import (
    CLIENTS,
    ClientAccount,
    FleetRecord,
    TaskRecord,
    read_fleet,
)
from raceme.records.folder import MESSAGES, SUMMARY
from raceme.reporting.console import print_results, shown_bytes, shown_path
from raceme.reporting.page import Command, Links, PageTable, Section, number, plot, render
from raceme.reporting.style import (
    CLOCK,
    FAINT,
    INK,
    MOST_BARS,
    MUTED,
    REJECTED,
    cluster_colour,
    draw_spans,
    fastest_first,
    first_part,
    new_figure,
    one_axes,
    style,
    time_axis,
    time_unit,
    write_placeholder,
)

# -----------------------------------------------------------------------------
# Terminal output at the end of a simulated app.
# -----------------------------------------------------------------------------


_SHOWN = 3
"""Maximum number of named devices that others waited for."""


def print_simulation(summary: Mapping[str, Any], out: Path) -> None:
    """Print the results of a simulation and their location."""
    settings = summary["settings"]
    title = f"{summary['app']} on {summary['clients']:,} devices ({settings['devices']})"
    if summary["strategy"]:
        title += f", {summary['strategy']} in the place of its strategy"
    where = f"Messages, plots and numbers: {shown_path(out)}"
    print_results(title, simulation_rows(summary), where, Console(highlight=False))


def simulation_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of a simulation as names and values."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary["messages_by_kind"].items())
    return [
        ("virtual time", _time(summary)),
        ("without waiting", f"{duration(summary['without_waiting'])} for the same work"),
        ("devices", _shares(summary)),
        *_most_awaited(summary),
        ("messages", f"{summary['messages']:,}{f' ({kinds})' if kinds else ''}"),
        *_failure_lines(summary),
        (
            "traffic",
            f"{shown_bytes(summary['bytes_down'])} down, {shown_bytes(summary['bytes_up'])} up",
        ),
        ("wall time", f"{summary['wall_time']:.1f} s"),
    ]


def duration(seconds: float) -> str:
    """Format a duration, with the seconds."""
    plain = f"{seconds:,.1f} s"
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{plain} ({seconds / length:.1f} {unit})"
    return plain


def _time(summary: Mapping[str, Any]) -> str:
    end = "" if summary["ending"] == "returned" else f", then {summary['ending']}"
    return f"{duration(summary['virtual_time'])}{end}"


def _shares(summary: Mapping[str, Any]) -> str:
    """Describe how devices spent their time."""
    if summary["busy_share"] is None:
        return "no time has passed"
    shares = {"at work": "busy_share", "waiting": "idle_share", "offline": "offline_share"}
    return ", ".join(f"{_percent(summary[key])} {name}" for name, key in shares.items())


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "<1%"


def _most_awaited(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name the devices that the others waited for longest."""
    most = list(summary["most_waited_for"].items())[:_SHOWN]
    if not most:
        return []
    named = ", ".join(f"{client} {seconds:,.1f} s" for client, seconds in most)
    return [("waited for", f"{named} (summed over the others)")]


def _failure_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not summary["failures"]:
        return []
    return [("failed", f"{summary['failures']:,}; the first: {summary['first_failure']}")]


# -----------------------------------------------------------------------------
# Figures of devices' work and of the devices that others waited for.
# -----------------------------------------------------------------------------


WORK, AWAITED, EVALUATION = cluster_colour(5), cluster_colour(6), cluster_colour(3)
_NARROW = 0.005
"""Share of the width below which bars are narrow."""
_NAMED_ROWS = 40
"""Maximum number of rows with names."""

_Bars = list[tuple[str, float, float]]
_COLOURS = {"work": WORK, "evaluation": EVALUATION, "awaited": AWAITED, "lost": REJECTED}
"""Colour of each kind of bar, in the order of drawing."""


@style()
def timeline_figure(fleet: FleetRecord) -> Figure:
    """Draw devices' work and those that others waited for: a row each, a bar per task."""
    order = shown(fleet)
    rows = {client: row for row, client in enumerate(order)}
    figure, axes = one_axes(7.2, _height(len(rows)))
    tasks = [task for task in fleet.tasks if task.takes_time and task.begun < fleet.end]
    end = _window(fleet, tasks)
    seconds = time_axis(axes, end, CLOCK)
    part = first_part(end, fleet.end, seconds)
    axes.set_title(f"Devices at work, and those others waited for{part}")
    _rows_axis(axes, order, len(fleet.clients))
    if not tasks:
        write_placeholder(axes, "no message took any time")
        return figure
    late = {
        (client, float(moment))
        for moment, clients in zip(fleet.moments(), fleet.awaited(), strict=True)
        for client in clients
    }
    kinds: defaultdict[str, _Bars] = defaultdict(list)
    for task in tasks:
        kinds[_kind(task, late)].append((task.client, task.begun, min(task.ended, fleet.end)))
    # Edges would hide narrow bars.
    lengths = [task.ended - task.begun for task in tasks]
    edge = "white" if float(np.median(lengths)) > _NARROW * end else "face"
    idle = [(client, *span) for client, spans in fleet.idle().items() for span in spans]
    draw_spans(axes, rows, idle, end, seconds, FAINT, "none")
    for kind, colour in _COLOURS.items():
        draw_spans(axes, rows, kinds[kind], end, seconds, colour, edge)
    legend = [
        Patch(color=WORK, label="at work") if kinds["work"] else None,
        Patch(color=AWAITED, label="at work, others wait for it") if kinds["awaited"] else None,
        Patch(color=EVALUATION, label="evaluates") if kinds["evaluation"] else None,
        Patch(color=FAINT, label="waits") if idle else None,
        Patch(color=REJECTED, label="in vain") if kinds["lost"] else None,
        Patch(facecolor="none", edgecolor=MUTED, label="offline") if fleet.offline else None,
    ]
    handles = [patch for patch in legend if patch is not None]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))
    return figure


@style()
def waiting_figure(fleet: FleetRecord, accounts: Sequence[ClientAccount]) -> Figure:
    """Draw how devices spent their time, and how long others waited for each."""
    order = shown(fleet)
    own = {account.client: account for account in accounts}
    figure = new_figure(7.2, _height(len(order)))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    left.set_title("Where the time went")
    _rows_axis(left, order, len(fleet.clients))
    if not order or not fleet.end:
        write_placeholder(left, "no time has passed")
        return figure
    places = np.arange(len(order))
    start = np.zeros(len(order))
    for name, colour, label in (("busy", WORK, "at work"), ("idle", FAINT, "waits")):
        shares = np.array([getattr(own[client], name) for client in order]) / fleet.end
        left.barh(places, shares, 0.85, start, color=colour, label=label)
        start += shares
    left.set_xlim(0.0, 1.0)
    left.xaxis.set_major_formatter(PercentFormatter(1.0))
    left.set_xlabel("share of the time")
    held_up = np.array([own[client].held_up for client in order])
    seconds, unit = time_unit(float(held_up.max(initial=0.0)))
    right.barh(places, held_up / seconds, 0.85, color=AWAITED)
    right.set_title("Others waited for it")
    right.set_xlabel(f"{unit}, summed over the others")
    right.set_xlim(left=0.0)
    right.grid(axis="x")
    right.tick_params(axis="y", length=0)
    if not held_up.any():
        right.set_xlim(0.0, 1.0)
        write_placeholder(right, "no device waited for another")
    handles, _ = left.get_legend_handles_labels()
    if fleet.offline:
        # The remaining time.
        handles.append(Patch(facecolor="none", edgecolor=MUTED, label="offline"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def shown(fleet: FleetRecord) -> list[str]:
    """Return the plotted devices, from the fastest to the slowest."""
    busy = fleet.busy()
    typical = {
        client: float(np.median([stop - start for start, stop in spans])) if spans else math.inf
        for client, spans in busy.items()
    }
    return fastest_first(typical)


def _window(fleet: FleetRecord, tasks: Sequence[TaskRecord]) -> float:
    """Return the end of the drawing."""
    gone = (start for spans in fleet.offline.values() for start, _ in spans)
    starts = sorted((*(task.begun for task in tasks), *gone))
    return fleet.end if len(starts) <= MOST_BARS else starts[MOST_BARS]


def _kind(task: TaskRecord, late: set[tuple[str, float]]) -> str:
    """Return the kind of a task's bar."""
    if task.failure is not None:
        return "lost"
    if (task.client, task.answered) in late:
        return "awaited"
    return "evaluation" if task.kind.startswith("evaluate") else "work"


def _height(rows: int) -> float:
    """Return the height of a figure in inches by its number of rows."""
    return min(6.5, max(2.6, 1.6 + 0.14 * rows))


def _rows_axis(axes: Axes, order: Sequence[str], clients: int) -> None:
    """Make a row for each device, the fastest on top."""
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    if len(order) <= _NAMED_ROWS:
        axes.set_yticks(range(len(order)), order)
        if len(order) > _NAMED_ROWS // 2:
            axes.tick_params(axis="y", labelsize=6.5)
        axes.set_ylabel("devices, the fastest on top", color=INK)
        return
    axes.set_yticks([0, len(order) - 1], ["fastest", "slowest"])
    of = "" if len(order) == clients else f"{len(order)} of "
    axes.set_ylabel(f"{of}{clients:,} devices")


# -----------------------------------------------------------------------------
# The page of a simulated app: work and waiting times of devices.
# -----------------------------------------------------------------------------


_MOST_REASONS = 20
_SECONDS = ("at work, s", "waits, s", "offline, s", "waited for, s")
_HEADS = ("client", "tasks", *_SECONDS, "failed", "down", "up")


def simulation_page(folder: Path, links: str) -> str:
    """Return the page of a simulated app.

    Parameters
    ----------
    folder : Path
        Folder of a simulation that `raceme simulate` has written.
    links : str
        Prefix of links to files.

    Raises
    ------
    UserError
        The simulation has not ended, or its folder is damaged.
    """
    if not (folder / SUMMARY).is_file():
        raise UserError(f"{folder} has no {SUMMARY}: the simulation is in progress or was killed.")
    fleet = read_fleet(folder)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    accounts = fleet.accounts()
    try:
        settings = summary["settings"]
        lead = f"{settings['devices']} · seed {settings['seed']} · "
        sections = [
            Section(
                "result",
                "Result",
                [
                    PageTable("Result", (), simulation_rows(summary), (0, 1), "pairs"),
                    "Without waiting: every device works continuously at its mean time per task "
                    "until the total number of tasks is reached.",
                ],
            ),
            Section(
                "timeline",
                "Devices at work",
                [
                    plot(timeline_figure(fleet)),
                    "A row is a device, a bar a task. Others waited for devices whose reply let "
                    "the server assign work again.",
                ],
            ),
            Section(
                "waiting",
                "Waiting",
                [plot(waiting_figure(fleet, accounts)), _clients(accounts)],
            ),
            Section("failures", "Failures", [_failures(fleet)]),
            Section("settings", "Settings", [_settings(summary)]),
            Section("again", "Repeat", [Command(summary["command"]), _files(folder)]),
        ]
        title = f"{summary['app']} on {summary['clients']:,} devices"
        lead += summary["reason"] or "its ServerApp returned"
        return render("Simulated app", title, lead, sections, links=links)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / SUMMARY} is not what `raceme simulate` writes: "
            f"{type(error).__name__} {error}."
        ) from None


def _clients(accounts: Sequence[ClientAccount]) -> PageTable:
    """Return how each client spent its time."""
    rows = [
        (
            account.client,
            account.tasks,
            number(account.busy, 1),
            number(account.idle, 1),
            number(account.offline, 1),
            number(account.held_up, 1),
            account.failures,
            shown_bytes(account.bytes_down),
            shown_bytes(account.bytes_up),
        )
        for account in accounts
    ]
    return PageTable("Clients", _HEADS, rows, folded=True)


def _files(folder: Path) -> Links:
    names = [name for name in (SUMMARY, CLIENTS, MESSAGES) if (folder / name).exists()]
    return Links("Files", [(name, name) for name in names])


def _failures(fleet: FleetRecord) -> PageTable | None:
    """Return the reasons of unusable replies with counts."""
    reasons = Counter(task.failure for task in fleet.tasks if task.failure is not None)
    if not reasons:
        return None
    rows = [(count, reason) for reason, count in reasons.most_common(_MOST_REASONS)]
    return PageTable("Failures", ("messages", "why"), rows, words=(1,))


def _settings(summary: Mapping[str, Any]) -> PageTable:
    """Return the settings, with the app's run config and the strategy's parameters."""
    settings = dict(summary["settings"])
    further = {**settings.pop("run_config"), **settings.pop("parameters")}
    rows = {**settings, "strategy": summary["strategy"] or "the app's own", **further}
    shown = [(name, "–" if value is None else str(value)) for name, value in rows.items()]
    return PageTable("Settings", (), shown, words=(0, 1), kind="pairs")
