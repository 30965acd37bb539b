"""The services of the compose files, started like compose does; alerts of a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from light_devices import Behaviour, online
from processes import Loopback, Process, free_port, loopback, raceme, wait_until

from raceme.fleet.certificates import make_certificates, read_device_key
from raceme.flower.fleet_client import Endpoint

DOCKER = Path(__file__).resolve().parents[2] / "docker"
VARIABLE = re.compile(r"\$\{[A-Z_]+:-([^{}]*)\}")
SHORTER = {"1d": "60s", "30m": "20s", "10m": "2s", "5m": "2s", "2m": "10s", "> 300": "> 16"}
"""Durations of the alerts, shortened for the test."""


def command_of(service: str, file: str, places: dict[str, str]) -> list[str]:
    """Return a service's command line, with its folders and ports replaced."""
    found: Any = yaml.safe_load((DOCKER / file).read_text())["services"][service]
    words = [*found.get("entrypoint", ["raceme", "serve"]), *found["command"]]
    words = [VARIABLE.sub(r"\1", word) for word in words]
    for before, after in places.items():
        words = [word.replace(before, after) for word in words]
    return words[1:]


def get(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            text = answer.read()
    except OSError:
        return None
    return json.loads(text) if path.startswith("/api") else text


def firing(port: int) -> set[str]:
    found = get(port, "/api/v1/alerts") or {"data": {"alerts": []}}
    return {
        alert["labels"]["alertname"]
        for alert in found["data"]["alerts"]
        if alert["state"] == "firing"
    }


def health_check(port: int) -> list[str]:
    """Return the command of the image's health check."""
    text = (DOCKER / "server.Dockerfile").read_text()
    found = re.search(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", text)
    assert found
    words: list[str] = json.loads(found[1])
    assert words[0] == "python"
    return [sys.executable, *(word.replace("9093", str(port)) for word in words[1:])]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus")
def test_services_work_together_and_alerts_fire(tmp_path: Path) -> None:
    runs, certs, monitoring = (tmp_path / name for name in ("runs", "certs", "monitoring"))
    names = [f"device-{number}" for number in range(7)]
    make_certificates(certs, ["127.0.0.1"], names)
    runs.mkdir()
    sample = np.random.default_rng(1)
    x, y = sample.random((40, 8), np.float32), np.arange(40) % 2
    parts = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(runs / "sample.npz", **parts, num_classes=2)
    (runs / "run.toml").write_text(
        'strategy = "fedasync"\ndataset = "npz"\neval-every = 20\n'
        'protection = "norm"\nprotection-beyond = "refuse"\n'
        f'data-file = "{runs}/sample.npz"\nmax-updates = 1000000\n'
    )
    fleet, metrics, page, own = (free_port() for _ in range(4))
    places = {"/runs": str(runs), "/certs": str(certs), "9092": str(fleet), "9093": str(metrics)}
    shutil.copytree(DOCKER / "monitoring", monitoring)
    rules = (monitoring / "alerts.yml").read_text()
    for before, after in SHORTER.items():
        assert before in rules
        rules = rules.replace(before, after)
    (monitoring / "alerts.yml").write_text(rules)
    config = (monitoring / "prometheus.yml").read_text()
    config = config.replace("server:9093", f"127.0.0.1:{metrics}")
    config = config.replace(
        "scrape_interval: 15s", "scrape_interval: 1s\n  evaluation_interval: 1s"
    )
    (monitoring / "prometheus.yml").write_text(config)
    with loopback(tmp_path) as bed:
        server = bed.start("server", raceme(*command_of("server", "compose.server.yaml", places)))
        server.wait_for("Listening on", 240)
        watch = command_of(
            "page", "compose.monitoring.yaml", {"/runs": str(runs), "8321": str(page)}
        )
        watched = bed.start("page", raceme(*watch))
        prometheus = _prometheus(bed, monitoring, own)
        assert bed.start("health", health_check(metrics)).wait() == 0
        assert bed.start("health", health_check(free_port())).wait() != 0

        authority = (certs / "ca.crt").read_bytes()
        endpoint = Endpoint(f"127.0.0.1:{fleet}", root_certificates=authority)
        keys = {name: read_device_key(certs / "devices" / name) for name in names}
        behaviours = {
            name: Behaviour(training_seconds=0.2, accuracy=0.9, update_std=0.01) for name in names
        }
        with online(endpoint, behaviours, keys) as stops:
            up = "/api/v1/query?query=raceme_accuracy"
            wait_until(lambda: (get(own, up) or {"data": {}})["data"].get("result"), 90)
            watched.wait_for(rf"http://[\w.]+:{page}/#token=", 30)
            time.sleep(10)
            assert firing(own) == set(), server.describe()
            for name in names:
                behaviours[name].accuracy = 0.6
            wait_until(lambda: "RacemeAccuracyFell" in firing(own), 60, prometheus.describe)
            # Three of seven devices send updates that are far too long, and pause longer each time.
            for number, name in enumerate(names):
                behaviours[name].training_seconds = 8.0
                behaviours[name].update_std = 100.0 if number < 3 else 0.01
            wait_until(lambda: "RacemeProtectionRejects" in firing(own), 120, server.describe)
            assert "RacemeDeviceSilent" not in firing(own)
            stops[names[6]].set()
            wait_until(lambda: "RacemeDeviceSilent" in firing(own), 60, server.describe)
        server.handle.kill()
        wait_until(lambda: "RacemeServerDown" in firing(own), 60, prometheus.describe)


def _prometheus(bed: Loopback, folder: Path, port: int) -> Process:
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    return bed.start("prometheus", command)
