"""The dashboard as a process: at an address, until it is told to end."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import URL, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raceme.core.errors import UserError, plural
from raceme.flower.ports import (
    Access,
    Listener,
    bearer,
    http_server,
    is_loopback,
    listen,
    new_token,
    read_body,
)
from raceme.records.folder import read_note, remove_run, saved_in, write_note
from raceme.reporting.dashboard import ASSETS, live_page, read_asset
from raceme.reporting.dashboard.source import FolderSource, Watched

# -----------------------------------------------------------------------------
# Access: browsers on this machine or with a token, but not pages of other sites.
# -----------------------------------------------------------------------------


COOKIE = "raceme-token"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


_LOGIN_SCRIPT = "login.js"
_LONGEST_LOGIN = 4096


class AccessMiddleware:
    """Refuses requests without access, and sets strict security headers.

    Parameters
    ----------
    app : ASGIApp
        Application that answers admitted requests.
    access : Access
        Names and the token that requests must have. The token comes in a header, as from monitors,
        or in a form, and is a cookie afterwards; it is never part of an address, as addresses are
        logged.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or refuse it if it names another host or no token."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = await self._answer(Request(scope, receive))
        await answer(scope, receive, send_strict)

    async def _answer(self, request: Request) -> ASGIApp:
        headers, path = request.headers, request.url.path
        if not self._access.accepts_host(headers.get("host", "")):
            return PlainTextResponse("This address is not the dashboard's.\n", 400)
        if not self._access.token:
            return self._app
        if (path, request.method) == ("/login", "POST"):
            return await self._login(request)
        given = _cookie(headers.get("cookie", "")), bearer(headers.get("authorization", ""))
        if self._access.has_token(given) or path == f"/assets/{_LOGIN_SCRIPT}":
            return self._app
        if path == "/":
            return _login_page("This page needs its token.")
        return PlainTextResponse("This needs the token of the page.\n", 403)

    async def _login(self, request: Request) -> Response:
        body = await read_body(request.stream(), _LONGEST_LOGIN)
        if body is None:
            return PlainTextResponse("This is no token.\n", 400)
        (token, *_) = parse_qs(body.decode("utf-8", "replace")).get("token", [""])
        if not self._access.has_token([token]):
            return _login_page("This is not the token of the page.")
        answer = RedirectResponse("/", 303)
        secure = self._access.is_secure
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
        return answer


def _login_page(reason: str) -> Response:
    """Return a form for the token, which a script fills in if the address has it behind a #."""
    text = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Raceme</title>"
        "<meta name='viewport' content='width=device-width'>"
        f"<form method='post' action='/login'><p>{reason}</p>"
        # Password managers of browsers need a user name.
        "<input name='name' value='raceme' autocomplete='username' hidden>"
        "<label>Token <input name='token' type='password' autocomplete='current-password'>"
        "</label> <button>Open</button></form>"
        f"<script src='/assets/{_LOGIN_SCRIPT}'></script></html>\n"
    )
    policy = _HEADERS["content-security-policy"].replace("form-action 'none'", "form-action 'self'")
    return Response(text, 403, {"content-security-policy": policy}, "text/html")


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


# -----------------------------------------------------------------------------
# The dashboard's server: one page, its files, and the run as server-sent events.
# -----------------------------------------------------------------------------


_POLL_SECONDS = 0.25
_BREATH_SECONDS = 15.0
"""Interval of comments in a stream without news; proxies and browsers drop silent streams."""
_RETRY_MILLISECONDS = 1000
_LONGEST_ID = 40


class Feed:
    """Reads a source while browsers show it, and notifies all of them.

    Parameters
    ----------
    source : Source
        The source, read in a thread, since reading waits for the disk.
    """

    def __init__(self, source: FolderSource) -> None:
        self.source = source
        self._viewers = 0
        self._reader: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._news = asyncio.Event()

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Read the source regularly within the context."""
        self._viewers += 1
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            yield
        finally:
            self._viewers -= 1

    async def news(self) -> None:
        """Wait for the next reading of the source."""
        await self._news.wait()

    async def read(self) -> bool:
        """Read the source once, and wake all waiting streams; return whether there is more."""
        async with self._reading:
            more = await asyncio.to_thread(self.source.poll)
        self._news.set()
        self._news = asyncio.Event()
        return more

    async def _read(self) -> None:
        while self._viewers:
            more = await self.read()
            await asyncio.sleep(0 if more else _POLL_SECONDS)


class Dashboard:
    """The application.

    Parameters
    ----------
    watched : Watched
        The folder that the page shows.
    access : Access
        Names and the token that requests must have.
    edits : str
        Secret of the address that permits writing notes and deleting runs; empty for a read-only
        page. Without a token, other users of this machine may see the page.
    """

    def __init__(self, watched: Watched, access: Access, edits: str = "") -> None:
        self._watched, self._access, self._edits = watched, access, edits
        self._feeds: dict[str, Feed] = {}
        self._closing = False
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/events", self._events),
                Route("/assets/{name:path}", self._asset),
                *(Route(f"/{name}", self._edit, methods=["POST"]) for name in _EDITS),
            ],
            middleware=[Middleware(AccessMiddleware, access=access)],
        )

    async def close(self) -> None:
        """Send all browsers the remaining news, and the end of the stream."""
        for feed in self._feeds.values():
            while await feed.read():
                pass
        self._closing = True
        for feed in self._feeds.values():
            await feed.read()

    async def _page(self, request: Request) -> Response:
        return Response(live_page(), media_type="text/html")

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("There is no such file.\n", 404)
        return Response(read_asset(name), media_type=ASSETS[name])

    async def _edit(self, request: Request) -> Response:
        """Write a run's note, list the files of a run, or delete it."""
        name = request.query_params.get("run", "")
        folder, edit = self._watched.run(name), request.url.path.strip("/")
        if not self._may_edit(request):
            return PlainTextResponse("Open the address that `raceme watch` printed.\n", 403)
        if folder is None:
            return PlainTextResponse("There is no such run.\n", 404)
        if edit == "delete" and "/" in name:
            said = "The run is part of a comparison: delete the comparison's folder instead.\n"
            return PlainTextResponse(said, 409)
        body = await read_body(request.stream(), _LONGEST_EDIT)
        if body is None:
            return PlainTextResponse("This is too long for a note.\n", 400)
        text = body.decode("utf-8", "replace")
        try:
            said = await asyncio.to_thread(_EDITS[edit], folder, text)
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 409)
        return PlainTextResponse(said)

    def _may_edit(self, request: Request) -> bool:
        """Return whether a request comes from a page that was opened at the printed address.

        Pages of other sites may send requests, too, but browsers state their origin, and they do
        not know the secret.
        """
        scheme = "https" if self._access.is_secure else "http"
        own = f"{scheme}://{request.headers.get('host', '')}"
        given = request.headers.get("raceme-edits", "").encode()
        is_known = secrets.compare_digest(given, self._edits.encode())
        return bool(self._edits) and is_known and request.headers.get("origin") == own

    async def _events(self, request: Request) -> Response:
        name = request.query_params.get("run", "")
        feed = self._feed(name)
        if feed is None:
            return PlainTextResponse("There is no such run.\n", 404)
        generation, sent = _seen(request.headers.get("last-event-id", ""))
        return StreamingResponse(
            self._stream(feed, generation, sent), media_type="text/event-stream"
        )

    def _feed(self, name: str) -> Feed | None:
        if name not in self._feeds:
            source = self._watched.source(name)
            if source is None:
                return None
            self._feeds[name] = Feed(source)
        return self._feeds[name]

    async def _stream(self, feed: Feed, generation: int, sent: int) -> AsyncIterator[str]:
        """Yield a source's pieces from a given one on, and new ones as they arrive.

        A browser that does not read delays only its own stream.
        """
        source, trouble, silent = feed.source, "", 0.0
        yield f"retry: {_RETRY_MILLISECONDS}\n\n"
        with feed.viewer():
            while True:
                closing = self._closing
                if generation != source.generation:
                    generation, sent = source.generation, 0
                    yield _event("restart", "{}", generation, sent)
                while sent < len(source.pieces) and generation == source.generation:
                    sent += 1
                    silent = 0.0
                    yield _event("piece", source.pieces[sent - 1], generation, sent)
                if source.trouble != trouble:
                    trouble = source.trouble
                    yield _event("trouble", json.dumps({"text": trouble}), generation, sent)
                if closing:
                    break
                try:
                    await asyncio.wait_for(feed.news(), _BREATH_SECONDS)
                    silent += _POLL_SECONDS
                except TimeoutError:
                    silent = _BREATH_SECONDS
                if silent >= _BREATH_SECONDS:
                    silent = 0.0
                    yield ": \n\n"
            yield _event("closed", "{}", generation, sent)


_LONGEST_EDIT = 4096


def _note(folder: Path, text: str) -> str:
    write_note(folder, text)
    return read_note(folder)


def _contents(folder: Path, text: str) -> str:
    """Return the files of a run as lines; the first line is its folder and size."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.lstat().st_size for path in files)
    said = f"{folder.absolute()} ({plural(len(files), 'file')}, {size / 1e6:,.1f} MB)"
    return "\n".join([said, *saved_in(folder)])


def _delete(folder: Path, text: str) -> str:
    remove_run(folder)
    return ""


_EDITS: Mapping[str, Callable[[Path, str], str]] = {
    "note": _note,
    "contents": _contents,
    "delete": _delete,
}
"""Requests of an editing page: changes, and the list of files that it shows before a deletion."""


def _seen(text: str) -> tuple[int, int]:
    """Return the generation and the number of pieces that a browser has received."""
    # Python refuses to read numbers with thousands of digits.
    generation, _, sent = text[:_LONGEST_ID].partition("-")
    if generation.isdecimal() and sent.isdecimal():
        return int(generation), int(sent)
    return 0, 0


def _event(name: str, data: str, generation: int, sent: int) -> str:
    return f"event: {name}\nid: {generation}-{sent}\ndata: {data}\n\n"


# -----------------------------------------------------------------------------
# The dashboard as a process: at an address, until it is told to end.
# -----------------------------------------------------------------------------


_GRACE_SECONDS = 2
"""Time that browsers have to receive the end of a run."""


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a listening socket, so that a browser that connects early is not refused.

    Parameters
    ----------
    host : str
        Name or address; only this machine reaches 127.0.0.1.
    port : int
        Port number; 0 for any free port.
    option : str
        The option that chooses another port, for error messages.

    Raises
    ------
    UserError
        The port is taken, or the address is none of this machine's.
    """
    try:
        return listen(host, port)
    except socket.gaierror:
        raise UserError(f"'{host}' is no address of this machine.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Cannot listen on {host}:{port}: the port is in use. Choose another with {option} "
                "(port 0: any that is free)."
            ) from None
        raise UserError(f"Cannot listen on {host}:{port}: {error.strerror}.") from None


def address_of(listening: socket.socket, access: Access, edits: str = "") -> str:
    """Return the address of the page for the user.

    The token, or the secret of an editing page, follows a ``#``: browsers do not send this part to
    a server, so that it is not logged.
    """
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = next((name for name in access.names if "*" not in name), _own_address())
    shown = f"[{host}]" if ":" in host else host
    address = f"{'https' if access.is_secure else 'http'}://{shown}:{port}/"
    if access.token:
        return f"{address}#token={access.token}"
    return address + (f"#edit={edits}" if edits else "")


def _own_address() -> str:
    """Return the address of this machine in the local network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only picks the interface (192.0.2.1 is for documentation).
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def qr_code(address: str) -> str:
    """Return the address as a QR code of block characters, for the camera of a phone.

    Empty if other machines cannot reach it, or if segno (extra ``server``) is not installed.
    """
    if is_loopback(URL(address).hostname or ""):
        return ""
    try:
        import segno
    except ImportError:
        return ""
    text = io.StringIO()
    segno.make(address, error="l").terminal(text, border=2, compact=True)
    return text.getvalue()


def serve(
    listening: socket.socket,
    watched: Watched,
    access: Access,
    until: Callable[[], Coroutine[Any, Any, None]],
    edits: str = "",
) -> None:
    """Serve the page.

    Parameters
    ----------
    listening : socket
        Listening socket, as :func:`bind` returns it.
    watched : Watched
        The run or comparison that the page shows.
    access : Access
        Names and the token that requests must have, and the certificate for HTTPS.
    until : Callable
        Returns when the server should end.
    edits : str
        Secret with which the page writes notes and deletes runs.
    """
    dashboard = Dashboard(watched, access, edits)
    asyncio.run(_serve(dashboard, listening, access.tls(), until))


async def _serve(
    dashboard: Dashboard,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    until: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    server = http_server(
        dashboard.app,
        tls,
        log_level="critical",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    serving = asyncio.create_task(server.serve([listening]))
    ending = asyncio.create_task(until())
    try:
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        await dashboard.close()
        server.should_exit = True
        await serving


# -----------------------------------------------------------------------------
# The dashboard of a new run: a process of its own, which ends with the run.
#
# Browsers thus cannot delay the run, which writes its store as always, whether or not it is read.
# -----------------------------------------------------------------------------


_NICE = 10
"""Niceness of the process: the run's computation has priority."""
_END_SECONDS = 60.0
"""Time limit for the dashboard's end, which may be slow on a busy machine."""


@dataclass(frozen=True)
class DashboardProcess:
    """A dashboard in a process of its own.

    Attributes
    ----------
    address : str
        URL of the page, with the token where one is needed.
    process : Popen
        The child process that serves the page.
    """

    address: str
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Wait until the process ends; it does not end by itself, but Ctrl-C ends the wait."""
        self.process.wait()


@contextmanager
def watching(
    folder: Path,
    host: str,
    port: int,
    *,
    comparison: bool = False,
    access: Access | None = None,
) -> Iterator[DashboardProcess]:
    """Serve the dashboard of a folder within the context.

    Parameters
    ----------
    folder : Path
        Folder of a run or a comparison; it need not exist yet.
    host, port : str, int
        Address of the page; see :func:`raceme.reporting.dashboard.server.bind`.
    comparison : bool
        Whether it is a comparison.
    access : Access, optional
        Names and the token that requests must have; by default a new token, unless only this
        machine reaches the page.

    Raises
    ------
    UserError
        The port is taken, or the address is none of this machine's.
    """
    if access is None:
        access = Access(host, "" if is_loopback(host) else new_token())
    with bind(host, port, "--watch-address") as listening:
        address = address_of(listening, access)
        process = _start(listening, folder, access, comparison)
    try:
        yield DashboardProcess(address, process)
    finally:
        _end(process)


def _start(
    listening: socket.socket, folder: Path, access: Access, comparison: bool
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "raceme.reporting.dashboard.server"],
        stdin=subprocess.PIPE,
        pass_fds=[listening.fileno()],
    )
    told = {
        "socket": listening.fileno(),
        "folder": str(folder.absolute()),
        # Not passed as arguments, which every user of the machine can see.
        "access": asdict(access),
        "comparison": comparison,
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(told).encode() + b"\n")
    process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the process send the end of the run, and end."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Serve the folder in the first line of standard input, until the input ends."""
    # Ctrl-C reaches all processes of a terminal; the run ends this one when it has ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICE)
    # Unbuffered, so that no byte after the line is read early.
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        raise SystemExit
    told = json.loads(line)
    listening = Listener(fileno=told["socket"])
    watched = Watched(Path(told["folder"]), told["comparison"])
    with listening:
        serve(listening, watched, Access(**told["access"]), _until_the_end)


async def _until_the_end() -> None:
    """Wait until the parent process closes the pipe, or is gone."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


if __name__ == "__main__":
    main()
