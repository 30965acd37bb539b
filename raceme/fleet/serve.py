"""`raceme serve`: one process that devices connect to and that holds the strategy."""

from __future__ import annotations

import errno
import logging
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tomli_w

import raceme
from raceme.core.config import RunConfig, as_tables, read_toml
from raceme.core.errors import UserError
from raceme.core.events import Observer, RunEnded
from raceme.core.options import Value
from raceme.core.strategy import StopCheck, never_stop
from raceme.fleet.certificates import DEVICE_KEYS, read_certificates, registered_keys
from raceme.fleet.metrics import Health, Metrics, StatusPort
from raceme.fleet.served_grid import ServedGrid
from raceme.fleet.tasks import OWN_APP
from raceme.flower.app import App, build_bundle
from raceme.flower.fleet_client import Certificates
from raceme.flower.fleet_server import FleetApi, PortInUseError
from raceme.flower.link_state import RECONNECT_SECONDS, LinkState
from raceme.records.store import read_events
from raceme.runs import experiment
from raceme.runs.checkpoints import CHECKPOINTS
from raceme.runs.experiment import Outcome

# -----------------------------------------------------------------------------
# Raceme itself as a Flower app with a configuration of its own.
# -----------------------------------------------------------------------------


def app_of(config: RunConfig) -> App:
    """Return this package as the app bundle that the devices of a run fetch."""
    # The folder is the server's own affair, and the same run must have the same bundle again.
    keys = config.with_values(out="", resume="").to_mapping()
    components = {"serverapp": "raceme.server_app:app", "clientapp": "raceme.client_app:app"}
    app = {"publisher": "raceme", "components": components, "config": as_tables(keys)}
    project = {
        "project": {
            "name": "raceme",
            "version": raceme.__version__,
            "description": "Asynchronous, clustered federated learning on Flower",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {"flwr": {"app": app}},
    }
    source, unwanted = Path(raceme.__file__).parent, shutil.ignore_patterns("__pycache__")
    with tempfile.TemporaryDirectory(prefix="raceme-serve-") as folder:
        root = Path(folder) / "raceme"
        shutil.copytree(source, root / "raceme", ignore=unwanted)
        (root / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
        return App(OWN_APP, raceme.__version__, build_bundle(root))


# -----------------------------------------------------------------------------
# One process that devices connect to and that holds the strategy.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

_ANSWER_SECONDS = 2.0
_TURN_SECONDS = 300.0
"""A server that has not answered a call, or a method not looked for replies, for so long fails."""
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES}


@dataclass(frozen=True)
class ServeOptions:
    """What a server is told beside the keys of its run.

    Attributes
    ----------
    address : str
        ``HOST:PORT`` at which devices reach it.
    certificates : Path or None
        Folder of `raceme certs`, for TLS and the devices' keys; plain text without.
    any_device : bool
        Let devices in whose keys are not registered there.
    clients_min : int
        Devices that have to be online before the run begins.
    metrics : str
        ``HOST:PORT`` for `/metrics` and `/healthz`; "off" for none; if nothing is said, the port
        after that of `address`, on loopback, if that is free.
    reconnect : float
        Seconds that devices which were online when the server ended may take to come back.
    http : str, optional
        ``HOST:PORT`` for SuperNodes of Flower 1.40 and later.
    """

    address: str = "0.0.0.0:9092"
    certificates: Path | None = None
    any_device: bool = False
    clients_min: int = 1
    metrics: str = ""
    reconnect: float = RECONNECT_SECONDS
    http: str | None = None


def prepare(keys: Mapping[str, Value]) -> RunConfig:
    """Check the configuration of a run, and resume what is in its folder.

    Raises
    ------
    UserError
        It cannot work.
    """
    config = experiment.resolve(RunConfig.from_mapping(keys))
    experiment.build_strategy(config)
    folder = config.resume or config.out
    if not folder:
        raise UserError(
            "Say where results and checkpoints go, e.g. --out runs/lab: with the same folder, the "
            "same command resumes."
        )
    out = str(Path(folder).expanduser().resolve())
    is_there = (Path(out) / "run.sqlite").is_file()
    return config.with_values(out=out, resume=out if is_there or config.resume else "")


def with_device_keys(keys: Mapping[str, Value], certificates: Path | None) -> Mapping[str, Value]:
    """Bind ids to keys by the list that `raceme certs` has left, unless another one is named."""
    known = None if certificates is None else certificates / DEVICE_KEYS
    if known is None or not known.is_file() or keys.get(DEVICE_KEYS):
        return keys
    return {**keys, DEVICE_KEYS: str(known)}


def is_complete(config: RunConfig) -> bool:
    """Return whether the run in the folder has come to its end, with the same limits.

    A service that is started again at every boot must not work on a run that is over.
    """
    out = Path(config.out)
    if not config.resume or not (out / "summary.json").is_file():
        return False
    endings = [event for event in read_events(out) if isinstance(event, RunEnded)]
    if not endings or not endings[-1].ending.is_complete:
        return False
    asked = config.with_values(out="", resume="").to_mapping()
    return read_toml(out / "config.toml") == asked


def serve(
    config: RunConfig, options: ServeOptions, *observers: Observer, stop: StopCheck = never_stop
) -> Outcome:
    """Serve a run to devices until it ends.

    Parameters
    ----------
    config : RunConfig
        What :func:`prepare` has returned.
    options : ServeOptions
        Where and to whom.
    observers : Observer
        Called with everything that happens.
    stop : Callable
        Returns why the run is to end; nothing if it is not.

    Raises
    ------
    UserError
        Something does not fit together, is taken by another process, or cannot be written.
    """
    certificates, registered = _credentials(options)
    state = LinkState(app_of(config))
    state.reconnect = options.reconnect
    api = FleetApi(state, options.address, certificates, registered, options.http)
    strategy = experiment.build_strategy(config)
    metrics = Metrics(state, lambda: strategy.progress.fleet.by_node, lambda: len(strategy.models))
    api.calls.on_call = metrics.hear
    try:
        with ExitStack() as stack:
            stack.enter_context(api)
            grid = ServedGrid(
                state,
                Path(config.out) / CHECKPOINTS,
                partial(_listen, api, options),
                clients_min=options.clients_min,
                stopping=stop,
            )
            stack.callback(grid.close)
            port = _status_port(options, metrics.page, partial(_health, api, grid, state))
            if port is not None:
                stack.enter_context(port)
            return experiment.conduct(
                config, strategy, grid, *observers, metrics.observe, stop=stop
            )
    except PortInUseError as error:
        option = "--http" if error.address == options.http else "--address"
        raise UserError(
            f"Cannot listen on {error.address}: another process has the port, or the address is "
            f"not this host's. Stop that process, or choose another with {option}."
        ) from None
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno not in _UNWRITABLE:
            raise
        raise UserError(
            f"Cannot go on writing to {config.out}: {reason}. When that is mended, the same "
            "command resumes from the last checkpoint."
        ) from error


def _status_port(
    options: ServeOptions, page: Callable[[], bytes], health: Health
) -> StatusPort | None:
    """Return the second port, if there is to be one."""
    if options.metrics == "off":
        return None
    _, _, port = options.address.rpartition(":")
    try:
        made = StatusPort(options.metrics or f"127.0.0.1:{int(port) + 1}", page, health)
    except (UserError, OverflowError) as error:
        if options.metrics:
            raise
        # It was not asked for.
        log.warning("No figures for a monitor: %s", error)
        return None
    log.info("Figures for a monitor: http://%s/metrics", made.address)
    return made


def _health(api: FleetApi, grid: ServedGrid, state: LinkState) -> tuple[bool, Mapping[str, object]]:
    """Return whether devices are answered and the method is at work."""
    answers = api.answers(_ANSWER_SECONDS)
    silence = time.monotonic() - grid.looked_at
    said = {
        "devices_are_answered": answers,
        "seconds_since_the_method_looked": round(silence, 1),
        "devices_online": len(state.online()),
    }
    return answers and silence < _TURN_SECONDS, said


def _listen(api: FleetApi, options: ServeOptions) -> None:
    api.start()
    secure = "TLS" if options.certificates is not None else "plain text, for a test only"
    log.info("Listening at %s (%s)", options.address, secure)
    if options.http is not None:
        log.info("Listening at %s for SuperNodes that speak HTTP", options.http)
    if options.clients_min > 1:
        log.info("The run begins when %d devices are online", options.clients_min)


def _credentials(
    options: ServeOptions,
) -> tuple[Certificates | None, Callable[[], Collection[bytes]] | None]:
    """Return certificates, and what lists the registered keys, if devices need one."""
    folder = options.certificates
    if folder is None:
        return None, None
    certificates = read_certificates(folder)
    if options.any_device:
        return certificates, None
    if not registered_keys(folder):
        raise UserError(
            f"No device is registered: {folder / 'devices'} holds no keys (*.pub). Make some with "
            f"`raceme certs --out {folder} --host NAME --device ID`, or let every device in with "
            "--any-device."
        )
    return certificates, partial(registered_keys, folder)
