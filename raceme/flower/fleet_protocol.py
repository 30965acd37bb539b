"""Flower's Fleet API as both sides speak it: its calls, over gRPC and HTTP, and their signatures.

The messages are Flower's protocol buffers, which have been the same since 1.39. Up to 1.42 a
SuperLink can serve them over gRPC, from 1.40 on it serves them over HTTP, at ``/v1/fleet/…``.
"""

from __future__ import annotations

import binascii
import logging
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
    sign_message,
    verify_signature,
)
from google.protobuf.message import Message

from raceme import __version__

log = logging.getLogger("raceme.serve")

SERVICE = "flwr.proto.Fleet"
MEDIA_TYPE = "application/protobuf"
SUPPORTED = ((1, 39), (1, 42))
"""The oldest and the newest release of Flower whose SuperNodes and SuperLinks are known to work."""

_PUBLIC_KEY, _SIGNATURE, _TIMESTAMP = "flwr-public-key", "flwr-signature", "flwr-timestamp"
_BINARY = "-bin"
"""Ending of the names of binary metadata in gRPC; HTTP headers have base64 instead."""
_VERSION = "flwr-package-version"
_SESSION = "raceme-session"
_REUSED_SECONDS = 20.0
_PROVEN_SECONDS = 60.0
_MOST_PROVEN = 10_000
_TOLD_SECONDS = 60.0
_TEXT = 40


@dataclass(frozen=True)
class Call:
    """A call of the Fleet API.

    Attributes
    ----------
    request, response : type
        Protobuf classes of the request and of the response.
    """

    request: type[Message]
    response: type[Message]


CALLS: Mapping[str, Call] = {
    "RegisterNode": Call(fleet_pb2.RegisterNodeFleetRequest, fleet_pb2.RegisterNodeFleetResponse),
    "ActivateNode": Call(fleet_pb2.ActivateNodeRequest, fleet_pb2.ActivateNodeResponse),
    "DeactivateNode": Call(fleet_pb2.DeactivateNodeRequest, fleet_pb2.DeactivateNodeResponse),
    "UnregisterNode": Call(
        fleet_pb2.UnregisterNodeFleetRequest, fleet_pb2.UnregisterNodeFleetResponse
    ),
    "SendNodeHeartbeat": Call(
        heartbeat_pb2.SendNodeHeartbeatRequest, heartbeat_pb2.SendNodeHeartbeatResponse
    ),
    "PullMessages": Call(fleet_pb2.PullMessagesRequest, fleet_pb2.PullMessagesResponse),
    "PushMessages": Call(fleet_pb2.PushMessagesRequest, fleet_pb2.PushMessagesResponse),
    "GetRun": Call(run_pb2.GetRunRequest, run_pb2.GetRunResponse),
    "GetFab": Call(fab_pb2.GetFabRequest, fab_pb2.GetFabResponse),
    "PushObject": Call(message_pb2.PushObjectRequest, message_pb2.PushObjectResponse),
    "PullObject": Call(message_pb2.PullObjectRequest, message_pb2.PullObjectResponse),
    "ConfirmMessageReceived": Call(
        message_pb2.ConfirmMessageReceivedRequest, message_pb2.ConfirmMessageReceivedResponse
    ),
}


def path_of(name: str) -> str:
    """Return the path of a call over HTTP, e.g. ``/v1/fleet/pull-messages``."""
    return "/v1/fleet/" + re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class FleetError(Exception):
    """A call is refused.

    Parameters
    ----------
    code : grpc.StatusCode
        Status code, as gRPC defines it.
    details : str
        Reason in words, which the caller gets.
    number : int, optional
        Flower's number of the error, which its SuperNodes show.
    """

    def __init__(self, code: grpc.StatusCode, details: str, number: int | None = None) -> None:
        super().__init__(details)
        self.code, self.details, self.number = code, details, number


@dataclass(frozen=True)
class Caller:
    """The process that has made a call.

    Attributes
    ----------
    key : bytes
        Public key (PEM) that has signed it.
    session : str
        Version of one of Raceme's devices, and random name of its connection: ``0.2.0/5f0c…``;
        empty of Flower's SuperNodes.
    """

    key: bytes
    session: str = ""


class Signer:
    """Signs the calls of one node, each signature for a while, and names the connection.

    Parameters
    ----------
    private_key : EllipticCurvePrivateKey
        Private key of the node, with which calls are signed.
    public_key : EllipticCurvePublicKey
        The other half of it.
    """

    def __init__(
        self, private_key: ec.EllipticCurvePrivateKey, public_key: ec.EllipticCurvePublicKey
    ) -> None:
        self._private = private_key
        self.public_bytes = public_key_to_bytes(public_key)
        # One value: heartbeats are signed in another thread.
        self._signed = (float("-inf"), "", b"")
        self._session = f"{__version__[:20]}/{secrets.token_hex(8)}"

    def metadata(self) -> list[tuple[str, str | bytes]]:
        """Return the signature as metadata of a call over gRPC."""
        timestamp, signature = self._current()
        return [
            (_PUBLIC_KEY + _BINARY, self.public_bytes),
            (_TIMESTAMP, timestamp),
            (_SIGNATURE + _BINARY, signature),
            (_SESSION, self._session),
            *_versions().items(),
        ]

    def headers(self) -> dict[str, str]:
        """Return the signature as headers of a call over HTTP."""
        timestamp, signature = self._current()
        return {
            _PUBLIC_KEY: b64encode(self.public_bytes).decode(),
            _TIMESTAMP: timestamp,
            _SIGNATURE: b64encode(signature).decode(),
            _SESSION: self._session,
            **_versions(),
        }

    def _current(self) -> tuple[str, bytes]:
        """Return a timestamp and its signature, new ones if the last are old."""
        signed_at, timestamp, signature = self._signed
        now = time.monotonic()
        if now >= signed_at + _REUSED_SECONDS:
            timestamp = datetime.now(UTC).isoformat()
            signature = sign_message(self._private, timestamp.encode())
            self._signed = (now, timestamp, signature)
        return timestamp, signature


@cache
def _versions() -> dict[str, str]:
    # To look into the installed metadata takes longer than a call.
    return {
        "flwr-package-name": "flwr",
        _VERSION: version("flwr"),
        "flwr-component-name": "SuperNode",
    }


class Signatures:
    """The check of signatures; what was checked counts for a while."""

    def __init__(self) -> None:
        self._proven: dict[bytes, tuple[str, bytes, float]] = {}
        self._told_at = float("-inf")

    def caller(self, metadata: Mapping[str, Any]) -> Caller:
        """Return the process that has made and signed a call.

        Parameters
        ----------
        metadata : Mapping[str, str or bytes]
            Metadata of a call over gRPC, or headers of one over HTTP, by names in lower case.

        Raises
        ------
        FleetError
            No valid signature, a clock that differs, or a release of Flower that is not supported.
        """
        key, signature = _bytes_of(metadata, _PUBLIC_KEY), _bytes_of(metadata, _SIGNATURE)
        timestamp = metadata.get(_TIMESTAMP)
        caller = Caller(key, str(metadata.get(_SESSION, ""))[:_TEXT])
        *proven, since = self._proven.get(key, ("", b"", float("-inf")))
        if proven == [timestamp, signature] and time.monotonic() < since + _PROVEN_SECONDS:
            return caller
        try:
            _check_version(metadata.get(_VERSION))
            if not key or not signature or not isinstance(timestamp, str):
                raise _unauthenticated("Missing authentication metadata")
            _verify(key, timestamp, signature)
        except FleetError as error:
            self.tell(error)
            raise
        return caller

    def tell(self, error: FleetError) -> None:
        """Log what only the node's owner can mend: SuperNodes over HTTP print just the status."""
        # Any stranger can have itself refused.
        is_due = time.monotonic() > self._told_at + _TOLD_SECONDS
        if error.code is grpc.StatusCode.FAILED_PRECONDITION and is_due:
            self._told_at = time.monotonic()
            log.warning("A node is refused: %s", error.details)

    def remember(self, key: bytes, metadata: Mapping[str, Any]) -> None:
        """Let the signature of a known key count for a while without being computed again."""
        signature = _bytes_of(metadata, _SIGNATURE)
        if key not in self._proven or self._proven[key][1] != signature:
            # Nodes that register themselves have a new key each time.
            if len(self._proven) >= _MOST_PROVEN:
                self._proven.clear()
            self._proven[key] = (metadata[_TIMESTAMP], signature, time.monotonic())


def _bytes_of(metadata: Mapping[str, Any], name: str) -> bytes:
    """Return a value that gRPC carries as bytes and HTTP in base64; nothing if there is none."""
    if name + _BINARY in metadata:
        return bytes(metadata[name + _BINARY])
    try:
        return b64decode(metadata.get(name, ""), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _verify(key: bytes, timestamp: str, signature: bytes) -> None:
    try:
        if not verify_signature(bytes_to_public_key(key), timestamp.encode("ascii"), signature):
            raise ValueError
        age = (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()
    # Keys of another kind have no such signatures.
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        raise _unauthenticated("Invalid signature") from None
    # A signature is of the time alone, so that it can be used again as long.
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        when = f"{abs(age):.0f} s {'ago' if age > 0 else 'ahead'}"
        # Flower's SuperLink answers UNAUTHENTICATED, at which a SuperNode ends without the reason.
        raise FleetError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"Invalid timestamp: by the server's clock the call was signed {when}, and at most "
            f"{TIMESTAMP_TOLERANCE} s are allowed. Set the device's clock",
        )


def _unauthenticated(details: str) -> FleetError:
    return FleetError(grpc.StatusCode.UNAUTHENTICATED, details)


def _check_version(stated: object) -> None:
    """Refuse a SuperNode of a release of Flower that is not supported, by what it states."""
    if stated is None:
        return
    found = re.match(r"(\d+)\.(\d+)", str(stated))
    if found and SUPPORTED[0] <= tuple(map(int, found.groups())) <= SUPPORTED[1]:
        return
    oldest, newest = (".".join(map(str, release)) for release in SUPPORTED)
    raise FleetError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"This node has Flower {str(stated)[:_TEXT]!a}; supported are {oldest} to {newest}",
    )
