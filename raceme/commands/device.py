"""`raceme device`: this machine trains and answers for a SuperLink."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raceme.config import Value
from raceme.config.errors import UserError
from raceme.protocol.plain_log import PlainFormatter

if TYPE_CHECKING:
    from raceme.compat.fleet import Endpoint

_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


def device(
    superlink: Annotated[
        str, typer.Option("--superlink", metavar="HOST:PORT", help="Fleet API of the SuperLink")
    ],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="plain text instead of TLS; for a test only")
    ] = False,
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            "--root-certificates", help="PEM of the authority that signed the SuperLink's"
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="private key of this device, from `raceme certs`")
    ] = None,
    allow_open_key: Annotated[
        bool, typer.Option("--allow-open-key", help="take a key that other users can read, too")
    ] = False,
    node_config: Annotated[
        str, typer.Option("--node-config", help="what the ClientApp is told: \"key=1 key='text'\"")
    ] = "",
    device_id: Annotated[
        str | None,
        typer.Option(
            "--device-id",
            help="stable name of this device [default: the host's name, or client-<partition-id>]",
            show_default=False,
        ),
    ] = None,
    trusted_app: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-app",
            metavar="PUBLISHER/NAME",
            help="run this app only; may be repeated",
            show_default=False,
        ),
    ] = None,
    trusted_model: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-model",
            metavar="MODULE:FUNCTION",
            help="let a run's key model import this; may be repeated",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        str,
        typer.Option(
            "--threads", metavar="N", help="threads of the CPU to train on [auto: the fastest]"
        ),
    ] = "auto",
    accelerator: Annotated[
        str,
        typer.Option(
            "--accelerator",
            metavar="NAME",
            help="where to train: cpu, cuda, mps [auto: the fastest]",
        ),
    ] = "auto",
    memory_limit: Annotated[
        int | None, typer.Option("--memory-limit", metavar="MIB", help="MiB of data at most", min=1)
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="SECONDS", help="how long a task may go on after SIGTERM", min=0
        ),
    ] = 5.0,
    when: Annotated[
        str,
        typer.Option(
            "--when",
            metavar="WISH",
            help="when to train, of a method that leaves it to devices: at-once, interval=60s, "
            "poisson=60s, or drift=10%: when the loss has risen so much",
        ),
    ] = "at-once",
    look: Annotated[
        str,
        typer.Option("--look", metavar="TIME", help="time between two looks at the loss (drift)"),
    ] = "10s",
    health_file: Annotated[
        Path | None,
        typer.Option("--health-file", help="file to touch while the SuperLink answers"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="log tracebacks of the ClientApp too")
    ] = False,
) -> None:
    """Be a device: train and answer for a SuperLink until stopped."""
    if insecure and (key or root_certificates):
        raise UserError(
            "--insecure sends everything in plain text: leave it out to use --key or "
            "--root-certificates."
        )
    _log_to_stderr(logging.DEBUG if verbose else logging.INFO)

    from raceme.compat.fleet import Endpoint
    from raceme.deployment.certificates import read_device_key
    from raceme.deployment.device import DeviceOptions, run_device
    from raceme.deployment.invitations import parse_when
    from raceme.deployment.trust import Trust

    run_device(
        DeviceOptions(
            endpoint=_endpoint(Endpoint, superlink, insecure, root_certificates),
            keys=None if key is None else read_device_key(key, allow_open_key),
            node_config=_node_config(
                node_config, device_id, {"threads": threads, "accelerator": accelerator}
            ),
            trust=Trust(tuple(trusted_app or ()), tuple(trusted_model or ())),
            memory_limit=memory_limit,
            grace=grace,
            health_file=health_file,
            when=parse_when(when, look),
        )
    )


def _endpoint(
    kind: type[Endpoint], address: str, insecure: bool, root_certificates: Path | None
) -> Endpoint:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"'{address}' is not an address: expected HOST:PORT, for example "
            "--superlink server.example.org:9092"
        )
    from raceme.deployment.tls import read_authority

    authority = None if root_certificates is None else read_authority(root_certificates)
    return kind(address, insecure, authority)


def _node_config(
    text: str, device_id: str | None, processors: Mapping[str, str]
) -> Mapping[str, Value]:
    """Return the node config with the device's id in it, and on what it trains."""
    from raceme.compat.fleet import parse_node_config

    try:
        config = parse_node_config(text)
    except Exception:
        config = {}
    if text.strip() and not config:
        raise UserError(
            f"The node config cannot be read: {text!r}. Expected key=value pairs with quoted text, "
            "for example --node-config \"partition-id=0 data-file='/data/device.npz'\"."
        )
    if device_id is not None:
        config["device-id"] = device_id
    elif "device-id" not in config and "partition-id" not in config:
        config["device-id"] = platform.node()
    return {**processors, **config}


class _Formatter(PlainFormatter):
    """One line per message; journald gets its level instead of the time, which it knows."""

    def __init__(self, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)s %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"<{_LEVELS.get(record.levelno, 5)}>{text}" if self._journal else text


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in os.environ))
    logger = logging.getLogger("raceme")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
    logging.getLogger("flwr").setLevel(logging.ERROR)
