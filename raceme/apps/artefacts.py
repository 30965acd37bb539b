"""What a simulation of an app leaves besides its messages: a summary, an account, plots."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable
from typing import Any

from flwr.app import MessageType

import raceme
from raceme.apps.simulate import Simulated
from raceme.records.exchanges import CLIENTS, SUMMARY, ClientAccount, Fleet, write_accounts
from raceme.records.record import read_run
from raceme.records.summary import write_summary
from raceme.reporting.clusters_plot import clusters_figure
from raceme.reporting.plots import accuracy_figure
from raceme.reporting.style import save_figure
from raceme.reporting.waiting_plots import timeline_figure, waiting_figure

log = logging.getLogger("raceme")


def write_results(simulated: Simulated) -> tuple[dict[str, Any], list[str]]:
    """Write a simulation's results into its folder.

    Returns
    -------
    tuple[dict[str, Any], list[str]]
        The content of ``summary.json``, and the names of what could not be written.
    """
    out, fleet = simulated.out, simulated.fleet
    accounts = fleet.accounts()
    summary = _summary(simulated, accounts)
    failed = []
    writers: dict[str, Callable[[], None]] = {
        CLIENTS: lambda: write_accounts(out / CLIENTS, accounts),
        SUMMARY: lambda: write_summary(out / SUMMARY, summary),
        "timeline.png": lambda: save_figure(timeline_figure(fleet), out / "timeline.png"),
        "waiting.png": lambda: save_figure(waiting_figure(fleet, accounts), out / "waiting.png"),
    }
    if simulated.settings.strategy is not None:
        record = read_run(out)
        writers["accuracy.png"] = lambda: save_figure(
            accuracy_figure(record, title=f"{simulated.settings.strategy}"), out / "accuracy.png"
        )
        writers["clusters.png"] = lambda: save_figure(clusters_figure(record), out / "clusters.png")
    for name, write in writers.items():
        try:
            write()
        except Exception:
            log.exception("%s could not be written", name)
            failed.append(name)
    return summary, failed


def _summary(simulated: Simulated, accounts: list[ClientAccount]) -> dict[str, Any]:
    """Return all numbers of a simulation, ready for JSON."""
    fleet, settings = simulated.fleet, simulated.settings
    busy, idle, offline = (
        math.fsum(getattr(account, name) for account in accounts)
        for name in ("busy", "idle", "offline")
    )
    whole = busy + idle + offline
    failures = [task for task in fleet.tasks if task.failure is not None]
    moments, awaited = fleet.moments(), fleet.awaited()
    return {
        "app": simulated.app.name,
        "strategy": settings.strategy,
        "ending": simulated.ending.value,
        "reason": simulated.reason or None,
        "virtual_time": fleet.end,
        "without_waiting": fleet.without_waiting(),
        "wall_time": simulated.wall_time,
        "clients": len(fleet.clients),
        "messages": len(fleet.tasks),
        "messages_by_kind": _by_kind(fleet),
        "tasks": sum(task.takes_time for task in fleet.tasks),
        "replies": sum(task.answered < math.inf for task in fleet.tasks),
        "failures": len(failures),
        "first_failure": _first_failure(fleet),
        "trains_in_vain": _trains_in_vain(fleet),
        "bytes_down": sum(task.bytes_down for task in fleet.tasks),
        "bytes_up": sum(task.bytes_up for task in fleet.tasks),
        "busy_seconds": busy,
        "idle_seconds": idle,
        "offline_seconds": offline,
        "busy_share": busy / whole if whole else None,
        "idle_share": idle / whole if whole else None,
        "offline_share": offline / whole if whole else None,
        "times_work_was_given": len(moments) - 1,
        "times_waited_for": _times_awaited(awaited),
        "most_waited_for": {
            account.client: account.held_up
            for account in sorted(accounts, key=lambda a: -a.held_up)[:5]
            if account.held_up > 0
        },
        "offline": {
            client: [list(span) for span in gone] for client, gone in fleet.offline.items()
        },
        "command": _command(simulated),
        "settings": {
            "app": str(simulated.app.folder),
            "clients": settings.clients,
            "devices": settings.devices,
            "seed": settings.seed,
            "run_config": dict(simulated.app.run_config),
            "parameters": dict(settings.parameters),
            "examples": settings.examples,
            "evaluation_share": settings.evaluation_share,
        },
        "version": raceme.__version__,
    }


def _command(simulated: Simulated) -> str:
    """Return what to type for the same simulation again."""
    settings = simulated.settings
    options: dict[str, object] = {
        "--clients": settings.clients,
        "--devices": settings.devices,
        "--strategy": settings.strategy,
        "--workers": settings.workers,
        "--seed": settings.seed,
        "--examples": settings.examples,
        "--evaluation-share": settings.evaluation_share,
        "--max-time": settings.max_time if settings.max_time < math.inf else None,
    }
    words = ["raceme", "simulate", str(simulated.app.folder)]
    for name, value in options.items():
        words += [name, str(value)] if value is not None else []
    for text in settings.run_config:
        words += ["--run-config", text]
    for key, value in settings.parameters.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _by_kind(fleet: Fleet) -> dict[str, int]:
    counts: dict[str, int] = {}
    for task in fleet.tasks:
        counts[task.kind] = counts.get(task.kind, 0) + 1
    return counts


def _trains_in_vain(fleet: Fleet) -> bool:
    """Return whether there was training, and no usable reply to it at all."""
    tasks = [task for task in fleet.tasks if task.kind.startswith(MessageType.TRAIN)]
    failed = [task for task in tasks if task.failure is not None]
    usable = [task for task in tasks if task.failure is None and task.answered < math.inf]
    return bool(failed) and not usable


def _times_awaited(awaited: list[list[str]]) -> int:
    """Return how often the server could go on because a reply had come."""
    return sum(bool(clients) for clients in awaited)


def _first_failure(fleet: Fleet) -> str | None:
    """Return what went wrong first, in one line."""
    for task in fleet.tasks:
        if task.failure is not None:
            reason = task.failure.strip().partition("\n")[0]
            when = f" at {task.answered:.1f} s" if task.answered < math.inf else ""
            return f"{task.client}{when}: {reason}"
    return None
