"""The dashboard's server: access, files, and the run as a stream of events."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from raceme.core.events import ClientJoined, UpdateApplied
from raceme.flower.ports import Access
from raceme.records.folder import only_writer
from raceme.records.store import RunStore
from raceme.reporting import dashboard as page
from raceme.reporting.dashboard.server import COOKIE, Dashboard, address_of, bind, qr_code, serve
from raceme.reporting.dashboard.source import Watched

LOCAL = Access("127.0.0.1")
TOKEN = "a-token-that-nobody-guesses"


def test_a_guess_is_compared_with_every_token_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[tuple[int, int]] = []

    def compared(one: bytes, other: bytes) -> bool:
        lengths.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr("raceme.flower.ports.secrets.compare_digest", compared)
    access = Access("0.0.0.0", TOKEN)
    assert access.has_token([TOKEN, "a"])
    assert not access.has_token(["a", ""])
    # All tokens are compared, also after a match, and with equal lengths for any guess.
    assert lengths == [(32, 32)] * 4
    assert not Access("0.0.0.0").has_token([""])


def client(
    folder: Path, host: str = "127.0.0.1", token: str = "", name: str | None = None
) -> TestClient:
    access = Access(host, token)
    app = Dashboard(Watched(folder, False), access).app
    headers = {"host": f"{host if name is None else name}:8321"}
    base = "http://192.0.2.7:8321"
    return TestClient(app, base_url=base, headers=headers, follow_redirects=False)


def test_the_page_and_its_files_are_served_and_nothing_else(tmp_path: Path) -> None:
    browser = client(tmp_path)
    answer = browser.get("/")
    assert answer.text == page.live_page()
    assert answer.headers["content-type"].startswith("text/html")
    for name in page.ASSETS:
        assert browser.get(f"/assets/{name}").status_code == 200
    for name in ("../page.py", "%2e%2e/page.py", "index.html", "vendor", "nothing.js"):
        assert browser.get(f"/assets/{name}").status_code == 404
    assert browser.get("/events?run=../other").status_code == 404


def test_all_that_the_page_asks_for_is_there() -> None:
    for part in page.live_page().split('"'):
        if part.startswith("assets/"):
            assert part.removeprefix("assets/") in page.ASSETS


def test_every_answer_is_strict(tmp_path: Path) -> None:
    for path in ("/", "/assets/main.js", "/nothing"):
        headers = client(tmp_path).get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "name", ["evil.example", "localhost.evil.example", "10.0.0.7", "[fe80::1]"]
)
def test_another_host_name_that_points_to_this_machine_is_refused(
    tmp_path: Path, name: str
) -> None:
    assert client(tmp_path, name=name).get("/").status_code == 400


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_this_machine_needs_no_token(tmp_path: Path, name: str) -> None:
    assert client(tmp_path, name=name).get("/").status_code == 200


def test_without_the_token_there_is_one_line(tmp_path: Path) -> None:
    browser = client(tmp_path, "0.0.0.0", TOKEN, "192.0.2.7")
    # Tokens in addresses are refused, as addresses appear in logs of proxies.
    for path in ("/", "/events", "/assets/main.js", "/?token=wrong", f"/?token={TOKEN}"):
        answer = browser.get(path)
        assert answer.status_code == 403
        assert answer.text.count("\n") == 1
        assert "token" in answer.text
        assert TOKEN not in answer.text
    assert client(tmp_path, "0.0.0.0", TOKEN, "evil.example").get("/").status_code == 400


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_site_sees(tmp_path: Path) -> None:
    browser = client(tmp_path, "0.0.0.0", TOKEN, "192.0.2.7")
    assert "form-action 'self'" in browser.get("/").headers["content-security-policy"]
    assert browser.get("/assets/login.js").status_code == 200
    for wrong in ("", "ä", TOKEN[:-1], TOKEN + "x"):
        assert browser.post("/login", data={"token": wrong}).status_code == 403
    assert browser.post("/login", data={"token": "x" * 5000}).status_code == 400
    answer = browser.post("/login", data={"token": TOKEN})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(f"{COOKIE}={TOKEN}")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/").status_code == 200
    browser.cookies.set(COOKIE, "wrong", domain="192.0.2.7")
    assert client(tmp_path, "0.0.0.0", TOKEN, "192.0.2.7").get("/").status_code == 403


def test_a_monitor_sends_its_token_in_a_header(tmp_path: Path) -> None:
    browser = client(tmp_path, "0.0.0.0", TOKEN, "192.0.2.7")
    for scheme, token, status in (
        *(("Bearer", TOKEN, 200), ("bearer", TOKEN, 200)),
        *(("Basic", TOKEN, 403), ("Bearer", "", 403), ("Bearer", TOKEN.upper(), 403)),
    ):
        answer = browser.get("/", headers={"Authorization": f"{scheme} {token}"})
        assert answer.status_code == status


def test_all_addresses_are_printed_as_one_that_a_phone_can_open() -> None:
    with bind("0.0.0.0", 0) as listening:
        shown = urlsplit(address_of(listening, Access("0.0.0.0", TOKEN)))
    assert shown.hostname not in (None, "0.0.0.0")
    assert (shown.query, shown.fragment) == ("", f"token={TOKEN}")


def test_the_code_in_the_terminal_is_for_other_machines_only() -> None:
    pytest.importorskip("segno")
    rows = qr_code(f"http://192.0.2.7:8321/#token={TOKEN}").splitlines()
    assert len(rows) > 10
    assert max(map(len, rows)) < 80
    for own in ("http://127.0.0.1:8321/", "http://localhost:8321/", "http://[::1]:8321/"):
        assert qr_code(own) == ""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A dashboard over real HTTP, of the folder ``run``."""
    import asyncio

    ended = threading.Event()

    async def until() -> None:
        while not ended.is_set():
            await asyncio.sleep(0.02)

    with bind("127.0.0.1", 0) as listening:
        watched = Watched(tmp_path / "run", False)
        thread = threading.Thread(target=serve, args=(listening, watched, LOCAL, until))
        thread.start()
        yield address_of(listening, LOCAL)
        ended.set()
        thread.join(20)
        assert not thread.is_alive()


class Stream:
    """Server-sent events as they arrive."""

    def __init__(self, address: str, last: str = "") -> None:
        self._connection = HTTPConnection(urlsplit(address).netloc, timeout=30)
        self._connection.request("GET", "/events", headers={"Last-Event-ID": last} if last else {})
        self._answer = self._connection.getresponse()

    def next(self) -> tuple[str, str, dict]:
        fields: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().rstrip("\n")
            if not line and "data" in fields:
                return fields["event"], fields["id"], json.loads(fields["data"])
            name, _, value = line.partition(": ")
            fields[name] = value

    def until(self, table: str) -> tuple[str, dict]:
        while True:
            name, number, data = self.next()
            if name == "piece" and table in data:
                return number, data

    def close(self) -> None:
        self._connection.close()


def test_a_run_is_told_as_it_grows_and_a_browser_that_comes_back_goes_on(
    address: str, tmp_path: Path
) -> None:
    stream = Stream(address)
    with RunStore(tmp_path / "run") as store:
        store.observe(ClientJoined(0.0, "a", 0, 12, None))
        store.commit()
        _, first = stream.until("clients")
        assert first["clients"] == {"name": ["a"]}
        store.observe(UpdateApplied(1, 2.0, "a", 0, 0, 0, 0.5, 0.5, 1.0, 8, 8))
        store.commit()
        seen, second = stream.until("updates")
        assert second["updates"]["time"] == [2.0]
        assert "clients" not in second
        stream.close()
        again = Stream(address, seen)
        store.observe(UpdateApplied(2, 3.0, "a", 0, 0, 0, 0.5, 0.5, 1.0, 8, 8))
        store.commit()
        name, _, data = again.next()
        assert (name, data["updates"]["time"]) == ("piece", [3.0])
        again.close()


def test_a_browser_of_another_dashboard_begins_anew(address: str, tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.observe(ClientJoined(0.0, "a", 0, 12, None))
    stream = Stream(address, "12345-7")
    assert stream.next()[0] == "restart"
    assert stream.until("clients")[1]["clients"] == {"name": ["a"]}
    stream.close()


def test_a_browser_that_does_not_read_holds_nobody_up(address: str, tmp_path: Path) -> None:
    """One viewer reads nothing of 24 MB, while another one receives all of it."""
    stuck = Stream(address)
    with RunStore(tmp_path / "run") as store:
        for number in range(6_000):
            store.observe(ClientJoined(float(number), f"{number}" + "x" * 4000, 0, 12, None))
    other = Stream(address)
    count = 0
    while count < 6_000:
        count += len(other.until("clients")[1]["clients"]["name"])
    assert count == 6_000
    stuck.close()
    other.close()


def test_a_damaged_store_is_reported_until_it_is_repaired(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.sqlite").write_bytes(b"no database" * 99)
    stream = Stream(address)
    while True:
        name, _, data = stream.next()
        if name == "trouble":
            break
    assert "is not a run store" in data["text"]
    stream.close()


SECRET = "of-the-printed-address"


def editor(folder: Path, edits: str = SECRET) -> TestClient:
    app = Dashboard(Watched(folder, True), LOCAL, edits).app
    headers = {"origin": "http://127.0.0.1:8321", "raceme-edits": SECRET}
    return TestClient(app, base_url="http://127.0.0.1:8321", headers=headers)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("one", "two", "cmp/casa/seed-0"):
        with RunStore(tmp_path / "runs" / name) as store:
            store.observe(ClientJoined(0.0, "a", 0, 12, None))
    return tmp_path / "runs"


def test_a_page_of_several_runs_writes_notes_and_deletes(runs: Path) -> None:
    browser = editor(runs)
    assert browser.post("/note?run=one", content="x\ny").text == "x y"
    assert (runs / "one" / "note.txt").read_text() == "x y\n"
    assert browser.post("/note?run=one", content="x" * 5000).status_code == 400
    listed = browser.post("/contents?run=one").text.splitlines()
    assert listed[0].startswith(f"{runs / 'one'} (2 files")
    assert listed[1:] == ["note.txt", "run.sqlite"]
    assert browser.post("/delete?run=one").status_code == 200
    assert sorted(path.name for path in runs.iterdir()) == ["cmp", "two"]


def test_a_failed_deletion_is_reported(runs: Path) -> None:
    browser = editor(runs)
    (runs / "two" / "analysis.ipynb").write_text("{}")
    for name, status, said in (
        ("two", 409, "analysis.ipynb in it belongs to no run"),
        ("cmp/casa/seed-0", 409, "part of a comparison"),
        ("../other", 404, "no such run"),
        ("", 404, "no such run"),
    ):
        answer = browser.post("/delete", params={"run": name})
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    with only_writer(runs / "one"):
        assert "still writing" in browser.post("/delete?run=one").text
    assert (runs / "one").is_dir()
    assert (runs / "two").is_dir()


@pytest.mark.parametrize("edit", ["note", "contents", "delete"])
def test_only_the_page_at_the_printed_address_edits(runs: Path, edit: str) -> None:
    browser = editor(runs)
    for strange in (
        {"origin": "http://elsewhere.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8321"},
        {"raceme-edits": SECRET[:-1]},
        {"raceme-edits": ""},
    ):
        assert browser.post(f"/{edit}?run=one", headers=strange).status_code == 403, strange
    del browser.headers["origin"]
    assert browser.post(f"/{edit}?run=one").status_code == 403
    assert browser.get(f"/{edit}?run=one").status_code == 405
    # A read-only page has no secret, and an empty one is never valid.
    assert editor(runs, "").post(f"/{edit}?run=one").status_code == 403
    shown = editor(runs, "").post(f"/{edit}?run=one", headers={"raceme-edits": ""})
    assert shown.status_code == 403
    assert (runs / "one" / "run.sqlite").exists()
