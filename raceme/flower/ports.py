"""Open ports: limits of connections and times, and access control.

Each connection takes a file descriptor of the process. A port with unlimited connections could
leave none for the run's store and its checkpoints; a port that waits forever for requests would be
blocked by silent connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import resource
import secrets
import socket
import ssl
import tempfile
from asyncio import Transport
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import h11
import uvicorn
from cryptography import x509
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BROWSERS = 64
"""Maximum number of connections of a port for people and monitors."""
STALLED_SECONDS = 5.0
"""Time limit for a request to arrive, and for progress of an answer."""

_MOST_DISCARDED = 16 << 20
"""Bytes of a body that are read after the answer, so that the sender sees the answer."""
_RESERVED = 256
"""File descriptors that are reserved for files, pipes, and the HTTP ports."""
_ENOUGH = 65_536


def most_connections() -> int:
    """Return the maximum number of connections of the port for devices.

    The process gets as many descriptors as its hard limit allows, whatever a shell's soft limit
    of 1,024 says.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _RESERVED, wanted // 2)


class Listener(socket.socket):
    """A listening socket with a limit of open connections; further ones are closed at once.

    Attributes
    ----------
    limit : int
        Maximum number of connections.

    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.limit = MOST_BROWSERS
        self._open: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raise ConnectionAbortedError, as asyncio expects, for a surplus."""
        connection, address = super().accept()
        if len(self._open) >= self.limit:
            self._open = [other for other in self._open if other.fileno() >= 0]
        if len(self._open) >= self.limit:
            connection.close()
            raise ConnectionAbortedError
        self._open.append(connection)
        return connection, address


def listen(host: str, port: int, limit: int = MOST_BROWSERS) -> Listener:
    """Return a socket that listens.

    Parameters
    ----------
    host : str
        Host name, or IPv4 or IPv6 address, of this machine.
    port : int
        Port number; 0 for any free port.
    limit : int
        Connections at the same time.

    Raises
    ------
    OSError
        The port is taken, or the address is not this machine's.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, address = found[0]
    listener = Listener(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Connections before the start of the server wait instead of being refused.
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    listener.limit = limit
    return listener


class HttpConnection(H11Protocol):
    """A connection of a uvicorn server that is closed if it makes no progress.

    uvicorn itself waits forever for the head of a request, and for a browser that does not read.
    """

    stalled = STALLED_SECONDS

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to check the connection for progress."""
        super().connection_made(transport)
        self._discarded = 0
        self._close_if_stuck(None)

    def data_received(self, data: bytes) -> None:
        """Process received data; after the answer only a limited amount."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        if not is_answered or self.conn.their_state is not h11.SEND_BODY:
            self._discarded = 0
        elif (discarded := self._discarded + len(data)) <= _MOST_DISCARDED:
            self._discarded = discarded
        else:
            # uvicorn would read all of the body, of any length.
            self.transport.abort()
            return
        super().data_received(data)

    def _close_if_stuck(self, before: object) -> None:
        """Close the connection if it waits for its peer without progress since `before`."""
        if self.transport.is_closing():
            return
        waits = self.cycle is None or self.cycle.response_complete or self.flow.write_paused
        now = (self.cycle, waits, self.transport.get_write_buffer_size())
        if waits and now == before:
            self.transport.abort()
        else:
            self.loop.call_later(self.stalled, self._close_if_stuck, now)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, stalled: float) -> None:
        super().__init__(config)
        self._stalled = stalled

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn itself has no shorter limit for TLS handshakes than asyncio's minute."""
        await self.lifespan.startup()
        tls = self.config.ssl
        limit = None if tls is None else self._stalled
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._connection,
                sock=listener,
                ssl=tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=limit,
                ssl_shutdown_timeout=limit,
            )
            for listener in sockets or ()
        ]
        self.started = True

    def _connection(self) -> HttpConnection:
        made = HttpConnection(self.config, self.server_state, self.lifespan.state)
        made.stalled = self._stalled
        return made

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that started the server."""
        yield


def http_server(
    app: ASGIApp, tls: ssl.SSLContext | None, stalled: float = STALLED_SECONDS, **options: Any
) -> uvicorn.Server:
    """Return an HTTP server, HTTPS with `tls`, that does not handle signals.

    Parameters
    ----------
    app : ASGIApp
        The application.
    tls : SSLContext or None
        Certificate and key.
    stalled : float
        Time limit in seconds of a TLS handshake; connections may make no progress for up to twice
        as long.
    **options : Any
        Further options of uvicorn's.
    """
    config = uvicorn.Config(
        app, http=HttpConnection, ws="none", lifespan="off", access_log=False, **options
    )
    config.load()
    config.ssl = tls
    return _Server(config, stalled)


async def read_body(stream: AsyncIterator[bytes], most: int) -> bytes | None:
    """Return the body of a request; None if it is too long, or takes too long."""
    body = b""
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            async for chunk in stream:
                body += chunk
                if len(body) > most:
                    return None
    except TimeoutError:
        return None
    return body


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_tls(certificate: bytes, key: bytes) -> ssl.SSLContext:
    """Return the TLS of a server, given its certificate and its key (PEM)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Python reads them from files only, so they are temporary.
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


@dataclass(frozen=True)
class Access:
    """Access rules of a port for people and monitors.

    Attributes
    ----------
    host : str
        The address to listen on.
    token : str
        Token that requests need; empty if no token is needed.
    certificate, key : str
        Certificate and key of the server (PEM) for HTTPS; empty for HTTP.
    """

    host: str
    token: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def is_secure(self) -> bool:
        """Whether the port speaks HTTPS."""
        return bool(self.certificate)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names and addresses of the server in its certificate."""
        if not self.certificate:
            return ()
        loaded = x509.load_pem_x509_certificate(self.certificate.encode())
        found = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return tuple(str(name.value).lower() for name in found)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS of the port, if it speaks HTTPS."""
        if not self.certificate:
            return None
        return server_tls(self.certificate.encode(), self.key.encode())

    def accepts_host(self, header: str) -> bool:
        """Return whether a Host header names this machine.

        Another site can let its name point to this machine (DNS rebinding), so that the browser
        takes answers of this port for that site's. The Host header then has the site's name.

        Parameters
        ----------
        header : str
            Value of the Host header, with or without a port.
        """
        bracketed = header.startswith("[")
        name = header[1:].partition("]")[0] if bracketed else header.partition(":")[0]
        name = name.lower()
        if name in ("localhost", self.host.lower(), socket.gethostname().lower(), *self.names):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            # In a network of containers a service has a name without a dot, which no site has.
            return bool(name) and "." not in name and not is_loopback(self.host)
        # Addresses cannot be rebound.
        return address.is_loopback or not is_loopback(self.host)

    def has_token(self, given: Iterable[str]) -> bool:
        """Return whether one of some texts is the token."""
        # All texts are compared, as digests of equal length, so that the time reveals nothing.
        found = [secrets.compare_digest(_digest(text), _digest(self.token)) for text in given]
        return bool(self.token) and any(found)


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def bearer(header: str) -> str:
    """Return the token of an Authorization header; empty if there is none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
