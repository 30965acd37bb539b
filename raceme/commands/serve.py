"""`raceme serve`: this host holds the run, and devices connect to it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raceme.commands.watch import ADDRESS, Address, Watch, watched
from raceme.config import Value
from raceme.config.errors import UserError

SHOWN = ("strategy", "dataset", "model", "max-updates", "seed", "out")
"""Keys of a run that the help of `raceme serve` shows."""


def serve(
    keys: Mapping[str, Value],
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="where devices connect")
    ] = "0.0.0.0:9092",
    certificates: Annotated[
        Path | None,
        typer.Option(
            "--certificates",
            metavar="FOLDER",
            help="made by `raceme certs`: TLS, and only the devices whose keys are there; plain "
            "text without",
            show_default=False,
        ),
    ] = None,
    any_device: Annotated[
        bool, typer.Option("--any-device", help="with --certificates: let every device in")
    ] = False,
    clients_min: Annotated[
        int,
        typer.Option(
            "--clients-min", metavar="INTEGER", help="devices to wait for at the start", min=1
        ),
    ] = 1,
    reconnect: Annotated[
        float,
        typer.Option(
            "--reconnect",
            metavar="SECONDS",
            help="after a restart: how long devices that were online may take to come back",
            min=0.0,
        ),
    ] = 90.0,
    metrics: Annotated[
        str,
        typer.Option(
            "--metrics",
            metavar="HOST:PORT",
            help="/metrics and /healthz, or 'off' [default: loopback, the port after --address's]",
            show_default=False,
        ),
    ] = "",
    watch: Watch = False,
    watch_address: Address = ADDRESS,
) -> None:
    """Be the server: hold a run, and let devices (raceme device) train for it.

    The same command with the same --out resumes a run that was stopped or has crashed.
    """
    _check_address("--address", address, "0.0.0.0:9092")
    if metrics not in ("", "off"):
        _check_address("--metrics", metrics, "127.0.0.1:9093")
    if any_device and certificates is None:
        raise UserError("Without --certificates every device is let in: leave out --any-device.")

    # What matters of gRPC's own lines about a port that is taken is said in ours.
    if os.environ.get("GRPC_VERBOSITY", "error") == "error":
        os.environ["GRPC_VERBOSITY"] = "none"
    from raceme.checkpoints import StopRequest
    from raceme.commands.ending import end_with
    from raceme.deployment.serve import ServeOptions, is_complete, prepare, with_device_keys
    from raceme.deployment.serve import serve as run
    from raceme.reporting.console import RunProgress

    folder = None if certificates is None else certificates.expanduser()
    settings = prepare(keys if any_device else with_device_keys(keys, folder))
    if is_complete(settings):
        print(f"The run in {settings.out} is complete: a higher --max-updates goes on with it.")
        return
    options = ServeOptions(address, folder, any_device, clients_min, metrics, reconnect)
    with watched(watch, Path(settings.out), watch_address):
        with (
            StopRequest() as stop,
            RunProgress(max_updates=settings.planned_updates, each_update=True) as progress,
        ):
            # Only now: on a terminal, lines go above the bar.
            _log_to_standard_output()
            outcome = run(settings, options, progress.observe, stop=stop)
        end_with(outcome)


def _check_address(option: str, address: str, example: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"'{address}' is not an address: expected HOST:PORT, for example {option} {example}"
        )


def _log_to_standard_output() -> None:
    from raceme.protocol.plain_log import PlainFormatter

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(PlainFormatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("raceme")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # Flower writes a line for every call; what goes wrong for devices, they say themselves.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
