"""`raceme watch` and `--watch`: addresses, pages, the end of a run, and bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from processes import as_in_a_terminal
from typer.testing import CliRunner

from raceme.cli import app
from raceme.core.errors import UserError
from raceme.core.events import ClientJoined
from raceme.fleet.certificates import make_certificates, make_token
from raceme.records.store import RunStore
from raceme.reporting.dashboard.server import watching

RACEME = [sys.executable, "-c", "from raceme.cli import main; main()"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunStore(tmp_path / "run") as store:
        store.observe(ClientJoined(0.0, "a", 0, 12, None))
    return tmp_path / "run"


def started(*arguments: str | Path) -> tuple[subprocess.Popen[str], str]:
    """Start a command, and return it with the address that it prints."""
    process = subprocess.Popen(
        as_in_a_terminal([*RACEME, *map(str, arguments)]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"https?://\S+", line)
    assert found, line + process.stdout.read()
    return process, found[0]


def pieces_of(address: str, last: str) -> list[dict]:
    """Return the pieces of a run up to the first one with a table."""
    parts = urlsplit(address)
    connection = HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", "/events")
    answer, pieces = connection.getresponse(), []
    while not pieces or last not in pieces[-1]:
        line = answer.readline().decode()
        assert line, "the stream ended"
        if line.startswith("data: {"):
            pieces.append(json.loads(line.removeprefix("data: ")))
    connection.close()
    return pieces


def test_a_run_is_watched_until_ctrl_c(run: Path) -> None:
    process, address = started("watch", run, "--port", "0")
    assert urlsplit(address).hostname == "127.0.0.1"
    assert pieces_of(address, "clients")[-1]["clients"] == {"name": ["a"]}
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output == ""


def test_other_addresses_print_a_token(run: Path) -> None:
    process, address = started("watch", run, "--host", "0.0.0.0", "--port", "0")
    token = re.fullmatch(r"http://\S+:(\d+)/#token=(\S{32})", address)
    assert token is not None
    connection = HTTPConnection("127.0.0.1", int(token[1]), timeout=30)
    connection.request("GET", "/events")
    assert connection.getresponse().status == 403
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_with_the_fleets_certificates_the_page_speaks_https(run: Path, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["localhost"], [])
    make_token(certs)
    token = (certs / "view.token").read_text().strip()
    options = ("--host", "0.0.0.0", "--port", "0", "--certificates", certs)
    process, address = started("watch", run, *options)
    # With certificates it is a service, whose output goes to a log: no token is printed.
    assert re.fullmatch(r"https://localhost:\d+/", address)
    trust = ssl.create_default_context(cafile=str(certs / "ca.crt"))
    parts = urlsplit(address)
    assert parts.port is not None

    def ask(method: str, path: str, headers: dict[str, str], body: str = "") -> HTTPResponse:
        connection = HTTPSConnection("localhost", parts.port, timeout=30, context=trust)
        connection.request(method, path, body, headers)
        return connection.getresponse()

    assert ask("GET", "/", {}).status == 403
    assert ask("GET", "/assets/main.js", {"Authorization": f"Bearer {token}"}).status == 200
    answer = ask("POST", "/login", {}, f"token={token}")
    cookie = answer.headers["Set-Cookie"]
    assert answer.status == 303
    assert "Secure" in cookie
    assert ask("GET", "/", {"Cookie": cookie.partition(";")[0]}).status == 200
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")


def output_of(*arguments: str | Path) -> str:
    with pytest.raises(UserError) as raised:
        CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_bad_input_is_one_clear_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        taken_port = f"Cannot listen on 127.0.0.1:{port}: the port is in use. Choose another with"
        assert f"{taken_port} --port " in output_of("watch", run, "--port", port)
        where = f"127.0.0.1:{port}"
        out = tmp_path / "new"
        line = output_of("run", "--watch", "--watch-address", where, "--out", out)
        assert f"{taken_port} --watch-address " in line
        assert not out.exists()
    assert "does not exist" in output_of("watch", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "holds no run" in output_of("watch", tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in output_of("watch", tmp_path / "file")
    assert "no address of this machine" in output_of("watch", run, "--host", "no.such.host.invalid")
    for address in ("8321", ":8321", "localhost:", "localhost:99999", "localhost:x"):
        assert "is not an address" in output_of("run", "--watch", "--watch-address", address)
    assert "add --watch" in output_of("run", "--watch-address", "127.0.0.1:0")
    assert not list((tmp_path / "runs").iterdir())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict], str]:
    """A run with --watch: the events that a viewer received, and the command's output."""
    out = tmp_path_factory.mktemp("watched") / "run"
    keys = ("--clients", "6", "--max-updates", "30", "--set", "workers=0", "--out", out)
    process, address = started("run", "--watch", "--watch-address", "127.0.0.1:0", *keys)
    pieces = pieces_of(address, "ended")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return out, pieces, address


def test_a_watched_run_tells_the_numbers_of_its_summary(
    watched: tuple[Path, list[dict], str],
) -> None:
    out, pieces, _ = watched
    summary = json.loads((out / "summary.json").read_text())
    evaluations = [piece["evaluations"] for piece in pieces if "evaluations" in piece]
    assert evaluations[-1]["accuracy"][-1] == summary["accuracy"]
    assert evaluations[-1]["best"][-1] == summary["best_accuracy"]
    updates = [time for piece in pieces for time in piece.get("updates", {}).get("time", [])]
    assert len(updates) == summary["updates"] == 30
    numbers = [piece["numbers"] for piece in pieces if "numbers" in piece]
    assert numbers[-1]["clusters"][-1] == summary["clusters"]
    assert numbers[-1]["purity"][-1] == summary["purity"]


def test_the_page_ends_with_a_run_in_a_script(watched: tuple[Path, list[dict], str]) -> None:
    parts = urlsplit(watched[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((parts.hostname, parts.port), timeout=5)


def test_a_dashboard_ends_when_the_run_does_though_a_viewer_hangs(tmp_path: Path) -> None:
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        with RunStore(tmp_path / "run") as store:
            for number in range(3000):
                store.observe(ClientJoined(float(number), f"{number}" + "x" * 4000, 0, 12, None))
        parts = urlsplit(beside.address)
        hanging = HTTPConnection(parts.netloc, timeout=60)
        hanging.request("GET", "/events")
        hanging.getresponse()
        begun = time.monotonic()
    assert beside.process.returncode is not None
    assert time.monotonic() - begun < 60
    hanging.close()


def test_a_dashboard_does_not_outlive_a_killed_run(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from raceme.reporting.dashboard.server import watching\n"
        f"with watching(pathlib.Path({str(tmp_path)!r}), '127.0.0.1', 0) as beside:\n"
        "    print(beside.process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def test_the_dashboard_starts_without_torch(tmp_path: Path) -> None:
    """The dashboard runs beside every watched run, so its memory and start must be small."""
    program = (
        "import sys, raceme.reporting.dashboard.server; "
        "print([name for name in ('torch', 'matplotlib', 'flwr') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
