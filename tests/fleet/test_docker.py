"""Images, compose files and units are linted and checked, without Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import free_port
from typer.testing import CliRunner

from raceme.cli import app
from raceme.fleet.certificates import make_certificates, make_token, set_labels
from raceme.fleet.serve import StatusPort, with_registry

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))
UNITS = sorted((DOCKER / "systemd").glob("*.service"))

# The attributes of the compose specification that are used here, and their types.
TYPES = {
    "build": dict,
    "cap_drop": list,
    "command": list,
    "entrypoint": list,
    "environment": dict,
    "image": str,
    "logging": dict,
    "mem_limit": str,
    "pids_limit": int,
    "ports": list,
    "read_only": bool,
    "restart": str,
    "runtime": str,
    "security_opt": list,
    "stop_grace_period": str,
    "tmpfs": list,
    "user": str,
    "volumes": list,
}
VARIABLE = re.compile(r"\$\{[A-Z_]+(:[-?][^{}]*)?\}")


def services(path: Path) -> dict[str, dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    assert set(document) <= {"name", "services", "volumes"}
    return dict(document["services"])


def filled_in(text: str) -> str:
    """Return a value with its variables replaced by their defaults."""
    return VARIABLE.sub(lambda found: (found.group(1) or ":-")[2:], text)


def is_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", DOCKERFILES, ids=is_name)
def test_hadolint_finds_nothing(path: Path) -> None:
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=scripts)
    assert hadolint, "install the extra 'dev'"
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("path", DOCKERFILES, ids=is_name)
def test_images_are_pinned_built_in_two_stages_and_run_as_nobody_special(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^ARG BASE=python:3\.11\.\d+-slim-bookworm$", text, re.M)
    assert len(re.findall(r"^FROM ", text, re.M)) == 2
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 1000:1000$", last, re.M)
    assert "HEALTHCHECK" in last
    assert "pip install" not in last
    for installed in re.findall(r"install --no-cache-dir (virtualenv\S*)", text):
        assert "==" in installed


@pytest.mark.parametrize("path", COMPOSE, ids=is_name)
def test_compose_files_are_well_formed(path: Path) -> None:
    for service in services(path).values():
        assert set(service) <= set(TYPES)
        for name, value in service.items():
            assert isinstance(value, TYPES[name]), name
        for port in service.get("ports", []):
            assert re.fullmatch(r"([\d.]+:)?\d+:\d+", port)
        for volume in service.get("volumes", []):
            assert re.fullmatch(r"[./\w-]+:/[\w./]+(:ro)?", filled_in(volume))
        for entry in service.get("tmpfs", []):
            assert re.fullmatch(r"/\w+:size=\d+m,mode=1777", entry)
        assert re.fullmatch(r"\d+[mg]", filled_in(service.get("mem_limit", "1g")))
        assert re.fullmatch(r"\d+s", service.get("stop_grace_period", "1s"))
        assert all(isinstance(word, str) for word in service.get("command", []))


@pytest.mark.parametrize("name", ["server", "device"])
def test_containers_have_no_more_rights_than_they_need(name: str) -> None:
    (service,) = services(DOCKER / f"compose.{name}.yaml").values()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert filled_in(service["user"]) == "1000:1000"
    assert service["restart"] == "unless-stopped"
    assert service["image"].partition(":")[2] not in ("", "latest")
    build = service["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
    secrets = [volume for volume in service["volumes"] if ":/certs" in volume]
    assert secrets
    assert all(volume.endswith(":ro") for volume in secrets)


def test_the_server_lets_registered_devices_in_and_nobody_else() -> None:
    (service,) = services(DOCKER / "compose.server.yaml").values()
    assert service["ports"] == ["9092:9092"]
    assert "--certificates=/certs" in service["command"]
    assert "--any-device" not in service["command"]


@pytest.mark.parametrize("has_token", [False, True])
def test_the_health_check_is_that_of_the_status_port(tmp_path: Path, has_token: bool) -> None:
    make_certificates(tmp_path, ["localhost"], [])
    if has_token:
        make_token(tmp_path)
    text, port, well = (DOCKER / "server.Dockerfile").read_text(), free_port(), [True]
    found = re.search(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", text)
    assert found
    _, *words = json.loads(found[1].replace("9093", str(port)))

    def check() -> int:
        return subprocess.run([sys.executable, *words], check=False).returncode

    assert check() == 1
    with StatusPort(f"0.0.0.0:{port}", lambda _: b"", lambda: (well[0], {}), tmp_path):
        assert check() == 0
        well[0] = False
        assert check() == 1


@pytest.mark.parametrize(
    ("section", "target"), [("With Docker", "docker/certs"), ("With systemd", "etc/raceme/certs")]
)
def test_the_files_that_a_server_reads_are_copied_to_it(
    section: str, target: str, tmp_path: Path
) -> None:
    make_certificates(tmp_path, ["localhost"], ["kitchen", "garden"])
    set_labels(tmp_path, ["kitchen"], ["room=hall"])
    page = (DOCKER.parent / "docs" / "server.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {section}\n.*?```bash\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert found
    # The other lines need root, a container engine, or a checkout.
    lines = [line for line in found[1].splitlines() if re.match("(sudo install|cp|mkdir) ", line)]
    script = "\n".join(line for line in lines if "certs" in line)
    script = script.replace("sudo ", "").replace("-o raceme ", "").replace(" /", " ")
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
    copied = tmp_path / target
    assert {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()} == {
        *("ca.crt", "server.crt", "server.key", "device-keys", "labels.toml"),
        *("devices/kitchen.pub", "devices/garden.pub"),
    }
    assert with_registry({}, copied).keys() == {"device-keys", "labels"}


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_options_that_are_passed_exist() -> None:
    (device,) = services(DOCKER / "compose.device.yaml").values()
    image = (DOCKER / "device.Dockerfile").read_text()
    unit = (DOCKER / "systemd" / "raceme-device.service").read_text()
    passed = options_of(device["command"]) | {"--health-file"}
    passed |= set(re.findall(r"(?<= )--[a-z-]+", unit))
    assert '"--health-file", "/tmp/raceme-health"' in image
    known = CliRunner().invoke(app, ["device", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert all(option in known.output for option in passed)


def test_the_options_of_the_server_exist() -> None:
    (server,) = services(DOCKER / "compose.server.yaml").values()
    assert 'ENTRYPOINT ["raceme", "serve"]' in (DOCKER / "server.Dockerfile").read_text()
    unit = (DOCKER / "systemd" / "raceme-server.service").read_text()
    command = re.search(r"ExecStart=\S+ serve ((?:.*\\\n)*.*)\n", unit)
    assert command
    passed = options_of(server["command"])
    # The service on a host has no --metrics: the default port is open to the host alone.
    own = options_of(command.group(1).replace("\\\n", " ").split())
    assert passed == own | {"--metrics"}
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert all(option in known.output for option in passed)


def test_the_unit_of_the_server_has_files_for_silent_connections() -> None:
    """Connections may take all but 256 of them."""
    unit = (DOCKER / "systemd" / "raceme-server.service").read_text()
    assert int(re.findall(r"^LimitNOFILE=(\d+)$", unit, re.MULTILINE)[0]) >= 1 << 16


def test_monitoring_reaches_the_server_and_is_published_on_loopback_only() -> None:
    (server,) = services(DOCKER / "compose.server.yaml").values()
    beside = services(DOCKER / "compose.monitoring.yaml")
    port = next(word for word in server["command"] if word.startswith("--metrics")).split(":")[1]
    scraped = yaml.safe_load((DOCKER / "monitoring" / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": [f"server:{port}"]}]
    assert f"127.0.0.1:{port}/healthz" in (DOCKER / "server.Dockerfile").read_text()
    assert beside["page"]["image"] == server["image"]
    assert beside["page"]["entrypoint"] == ["raceme", "watch"]
    for service in beside.values():
        assert all(entry.startswith("127.0.0.1:") for entry in service["ports"])
        sources = [entry.partition(":")[0] for entry in service["volumes"]]
        assert all((DOCKER / source).exists() for source in sources if source.startswith("./"))


@pytest.mark.parametrize("path", UNITS, ids=is_name)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    # The programs of the unit are not installed here; any other program works for the check.
    unit = tmp_path / path.name
    unit.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", path.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert (complaints, done.returncode) == ([], 0)
