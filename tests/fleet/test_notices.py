"""Notices to the operator: each problem is reported once, and notices arrive."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from processes import free_port, loopback, raceme

from raceme.core.events import Ending, Evaluated, Measure, RunEnded
from raceme.fleet.notices import Notices, Webhook

Usage = namedtuple("Usage", "free")


class Situation:
    """The state that a server's notices depend on, and the notices."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.online, self.now, self.free = 4, 0.0, 1 << 40
        self.until: datetime | None = None
        self.said: list[str] = []
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(self.free))
        self.notices = Notices(
            lambda event, _text: self.said.append(event),
            folder,
            lambda: self.online,
            lambda: self.until,
            lambda: self.now,
        )

    def after(self, seconds: float) -> list[str]:
        """Check again after some time; return the new notices."""
        self.now += seconds
        before = len(self.said)
        assert self.notices.check() is False
        return self.said[before:]

    def evaluated(self, score: float, unit: str | None = None) -> list[str]:
        before = len(self.said)
        self.notices(Evaluated(1.0, 10, score, 0.5, 1, {}, measure=Measure(unit)))
        return self.said[before:]


@pytest.fixture
def situation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Situation:
    return Situation(tmp_path, monkeypatch)


def test_a_fall_of_the_accuracy_is_reported_once_until_it_recovers(situation: Situation) -> None:
    said = [situation.evaluated(score) for score in (0.5, 0.8, 0.73, 0.71, 0.6, 0.79, 0.7)]
    # A tenth below 0.8 is 0.72.
    assert said == [[], [], [], ["accuracy-fell"], [], [], ["accuracy-fell"]]


def test_an_error_that_rises_is_a_fall(situation: Situation) -> None:
    said = [situation.evaluated(score, "°C") for score in (3.0, 2.0, 2.1, 2.3)]
    assert said == [[], [], [], ["accuracy-fell"]]


def test_devices_are_gone_when_half_are_away_for_five_minutes(situation: Situation) -> None:
    assert situation.after(0) == []
    situation.online = 2
    assert [situation.after(60) for _ in range(7)] == [[], [], [], [], [], ["devices-gone"], []]
    situation.online = 3
    assert situation.after(60) == []
    situation.online = 1
    assert situation.after(60) == []
    assert situation.after(300) == ["devices-gone"]


def test_a_full_disk_and_an_expiring_certificate_are_reported(situation: Situation) -> None:
    situation.until = datetime.now(UTC) + timedelta(days=15)
    assert situation.after(0) == []
    situation.free = 100 << 20
    situation.until -= timedelta(days=2)
    # The server checks every ten seconds.
    assert situation.after(5) == []
    assert situation.after(5) == ["disk-full", "certificate-expires"]
    assert situation.after(60) == []


@pytest.fixture
def received() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a webhook and its received requests; the first ones fail."""
    found: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        failures = 1

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            Hook.failures, is_down = Hook.failures - 1, Hook.failures > 0
            self.send_response(503 if is_down else 200)
            self.end_headers()
            if not is_down:
                found.append(body)

        def log_message(self, *_line: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", found
    server.shutdown()
    server.server_close()


def test_the_end_of_a_run_arrives(
    received: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, found = received
    send = Webhook(url, tmp_path)
    notices = Notices(send, tmp_path, lambda: 0, lambda: None)
    notices(RunEnded(3.0, 40, "max-updates", Ending.LIMIT))
    send.close()
    (body,) = found
    assert body["event"] == "run-ended"
    assert body["text"] == f"{tmp_path}: the run ended after 40 updates: max-updates"
    assert datetime.fromisoformat(body["time"]) <= datetime.now(UTC)


def test_a_webhook_that_is_not_there_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    send = Webhook(f"http://127.0.0.1:{free_port()}", tmp_path)
    send("run-ended", "it is over")
    send.close()
    assert "A notice could not be sent" in caplog.text


@pytest.mark.slow
def test_a_server_that_is_stopped_reports_it(
    received: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, found = received
    with loopback(tmp_path) as bed:
        address = ("--address", f"127.0.0.1:{free_port()}", "--metrics", "off")
        keys = ("--strategy", "fedasync", "--dataset", "digits", "--clients", "2", "--out", "out")
        server = bed.start("serve", raceme("serve", *address, *keys, "--notify", url))
        server.wait_for("Listening on", 240)
        server.stop()
    assert [(body["event"], body["run"]) for body in found] == [
        ("run-ended", str(tmp_path / "out"))
    ]
