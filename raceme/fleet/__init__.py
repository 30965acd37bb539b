"""Real devices and servers: serve, device, certificates, and a testbed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raceme.core.options import option

LOG_FORMAT = "text, or json: a line for each event and message"


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server besides the keys of its run; the help of `raceme serve` explains them.

    `margin`, `canary` and `version_pause` belong to
    :class:`~raceme.fleet.served_grid.Rollouts`; time limits are multiples of `latency`.
    """

    address: str = option("0.0.0.0:9092", "address to listen on for devices", unit="HOST:PORT")
    certificates: Path | None = option(
        None,
        "folder made by `raceme certs`: TLS, and no unlisted devices; without it, plain text",
        unit="FOLDER",
    )
    http: str | None = option(
        None,
        "address to listen on for SuperNodes of Flower 1.40 and later (HTTP)",
        unit="HOST:PORT",
    )
    any_device: bool = option(False, "accept devices without a registered key")
    clients_min: int = option(1, "devices to wait for before training starts", low=1)
    reconnect: float = option(
        90.0, "time for devices to reconnect after a restart", unit="SECONDS", low=0
    )
    latency: float = option(
        1.0,
        "longest time of a packet to a device; the time limit of a handshake is 10 times as long",
        unit="SECONDS",
        low=1,
        high=60,
    )
    metrics: str = option(
        "",
        "address of /metrics and /healthz, or off; default: loopback, the port after --address's",
        unit="HOST:PORT",
    )
    log_format: str = option("text", LOG_FORMAT, unit="NAME")
    keep_versions: int | None = option(
        None,
        "versions of each cluster's model to keep and bring into use; 0: none; default: 5, or 0 in "
        "a run with a limit",
        low=0,
    )
    margin: float = option(
        0.01,
        "a new version comes into use if its accuracy is lower by at most this, on the same "
        "samples (regression: its error higher by this share)",
        low=0,
    )
    canary: float = option(
        0.1,
        "devices of a cluster that try a new version first; one at least",
        unit="SHARE",
        low=0,
        high=1,
    )
    version_pause: float = option(
        60.0, "least time between two new versions", unit="SECONDS", low=0
    )
    notify: str = option(
        "",
        "webhook for notices: the run ended, accuracy fell, devices are offline, the disk is full, "
        "the certificate expires; default: none",
        unit="URL",
    )

    @property
    def logs_events(self) -> bool:
        """Whether every request and event is logged, for logs in JSON."""
        return self.log_format == "json"
