"""The page of a simulated app: who worked when, who waited, and for whom."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raceme.config.errors import UserError
from raceme.records.exchanges import CLIENTS, MESSAGES, SUMMARY, Fleet, read_fleet
from raceme.reporting.console import shown_bytes
from raceme.reporting.page import PageTable, Tile, number, plot, render
from raceme.reporting.waiting_console import duration, simulation_rows
from raceme.reporting.waiting_plots import timeline_figure, waiting_figure

_MOST_REASONS = 20
_SECONDS = ("at work, s", "waits, s", "offline, s", "waited for, s")
_HEADS = ("client", "tasks", *_SECONDS, "failed", "down", "up")


def simulation_page(folder: Path, links: str) -> str:
    """Return the page of a simulated app.

    Parameters
    ----------
    folder : Path
        What `raceme simulate` left.
    links : str
        What stands before the name of a file in a link to it.

    Raises
    ------
    UserError
        The simulation has not ended, or its folder is damaged.
    """
    if not (folder / SUMMARY).is_file():
        raise UserError(f"{folder} has no {SUMMARY}: the simulation is not over, or was killed.")
    fleet = read_fleet(folder)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    accounts = fleet.accounts()
    try:
        return render(
            "simulation.html",
            title=f"{summary['app']} on {summary['clients']:,} devices",
            summary=summary,
            tiles=_tiles(summary),
            results=PageTable("Result", (), tuple(simulation_rows(summary)), (0, 1), "pairs"),
            timeline=plot(timeline_figure(fleet), "timeline"),
            waiting=plot(waiting_figure(fleet, accounts), "waiting"),
            clients=PageTable(
                "Clients",
                _HEADS,
                tuple(
                    (
                        *(account.client, number(account.tasks), number(account.busy, 1)),
                        *(number(account.idle, 1), number(account.offline, 1)),
                        *(number(account.held_up, 1), number(account.failures)),
                        *(shown_bytes(account.bytes_down), shown_bytes(account.bytes_up)),
                    )
                    for account in accounts
                ),
            ),
            failures=_failures(fleet),
            settings=_settings(summary),
            command=summary["command"],
            links=links,
            files=[name for name in (SUMMARY, CLIENTS, MESSAGES) if (folder / name).exists()],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / SUMMARY} is not what `raceme simulate` writes: "
            f"{type(error).__name__} {error}."
        ) from None


def _tiles(summary: Mapping[str, Any]) -> list[Tile]:
    share = summary["idle_share"]
    return [
        Tile("virtual time", duration(summary["virtual_time"]), "until the ServerApp returned"),
        Tile("if nobody waited", duration(summary["without_waiting"]), "for the same work"),
        Tile("waiting", "–" if share is None else f"{share:.0%}", "of the devices' time"),
        Tile(
            "traffic",
            shown_bytes(summary["bytes_down"] + summary["bytes_up"]),
            f"in {summary['messages']:,} messages",
        ),
    ]


def _failures(fleet: Fleet) -> PageTable | None:
    """Return why replies were unusable, and how often."""
    reasons = Counter(task.failure for task in fleet.tasks if task.failure is not None)
    if not reasons:
        return None
    rows = tuple((f"{count:,}", reason) for reason, count in reasons.most_common(_MOST_REASONS))
    return PageTable("Failures", ("messages", "why"), rows, words=(1,))


def _settings(summary: Mapping[str, Any]) -> PageTable:
    """Return the settings, with the app's run config and the strategy's parameters."""
    settings = dict(summary["settings"])
    further = {**settings.pop("run_config"), **settings.pop("parameters")}
    rows = {**settings, "strategy": summary["strategy"] or "the app's own", **further}
    shown = tuple((name, "–" if value is None else str(value)) for name, value in rows.items())
    return PageTable("Settings", (), shown, words=(0, 1), kind="pairs")
