"""The calls that Raceme's devices make at Raceme's server, beside those of Flower's Fleet API.

A device greets the server before it goes online; a server of Flower's own does not know the call,
and both then keep to Flower's. `Next` asks for a message, waits for it at the server, and brings it
whole; `Send` takes a whole reply: two calls for an update. Like all calls they are signed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

SERVICE = "raceme.Fleet"
GREET, NEXT, SEND = "Greet", "Next", "Send"
PROTOCOL = 1
"""Raised when calls, or what travels in them, change."""
LONGEST_WAIT = 15.0
"""Seconds that `Next` may take to be answered; routers drop connections on which nothing happens
for longer than about a minute."""
LARGEST = 1024 * 1024
"""Bytes of the arrays of a message that travels whole; a larger one does in Flower's objects, each
of which can be sent again. One call has to get through a slow link."""

_NEXT, _SEND = struct.Struct(">Qd64s"), struct.Struct(">Q64s")


@dataclass(frozen=True)
class Greeting:
    """Who greets, or answers a greeting.

    Attributes
    ----------
    protocol : int
        Version of these calls.
    version : str
        Version of Raceme.
    """

    protocol: int
    version: str

    def to_bytes(self) -> bytes:
        """Return it as it travels."""
        return json.dumps({"protocol": self.protocol, "version": self.version}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Greeting:
        """Read it; what else later versions say is left out.

        Raises
        ------
        ValueError
            It is none.
        """
        read = json.loads(data) if len(data) < 10_000 else None
        if not isinstance(read, dict):
            raise ValueError("no greeting")
        protocol, version = read.get("protocol"), read.get("version")
        if type(protocol) is not int or not isinstance(version, str):
            raise ValueError("no greeting")
        return cls(protocol, version)


@dataclass(frozen=True)
class NextRequest:
    """A node asks for its next message.

    Attributes
    ----------
    node : int
        Who asks.
    patience : float
        Seconds that the answer may take.
    have : str
        Id of the last message that has arrived there; empty if there was none.
    """

    node: int
    patience: float = 0.0
    have: str = ""

    def to_bytes(self) -> bytes:
        """Return it as it travels."""
        return _NEXT.pack(self.node, self.patience, self.have.encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> NextRequest:
        """Read it.

        Raises
        ------
        ValueError
            It is none.
        """
        node, patience, have = _unpacked(_NEXT, data)
        return cls(node, patience, have.rstrip(b"\0").decode("ascii"))


@dataclass(frozen=True)
class SendRequest:
    """A node answers a message.

    Attributes
    ----------
    node : int
        Who answers.
    asked : str
        Id of the message.
    body : bytes
        The whole reply.
    """

    node: int
    asked: str
    body: bytes

    def to_bytes(self) -> bytes:
        """Return it as it travels."""
        return _SEND.pack(self.node, self.asked.encode()) + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> SendRequest:
        """Read it.

        Raises
        ------
        ValueError
            It is none.
        """
        node, asked = _unpacked(_SEND, data[: _SEND.size])
        return cls(node, asked.rstrip(b"\0").decode("ascii"), data[_SEND.size :])


def _unpacked(form: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) != form.size:
        raise ValueError(f"{len(data)} bytes instead of {form.size}")
    return form.unpack(data)
