"""Open ports: a limit to their connections, a time for each, and the names that they answer to.

Each connection takes a file descriptor of the process. A port that accepts any number of them
leaves none for the run's store and its checkpoints; one that waits for ever for a request is
blocked by connections that send nothing.
"""

from __future__ import annotations

import ipaddress
import resource
import socket
from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BROWSERS = 64
"""Connections at the same time of a port that people and monitors look at."""
STALLED_SECONDS = 5.0
"""Longest time for a request to come, or for an answer to make progress."""

_RESERVED = 256
"""Descriptors that are left for files, pipes, and the HTTP ports."""
_ENOUGH = 65_536


def most_connections() -> int:
    """Return how many connections the port for devices may have.

    The process gets as many descriptors as its hard limit allows, whatever a shell's soft limit
    of 1,024 says.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _RESERVED, wanted // 2)


class Listener(socket.socket):
    """A listening socket with a limit to its open connections; others are closed at once.

    Attributes
    ----------
    limit : int
        Connections at the same time.
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
        0 for any that is free.
    limit : int
        Connections at the same time.

    Raises
    ------
    OSError
        The port is taken, or the address is none of this machine's.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, address = found[0]
    listener = Listener(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # What has to wait for the server to start is not refused.
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    listener.limit = limit
    return listener


class HttpConnection(H11Protocol):
    """A connection of a uvicorn server that is closed if it makes no progress.

    uvicorn itself waits without end for the head of a request, and for a browser that does not
    read.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to look at the connection."""
        super().connection_made(transport)
        self._look(None)

    def _look(self, before: object) -> None:
        """Close the connection if it waits for its peer and nothing has changed since `before`."""
        if self.transport.is_closing():
            return
        waits = self.cycle is None or self.cycle.response_complete or self.flow.write_paused
        now = (self.cycle, waits, self.transport.get_write_buffer_size())
        if waits and now == before:
            self.transport.abort()
        else:
            self.loop.call_later(STALLED_SECONDS, self._look, now)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_this_machine(header: str, host: str) -> bool:
    """Return whether a Host header names this machine.

    A page of another site can have its name point to this machine (DNS rebinding): the browser then
    takes the answer for that site's. The Host header has that name.

    Parameters
    ----------
    header : str
        Value of the Host header, with or without a port.
    host : str
        The address that is listened at.
    """
    bracketed = header.startswith("[")
    name = header[1:].partition("]")[0] if bracketed else header.partition(":")[0]
    name = name.lower()
    if name in ("localhost", host.lower(), socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # A number cannot be made to point elsewhere.
    return address.is_loopback or not is_loopback(host)
