"""Strangers at the ports of the page and of the metrics: names, tokens, paths, headers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from processes import free_port

from raceme.core.events import ClientJoined, UpdateRejected
from raceme.fleet.certificates import access_to, make_certificates, make_token
from raceme.fleet.serve import StatusPort
from raceme.flower.ports import Access, new_token
from raceme.records.store import RunStore
from raceme.reporting.dashboard import frozen_run
from raceme.reporting.dashboard.server import bind, serve
from raceme.reporting.dashboard.source import Watched

SUBJECTS = ("rebinding", "tokens", "paths", "markup", "headers", "addresses")
_SECRET = "a secret beside the page"
_TIMES = 40


@contextmanager
def _page(folder: Path, access: Access) -> Iterator[int]:
    """Serve the page of a run, in a thread."""
    ended = threading.Event()

    async def until() -> None:
        while not ended.is_set():
            await asyncio.sleep(0.02)

    with bind(access.host, 0) as listening:
        arguments = (listening, Watched(folder / "run", False), access, until)
        thread = threading.Thread(target=serve, args=arguments)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            thread.join(30)


@contextmanager
def _metrics(host: str, certificates: Path | None) -> Iterator[int]:
    port = free_port()
    details = {"devices_online": 3}
    with StatusPort(
        f"{host}:{port}", lambda _: b"figures", lambda: (True, details), certificates
    ) as made:
        made.command = lambda line: b"done"
        yield port


def _ask(
    port: int,
    request: bytes,
    trust: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> tuple[int, bytes]:
    """Send raw bytes; return the status (0 if the connection is closed) and the rest."""
    try:
        with socket.create_connection((host, port), timeout=20) as plain:
            talk = plain if trust is None else trust.wrap_socket(plain, server_hostname="localhost")
            talk.sendall(request)
            said = b""
            while (part := talk.recv(1 << 16)) and len(said) < 1 << 20:
                said += part
                if b"text/event-stream" in said:
                    break
    except OSError:
        return 0, b""
    return (int(said.split(b" ", 2)[1]), said) if said.startswith(b"HTTP/1.1 ") else (0, said)


def _get(path: str, host: str = "localhost", **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n"
    return head.encode("utf-8", "surrogateescape")


def _fleet(folder: Path) -> tuple[ssl.SSLContext, str]:
    """Make certificates and a token; return a browser's trusted certificates, and the token."""
    make_certificates(folder / "certs", ["localhost"], [])
    make_token(folder / "certs")
    trust = ssl.create_default_context(cafile=str(folder / "certs" / "ca.crt"))
    return trust, access_to(folder / "certs", "0.0.0.0").token


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Play a case of a subject."""
    with RunStore(folder / "run") as store:
        store.observe(ClientJoined(0.0, "kitchen", 0, 12, None))
    (folder / "secret.js").write_text(_SECRET)
    globals()[f"_{subject}"](rng, folder)


def _word(rng: random.Random, letters: str = "abcdefghij0123456789-") -> str:
    return "".join(rng.choices(letters, k=rng.randint(1, 20)))


def _rebinding(rng: random.Random, folder: Path) -> None:
    trust, token = _fleet(folder)
    bearer = {"Authorization": f"Bearer {token}"}
    names = [f"{_word(rng)}.{_word(rng)}" for _ in range(_TIMES)]
    names += [f"localhost.{_word(rng)}.example", f"127.0.0.1.{_word(rng)}.example", "", "."]
    with (
        _page(folder, Access("127.0.0.1")) as page,
        _metrics("127.0.0.1", None) as local,
        _metrics("0.0.0.0", folder / "certs") as remote,
        _metrics("0.0.0.0", None) as plain,
    ):
        for name in names:
            # A numeric address cannot be rebound to another host by DNS.
            if name.replace(".", "").isdigit():
                continue
            host = name + rng.choice(("", ":80", f":{page}"))
            for path in ("/", "/events", "/assets/main.js"):
                assert _ask(page, _get(path, host))[0] == 400, host
            for path in ("/metrics", "/healthz"):
                assert _ask(local, _get(path, host))[0] == 400, host
                assert _ask(plain, _get(path, host))[0] == 400, host
        assert _ask(remote, _get("/metrics", "evil.example", **bearer), trust)[0] == 400
        assert _ask(remote, _get("/metrics", "localhost", **bearer), trust)[0] == 200


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _tokens(rng: random.Random, folder: Path) -> None:
    trust, token = _fleet(folder)
    heard, root = _Heard(), logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("raceme", "raceme.serve", "uvicorn", "asyncio"))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(heard)
        logger.setLevel(logging.DEBUG)
    view = token
    access = access_to(folder / "certs", "0.0.0.0")
    guesses = [
        "",
        view[:-1],
        f"{view} x",
        view.swapcase(),
        quote(view) + "%00",
        "é" * 32,
        "x" * 5000,
    ]
    place = rng.randrange(len(view))
    guesses += [view[:place] + "~" + view[place + 1 :], new_token(), f"{view},{view}x"]
    try:
        with _page(folder, access) as page, _metrics("0.0.0.0", folder / "certs") as metrics:
            for guess in guesses:
                for head in (
                    {"Authorization": f"Bearer {guess}"},
                    {"Cookie": f"raceme-token={guess}"},
                ):
                    assert _ask(page, _get("/events", **head), trust)[0] in (400, 403), guess
                    assert _ask(metrics, _get("/metrics", **head), trust)[0] in (400, 401), guess
                for path in (
                    f"/?token={quote(view)}",
                    f"/metrics?token={quote(view)}",
                    "/#" + view,
                ):
                    assert _ask(page, _get(path), trust)[0] in (400, 403)
                    assert _ask(metrics, _get(path), trust)[0] in (400, 401)
                body = f"token={quote(guess)}".encode()
                post = b"POST /login HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                post += b"Content-Length: %d\r\n\r\n" % len(body) + body
                assert _ask(page, post, trust)[0] in (400, 403), guess
            assert _ask(page, _get("/", Authorization=f"Bearer {view}"), trust)[0] == 200
            assert _ask(metrics, _get("/metrics", Authorization=f"Bearer {view}"), trust)[0] == 200
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(heard)
            logger.setLevel(level)
    said = "\n".join(heard.lines)
    assert token not in said, said


def _paths(rng: random.Random, folder: Path) -> None:
    up = ("../", "..%2f", "%2e%2e/", "..%5c", "..\\", "....//", "%252e%252e%252f", "/", "%00")
    targets = ("secret.js", "etc/passwd", "server.py", "run/run.sqlite", "index.html")
    with _page(folder, Access("127.0.0.1")) as page, _metrics("127.0.0.1", None) as metrics:
        for _ in range(_TIMES):
            way = "".join(rng.choices(up, k=rng.randint(1, 8))) + rng.choice(targets)
            start = rng.choice(
                ("/assets/", "/assets", "/", "/events/", "/login/", "//", "/assets/vendor/")
            )
            for port in (page, metrics):
                status, said = _ask(port, _get(start + way))
                assert status in (0, 400, 404), (start + way, said[:300])
                assert _SECRET.encode() not in said
                assert b"root:" not in said
            run = quote(way, safe="%")
            assert _ask(page, _get(f"/events?run={run}"))[0] in (400, 404), run


def _markup(rng: random.Random, folder: Path) -> None:
    """Names of devices and datasets with markup, which every page must escape."""
    parts = ("<script>alert(1)</script>", "</script><b>", "<img src=x onerror=alert(1)>", "<!--")
    parts += ("'\"><svg onload=x>", "\u2028", "&lt;", "]]>", "</style>", "<a href='javascript:x'>")
    hostile = "".join(rng.choices(parts, k=3))[:120]
    run = folder / "run"
    with RunStore(run, after=1) as store:
        store.observe(ClientJoined(0.0, hostile, 0, 12, None, labels=f"room={hostile}"))
        store.observe(UpdateRejected(1.0, hostile, hostile, 0.0))
    (run / "config.toml").write_text(f"strategy = 'fedasync'\ndataset = {json.dumps(hostile)}\n")
    frozen = frozen_run(run)
    assert frozen is not None
    assert "<" not in frozen.data
    assert hostile in [name for piece in json.loads(frozen.data) for name in _names(piece)]
    with _page(folder, Access("127.0.0.1")) as page:
        status, said = _ask(page, _get("/"))
        assert status == 200
        assert hostile.encode() not in said
        status, said = _ask(page, _get("/events"))
        assert status == 200
        assert b"content-type: text/event-stream" in said.lower()
        assert b"x-content-type-options: nosniff" in said.lower()


def _names(piece: dict[str, dict[str, list[str]]]) -> list[str]:
    return piece.get("clients", {}).get("name", [])


def _headers(rng: random.Random, folder: Path) -> None:
    """Ten megabytes of headers, in one line or in many."""
    line = b"X-%d: " % rng.randrange(1000) + b"x" * rng.choice((10, 1000, 60_000)) + b"\r\n"
    many = line * ((10 << 20) // len(line))
    one = b"Cookie: " + b"raceme-token=x; " * ((10 << 20) // 16)
    with _page(folder, Access("127.0.0.1")) as page, _metrics("127.0.0.1", None) as metrics:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for port, path in ((page, "/"), (metrics, "/metrics")):
            for head in (many, one, b"A" * (10 << 20)):
                request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + head
                assert _ask(port, request)[0] in (0, 400, 431)
            assert _ask(port, _get(path))[0] == 200
        # The client runs in this process too, which holds up to three copies of the request.
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 60_000, f"{grown} KiB"


def _addresses(rng: random.Random, folder: Path) -> None:
    """The port as seen from another machine."""
    trust, token = _fleet(folder)
    other = f"127.{rng.randrange(1, 255)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"
    paths = ("/metrics", "/healthz", "/")
    with _page(folder, Access("127.0.0.1")) as page, _metrics("127.0.0.1", None) as local:
        for path in paths:
            assert _ask(local, _get(path), host=other)[0] == 0
            assert _ask(page, _get(path), host=other)[0] == 0
    with _metrics("0.0.0.0", folder / "certs") as remote:
        for path in paths:
            status, said = _ask(remote, _get(path, other), trust, other)
            assert status == (200 if path == "/healthz" else 401), (path, said[:200])
            assert b"devices_online" not in said
            assert b"figures" not in said
            assert _ask(remote, _get(path, other), host=other)[0] == 0
        bearer = {"Authorization": f"Bearer {token}"}
        assert _ask(remote, _get("/metrics", other, **bearer), trust, other)[0] == 200
