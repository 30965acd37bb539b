"""Identities: verification of clients' ids by their keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from raceme.core.errors import UserError, about
from raceme.core.events import ClaimRefused
from raceme.core.files import file_stamp

log = logging.getLogger("raceme")

ON_TRUST = (
    "Devices' ids are taken on trust: any node that may connect can claim any of them, unless "
    "device-keys=FILE, which `raceme certs` writes, binds ids to keys (docs/server.md)"
)
"""Warning of a server on real devices without a list of keys."""
_EXPECTED = (
    "expected lines such as 'ecdsa-sha2-nistp384 AAAA… kitchen', a public key and the id of its "
    "device, as `raceme certs` writes them"
)


class ForeignIdError(Exception):
    """A node states an id that does not belong to its key; the message names the right one.

    Attributes
    ----------
    client_id : str
        The id that the node claims.
    """

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id

    def report(self, time: float, node_id: int) -> ClaimRefused:
        """Log the refusal and return its event."""
        log.warning("A client is refused: %s", self, extra=about(self.client_id))
        return ClaimRefused(time, node_id, self.client_id, str(self))


class Identities(Protocol):
    """Verifies the ids that nodes state."""

    def check(self, node_id: int, client_id: str) -> None:
        """Verify a node's stated id.

        Parameters
        ----------
        node_id : int
            An online node.
        client_id : str
            The id that it states.

        Raises
        ------
        ForeignIdError
            The id belongs to another client.
        """

    def renewed(self) -> bool:
        """Return whether to greet refused nodes again."""


class NodeInfo(Protocol):
    """The needed part of Flower's node information."""

    node_id: int
    public_key: bytes


class Nodes(Protocol):
    """A grid that knows its nodes' keys."""

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are online."""


class BoundToKeys:
    """Binds keys to ids by a file.

    Flower's SuperLink exchanges messages with a node only in calls signed with the node's private
    key, registered or not, and passes the public key to the server app. The check does not rely on
    statements of the device, so there is nothing to replay.

    A changed file is read again at the next check of the fleet.

    Parameters
    ----------
    path : Path
        File of public keys with ids; see :func:`read_device_keys`.
    nodes : Nodes
        Grid with the public keys of online nodes.

    Raises
    ------
    UserError
        The file is unreadable or invalid.
    """

    def __init__(self, path: Path, nodes: Nodes) -> None:
        self._path, self._nodes = path, nodes
        self._file = WatchedFile(path, read_device_keys, "keys")
        self._keys: dict[int, bytes | None] = {}
        self._missed = False

    def check(self, node_id: int, client_id: str) -> None:
        """Compare the id with the one bound to the node's key.

        A node without an id is admitted by its number if its key is in the file.
        """
        if node_id not in self._keys:
            # A node's key never changes.
            self._keys = {
                node.node_id: _der(serialization.load_pem_public_key, node.public_key)
                for node in self._nodes.get_nodes()
            }
        if node_id not in self._keys:
            # Its key is unknown because it just went offline; check again later.
            self._missed = True
            raise ForeignIdError(client_id, f"node {node_id} was gone before its key was known")
        key = self._keys[node_id]
        holder = None if key is None else self._file.content.get(key)
        if holder is None:
            raise ForeignIdError(
                client_id,
                f"node {node_id} says it is '{client_id}', but its key is none of those in "
                f"{self._path.name}",
            )
        if client_id not in (holder, f"node-{node_id}"):
            raise ForeignIdError(
                client_id,
                f"node {node_id} says it is '{client_id}', but its key is that of '{holder}'",
            )

    def renewed(self) -> bool:
        """Read a changed file again; return whether refused nodes should be greeted again."""
        missed, self._missed = self._missed, False
        return self._file.renewed() or missed


class KeyHolders:
    """Returns the id that a file binds to a public key (PEM), or an empty text.

    A changed file is read again at the next call.

    Parameters
    ----------
    path : Path
        File of public keys with ids; see :func:`read_device_keys`.
    """

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile(path, read_device_keys, "keys")

    def __call__(self, public_key: bytes) -> str:
        """Return the id of a key."""
        self._file.renewed()
        key = _der(serialization.load_pem_public_key, public_key)
        return "" if key is None else self._file.content.get(key, "")


def read_device_keys(path: Path) -> dict[bytes, str]:
    """Read the ids of keys.

    Parameters
    ----------
    path : Path
        One line per key in OpenSSH's format: type, key, device id. A device may have several keys.
        Empty lines and lines that begin with ``#`` are ignored.

    Returns
    -------
    dict[bytes, str]
        Key, in DER format, to id.

    Raises
    ------
    UserError
        The file is unreadable or empty, a line is invalid, or a key has two ids.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"device-keys: {path} cannot be read: {reason}.") from None
    ids: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        kind, encoded, name = (*line.split(maxsplit=2), "", "")[:3]
        key = _der(serialization.load_ssh_public_key, f"{kind} {encoded}".encode())
        if key is None or not name.strip().isprintable() or not name.strip():
            raise UserError(f"device-keys: line {number} of {path} is not a key: {_EXPECTED}.")
        if ids.setdefault(key, name.strip()) != name.strip():
            raise UserError(
                f"device-keys: line {number} of {path} gives the key of '{ids[key]}' to "
                f"'{name.strip()}' too: each device needs one of its own."
            )
    if not ids:
        raise UserError(f"device-keys: there is no key in {path}: {_EXPECTED}.")
    return ids


def _der(load: Callable[[bytes], object], text: bytes) -> bytes | None:
    """Return an elliptic-curve key in DER format; None for a simulated node without a key."""
    try:
        key = load(text)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return None
    der, info = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(der, info)


_Content = TypeVar("_Content")


class WatchedFile(Generic[_Content]):
    """A file that is read again when it has changed.

    While a changed file cannot be read, e.g. in the middle of a write, the former content applies.
    """

    def __init__(self, path: Path, read: Callable[[Path], _Content], what: str) -> None:
        self._path, self._read, self._what = path, read, what
        self._stamp, self.content = file_stamp(path), read(path)

    def renewed(self) -> bool:
        """Read the file again if it has changed; return whether its content is new."""
        stamp = file_stamp(self._path)
        if stamp is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.content = self._read(self._path)
        except UserError as error:
            log.warning("%s The former %s stay in use.", error, self._what)
            return False
        return True
