"""What a person sees at the end of a simulation of an app."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from raceme.reporting.console import print_results, shown_bytes, shown_path

_SHOWN = 3
"""So many of those that others waited for are named."""


def print_simulation(summary: Mapping[str, Any], out: Path, console: Console | None = None) -> None:
    """Print what a simulation has shown, and where its results are."""
    console = console or Console(highlight=False)
    settings = summary["settings"]
    title = f"{summary['app']} on {summary['clients']:,} devices ({settings['devices']})"
    if summary["strategy"]:
        title += f", {summary['strategy']} in the place of its strategy"
    where = f"Messages, plots and numbers: {shown_path(out)}"
    print_results(title, simulation_rows(summary), where, console)


def simulation_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of a simulation as names and values."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary["messages_by_kind"].items())
    rows = [
        ("virtual time", _time(summary)),
        ("if nobody waited", f"{duration(summary['without_waiting'])} for the same work"),
        ("devices", _shares(summary)),
        *_waited_for(summary),
        ("messages", f"{summary['messages']:,}{f' ({kinds})' if kinds else ''}"),
        *_failures(summary),
        (
            "traffic",
            f"{shown_bytes(summary['bytes_down'])} down, {shown_bytes(summary['bytes_up'])} up",
        ),
        ("wall time", f"{summary['wall_time']:.1f} s"),
    ]
    return rows


def duration(seconds: float) -> str:
    """Return a length of time as a person says it, with the seconds."""
    plain = f"{seconds:,.1f} s"
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{plain} ({seconds / length:.1f} {unit})"
    return plain


def _time(summary: Mapping[str, Any]) -> str:
    end = "" if summary["ending"] == "returned" else f", then {summary['ending']}"
    return f"{duration(summary['virtual_time'])}{end}"


def _shares(summary: Mapping[str, Any]) -> str:
    """Say how devices spent their time."""
    if summary["busy_share"] is None:
        return "no time has passed"
    shares = {"at work": "busy_share", "waiting": "idle_share", "offline": "offline_share"}
    return ", ".join(f"{_percent(summary[key])} {name}" for name, key in shares.items())


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "<1%"


def _waited_for(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say for whom the others waited longest."""
    most = list(summary["most_waited_for"].items())[:_SHOWN]
    if not most:
        return []
    named = ", ".join(f"{client} {seconds:,.1f} s" for client, seconds in most)
    return [("waited for", f"{named} (summed over the others)")]


def _failures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not summary["failures"]:
        return []
    return [("failed", f"{summary['failures']:,}; the first: {summary['first_failure']}")]
