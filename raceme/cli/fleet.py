"""`raceme device`: training on this machine for a SuperLink."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from raceme.cli import PLAIN
from raceme.cli.report import ADDRESS, Address, Watch, parsed_address, watched
from raceme.cli.run import PAIRS
from raceme.core.config import expanded
from raceme.core.errors import (
    JsonFormatter,
    PlainFormatter,
    UserError,
    check_known,
    printable,
    show_log,
)
from raceme.core.options import Value, option
from raceme.fleet import LOG_FORMAT, ServeOptions

_LOG_FORMATS = ("text", "json")
_TRANSPORTS = ("auto", "grpc", "http")
_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


def _silence_grpc() -> None:
    """Suppress gRPC's own log lines, e.g. about a port in use, which Raceme reports itself."""
    if os.environ.get("GRPC_VERBOSITY", "error") == "error":
        os.environ["GRPC_VERBOSITY"] = "none"


_ADDRESS = "HOST:PORT"


@dataclass(frozen=True)
class DeviceArguments:
    """Options of `raceme device`."""

    superlink: str = option(
        ..., "address of the server: `raceme serve`, or a SuperLink's Fleet API", unit=_ADDRESS
    )
    insecure: bool = option(False, "plain text instead of TLS; for tests only")
    root_certificates: Path | None = option(
        None, "certificate authority of the server (PEM), made by `raceme certs`: ca.crt"
    )
    key: Path | None = option(None, "private key of this device, made by `raceme certs`")
    allow_open_key: bool = option(False, "accept a key file that other users can read")
    node_config: str = option("", "settings for the ClientApp: \"key=1 key='text'\"")
    device_id: str | None = option(
        None,
        "stable name of this device; default: its key's, client-<partition-id>, or the host's",
    )
    trusted_app: tuple[str, ...] = option(
        (), "run only this app; may be repeated", unit="PUBLISHER/NAME"
    )
    trusted_model: tuple[str, ...] = option(
        (),
        "allow runs to import this model, dataset or client work; may be repeated",
        unit="MODULE:FUNCTION",
    )
    threads: str = option("auto", "CPU threads for training; auto: the fastest number", unit="N")
    accelerator: str = option(
        "auto", "processor for training: cpu, cuda, mps; auto: the fastest", unit="NAME"
    )
    memory_limit: int | None = option(None, "limit of the memory for data", unit="MIB", low=1)
    grace: float = option(5.0, "time to finish a task after SIGTERM", unit="SECONDS", low=0)
    when: str = option(
        "at-once",
        "when to train, with requests=device: at-once, interval=60s, poisson=60s, or drift=10% "
        "(when the loss has risen by 10 %)",
        unit="POLICY",
    )
    look: str = option(
        "10s", "time between two measurements of the loss (--when drift)", unit="TIME"
    )
    transport: str = option(
        "auto",
        "grpc (raceme serve, Flower 1.39), http (Flower 1.40 and later), or auto",
        unit="NAME",
    )
    latency: float = option(
        1.0,
        "longest time of a packet to the server, e.g. 5 over a satellite; time limits are "
        "multiplied by it",
        unit="SECONDS",
        low=1,
        high=60,
    )
    health_file: Path | None = option(
        None, "file to touch while the server answers, for health checks"
    )
    model_file: Path | None = option(
        None, "file for this device's model, written atomically, for an application"
    )
    verbose: bool = option(False, "also log tracebacks of the ClientApp")
    log_format: str = option("text", LOG_FORMAT, unit="NAME")


def device(options: DeviceArguments) -> None:
    """Connect this machine to a server as a device, and train until stopped."""
    key, root_certificates = options.key, options.root_certificates
    if options.insecure and (key or root_certificates):
        raise UserError(
            "--insecure sends everything in plain text: leave it out to use --key or "
            "--root-certificates."
        )
    is_json = _is_json(options.log_format)
    _silence_grpc()
    own = {"threads": options.threads, "accelerator": options.accelerator}
    if options.model_file is not None:
        from raceme.fleet.device import checked_model_file

        own["model-file"] = checked_model_file(options.model_file)
    config = _node_config(options.node_config, options.device_id, own)
    part = config.get("partition-id")
    name = config.get("device-id") or (platform.node() if part is None else f"client-{part}")
    formatter = (
        JsonFormatter(device=printable(name, 128))
        if is_json
        else _Formatter(journal="JOURNAL_STREAM" in os.environ)
    )
    show_log(sys.stderr, formatter, logging.DEBUG if options.verbose else logging.INFO)
    logging.getLogger("flwr").setLevel(logging.ERROR)

    from raceme.fleet.certificates import read_device_key
    from raceme.fleet.device import DeviceOptions, read_authority, run_device
    from raceme.fleet.tasks import Trust, parse_when
    from raceme.flower.fleet_client import Endpoint

    parsed_address("--superlink", options.superlink, "server.example.org:9092")
    check_known("transport", options.transport, _TRANSPORTS)
    authority = None if root_certificates is None else read_authority(root_certificates)
    read_keys = None if key is None else partial(read_device_key, key, options.allow_open_key)
    if read_keys is not None:
        read_keys()
    run_device(
        DeviceOptions(
            endpoint=Endpoint(
                options.superlink, options.insecure, authority, options.transport, options.latency
            ),
            keys=read_keys,
            node_config=config,
            trust=Trust(options.trusted_app, options.trusted_model),
            memory_limit=options.memory_limit,
            grace=options.grace,
            health_file=options.health_file,
            when=parse_when(options.when, options.look),
        )
    )


def _node_config(text: str, device_id: str | None, own: Mapping[str, str]) -> Mapping[str, Value]:
    """Return the node config with the device id and the values of other options."""
    from raceme.flower.app import parse_pairs

    try:
        config = parse_pairs([text])
    except Exception:
        config = {}
    if text.strip() and not config:
        raise UserError(
            f"Cannot read the node config: {text!r}. Expected key=value pairs with quoted text, "
            "for example --node-config \"partition-id=0 data-file='/data/device.npz'\"."
        )
    if device_id is not None:
        config["device-id"] = device_id
    return {**own, **config}


def _is_json(log_format: str) -> bool:
    check_known("log format", log_format, _LOG_FORMATS)
    return log_format == "json"


class _Formatter(PlainFormatter):
    """One line per message, with the level instead of the time for journald."""

    def __init__(self, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)s %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"<{_LEVELS.get(record.levelno, 5)}>{text}" if self._journal else text


# -----------------------------------------------------------------------------
# `raceme serve`: a server for real devices.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerArguments(ServeOptions):
    """Options of `raceme serve`."""

    run_config: tuple[str, ...] = option(
        (), "with APP_DIR: run config of the app, as in `flwr run`", unit=PAIRS
    )


def serve(
    keys: Mapping[str, Value],
    options: ServerArguments,
    app: Annotated[
        Path | None,
        typer.Argument(
            metavar="[APP_DIR]",
            help="folder of a Flower app to serve instead of Raceme's own; --strategy replaces its "
            "strategy",
        ),
    ] = None,
    watch: Watch = False,
    watch_address: Address = ADDRESS,
) -> None:
    """Start a server that coordinates training on devices (raceme device).

    --out is required. Without --max-updates it runs until it is stopped. The same command with the
    same --out resumes a stopped or crashed run.

    With APP_DIR the server runs your own Flower app, whose run cannot be resumed.
    """
    parsed_address("--address", options.address, "0.0.0.0:9092")
    if options.http is not None:
        parsed_address("--http", options.http, "0.0.0.0:8000")
    if options.metrics not in ("", "off"):
        parsed_address("--metrics", options.metrics, "127.0.0.1:9093")
    if options.notify and not options.notify.startswith(("http://", "https://")):
        raise UserError(
            f"--notify takes the address of a webhook, https://…, got '{options.notify}'."
        )
    if options.any_device and options.certificates is None:
        raise UserError("Without --certificates every device is accepted: leave out --any-device.")

    if app is None and options.run_config:
        raise UserError("--run-config changes the run config of an app: name its folder, APP_DIR.")
    named = expanded(keys)
    if app is None and not (named.get("out") or named.get("resume")):
        raise UserError(
            "serve needs a folder for results and checkpoints: give --out, e.g. --out runs/lab. "
            "The same command with the same folder resumes the run."
        )
    folder = None if options.certificates is None else options.certificates.expanduser()
    if folder is not None:
        from raceme.fleet.certificates import read_certificates

        # Checked before torch is imported.
        read_certificates(folder)

    is_json = _is_json(options.log_format)
    lines = JsonFormatter() if is_json else PlainFormatter("%(levelname)s: %(message)s")
    _silence_grpc()
    from raceme.cli.run import end_app_with, end_with
    from raceme.core.signals import StopRequest
    from raceme.fleet.serve import is_complete, prepare, serve_app, with_registry
    from raceme.fleet.serve import serve as run
    from raceme.reporting.console import RunProgress

    server = replace(options, certificates=folder)
    if app is not None:
        if watch:
            raise UserError("--watch is for Raceme's own app: use `raceme watch` with the --out.")
        if options.keep_versions or options.notify:
            alien = "--keep-versions" if options.keep_versions else "--notify"
            raise UserError(f"{alien} is for Raceme's own app: leave it out.")
        show_log(sys.stdout, lines)
        end_app_with(*serve_app(app, options.run_config, keys, server))
        return
    keys = keys if options.any_device else with_registry(keys, folder)
    settings = prepare(keys, options.clients_min)
    if is_complete(settings):
        said = f"The run in {settings.out} is complete: to continue it, raise --max-updates."
        print(said, file=sys.stderr if is_json else sys.stdout)
        return
    with watched(watch, Path(settings.out), watch_address, certificates=folder, is_json=is_json):
        with StopRequest() as stop, ExitStack() as stack:
            observers = []
            if not is_json:
                progress = RunProgress(max_updates=settings.max_updates or 0, each_update=True)
                observers.append(stack.enter_context(progress).observe)
            # Set up late, so that log lines appear above the progress bar.
            show_log(sys.stdout, lines)
            # Flower logs every call; devices report their own problems.
            logging.getLogger("flwr").setLevel(logging.CRITICAL)
            outcome = run(settings, server, *observers, stop=stop)
        end_with(outcome, silent=is_json)


# -----------------------------------------------------------------------------
# `raceme up`: a run on real processes on this machine.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TestbedArguments:
    """Options of `raceme up`."""

    clients: int = option(4, "devices to start", unit="INTEGER", low=1)


def up(keys: Mapping[str, Value], options: TestbedArguments) -> None:
    """Run a server and devices as processes on this machine, with one log.

    Press Ctrl-C to stop all of them.
    """
    from raceme.core.signals import interrupted_by_signals
    from raceme.fleet.testbed import FOLDER, prepare, run_testbed

    settings = prepare({**keys, "clients": options.clients})
    width = len(f"device {options.clients - 1}")

    def show(name: str, line: str) -> None:
        print(f"{name:{max(width, 9)}} | {line}", flush=True)

    # Every kind of stop ends all processes.
    with interrupted_by_signals():
        out = run_testbed(settings, show)
    print(f"Results, plots and models: {out} (logs of all programs: {out / FOLDER})")


# -----------------------------------------------------------------------------
# `raceme certs`: certificates and keys of a fleet.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CertificateArguments:
    """Options of `raceme certs`."""

    out: Path = option(Path("certs"), "folder for the files; created if missing")
    host: tuple[str, ...] = option((), "name or address of the server; may be repeated")
    device: tuple[str, ...] = option((), "id of a device; may be repeated")
    days: int = option(825, "validity of the certificates", unit="DAYS", low=1)
    rotate: bool = option(False, "give the --device another key")
    public_key: Path | None = option(
        None, "with --rotate: public key that the device has made", unit="FILE"
    )
    revoke: bool = option(False, "remove each --device from the registry")
    label: tuple[str, ...] = option(
        (),
        "give each --device a label (NAME= removes it); may be repeated",
        unit="NAME=VALUE",
    )
    token: bool = option(False, "make a token for /metrics and the page: view.token")


def certs(options: CertificateArguments) -> None:
    """Create a certificate authority, the server's certificate, and a key pair per device.

    Existing files are kept: run again with another --device to add a device. A running server
    notices changes of keys within seconds.
    """
    from raceme.fleet.certificates import (
        make_certificates,
        make_token,
        revoke_keys,
        rotate_key,
        set_labels,
    )

    out, devices, hosts, label = options.out, options.device, options.host, options.label
    rotate, revoke, token = options.rotate, options.revoke, options.token
    if rotate and revoke:
        raise UserError("--rotate and --revoke exclude each other: give one of them.")
    if (rotate and len(devices) != 1) or (revoke and not devices):
        raise UserError(
            f"--{'rotate' if rotate else 'revoke'} needs the id of a device: give --device ID"
            f"{', one only' if rotate else ''}."
        )
    if label and (revoke or not devices):
        raise UserError("--label belongs to devices: give --device ID, and leave out --revoke.")
    if options.public_key is not None and not rotate:
        raise UserError("--public-key belongs to --rotate: give both, or leave it out.")
    if (rotate or revoke) and (hosts or token):
        raise UserError("--rotate and --revoke change keys only: make --host and --token apart.")
    if rotate:
        changed = rotate_key(out, devices[0], options.public_key)
    elif revoke:
        changed = revoke_keys(out, devices)
    elif not hosts and (label or (token and not devices)):
        changed = []
    else:
        changed = make_certificates(out, hosts, devices, options.days)
    if token:
        changed.append(make_token(out))
    if label:
        changed.append(set_labels(out, devices, label))
    for path in changed:
        print(path)
    if not changed:
        print(f"All of these are in {out} already: nothing was made.")


# -----------------------------------------------------------------------------
# `raceme fleet`: queries to a running server, by its user.
# -----------------------------------------------------------------------------


fleet = typer.Typer(
    help="Commands to a running `raceme serve`.",
    no_args_is_help=True,
    suggest_commands=False,
    **PLAIN,
)

_RUN_HELP = "folder of the run that is served: its --out"
_Run = Annotated[Path, typer.Argument(metavar="RUN", help=_RUN_HELP)]
_AnyRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help=_RUN_HELP, show_default="the one that is served on this machine"
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@fleet.command()
def status(run: _AnyRun = None, as_json: _Json = False) -> None:
    """Show the state of a run: devices online, updates, clusters, latest evaluation."""
    _show(_answer(run, "status"), as_json)


@fleet.command()
def devices(run: _AnyRun = None, as_json: _Json = False) -> None:
    """List the devices: state, main cluster, updates, last call, latest score."""
    _show(_answer(run, "devices"), as_json, "No devices have joined yet.")


@fleet.command()
def show(
    run: _Run,
    device: Annotated[str, typer.Argument(metavar="ID", help="id of a device")],
    as_json: _Json = False,
) -> None:
    """Show a device's details."""
    _show(_answer(run, "show", device=device), as_json)


@fleet.command()
def versions(run: _AnyRun = None, as_json: _Json = False) -> None:
    """List the versions of the clusters' models that are kept, and which are in use."""
    _show(_answer(run, "versions"), as_json, "No versions are kept yet.")


@fleet.command()
def rollback(
    run: _Run,
    cluster: Annotated[int, typer.Option(metavar="K", help="the cluster")],
    to: Annotated[str, typer.Option(metavar="VERSION", help="number of a kept version, or latest")],
    as_json: _Json = False,
) -> None:
    """Let a cluster's devices use an earlier version; `latest` ends that."""
    if to != "latest" and not to.isdecimal():
        raise UserError(f"--to takes the number of a version or latest, got '{to}'.")
    number = None if to == "latest" else int(to)
    _show(_answer(run, "rollback", cluster=cluster, to=number), as_json)


def _answer(run: Path | None, name: str, **arguments: object) -> Any:
    """Let a run's server execute a command, a method of `FleetCommands`."""
    from raceme.records.control import command, only_served_run

    return command(only_served_run() if run is None else run, name, **arguments)


def _show(answer: Any, as_json: bool, if_empty: str = "") -> None:
    """Print an answer: a mapping as lines of name and value, a list of mappings as a table."""
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    if not answer:
        print(if_empty)
        return
    if isinstance(answer, dict):
        rows = [[_title(name), _shown(name, value)] for name, value in answer.items()]
    else:
        names = list(dict.fromkeys(name for row in answer for name in row))
        shown = [[_shown(name, row.get(name)) for name in names] for row in answer]
        rows = [list(map(_title, names)), *shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


_SPAN = "_seconds"


def _title(name: str) -> str:
    return name.removesuffix(_SPAN).replace("_", " ")


def _shown(name: str, value: object) -> str:
    from raceme.reporting.console import shown_seconds

    if value is None:
        return "–"
    if isinstance(value, float):
        return shown_seconds(value) if name.endswith(_SPAN) else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {number}" for key, number in value.items()) or "–"
    return printable(value)
