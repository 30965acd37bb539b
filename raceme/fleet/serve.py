"""`raceme serve`: one process to which devices connect and which runs the strategy."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import click
import tomli_w
from flwr.app import Message, MessageType
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import raceme
from raceme import datasets
from raceme.core.config import CONFIG, FEW_DEVICES, RunConfig, as_tables, read_toml
from raceme.core.errors import UserError, check_known, one_line, os_errors_as_user_errors, printable
from raceme.core.events import (
    AnswerTaken,
    ClaimRefused,
    Evaluated,
    Event,
    EventHandler,
    Measure,
    Measured,
    Observer,
    RunEnded,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
)
from raceme.core.identities import ON_TRUST, KeyHolders
from raceme.core.messages import category
from raceme.core.options import Value
from raceme.core.progress import StopCheck, never_stop
from raceme.core.requests import InFlight
from raceme.core.signals import interrupted_by_signals
from raceme.core.strategy import Method
from raceme.datasets.npz import DATA_FILE
from raceme.fleet import ServeOptions
from raceme.fleet.certificates import (
    DEVICE_KEYS,
    LABELS,
    KeyRegistry,
    access_to,
    expiry,
    read_certificates,
    warn_if_not_yet_valid,
)
from raceme.fleet.notices import Notices, Webhook
from raceme.fleet.served_grid import Rollouts, ServedGrid
from raceme.flower.app import App, app_metadata, build_bundle, server_context
from raceme.flower.fleet_protocol import OWN_APP, SINCE, Certificates
from raceme.flower.fleet_server import FleetApi, PortInUseError
from raceme.flower.link_state import LinkState
from raceme.flower.messages import (
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    REPLY_MESSAGE_UNAVAILABLE,
    size_of,
)
from raceme.flower.ports import bearer, http_server, is_loopback, listen, most_connections
from raceme.records.control import ControlSocket, served_here
from raceme.records.folder import CHECKPOINTS, STORE, SUMMARY, new_folder, recorded
from raceme.records.store import each_event, plain
from raceme.records.summary import finite
from raceme.records.versions import Stage, VersionStore
from raceme.runs import experiment
from raceme.runs.experiment import RunOutcome
from raceme.simulation import apps
from raceme.simulation.apps import AppEnding, FlowerApp
from raceme.training.clients import DATA_SHAPE, shape_in_words
from raceme.training.models import initial_arrays

# -----------------------------------------------------------------------------
# Raceme itself as a Flower app with a configuration of its own.
# -----------------------------------------------------------------------------


def app_of(config: RunConfig) -> App:
    """Return this package as the app bundle that the devices of a run fetch."""
    # The server's paths are left out: devices do not need them, and a run must have the same bundle
    # after a restart.
    keys = config.with_values(out="", resume="", trust="", device_keys="", labels="").to_mapping()
    keys.pop(DATA_FILE, None)
    keys[DATA_SHAPE] = shape_in_words(datasets.data_shape(config))
    components = {"serverapp": "raceme.server_app:app", "clientapp": "raceme.client_app:app"}
    app = {"publisher": "raceme", "components": components, "config": as_tables(keys)}
    project = {
        "project": {
            "name": "raceme",
            # The version by which a device of the same protocol uses its own code.
            "version": SINCE,
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
        return App(OWN_APP, SINCE, build_bundle(root))


# -----------------------------------------------------------------------------
# Metrics for Prometheus, in its own text format or that of OpenMetrics.
# -----------------------------------------------------------------------------


Encoder = Callable[[Collector], bytes]
"""Encodes metrics as text."""
MOST_DEVICES = 500
"""Maximum number of devices with metrics of their own: those that are silent for longest."""
_LONGEST_NAME = 64
_MOST_LABELS = 16
"""Maximum number of label names of all devices together."""
_STALENESS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

REASONS = {
    f"error {int(NODE_UNAVAILABLE)}:": "device-left",
    f"error {int(MESSAGE_UNAVAILABLE)}:": "lost",
    f"error {int(REPLY_MESSAGE_UNAVAILABLE)}:": "unreadable",
    "error ": "device-error",
    "the message could not be sent": "device-left",
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
"""Labels of rejections, by the beginning of the reason. Devices cannot create labels."""
_JUDGED, _OTHER = "verdict", "other"


class Metrics(EventHandler, Collector):
    """Counts the events of a run as an observer, and reads the fleet's state on request.

    Counts begin at 0 with the process, as Prometheus expects.

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
    labels : Callable
        Returns the labels of a device.

    Attributes
    ----------
    evaluated : Evaluated or None
        The latest evaluation.
    rollouts : Rollouts or None
        The versions of the clusters' models, if any are stored.
    """

    def __init__(
        self,
        state: LinkState,
        names: Callable[[], Mapping[int, str]],
        clusters: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        labels: Callable[[str], Mapping[str, str]] = lambda device: {},
    ) -> None:
        self._labels = labels
        self._registry = CollectorRegistry()
        self._updates = Counter("raceme_updates", "Updates applied", registry=self._registry)
        self._rejections = Counter(
            "raceme_rejections", "Replies not used", ["reason"], registry=self._registry
        )
        for reason in (*REASONS.values(), _JUDGED, _OTHER):
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
        moved = Counter(
            "raceme_bytes", "Models and answers", ["direction"], registry=self._registry
        )
        self._down, self._up = moved.labels("down"), moved.labels("up")
        self._verdicts = Counter(
            "raceme_verdicts", "Verdicts on updates", ["verdict"], registry=self._registry
        )
        for verdict in Verdict:
            if verdict is not Verdict.ACCEPTED:
                self._verdicts.labels(verdict)
        self._evaluations = Counter("raceme_evaluations", "Evaluations", registry=self._registry)
        self.evaluated: Evaluated | None = None
        self._measured: dict[str, Measured] = {}
        self.rollouts: Rollouts | None = None
        self.certificate_until: datetime | None = None
        found = Gauge("raceme_clusters", "Cluster models", registry=self._registry)
        found.set_function(clusters)
        ProcessCollector(registry=self._registry)
        self._judged: tuple[str, str] | None = None
        self._state, self._present, self._clock = state, names, clock
        self._started = clock()
        # Last call of each node, and of devices whose nodes are gone; the device of each node.
        self._called_at: dict[int, float] = {}
        self._last: dict[str, float] = {}
        self._names: dict[int, str] = {}
        self._registry.register(self)

    # Events of the run.

    def on_update_applied(self, event: UpdateApplied) -> None:
        """Count an applied update, and note its staleness."""
        self._updates.inc()
        self._staleness.observe(event.staleness)
        self._count_bytes(event.bytes_down, event.bytes_up)

    def on_answer_taken(self, event: AnswerTaken) -> None:
        """Count the bytes of an answer to other work than training."""
        self._count_bytes(event.bytes_down, event.bytes_up)

    def _count_bytes(self, down: int, up: int) -> None:
        self._down.inc(down)
        self._up.inc(up)

    def on_evaluated(self, event: Evaluated) -> None:
        """Store the latest evaluation."""
        self._evaluations.inc()
        self.evaluated = event

    def on_measured(self, event: Measured) -> None:
        """Store the latest value of a measure with a single number."""
        if not event.schema.per and isinstance(event.values.get(event.schema.value), int | float):
            self._measured[event.schema.name] = event

    def on_update_judged(self, event: UpdateJudged) -> None:
        """Record that a feature refuses an update; its rejection follows."""
        self._verdicts.labels(event.verdict).inc()
        self._judged = (event.client, event.reason) if event.verdict.is_withheld else None

    def on_update_rejected(self, event: UpdateRejected) -> None:
        """Count a rejection by its reason, or by a feature's verdict."""
        is_judged = self._judged == (event.client, event.reason)
        self._judged = None
        self._rejections.labels(_JUDGED if is_judged else label_of(event.reason)).inc()

    def on_claim_refused(self, _event: ClaimRefused) -> None:
        """Count a node that stated the id of another device."""
        self._refused_claims.inc()

    def rejections(self) -> dict[str, int]:
        """Return the numbers of rejected replies since the process began, by reason."""
        return {
            sample.labels["reason"]: int(sample.value)
            for family in self._rejections.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }

    def page(self, encode: Encoder = generate_latest) -> bytes:
        """Return all metrics as text, by default in the format of OpenMetrics."""
        return encode(self._registry)

    # The fleet and single devices, computed on request.

    def note_call(self, node_id: int) -> None:
        """Record that a node has made a call."""
        self._called_at[node_id] = self._clock()
        if node_id not in self._names and (name := self._present().get(node_id)) is not None:
            self._names[node_id] = name
        # A device that is not registered is a new node each time it joins.
        if len(self._called_at) > 2 * len(self._state.nodes) + MOST_DEVICES:
            self._forget_nodes()

    def _forget_nodes(self) -> None:
        """Drop nodes that are gone; keep the times of their devices' last calls."""
        for node, called in list(self._called_at.items()):
            if node not in self._state.nodes:
                del self._called_at[node]
                name = self._names.pop(node, None)
                if name is not None:
                    self._last[name] = max(called, self._last.get(name, called))

    def silences(self) -> list[tuple[float, str]]:
        """Return the seconds since each device's last call, with the device, longest first."""
        self._forget_nodes()
        last, present = dict(self._last), self._present()
        # Devices of a resumed run that have not called this process count as silent since its
        # start.
        silent = dict.fromkeys(present, self._started)
        for node, called in {**silent, **self._called_at}.items():
            # A waiting node may have called before the method knew its device.
            if node not in self._names and node in present:
                self._names[node] = present[node]
            name = self._names.get(node, f"node {node}")
            last[name] = max(called, last.get(name, called))
        now = self._clock()
        return sorted(((now - called, name) for name, called in last.items()), reverse=True)

    def _quality(self, event: Evaluated) -> Iterator[GaugeMetricFamily]:
        """Yield the results of the latest evaluation, for all devices and by cluster."""
        measure = event.measure
        yield GaugeMetricFamily("raceme_loss", "Mean loss of the devices", event.loss)
        devices = GaugeMetricFamily(
            "raceme_cluster_devices", "Devices whose main cluster it is", labels=["cluster"]
        )
        scores = GaugeMetricFamily(
            f"raceme_cluster_{measure.name}", f"Mean {measure.label}", labels=["cluster"]
        )
        for cluster, found in sorted(event.by_cluster.items()):
            devices.add_metric([str(cluster)], len(found))
            scores.add_metric([str(cluster)], sum(found) / len(found))
        yield devices
        yield scores
        if not measure.is_loss:
            name, title = f"raceme_{measure.name}", f"Mean {measure.label} of the devices"
            yield GaugeMetricFamily(name, title, event.accuracy)
        title = f"Mean {measure.label} of the worst tenth of the devices"
        yield GaugeMetricFamily(f"raceme_worst_tenth_{measure.name}", title, event.worst_tenth)

    def _versions(self, rollouts: Rollouts) -> Iterator[Metric]:
        """Yield the versions in use, and the numbers of versions by outcome."""
        in_use = GaugeMetricFamily(
            "raceme_version_in_use", "Number of the version in use", labels=["cluster"]
        )
        store = rollouts.store
        for cluster in store.clusters:
            if version := store.in_use(cluster):
                in_use.add_metric([str(cluster)], version.number)
        yield in_use
        decided = CounterMetricFamily("raceme_versions", "Versions decided", labels=["outcome"])
        for stage in (Stage.IN_USE, Stage.HELD):
            decided.add_metric([stage.value], rollouts.outcomes[stage])
        yield decided

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of devices, messages and quality at the time of the request."""
        if self.evaluated is not None:
            yield from self._quality(self.evaluated)
        for name, event in self._measured.items():
            value = float(event.values[event.schema.value])
            yield GaugeMetricFamily(f"raceme_measure_{name}", event.schema.heading, value)
        if self.rollouts is not None:
            yield from self._versions(self.rollouts)
        if self.certificate_until is not None:
            yield GaugeMetricFamily(
                "raceme_certificate_expiry_timestamp_seconds",
                "When the server's certificate expires",
                self.certificate_until.timestamp(),
            )
        online = len(self._state.online())
        yield GaugeMetricFamily("raceme_devices_online", "Devices that are online", online)
        queue = GaugeMetricFamily("raceme_messages", "Messages to devices", labels=["state"])
        for name, count in self._state.counts().items():
            queue.add_metric([name], count)
        yield queue
        silences = self.silences()
        known = len(silences)
        yield GaugeMetricFamily("raceme_devices_known", "Devices that have called so far", known)
        listed: dict[str, tuple[float, Mapping[str, str]]] = {}
        for seconds, name in silences[:MOST_DEVICES]:
            # Shortened names may coincide: the longer silence counts.
            listed.setdefault(printable(name, _LONGEST_NAME), (seconds, self._labels(name)))
        known_labels = sorted({label for _, own in listed.values() for label in own})[:_MOST_LABELS]
        words = GaugeMetricFamily(
            "raceme_device_silence_seconds",
            f"Time since a device's last call, for the {MOST_DEVICES} devices that are silent for "
            f"longest",
            labels=["device", *(f"label_{label}" for label in known_labels)],
        )
        for name, (seconds, own) in listed.items():
            words.add_metric([name, *(own.get(label, "") for label in known_labels)], seconds)
        yield words


def label_of(reason: str) -> str:
    """Return the label under which a rejection is counted."""
    return next((label for start, label in REASONS.items() if reason.startswith(start)), _OTHER)


# -----------------------------------------------------------------------------
# The status port: `/healthz` and `/metrics`, for a monitor.
# -----------------------------------------------------------------------------


Health = Callable[[], tuple[bool, Mapping[str, object]]]
"""Returns whether the server is healthy, and the details."""


def _encoder(accept: str) -> tuple[Encoder, str]:
    """Return the encoder for the text format that a monitor accepts, and its content type."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):
        # A version in the header that is not a number.
        return choose_encoder("")


class StatusPort:
    """HTTP port for monitors, open within the context.

    Parameters
    ----------
    address : str
        ``HOST:PORT``.
    page : Callable
        Returns the body of ``/metrics``, given an encoder.
    health : Callable
        Returns whether the server is healthy, and the details; see `Health`.
    certificates : Path, optional
        The folder of `raceme certs`: for HTTPS, and for the token of requests.

    Raises
    ------
    UserError
        The port is in use, the address is not this host's, or the token cannot be read.
    """

    def __init__(
        self,
        address: str,
        page: Callable[[Encoder], bytes],
        health: Health,
        certificates: Path | None = None,
    ) -> None:
        self._page, self._health = page, health
        host, _, port = address.rpartition(":")
        self._access = access_to(certificates, host.strip("[]"))
        self.address = f"{'https' if self._access.is_secure else 'http'}://{address}"
        self.is_open = not self._access.token and not is_loopback(host.strip("[]"))
        with os_errors_as_user_errors(
            f"Cannot listen on {address} for /metrics",
            ". Choose another with --metrics HOST:PORT, or turn it off: --metrics off.",
        ):
            self._socket = listen(self._access.host, int(port))
        self._server = http_server(
            Starlette(routes=[Route("/{path:path}", self._answer)]),
            self._access.tls(),
            # uvloop would bypass the listener's limit of connections.
            loop="asyncio",
            log_level="critical",
            server_header=False,
            timeout_graceful_shutdown=1,
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
        path = request.url.path
        if not self._access.accepts_host(request.headers.get("host", "")):
            return PlainTextResponse("This address is not the server's.\n", 400)
        given = bearer(request.headers.get("authorization", ""))
        may_look = not self._access.token or self._access.has_token([given])
        if not may_look and path != "/healthz":
            said = {"www-authenticate": "Bearer"}
            return PlainTextResponse("This needs a token.\n", 401, said)
        if path == "/metrics":
            encode, kind = _encoder(request.headers.get("accept", ""))
            return Response(self._page(encode), media_type=kind)
        if path != "/healthz":
            return PlainTextResponse("/metrics, /healthz\n", 404)
        well, details = self._health()
        status: dict[str, object] = {"status": "ok" if well else "failing"}
        if may_look:
            status |= details
        return JSONResponse(status, 200 if well else 503)


# -----------------------------------------------------------------------------
# The log as JSON: a line for each request and each event.
# -----------------------------------------------------------------------------


_KEPT_REQUESTS = 10_000
_PER_CLIENT = ("per_client", "steps", "groups")
"""Fields of evaluations that are left out, to keep lines short; `run.sqlite` has them."""


class EventLog:
    """Logs requests to devices, and the events of a run, with device, cluster and request.

    Parameters
    ----------
    method : Method
        The run's method.
    """

    def __init__(self, method: Method) -> None:
        self._method, self._last = method, -1
        # Events do not name requests, but the time at which they were sent.
        self._sent: dict[tuple[str, float], int] = {}

    def log_requests(self) -> bool:
        """Log requests sent since the last call, in the method's thread; return False."""
        new: list[InFlight] = []
        for task in reversed(self._method.progress.in_flight.values()):
            if task.number <= self._last:
                break
            new.append(task)
        for task in reversed(new):
            self._last = task.number
            self._sent[task.client, task.sent_at] = task.number
            if len(self._sent) > _KEPT_REQUESTS:
                del self._sent[next(iter(self._sent))]
            values = {"device": task.client, "cluster": task.cluster, "request": task.number}
            self._write("Requested", {"kind": task.kind, **values})
        return False

    def observe(self, event: Event) -> None:
        """Log an event."""
        values = fields_of(event)
        values["run_seconds"] = values.pop("time")
        if "client" in values:
            values["device"] = values.pop("client")
        if isinstance(event, UpdateApplied | UpdateRejected):
            values["request"] = self._sent.pop((event.client, event.dispatched_at), None)
        self._write(type(event).__name__, values)

    def _write(self, name: str, values: Mapping[str, object]) -> None:
        log.info("%s", name, extra={"fields": {"event": name, **values}})


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of an event for JSON, without those with a value per client."""
    if isinstance(event, Measured):
        found = {"time": event.time, "updates": event.updates, "name": event.name, **event.values}
        return {name: plain(value) for name, value in found.items()}
    values = {item.name: getattr(event, item.name) for item in fields(event)}
    return {
        name: value.name if isinstance(value, Measure) else plain(value)
        for name, value in values.items()
        if name not in _PER_CLIENT
    }


# -----------------------------------------------------------------------------
# Commands to a running server: `raceme fleet`.
# -----------------------------------------------------------------------------


class FleetCommands:
    """Commands of `raceme fleet`: the public methods, which run in the method's thread.

    Each returns values for JSON; those whose names end with ``_seconds`` are shown as durations.

    Parameters
    ----------
    state : LinkState
        Nodes and messages of the run.
    method : Callable
        Returns the run's method; None before it has started.
    metrics : Metrics
        Figures of the run.
    health : Callable
        Returns whether the server is healthy, and the details; see `Health`.
    """

    def __init__(
        self,
        state: LinkState,
        method: Callable[[], Method | None],
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._state, self._found, self._metrics, self._health = state, method, metrics, health
        self._started = time.monotonic()

    def by_name(self) -> dict[str, Callable[..., object]]:
        """Return all commands."""
        names = ("status", "devices", "show", "versions", "rollback")
        return {name: getattr(self, name) for name in names}

    @property
    def _method(self) -> Method:
        method = self._found()
        if method is None:
            raise UserError("The run has not begun: try again once devices are online.")
        return method

    def status(self) -> dict[str, Any]:
        """Return the status of the run."""
        method, tested, (well, health) = self._method, self._metrics.evaluated, self._health()
        progress = method.progress
        said: dict[str, Any] = {
            "status": "ok" if well else "failing",
            "strategy": str(method),
            "version": raceme.__version__,
            "process": os.getpid(),
            "running_seconds": time.monotonic() - self._started,
            "devices_online": health["devices_online"],
            "devices_known": len(progress.fleet.clients),
            "nodes_refused": len(progress.fleet.refused),
            "updates": progress.updates,
            "rejected": progress.rejected,
            "rejected_for": self._metrics.rejections(),
            "clusters": len(method.models),
        }
        if tested is not None:
            said |= {
                "evaluated_after_updates": tested.updates,
                tested.measure.name: finite(tested.accuracy),
                f"worst_tenth_{tested.measure.name}": finite(tested.worst_tenth),
                "loss": finite(tested.loss),
            }
        return said

    def devices(self) -> list[dict[str, Any]]:
        """Return all devices, with a few values each."""
        names = ("device", "state", "version", "cluster", "updates", "silent_seconds")
        score = "accuracy" if (tested := self._metrics.evaluated) is None else tested.measure.name
        return [
            {name: found[name] for name in (*names, score) if name in found}
            for found in self._device_rows(self._method.progress.fleet.clients)
        ]

    def show(self, device: str) -> dict[str, Any]:
        """Return all values of a device."""
        known = self._method.progress.fleet.clients
        check_known("device", device, known, "raceme fleet devices")
        (found,) = self._device_rows([device])
        return found

    @property
    def _rollouts(self) -> Rollouts:
        if self._metrics.rollouts is None:
            raise UserError("This server keeps no versions: start it with --keep-versions 5.")
        return self._metrics.rollouts

    def versions(self) -> list[dict[str, Any]]:
        """Return the stored versions."""
        rollouts, store = self._rollouts, self._rollouts.store
        score = "error" if store.of_errors else "accuracy"
        return [
            {
                "cluster": version.cluster,
                "version": version.number,
                "stage": version.stage.value,
                score: finite(version.score),
                "devices": rollouts.devices_with(version),
                "pinned": version.cluster in store.pinned and version.stage is Stage.IN_USE,
            }
            for cluster in store.clusters
            for version in store.of(cluster)
        ]

    def rollback(self, cluster: int, to: int | None) -> dict[str, Any]:
        """Roll a cluster's devices back to an earlier version, or allow new ones again."""
        version = self._rollouts.rollback(cluster, to)
        return {
            "cluster": cluster,
            "in_use": None if version is None else version.number,
            "new_versions": "come into use again" if to is None else "are held",
        }

    def _device_rows(self, devices: Iterable[str]) -> list[dict[str, Any]]:
        """Return all values of some devices."""
        silences = {name: seconds for seconds, name in self._metrics.silences()}
        progress = self._method.progress
        open_tasks = (*progress.held.values(), *progress.in_flight.values())
        tasks = {task.client: task for task in open_tasks}
        return [self._device_row(name, tasks.get(name), silences.get(name)) for name in devices]

    def _device_row(
        self, device: str, task: InFlight | None, silent: float | None
    ) -> dict[str, Any]:
        method = self._method
        client, tested = method.progress.fleet.clients[device], self._metrics.evaluated
        placement = method.placement(device)
        online = client.node_id is not None
        said: dict[str, Any] = {
            "device": device,
            "state": "offline" if not online else "idle" if task is None else task.kind,
            "node": client.node_id,
            "version": self._state.version_of(client.node_id or 0) or None,
            "samples": client.num_examples,
            "cluster": max(placement, key=placement.__getitem__) if placement else None,
            "clusters": {str(k): round(weight, 4) for k, weight in placement.items()},
            "updates": method.progress.uploads.get(device, 0),
            "failures_in_a_row": client.failures,
            **({"labels": client.labels} if client.labels else {}),
            "silent_seconds": silent,
        }
        if task is not None:
            said["request"] = task.number
            said["requested_seconds"] = method.now() - task.sent_at
        if tested is not None and device in tested.per_client:
            _, score, loss = tested.per_client[device]
            said |= {tested.measure.name: finite(score), "loss": finite(loss)}
        return said


# -----------------------------------------------------------------------------
# The server: one process to which devices connect and which runs the strategy.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

GridT = TypeVar("GridT", bound=ServedGrid)

_ANSWER_SECONDS = 2.0
_TURN_SECONDS = 300.0
"""Time limits, for an answer to a call and for the method's next look for replies, beyond which the
server counts as unhealthy."""
_KEPT_VERSIONS = 5
"""Default number of stored versions of each cluster's model in a run without a limit."""
_LEAST_EVAL_EVERY = 10
"""Default number of updates between two evaluations in a fleet with fewer clients."""
_LEAST_LIMIT, _MODELS_LIMIT = 16 << 20, 8
"""Maximum size of a reply: a number of bytes plus a multiple of the model's size, more than any
method needs."""
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES}


def prepare(keys: Mapping[str, Value], clients_min: int = 1) -> RunConfig:
    """Check the configuration of a run, and prepare to resume the run in its folder, if any.

    Parameters
    ----------
    keys : Mapping[str, Value]
        Keys of the run.
    clients_min : int
        Number of devices for which training waits.

    Raises
    ------
    UserError
        The configuration cannot work.
    """
    config = RunConfig.from_mapping({"strategy": FEW_DEVICES, **keys})
    given, is_limited = config.eval_every, config.max_updates or config.max_rounds
    config = experiment.resolve(config)
    if not is_limited:
        config = config.with_values(max_updates=0)
    if given is None:
        # Evaluations take time on devices.
        config = config.with_values(eval_every=max(config.num_clients, _LEAST_EVAL_EVERY))
    experiment.check_fleet(config, experiment.build_strategy(config), clients_min)
    folder = config.resume or config.out
    is_there = (Path(folder) / STORE).is_file()
    return config.with_values(out=folder, resume=folder if is_there or config.resume else "")


def with_registry(keys: Mapping[str, Value], certificates: Path | None) -> Mapping[str, Value]:
    """Use the files of ids and labels that `raceme certs` wrote, unless others are given."""
    files = {DEVICE_KEYS: DEVICE_KEYS, "labels": LABELS}
    folder = Path() if certificates is None else certificates
    found = {key: str(folder / name) for key, name in files.items() if (folder / name).is_file()}
    given = {key: value for key, value in keys.items() if value or key not in found}
    return keys if certificates is None else {**found, **given}


def is_complete(config: RunConfig) -> bool:
    """Return whether the run in the folder has already ended, with the same limits.

    A service that starts at every boot must not continue a complete run.
    """
    out = Path(config.out)
    if not config.resume or not (out / SUMMARY).is_file():
        return False
    endings = [end for end in each_event(out, RunEnded) if isinstance(end, RunEnded)]
    if not endings or not endings[-1].ending.is_complete:
        return False
    return read_toml(out / CONFIG) == recorded(config)


@contextmanager
def _private_files() -> Iterator[None]:
    """Make new files unreadable for other users within the context.

    The files name the devices, and show similarities of their data and their models.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def serve(
    config: RunConfig, options: ServeOptions, *observers: Observer, stop: StopCheck = never_stop
) -> RunOutcome:
    """Serve a run to devices until it ends.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, as :func:`prepare` returns it.
    options : ServeOptions
        Ports, certificates and other options of ``raceme serve``.
    observers : Observer
        Receive all events.
    stop : Callable
        Returns a reason to end the run, or an empty text.

    Raises
    ------
    UserError
        Options conflict, a port or folder is taken, or a file cannot be written.
    """
    state = LinkState(app_of(config))
    model = sum(len(array.data) for array in initial_arrays(config).values())
    state.largest = _LEAST_LIMIT + _MODELS_LIMIT * model
    strategy = experiment.build_strategy(config)
    metrics = Metrics(
        state,
        lambda: strategy.progress.fleet.by_node,
        lambda: len(strategy.models),
        labels=lambda device: strategy.progress.fleet.labels(device),
    )
    out = Path(config.out)
    grid_of = partial(ServedGrid, state, out / CHECKPOINTS, stopping=stop)
    try:
        with (
            _private_files(),
            _sending_notices(options, out, state, metrics) as notices,
            _serving_connections(
                state, options, metrics, grid_of, out, lambda: strategy, config.device_keys
            ) as grid,
        ):
            if options.certificates is not None and not config.device_keys:
                log.warning(ON_TRUST)
            # Metrics come first, so that a printed event is already counted.
            listening: list[Observer] = [metrics, *observers]
            if notices is not None:
                grid.turns.append(notices.check)
                listening.append(notices)
            if options.logs_events:
                event_log = EventLog(strategy)
                grid.turns.append(event_log.log_requests)
                listening.append(event_log.observe)
            if last := _versions_kept(config, options):
                grid.rollouts = metrics.rollouts = Rollouts(
                    strategy,
                    state,
                    VersionStore(out, last),
                    margin=options.margin,
                    canary=options.canary,
                    pause=options.version_pause,
                )
                listening.append(grid.rollouts)
            return experiment.execute(config, strategy, grid, *listening, stop=stop)
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno not in _UNWRITABLE:
            raise
        raise UserError(
            f"Cannot write to {config.out} any more: {reason}. Once this is fixed, the same "
            f"command resumes from the last checkpoint."
        ) from error


@contextmanager
def _sending_notices(
    options: ServeOptions, out: Path, state: LinkState, metrics: Metrics
) -> Iterator[Notices | None]:
    """Yield the sender of notices, if there is a webhook; notify it of an error."""
    if not options.notify:
        yield None
        return
    with closing(Webhook(options.notify, out)) as send:
        notices = Notices(send, out, lambda: len(state.online()), lambda: metrics.certificate_until)
        try:
            yield notices
        except Exception as error:
            notices.stopped(one_line(error))
            raise


def _versions_kept(config: RunConfig, options: ServeOptions) -> int:
    """Return the number of stored versions of each cluster's model; 0 for none."""
    if options.keep_versions is not None:
        return options.keep_versions
    limits = config.max_updates, config.max_rounds, config.max_time, config.max_compute
    is_limited = any(limits)
    return 0 if is_limited else _KEPT_VERSIONS


@contextmanager
def _serving_connections(
    state: LinkState,
    options: ServeOptions,
    metrics: Metrics,
    grid_of: Callable[..., GridT],
    out: Path | None,
    method: Callable[[], Method | None],
    device_keys: str = "",
) -> Iterator[GridT]:
    """Serve devices, monitors and operators within the context; yield the grid.

    Parameters
    ----------
    state : LinkState
        Nodes and messages of the run.
    options : ServeOptions
        Options of the server.
    metrics : Metrics
        Figures of the run.
    grid_of : Callable
        Makes the grid, given `listen` and `clients_min`.
    out : Path or None
        Folder of the run, for the socket of commands.
    method : Callable
        Returns the run's method; None before it has started.
    device_keys : str
        File that binds keys to ids.

    Raises
    ------
    UserError
        Options conflict, or a port is taken.
    """
    certificates, registered = _credentials(options)
    if certificates is not None:
        metrics.certificate_until = expiry(certificates.certificate)
        warn_if_not_yet_valid(certificates)
    state.reconnect = options.reconnect
    api = FleetApi(
        state,
        options.address,
        certificates,
        registered,
        options.http,
        most_connections(),
        KeyHolders(Path(device_keys)) if device_keys else lambda _key: "",
        options.latency,
    )
    api.calls.on_call = metrics.note_call
    try:
        with ExitStack() as stack:
            stack.enter_context(api)

            def begin() -> None:
                _listen(api, options)
                if out is not None:
                    stack.enter_context(_accepting_commands(out, grid, commands))

            grid = grid_of(listen=begin, clients_min=options.clients_min)
            stack.callback(grid.close)
            health = partial(_health, api, grid, state)
            commands = FleetCommands(state, method, metrics, health)
            port = _status_port(options, metrics.page, health)
            if port is not None:
                stack.enter_context(port)
            yield grid
    except PortInUseError as error:
        option = "--http" if error.address == options.http else "--address"
        raise UserError(
            f"Cannot listen on {error.address}: another process has the port, or the address is "
            f"not this host's. Stop that process, or choose another with {option}."
        ) from None


def _status_port(
    options: ServeOptions, page: Callable[[Encoder], bytes], health: Health
) -> StatusPort | None:
    """Return the status port, if there is one."""
    if options.metrics == "off":
        return None
    _, _, port = options.address.rpartition(":")
    try:
        address = options.metrics or f"127.0.0.1:{int(port) + 1}"
        made = StatusPort(address, page, health, options.certificates)
    except (UserError, OverflowError) as error:
        if options.metrics:
            raise
        # The default port is optional.
        log.warning("Metrics are off: %s", error)
        return None
    log.info("Metrics: %s/metrics", made.address)
    if made.is_open:
        log.warning(
            "The metrics at %s are open to all callers: `raceme certs --token` in the folder "
            "of --certificates makes a token, for HTTPS too",
            options.metrics,
        )
    return made


@contextmanager
def _accepting_commands(out: Path, grid: ServedGrid, commands: FleetCommands) -> Iterator[None]:
    """Accept commands of `raceme fleet` within the context, if the file system supports sockets."""
    socket = ControlSocket(out, commands.by_name(), grid.wake)
    with ExitStack() as stack:
        try:
            stack.enter_context(socket)
            stack.enter_context(served_here(out))
        except OSError as error:
            log.warning(
                "`raceme fleet` is not available: there is no socket in %s: %s", out, error.strerror
            )
        grid.turns.append(socket.act)
        yield
        grid.turns.remove(socket.act)


def _health(api: FleetApi, grid: ServedGrid, state: LinkState) -> tuple[bool, Mapping[str, object]]:
    """Return whether calls of devices are answered and the method makes progress."""
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
    log.info("Listening on %s (gRPC, %s)", options.address, secure)
    http = "need --http" if options.http is None else f"connect to {options.http}"
    log.info("SuperNodes of Flower 1.40 and later %s (HTTP)", http)
    if options.clients_min > 1:
        log.info("Training starts when %d devices are online", options.clients_min)


def _credentials(
    options: ServeOptions,
) -> tuple[Certificates | None, Callable[[], Mapping[bytes, str]] | None]:
    """Return the certificates, and the registry of keys if devices need one."""
    folder = options.certificates
    if folder is None:
        return None, None
    certificates = read_certificates(folder)
    if options.any_device:
        return certificates, None
    registered = KeyRegistry(folder)
    if not registered():
        raise UserError(
            f"No device is registered: {folder / 'devices'} holds no keys (*.pub). Make some with "
            f"`raceme certs --out {folder} --host NAME --device ID`, or let every device in with "
            "--any-device."
        )
    return certificates, registered


# -----------------------------------------------------------------------------
# A user's own Flower app: its bundle for the devices, its ServerApp in this process.
# -----------------------------------------------------------------------------


_OF_APPS = ("strategy", "seed", "out")
"""Keys that apply to a user's own app, besides those of the strategy."""


class AppServedGrid(ServedGrid):
    """A served grid for ServerApps that only ask for nodes and replies, as Flower's strategies do.

    It cannot be saved, as the progress of a ServerApp is unknown.

    Attributes
    ----------
    check_training : Callable or None
        Called before training messages are sent; may raise to prevent it.
    """

    check_training: Callable[[], None] | None = None

    def get_node_ids(self) -> Iterable[int]:
        """Wait until enough nodes are online, and return them."""
        self._begin()
        self.looked_at = time.monotonic()
        self._has_fleet_changed()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and allow replies of the size that their models need."""
        messages = list(messages)
        for message in messages:
            limit = _LEAST_LIMIT + _MODELS_LIMIT * size_of(message)
            self._state.largest = max(self._state.largest, limit)
            if self.check_training is not None and category(message) == MessageType.TRAIN:
                self.check_training()
        return super().push_messages(messages)


def serve_app(
    folder: Path, run_config: Sequence[str], keys: Mapping[str, Value], options: ServeOptions
) -> tuple[AppEnding, str]:
    """Serve a user's Flower app to devices until its ServerApp returns.

    As with `flwr run`, devices fetch the app's bundle, and its ServerApp is called with a grid.
    With the key ``strategy``, this method replaces the app's strategy, as in ``raceme simulate
    --strategy``.

    Parameters
    ----------
    folder : Path
        Folder of the app's ``pyproject.toml``.
    run_config : Sequence[str]
        Overrides of the app's run config, as typed.
    keys : Mapping
        ``strategy``, its hyper-parameters, ``seed``, and ``out`` for the run store of the method.
    options : ServeOptions
        Options of the server.

    Returns
    -------
    tuple[AppEnding, str]
        Kind of the ServerApp's end, and the reason if it did not return.

    Raises
    ------
    UserError
        The app cannot be read or bundled, keys do not fit, or a port or folder is taken.
    """
    strategy, make = _method_of_app(keys)
    app = apps.read_app(folder, run_config)
    state = LinkState(_bundled(app))
    state.largest = _LEAST_LIMIT
    methods: list[Method] = []
    out: Path | None = None
    metrics = Metrics(
        state,
        lambda: methods[0].progress.fleet.by_node if methods else {},
        lambda: len(methods[0].models) if methods else 0,
    )
    with ExitStack() as stack:
        server_app = app.load_server()
        if make is not None:
            with _private_files():
                out = new_folder(str(keys.get("out", "")), app.name)
                store = stack.enter_context(apps.method_store(out))
            log.info("Events of %s are written to %s", strategy, out)

            def observe(event: Event) -> None:
                for observer in (store.observe, metrics):
                    observer(event)

            methods = stack.enter_context(apps.replaced(strategy, make, observe))
        grid = stack.enter_context(
            _serving_connections(
                state,
                options,
                metrics,
                partial(AppServedGrid, state, Path(os.devnull)),
                out,
                lambda: methods[0] if methods else None,
            )
        )
        context = server_context(state.run_id, app.run_config)
        stack.enter_context(interrupted_by_signals())
        if make is not None:
            grid.check_training = partial(apps.check_replaced, methods, app, strategy)
        ending, reason = apps.call_server(app, lambda: server_app(grid, context))
        if grid.check_training is not None and ending is AppEnding.RETURNED:
            grid.check_training()
    return ending, reason


def _method_of_app(keys: Mapping[str, Value]) -> tuple[str, Callable[..., Method] | None]:
    """Return the method that replaces an app's strategy, and its configuration."""
    strategy = str(keys.get("strategy", ""))
    own = {name: value for name, value in keys.items() if name not in _OF_APPS}
    if strategy:
        make = partial(apps.build_method, strategy, own, int(keys.get("seed", 0)))
        make()
        return strategy, make
    if unused := [name for name in keys if name != "strategy"]:
        raise UserError(
            f"--{unused[0]} applies to a method of Raceme, but the app starts its own strategy: "
            f"name a method with --strategy. Use --run-config for the app's own keys."
        )
    return "", None


def _bundled(app: FlowerApp) -> App:
    """Return a user's app as the bundle that devices fetch."""
    try:
        bundle = build_bundle(app.folder)
        name, version, _ = app_metadata(bundle)
    except (ValueError, OSError, click.ClickException) as error:
        said = f"The app in {app.folder} cannot be bundled: {one_line(error)}"
        raise UserError(said) from None
    return App(name, version, bundle, app.run_config)
