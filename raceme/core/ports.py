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

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 64
"""Connections of an HTTP port at the same time; others are closed at once."""
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


class HttpConnection(H11Protocol):
    """A connection of a uvicorn server that is closed if it is one too many, or makes no progress.

    uvicorn itself waits without end for the head of a request, and for a browser that does not
    read.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection, or close it."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
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
        The header.
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
