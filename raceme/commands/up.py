"""`raceme up`: a run on real processes on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from raceme.config import Value
from raceme.config.errors import UserError

SHOWN = ("strategy", "dataset", "max-updates", "seed", "resume", "out")
"""Keys of a run that the help of `raceme up` shows."""


def up(
    keys: Mapping[str, Value],
    clients: Annotated[
        int, typer.Option("--clients", metavar="INTEGER", help="devices to start", min=1)
    ] = 4,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="PROFILE",
            help="give each device the CPU share and bandwidth of a device profile; needs root",
            show_default=False,
        ),
    ] = None,
    delay: Annotated[
        float,
        typer.Option("--delay", metavar="MILLISECONDS", help="with --shape: per direction", min=0),
    ] = 0.0,
    loss: Annotated[
        float,
        typer.Option("--loss", metavar="PERCENT", help="with --shape: packets lost", min=0, max=99),
    ] = 0.0,
) -> None:
    """Try a run on this machine: a server, devices with their own data, one log.

    Ctrl-C stops everything.
    """
    from raceme.checkpoints import interrupted_by_signals
    from raceme.deployment.logs import FOLDER
    from raceme.deployment.testbed import prepare, run_testbed, shapes_from

    settings = prepare({**keys, "clients": clients})
    if shape is None and (delay or loss):
        raise UserError("--delay and --loss belong to --shape PROFILE, e.g. --shape uniform.")
    shapes = None if shape is None else shapes_from(settings, shape, delay, loss)
    width = len(f"device {clients - 1}")

    def show(name: str, line: str) -> None:
        print(f"{name:{max(width, 9)}} | {line}", flush=True)

    # However it is told to stop, it takes its processes and namespaces down.
    with interrupted_by_signals():
        out = run_testbed(settings, show, shapes)
    print(f"Results, plots and models: {out} (logs of all programs: {out / FOLDER})")
