"""`raceme serve`: one process that devices connect to and that holds the strategy."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import tomli_w
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import raceme
from raceme.core.config import RunConfig, as_tables, read_toml
from raceme.core.errors import UserError, printable
from raceme.core.events import (
    ClaimRefused,
    EventHandler,
    Observer,
    RunEnded,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
)
from raceme.core.options import Value
from raceme.core.strategy import StopCheck, never_stop
from raceme.fleet.certificates import DEVICE_KEYS, read_certificates, registered_keys
from raceme.fleet.served_grid import ServedGrid
from raceme.fleet.tasks import OWN_APP
from raceme.flower.app import App, build_bundle
from raceme.flower.fleet_client import Certificates
from raceme.flower.fleet_server import FleetApi, PortInUseError
from raceme.flower.link_state import RECONNECT_SECONDS, LinkState
from raceme.flower.messages import MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE, REPLY_MESSAGE_UNAVAILABLE
from raceme.flower.ports import (
    HttpConnection,
    is_loopback,
    listen,
    most_connections,
    names_this_machine,
)
from raceme.records.store import read_events
from raceme.runs import experiment
from raceme.runs.checkpoints import CHECKPOINTS
from raceme.runs.experiment import Outcome
from raceme.training.models import initial_arrays

# -----------------------------------------------------------------------------
# Raceme itself as a Flower app with a configuration of its own.
# -----------------------------------------------------------------------------


def app_of(config: RunConfig) -> App:
    """Return this package as the app bundle that the devices of a run fetch."""
    # The server's paths are its own affair, and the same run must have the same bundle again.
    keys = config.with_values(out="", resume="", device_keys="").to_mapping()
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
# Figures for Prometheus (OpenMetrics).
# -----------------------------------------------------------------------------


CONTENT_TYPE: str = CONTENT_TYPE_LATEST
MOST_DEVICES = 500
"""Devices that are listed one by one: those that are silent for longest."""
_LONGEST_NAME = 64
_STALENESS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

REASONS = {
    f"error {int(NODE_UNAVAILABLE)}:": "device-left",
    f"error {int(MESSAGE_UNAVAILABLE)}:": "lost",
    f"error {int(REPLY_MESSAGE_UNAVAILABLE)}:": "unreadable",
    "error ": "device-error",
    "missing records": "incomplete",
    "it brings": "other-work",
    "it answers": "other-work",
    "it is about step": "other-work",
    "it must state": "other-work",
    "unknown base version": "other-work",
    "repeated or foreign task": "other-work",
    "no examples": "no-examples",
    "not finite": "not-finite",
    "too large": "not-finite",
    "unusable numbers": "not-finite",
}
"""Beginning of a reason to the label that it is counted under: a device cannot make labels."""
_PROTECTION, _OTHER = "protection", "other"


class Metrics(EventHandler, Collector):
    """Counts the events of a run, and looks at the fleet when it is asked.

    An observer. Counts begin at 0 when the process does, as Prometheus expects.

    Parameters
    ----------
    state : LinkState
        Nodes and messages of the run.
    names : Callable
        Returns the device on each node that takes part.
    clusters : Callable
        Returns the number of cluster models.
    clock : Callable
        Monotonic, in seconds; replaceable for tests.
    """

    def __init__(
        self,
        state: LinkState,
        names: Callable[[], Mapping[int, str]],
        clusters: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = CollectorRegistry()
        self._updates = Counter("raceme_updates", "Updates applied", registry=self._registry)
        self._rejections = Counter(
            "raceme_rejections", "Replies not used", ["reason"], registry=self._registry
        )
        for reason in (*REASONS.values(), _PROTECTION, _OTHER):
            self._rejections.labels(reason)
        self._refused_claims = Counter(
            "raceme_refused_claims",
            "Nodes that stated the id of another device",
            registry=self._registry,
        )
        self._staleness = Histogram(
            "raceme_staleness",
            "Aggregations between a model's dispatch and its update",
            buckets=_STALENESS,
            registry=self._registry,
        )
        found = Gauge("raceme_clusters", "Cluster models", registry=self._registry)
        found.set_function(clusters)
        self._judged: tuple[str, str] | None = None
        self._state, self._present, self._clock = state, names, clock
        self._started = clock()
        # Last call of each node, and of devices whose nodes are no more; the devices of the nodes.
        self._heard: dict[int, float] = {}
        self._last: dict[str, float] = {}
        self._names: dict[int, str] = {}
        self._registry.register(self)

    # Events of the run.

    def on_update_applied(self, event: UpdateApplied) -> None:
        """Count an applied update, and note its staleness."""
        self._updates.inc()
        self._staleness.observe(event.staleness)

    def on_update_judged(self, event: UpdateJudged) -> None:
        """Note an update that protection keeps out: its rejection follows."""
        self._judged = (event.client, event.reason) if event.verdict.keeps_out else None

    def on_update_rejected(self, event: UpdateRejected) -> None:
        """Count a rejection by its reason, or as one of the protection."""
        protected = self._judged == (event.client, event.reason)
        self._judged = None
        self._rejections.labels(_PROTECTION if protected else label_of(event.reason)).inc()

    def on_claim_refused(self, _event: ClaimRefused) -> None:
        """Count a node that has stated the id of another device."""
        self._refused_claims.inc()

    def page(self) -> bytes:
        """Return all figures in OpenMetrics' text."""
        return bytes(generate_latest(self._registry))  # type: ignore[no-untyped-call]

    # The fleet and single devices, computed when they are asked for.

    def hear(self, node_id: int) -> None:
        """Note that a node has made a call."""
        self._heard[node_id] = self._clock()
        if node_id not in self._names and (name := self._present().get(node_id)) is not None:
            self._names[node_id] = name
        # A device that is not registered is a new node each time it joins.
        if len(self._heard) > 2 * len(self._state.nodes) + MOST_DEVICES:
            self._forget_nodes()

    def _forget_nodes(self) -> None:
        """Drop nodes that are no more; keep when their devices have last called."""
        for node, heard in list(self._heard.items()):
            if node not in self._state.nodes:
                del self._heard[node]
                name = self._names.pop(node, None)
                if name is not None:
                    self._last[name] = max(heard, self._last.get(name, heard))

    def _silences(self) -> list[tuple[float, str]]:
        """Return the seconds since the last call of each device, and the device, longest first."""
        self._forget_nodes()
        last, present = dict(self._last), self._present()
        # Devices of a resumed run that have not called this process are silent since its start.
        silent = dict.fromkeys(present, self._started)
        for node, heard in {**silent, **self._heard}.items():
            # A node that waits for work may have called before the method knew its device.
            if node not in self._names and node in present:
                self._names[node] = present[node]
            name = self._names.get(node, f"node {node}")
            last[name] = max(heard, last.get(name, heard))
        now = self._clock()
        return sorted(((now - heard, name) for name, heard in last.items()), reverse=True)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield gauges of devices and messages, read at the moment of the request."""
        online = len(self._state.online())
        yield GaugeMetricFamily("raceme_devices_online", "Devices that are online", online)
        queue = GaugeMetricFamily("raceme_messages", "Messages to devices", labels=["state"])
        for name, count in self._state.counts().items():
            queue.add_metric([name], count)
        yield queue
        silences = self._silences()
        known = len(silences)
        yield GaugeMetricFamily("raceme_devices_known", "Devices that were heard of so far", known)
        words = GaugeMetricFamily(
            "raceme_device_silence_seconds",
            f"Since a device's last word; of the {MOST_DEVICES} that are silent for longest",
            labels=["device"],
        )
        listed: dict[str, float] = {}
        for seconds, name in silences[:MOST_DEVICES]:
            # Two names may begin alike: the longer silence counts.
            listed.setdefault(printable(name, _LONGEST_NAME), seconds)
        for name, seconds in listed.items():
            words.add_metric([name], seconds)
        yield words


def label_of(reason: str) -> str:
    """Return the label under which a rejection is counted."""
    return next((label for start, label in REASONS.items() if reason.startswith(start)), _OTHER)


# -----------------------------------------------------------------------------
# The status port: `/healthz` and `/metrics`, for a monitor.
# -----------------------------------------------------------------------------


_SLOWEST_SECONDS = 5.0
"""Longest time for a request, and for reading the answer."""

Health = Callable[[], tuple[bool, Mapping[str, object]]]
"""Returns whether all is well, and the details."""


class StatusPort:
    """Answers while it is entered.

    Parameters
    ----------
    address : str
        ``HOST:PORT``.
    page : Callable
        Returns the figures of the run, as the body of the response.
    health : Callable
        Returns whether all is well, and the details; see `Health`.

    Raises
    ------
    UserError
        The address cannot be listened at.
    """

    def __init__(self, address: str, page: Callable[[], bytes], health: Health) -> None:
        self.address, self._page, self._health = address, page, health
        host, _, port = address.rpartition(":")
        self._host = host.strip("[]")
        try:
            self._socket = listen(self._host, int(port))
        except OSError as error:
            raise UserError(
                f"{address} cannot be listened at for /metrics: {error.strerror}. Choose another "
                "with --metrics HOST:PORT, or do without: --metrics off."
            ) from None
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=[Route("/{path:path}", self._answer)]),
                http=HttpConnection,
                # uvloop would accept connections past the limit of the listener.
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _answer(self, request: Request) -> Response:
        # On another address than loopback the port is open to the network anyway.
        if is_loopback(self._host) and not names_this_machine(
            request.headers.get("host", ""), self._host
        ):
            return PlainTextResponse("This address is not the server's.\n", 400)
        if request.url.path == "/metrics":
            return Response(self._page(), media_type=CONTENT_TYPE)
        if request.url.path != "/healthz":
            return PlainTextResponse("/metrics, /healthz\n", 404)
        well, details = self._health()
        status = {"status": "ok" if well else "failing", **details}
        return JSONResponse(status, 200 if well else 503)


# -----------------------------------------------------------------------------
# One process that devices connect to and that holds the strategy.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

_ANSWER_SECONDS = 2.0
_TURN_SECONDS = 300.0
"""A server that has not answered a call, or a method not looked for replies, for so long fails."""
_LEAST_LIMIT, _MODELS_LIMIT = 16 << 20, 8
"""Bytes of a reply: so many, and so many times those of the model. No method sends more."""
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES}


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server beside the keys of its run.

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


@contextmanager
def _private_files() -> Iterator[None]:
    """Let no other user read the files that are made meanwhile.

    They say which devices there are, what is alike in their data, and what they have learned.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def serve(
    config: RunConfig, options: ServeOptions, *observers: Observer, stop: StopCheck = never_stop
) -> Outcome:
    """Serve a run to devices until it ends.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, as :func:`prepare` returns it.
    options : ServeOptions
        Ports, certificates and other options of ``raceme serve``.
    observers : Observer
        Called with everything that happens.
    stop : Callable
        Returns why the run is to end, or an empty text.

    Raises
    ------
    UserError
        Options conflict, a port or folder is taken, or a file cannot be written.
    """
    certificates, registered = _credentials(options)
    state = LinkState(app_of(config))
    state.reconnect = options.reconnect
    model = sum(len(array.data) for array in initial_arrays(config).values())
    state.largest = _LEAST_LIMIT + _MODELS_LIMIT * model
    api = FleetApi(
        state, options.address, certificates, registered, options.http, most_connections()
    )
    strategy = experiment.build_strategy(config)
    metrics = Metrics(state, lambda: strategy.progress.fleet.by_node, lambda: len(strategy.models))
    api.calls.on_call = metrics.hear
    try:
        with ExitStack() as stack:
            stack.enter_context(_private_files())
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
            return experiment.conduct(config, strategy, grid, *observers, metrics, stop=stop)
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
