"""The protocol of the Fleet API, for server and device: Flower's signed calls, and Raceme's own.

The messages are Flower's protocol buffers, which have not changed since 1.39. Up to 1.42 a
SuperLink can serve them over gRPC; from 1.40 on it serves them over HTTP, at ``/v1/fleet/…``. This
module defines the constants of the protocol itself, with their names in Flower; a test compares
them with the installed release.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import logging
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Self, cast, get_type_hints

import grpc
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from google.protobuf.message import Message

from raceme import __version__
from raceme.flower import installed_flower

log = logging.getLogger("raceme.serve")

FLEET_SERVICE = "flwr.proto.Fleet"
MEDIA_TYPE = "application/protobuf"
OWN_APP = "raceme/raceme"
"""Name of the app bundle for which a device runs its own code."""

# flwr.common.constant: HEARTBEAT_*, in seconds but for the last.
HEARTBEAT_CALL_TIMEOUT = 5
HEARTBEAT_DEFAULT_INTERVAL = 30
HEARTBEAT_MIN_INTERVAL = 10
HEARTBEAT_MAX_INTERVAL = 1800
HEARTBEAT_PATIENCE = 2
"""Number of heartbeat intervals after which a silent node is offline."""

# flwr.common.constant: TIMESTAMP_TOLERANCE, SYSTEM_TIME_TOLERANCE.
_OLDEST_SECONDS = 300
_SKEW_SECONDS = 5


class ErrorNumber(IntEnum):
    """Numbers of errors of the Fleet API (`ApiErrorCode` in flwr.supercore.error)."""

    PUBLIC_KEY_ALREADY_IN_USE = 23
    FLEET_SUPERNODE_REGISTRATION_DISABLED = 2001
    FLEET_SUPERNODE_UNREGISTRATION_DISABLED = 2002
    FLEET_INVALID_HEARTBEAT_INTERVAL = 2003
    FLEET_NODE_ACTIVATION_FAILED = 2004
    FLEET_NODE_DEACTIVATION_FAILED = 2005
    FLEET_RUN_STATUS_NOT_ALLOWED = 2007
    FLEET_GET_FAB_FAILED = 2009


SUPPORTED = ((1, 39), (1, 43))
"""The oldest and the newest release of Flower whose SuperNodes and SuperLinks are known to work."""

_PUBLIC_KEY, _SIGNATURE, _TIMESTAMP = "flwr-public-key", "flwr-signature", "flwr-timestamp"
_BINARY = "-bin"
"""Ending of the names of binary metadata in gRPC; HTTP headers have base64 instead."""
_VERSION = "flwr-package-version"
_SESSION = "raceme-session"
_REUSED_SECONDS = 20.0
_PROVEN_SECONDS = 60.0
_MOST_PROVEN = 10_000
_WARNING_SECONDS = 60.0
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


@dataclass(frozen=True)
class Certificates:
    """The server's certificate and key, and the authority behind them, in PEM.

    Attributes
    ----------
    authority, certificate, key : bytes
        Certificate of the authority, and the server's certificate and private key.
    """

    authority: bytes
    certificate: bytes
    key: bytes


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


Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]

_ALGORITHM = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Caller:
    """The process that has made a call.

    Attributes
    ----------
    key : bytes
        Public key (PEM) of the call's signature.
    session : str
        Version of one of Raceme's devices, and random name of its connection: ``0.2.0/5f0c…``;
        empty for Flower's SuperNodes.
    """

    key: bytes
    session: str = ""


def generate_keys() -> Keys:
    """Make a key pair on the curve that Flower's SuperNodes use."""
    private = ec.generate_private_key(ec.SECP384R1())
    return private, private.public_key()


def public_key_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key in PEM, which identifies its node."""
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, info)


class Signer:
    """Signs the calls of one node, and names the connection. A signature is used for some time.

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
        self.public_bytes = public_key_bytes(public_key)
        # A single value, replaced atomically, since heartbeats are signed in another thread.
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
            signature = self._private.sign(timestamp.encode(), _ALGORITHM)
            self._signed = (now, timestamp, signature)
        return timestamp, signature


@cache
def _versions() -> dict[str, str]:
    # Cached, since reading the installed metadata takes longer than a call.
    package, release = installed_flower()
    return {
        "flwr-package-name": package,
        _VERSION: release,
        "flwr-component-name": "SuperNode",
    }


class Signatures:
    """Checks signatures; a checked signature stays valid for some time."""

    def __init__(self) -> None:
        self._proven: dict[bytes, tuple[str, bytes, float]] = {}
        self._warned_at = float("-inf")

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
            self.warn(error)
            raise
        return caller

    def warn(self, error: FleetError) -> None:
        """Log an error that the node's owner must fix: over HTTP, SuperNodes show just a status."""
        # Limited, as any unknown node can cause refusals.
        is_due = time.monotonic() > self._warned_at + _WARNING_SECONDS
        if error.code is grpc.StatusCode.FAILED_PRECONDITION and is_due:
            self._warned_at = time.monotonic()
            log.warning("A node is refused: %s", error.details)

    def remember(self, key: bytes, metadata: Mapping[str, Any]) -> None:
        """Accept the signature of a known key for some time without another computation."""
        signature = _bytes_of(metadata, _SIGNATURE)
        if key not in self._proven or self._proven[key][1] != signature:
            # Limited, since nodes that register themselves have a new key each time.
            if len(self._proven) >= _MOST_PROVEN:
                self._proven.clear()
            self._proven[key] = (metadata[_TIMESTAMP], signature, time.monotonic())


def _bytes_of(metadata: Mapping[str, Any], name: str) -> bytes:
    """Return a value of metadata, which HTTP encodes in base64; empty if it is missing."""
    if name + _BINARY in metadata:
        return bytes(metadata[name + _BINARY])
    try:
        return b64decode(metadata.get(name, ""), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _verify(key: bytes, timestamp: str, signature: bytes) -> None:
    try:
        public = cast(ec.EllipticCurvePublicKey, serialization.load_pem_public_key(key))
        public.verify(signature, timestamp.encode("ascii"), _ALGORITHM)
        age = (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()
    # Keys of another kind do not have this method.
    except (ValueError, TypeError, AttributeError, InvalidSignature, UnsupportedAlgorithm):
        raise _unauthenticated("Invalid signature") from None
    # Only the time is signed, so a signature could be replayed for this long.
    if not -_SKEW_SECONDS < age < _OLDEST_SECONDS + _SKEW_SECONDS:
        when = f"{abs(age):.0f} s {'ago' if age > 0 else 'ahead'}"
        # Flower's SuperLink answers UNAUTHENTICATED, at which a SuperNode ends without a reason.
        raise FleetError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"Invalid timestamp: by the server's clock the call was signed {when}; at most "
            f"{_OLDEST_SECONDS} s are allowed. Set the device's clock",
        )


def _unauthenticated(details: str) -> FleetError:
    return FleetError(grpc.StatusCode.UNAUTHENTICATED, details)


def _check_version(stated: object) -> None:
    """Refuse a SuperNode that states an unsupported release of Flower."""
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


# -----------------------------------------------------------------------------
# Raceme's own calls, which its devices make beside Flower's.
#
# A device greets the server before it goes online. A SuperLink does not know the greeting, and then
# the device uses Flower's calls. `Next` waits at the server for a message and returns all of it;
# `Send` sends a complete reply: two calls per update. Like all calls they are signed.
# -----------------------------------------------------------------------------


SERVICE = "raceme.Fleet"
GREET, NEXT, SEND = "Greet", "Next", "Send"
GREET_PATH = "/v1/raceme/greet"
"""Path of the greeting of a server over HTTP; the other calls are made over gRPC only."""
PROTOCOL = 2
"""Version of the protocol, raised whenever calls or their content change: messages, settings,
replies."""
SINCE = "0.2.0"
"""The first release that has this protocol."""
LONGEST_WAIT = 15.0
"""Longest wait of `Next` in seconds; routers drop connections that are idle for more than about a
minute."""
LATENCY = 1.0
"""Latency in seconds for which the time limits of connections are made; on a slower network they
are proportionally longer."""
LARGEST = 1024 * 1024
"""Maximum size of the arrays of a message in one call, which must fit through a slow link. A larger
message is sent as Flower's objects, which can be repeated one by one."""

LARGEST_CALL = 2**31 - 1
"""Maximum size of a call, given by gRPC and protocol buffers."""
LONGEST_HEAD = 1000
"""Maximum size of the fields of a call, without its body."""
LONGEST_ID = 128
"""Maximum length of a device's id, whose characters JSON may escape."""
_LONGEST_VERSION = 40


# Cached, since evaluating the annotations takes longer than the rest of a call.
_hints = cache(get_type_hints)


class _CallFields:
    """Fields of a call as JSON, then a zero byte and a body."""

    def to_bytes(self) -> bytes:
        """Return the fields as JSON, a zero byte, and the body."""
        stated = dict(vars(self))
        body: bytes = stated.pop("body", b"")
        return json.dumps(stated).encode() + b"\0" + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a record; fields of later versions are ignored.

        Raises
        ------
        ValueError
            The bytes are no such record.
        """
        head, _, body = data.partition(b"\0")
        read = json.loads(head.decode()) if len(head) < LONGEST_HEAD else None
        stated = {**read, "body": body} if isinstance(read, dict) else {}
        kinds = _hints(cast(Any, cls))
        # Fields with defaults are missing in earlier versions.
        stated = {name: stated.get(name, vars(cls).get(name)) for name in kinds}
        if any(type(stated[name]) is not kind for name, kind in kinds.items()):
            raise ValueError(f"no {cls.__name__}")
        return cls(**stated)


@dataclass(frozen=True)
class Greeting(_CallFields):
    """Greeting of a device, or the server's answer to it.

    Attributes
    ----------
    protocol : int
        Version of the calls below; server and device must have the same.
    version : str
        Version of the Raceme package, for messages only.
    digest : str
        SHA-256 of its code; empty if not stated.
    device : str
        From a device, its configured id; from a server, the id of the device's key. Empty if there
        is none.
    """

    protocol: int
    version: str
    digest: str = ""
    device: str = ""

    def difference(self, own: Greeting) -> str:
        """Return the difference of the other side's code, in words; empty if there is none."""
        if self.version != own.version:
            version = self.version[:_LONGEST_VERSION]
            return f"raceme {version}, this is {own.version}: both have protocol {PROTOCOL}"
        if "" not in (self.digest, own.digest) and self.digest != own.digest:
            return f"raceme {own.version}, but with different code: install the same on both sides"
        return ""


@cache
def own_greeting() -> Greeting:
    """Return the greeting of this process."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return Greeting(PROTOCOL, __version__, digest.hexdigest())


@dataclass(frozen=True)
class NextRequest(_CallFields):
    """Request of a node for its next message.

    Attributes
    ----------
    patience : float
        Longest wait for a message, in seconds.
    have : str
        Id of the last message that arrived at the node; empty if there was none.
    """

    node: int
    patience: float = 0.0
    have: str = ""


@dataclass(frozen=True)
class SendRequest(_CallFields):
    """Reply of a node to a message.

    Attributes
    ----------
    asked : str
        Id of the answered message.
    body : bytes
        The encoded reply, with all its arrays.
    """

    node: int
    asked: str
    body: bytes
