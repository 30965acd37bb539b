"""Metrics, event log and alerts of a server."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from processes import free_port, loopback, wait_until
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from serving import APP, fetch, light_device, serving

from raceme.core.errors import UserError
from raceme.core.events import (
    AnswerTaken,
    ClaimRefused,
    Evaluated,
    Event,
    Measure,
    Measured,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
)
from raceme.features.central_privacy.server import PRIVACY
from raceme.fleet.certificates import make_certificates, make_token
from raceme.fleet.serve import MOST_DEVICES, REASONS, Metrics, StatusPort, fields_of, label_of
from raceme.flower.link_state import LinkState
from raceme.flower.messages import NODE_UNAVAILABLE

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD, MONITORING = DOCKER / "grafana-dashboard.json", DOCKER / "monitoring"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def figures(page: bytes) -> dict[tuple[str, str], float]:
    """Return the value of each sample, by its name and label values."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def metrics_of(names: Mapping[int, str], state: LinkState | None = None) -> tuple[Metrics, Clock]:
    clock = Clock()
    return Metrics(state or LinkState(APP), lambda: names, lambda: 3, clock), clock


def samples_after(*events: Event) -> dict[tuple[str, str], float]:
    metrics, _ = metrics_of({})
    for event in events:
        metrics(event)
    return figures(metrics.page())


def applied(staleness: int) -> UpdateApplied:
    return UpdateApplied(1, 1.0, "a", 0, 0, staleness, 0.5, 0.5, 0.1, 4, 4)


def test_updates_and_their_staleness_are_counted() -> None:
    found = samples_after(applied(0), applied(3), applied(3), applied(2000))
    assert found["raceme_clusters", ""] == 3
    assert found["raceme_updates_total", ""] == 4
    assert found["raceme_staleness_bucket", "0.0"] == 1
    assert found["raceme_staleness_bucket", "2.0"] == 1
    assert found["raceme_staleness_bucket", "5.0"] == 3
    assert found["raceme_staleness_bucket", "1000.0"] == 3
    assert found["raceme_staleness_bucket", "+Inf"] == 4


def test_bytes_are_those_of_updates_and_answers() -> None:
    found = samples_after(applied(0), applied(1), AnswerTaken(1.0, "a", "probe", "train", 100, 7))
    assert found["raceme_bytes_total", "down"] == 108
    assert found["raceme_bytes_total", "up"] == 15
    assert found["process_resident_memory_bytes", ""] > 1e6


def test_quality_is_that_of_the_latest_evaluation() -> None:
    assert not [name for name, _ in samples_after() if name in ("raceme_accuracy", "raceme_loss")]
    tested = {"a": (0, 0.9, 0.3), "b": (0, 0.7, 0.5), "c": (4, 0.2, 1.0)}
    found = samples_after(
        Evaluated(1.0, 10, 0.1, 2.0, 1, {"a": (0, 0.1, 2.0)}),
        Evaluated(2.0, 20, 0.6, 0.6, 2, tested),
    )
    assert found["raceme_evaluations_total", ""] == 2
    assert found["raceme_accuracy", ""] == 0.6
    assert found["raceme_loss", ""] == 0.6
    assert found["raceme_worst_tenth_accuracy", ""] == 0.2
    assert found["raceme_cluster_accuracy", "0"] == pytest.approx(0.8)
    assert found["raceme_cluster_accuracy", "4"] == pytest.approx(0.2)
    assert found["raceme_cluster_devices", "0"] == 2
    assert found["raceme_cluster_devices", "4"] == 1


def test_a_measure_of_one_number_is_the_latest() -> None:
    def measured(epsilon: float) -> Measured:
        return Measured(1.0, 4, PRIVACY, {"client": "a", "participations": 1, "epsilon": epsilon})

    assert samples_after(measured(1.5), measured(2.5))["raceme_measure_privacy", ""] == 2.5


def test_of_an_error_the_largest_is_the_worst() -> None:
    tested = {"a": (0, 3.0, 0.3), "b": (0, 9.0, 0.5)}
    found = samples_after(Evaluated(1.0, 10, 6.0, 0.4, 1, tested, measure=Measure("µg/m³")))
    assert found["raceme_mae", ""] == 6
    assert found["raceme_worst_tenth_mae", ""] == 9
    assert ("raceme_accuracy", "") not in found


def test_rejections_are_counted_by_reasons_of_ours_whatever_a_device_says() -> None:
    hostile = 'no"}\n# EOF\nraceme_updates_total 99 '
    judged = UpdateJudged(1.0, "a", Verdict.REFUSED, 9.0, 1.0, "9 times as long as others")
    found = samples_after(
        UpdateRejected(1.0, "a", f"error {int(NODE_UNAVAILABLE)}: the node went offline", 0.5),
        UpdateRejected(1.0, "a", f"error 2: {hostile}", 0.5),
        UpdateRejected(1.0, "a", hostile, 0.5),
        judged,
        UpdateRejected(1.0, "a", "9 times as long as others", 0.5),
        UpdateRejected(1.0, "a", "9 times as long as others", 0.5),
        ClaimRefused(1.0, 5, hostile, hostile),
    )
    reasons = {
        labels: value
        for (name, labels), value in found.items()
        if name == "raceme_rejections_total" and value
    }
    assert reasons == {"device-left": 1, "device-error": 1, "other": 2, "verdict": 1}
    assert found["raceme_verdicts_total", "refused"] == 1
    assert found["raceme_verdicts_total", "excluded"] == 0
    assert found["raceme_updates_total", ""] == 0
    assert found["raceme_refused_claims_total", ""] == 1


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("not finite: the model holds NaN", "not-finite"),
        ("missing records: 0 ArrayRecords, not 1", "incomplete"),
        ("repeated or foreign task 7: it was sent 8", "other-work"),
        ("no examples", "no-examples"),
    ],
)
def test_reasons_have_labels(reason: str, label: str) -> None:
    assert label_of(reason) == label


def test_metrics_show_the_current_devices_messages_and_silences(tmp_path: Path) -> None:
    with serving(tmp_path) as server, light_device(server) as link:
        names = {link.node_id: 'kit"chen\n\x1b[1m'}
        metrics, clock = metrics_of(names, server.state)
        metrics.note_call(link.node_id)
        for number in (1, 2, 3):
            server.push(link.node_id, number)
        fetch(link)
        clock.now += 7
        found = figures(metrics.page())
        assert found["raceme_devices_online", ""] == 1
        assert found["raceme_messages", "waiting"] == 2
        assert found["raceme_messages", "at-work"] == 1
        assert found["raceme_messages", "answered"] == 0
        (((_, name), silence),) = (
            item for item in found.items() if item[0][0] == "raceme_device_silence_seconds"
        )
        assert silence == 7
        assert name.startswith('kit"chen')
        assert name.isprintable()
    # After the device has left, its silence continues to grow.
    names.clear()
    clock.now += 60
    found = figures(metrics.page())
    assert found["raceme_devices_online", ""] == 0
    assert found["raceme_device_silence_seconds", name] == 67


def test_so_many_devices_are_listed_and_no_more() -> None:
    metrics, clock = metrics_of(
        {node: f"device-{node}" + "x" * 500 for node in range(MOST_DEVICES + 100)}
    )
    for node in range(MOST_DEVICES + 100):
        clock.now += 1
        metrics.note_call(node)
    found = figures(metrics.page())
    listed = [labels for name, labels in found if name == "raceme_device_silence_seconds"]
    assert len(listed) == MOST_DEVICES
    assert found["raceme_devices_known", ""] == MOST_DEVICES + 100
    # The listed devices are those that are silent for longest.
    assert any(name.startswith("device-0x") for name in listed)
    assert not any(name.startswith(f"device-{MOST_DEVICES}x") for name in listed)
    assert max(map(len, listed)) <= 64


def get(address: str, path: str, accept: str = "") -> tuple[int, str, bytes]:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_series_of_devices_have_their_labels() -> None:
    labels = {
        "kitchen": {"room": 'a "b"', "floor": "1"},
        "hall": {f"n{i:02}": "x" for i in range(30)},
    }
    names = {1: "kitchen", 2: "hall"}
    metrics = Metrics(LinkState(APP), lambda: names, lambda: 1, Clock(), labels.__getitem__)
    for node in names:
        metrics.note_call(node)
    page = metrics.page().decode()
    (family,) = (
        family
        for family in text_string_to_metric_families(page)
        if family.name == "raceme_device_silence_seconds"
    )
    found = {sample.labels["device"]: sample.labels for sample in family.samples}
    assert found["kitchen"]["label_floor"] == "1"
    assert found["hall"]["label_floor"] == ""
    assert {len(one) for one in found.values()} == {17}
    labels["hall"] = {}
    assert 'label_room="a \\"b\\""' in metrics.page().decode()


def test_the_log_has_an_event_as_json_without_values_per_client() -> None:
    rejected = UpdateRejected(3.0, "a", "late", 1.0)
    assert fields_of(rejected) == {
        **{"time": 3.0, "client": "a", "reason": "late", "dispatched_at": 1.0},
    }
    evaluated = fields_of(Evaluated(1.0, 1, 0.5, math.nan, 1, {"a": (0, 0.5, 1.0)}, 1))
    assert (evaluated["measure"], evaluated["loss"]) == ("accuracy", None)
    assert "per_client" not in evaluated


def test_the_second_port_answers() -> None:
    well = True

    def health() -> tuple[bool, Mapping[str, object]]:
        return well, {"devices_online": 3}

    address = f"127.0.0.1:{free_port()}"
    with StatusPort(address, lambda _: b"figures", health):
        status, kind, body = get(address, "/metrics")
        assert (status, body) == (200, b"figures")
        assert kind.startswith("text/plain; version=0.0.4")
        status, kind, body = get(address, "/healthz")
        assert (status, json.loads(body)) == (200, {"status": "ok", "devices_online": 3})
        well = False
        status, _, body = get(address, "/healthz")
        assert (status, json.loads(body)["status"]) == (503, "failing")
        assert get(address, "/etc/passwd")[0] == 404
        with pytest.raises(UserError, match="--metrics off"):
            StatusPort(address, lambda _: b"", health)
    # The port is free again after the error.
    with StatusPort(address, lambda _: b"", health):
        pass


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", True),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("*/*", False),
        ("application/openmetrics-text;version=new", False),
    ],
)
def test_figures_come_in_the_text_that_is_accepted(accept: str, is_open: bool) -> None:
    metrics, _ = metrics_of({1: "kitchen"})
    metrics.note_call(1)
    metrics(applied(0))
    address = f"127.0.0.1:{free_port()}"
    with StatusPort(address, metrics.page, lambda: (True, {})):
        status, kind, body = get(address, "/metrics", accept)
    assert status == 200
    assert kind.startswith("application/openmetrics-text" if is_open else "text/plain")
    read = text_string_to_metric_families if is_open else parser.text_string_to_metric_families
    samples = [sample for family in read(body.decode()) for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert found["raceme_updates_total",] == 1
    assert found["raceme_device_silence_seconds", "kitchen"] == 0
    assert body.endswith(b"# EOF\n") == is_open


def test_beyond_loopback_a_token_over_https_is_required(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path, ["server.example.org"], [])
    make_token(tmp_path)
    view = (tmp_path / "view.token").read_text().strip()
    assert (tmp_path / "view.token").stat().st_mode & 0o077 == 0
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    port = free_port()

    def ask(path: str, token: str = "", host: str = "") -> tuple[int, str]:
        connection = HTTPSConnection("localhost", port, timeout=20, context=trust)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Host": host} if host else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    caplog.set_level(logging.INFO, "raceme.serve")
    with StatusPort(
        f"0.0.0.0:{port}", lambda _: b"figures", lambda: (True, {"a": 1}), tmp_path
    ) as made:
        assert made.address == f"https://0.0.0.0:{port}"
        for wrong in ("", "ä".encode().decode("latin-1"), view[:-1], view + "x", view.swapcase()):
            assert ask("/metrics", wrong)[0] == 401
        assert ask("/metrics", view) == (200, "figures")
        assert ask(f"/metrics?token={view}")[0] == 401
        # Load balancers have no token, and get the status only.
        assert json.loads(ask("/healthz")[1]) == {"status": "ok"}
        assert json.loads(ask("/healthz", view)[1]) == {"status": "ok", "a": 1}
        for name in ("server.example.org", "localhost", "10.0.0.7", "server"):
            assert ask("/metrics", view, f"{name}:{port}")[0] == 200
        assert ask("/metrics", view, "evil.example")[0] == 400
        with pytest.raises((OSError, HTTPException)):
            get(f"127.0.0.1:{port}", "/metrics")
    assert not any(view in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus")
def test_prometheus_reads_them_with_its_token_only(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], [])
    make_token(tmp_path)
    port, own = free_port(), free_port()
    target: dict[str, Any] = {
        "scheme": "https",
        "scrape_interval": "1s",
        "tls_config": {"ca_file": str(tmp_path / "ca.crt")},
        "static_configs": [{"targets": [f"localhost:{port}"]}],
    }
    token = {"authorization": {"credentials_file": str(tmp_path / "view.token")}}
    jobs = [{"job_name": "owner", **target, **token}, {"job_name": "stranger", **target}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": jobs}))

    def up() -> dict[str, str]:
        try:
            status, _, said = get(f"127.0.0.1:{own}", "/api/v1/query?query=up")
        except OSError:
            return {}
        if status != 200:
            return {}
        found = json.loads(said)["data"]["result"]
        return {one["metric"]["job"]: one["value"][1] for one in found}

    with (
        StatusPort(f"0.0.0.0:{port}", lambda _: b"# EOF\n", lambda: (True, {}), tmp_path),
        loopback(tmp_path) as bed,
    ):
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml"]
        command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{own}"]
        prometheus = bed.start("prometheus", command)
        seen = {"owner": "1", "stranger": "0"}
        wait_until(lambda: up() == seen, 60, prometheus.describe)


def test_without_tokens_an_open_port_names_no_other_site(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["server.example.org"], [])
    address = f"0.0.0.0:{free_port()}"
    with StatusPort(address, lambda _: b"figures", lambda: (True, {}), tmp_path) as port:
        assert port.is_open
        for host, status in (("10.0.0.7", 200), ("server", 200), ("evil.example", 400)):
            connection = HTTPConnection(address, timeout=20)
            connection.request("GET", "/metrics", headers={"Host": host})
            assert connection.getresponse().status == status


def test_tokens_that_can_be_guessed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "view.token").write_text("secret\n")
    with pytest.raises(UserError, match=r"view\.token' holds no token of 20 letters"):
        StatusPort("0.0.0.0:1", lambda _: b"", lambda: (True, {}), tmp_path)
    with pytest.raises(UserError, match="is not overwritten"):
        make_token(tmp_path)


def test_dashboard_and_alerts_ask_for_figures_that_there_are() -> None:
    metrics, _ = metrics_of({1: "kitchen"})
    metrics.note_call(1)
    metrics(Evaluated(2.0, 20, 0.6, 0.6, 2, {"kitchen": (0, 0.6, 0.6)}))
    metrics.certificate_until = datetime.fromtimestamp(2e9, UTC)
    names = {name for name, _ in figures(metrics.page())}
    dashboard: Any = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules: Any = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(panels) >= 8
    assert len(alerts) >= 5
    for expression in (*panels, *alerts):
        used = set(re.findall(r"raceme_\w+|process_\w+", expression))
        assert used or expression.startswith("up{")
        assert used <= names
        reasons = set(re.findall(r'reason="(\w+)"', expression))
        assert reasons <= {*REASONS.values(), "verdict", "other"}


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: Debian's package prometheus has it")
    done = subprocess.run(
        [promtool, "test", "rules", str(MONITORING / "alerts-test.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
