"""What a fleet's owner wants to know of a run, as figures for Prometheus (OpenMetrics)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from raceme.core.errors import UserError, printable
from raceme.core.events import ClaimRefused, Event, UpdateApplied, UpdateJudged, UpdateRejected
from raceme.flower.link_state import LinkState
from raceme.flower.messages import MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE, REPLY_MESSAGE_UNAVAILABLE

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
MOST_DEVICES = 500
"""Devices that are listed one by one: those that have said nothing for longest."""
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
"""How a reason begins, to the label that it is counted under: what a device says is no label."""
_PROTECTION, _OTHER = "protection", "other"


class Metrics(Collector):
    """Counts what happens, and looks at the fleet when it is asked.

    An observer of a run. Counts begin at 0 when the process does, as Prometheus expects.

    Parameters
    ----------
    state : LinkState
        Knows nodes and messages.
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
        # When nodes, and devices whose nodes are no more, have last spoken; which devices they are.
        self._heard: dict[int, float] = {}
        self._last: dict[str, float] = {}
        self._names: dict[int, str] = {}
        self._registry.register(self)

    def observe(self, event: Event) -> None:
        """Count an event of the run."""
        if isinstance(event, UpdateApplied):
            self._updates.inc()
            self._staleness.observe(event.staleness)
        elif isinstance(event, UpdateJudged):
            self._judged = (event.client, event.reason) if event.verdict.keeps_out else None
        elif isinstance(event, UpdateRejected):
            protected = self._judged == (event.client, event.reason)
            self._judged = None
            self._rejections.labels(_PROTECTION if protected else label_of(event.reason)).inc()
        elif isinstance(event, ClaimRefused):
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
        """Keep of nodes that are no more when the devices that they were have last spoken."""
        for node, heard in list(self._heard.items()):
            if node not in self._state.nodes:
                del self._heard[node]
                name = self._names.pop(node, None)
                if name is not None:
                    self._last[name] = max(heard, self._last.get(name, heard))

    def _silences(self) -> list[tuple[float, str]]:
        """Return the seconds since the last word of each device, and the device."""
        self._forget_nodes()
        last, present = dict(self._last), self._present()
        # Devices of a resumed run may have said nothing to this process yet: since its start.
        silent = dict.fromkeys(present, self._started)
        for node, heard in {**silent, **self._heard}.items():
            # One that waits for work may have called before the method knew who it is.
            if node not in self._names and node in present:
                self._names[node] = present[node]
            name = self._names.get(node, f"node {node}")
            last[name] = max(heard, last.get(name, heard))
        now = self._clock()
        return sorted(((now - heard, name) for name, heard in last.items()), reverse=True)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the figures."""
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
# A second port, for whoever watches the server: `/healthz` and `/metrics`.
# -----------------------------------------------------------------------------


_SLOWEST_SECONDS = 5.0
"""A caller has so long for its request, and for reading the answer."""

Health = Callable[[], tuple[bool, Mapping[str, object]]]
"""Returns whether all is well, and what is said about it."""


class StatusPort(ThreadingHTTPServer):
    """Answers while it is entered.

    Parameters
    ----------
    address : str
        ``HOST:PORT``.
    page : Callable
        Returns the figures.
    health : Callable
        See `Health`.

    Attributes
    ----------
    address : str
        Where it listens.

    Raises
    ------
    UserError
        The address cannot be listened at.
    """

    daemon_threads = True

    def __init__(self, address: str, page: Callable[[], bytes], health: Health) -> None:
        self.address, self._page, self._health = address, page, health
        host, _, port = address.rpartition(":")
        try:
            super().__init__((host.strip("[]"), int(port)), _Handler)
        except OSError as error:
            raise UserError(
                f"{address} cannot be listened at for /metrics: {error.strerror}. Choose another "
                "with --metrics HOST:PORT, or do without: --metrics off."
            ) from None
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, type and body of what is at a path."""
        if path == "/metrics":
            return 200, CONTENT_TYPE, self._page()
        if path != "/healthz":
            return 404, "text/plain", b"/metrics, /healthz\n"
        well, said = self._health()
        text = json.dumps({"status": "ok" if well else "failing", **said})
        return 200 if well else 503, "application/json", text.encode() + b"\n"

    def handle_error(self, _request: object, _address: object) -> None:
        """Say nothing of callers that break off."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _SLOWEST_SECONDS
    server: StatusPort
    server_version, sys_version = "raceme", ""

    def do_GET(self) -> None:
        """Answer a request."""
        status, kind, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, _form: str, *_arguments: object) -> None:
        """Print nothing."""
