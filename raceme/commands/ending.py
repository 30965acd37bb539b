"""How a command ends that has held a run."""

from __future__ import annotations

import sys

import typer

from raceme.experiment import Outcome
from raceme.reporting.artefacts import missing_line
from raceme.reporting.console import print_summary


def end_with(outcome: Outcome) -> None:
    """Print what a run has come to.

    Raises
    ------
    typer.Exit
        It is not all that it should be: 130 if it was interrupted, else 1.
    """
    print_summary(outcome.summary, outcome.out)
    if outcome.unwritten:
        print(f"raceme: {missing_line(outcome.out, outcome.unwritten)}", file=sys.stderr)
        raise typer.Exit(1)
    if outcome.interrupted:
        raise typer.Exit(130)
    if not outcome.complete:
        raise typer.Exit(1)
