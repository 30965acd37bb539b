"""Who a client may say that it is: on trust, or as its key says."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from raceme.config.errors import UserError
from raceme.protocol.events import ClaimRefused

log = logging.getLogger("raceme")

_EXPECTED = (
    "expected lines such as 'ecdsa-sha2-nistp384 AAAA… kitchen', a public key and the id of its "
    "device, as `raceme certs` writes them"
)
_Stamp = tuple[int, int, int]


class ForeignIdError(Exception):
    """A node states an id that is not that of its key; the message says whose it is.

    Attributes
    ----------
    client_id : str
        What it states.
    """

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id

    def report(self, time: float, node_id: int) -> ClaimRefused:
        """Return what is reported of it, and say it."""
        log.warning("A client is refused: %s", self)
        return ClaimRefused(time, node_id, self.client_id, str(self))


class Identities(Protocol):
    """Says whether a node is who it says."""

    def check(self, node_id: int, client_id: str) -> None:
        """Compare what a node states with what is known of it.

        Parameters
        ----------
        node_id : int
            The node, of those that are online.
        client_id : str
            Who it says it is.

        Raises
        ------
        ForeignIdError
            It is not.
        """
        ...

    def renewed(self) -> bool:
        """Return whether nodes that were refused are to be asked again."""
        ...


class OnTrust:
    """Believes everybody: for a simulation, and for devices that nobody has registered."""

    def check(self, node_id: int, client_id: str) -> None:
        """Believe it."""

    def renewed(self) -> bool:
        """Return False: nobody is refused."""
        return False


class NodeInfo(Protocol):
    """What Flower's grids say about a node, as far as it is needed here."""

    node_id: int
    public_key: bytes


class Nodes(Protocol):
    """A grid that knows its nodes' keys."""

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are online."""
        ...


class BoundToKeys:
    """Lets each key stand for one id, by a file.

    Flower's SuperLink hands a node its messages, and takes its replies, only by calls that are
    signed with the private key of the node, whether keys must be registered or not; it tells a
    server app the public one. Nothing that a device says decides which key it has, and there is
    nothing that could be sent again.

    A file that changes is read again when the next look at the fleet comes.

    Parameters
    ----------
    path : Path
        The file: see :func:`read_device_keys`.
    nodes : Nodes
        The grid.

    Raises
    ------
    UserError
        The file cannot be read, or holds something else.
    """

    def __init__(self, path: Path, nodes: Nodes) -> None:
        self._path, self._nodes = path, nodes
        self._stamp = _stamp_of(path)
        self._ids = read_device_keys(path)
        self._keys: dict[int, bytes | None] = {}
        self._missed = False

    def check(self, node_id: int, client_id: str) -> None:
        """Compare the id with that of the node's key.

        A node whose app states no id is taken in by its number, if its key is in the file.
        """
        if node_id not in self._keys:
            # The key of a node never changes.
            self._keys = {node.node_id: _key_of(node) for node in self._nodes.get_nodes()}
        if node_id not in self._keys:
            # Its key is not known only because it went offline: it may be back by the next look.
            self._missed = True
            raise ForeignIdError(client_id, f"node {node_id} was gone before its key was known")
        key = self._keys[node_id]
        holder = None if key is None else self._ids.get(key)
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
        """Read the file again if it has changed; return whether it has, or a node was missed."""
        missed, self._missed = self._missed, False
        stamp = _stamp_of(self._path)
        if stamp is None or stamp == self._stamp:
            return missed
        self._stamp = stamp
        try:
            self._ids = read_device_keys(self._path)
        except UserError as error:
            # It may be that it is just being written.
            log.warning("%s The keys known so far count.", error)
            return missed
        return True


def read_device_keys(path: Path) -> dict[bytes, str]:
    """Read which key belongs to which device.

    Parameters
    ----------
    path : Path
        A line for each key as in OpenSSH's public keys: its type, the key, the device's id. One
        device may have several. Empty lines, and those that begin with ``#``, say nothing.

    Returns
    -------
    dict[bytes, str]
        Key, in DER format, to id.

    Raises
    ------
    UserError
        It cannot be read, a line is something else, a key is there for two ids, or there is none.
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
        key = _public_key(f"{kind} {encoded}".encode())
        if key is None or not name.strip().isprintable() or not name.strip():
            raise UserError(f"device-keys: line {number} of {path} is none: {_EXPECTED}.")
        if ids.setdefault(key, name.strip()) != name.strip():
            raise UserError(
                f"device-keys: line {number} of {path} gives the key of '{ids[key]}' to "
                f"'{name.strip()}' too: each device needs one of its own."
            )
    if not ids:
        raise UserError(f"device-keys: there is no key in {path}: {_EXPECTED}.")
    return ids


def _public_key(text: bytes) -> bytes | None:
    """Return an elliptic-curve key, given as OpenSSH writes it, in DER format."""
    try:
        key = load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return _der(key) if isinstance(key, ec.EllipticCurvePublicKey) else None


def _key_of(node: NodeInfo) -> bytes | None:
    """Return a node's key in DER format; None if it has none, as in a simulation."""
    try:
        key = load_pem_public_key(node.public_key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return _der(key) if isinstance(key, ec.EllipticCurvePublicKey) else None


def _der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _stamp_of(path: Path) -> _Stamp | None:
    """Return what tells one state of a file from another; None if it is not there just now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
